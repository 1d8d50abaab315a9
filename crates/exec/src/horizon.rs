//! How far all ranks go.

use crate::control::{LEADER, Subject, hear, say};
use crate::serve::{Leave, Question};
use paceline_comm::{CommError, Transport};
use paceline_plan::ids::Rank;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The agreement of all ranks on the last iteration.
///
/// A rank may not stop at an iteration that another has begun: the other would wait for it for
/// ever. So whoever sees the wish to stop draws the line after what any rank may have begun.
#[derive(Debug)]
pub(crate) enum Horizon<'a> {
    /// Among threads, which look at the same memory.
    Common(Common<'a>),
    /// Among processes, which are told by the leader.
    Led(Led<'a>),
    /// Among replicas that wait for nobody, which ask a server.
    Asked(Asked<'a>),
    /// Among threads that wait for nobody.
    Dealt(Dealt<'a>),
}

impl Horizon<'_> {
    /// Whether an iteration, counted from 0, takes place. Ranks ask for one after the other, and tell the
    /// loss and the norm that they saw in the last one.
    pub(crate) fn begin(
        &self,
        iteration: u32,
        saw: Option<[f32; 2]>,
        transport: &mut dyn Transport,
    ) -> Result<bool, CommError> {
        match self {
            Self::Common(common) => Ok(common.begin(iteration)),
            Self::Led(led) => led.begin(iteration, transport),
            Self::Asked(asked) => asked.begin(iteration, saw, transport),
            Self::Dealt(dealt) => Ok(dealt.begin(transport.rank())),
        }
    }

    /// How many iterations the run has, counted from the very first, where only its end tells.
    pub(crate) fn end(&self) -> Option<u32> {
        match self {
            Self::Common(_) | Self::Led(_) => None,
            Self::Asked(asked) => Some(asked.end.load(Ordering::Relaxed)),
            Self::Dealt(dealt) => Some(dealt.end()),
        }
    }

    /// By how many iterations the fastest rank is now ahead of the slowest, where nobody waits.
    pub(crate) fn ahead(&self) -> u32 {
        match self {
            Self::Common(_) | Self::Led(_) | Self::Asked(_) => 0,
            Self::Dealt(dealt) => dealt.ahead(),
        }
    }

    /// Whether the run was cut short.
    pub(crate) fn stopped(&self) -> bool {
        match self {
            Self::Common(common) => lock(&common.state).stopped,
            Self::Led(led) => lock(&led.state).stopped,
            Self::Asked(asked) => asked.stopped.load(Ordering::Relaxed),
            Self::Dealt(dealt) => lock(&dealt.state).stopped,
        }
    }
}

/// Leaves that the first server deals out, one for each iteration of each replica: whoever is fast runs more
/// of them.
#[derive(Debug)]
pub(crate) struct Asked<'a> {
    servers: Range<u32>,
    /// The run's first iteration.
    first: u32,
    stop: &'a AtomicBool,
    patience: Duration,
    end: AtomicU32,
    stopped: AtomicBool,
}

impl<'a> Asked<'a> {
    /// `servers` are the ranks to ask and to take leave of; `first` is the run's first iteration.
    pub(crate) fn new(
        servers: Range<u32>,
        first: u32,
        stop: &'a AtomicBool,
        patience: Duration,
    ) -> Self {
        let (end, stopped) = (AtomicU32::new(first), AtomicBool::new(false));
        Self { servers, first, stop, patience, end, stopped }
    }

    fn begin(
        &self,
        iteration: u32,
        saw: Option<[f32; 2]>,
        transport: &mut dyn Transport,
    ) -> Result<bool, CommError> {
        let (server, about) = (Rank(self.servers.start), (Subject::Leave, iteration - self.first));
        let stop = self.stop.load(Ordering::Relaxed);
        say(transport, server, about, &Question { saw, stop }.encode())?;
        let leave = hear(transport, server, about, self.patience, Leave::decode)?;
        let reason = "its leave for an iteration cannot be read";
        let leave = leave.ok_or(CommError::Failed { rank: server, reason: reason.into() })?;
        if !leave.granted {
            self.end.store(leave.iterations, Ordering::Relaxed);
            self.stopped.fetch_or(stop, Ordering::Relaxed);
            for server in self.servers.clone().skip(1).map(Rank) {
                say(transport, server, (Subject::Leave, 0), &Question::default().encode())?;
            }
        }
        Ok(leave.granted)
    }
}

/// Leaves that threads take, one for each iteration of each of them: whoever is fast runs more.
#[derive(Debug)]
pub(crate) struct Dealt<'a> {
    stop: &'a AtomicBool,
    /// The run's first iteration.
    first: u32,
    state: Mutex<Dealing>,
}

