//! Cache state of a rank before it is timed.

use super::{CacheFlush, LayerLoad};

/// Work of the ranks before a timed computation or exchange.
#[derive(Clone, Copy, Debug)]
pub enum CachePrep<'a> {
    /// The same op: all that it touches is in the cache, as far as it fits.
    Warm,
    /// A walk through enough private memory that the caches hold nothing else.
    Flush(&'a CacheFlush),
    /// The given number of layers on other memory, computed as in training.
    Layers(&'a LayerLoad, u32),
}

impl CachePrep<'_> {
    /// Prepares the cache on `rank`, one of `ranks` ranks that do so at once.
    pub(super) fn run(self, rank: u32, ranks: u32) {
        match self {
            Self::Warm => {}
            Self::Flush(sweep) => sweep.walk(rank, ranks),
            Self::Layers(layers, count) => layers.compute(rank, count),
        }
    }

    /// Number of repetitions until the caches have adapted: their retention depends on how often
    /// data was touched before.
    pub(super) fn warmup_runs(self) -> usize {
        match self {
            Self::Warm | Self::Flush(_) => 0,
            Self::Layers(..) => 2,
        }
    }

    /// Number of timed runs after the warm-up, each shorter than its preparation. Callers that need
    /// more samples probe again later: samples spread over time say more about a machine.
    pub(super) fn timed_runs(self) -> usize {
        match self {
            Self::Warm | Self::Flush(_) => 1,
            Self::Layers(..) => 3,
        }
    }
}
