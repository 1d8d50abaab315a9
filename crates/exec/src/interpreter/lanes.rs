//! Op scheduler: progress and trace of each lane of a rank, shared by the rank's threads.

use crate::error::{ExecError, Fault};
use crate::interpreter::queue::ReadyQueue;
use crate::interpreter::recorder::Recorder;
use crate::interpreter::task::{OpClass, Task, Tasks};
use paceline_plan::ids::{LaneId, OpId, Rank};
use paceline_plan::program::label::describe;
use paceline_plan::program::{IterationFilter, Node, Op, Plan, Program, Section};
use paceline_plan::units::Seconds;
use paceline_plan::validate::SectionKind;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Scheduler for the lanes of one rank's program.
#[derive(Debug)]
pub(crate) struct OpScheduler<'a> {
    plan: &'a Plan,
    program: &'a Program,
    tasks: Tasks,
    rank: Rank,
    clock: Instant,
    /// True if some ops do not run in every iteration.
    has_filters: bool,
    /// Number of iterations of the compression warm-up.
    warm_up: u32,
    state: Mutex<State<'a>>,
    /// Notified of every change that may let an op start.
    changed: Condvar,
}

#[derive(Debug)]
struct State<'a> {
    queue: ReadyQueue<'a>,
    section: SectionKind,
    /// Iteration of the queue's first pass.
    first: u32,
    /// Number of passes of the body that repeated an iteration.
    repeats: u32,
    recorder: Recorder,
    /// Number of ops of [`OpClass::Offload`] that are running, followed by the number finished.
    storing: u32,
    moves: u64,
    /// True if waiting threads are to end.
    over: bool,
    /// Error reported by a thread that waits here.
    error: Option<ExecError>,
}

/// State of the offload store, for an idle compute thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OffloadStatus {
    /// A move has finished meanwhile: an op may be ready now.
    Ready,
    /// A move is in progress; its end will be notified.
    Busy,
    /// No move is in progress.
    Idle,
}

/// An op that has been started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunningOp<'a> {
    pub(crate) op: &'a Op,
    pub(crate) task: Task,
    pub(crate) lane: LaneId,
    pub(crate) id: OpId,
    pub(crate) section: SectionKind,
    /// Iteration, counted from 0.
    pub(crate) iteration: u32,
    /// Like the iteration, but a repeated one counts twice; numbers messages and selects buffer
    /// copies.
    pub(crate) pass: u32,
    pub(crate) start: Seconds,
}

/// Time an exchange waited for other ranks to join.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WaitSpan {
    /// Time at which this rank had done its own first part.
    pub(crate) from: Option<Seconds>,
    /// Time at which the first answer had arrived.
    pub(crate) until: Option<Seconds>,
}

impl<'a> OpScheduler<'a> {
    /// Creates the scheduler, without a warm-up. `clock` is the start of the run; nothing may start
    /// before its prologue. The last `traced` iterations are recorded.
    pub(crate) fn new(plan: &'a Plan, rank: Rank, clock: Instant, traced: Option<u32>) -> Self {
        let program = plan.program(rank);
        let state = State {
            queue: ReadyQueue::new(&program.prologue, program.lanes.len(), &[]),
            section: SectionKind::Prologue,
            first: 0,
            repeats: 0,
            recorder: Recorder::new(program, traced),
            storing: 0,
            moves: 0,
            over: false,
            error: None,
        };
        let (has_filters, state, changed) = (plan.has_filters(), Mutex::new(state), Condvar::new());
        Self {
            plan,
            program,
            tasks: Tasks::of(program),
            rank,
            clock,
            has_filters,
            warm_up: 0,
            state,
            changed,
        }
    }

    /// Sets the first `warm_up` iterations of the run as the compression warm-up.
    pub(crate) fn warming_up(self, warm_up: u32) -> Self {
        Self { warm_up, ..self }
    }

    /// Time since the run started.
    pub(crate) fn now(&self) -> Seconds {
        Seconds(self.clock.elapsed().as_secs_f64())
    }

