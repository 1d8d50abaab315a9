//! Choice between one thread and all of them for an operator, by its measured times.
//!
//! A helper costs a hand-over, and the data that moves between the caches of two cores. A virtual
//! machine's cores are threads of its host, which moves them: a hand-over takes tens of nanoseconds
//! while cores share a cache, hundreds or thousands elsewhere, and far more once a helper sleeps. So
//! an operator is timed both ways, and again from time to time. The choice changes no bit of a
//! result, see [`super`].

use super::Pool;
use std::time::{Duration, Instant};

/// Times of one operator, and what follows from them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choice {
    calls: u32,
    together: Mean,
    alone: Mean,
}

/// Operator that is being timed.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    began: Instant,
    alone: bool,
}

/// Running mean of seconds; the last ten or so samples count.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    seconds: f64,
    samples: u32,
}

impl Mean {
    /// Adds a sample; one in which a thread lost its core does not count in full.
    fn add(&mut self, seconds: f64) {
        self.samples = self.samples.saturating_add(1);
        let share = 1.0 / f64::from(self.samples.min(10));
        let most = if self.samples == 1 { seconds } else { 4.0 * self.seconds };
        self.seconds += share * (seconds.min(most) - self.seconds);
    }
}

/// Number of first calls on all threads; the very first, with cold caches, is not counted.
const FIRST: u32 = 3;

/// Number of calls after these on one thread.
const SECOND: u32 = 2;

/// Operators longer than this gain from every thread, wherever the cores are.
const LONG: f64 = 1e-3;

/// Every so many calls, an operator that gains from all threads runs on one.
const AGAIN: u32 = 512;

/// In the first part of every period, all operators run on all threads: then helpers are awake, as
/// they would be if all operators chose them.
const PERIOD: Duration = Duration::from_millis(150);
const TRIAL: Duration = Duration::from_millis(3);

impl Choice {
    /// Returns true if the next call should run on one thread.
    fn is_alone(&self, trial: bool) -> bool {
        let (calls, long) = (self.calls, self.together.seconds > LONG);
        if calls < FIRST || (long && self.alone.samples == 0) {
            return false;
        }
        if calls < FIRST + SECOND {
            return true;
        }
        if self.alone.seconds <= self.together.seconds { !trial } else { calls % AGAIN == 0 }
    }

    fn learn(&mut self, alone: bool, took: Duration) {
        if self.calls > 0 {
            let mean = if alone { &mut self.alone } else { &mut self.together };
            mean.add(took.as_secs_f64());
        }
        self.calls = match self.calls.checked_add(1) {
            Some(calls) => calls,
            None => FIRST + SECOND,
        };
    }
}

impl Pool {
    /// Begins an operator: until [`Pool::end`], kernels run on all threads or on the calling one,
    /// whichever was faster so far.
    pub fn begin(&self, choice: &Choice) -> Option<Timing> {
        if self.helpers.is_empty() {
            return None;
        }
        let began = Instant::now();
        let into = (began - self.created).as_nanos() % PERIOD.as_nanos();
        let alone = choice.is_alone(into < TRIAL.as_nanos());
        self.set_alone(alone);
        Some(Timing { began, alone })
    }

    /// Ends an operator.
    pub fn end(&self, timing: Option<Timing>, choice: &mut Choice) {
        if let Some(Timing { began, alone }) = timing {
            self.set_alone(false);
            choice.learn(alone, began.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Share of calls on one thread, of an operator that takes these microseconds.
    fn share_alone(choice: &mut Choice, together: u64, alone: u64) -> f64 {
        let calls = 4096;
        let mut count = 0;
        for call in 0..calls {
            let one = choice.is_alone(call % 50 == 0);
            count += u32::from(one);
            choice.learn(one, Duration::from_micros(if one { alone } else { together }));
        }
        f64::from(count) / f64::from(calls)
    }

    #[test]
    fn an_operator_runs_where_it_was_faster_and_follows_the_cores() {
        let mut choice = Choice::default();
        assert!(share_alone(&mut choice, 30, 20) > 0.95, "the cores are far from each other");
        assert!(share_alone(&mut choice, 12, 20) < 0.2, "they are near now");
        assert!(share_alone(&mut choice, 30, 20) > 0.95, "and far again");
    }

    #[test]
    fn long_operators_are_never_run_on_one_thread() {
        assert_eq!(share_alone(&mut Choice::default(), 1500, 2900), 0.0);
    }

    #[test]
    fn a_lost_core_does_not_change_the_choice() {
        let mut choice = Choice::default();
        share_alone(&mut choice, 12, 20);
        choice.learn(false, Duration::from_millis(50));
        assert!(!choice.is_alone(false));
    }

    #[test]
    fn kernels_of_an_operator_on_one_thread_do_not_leave_it() {
        let pool = Pool::new(std::num::NonZeroUsize::new(3).unwrap()).unwrap();
        let mut choice = Choice { calls: FIRST, ..Choice::default() };
        let timing = pool.begin(&choice);
        let here = std::thread::current().id();
        pool.for_each(50, |_| assert_eq!(std::thread::current().id(), here));
        pool.end(timing, &mut choice);
        assert_eq!((choice.calls, choice.alone.samples), (FIRST + 1, 1));
        // Afterwards helpers take part again: tiles that wait for each other end.
        let met = std::sync::Barrier::new(2);
        pool.for_each(2, |_| _ = met.wait());
    }
}
