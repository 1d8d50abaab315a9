//! One dimension of a grid after the other, with chunks pipelined through the dimensions.
//!
//! An all_reduce of a chunk is a reduce_scatter in each dimension in turn, each on the result of
//! the previous one, followed by all_gathers in reverse order. With C chunks, one can be in the
//! second dimension while the next is in the first; [`themis`](super::themis) computes this
//! schedule. `per-dimension:C` uses the same dimension order for all chunks; `themis:C` balances
//! the load of the dimensions.
//!
//! **Streams.** Each chunk here is a *piece* of every chunk of the parent module: part *i* of the
//! vector belongs to rank *i* for every algorithm, so the parts are split into C pieces, and a
//! stream takes one piece of each. Streams touch disjoint memory. The rounds of the steps are one
//! legal order for a rank that executes them sequentially. If several streams are in flight at
//! once, only a stream's own steps and the queue of each dimension order them.
//!
//! After a set of dimensions a rank is responsible for the chunks that agree with it in those
//! coordinates; after all of them, for its own.
//!
//! In the formulas *P* is the number of ranks, *N* the bytes of the whole vector, *D* the sum over
//! dimensions of their rounds: size − 1 by ring, 1 direct, log₂ size by halving. The order of
//! summation is canonical if all dimensions have size 2 or are halved, and all chunks use the same
//! dimension order.

use super::counts::around_in_grid;
use super::definition::{AlgorithmDef, Counted, Hints, PARTS, Symmetric};
use super::grid::{DimAlgorithm, Grid, GridDimension};
use super::step::{Chunks, Combine, Step, StepList};
use super::themis::{ChunkOrder, Visit};
use super::{Algorithm, CollectiveError, NameError, Pattern, has_steps};

/// Number in messages.
pub const NUMBER: u8 = 253;
/// Maximum number of chunks that are pipelined through the dimensions of a grid.
pub const MAX_CHUNKS: u32 = 256;

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "per-dimension",
    number: NUMBER,
    suggested: None,
    kinds: PARTS,
    is_canonical: |p| {
        let Some((grid, _, order)) = parameters(p) else { return false };
        let keeps = |d: &GridDimension| d.size <= 2 || d.way == DimAlgorithm::Halving;
        order == ChunkOrder::Baseline && grid.dimensions().iter().all(keeps)
    },
    check: |p| check(p).map_err(CollectiveError::Unfit),
    rounds: |p| p.visits().into_iter().map(|visit| visit.rounds.end).max().unwrap_or(0),
    steps: |p, me| {
        parameters(p)
            .map_or_else(Vec::new, |(grid, chunks, _)| steps(&grid, &p.visits(), chunks, me))
    },
    counted: Counted::AllIfSmall,
    edges: |p| {
        let grid = parameters(p).map(|(grid, ..)| grid);
        around_in_grid(grid.iter().flat_map(Grid::dimensions).map(|d| d.size))
    },
    hints: Hints { symmetric: Symmetric::None, ..AlgorithmDef::BASE.hints },
    ..AlgorithmDef::BASE
};

fn parameters(p: &Pattern) -> Option<(Grid, u32, ChunkOrder)> {
    match p.algorithm {
        Algorithm::PerDimension { chunks, order, grid } => Some((grid?, chunks, order)),
        _ => None,
    }
}

fn check(p: &Pattern) -> Result<(), String> {
    let Pattern { algorithm, ranks, .. } = *p;
    let Algorithm::PerDimension { chunks, grid, .. } = algorithm else { return Ok(()) };
    if !(1..=MAX_CHUNKS).contains(&chunks) {
        return Err(format!("there can be from 1 to {MAX_CHUNKS} chunks, not {chunks}"));
    }
    let Some(grid) = grid else {
        return Err(format!(
            "{algorithm} needs to know the dimensions of the {ranks} ranks; name a cluster, or write \
             them after a slash, such as {algorithm}/{ranks}r"
        ));
    };
    if grid.ranks() != u64::from(ranks) {
        let places = grid.ranks();
        return Err(format!(
            "a grid of {grid} has {places} places, but the group has {ranks} ranks"
        ));
    }
    if !grid.is_possible() {
        return Err(format!(
            "a grid of {grid} cannot be halved: h needs a power of two and at most {} dimensions; \
             use r or d",
            Grid::MAX_WITH_HALVING
        ));
    }
    Ok(())
}

