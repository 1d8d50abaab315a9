//! Order in which each chunk visits the dimensions, and priority among chunks that wait for the
//! same one.
//!
//! A pipelined collective splits its vector into chunks that visit the dimensions of a grid one
//! after the other. Each dimension serves one chunk at a time: while one chunk is in the second
//! dimension the next is in the first. With the same order for all chunks, the dimension with the
//! most traffic relative to its rate is always busy and the others wait.
//!
//! **Themis** (Rashidi, Won, Srinivasan, Sridharan and Krishna, "Themis: A Network Bandwidth-Aware
//! Collective Scheduling Policy for Distributed Training of DL Models", ISCA 2022, algorithm 1)
//! gives each chunk its own order. The first dimension that a chunk visits carries most of it; each
//! further one carries less, by the product of the sizes of the previous ones. The dimension with
//! the least load so far therefore goes first. Gathers run in reverse order. While loads differ by
//! less than a small chunk would add, the order stays that of the dimensions.

use super::CollectiveKind;
use super::grid::{DimAlgorithm, Grid};
use std::ops::Range;

/// Policy that chooses the dimension order of each chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ChunkOrder {
    /// Same order for all chunks: up the dimensions, then down again.
    Baseline,
    /// Order by the loads that earlier chunks left in each dimension.
    Themis,
}

/// One chunk's visit to one dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    /// Index of the chunk.
    pub chunk: u32,
    /// Index of the grid's dimension.
    pub dimension: usize,
    /// True if the visit gathers parts; otherwise it reduces and scatters them.
    pub gathers: bool,
    /// Dimensions in which the chunk is scattered at the start of the visit (end, if it gathers).
    pub scattered: Vec<usize>,
    /// Rounds of the visit if every rank executes its steps sequentially.
    pub rounds: Range<u32>,
}

/// All visits, in order of their start; in each dimension that is the order of its queue.
///
/// Among the chunks that wait for a dimension, baseline serves the first to arrive. Themis serves
/// the one with the least work there, so that it moves on to keep other dimensions busy (section
/// 4.3 of the paper). Times follow from the grid's rates. A rank that sends round by round follows
/// the same order in rounds.
pub fn visits(kind: CollectiveKind, grid: &Grid, order: ChunkOrder, chunks: u32) -> Vec<Visit> {
    let mut routes: Vec<_> = orders(grid, order, chunks)
        .into_iter()
        .map(|order| Route { stages: stages(kind, &order), at: 0, ready: 0.0, ready_round: 0 })
        .collect();
    let dimensions = grid.dimensions();
    let mut free = vec![(0.0f64, 0u32); dimensions.len()];
    let mut all = Vec::new();
    while let Some((chunk, start)) = next(grid, order, &routes, &free) {
        let route = &mut routes[chunk];
        let Stage { dimension, gathers, ref scattered } = route.stages[route.at];
        let first = route.ready_round.max(free[dimension].1);
        let last = first + dimensions[dimension].way.rounds(dimensions[dimension].size);
        let end = start + load(grid, dimension, scattered);
        all.push(Visit {
            chunk: chunk as u32,
            dimension,
            gathers,
            scattered: scattered.clone(),
            rounds: first..last,
        });
        (route.ready, route.ready_round) = (end, last);
        free[dimension] = (end, last);
        route.at += 1;
    }
    all
}

/// Chunk that can start its next visit first, and its start time.
fn next(
    grid: &Grid,
    order: ChunkOrder,
    routes: &[Route],
    free: &[(f64, u32)],
) -> Option<(usize, f64)> {
    let mut best: Option<(usize, f64, f64)> = None;
    for (index, route) in routes.iter().enumerate() {
        let Some(stage) = route.stages.get(route.at) else { continue };
        let start = route.ready.max(free[stage.dimension].0);
        let rank = match order {
            ChunkOrder::Baseline => route.ready,
            ChunkOrder::Themis => load(grid, stage.dimension, &stage.scattered),
        };
        if best.is_none_or(|(_, at, other)| start < at || start == at && rank < other) {
            best = Some((index, start, rank));
        }
    }
    best.map(|(index, start, _)| (index, start))
}

/// Progress of a chunk through its stages.
struct Route {
    stages: Vec<Stage>,
    at: usize,
    ready: f64,
    ready_round: u32,
}

struct Stage {
    dimension: usize,
    gathers: bool,
    scattered: Vec<usize>,
}

/// A scatter in each dimension in order, gathers in reverse order, or both.
fn stages(kind: CollectiveKind, order: &[usize]) -> Vec<Stage> {
    let stage = |gathers| {
        move |at: usize| Stage { dimension: order[at], gathers, scattered: order[..at].to_vec() }
    };
    let (up, down) = (0..order.len(), (0..order.len()).rev());
    match kind {
        CollectiveKind::ReduceScatter => up.map(stage(false)).collect(),
        CollectiveKind::AllGather => down.map(stage(true)).collect(),
        _ => up.map(stage(false)).chain(down.map(stage(true))).collect(),
    }
}

