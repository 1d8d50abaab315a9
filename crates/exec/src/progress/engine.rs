//! Progress engine: starts and advances the exchanges of a rank's lanes.

use crate::error::{ExecError, Fault};
use crate::interpreter::lanes::{OpScheduler, RunningOp, WaitSpan};
use crate::interpreter::task::{ExchangeTask, OpClass, Task};
use crate::memory::Memory;
use crate::progress::exchange::{CommContext, ExchangeState, MpiGroups, NativeExchange};
use paceline_comm::{Progress, Transport, Wait};
use paceline_kernels::arena::Span;
use paceline_plan::ids::{Microbatch, Rank};
use paceline_plan::program::{Plan, View};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Exchanges of one rank and the transport they use. The thread that owns it advances them.
pub(crate) struct ProgressEngine<'a> {
    pub(crate) transport: &'a mut dyn Transport,
    rank: Rank,
    /// Number of microbatches per iteration.
    microbatches: u64,
    memory: Arc<Memory<'a>>,
    lanes: Arc<OpScheduler<'a>>,
    exchanges: CommContext<'a>,
    /// Exchange in flight on each lane.
    flights: Vec<Option<ActiveExchange<'a>>>,
    /// Op being processed, if any.
    at: Option<RunningOp<'a>>,
    moved_at: Instant,
    /// Exchanges that are done and not finished, if the rank stages them itself.
    staged: Option<Vec<(RunningOp<'a>, WaitSpan)>>,
}

/// Memory that an exchange reads when it starts, and that it has written when it is done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Staging {
    pub(crate) read: Option<Span>,
    pub(crate) written: Option<Span>,
}

/// Sleep between two looks at exchanges of MPI, beside a thread that computes.
const MPI_NAP: Duration = Duration::from_micros(20);

/// Exchange in flight on a lane.
#[derive(Debug)]
struct ActiveExchange<'a> {
    flight: ExchangeState,
    started: RunningOp<'a>,
    progress: Progress,
    wait: WaitSpan,
}