/// Parses a per-dimension algorithm; `None` if the text names another algorithm.
pub(super) fn parse(text: &str) -> Option<Result<Algorithm, NameError>> {
    let (words, grid) = match text.split_once('/') {
        Some((words, grid)) => (words, Some(grid)),
        None => (text, None),
    };
    let (name, parameter) = match words.split_once(':') {
        Some((name, parameter)) => (name, Some(parameter)),
        None => (words, None),
    };
    let (order, chunks) = match (name, parameter) {
        ("per-dimension", None) => (ChunkOrder::Baseline, Some(1)),
        ("per-dimension", Some(chunks)) => (ChunkOrder::Baseline, chunks.parse().ok()),
        ("themis", chunks) => (ChunkOrder::Themis, chunks.and_then(|chunks| chunks.parse().ok())),
        _ => return None,
    };
    let wrong = |needs| Some(Err(NameError::Parameter { text: text.to_owned(), needs }));
    let Some(chunks) = chunks.filter(|chunks| (1..=MAX_CHUNKS).contains(chunks)) else {
        return wrong("a number of chunks from 1 to 256, such as themis:16");
    };
    match grid.map(Grid::parse) {
        None => Some(Ok(Algorithm::PerDimension { chunks, order, grid: None })),
        Some(Some(grid)) => Some(Ok(Algorithm::PerDimension { chunks, order, grid: Some(grid) })),
        Some(None) => wrong(
            "the sizes of its dimensions after the slash, each with r (ring), d (direct) or h \
             (halving), such as per-dimension:4/8hx16r; leave the slash out to take them from the \
             cluster",
        ),
    }
}

/// Steps of one rank: those of all visits, each in its rounds.
///
/// Rounds D for one chunk (2D for all_reduce), at most C·D (2C·D) for C; bytes sent and received
/// per rank N(P−1)/P (twice that); fan-in at most the sum over dimensions of 1, or size − 1 where
/// direct. Chunks: P.
pub fn steps(grid: &Grid, visits: &[Visit], chunks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if let Some(place) = GridPosition::of(grid, me) {
        for visit in visits {
            place.visit(visit, chunks, &mut script);
        }
    }
    script.sorted()
}

/// Steps of rank `me` in one visit, with rounds counted from 0.
pub fn visit_steps(grid: &Grid, visit: &Visit, chunks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if let Some(place) = GridPosition::of(grid, me) {
        let length = visit.rounds.end - visit.rounds.start;
        place.visit(&Visit { rounds: 0..length, ..visit.clone() }, chunks, &mut script);
    }
    script.sorted()
}

/// Position of a rank in a grid.
struct GridPosition<'g> {
    grid: &'g Grid,
    /// One coordinate per dimension.
    coordinates: Vec<u32>,
}

impl<'g> GridPosition<'g> {
    fn of(grid: &'g Grid, me: u32) -> Option<Self> {
        let ranks = u32::try_from(grid.ranks()).ok()?;
        let mut rest = me;
        let coordinates = grid.dimensions().iter().map(|d| {
            let here = rest % d.size;
            rest /= d.size;
            here
        });
        let coordinates = coordinates.collect();
        has_steps(ranks, me).then_some(Self { grid, coordinates })
    }

    fn visit(&self, visit: &Visit, pieces: u32, script: &mut StepList) {
        let along = Along { place: self, visit, pieces };
        match (self.grid.dimensions()[visit.dimension].way, visit.gathers) {
            (DimAlgorithm::Ring, false) => along.ring(script, 1, Combine::Reduce),
            (DimAlgorithm::Ring, true) => along.ring(script, 0, Combine::Replace),
            (DimAlgorithm::Direct, false) => along.direct_scatter(script),
            (DimAlgorithm::Direct, true) => along.direct_gather(script),
            (DimAlgorithm::Halving, false) => along.halve(script),
            (DimAlgorithm::Halving, true) => along.double(script),
        }
    }

    /// Rank with the same coordinates except `coordinate` in `dimension`.
    fn rank_at(&self, dimension: usize, coordinate: u32) -> u32 {
        let (mut rank, mut below) = (0, 1);
        for (index, d) in self.grid.dimensions().iter().enumerate() {
            let here = if index == dimension { coordinate } else { self.coordinates[index] };
            rank += here * below;
            below *= d.size;
        }
        rank
    }
}