/// Order of dimensions in which each chunk is scattered.
pub(super) fn orders(grid: &Grid, order: ChunkOrder, chunks: u32) -> Vec<Vec<usize>> {
    let count = grid.dimensions().len();
    let baseline: Vec<usize> = (0..count).collect();
    if order == ChunkOrder::Baseline {
        return vec![baseline; chunks as usize];
    }
    let mut loads = vec![0.0f64; count];
    let mut orders = Vec::with_capacity(chunks as usize);
    for _ in 0..chunks {
        let mut order = baseline.clone();
        let least = (0..count).fold(0, |a, b| if loads[b] < loads[a] { b } else { a });
        let most = loads.iter().fold(0.0, |a: f64, &b| a.max(b));
        // The paper's threshold: the load that 1/16 of a chunk adds to the least loaded dimension.
        if most - loads[least] >= load(grid, least, &[]) / 16.0 {
            order.sort_by(|&a, &b| loads[a].total_cmp(&loads[b]));
        }
        for at in 0..count {
            loads[order[at]] += load(grid, order[at], &order[..at]);
        }
        orders.push(order);
    }
    orders
}

/// Duration of a visit in arbitrary units: the amount a rank sends of a chunk of size 1, over the
/// rate of its links (equation 1 of the paper, without latencies).
fn load(grid: &Grid, dimension: usize, scattered: &[usize]) -> f64 {
    let all = grid.dimensions();
    let before: f64 = scattered.iter().map(|&d| f64::from(all[d].size)).product();
    let here = all[dimension];
    let size = f64::from(here.size);
    // With a link per pair, each link carries one part.
    let links = if here.way == DimAlgorithm::Direct { size - 1.0 } else { 1.0 };
    (size - 1.0) / size / before / (f64::from(here.rate) * links.max(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(text: &str) -> Grid {
        Grid::parse(text).unwrap()
    }

    #[test]
    fn baseline_goes_up_and_down() {
        let visits = visits(CollectiveKind::AllReduce, &grid("4rx2r"), ChunkOrder::Baseline, 1);
        let order: Vec<_> = visits.iter().map(|v| (v.dimension, v.gathers)).collect();
        assert_eq!(order, [(0, false), (1, false), (1, true), (0, true)]);
        let rounds: Vec<_> = visits.iter().map(|v| v.rounds.clone()).collect();
        assert_eq!(rounds, [0..3, 3..4, 4..5, 5..8]);
    }

    #[test]
    fn chunks_follow_each_other_through_the_dimensions() {
        let visits = visits(CollectiveKind::ReduceScatter, &grid("4rx4r"), ChunkOrder::Baseline, 3);
        let at = |chunk, dimension| {
            let mut all = visits.iter();
            all.find(|v| (v.chunk, v.dimension) == (chunk, dimension)).unwrap().rounds.clone()
        };
        assert_eq!((at(0, 0), at(1, 0), at(2, 0)), (0..3, 3..6, 6..9));
        assert_eq!((at(0, 1), at(1, 1), at(2, 1)), (3..6, 6..9, 9..12));
    }

    /// Equal dimensions: with one order for all, the first moves four times as much as the second.
    /// With alternating orders, both move the same.
    #[test]
    fn themis_balances_what_baseline_leaves_uneven() {
        let grid = grid("4rx4r");
        let sums = |order: ChunkOrder| {
            let mut sums = [0.0; 2];
            for order in orders(&grid, order, 64) {
                for at in 0..2 {
                    sums[order[at]] += load(&grid, order[at], &order[..at]);
                }
            }
            sums
        };
        let [first, second] = sums(ChunkOrder::Baseline);
        assert!((first / second - 4.0).abs() < 1e-9);
        let [first, second] = sums(ChunkOrder::Themis);
        assert!((first / second - 1.0).abs() < 0.05, "{first} {second}");
    }

    /// If rates decrease exactly as the vector does, nothing is left to balance.
    #[test]
    fn themis_keeps_the_order_of_a_balanced_grid() {
        let grid = grid("4rx4r@4x1");
        let orders = orders(&grid, ChunkOrder::Themis, 8);
        assert!(orders.iter().all(|order| order == &[0, 1]), "{orders:?}");
    }

    #[test]
    fn a_dimension_serves_one_chunk_at_a_time() {
        for (text, order) in [("4rx2dx8h", ChunkOrder::Themis), ("3rx5r", ChunkOrder::Baseline)] {
            let visits = visits(CollectiveKind::AllReduce, &grid(text), order, 7);
            for (i, a) in visits.iter().enumerate() {
                for b in &visits[..i] {
                    let apart = a.rounds.start >= b.rounds.end || b.rounds.start >= a.rounds.end;
                    assert!(apart || (a.dimension != b.dimension && a.chunk != b.chunk));
                }
            }
        }
    }
}