    /// Enters a section, whose first pass belongs to iteration `first`.
    pub(crate) fn enter(&self, section: SectionKind, first: u32) {
        let in_flight = match section {
            SectionKind::Body => self.program.in_flight.as_slice(),
            SectionKind::Prologue | SectionKind::Epilogue => &[],
        };
        let queue = ReadyQueue::new(self.section(section), self.program.lanes.len(), in_flight);
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

    /// Like [`open`](Self::open), for a pass that repeats the previous iteration.
    pub(crate) fn repeat_iteration(&self) {
        let mut state = self.state();
        state.repeats += 1;
        state.queue.open();
        self.pass_over(&mut state);
        self.changed.notify_all();
    }

    /// Returns true if the queue satisfies `wanted`.
    pub(crate) fn are(&self, wanted: fn(&ReadyQueue<'a>) -> bool) -> bool {
        wanted(&self.state().queue)
    }

    /// Starts an op of a class, if one may start.
    pub(crate) fn start(&self, kind: OpClass) -> Option<RunningOp<'a>> {
        self.start_in(&mut self.state(), kind)
    }

    fn start_in(&self, state: &mut State<'a>, kind: OpClass) -> Option<RunningOp<'a>> {
        let (lane, op) = self.next(state, kind)?;
        let started = self.at(state, lane, op);
        state.queue.start(lane);
        state.storing += u32::from(kind == OpClass::Offload);
        Some(started)
    }

    /// Starts an op of a class as soon as one may start; `None` once the scheduler has ended.
    pub(crate) fn wait_for(&self, kind: OpClass) -> Option<RunningOp<'a>> {
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

    /// Number of finished moves to or from the store.
    pub(crate) fn moves(&self) -> u64 {
        self.state().moves
    }

    /// Offload status for a compute thread that found no ready op when `moves` moves were finished.
    pub(crate) fn offload_status(&self, moves: u64) -> OffloadStatus {
        self.offload_status_in(&self.state(), moves)
    }

    fn offload_status_in(&self, state: &State<'a>, moves: u64) -> OffloadStatus {
        if state.error.is_some() || state.moves != moves {
            OffloadStatus::Ready
        } else if state.storing > 0 || self.next(state, OpClass::Offload).is_some() {
            OffloadStatus::Busy
        } else {
            OffloadStatus::Idle
        }
    }

    /// Waits while the store is busy and no move has finished.
    pub(crate) fn wait_for_offload(&self, moves: u64) {
        let mut state = self.state();
        while self.offload_status_in(&state, moves) == OffloadStatus::Busy {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reports the error of a thread that waits here.
    pub(crate) fn report(&self, error: ExecError) {
        let mut state = self.state();
        state.error = Some(error);
        state.storing = 0;
        self.changed.notify_all();
    }

    /// Fails with the reported error, if any.
    pub(crate) fn error(&self) -> Result<(), ExecError> {
        self.state().error.take().map_or(Ok(()), Err)
    }

    /// Returns true if an op of a class may start.
    pub(crate) fn has(&self, kind: OpClass) -> bool {
        self.next(&self.state(), kind).is_some()
    }

    /// Records that an op is done, and its wait for other ranks.
    pub(crate) fn finish(&self, started: &RunningOp<'a>, wait: WaitSpan) {
        self.finish_at(started, Some((self.now(), wait)));
    }

    /// Lets the ops behind an op start that a device has been issued. Its times are recorded later.
    pub(crate) fn finish_issued(&self, started: &RunningOp<'a>) {
        self.finish_at(started, None);
    }

    fn finish_at(&self, started: &RunningOp<'a>, done: Option<(Seconds, WaitSpan)>) {
        let mut state = self.state();
        state.queue.finish(started.lane);
        if started.task.class() == OpClass::Offload {
            state.storing = state.storing.saturating_sub(1);
            state.moves += 1;
        }
        if let Some((end, wait)) = done {
            self.record_in(&mut state, started, (started.start, end), wait);
        }
        self.pass_over(&mut state);
        drop(state);
        if self.program.memory.stored().0 > 0 {
            self.changed.notify_all();
        }
    }

    /// Records the times of an op that a device was issued.
    pub(crate) fn record(&self, issued: &RunningOp<'a>, times: (Seconds, Seconds)) {
        self.record_in(&mut self.state(), issued, times, WaitSpan::default());
    }

    fn record_in(
        &self,
        state: &mut State<'a>,
        op: &RunningOp<'a>,
        times: (Seconds, Seconds),
        wait: WaitSpan,
    ) {
        let (prologue, body) = (self.program.prologue.nodes.len(), self.program.body.nodes.len());
        let before = match op.section {
            SectionKind::Prologue => 0,
            SectionKind::Body => prologue,
            SectionKind::Epilogue => prologue + body,
        } as u32;
        state.recorder.note(op.lane, before + op.id.0, op.pass, times, wait);
    }

    /// All ops of a section, as if they were started in an iteration.
    pub(crate) fn all(&self, section: SectionKind, iteration: u32) -> Vec<RunningOp<'a>> {
        let (nodes, tasks) = (&self.section(section).nodes, self.tasks.section(section));
        let op = |(at, node): (usize, &'a Node)| RunningOp {
            op: &node.op,
            task: tasks[at],
            lane: node.lane,
            id: OpId::from(at),
            section,
            iteration,
            pass: iteration,
            start: self.now(),
        };
        nodes.iter().enumerate().map(op).collect()
    }

    /// Returns a waiting op, started or not: the op at which a stuck rank is stuck.
    pub(crate) fn waiting(&self) -> Option<RunningOp<'a>> {
        let state = self.state();
        let (lane, (op, pass)) = self.heads(&state).next()?;
        Some(self.at(&state, lane, (op, pass)))
    }

    /// Describes the op.
    pub(crate) fn describe(&self, started: &RunningOp<'_>) -> String {
        describe(self.plan, self.program, started.op)
    }

    /// Adds rank, iteration and op to a fault.
    pub(crate) fn failed(&self, started: &RunningOp<'_>, source: Fault) -> ExecError {
        let (rank, iteration) = (self.rank, started.iteration + 1);
        ExecError::Op { rank, iteration, op: self.describe(started), source }
    }

    /// Takes the recorded trace, at the end of a run.
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

    fn next(&self, state: &State<'a>, kind: OpClass) -> Option<(LaneId, (OpId, u64))> {
        let tasks = self.tasks.section(state.section);
        (0..state.queue.lanes()).map(LaneId::from).find_map(|lane| {
            let (op, pass) = state.queue.ready(lane)?;
            (tasks[op.index()].class() == kind).then_some((lane, (op, pass)))
        })
    }

    fn at(&self, state: &State<'a>, lane: LaneId, (id, pass): (OpId, u64)) -> RunningOp<'a> {
        let pass = state.first + pass as u32;
        RunningOp {
            op: &self.section(state.section).nodes[id.index()].op,
            task: self.tasks.section(state.section)[id.index()],
            lane,
            id,
            section: state.section,
            iteration: pass - state.repeats,
            pass,
            start: self.now(),
        }
    }

    /// Finishes ready ops that the iteration filter excludes.
    fn pass_over(&self, state: &mut State<'a>) {
        if !self.has_filters || state.section != SectionKind::Body {
            return;
        }
        let nodes = &self.program.body.nodes;
        let lanes = || (0..self.program.lanes.len()).map(LaneId::from);
        let idle = |state: &State<'a>, lane: &LaneId| {
            state.queue.ready(*lane).is_some_and(|(op, pass)| {
                let iteration = state.first + pass as u32 - state.repeats;
                let now = IterationFilter::of(iteration, self.warm_up);
                !nodes[op.index()].filter.includes(now)
            })
        };
        while let Some(lane) = lanes().find(|lane| idle(state, lane)) {
            state.queue.finish(lane);
        }
    }

    fn section(&self, section: SectionKind) -> &'a Section {
        section.of(self.program)
    }

    /// Locks the state, ignoring poison: a panic cannot leave it half changed.
    fn state(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
