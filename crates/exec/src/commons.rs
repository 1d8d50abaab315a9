//! Memory that all ranks of a process share, and change without locks (Recht et al., NIPS 2011).
//!
//! Every f32 is an atomic that is read and written by itself, in no order with others: no read is torn, no
//! program is undefined, and that is all that is promised. Two steps that change the same weight at the same
//! moment may leave only one of them, and a copy may have some weights from before a step and some from after.

use paceline_kernels::arena::{ArenaError, Span};
use paceline_plan::program::{Plan, Program};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What the programs of a plan call shared.
#[derive(Debug)]
pub(crate) struct Commons {
    /// The address of its first byte.
    base: u64,
    words: Box<[AtomicU32]>,
    /// By bucket: how many steps were made.
    steps: Box<[AtomicU64]>,
}

impl Commons {
    /// What the ranks of a plan share, all zero; none if they share nothing.
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

    /// Its size.
    pub(crate) fn bytes(&self) -> u64 {
        4 * self.words.len() as u64
    }

    /// Whether a span lies here.
    pub(crate) fn holds(&self, span: Span) -> bool {
        span.offset >= self.base && span.len > 0
    }

    /// What stands in a span.
    pub(crate) fn words(&self, span: Span) -> Result<Words<'_>, ArenaError> {
        let bytes = self.bytes();
        let outside = || ArenaError::OutOfBounds { index: 0, span, bytes };
        let start = span.offset.checked_sub(self.base).ok_or_else(outside)? / 4;
        let words = usize::try_from(start).ok().and_then(|start| self.words.get(start..));
        let words = words.and_then(|words| words.get(..(span.len / 4) as usize));
        words.map(Words).ok_or_else(outside)
    }

    /// How many steps of a bucket were made.
    pub(crate) fn steps(&self, bucket: usize) -> u64 {
        self.steps.get(bucket).map_or(0, |steps| steps.load(Ordering::Relaxed))
    }

    /// Counts a step of a bucket; how many were made before it.
    pub(crate) fn count(&self, bucket: usize) -> u64 {
        self.steps.get(bucket).map_or(0, |steps| steps.fetch_add(1, Ordering::Relaxed))
    }
}

/// Numbers that others may change at any time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words<'a>(&'a [AtomicU32]);

impl<'a> Words<'a> {
    /// Some of them.
    pub(crate) fn part(self, at: Range<usize>) -> Self {
        Self(&self.0[at])
    }

    /// Copies them as they now are.
    pub(crate) fn read(self, into: &mut [f32]) {
        for (value, word) in into.iter_mut().zip(self.0) {
            *value = f32::from_bits(word.load(Ordering::Relaxed));
        }
    }

    /// Overwrites them, whatever others have made of them meanwhile.
    pub(crate) fn write(self, values: &[f32]) {
        for (value, word) in values.iter().zip(self.0) {
            word.store(value.to_bits(), Ordering::Relaxed);
        }
    }

    /// Moves them as far as it is from `before` to `after`. What nobody has changed since it was `before` is
    /// then `after` to the bit.
    pub(crate) fn shift(self, before: &[f32], after: &[f32]) {
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

    fn commons(words: usize) -> Commons {
        let words = std::iter::repeat_with(AtomicU32::default).take(words).collect();
        Commons { base: 64, words, steps: Box::default() }
    }

    #[test]
    fn a_shift_is_exact_alone_and_adds_up_with_others() {
        let commons = commons(4);
        let words = commons.words(Span { offset: 72, len: 8 }).unwrap();
        let mut now = [0.0; 2];
        words.write(&[0.1, 3.0e7]);
        // Alone, also where the difference cannot be told exactly.
        words.shift(&[0.1, 3.0e7], &[-7.3, 0.3]);
        words.read(&mut now);
        assert_eq!(now, [-7.3, 0.3]);
        // Somebody was there first: both moves count.
        words.write(&[1.0, 2.0]);
        words.shift(&[0.0, 2.0], &[0.5, 2.5]);
        words.read(&mut now);
        assert_eq!(now, [1.5, 2.5]);
        for (offset, len) in [(72, 16), (0, 8), (80, 4)] {
            assert!(commons.words(Span { offset, len }).is_err(), "{len} at {offset}");
        }
    }

    /// Threads that add to the same number lose some of it and tear nothing: what stands there is always one
    /// of the sums that can come about.
    #[test]
    fn what_threads_leave_is_a_sum_of_some_of_their_steps() {
        const STEPS: u32 = 2000;
        let commons = commons(1);
        let words = commons.words(Span { offset: 64, len: 4 }).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut now = [0.0];
                    for _ in 0..STEPS {
                        words.read(&mut now);
                        assert!(now[0].fract() == 0.0 && now[0] <= 4.0 * STEPS as f32);
                        words.shift(&now, &[now[0] + 1.0]);
                    }
                });
            }
        });
        let mut end = [0.0];
        words.read(&mut end);
        assert!(end[0].fract() == 0.0 && (1.0..=4.0 * STEPS as f32).contains(&end[0]), "{end:?}");
    }
}
