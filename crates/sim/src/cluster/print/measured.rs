//! Printer for the `[measured]` table; every number parses back to the same bits.

use super::super::measured::{
    CacheDecay, CollectiveTable, CopyRate, ExchangeSample, KernelTable, Measured, Sample,
    TransportTable, WarmCold,
};
use super::quoted;
use std::fmt::Write;

pub(super) fn write(out: &mut String, measured: &Measured) -> std::fmt::Result {
    let Measured {
        cores,
        threads,
        core_round_trip,
        op_overhead,
        exchange_overhead,
        load_time_per_token,
        memory,
        kernels,
        cache_decay,
        rank_skew,
        transports,
    } = measured;
    writeln!(out, "\n# Times are in seconds, rates in bytes a second.\n[measured]")?;
    writeln!(out, "cores = {cores}\nop_overhead = {:?}", op_overhead.0)?;
    writeln!(out, "exchange_overhead = {:?}", exchange_overhead.0)?;
    writeln!(out, "load_time_per_token = {:?}", load_time_per_token.0)?;
    if let Some(threads) = threads {
        writeln!(out, "threads = {threads}")?;
    }
    if let Some(time) = core_round_trip {
        writeln!(out, "core_round_trip = {:?}", time.0)?;
    }
    writeln!(out, "copy_bandwidth = [")?;
    for CopyRate { bytes, solo, all_cores } in &memory.copy_bandwidth {
        let (bytes, solo, all_cores) = (bytes.0, solo.0, all_cores.0);
        writeln!(out, "  {{ bytes = {bytes}, solo = {solo:?}, all_cores = {all_cores:?} }},")?;
    }
    writeln!(out, "]")?;
    writeln!(out, "rank_skew = {rank_skew:?}")?;
    if !cache_decay.is_empty() {
        writeln!(out, "cache_decay = [")?;
        for CacheDecay { bytes, solo, all_cores, path, small_data, large_data } in cache_decay {
            let bytes = bytes.0;
            write!(out, "  {{ bytes = {bytes}, solo = {solo:?}, all_cores = {all_cores:?}, ")?;
            writeln!(
                out,
                "path = {path:?}, small_data = {small_data:?}, large_data = {large_data:?} }},"
            )?;
        }
        writeln!(out, "]")?;
    }
    kernels.iter().try_for_each(|table| kernel(out, table))?;
    transports.iter().try_for_each(|table| transport_table(out, table))
}

fn kernel(out: &mut String, table: &KernelTable) -> std::fmt::Result {
    let KernelTable { name, dtype, threads, samples } = table;
    writeln!(out, "\n[[measured.kernel]]\nname = {}\ndtype = \"{dtype}\"", quoted(name))?;
    writeln!(out, "threads = {threads}\nsamples = [")?;
    for Sample { shape, work, solo, all_cores } in samples {
        let pair = |t: &WarmCold| format!("[{:?}, {:?}]", t.warm.0, t.cold.0);
        let (solo, all_cores) = (pair(solo), pair(all_cores));
        writeln!(
            out,
            "  {{ shape = {shape:?}, work = {work:?}, solo = {solo}, all_cores = {all_cores} }},"
        )?;
    }
    writeln!(out, "]")
}

fn transport_table(out: &mut String, table: &TransportTable) -> std::fmt::Result {
    let TransportTable { name, messages, collectives } = table;
    writeln!(out, "\n[[measured.transport]]\nname = {}", quoted(name))?;
    exchanges(out, "messages", messages)?;
    for CollectiveTable { kind, algorithm, ranks, times } in collectives {
        writeln!(out, "\n[[measured.transport.collective]]\nkind = \"{kind}\"")?;
        writeln!(out, "algorithm = \"{algorithm}\"\nranks = {ranks}")?;
        exchanges(out, "times", times)?;
    }
    Ok(())
}

fn exchanges(out: &mut String, key: &str, entries: &[ExchangeSample]) -> std::fmt::Result {
    writeln!(out, "{key} = [")?;
    for ExchangeSample { bytes, warm, cold, cpu_oversubscribed } in entries {
        write!(out, "  {{ bytes = {}, warm = {:?}", bytes.0, warm.0)?;
        for (key, time) in [("cold", cold), ("cpu_oversubscribed", cpu_oversubscribed)] {
            time.iter().try_for_each(|time| write!(out, ", {key} = {:?}", time.0))?;
        }
        writeln!(out, " }},")?;
    }
    writeln!(out, "]")
}
