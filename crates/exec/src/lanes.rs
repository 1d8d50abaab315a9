//! How far each lane of a rank has got, and what was noted of it: both threads of a rank look here.

use crate::error::{ExecError, Fault};
use crate::queue::Queue;
use crate::recorder::Recorder;
use paceline_plan::ids::{LaneId, OpId, Rank};
use paceline_plan::program::{Op, Plan, Program, Section, Turn};
use paceline_plan::units::Seconds;
use paceline_plan::validate::describe;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The lanes of one rank's program.
#[derive(Debug)]
pub(crate) struct Lanes<'a> {
    plan: &'a Plan,
    program: &'a Program,
    rank: Rank,
    clock: Instant,
    /// Whether some ops do not take place in every iteration.
    has_turns: bool,
    /// How many of the run's first iterations are its warm-up.
    warm_up: u32,
    state: Mutex<State<'a>>,
    /// Told of everything that may let an op start, for those who wait here.
    changed: Condvar,
}

#[derive(Debug)]
struct State<'a> {
    queue: Queue<'a>,
    section: SectionOf,
    /// The iteration of the queue's first pass.
    first: u32,
    /// Passes of the body that ran an iteration again.
    again: u32,
    recorder: Recorder,
    /// Ops of [`Kind::Storage`] that are under way, and that are done.
    storing: u32,
    moves: u64,
    /// Whether nobody waits here any more.
    over: bool,
    /// What a thread that waits here met.
    trouble: Option<ExecError>,
}

/// Which thread an op is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Done at once, by the thread that computes.
    Work,
    /// In flight for a while.
    Exchange,
    /// Between the arena and the store, by a thread of its own.
    Storage,
}

impl Kind {
    fn of(program: &Program, op: &Op) -> Self {
        match op {
            Op::Stash { .. } | Op::Restore { .. } if program.offloaded(op).is_some() => {
                Self::Storage
            }
            Op::Send { .. } | Op::Recv { .. } | Op::Collective { .. } => Self::Exchange,
            Op::Load { .. }
            | Op::Compute { .. }
            | Op::Accumulate { .. }
            | Op::Step { .. }
            | Op::Stash { .. }
            | Op::Restore { .. }
            | Op::Free { .. }
            | Op::Serve { .. } => Self::Work,
        }
    }
}

/// What the thread that computes can expect of the store when it has nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// Something was moved meanwhile: there may be something to do by now.
    Ready,
    /// Something is under way, whose end will be told.
    Busy,
    /// Nothing.
    Idle,
}

/// A section of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SectionOf {
    Prologue,
    Body,
    Epilogue,
}

/// An op that has been started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Started<'a> {
    pub(crate) op: &'a Op,
    pub(crate) lane: LaneId,
    pub(crate) id: OpId,
    pub(crate) section: SectionOf,
    /// Counted from 0.
    pub(crate) iteration: u32,
    /// As the iteration, but that one that is run again counts twice: what numbers messages and
    /// selects copies of buffers.
    pub(crate) pass: u32,
    pub(crate) start: Seconds,
}

/// How long an exchange waited for others to join it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wait {
    /// When this rank had done its own first part.
    pub(crate) from: Option<Seconds>,
    /// When the first answer was at hand.
    pub(crate) until: Option<Seconds>,
}

impl<'a> Lanes<'a> {
    /// `clock` is when the run started; before its prologue nothing may start. Of the last `traced`
    /// iterations notes are kept. There is no warm-up.
    pub(crate) fn new(plan: &'a Plan, rank: Rank, clock: Instant, traced: Option<u32>) -> Self {
        let program = plan.program(rank);
        let state = State {
            queue: Queue::new(&program.prologue, program.lanes.len(), &[]),
            section: SectionOf::Prologue,
            first: 0,
            again: 0,
            recorder: Recorder::new(clock, program, traced),
            storing: 0,
            moves: 0,
            over: false,
            trouble: None,
        };
        let (has_turns, state, changed) = (plan.has_turns(), Mutex::new(state), Condvar::new());
        Self { plan, program, rank, clock, has_turns, warm_up: 0, state, changed }
    }

