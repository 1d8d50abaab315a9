//! Computations of recommendation models.

use crate::device::cpu::kernel::Clicks;
use crate::device::cpu::operands::Operands;
use crate::rank_coords::{RankCoords, ShardIndex};
use crate::shard::{ElementRun, runs_of};
use paceline_kernels::embedding_bag::{self, HeldRows, Lookups};
use paceline_kernels::interaction::{self, Shape};
use paceline_kernels::pool::Pool;
use paceline_kernels::{Element, Write};
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

/// Runs a kernel on its operands. `rate` is the learning rate of row updates.
pub(in crate::device::cpu) fn run<T: Element, G: Element>(
    kernel: Clicks,
    pool: &Pool,
    on: &Operands<'_>,
    tables: &TablesHeld,
    (rate, mode): (f32, Write),
) {
    let lookups = |tables: u64, each: u64, width: u64| Lookups {
        tables: tables as usize,
        each: each as usize,
        width: width as usize,
    };
    match kernel {
        Clicks::EmbeddingBag { tables: count, lookups: each, width } => {
            let (shape, ids) = (lookups(count, each, width), on.ids(0));
            // A replica has the lookups of all samples, and may need the sums of its own only.
            let own = on.output_rows(0).rows * shape.tables * shape.each;
            let skipped = if own < ids.len() { tables.replicas.index as usize * own } else { 0 };
            let ids = &ids[skipped..skipped + own];
            embedding_bag::sum_rows(pool, shape, &tables.held, ids, on.param(0), on.output::<T>(0));
        }
        Clicks::EmbeddingBagWeight { tables: count, lookups: each, width } => {
            let shape = lookups(count, each, width);
            let (gradients, ids, table) = (on.input::<T>(0), on.ids(1), on.gradient::<G>(0));
            embedding_bag::add_rows(pool, shape, &tables.held, gradients, ids, table, mode);
        }
        Clicks::StepRows { tables: count, lookups: each, width } => {
            let shape = lookups(count, each, width);
            let (gradients, ids, table) = (on.input::<T>(0), on.ids(1), on.gradient(0));
            embedding_bag::step_rows(shape, rate, &tables.held, gradients, ids, table);
        }
        Clicks::Interact { tables: count, parts } => {
            let (shape, place) = interaction_shape(tables, on.output_rows(0).rows, count, parts);
            let (x, sums) = (on.input::<T>(0), on.input(1));
            interaction::forward(pool, shape, place, x, sums, on.output(0));
        }
        Clicks::InteractInput { tables: count, parts } => {
            let (shape, place) = interaction_shape(tables, on.rows(0).rows, count, parts);
            let (dy, x, sums) = (on.input::<T>(0), on.input(1), on.input(2));
            let gradients = (on.output(0), on.output(1));
            interaction::input_gradient(shape, place, dy, x, sums, gradients);
        }
    }
}

/// Shape of a feature interaction, and a function for the offset of a sample's vector of a table:
/// in table order, or as sent by its holder.
fn interaction_shape(
    tables: &TablesHeld,
    samples: usize,
    count: u64,
    parts: u32,
) -> (Shape, impl Fn(usize, usize) -> usize + Sync + '_) {
    let (count, width) = (count as usize, tables.width);
    let place = move |sample: usize, table: usize| {
        if parts == 1 {
            return (sample * count + table) * width;
        }
        let TableSlot { rank, slot, .. } = tables.seats[table];
        ((rank as usize * samples + sample) * tables.slots + slot as usize) * width
    };
    (Shape { samples, tables: count, width }, place)
}
