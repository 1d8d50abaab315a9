//! The `[measured]` table as text; every number reads back as the same bits.

use super::super::measured::{
    Aged, CollectiveTable, CopyRate, Exchange, KernelTable, Measured, Sample, Temperatures, Wire,
};
use super::quoted;
use std::fmt::Write;

pub(super) fn write(out: &mut String, measured: &Measured) -> std::fmt::Result {
    let Measured {
        cores,
        threads,
        apart,
        per_op,
        per_exchange,
        per_token,
        memory,
        kernels,
        aging,
        uneven,
        wires,
    } = measured;
    writeln!(out, "\n# Times are in seconds, rates in bytes a second.\n[measured]")?;
    writeln!(out, "cores = {cores}\nper_op = {:?}", per_op.0)?;
    writeln!(out, "per_exchange = {:?}\nper_token = {:?}", per_exchange.0, per_token.0)?;
    if let Some(threads) = threads {
        writeln!(out, "threads = {threads}")?;
    }
    if let Some(apart) = apart {
        writeln!(out, "apart = {:?}", apart.0)?;
    }
    writeln!(out, "copies = [")?;
    for CopyRate { bytes, alone, together } in &memory.copies {
        let (bytes, alone, together) = (bytes.0, alone.0, together.0);
        writeln!(out, "  {{ bytes = {bytes}, alone = {alone:?}, together = {together:?} }},")?;
    }
    writeln!(out, "]")?;
    writeln!(out, "uneven = {uneven:?}")?;
    if !aging.is_empty() {
        writeln!(out, "aging = [")?;
        for Aged { bytes, alone, together, wires, small, large } in aging {
            let bytes = bytes.0;
            write!(out, "  {{ bytes = {bytes}, alone = {alone:?}, together = {together:?}, ")?;
            writeln!(out, "wires = {wires:?}, small = {small:?}, large = {large:?} }},")?;
        }
        writeln!(out, "]")?;
    }
    kernels.iter().try_for_each(|table| kernel(out, table))?;
    wires.iter().try_for_each(|table| wire(out, table))
}

fn kernel(out: &mut String, table: &KernelTable) -> std::fmt::Result {
    let KernelTable { name, dtype, threads, samples } = table;
    writeln!(out, "\n[[measured.kernel]]\nname = {}\ndtype = \"{dtype}\"", quoted(name))?;
    writeln!(out, "threads = {threads}\nsamples = [")?;
    for Sample { shape, work, alone, together } in samples {
        let pair = |t: &Temperatures| format!("[{:?}, {:?}]", t.warm.0, t.cold.0);
        let (alone, together) = (pair(alone), pair(together));
        writeln!(
            out,
            "  {{ shape = {shape:?}, work = {work:?}, alone = {alone}, together = {together} }},"
        )?;
    }
    writeln!(out, "]")
}

fn wire(out: &mut String, wire: &Wire) -> std::fmt::Result {
    let Wire { transport, messages, collectives } = wire;
    writeln!(out, "\n[[measured.wire]]\ntransport = {}", quoted(transport))?;
    exchanges(out, "messages", messages)?;
    for CollectiveTable { kind, algorithm, ranks, times } in collectives {
        writeln!(out, "\n[[measured.wire.collective]]\nkind = \"{kind}\"")?;
        writeln!(out, "algorithm = \"{algorithm}\"\nranks = {ranks}")?;
        exchanges(out, "times", times)?;
    }
    Ok(())
}

fn exchanges(out: &mut String, key: &str, entries: &[Exchange]) -> std::fmt::Result {
    writeln!(out, "{key} = [")?;
    for Exchange { bytes, time, cold, crowded } in entries {
        write!(out, "  {{ bytes = {}, time = {:?}", bytes.0, time.0)?;
        for (key, time) in [("cold", cold), ("crowded", crowded)] {
            time.iter().try_for_each(|time| write!(out, ", {key} = {:?}", time.0))?;
        }
        writeln!(out, " }},")?;
    }
    writeln!(out, "]")
}