    /// The same in a run whose first so many iterations are a warm-up.
    pub(crate) fn warming_up(self, warm_up: u32) -> Self {
        Self { warm_up, ..self }
    }

    /// The time since the run started.
    pub(crate) fn now(&self) -> Seconds {
        Seconds(self.clock.elapsed().as_secs_f64())
    }

    /// Goes over to a section, whose first pass belongs to iteration `first`.
    pub(crate) fn enter(&self, section: SectionOf, first: u32) {
        let in_flight = match section {
            SectionOf::Body => self.program.in_flight.as_slice(),
            SectionOf::Prologue | SectionOf::Epilogue => &[],
        };
        let queue = Queue::new(self.section(section), self.program.lanes.len(), in_flight);
        let mut state = self.state();
        (state.queue, state.section, state.first) = (queue, section, first);
        self.changed.notify_all();
    }

    /// Opens the next pass of the section.
    pub(crate) fn open(&self) {
        let mut state = self.state();
        state.queue.open();
        self.pass_over(&mut state);
        self.changed.notify_all();
    }

    /// As [`open`](Self::open), for a pass that runs the iteration before again.
    pub(crate) fn open_again(&self) {
        let mut state = self.state();
        state.again += 1;
        state.queue.open();
        self.pass_over(&mut state);
        self.changed.notify_all();
    }

    /// Whether the queue is as wanted.
    pub(crate) fn are(&self, wanted: fn(&Queue<'a>) -> bool) -> bool {
        wanted(&self.state().queue)
    }

    /// Starts an op of a kind, if one may start.
    pub(crate) fn start(&self, kind: Kind) -> Option<Started<'a>> {
        self.start_in(&mut self.state(), kind)
    }

