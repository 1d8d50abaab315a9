//! What a rank comes from when it is timed.

use super::{Layers, Sweep};

/// What ranks did before they compute or exchange something.
#[derive(Clone, Copy, Debug)]
pub enum Before<'a> {
    /// The same: all that it touches is in the cache, as far as it fits.
    Nothing,
    /// Work on so much memory of their own that the caches hold nothing else.
    Sweep(&'a Sweep),
    /// So many layers of other memory, as they compute in training.
    Layers(&'a Layers, u32),
}

impl Before<'_> {
    /// Does it on one of so many ranks that do so at once.
    pub(super) fn happens(self, rank: u32, ranks: u32) {
        match self {
            Self::Nothing => {}
            Self::Sweep(sweep) => sweep.walk(rank, ranks),
            Self::Layers(layers, count) => layers.compute(rank, count),
        }
    }

    /// How often it is to happen until caches have settled to it: how long they keep something depends on how
    /// often it was wanted before.
    pub(super) fn settles(self) -> usize {
        match self {
            Self::Nothing | Self::Sweep(_) => 0,
            Self::Layers(..) => 2,
        }
    }

    /// How many of the runs after it are to be timed, each of which takes less time than what comes before it.
    /// Whoever wants more comes again: a while later tells more about a machine than once again.
    pub(super) fn runs(self) -> usize {
        match self {
            Self::Nothing | Self::Sweep(_) => 1,
            Self::Layers(..) => 3,
        }
    }
}
