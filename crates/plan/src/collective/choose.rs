//! Choice of an algorithm by time: every algorithm that a group can run is timed on its machine.

use super::resolve::{by_rounds, resolve};
use super::ring_set::RingSet;
use super::themis::ChunkOrder;
use super::torus::TorusShape;
use super::{Algorithm, Ask, CollectiveKind, Fabric, Pattern};
use crate::ids::Rank;
use std::fmt;

/// Times of collectives on a machine.
pub trait CollectiveTimes: fmt::Debug + Send + Sync {
    /// Seconds of a collective among these ranks; `None` if they are not connected.
    fn seconds(&self, pattern: &Pattern, members: &[Rank], ask: &Ask) -> Option<f64>;

    /// Least time of a round among these ranks, however little it moves.
    fn least_round(&self, members: &[Rank]) -> f64;
}

/// Numbers of chunks that pipelined algorithms are tried with.
const CHUNKS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];

/// Numbers of rings that are tried.
const RINGS: [u32; 4] = [2, 4, 8, 16];

/// Algorithms inside hosts and between them that are tried.
const LEVELS: [Algorithm; 4] =
    [Algorithm::HalvingDoubling, Algorithm::Direct, Algorithm::Tree, Algorithm::Ring];

/// Relative gain below which the algorithm of fewer rounds is kept: two that differ in rounding
/// alone must not change places between sizes.
const NEGLIGIBLE: f64 = 1e-9;

impl Fabric {
    /// The fastest algorithm that the group can run; without times, the one with the fewest rounds
    /// among those with the fewest bytes per rank.
    pub fn fastest(&self, members: &[Rank], ask: &Ask) -> Algorithm {
        let ranks = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let usual = by_rounds(ask.kind, ranks, ask.order);
        let Some(times) = self.times.as_deref().filter(|_| ranks > 1) else { return usual };
        let pattern = |algorithm| Pattern::new(ask.kind, algorithm, ask.order, ranks, 0).ok();
        let mut patterns: Vec<Pattern> =
            self.candidates(members, ask.kind).filter_map(pattern).collect();
        // Those of few rounds bound the others, most of which are then not looked at.
        patterns.sort_by_key(Pattern::rounds);
        let round = times.least_round(members);
        let time = |pattern: &Pattern| times.seconds(pattern, members, ask);
        let mut best = (usual, pattern(usual).and_then(|p| time(&p)).unwrap_or(f64::INFINITY));
        for pattern in patterns {
            if f64::from(pattern.rounds()) * round >= best.1 {
                break;
            }
            if let Some(seconds) = time(&pattern).filter(|t| *t < best.1 * (1.0 - NEGLIGIBLE)) {
                best = (pattern.algorithm(), seconds);
            }
        }
        best.0
    }

    /// Algorithms for a group on this fabric, those that only shared memory allows excepted.
    pub fn candidates(
        &self,
        members: &[Rank],
        kind: CollectiveKind,
    ) -> impl Iterator<Item = Algorithm> {
        let ranks = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let flat = Algorithm::for_any_group().filter(|&flat| flat != Algorithm::SharedMemory);
        let servers = [2, 4, 8, 16, ranks].into_iter().filter(move |&servers| servers <= ranks);
        let servers = servers.map(|servers| Algorithm::ParameterServer { servers });
        let rings = RINGS.map(|rings| Algorithm::MultiRing { rings: RingSet::new(rings) });
        let levels = LEVELS.into_iter().chain([Algorithm::InNetwork]);
        let pairs = levels.clone().flat_map(move |inner| {
            levels.clone().filter_map(move |outer| Algorithm::hierarchical(inner, outer))
        });
        let pipelined = [ChunkOrder::Baseline, ChunkOrder::Themis].into_iter().flat_map(|order| {
            CHUNKS.map(|chunks| Algorithm::PerDimension { chunks, order, grid: None })
        });
        let torus = self.torus(members).map(|shape| Algorithm::Torus { shape });
        let several = self.spanned(members) > 1;
        let layered = pairs.chain(pipelined).chain(torus).filter(move |_| several);
        let all = flat.chain(servers).chain(rings).chain([Algorithm::InNetwork]).chain(layered);
        let settled = all.filter_map(|algorithm| self.resolve(algorithm, members).ok());
        let mut settled: Vec<Algorithm> = settled
            .filter(|&algorithm| {
                resolve(kind, algorithm, ranks, super::SummationOrder::Free).is_ok()
            })
            .collect();
        settled.sort_unstable();
        settled.dedup();
        settled.into_iter()
    }

    /// The dimensions that a group fills, as a torus.
    fn torus(&self, members: &[Rank]) -> Option<TorusShape> {
        let open = Algorithm::PerDimension { chunks: 1, order: ChunkOrder::Baseline, grid: None };
        match self.resolve(open, members).ok()? {
            Algorithm::PerDimension { grid: Some(grid), .. } => {
                let sizes: Vec<u32> = grid.dimensions().iter().map(|d| d.size).collect();
                TorusShape::new(&sizes)
            }
            _ => None,
        }
    }
}
