//! Stop consensus: agreement of all ranks on the last iteration.

use crate::interpreter::serve::{Grant, GrantRequest};
use crate::run::control::{ControlTopic, LEADER, recv, send};
use paceline_comm::{CommError, Transport};
use paceline_plan::ids::Rank;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Agreement of all ranks on the last iteration.
///
/// A rank may not stop at an iteration that another has begun: the other would wait for it forever.
/// So the rank that sees the stop request sets the end after every iteration that any rank may have
/// begun.
#[derive(Debug)]
pub(crate) enum StopConsensus<'a> {
    /// Threads, through shared memory.
    Shared(SharedStop<'a>),
    /// Processes, through messages of the leader.
    Leader(LeaderStop<'a>),
    /// Asynchronous replicas, which request grants from a server.
    Server(ServerGrants<'a>),
    /// Asynchronous threads, which take grants from a shared pool.
    GrantPool(GrantPool<'a>),
}

impl StopConsensus<'_> {
    /// Returns true if an iteration, counted from 0, takes place. Ranks ask in order, and report
    /// the loss and norm of their last iteration in `saw`.
    pub(crate) fn begin(
        &self,
        iteration: u32,
        saw: Option<[f32; 2]>,
        transport: &mut dyn Transport,
    ) -> Result<bool, CommError> {
        match self {
            Self::Shared(common) => Ok(common.begin(iteration)),
            Self::Leader(led) => led.begin(iteration, transport),
            Self::Server(asked) => asked.begin(iteration, saw, transport),
            Self::GrantPool(dealt) => Ok(dealt.begin(transport.rank())),
        }
    }

    /// Total number of iterations, counted from the very first, if known only at the end.
    pub(crate) fn end(&self) -> Option<u32> {
        match self {
            Self::Shared(_) | Self::Leader(_) => None,
            Self::Server(asked) => Some(asked.end.load(Ordering::Relaxed)),
            Self::GrantPool(dealt) => Some(dealt.end()),
        }
    }

    /// Current lead of the fastest rank over the slowest in iterations, for asynchronous threads.
    pub(crate) fn ahead(&self) -> u32 {
        match self {
            Self::Shared(_) | Self::Leader(_) | Self::Server(_) => 0,
            Self::GrantPool(dealt) => dealt.ahead(),
        }
    }

    /// Returns true if the run was stopped early.
    pub(crate) fn stopped(&self) -> bool {
        match self {
            Self::Shared(common) => lock(&common.state).stopped,
            Self::Leader(led) => lock(&led.state).stopped,
            Self::Server(asked) => asked.stopped.load(Ordering::Relaxed),
            Self::GrantPool(dealt) => lock(&dealt.state).stopped,
        }
    }
}

/// Grants issued by the first server, one for each iteration of each replica: fast replicas run
/// more of them.
#[derive(Debug)]
pub(crate) struct ServerGrants<'a> {
    servers: Range<u32>,
    /// First iteration of the run.
    first: u32,
    stop: &'a AtomicBool,
    timeout: Duration,
    end: AtomicU32,
    stopped: AtomicBool,
}

impl<'a> ServerGrants<'a> {
    /// `servers` are the server ranks, of which the first grants; `first` is the first iteration.
    pub(crate) fn new(
        servers: Range<u32>,
        first: u32,
        stop: &'a AtomicBool,
        timeout: Duration,
    ) -> Self {
        let (end, stopped) = (AtomicU32::new(first), AtomicBool::new(false));
        Self { servers, first, stop, timeout, end, stopped }
    }

    fn begin(
        &self,
        iteration: u32,
        saw: Option<[f32; 2]>,
        transport: &mut dyn Transport,
    ) -> Result<bool, CommError> {
        let (server, about) =
            (Rank(self.servers.start), (ControlTopic::Grant, iteration - self.first));
        let stop = self.stop.load(Ordering::Relaxed);
        send(transport, server, about, &GrantRequest { saw, stop }.encode())?;
        let leave = recv(transport, server, about, self.timeout, Grant::decode)?;
        let reason = "malformed grant of an iteration";
        let leave = leave.ok_or(CommError::Failed { rank: server, reason: reason.into() })?;
        if !leave.granted {
            self.end.store(leave.iterations, Ordering::Relaxed);
            self.stopped.fetch_or(stop, Ordering::Relaxed);
            for server in self.servers.clone().skip(1).map(Rank) {
                send(
                    transport,
                    server,
                    (ControlTopic::Grant, 0),
                    &GrantRequest::default().encode(),
                )?;
            }
        }
        Ok(leave.granted)
    }
}

/// Grants that threads take, one for each iteration of each thread: fast threads run more.
#[derive(Debug)]
pub(crate) struct GrantPool<'a> {
    stop: &'a AtomicBool,
    /// First iteration of the run.
    first: u32,
    state: Mutex<GrantPoolState>,
}

#[derive(Debug)]
struct GrantPoolState {
    /// Total number of grants, and number taken.
    leaves: u64,
    taken: u64,
    /// Number of grants taken by each rank; `None` for a rank that has left.
    begun: Vec<Option<u32>>,
    stopped: bool,
}

