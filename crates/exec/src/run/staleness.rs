//! Staleness of asynchronously applied gradients.

/// Number of updates by others that a gradient missed: those between reading the weights that it
/// was computed on and its own update.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
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
    pub(crate) fn with(self, other: Self) -> Self {
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
    pub(crate) fn over(self, replicas: u32) -> Self {
        Self { mean: self.mean / f64::from(replicas.max(1)), ..self }
    }
}

/// Counter of missed updates.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StalenessCounter {
    all: u64,
    updates: u64,
    max: u64,
    ahead: u32,
    histogram: [u32; Staleness::BINS],
}

impl StalenessCounter {
    /// Counts an update that missed `missed` others.
    pub(crate) fn count(&mut self, missed: u64) {
        self.all += missed;
        self.updates += 1;
        self.max = self.max.max(missed);
        let bin = usize::try_from(missed).map_or(Staleness::BINS, |missed| missed);
        self.histogram[bin.min(Staleness::BINS - 1)] += 1;
    }

    /// Records the lead of the fastest replica over the slowest, in iterations.
    pub(crate) fn note_ahead(&mut self, iterations: u32) {
        self.ahead = self.ahead.max(iterations);
    }

    /// Summary of all updates; `None` if there was none.
    pub(crate) fn staleness(&self) -> Option<Staleness> {
        let mean = self.all as f64 / self.updates as f64;
        let Self { max, ahead, histogram, .. } = *self;
        (self.updates > 0).then_some(Staleness { mean, max, max_lead: ahead, histogram })
    }
}

/// Tracks the steps by others on shared weights that one rank misses.
#[derive(Debug)]
pub(crate) struct StalenessTracker {
    /// Number of steps on each bucket when it was last read.
    read_at: Vec<u64>,
    missed: StalenessCounter,
}

impl StalenessTracker {
    /// Creates a tracker for `buckets` buckets.
    pub(crate) fn new(buckets: usize) -> Self {
        Self { read_at: vec![0; buckets], missed: StalenessCounter::default() }
    }

    /// Records that a bucket is read after `steps` steps.
    pub(crate) fn reads(&mut self, bucket: usize, steps: u64) {
        self.read_at[bucket] = steps;
    }

    /// Records a step on a bucket after `steps` earlier steps.
    pub(crate) fn steps(&mut self, bucket: usize, steps: u64) {
        self.missed.count(steps.saturating_sub(self.read_at[bucket]));
    }

    /// Takes the staleness since the last call; `ahead` is the current lead of the fastest replica.
    pub(crate) fn take(&mut self, ahead: u32) -> Option<Staleness> {
        let mut missed = std::mem::take(&mut self.missed);
        missed.note_ahead(ahead);
        missed.staleness()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_misses_what_came_since_its_weights_were_read() {
        let mut watch = StalenessTracker::new(2);
        assert_eq!(watch.take(0), None);
        watch.reads(0, 3);
        watch.reads(1, 3);
        watch.steps(0, 3);
        watch.steps(1, 7);
        let mut histogram = [0; Staleness::BINS];
        (histogram[0], histogram[4]) = (1, 1);
        assert_eq!(watch.take(2), Some(Staleness { mean: 2.0, max: 4, max_lead: 2, histogram }));
        watch.steps(0, 1000);
        let late = watch.take(0).unwrap();
        assert_eq!((late.max, late.histogram[Staleness::BINS - 1]), (997, 1));
        assert_eq!(
            late.with(late).over(2),
            Staleness { histogram: late.histogram.map(|n| 2 * n), ..late }
        );
        assert_eq!(watch.take(2), None);
    }
}