#[derive(Debug)]
struct Dealing {
    /// Leaves that there are, and how many were taken.
    leaves: u64,
    taken: u64,
    /// By rank: how many it has taken; none for one that has left.
    begun: Vec<Option<u32>>,
    stopped: bool,
}

impl<'a> Dealt<'a> {
    /// A run of so many ranks from iteration `first` to `iterations`, unless `stop` is set before.
    pub(crate) fn new(ranks: u32, first: u32, iterations: u32, stop: &'a AtomicBool) -> Self {
        let leaves = u64::from(iterations.saturating_sub(first)) * u64::from(ranks);
        let begun = vec![Some(0); ranks as usize];
        let state = Mutex::new(Dealing { leaves, taken: 0, begun, stopped: false });
        Self { stop, first, state }
    }

    fn begin(&self, rank: Rank) -> bool {
        let mut state = lock(&self.state);
        if self.stop.load(Ordering::Relaxed) && state.taken < state.leaves {
            state.leaves = state.taken;
            state.stopped = true;
        }
        let takes_place = state.taken < state.leaves;
        state.taken += u64::from(takes_place);
        if let Some(begun) = state.begun.get_mut(rank.index()) {
            *begun = begun.filter(|_| takes_place).map(|begun| begun + 1);
        }
        takes_place
    }

    fn end(&self) -> u32 {
        let state = lock(&self.state);
        self.first + (state.leaves / state.begun.len().max(1) as u64) as u32
    }

    fn ahead(&self) -> u32 {
        let state = lock(&self.state);
        let begun = || state.begun.iter().flatten();
        begun().max().zip(begun().min()).map_or(0, |(most, least)| most - least)
    }
}

/// A line that the first rank to see the wish draws after what any rank has begun.
#[derive(Debug)]
pub(crate) struct Common<'a> {
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

impl<'a> Common<'a> {
    /// A run of so many iterations, unless `stop` is set before.
    pub(crate) fn new(iterations: u32, stop: &'a AtomicBool) -> Self {
        Self { stop, state: Mutex::new(State { end: iterations, begun: 0, stopped: false }) }
    }

    pub(crate) fn begin(&self, iteration: u32) -> bool {
        let mut state = lock(&self.state);
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
}

/// Iterations that the leader grants, one ahead of those that any rank may have begun, so that no rank
/// waits for its word.
#[derive(Debug)]
pub(crate) struct Led<'a> {
    iterations: u32,
    stop: &'a AtomicBool,
    patience: Duration,
    /// By how many iterations a rank may be ahead of the leader.
    ahead: u32,
    state: Mutex<Granted>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Granted {
    /// How many iterations may take place, as far as is known.
    iterations: u32,
    /// Whether there will be no more.
    over: bool,
    stopped: bool,
    /// How many words the leader has spoken.
    words: u32,
}

impl<'a> Led<'a> {
    /// A run of so many iterations, unless the leader's `stop` is set before. Whoever waits longer
    /// than `patience` for the leader gives up. A rank may be `ahead` of the leader by so many.
    pub(crate) fn new(
        iterations: u32,
        stop: &'a AtomicBool,
        patience: Duration,
        ahead: u32,
    ) -> Self {
        Self { iterations, stop, patience, ahead, state: Mutex::default() }
    }

    fn begin(&self, iteration: u32, transport: &mut dyn Transport) -> Result<bool, CommError> {
        let mut state = lock(&self.state);
        if transport.rank() == LEADER {
            self.grant(&mut state, iteration, transport)?;
        } else {
            while iteration >= state.iterations && !state.over {
                let about = (Subject::Horizon, state.words);
                let words = state.words + 1;
                let read = |bytes: &[u8]| Granted::decode(bytes, words);
                *state = hear(transport, LEADER, about, self.patience, read)?;
            }
        }
        Ok(iteration < state.iterations)
    }

    fn grant(
        &self,
        state: &mut Granted,
        iteration: u32,
        transport: &mut dyn Transport,
    ) -> Result<(), CommError> {
        if state.over {
            return Ok(());
        }
        if self.stop.load(Ordering::Relaxed) {
            state.stopped = state.iterations < self.iterations;
            state.over = true;
        } else {
            let granted = iteration.saturating_add(2).saturating_add(self.ahead);
            state.iterations = granted.min(self.iterations);
            state.over = state.iterations == self.iterations;
        }
        for rank in (0..transport.world()).map(Rank).filter(|rank| *rank != LEADER) {
            say(transport, rank, (Subject::Horizon, state.words), &state.encode())?;
        }
        state.words += 1;
        Ok(())
    }
}

impl Granted {
    fn encode(&self) -> [u8; 6] {
        let [a, b, c, d] = self.iterations.to_le_bytes();
        [a, b, c, d, u8::from(self.over), u8::from(self.stopped)]
    }

