//! Shared weights: memory that all ranks of a process share and update without locks (Recht et al.,
//! NIPS 2011).
//!
//! Every f32 is an atomic that is read and written on its own with relaxed ordering. No read is
//! torn and there is no undefined behaviour; nothing else is guaranteed. Two concurrent steps on
//! the same weight may leave only one of them, and a copy may mix weights from before and after a
//! step.

use paceline_kernels::arena::{ArenaError, Span};
use paceline_plan::program::{Plan, Program};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Memory that the programs of a plan declare as shared.
#[derive(Debug)]
pub(crate) struct SharedWeights {
    /// Address of the first byte.
    base: u64,
    words: Box<[AtomicU32]>,
    /// Number of steps made on each bucket.
    steps: Box<[AtomicU64]>,
}

impl SharedWeights {
    /// Allocates the shared memory of a plan, all zero; `None` if the ranks share nothing.
    pub(crate) fn of(plan: &Plan) -> Result<Option<Self>, ArenaError> {
        let shares = |program: &&Program| program.memory.shared().0 > 0;
        let Some(program) = plan.programs.iter().find(shares) else { return Ok(None) };
        let bytes = program.memory.shared().0;
        let refused = || ArenaError::OutOfMemory { bytes };
        let count = usize::try_from(bytes / 4).map_err(|_| refused())?;
        let mut words = Vec::new();
        words.try_reserve_exact(count).map_err(|_| refused())?;
        words.resize_with(count, AtomicU32::default);
        let base = program.memory.total().0 + program.memory.stored().0;
        let steps = program.buckets.iter().map(|_| AtomicU64::default()).collect();
        Ok(Some(Self { base, words: words.into(), steps }))
    }

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        4 * self.words.len() as u64
    }

    /// Returns true if a span is located in the shared memory.
    pub(crate) fn holds(&self, span: Span) -> bool {
        span.offset >= self.base && span.len > 0
    }

    /// Elements of a span.
    pub(crate) fn words(&self, span: Span) -> Result<AtomicSlice<'_>, ArenaError> {
        let bytes = self.bytes();
        let outside = || ArenaError::OutOfBounds { index: 0, span, bytes };
        let start = span.offset.checked_sub(self.base).ok_or_else(outside)? / 4;
        let words = usize::try_from(start).ok().and_then(|start| self.words.get(start..));
        let words = words.and_then(|words| words.get(..(span.len / 4) as usize));
        words.map(AtomicSlice).ok_or_else(outside)
    }

    /// Number of steps made on a bucket.
    pub(crate) fn steps(&self, bucket: usize) -> u64 {
        self.steps.get(bucket).map_or(0, |steps| steps.load(Ordering::Relaxed))
    }

    /// Counts a step on a bucket. Returns the number of steps before it.
    pub(crate) fn count(&self, bucket: usize) -> u64 {
        self.steps.get(bucket).map_or(0, |steps| steps.fetch_add(1, Ordering::Relaxed))
    }
}

/// Elements that other threads may change at any time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AtomicSlice<'a>(&'a [AtomicU32]);

impl<'a> AtomicSlice<'a> {
    /// Subrange of the elements.
    pub(crate) fn part(self, at: Range<usize>) -> Self {
        Self(&self.0[at])
    }

    /// Copies the current values.
    pub(crate) fn read(self, into: &mut [f32]) {
        for (value, word) in into.iter_mut().zip(self.0) {
            *value = f32::from_bits(word.load(Ordering::Relaxed));
        }
    }

    /// Overwrites the values, discarding concurrent changes.
    pub(crate) fn write(self, values: &[f32]) {
        for (value, word) in values.iter().zip(self.0) {
            word.store(value.to_bits(), Ordering::Relaxed);
        }
    }

    /// Adds the difference between `after` and `before`. An element that still equals `before`
    /// becomes exactly `after`.
    pub(crate) fn add_delta(self, before: &[f32], after: &[f32]) {
        for ((word, &before), &after) in self.0.iter().zip(before).zip(after) {
            let now = f32::from_bits(word.load(Ordering::Relaxed));
            let moved = if now == before { after } else { now + (after - before) };
            word.store(moved.to_bits(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared_weights(words: usize) -> SharedWeights {
        let words = std::iter::repeat_with(AtomicU32::default).take(words).collect();
        SharedWeights { base: 64, words, steps: Box::default() }
    }

    #[test]
    fn a_shift_is_exact_alone_and_adds_up_with_others() {
        let shared_weights = shared_weights(4);
        let words = shared_weights.words(Span { offset: 72, len: 8 }).unwrap();
        let mut now = [0.0; 2];
        words.write(&[0.1, 3.0e7]);
        // Without concurrent changes, also where the difference is not exactly representable.
        words.add_delta(&[0.1, 3.0e7], &[-7.3, 0.3]);
        words.read(&mut now);
        assert_eq!(now, [-7.3, 0.3]);
        // After a concurrent change, both deltas count.
        words.write(&[1.0, 2.0]);
        words.add_delta(&[0.0, 2.0], &[0.5, 2.5]);
        words.read(&mut now);
        assert_eq!(now, [1.5, 2.5]);
        for (offset, len) in [(72, 16), (0, 8), (80, 4)] {
            assert!(shared_weights.words(Span { offset, len }).is_err(), "{len} at {offset}");
        }
    }

    /// Threads that add to the same number may lose updates but never tear a value: the result is
    /// always the sum of some of the steps.
    #[test]
    fn what_threads_leave_is_a_sum_of_some_of_their_steps() {
        const STEPS: u32 = 2000;
        let shared_weights = shared_weights(1);
        let words = shared_weights.words(Span { offset: 64, len: 4 }).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut now = [0.0];
                    for _ in 0..STEPS {
                        words.read(&mut now);
                        assert!(now[0].fract() == 0.0 && now[0] <= 4.0 * STEPS as f32);
                        words.add_delta(&now, &[now[0] + 1.0]);
                    }
                });
            }
        });
        let mut end = [0.0];
        words.read(&mut end);
        assert!(end[0].fract() == 0.0 && (1.0..=4.0 * STEPS as f32).contains(&end[0]), "{end:?}");
    }
}