    fn start_in(&self, state: &mut State<'a>, kind: Kind) -> Option<Started<'a>> {
        let (lane, op) = self.next(state, kind)?;
        let started = self.at(state, lane, op);
        state.queue.start(lane);
        state.storing += u32::from(kind == Kind::Storage);
        Some(started)
    }

    /// Starts an op of a kind as soon as one may start; none if there is nothing more to do.
    pub(crate) fn wait_for(&self, kind: Kind) -> Option<Started<'a>> {
        let mut state = self.state();
        loop {
            if state.over {
                return None;
            }
            if let Some(started) = self.start_in(&mut state, kind) {
                return Some(started);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends all waits here.
    pub(crate) fn end_waits(&self) {
        self.state().over = true;
        self.changed.notify_all();
    }

    /// How many moves to or from the store are done.
    pub(crate) fn moves(&self) -> u64 {
        self.state().moves
    }

    /// How the store keeps the thread that computes, which looked around when so many moves were done
    /// and found nothing to do.
    pub(crate) fn stored(&self, moves: u64) -> Stored {
        self.stored_in(&self.state(), moves)
    }

    fn stored_in(&self, state: &State<'a>, moves: u64) -> Stored {
        if state.trouble.is_some() || state.moves != moves {
            Stored::Ready
        } else if state.storing > 0 || self.next(state, Kind::Storage).is_some() {
            Stored::Busy
        } else {
            Stored::Idle
        }
    }

    /// Waits while the store is busy and there is nothing else to do.
    pub(crate) fn wait_for_store(&self, moves: u64) {
        let mut state = self.state();
        while self.stored_in(&state, moves) == Stored::Busy {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Says what a thread that waits here met.
    pub(crate) fn report(&self, trouble: ExecError) {
        let mut state = self.state();
        state.trouble = Some(trouble);
        state.storing = 0;
        self.changed.notify_all();
    }

    /// Fails with what a thread met that waits here.
    pub(crate) fn trouble(&self) -> Result<(), ExecError> {
        self.state().trouble.take().map_or(Ok(()), Err)
    }

    /// Whether an op of a kind may start.
    pub(crate) fn has(&self, kind: Kind) -> bool {
        self.next(&self.state(), kind).is_some()
    }

    /// Notes that an op is done, and how long it waited for other ranks.
    pub(crate) fn finish(&self, started: &Started<'a>, wait: Wait) {
        let (prologue, body) = (self.program.prologue.nodes.len(), self.program.body.nodes.len());
        let before = match started.section {
            SectionOf::Prologue => 0,
            SectionOf::Body => prologue,
            SectionOf::Epilogue => prologue + body,
        } as u32;
        let mut state = self.state();
        state.queue.finish(started.lane);
        if Kind::of(self.program, started.op) == Kind::Storage {
            state.storing = state.storing.saturating_sub(1);
            state.moves += 1;
        }
        let (lane, number) = (started.lane, before + started.id.0);
        state.recorder.note(lane, number, started.pass, started.start, wait);
        self.pass_over(&mut state);
        drop(state);
        if self.program.memory.stored().0 > 0 {
            self.changed.notify_all();
        }
    }

    /// An op that waits, under way or not: what a rank that is stuck is stuck at.
    pub(crate) fn waiting(&self) -> Option<Started<'a>> {
        let state = self.state();
        let (lane, (op, pass)) = self.heads(&state).next()?;
        Some(self.at(&state, lane, (op, pass)))
    }

    /// The op, in words.
    pub(crate) fn describe(&self, started: &Started<'_>) -> String {
        describe(self.plan, self.program, started.op)
    }

    /// Says where a fault was.
    pub(crate) fn failed(&self, started: &Started<'_>, source: Fault) -> ExecError {
        let (rank, iteration) = (self.rank, started.iteration + 1);
        ExecError::Op { rank, iteration, op: self.describe(started), source }
    }

    /// Takes the notes out, at the end of a run.
    pub(crate) fn take_notes(&self) -> Recorder {
        self.state().recorder.take()
    }

    fn heads<'s>(
        &self,
        state: &'s State<'a>,
    ) -> impl Iterator<Item = (LaneId, (OpId, u64))> + use<'s, 'a> {
        let lanes = (0..state.queue.lanes()).map(LaneId::from);
        lanes.filter_map(|lane| Some((lane, state.queue.head(lane)?)))
    }

    fn next(&self, state: &State<'a>, kind: Kind) -> Option<(LaneId, (OpId, u64))> {
        let nodes = &self.section(state.section).nodes;
        (0..state.queue.lanes()).map(LaneId::from).find_map(|lane| {
            let (op, pass) = state.queue.ready(lane)?;
            (Kind::of(self.program, &nodes[op.index()].op) == kind).then_some((lane, (op, pass)))
        })
    }

    fn at(&self, state: &State<'a>, lane: LaneId, (id, pass): (OpId, u64)) -> Started<'a> {
        let pass = state.first + pass as u32;
        Started {
            op: &self.section(state.section).nodes[id.index()].op,
            lane,
            id,
            section: state.section,
            iteration: pass - state.again,
            pass,
            start: self.now(),
        }
    }

    /// Is done with ops that may start and whose turn it is not.
    fn pass_over(&self, state: &mut State<'a>) {
        if !self.has_turns || state.section != SectionOf::Body {
            return;
        }
        let nodes = &self.program.body.nodes;
        let lanes = || (0..self.program.lanes.len()).map(LaneId::from);
        let idle = |state: &State<'a>, lane: &LaneId| {
            state.queue.ready(*lane).is_some_and(|(op, pass)| {
                let iteration = state.first + pass as u32 - state.again;
                let now = Turn::of(iteration, self.warm_up);
                !nodes[op.index()].turn.takes_place(now)
            })
        };
        while let Some(lane) = lanes().find(|lane| idle(state, lane)) {
            state.queue.finish(lane);
        }
    }

    fn section(&self, section: SectionOf) -> &'a Section {
        match section {
            SectionOf::Prologue => &self.program.prologue,
            SectionOf::Body => &self.program.body,
            SectionOf::Epilogue => &self.program.epilogue,
        }
    }

    /// A panic while the lock is held cannot leave the state half changed.
    fn state(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
