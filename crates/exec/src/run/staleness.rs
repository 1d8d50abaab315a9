//! Steps of other ranks on shared weights that a rank misses.

use paceline_plan::staleness::{Staleness, StalenessCounter};

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
