//! Computations of recommendation models.

use crate::device::cpu::bind::{Bound, plain};
use crate::rank_coords::{RankCoords, ShardIndex};
use crate::shard::{ElementRun, runs_of};
use paceline_kernels::Element;
use paceline_kernels::embedding_bag::{self, HeldRows, Lookups};
use paceline_kernels::interaction::{self, Shape};
use paceline_plan::graph::OpPass;
use paceline_plan::lower::{TableSlot, assign, slots};
use paceline_plan::program::Program;
use paceline_plan::spec::{Layout, Placement};

/// Table rows that a rank holds, and the holders of the others.
#[derive(Clone, Debug)]
pub(in crate::device::cpu) struct TablesHeld {
    /// Held rows by table.
    held: Vec<Option<HeldRows>>,
    seats: Vec<TableSlot>,
    slots: usize,
    replicas: ShardIndex,
    width: usize,
}

impl TablesHeld {
    /// Table rows of the rank at `place`; `None` if the program has no tables.
    pub(in crate::device::cpu) fn of(program: &Program, place: RankCoords) -> Option<Self> {
        let mut entries = program.buckets.iter().flat_map(|bucket| &bucket.entries);
        let entry = entries.find(|entry| entry.sparse)?;
        let (replicas, width) = (place.replicas, entry.dims[1]);
        let whole = matches!(entry.tp, Placement::Shard { layout: Layout::Whole, .. });
        let seats = assign(&entry.blocks, replicas.count);
        let runs = runs_of(entry, &place);
        let mut start = 0;
        let mut held = Vec::new();
        for (table, &rows) in entry.blocks.iter().enumerate() {
            let range = start..start + rows;
            // The run that holds rows of this table: runs do not span several tables unless all
            // tables are held.
            let of_run = |run: &ElementRun| {
                let logical = run.logical?;
                let (first, last) = (logical / width, (logical + run.len) / width);
                let (from, to) = (first.max(range.start), last.min(range.end));
                (from < to).then(|| HeldRows {
                    first: from - range.start,
                    rows: to - from,
                    at: run.local / width + (from - first),
                    slot: if whole { seats[table].slot as usize } else { table },
                })
            };
            held.push(runs.iter().find_map(of_run));
            start += rows;
        }
        let slots = slots(held.len() as u64, replicas.count) as usize;
        Some(Self { held, seats, slots, replicas, width: width as usize })
    }
}

/// Shape of the lookups of a sample.
pub(in crate::device::cpu) fn lookups(tables: u64, each: u64, width: u64) -> Lookups {
    Lookups { tables: tables as usize, each: each as usize, width: width as usize }
}

pub(in crate::device::cpu) fn embedding_bag<T: Element, G: Element>(
    shape: Lookups,
    pass: OpPass,
) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let (Some(tables), ids) = (&cpu.tables, on.ids(0)) else { return };
            // A replica has the lookups of all samples, and may need the sums of its own only.
            let own = on.output_rows(0).rows * shape.tables * shape.each;
            let skipped = if own < ids.len() { tables.replicas.index as usize * own } else { 0 };
            let (ids, y) = (&ids[skipped..skipped + own], on.output::<T>(0));
            embedding_bag::sum_rows(&cpu.pool, shape, &tables.held, ids, on.param(0), y);
        })),
        OpPass::BackwardInput => None,
        OpPass::BackwardWeight => Some(plain(move |cpu, on, mode| {
            let Some(tables) = &cpu.tables else { return };
            let (dy, ids, table) = (on.input::<T>(0), on.ids(1), on.gradient::<G>(0));
            embedding_bag::add_rows(&cpu.pool, shape, &tables.held, dy, ids, table, mode);
        })),
    }
}

pub(in crate::device::cpu) fn step_rows<T: Element>(shape: Lookups, pass: OpPass) -> Option<Bound> {
    match pass {
        OpPass::Forward | OpPass::BackwardInput => None,
        OpPass::BackwardWeight => Some(plain(move |cpu, on, _| {
            let Some(tables) = &cpu.tables else { return };
            let (dy, ids, table) = (on.input::<T>(0), on.ids(1), on.gradient(0));
            embedding_bag::step_rows(shape, cpu.pass.rate, &tables.held, dy, ids, table);
        })),
    }
}

pub(in crate::device::cpu) fn interact<T: Element>(
    count: usize,
    parts: u32,
    pass: OpPass,
) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let Some(tables) = &cpu.tables else { return };
            let (shape, place) = interaction_shape(tables, on.output_rows(0).rows, count, parts);
            let (x, sums) = (on.input::<T>(0), on.input(1));
            interaction::forward(&cpu.pool, shape, place, x, sums, on.output(0));
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let Some(tables) = &cpu.tables else { return };
            let (shape, place) = interaction_shape(tables, on.rows(0).rows, count, parts);
            let (dy, x, sums) = (on.input::<T>(0), on.input(1), on.input(2));
            let gradients = (on.output(0), on.output(1));
            interaction::input_gradient(shape, place, dy, x, sums, gradients);
        })),
        OpPass::BackwardWeight => None,
    }
}

/// Shape of a feature interaction, and a function for the offset of a sample's vector of a table:
/// in table order, or as sent by its holder.
fn interaction_shape(
    tables: &TablesHeld,
    samples: usize,
    count: usize,
    parts: u32,
) -> (Shape, impl Fn(usize, usize) -> usize + Sync + '_) {
    let width = tables.width;
    let place = move |sample: usize, table: usize| {
        if parts == 1 {
            return (sample * count + table) * width;
        }
        let TableSlot { rank, slot, .. } = tables.seats[table];
        ((rank as usize * samples + sample) * tables.slots + slot as usize) * width
    };
    (Shape { samples, tables: count, width }, place)
}
