//! Carries what a rank's lanes have to exchange with other ranks.

use crate::error::{ExecError, Fault};
use crate::exchange::{Exchanges, Flight};
use crate::lanes::{Kind, Lanes, Started, Wait};
use crate::memory::Memory;
use paceline_comm::{Progress, Transport};
use paceline_plan::ids::{Microbatch, Rank};
use paceline_plan::program::{Op, Plan, View};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The exchanges of one rank and the wires that they go over. Whichever thread has it moves them.
pub(crate) struct Courier<'a> {
    pub(crate) transport: &'a mut dyn Transport,
    rank: Rank,
    /// Microbatches of an iteration.
    microbatches: u64,
    memory: Arc<Memory<'a>>,
    lanes: Arc<Lanes<'a>>,
    exchanges: Exchanges<'a>,
    /// By lane: what is in flight on it.
    flights: Vec<Option<InFlight<'a>>>,
    /// What it is at, while it is at something.
    at: Option<Started<'a>>,
    moved_at: Instant,
}

/// An exchange on a lane.
#[derive(Debug)]
struct InFlight<'a> {
    flight: Flight,
    started: Started<'a>,
    progress: Progress,
    wait: Wait,
}

impl<'a> Courier<'a> {
    pub(crate) fn new(
        plan: &'a Plan,
        transport: &'a mut dyn Transport,
        memory: &Arc<Memory<'a>>,
        lanes: &Arc<Lanes<'a>>,
    ) -> Self {
        let rank = transport.rank();
        let mut flights = Vec::new();
        flights.resize_with(plan.program(rank).lanes.len(), || None);
        Self {
            transport,
            rank,
            microbatches: u64::from(plan.strategy.microbatches()),
            memory: Arc::clone(memory),
            lanes: Arc::clone(lanes),
            exchanges: Exchanges::new(plan, rank),
            flights,
            at: None,
            moved_at: Instant::now(),
        }
    }

    /// Begins what may begin and moves what is in flight, without waiting; whether anything
    /// happened.
    pub(crate) fn carry(&mut self) -> Result<bool, ExecError> {
        let mut moved = false;
        loop {
            moved |= self.begin_all()?;
            let mut ended = false;
            for lane in 0..self.flights.len() {
                if let Some(in_flight) = self.flights[lane].take() {
                    moved |= self.advance(in_flight)?;
                    ended |= self.flights[lane].is_none();
                }
            }
            // What has ended may let another begin, and whoever carries may compute for long now.
            if !ended {
                break;
            }
        }
        self.at = None;
        if moved {
            self.moved_at = Instant::now();
        }
        Ok(moved)
    }

    /// Begins what may begin; whether anything may.
    fn begin_all(&mut self) -> Result<bool, ExecError> {
        let mut begun = false;
        while let Some(started) = self.lanes.start(Kind::Exchange) {
            self.at = Some(started);
            let flight = self.begin(&started).map_err(|s| self.lanes.failed(&started, s))?;
            let progress = Progress::Pending { on: self.rank, step: usize::MAX, moved: 0 };
            let in_flight = InFlight { flight, started, progress, wait: Wait::default() };
            self.flights[started.lane.index()] = Some(in_flight);
            begun = true;
        }
        Ok(begun)
    }

    /// Whether anything is in flight.
    pub(crate) fn is_under_way(&self) -> bool {
        self.flights.iter().any(Option::is_some)
    }

    /// What it is at, while it is at something: for messages about a panic.
    pub(crate) fn at(&self) -> Option<Started<'a>> {
        self.at
    }

    /// An op, in words.
    pub(crate) fn describe(&self, started: &Started<'_>) -> String {
        self.lanes.describe(started)
    }

    /// Sleeps until something may be moved, or somebody wakes it.
    pub(crate) fn sleep(&mut self, at_most: Duration) -> Result<(), ExecError> {
        self.transport.sleep(at_most).map_err(|source| self.located(source.into()))
    }

    /// Starts to count anew how long nothing has moved: the rank was busy otherwise.
    pub(crate) fn is_back(&mut self) {
        self.moved_at = Instant::now();
    }

    /// Waits until something may be moved, and gives up when nothing has for as long as `silence`.
    pub(crate) fn wait(&mut self, silence: Duration) -> Result<(), ExecError> {
        let (rank, waited) = (self.rank, self.moved_at.elapsed());
        let Some(in_flight) = self.flights.iter().flatten().next() else {
            let at = self.lanes.waiting();
            let iteration = at.map_or(1, |at| at.iteration + 1);
            let op = at.map_or_else(|| "the end".into(), |at| self.lanes.describe(&at));
            return Err(ExecError::Stuck { rank, iteration, op });
        };
        if let (Progress::Pending { on: peer, .. }, true) = (in_flight.progress, waited >= silence)
        {
            let started = &in_flight.started;
            let (iteration, op) = (started.iteration + 1, self.lanes.describe(started));
            return Err(ExecError::Silent { rank, iteration, op, peer, waited });
        }
        let patience = silence.saturating_sub(waited);
        self.transport.wait(patience).map_err(|source| self.located(source.into()))
    }

    /// A fault while waiting, at what is waited for.
    fn located(&self, source: Fault) -> ExecError {
        let at = self.flights.iter().flatten().next().map(|in_flight| in_flight.started);
        match (at.or_else(|| self.lanes.waiting()), source) {
            (Some(at), source) => self.lanes.failed(&at, source),
            (None, source) => {
                ExecError::Op { rank: self.rank, iteration: 1, op: "the end".into(), source }
            }
        }
    }

    fn begin(&mut self, started: &Started<'a>) -> Result<Flight, Fault> {
        let running = |microbatch: Microbatch| {
            u64::from(started.pass) * self.microbatches + u64::from(microbatch.0)
        };
        let data =
            |view: View, running| (self.memory.span(view, running), self.memory.dtype(view.buffer));
        match *started.op {
            Op::Send { to, channel, view, microbatch } => {
                let running = running(microbatch);
                self.exchanges.send(to, channel, data(view, running), running)
            }
            Op::Recv { from, channel, view, microbatch } => {
                let running = running(microbatch);
                self.exchanges.receive(from, channel, data(view, running), running)
            }
            Op::Collective { call, microbatch } => {
                let (running, lane) = (running(microbatch), started.lane);
                self.exchanges.collective(&self.memory, call, lane, running)
            }
            Op::Load { .. }
            | Op::Compute { .. }
            | Op::Accumulate { .. }
            | Op::Step { .. }
            | Op::Stash { .. }
            | Op::Restore { .. }
            | Op::Free { .. }
            | Op::Serve { .. } => unreachable!("only exchanges are carried"),
        }
    }

    /// Moves an exchange on; whether it moved.
    fn advance(&mut self, mut in_flight: InFlight<'a>) -> Result<bool, ExecError> {
        let InFlight { started, progress: before, mut wait, .. } = in_flight;
        self.at = Some(started);
        let asked = self.lanes.now();
        let progress = in_flight
            .flight
            .progress(self.transport, &self.memory)
            .map_err(|source| self.lanes.failed(&started, source))?;
        if wait.from.is_none() {
            wait.from = Some(self.lanes.now());
        } else if progress != before {
            wait.until.get_or_insert(asked);
        }
        match progress {
            Progress::Done => {
                self.exchanges.keep(in_flight.flight);
                self.lanes.finish(&started, wait);
                Ok(true)
            }
            Progress::Pending { .. } => {
                self.flights[started.lane.index()] = Some(InFlight { progress, wait, ..in_flight });
                Ok(progress != before)
            }
        }
    }
}