/// A visit from the view of one rank.
struct Along<'a> {
    place: &'a GridPosition<'a>,
    visit: &'a Visit,
    pieces: u32,
}

impl Along<'_> {
    fn here(&self) -> (GridDimension, u32) {
        let dimension = self.visit.dimension;
        (self.place.grid.dimensions()[dimension], self.place.coordinates[dimension])
    }

    fn round(&self, index: u32) -> u32 {
        self.visit.rounds.start + index
    }

    fn peer(&self, coordinate: u32) -> u32 {
        self.place.rank_at(self.visit.dimension, coordinate)
    }

    /// This visit's piece of the chunks owned by certain ranks: those that match this rank's
    /// coordinates in the scattered dimensions and are congruent to `coordinate` modulo `modulus`
    /// in this dimension.
    fn chunks(&self, coordinate: u32, modulus: u32) -> Chunks {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        let (mut first, mut below) = (0, 1);
        for (index, d) in self.place.grid.dimensions().iter().enumerate() {
            let (start, step) = if index == self.visit.dimension {
                (coordinate % modulus, modulus)
            } else if self.visit.scattered.contains(&index) {
                (self.place.coordinates[index], d.size)
            } else {
                (0, 1)
            };
            first += start * below;
            let (count, apart) = (d.size / step, step * below);
            match runs.last_mut() {
                Some((length, every)) if *length * *every == apart => *length *= count,
                _ if count > 1 => runs.push((count, apart)),
                _ => {}
            }
            below *= d.size;
        }
        let chunks = match runs[..] {
            [] => Chunks::one(first),
            [(count, apart)] => Chunks::spaced(first, count, apart),
            [(width, step), (count, stride), ..] => {
                debug_assert_eq!(runs.len(), 2, "`Grid::is_possible` refuses more");
                Chunks { width, step, ..Chunks::spaced(first, count, stride) }
            }
        };
        chunks.piece(self.visit.chunk, self.pieces)
    }

    fn one(&self, coordinate: u32) -> Chunks {
        self.chunks(coordinate, self.here().0.size)
    }

    /// Around the ring: in round *k* sends the part of the rank *k* + `behind` places behind.
    fn ring(&self, script: &mut StepList, behind: u32, how: Combine) {
        let (GridDimension { size, .. }, mine) = self.here();
        for k in 0..size - 1 {
            let gone = (mine + 2 * size - behind - k) % size;
            let come = (gone + size - 1) % size;
            script.send(self.round(k), self.peer((mine + 1) % size), self.one(gone));
            script.recv(self.round(k), self.peer((mine + size - 1) % size), self.one(come), how);
        }
    }

    fn direct_scatter(&self, script: &mut StepList) {
        let (GridDimension { size, .. }, mine) = self.here();
        for other in (1..size).map(|k| (mine + k) % size) {
            script.send(self.round(0), self.peer(other), self.one(other));
        }
        for other in (1..size).map(|k| (mine + size - k) % size) {
            script.recv(self.round(0), self.peer(other), self.one(mine), Combine::Reduce);
        }
    }

    fn direct_gather(&self, script: &mut StepList) {
        let (GridDimension { size, .. }, mine) = self.here();
        for other in (1..size).map(|k| (mine + k) % size) {
            script.send(self.round(0), self.peer(other), self.one(mine));
        }
        for other in (1..size).map(|k| (mine + size - k) % size) {
            script.recv(self.round(0), self.peer(other), self.one(other), Combine::Replace);
        }
    }

    fn halve(&self, script: &mut StepList) {
        let (GridDimension { size, .. }, mine) = self.here();
        for k in 0..size.ilog2() {
            let (bit, modulus) = (1 << k, 2 << k);
            let peer = self.peer(mine ^ bit);
            script.send(self.round(k), peer, self.chunks(mine ^ bit, modulus));
            script.recv(self.round(k), peer, self.chunks(mine, modulus), Combine::Reduce);
        }
    }

    fn double(&self, script: &mut StepList) {
        let (GridDimension { size, .. }, mine) = self.here();
        let steps = size.ilog2();
        for k in 0..steps {
            let (bit, modulus) = (1 << (steps - 1 - k), 2 << (steps - 1 - k));
            let peer = self.peer(mine ^ bit);
            script.send(self.round(k), peer, self.chunks(mine, modulus));
            script.recv(self.round(k), peer, self.chunks(mine ^ bit, modulus), Combine::Replace);
        }
    }
}
