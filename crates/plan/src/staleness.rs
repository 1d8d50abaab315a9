//! Staleness of asynchronously applied gradients.

use serde::Serialize;

/// Number of updates by others that a gradient missed: those between reading the weights that it
/// was computed on and its own update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Staleness {
    /// Mean over all updates.
    pub mean: f64,
    /// Maximum over all updates.
    pub max: u64,
    /// Largest lead of the fastest replica over the slowest, in iterations.
    pub max_lead: u32,
    /// Number of updates by staleness: 0, 1 and so on; the last bin counts all that missed more.
    pub histogram: [u32; Self::BINS],
}

impl Staleness {
    /// Number of histogram bins.
    pub const BINS: usize = 17;

    /// Merges two replicas: the means are added, and [`over`](Self::over) divides them.
    pub fn with(self, other: Self) -> Self {
        Self {
            mean: self.mean + other.mean,
            max: self.max.max(other.max),
            max_lead: self.max_lead.max(other.max_lead),
            histogram: std::array::from_fn(|at| {
                self.histogram[at].saturating_add(other.histogram[at])
            }),
        }
    }

    /// Divides the mean, a sum over `replicas` replicas, by their number.
    pub fn over(self, replicas: u32) -> Self {
        Self { mean: self.mean / f64::from(replicas.max(1)), ..self }
    }
}

/// Counter of missed updates.
#[derive(Clone, Copy, Debug, Default)]
pub struct StalenessCounter {
    all: u64,
    updates: u64,
    max: u64,
    ahead: u32,
    histogram: [u32; Staleness::BINS],
}

impl StalenessCounter {
    /// Counts an update that missed `missed` others.
    pub fn count(&mut self, missed: u64) {
        self.all += missed;
        self.updates += 1;
        self.max = self.max.max(missed);
        let bin = usize::try_from(missed).map_or(Staleness::BINS, |missed| missed);
        self.histogram[bin.min(Staleness::BINS - 1)] += 1;
    }

    /// Records the lead of the fastest replica over the slowest, in iterations.
    pub fn note_ahead(&mut self, iterations: u32) {
        self.ahead = self.ahead.max(iterations);
    }

    /// Summary of all updates; `None` if there was none.
    pub fn staleness(&self) -> Option<Staleness> {
        let mean = self.all as f64 / self.updates as f64;
        let Self { max, ahead, histogram, .. } = *self;
        (self.updates > 0).then_some(Staleness { mean, max, max_lead: ahead, histogram })
    }
}