impl<'a> GrantPool<'a> {
    /// Pool of `ranks` ranks from iteration `first` to `iterations`, unless `stop` is set before.
    pub(crate) fn new(ranks: u32, first: u32, iterations: u32, stop: &'a AtomicBool) -> Self {
        let leaves = u64::from(iterations.saturating_sub(first)) * u64::from(ranks);
        let begun = vec![Some(0); ranks as usize];
        let state = Mutex::new(GrantPoolState { leaves, taken: 0, begun, stopped: false });
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

/// End after all begun iterations, set by the first rank that sees the stop request.
#[derive(Debug)]
pub(crate) struct SharedStop<'a> {
    stop: &'a AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Number of iterations of the run.
    end: u32,
    /// Number of iterations that any rank has begun.
    begun: u32,
    stopped: bool,
}

impl<'a> SharedStop<'a> {
    /// Creates the state of a run of `iterations` iterations, unless `stop` is set before.
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

/// Iterations granted by the leader, one ahead of those that any rank may have begun, so that no
/// rank waits for its message.
#[derive(Debug)]
pub(crate) struct LeaderStop<'a> {
    iterations: u32,
    stop: &'a AtomicBool,
    timeout: Duration,
    /// Number of iterations that a rank may be ahead of the leader.
    ahead: u32,
    state: Mutex<Granted>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Granted {
    /// Number of iterations granted so far.
    iterations: u32,
    /// True if no more will be granted.
    over: bool,
    stopped: bool,
    /// Number of messages that the leader has sent.
    words: u32,
}

impl<'a> LeaderStop<'a> {
    /// Creates the state of a run of `iterations` iterations, unless the leader's `stop` is set
    /// before. A rank that waits longer than `timeout` for the leader fails. A rank may be `ahead`
    /// iterations ahead of the leader.
    pub(crate) fn new(
        iterations: u32,
        stop: &'a AtomicBool,
        timeout: Duration,
        ahead: u32,
    ) -> Self {
        Self { iterations, stop, timeout, ahead, state: Mutex::default() }
    }

    fn begin(&self, iteration: u32, transport: &mut dyn Transport) -> Result<bool, CommError> {
        let mut state = lock(&self.state);
        if transport.rank() == LEADER {
            self.grant(&mut state, iteration, transport)?;
        } else {
            while iteration >= state.iterations && !state.over {
                let about = (ControlTopic::Stop, state.words);
                let words = state.words + 1;
                let read = |bytes: &[u8]| Granted::decode(bytes, words);
                *state = recv(transport, LEADER, about, self.timeout, read)?;
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
            send(transport, rank, (ControlTopic::Stop, state.words), &state.encode())?;
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

    /// Decodes a message of the leader; one of the wrong length ends the run.
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

/// Locks despite poisoning: a panic under the lock cannot leave the state inconsistent.
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
        let consensus = SharedStop::new(10, &stop);
        assert!((0..3).all(|i| consensus.begin(i)));
        stop.store(true, Ordering::Relaxed);
        // One rank has begun iteration 2; one that has yet to begin 1 must finish 2.
        assert!(consensus.begin(1) && consensus.begin(2));
        assert!(!consensus.begin(3));
        assert!(StopConsensus::Shared(consensus).stopped());
    }

    #[test]
    fn a_wish_to_stop_after_the_last_iteration_stops_nothing() {
        let stop = AtomicBool::new(false);
        let consensus = SharedStop::new(1, &stop);
        assert!(consensus.begin(0));
        stop.store(true, Ordering::Relaxed);
        assert!(!consensus.begin(1));
        assert!(!StopConsensus::Shared(consensus).stopped());
    }

    #[test]
    fn a_run_may_be_stopped_before_it_begins() {
        let stop = AtomicBool::new(true);
        let consensus = SharedStop::new(5, &stop);
        assert!(!consensus.begin(0));
        assert!(StopConsensus::Shared(consensus).stopped());
    }

    #[test]
    fn whoever_is_fast_takes_more_leaves_and_all_hear_of_the_same_end() {
        let stop = AtomicBool::new(false);
        let dealt = GrantPool::new(2, 10, 13, &stop);
        assert!((0..4).all(|_| dealt.begin(Rank(0))) && dealt.begin(Rank(1)));
        assert_eq!(dealt.ahead(), 3);
        assert!(dealt.begin(Rank(1)) && !dealt.begin(Rank(0)));
        assert_eq!((dealt.ahead(), dealt.end()), (0, 13), "who has left is ahead of nobody");
        let dealt = GrantPool::new(2, 10, 13, &stop);
        assert!((0..3).all(|_| dealt.begin(Rank(0))));
        stop.store(true, Ordering::Relaxed);
        assert!(!dealt.begin(Rank(1)) && !dealt.begin(Rank(0)));
        assert_eq!(dealt.end(), 11, "three of two ranks' leaves are one iteration and a half");
        assert!(StopConsensus::GrantPool(dealt).stopped());
    }

    const TIMEOUT: Duration = Duration::from_secs(5);

    #[test]
    fn the_leader_draws_the_line_behind_what_it_has_granted() {
        let (stop, never) = (AtomicBool::new(false), AtomicBool::new(false));
        let mut wires = world(2);
        let (mut follower, mut leader) = (wires.pop().unwrap(), wires.pop().unwrap());
        let leads = StopConsensus::Leader(LeaderStop::new(10, &stop, TIMEOUT, 0));
        let follows = StopConsensus::Leader(LeaderStop::new(10, &never, TIMEOUT, 0));
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
        let [leads, follows] =
            [(); 2].map(|()| StopConsensus::Leader(LeaderStop::new(3, &never, TIMEOUT, 0)));
        assert!((0..3).all(|i| leads.begin(i, None, &mut leader).unwrap()));
        assert!((0..3).all(|i| follows.begin(i, None, &mut follower).unwrap()));
        assert!(
            !leads.begin(3, None, &mut leader).unwrap()
                && !follows.begin(3, None, &mut follower).unwrap()
        );
        assert!(!leads.stopped() && !follows.stopped());
    }
}