    /// What is too short to be a word of the leader's ends the run.
    fn decode(bytes: &[u8], words: u32) -> Self {
        match *bytes {
            [a, b, c, d, over, stopped] => Self {
                iterations: u32::from_le_bytes([a, b, c, d]),
                over: over != 0,
                stopped: stopped != 0,
                words,
            },
            _ => Self { over: true, stopped: true, words, ..Self::default() },
        }
    }
}

/// A panic while the lock is held cannot leave the state half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_comm::thread::world;

    #[test]
    fn ranks_that_lag_behind_still_run_what_others_have_begun() {
        let stop = AtomicBool::new(false);
        let horizon = Common::new(10, &stop);
        assert!((0..3).all(|i| horizon.begin(i)));
        stop.store(true, Ordering::Relaxed);
        // One rank has begun iteration 2; another that has yet to begin 1 must follow to the end of 2.
        assert!(horizon.begin(1) && horizon.begin(2));
        assert!(!horizon.begin(3));
        assert!(Horizon::Common(horizon).stopped());
    }

    #[test]
    fn a_wish_to_stop_after_the_last_iteration_stops_nothing() {
        let stop = AtomicBool::new(false);
        let horizon = Common::new(1, &stop);
        assert!(horizon.begin(0));
        stop.store(true, Ordering::Relaxed);
        assert!(!horizon.begin(1));
        assert!(!Horizon::Common(horizon).stopped());
    }

    #[test]
    fn a_run_may_be_stopped_before_it_begins() {
        let stop = AtomicBool::new(true);
        let horizon = Common::new(5, &stop);
        assert!(!horizon.begin(0));
        assert!(Horizon::Common(horizon).stopped());
    }

    #[test]
    fn whoever_is_fast_takes_more_leaves_and_all_hear_of_the_same_end() {
        let stop = AtomicBool::new(false);
        let dealt = Dealt::new(2, 10, 13, &stop);
        assert!((0..4).all(|_| dealt.begin(Rank(0))) && dealt.begin(Rank(1)));
        assert_eq!(dealt.ahead(), 3);
        assert!(dealt.begin(Rank(1)) && !dealt.begin(Rank(0)));
        assert_eq!((dealt.ahead(), dealt.end()), (0, 13), "who has left is ahead of nobody");
        let dealt = Dealt::new(2, 10, 13, &stop);
        assert!((0..3).all(|_| dealt.begin(Rank(0))));
        stop.store(true, Ordering::Relaxed);
        assert!(!dealt.begin(Rank(1)) && !dealt.begin(Rank(0)));
        assert_eq!(dealt.end(), 11, "three of two ranks' leaves are one iteration and a half");
        assert!(Horizon::Dealt(dealt).stopped());
    }

    const PATIENCE: Duration = Duration::from_secs(5);

    #[test]
    fn the_leader_draws_the_line_behind_what_it_has_granted() {
        let (stop, never) = (AtomicBool::new(false), AtomicBool::new(false));
        let mut wires = world(2);
        let (mut follower, mut leader) = (wires.pop().unwrap(), wires.pop().unwrap());
        let leads = Horizon::Led(Led::new(10, &stop, PATIENCE, 0));
        let follows = Horizon::Led(Led::new(10, &never, PATIENCE, 0));
        let mut lead = |i| leads.begin(i, None, &mut leader).unwrap();
        let mut follow = |i| follows.begin(i, None, &mut follower).unwrap();
        assert!(lead(0));
        // Granted ahead: the follower need not wait for the leader's second iteration.
        assert!(follow(0) && follow(1));
        assert!(lead(1));
        stop.store(true, Ordering::Relaxed);
        assert!(lead(2), "was granted when the leader began iteration 1");
        assert!(!lead(3));
        assert!(follow(2) && !follow(3));
        assert!(leads.stopped() && follows.stopped());
    }

    #[test]
    fn all_iterations_take_place_if_nobody_wishes_otherwise() {
        let never = AtomicBool::new(false);
        let mut wires = world(2);
        let (mut follower, mut leader) = (wires.pop().unwrap(), wires.pop().unwrap());
        let [leads, follows] = [(); 2].map(|()| Horizon::Led(Led::new(3, &never, PATIENCE, 0)));
        assert!((0..3).all(|i| leads.begin(i, None, &mut leader).unwrap()));
        assert!((0..3).all(|i| follows.begin(i, None, &mut follower).unwrap()));
        assert!(
            !leads.begin(3, None, &mut leader).unwrap()
                && !follows.begin(3, None, &mut follower).unwrap()
        );
        assert!(!leads.stopped() && !follows.stopped());
    }
}