impl<'a> ProgressEngine<'a> {
    pub(crate) fn new(
        plan: &'a Plan,
        transport: &'a mut dyn Transport,
        memory: &Arc<Memory<'a>>,
        lanes: &Arc<OpScheduler<'a>>,
        groups: MpiGroups,
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
            exchanges: CommContext::new(plan, rank, groups),
            flights,
            at: None,
            moved_at: Instant::now(),
            staged: None,
        }
    }

    /// Leaves it to the caller to start exchanges, when memory has what they read, and to finish
    /// them.
    pub(crate) fn staged(self) -> Self {
        Self { staged: Some(Vec::new()), ..self }
    }

    /// Takes an exchange that is done, of those that the caller started.
    pub(crate) fn take_done(&mut self) -> Option<(RunningOp<'a>, WaitSpan)> {
        self.staged.as_mut()?.pop()
    }

    /// Starts exchanges that may start and advances those in flight, without waiting. Returns true
    /// if anything happened.
    pub(crate) fn make_progress(&mut self) -> Result<bool, ExecError> {
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
            // The end of one may unblock another, and this thread may now compute for long.
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

    /// Starts all exchanges that may start. Returns true if there were any.
    fn begin_all(&mut self) -> Result<bool, ExecError> {
        let mut begun = false;
        while self.staged.is_none()
            && let Some(started) = self.lanes.start(OpClass::Exchange)
        {
            self.start(started)?;
            begun = true;
        }
        Ok(begun)
    }

    /// Starts an exchange.
    pub(crate) fn start(&mut self, started: RunningOp<'a>) -> Result<(), ExecError> {
        self.at = Some(started);
        let flight = self.begin(&started).map_err(|s| self.lanes.failed(&started, s))?;
        let progress = Progress::Pending { on: self.rank, step: usize::MAX, moved: 0 };
        let in_flight = ActiveExchange { flight, started, progress, wait: WaitSpan::default() };
        self.flights[started.lane.index()] = Some(in_flight);
        Ok(())
    }

    /// Returns true if an exchange is in flight.
    pub(crate) fn is_under_way(&self) -> bool {
        self.flights.iter().any(Option::is_some)
    }

    /// Op being processed, if any: for panic messages.
    pub(crate) fn at(&self) -> Option<RunningOp<'a>> {
        self.at
    }

    /// Description of an op for messages.
    pub(crate) fn describe(&self, started: &RunningOp<'_>) -> String {
        self.lanes.describe(started)
    }

    /// Sleeps until an exchange may advance, or until a waker wakes it.
    pub(crate) fn sleep(&mut self, at_most: Duration) -> Result<(), ExecError> {
        let at_most = if self.asks_mpi() { at_most.min(MPI_NAP) } else { at_most };
        self.transport.wait(Wait::Block, at_most).map_err(|source| self.located(source.into()))
    }

    /// Restarts the exchange timeout: the rank was busy with other work.
    pub(crate) fn is_back(&mut self) {
        self.moved_at = Instant::now();
    }

    /// Waits until an exchange may advance. Fails if none has advanced for `exchange_timeout`.
    pub(crate) fn wait(&mut self, exchange_timeout: Duration) -> Result<(), ExecError> {
        let (rank, waited) = (self.rank, self.moved_at.elapsed());
        let Some(in_flight) = self.flights.iter().flatten().next() else {
            let at = self.lanes.waiting();
            let iteration = at.map_or(1, |at| at.iteration + 1);
            let op = at.map_or_else(|| "the end".into(), |at| self.lanes.describe(&at));
            return Err(ExecError::Stuck { rank, iteration, op });
        };
        if let (Progress::Pending { on: peer, .. }, true) =
            (in_flight.progress, waited >= exchange_timeout)
        {
            let started = &in_flight.started;
            let (iteration, op) = (started.iteration + 1, self.lanes.describe(started));
            return Err(ExecError::Silent { rank, iteration, op, peer, waited });
        }
        let mut timeout = exchange_timeout.saturating_sub(waited);
        if self.asks_mpi() {
            // The end of MPI's exchange wakes no thread; it has to be asked again at once.
            std::thread::yield_now();
            timeout = Duration::ZERO;
        }
        self.transport.wait(Wait::Spin, timeout).map_err(|source| self.located(source.into()))
    }

    /// Returns true if an exchange in flight is MPI's, which moves data only while it is asked.
    fn asks_mpi(&self) -> bool {
        let native =
            |flight: &ActiveExchange<'_>| matches!(flight.flight, ExchangeState::Native { .. });
        self.flights.iter().flatten().any(native)
    }

    /// Tells MPI's groups that this rank cannot continue.
    pub(crate) fn abort(&mut self, reason: &str) {
        self.exchanges.abort(reason);
    }

    /// Error of a fault while waiting, located at the awaited op.
    fn located(&self, source: Fault) -> ExecError {
        let at = self.flights.iter().flatten().next().map(|in_flight| in_flight.started);
        match (at.or_else(|| self.lanes.waiting()), source) {
            (Some(at), source) => self.lanes.failed(&at, source),
            (None, source) => {
                ExecError::Op { rank: self.rank, iteration: 1, op: "the end".into(), source }
            }
        }
    }

    /// Memory that an exchange reads and writes.
    pub(crate) fn staging(&self, started: &RunningOp<'a>) -> Staging {
        let running = |microbatch| self.running(started, microbatch);
        let span = |view, microbatch| Some(self.memory.span(view, running(microbatch)));
        match started.task {
            Task::Exchange(ExchangeTask::Send { view, microbatch, .. }) => {
                Staging { read: span(view, microbatch), written: None }
            }
            Task::Exchange(ExchangeTask::Receive { view, microbatch, .. }) => {
                Staging { read: None, written: span(view, microbatch) }
            }
            Task::Exchange(ExchangeTask::Collective { call, microbatch }) => {
                self.exchanges.staging(&self.memory, call, running(microbatch))
            }
            Task::Device(_) | Task::Storage(_) | Task::Serve(_) | Task::Nothing => {
                Staging::default()
            }
        }
    }

    /// Exchange that a library performs; `None` if this engine does.
    pub(crate) fn native(&self, started: &RunningOp<'a>) -> Option<Result<NativeExchange, Fault>> {
        let data = |view: View, microbatch| {
            let running = self.running(started, microbatch);
            (self.memory.span(view, running), self.memory.dtype(view.buffer))
        };
        match started.task {
            Task::Exchange(ExchangeTask::Send { to, channel, view, microbatch }) => {
                self.exchanges.native_message((to, true), channel, data(view, microbatch))
            }
            Task::Exchange(ExchangeTask::Receive { from, channel, view, microbatch }) => {
                self.exchanges.native_message((from, false), channel, data(view, microbatch))
            }
            Task::Exchange(ExchangeTask::Collective { call, microbatch }) => {
                let running = self.running(started, microbatch);
                let found = (call, started.lane);
                self.exchanges.native_collective(&self.memory, found, running).map(Ok)
            }
            Task::Device(_) | Task::Storage(_) | Task::Serve(_) | Task::Nothing => None,
        }
    }

    fn running(&self, started: &RunningOp<'_>, microbatch: Microbatch) -> u64 {
        u64::from(started.pass) * self.microbatches + u64::from(microbatch.0)
    }

    fn begin(&mut self, started: &RunningOp<'a>) -> Result<ExchangeState, Fault> {
        let data =
            |view: View, running| (self.memory.span(view, running), self.memory.dtype(view.buffer));
        let Task::Exchange(task) = started.task else {
            unreachable!("only exchanges reach the progress engine");
        };
        match task {
            ExchangeTask::Send { to, channel, view, microbatch } => {
                let running = self.running(started, microbatch);
                self.exchanges.send(to, channel, data(view, running), running)
            }
            ExchangeTask::Receive { from, channel, view, microbatch } => {
                let running = self.running(started, microbatch);
                self.exchanges.receive(from, channel, data(view, running), running)
            }
            ExchangeTask::Collective { call, microbatch } => {
                let (running, lane) = (self.running(started, microbatch), started.lane);
                self.exchanges.collective(&self.memory, call, lane, running)
            }
        }
    }

    /// Advances an exchange. Returns true if it moved.
    fn advance(&mut self, mut in_flight: ActiveExchange<'a>) -> Result<bool, ExecError> {
        let ActiveExchange { started, progress: before, mut wait, .. } = in_flight;
        self.at = Some(started);
        let asked = self.lanes.now();
        let progress = self
            .exchanges
            .progress(&mut in_flight.flight, self.transport, &self.memory)
            .map_err(|source| self.lanes.failed(&started, source))?;
        if wait.from.is_none() {
            wait.from = Some(self.lanes.now());
        } else if progress != before {
            wait.until.get_or_insert(asked);
        }
        match progress {
            Progress::Done => {
                self.exchanges.keep(in_flight.flight);
                match &mut self.staged {
                    Some(done) => done.push((started, wait)),
                    None => self.lanes.finish(&started, wait),
                }
                Ok(true)
            }
            Progress::Pending { .. } => {
                self.flights[started.lane.index()] =
                    Some(ActiveExchange { progress, wait, ..in_flight });
                Ok(progress != before)
            }
        }
    }
}
