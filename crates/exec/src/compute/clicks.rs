//! Computations of recommendation models.

use super::operands::Operands;
use crate::kernel::Clicks;
use crate::place::{Part, Place};
use crate::shard::{Run, runs_of};
use paceline_kernels::interaction::{self, Shape};
use paceline_kernels::pool::Pool;
use paceline_kernels::tables::{self, Held, Lookups};
use paceline_kernels::{Element, Write};
use paceline_plan::lower::{Seat, assign, slots};
use paceline_plan::program::Program;
use paceline_plan::spec::{Layout, Placement};

/// What a rank holds of all tables, and who holds the others.
#[derive(Clone, Debug)]
pub(super) struct TablesHeld {
    /// By table.
    held: Vec<Option<Held>>,
    seats: Vec<Seat>,
    slots: usize,
    replicas: Part,
    width: usize,
}

impl TablesHeld {
    /// What a program's tables are to the rank at a place; none if it has no tables.
    pub(super) fn of(program: &Program, place: Place) -> Option<Self> {
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
            // The run that holds rows of this table: runs do not reach over the ends of tables unless
            // all of them are held.
            let of_run = |run: &Run| {
                let logical = run.logical?;
                let (first, last) = (logical / width, (logical + run.len) / width);
                let (from, to) = (first.max(range.start), last.min(range.end));
                (from < to).then(|| Held {
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

/// Runs a kernel on its operands. `rate` is that of the rows' steps.
pub(super) fn run<T: Element, G: Element>(
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
            // A replica knows what all samples look up, and may want the sums of its own only.
            let own = on.output_rows(0).rows * shape.tables * shape.each;
            let skipped = if own < ids.len() { tables.replicas.index as usize * own } else { 0 };
            let ids = &ids[skipped..skipped + own];
            tables::sum_rows(pool, shape, &tables.held, ids, on.param(0), on.output::<T>(0));
        }
        Clicks::EmbeddingBagWeight { tables: count, lookups: each, width } => {
            let shape = lookups(count, each, width);
            let (gradients, ids, table) = (on.input::<T>(0), on.ids(1), on.gradient::<G>(0));
            tables::add_rows(pool, shape, &tables.held, gradients, ids, table, mode);
        }
        Clicks::StepRows { tables: count, lookups: each, width } => {
            let shape = lookups(count, each, width);
            let (gradients, ids, table) = (on.input::<T>(0), on.ids(1), on.gradient(0));
            tables::step_rows(shape, rate, &tables.held, gradients, ids, table);
        }
        Clicks::Interact { tables: count, parts } => {
            let (shape, place) = meeting(tables, on.output_rows(0).rows, count, parts);
            let (x, sums) = (on.input::<T>(0), on.input(1));
            interaction::forward(pool, shape, place, x, sums, on.output(0));
        }
        Clicks::InteractInput { tables: count, parts } => {
            let (shape, place) = meeting(tables, on.rows(0).rows, count, parts);
            let (dy, x, sums) = (on.input::<T>(0), on.input(1), on.input(2));
            let gradients = (on.output(0), on.output(1));
            interaction::input_gradient(shape, place, dy, x, sums, gradients);
        }
    }
}

/// The shape of a meeting of vectors, and where a sample's vector of a table stands: in the order of
/// tables, or as its holder sent it.
fn meeting(
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
        let Seat { rank, slot, .. } = tables.seats[table];
        ((rank as usize * samples + sample) * tables.slots + slot as usize) * width
    };
    (Shape { samples, tables: count, width }, place)
}
