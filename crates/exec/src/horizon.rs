//! How far all ranks go.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The agreement of all ranks on the last iteration.
///
/// A rank may not stop at an iteration that another has begun: the other would wait for it for
/// ever. So the first rank to see the wish to stop draws the line after what any rank has begun.
#[derive(Debug)]
pub(crate) struct Horizon<'a> {
    stop: &'a AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// How many iterations the run has.
    end: u32,
    /// How many of them some rank has begun.
    begun: u32,
    stopped: bool,
}

impl<'a> Horizon<'a> {
    /// A run of so many iterations, unless `stop` is set before.
    pub(crate) fn new(iterations: u32, stop: &'a AtomicBool) -> Self {
        Self { stop, state: Mutex::new(State { end: iterations, begun: 0, stopped: false }) }
    }

    /// Whether an iteration, counted from 0, takes place. Ranks ask for one after the other.
    pub(crate) fn begin(&self, iteration: u32) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if self.stop.load(Ordering::Relaxed) && state.begun < state.end {
            state.end = state.begun;
            state.stopped = true;
        }
        let takes_place = iteration < state.end;
        if takes_place {
            state.begun = state.begun.max(iteration + 1);
        }
        takes_place
    }

    /// Whether the run was cut short.
    pub(crate) fn stopped(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_lag_behind_still_run_what_others_have_begun() {
        let stop = AtomicBool::new(false);
        let horizon = Horizon::new(10, &stop);
        assert!((0..3).all(|i| horizon.begin(i)));
        stop.store(true, Ordering::Relaxed);
        // One rank has begun iteration 2; another that has yet to begin 1 must follow to the end of 2.
        assert!(horizon.begin(1) && horizon.begin(2));
        assert!(!horizon.begin(3));
        assert!(horizon.stopped());
    }

    #[test]
    fn a_wish_to_stop_after_the_last_iteration_stops_nothing() {
        let stop = AtomicBool::new(false);
        let horizon = Horizon::new(1, &stop);
        assert!(horizon.begin(0));
        stop.store(true, Ordering::Relaxed);
        assert!(!horizon.begin(1));
        assert!(!horizon.stopped());
    }

    #[test]
    fn a_run_may_be_stopped_before_it_begins() {
        let horizon_stop = AtomicBool::new(true);
        let horizon = Horizon::new(5, &horizon_stop);
        assert!(!horizon.begin(0));
        assert!(horizon.stopped());
    }
}
