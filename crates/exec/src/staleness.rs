//! How stale gradients are that are applied as they come.

/// How many updates by others a gradient missed: those between the reading of the weights that it was computed
/// on and its own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Staleness {
    /// The mean over all updates.
    pub mean: f64,
    /// The most of any.
    pub max: u64,
    /// By how many iterations the fastest replica was ahead of the slowest at most.
    pub ahead: u32,
    /// How many updates missed so many: none, one, and so on, and at the end all that missed more.
    pub histogram: [u32; Self::BINS],
}

impl Staleness {
    /// Numbers of missed updates that are told apart.
    pub const BINS: usize = 17;

    /// Of two replicas: the means add up, and [`over`](Self::over) divides them.
    pub(crate) fn with(self, other: Self) -> Self {
        Self {
            mean: self.mean + other.mean,
            max: self.max.max(other.max),
            ahead: self.ahead.max(other.ahead),
            histogram: std::array::from_fn(|at| {
                self.histogram[at].saturating_add(other.histogram[at])
            }),
        }
    }

    /// Of so many replicas whose means were added up.
    pub(crate) fn over(self, replicas: u32) -> Self {
        Self { mean: self.mean / f64::from(replicas.max(1)), ..self }
    }
}

/// What was missed so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Missed {
    all: u64,
    updates: u64,
    max: u64,
    ahead: u32,
    histogram: [u32; Staleness::BINS],
}

impl Missed {
    /// Counts an update that missed so many.
    pub(crate) fn count(&mut self, missed: u64) {
        self.all += missed;
        self.updates += 1;
        self.max = self.max.max(missed);
        let bin = usize::try_from(missed).map_or(Staleness::BINS, |missed| missed);
        self.histogram[bin.min(Staleness::BINS - 1)] += 1;
    }

    /// Notes how far the fastest replica is ahead of the slowest.
    pub(crate) fn note_ahead(&mut self, iterations: u32) {
        self.ahead = self.ahead.max(iterations);
    }

    /// In sum; none if there was no update.
    pub(crate) fn staleness(&self) -> Option<Staleness> {
        let mean = self.all as f64 / self.updates as f64;
        let Self { max, ahead, histogram, .. } = *self;
        (self.updates > 0).then_some(Staleness { mean, max, ahead, histogram })
    }
}

/// What one rank misses of the steps that others make on shared weights.
#[derive(Debug)]
pub(crate) struct Watch {
    /// By bucket: how many steps there had been when it was last read.
    read_at: Vec<u64>,
    missed: Missed,
}

impl Watch {
    /// Over so many buckets.
    pub(crate) fn new(buckets: usize) -> Self {
        Self { read_at: vec![0; buckets], missed: Missed::default() }
    }

    /// Notes that a bucket is read after so many steps.
    pub(crate) fn reads(&mut self, bucket: usize, steps: u64) {
        self.read_at[bucket] = steps;
    }

    /// Notes that a bucket is stepped after so many steps.
    pub(crate) fn steps(&mut self, bucket: usize, steps: u64) {
        self.missed.count(steps.saturating_sub(self.read_at[bucket]));
    }

    /// What was missed since this was last asked, by a replica with others so far apart.
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
        let mut watch = Watch::new(2);
        assert_eq!(watch.take(0), None);
        watch.reads(0, 3);
        watch.reads(1, 3);
        watch.steps(0, 3);
        watch.steps(1, 7);
        let mut histogram = [0; Staleness::BINS];
        (histogram[0], histogram[4]) = (1, 1);
        assert_eq!(watch.take(2), Some(Staleness { mean: 2.0, max: 4, ahead: 2, histogram }));
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
