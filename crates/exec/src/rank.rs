//! One rank: interprets its program.
//!
//! A rank is one thread. Its lanes take turns: a computation runs to its end at once, an exchange
//! is begun and then moved on whenever its lane's turn comes round, so that messages flow between
//! any two computations. When no lane can move, the rank waits for a message.

use crate::check::Kernels;
use crate::checkpoint::{
    DataPosition, Saver, Shared, TrainingState, restore_moments, restore_weights,
};
use crate::compute::{Compute, add};
use crate::control::during;
use crate::data::Data;
use crate::error::{ExecError, Fault};
use crate::exchange::{Exchanges, Flight};
use crate::horizon::Horizon;
use crate::hugging_face::Whole;
use crate::loss_scale::LossScale;
use crate::memory::Memory;
use crate::options::{Start, TrainOptions};
use crate::parameters::{self, Holding};
use crate::place::Place;
use crate::queue::Queue;
use crate::recorder::Recorder;
use crate::types::Float;
use crate::update::Rule;
use paceline_comm::{Progress, Transport};
use paceline_kernels::arena::{Access, ArenaError};
use paceline_kernels::pool::Pool;
use paceline_kernels::{Bf16, F16};
use paceline_plan::ids::{BufferId, LaneId, Microbatch, OpId};
use paceline_plan::program::{AccumulateMode, LoadKind, Op, Plan, Program, Section, View};
use paceline_plan::units::Seconds;
use paceline_plan::validate::describe;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What all ranks of a run share.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) options: &'a TrainOptions,
    pub(crate) kernels: &'a Kernels,
    pub(crate) data: &'a Data,
    pub(crate) from: From,
    pub(crate) saving: Option<Arc<Shared>>,
    pub(crate) vocab: u32,
    pub(crate) horizon: Horizon<'a>,
    pub(crate) clock: Instant,
}

/// Where a run begins.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct From {
    /// Iterations that are behind it.
    pub(crate) iteration: u32,
    /// Samples that are behind it.
    pub(crate) samples: u64,
}

impl From {
    /// Samples that are behind an iteration's first one.
    pub(crate) fn samples_before(self, iteration: u32, global_batch: u64) -> u64 {
        let iterations = u64::from(iteration.saturating_sub(self.iteration));
        self.samples.wrapping_add(iterations.wrapping_mul(global_batch))
    }
}

/// What a rank sees at the end of an iteration, where its program says that it has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight {
    /// Counted from 0.
    pub(crate) iteration: u32,
    /// The sum of all tokens' losses.
    pub(crate) loss: Option<f32>,
    /// The norm of the gradient.
    pub(crate) norm: Option<f32>,
    /// How long the iteration took, from the end of the one before.
    pub(crate) took: Seconds,
}

/// Whoever hears what a rank sees, and may use its wires to pass it on.
pub(crate) type Tell<'t> = dyn FnMut(Sight, &mut dyn Transport) -> Result<(), ExecError> + 't;

/// What is left of a rank after its run.
#[derive(Debug)]
pub(crate) struct Remains {
    pub(crate) arena_bytes: u64,
    pub(crate) copy_bytes: u64,
    pub(crate) recorder: Recorder,
    pub(crate) holding: Option<Holding>,
}

/// A rank of the plan at work.
pub(crate) struct Rank<'a> {
    run: &'a Run<'a>,
    program: &'a Program,
    place: Place,
    transport: &'a mut dyn Transport,
    memory: Memory<'a>,
    compute: Compute<'a>,
    exchanges: Exchanges<'a>,
    recorder: Recorder,
    saver: Option<Saver>,
    scale: LossScale,
    /// Passes of the body that ran an iteration again.
    again: u32,
    /// By lane: what is in flight on it.
    flights: Vec<Option<InFlight>>,
    /// The op that was worked on last, for messages.
    at: Option<(At, OpId)>,
}

/// Which pass of which section.
#[derive(Clone, Copy, Debug)]
struct At {
    /// The iteration, counted from 0.
    iteration: u32,
    /// Where the section stands: before, in or after the body.
    section: SectionOf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SectionOf {
    Prologue,
    Body,
    Epilogue,
}

/// An exchange on a lane.
#[derive(Debug)]
struct InFlight {
    flight: Flight,
    at: At,
    start: Seconds,
    progress: Progress,
    wait: Wait,
}

/// How long an exchange waited for others to join it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wait {
    /// When this rank had done its own first part.
    pub(crate) from: Option<Seconds>,
    /// When the first answer was at hand.
    pub(crate) until: Option<Seconds>,
}

impl<'a> Rank<'a> {
    /// Sets a rank up: its memory, and the weights it starts from.
    pub(crate) fn new(
        run: &'a Run<'a>,
        transport: &'a mut dyn Transport,
    ) -> Result<Self, ExecError> {
        let rank = transport.rank();
        let program = run.plan.program(rank);
        let place = Place::of(run.plan, rank);
        let memory = Memory::new(program, transport).map_err(|source| ExecError::Op {
            rank,
            iteration: 1,
            op: "start".into(),
            source,
        })?;
        let refused = |source| ExecError::Memory { rank, source };
        match &run.options.start {
            Start::Seed => {
                let (types, seed) = (run.kernels.types, run.options.seed);
                parameters::initialise(&memory, types, place, program, seed).map_err(refused)?;
            }
            Start::Checkpoint(checkpoint) => {
                restore_weights(&memory, place, program, &mut checkpoint.weights())?;
                restore_moments(&memory, place, program, checkpoint)?;
            }
            Start::Pretrained(pretrained) => {
                restore_weights(&memory, place, program, &mut Whole::new(pretrained))?;
            }
        }
        let saver = |shared| Saver::new(shared, run.plan, program, place, &memory);
        let saver = run.saving.as_ref().map(saver);
        let pool = Pool::new(run.options.threads_per_rank)
            .map_err(|source| ExecError::Thread { rank, source })?;
        let mut flights = Vec::new();
        flights.resize_with(program.lanes.len(), || None);
        Ok(Self {
            run,
            program,
            place,
            transport,
            memory,
            compute: Compute::new(run.plan, run.kernels, place, run.vocab, pool),
            exchanges: Exchanges::new(run.plan, rank),
            recorder: Recorder::new(run.clock, program),
            saver,
            scale: LossScale::new(&run.plan.strategy, run.options),
            again: 0,
            flights,
            at: None,
        })
    }

    /// Runs the whole program. `tell` hears of every iteration.
    pub(crate) fn work(&mut self, tell: &mut Tell<'_>) -> Result<(), ExecError> {
        let first = self.run.from.iteration;
        self.once(&self.program.prologue, SectionOf::Prologue, first)?;
        let lanes = self.program.lanes.len();
        let mut body = Queue::new(&self.program.body, lanes, &self.program.in_flight);
        let mut iteration = first;
        let mut ended = self.recorder.now();
        while self.begin_iteration(iteration)? {
            body.open();
            self.compute.loss_scale = self.scale.factor();
            self.drive(&mut body, SectionOf::Body, first, Queue::is_complete)?;
            let sight = self.sight(iteration, &mut ended)?;
            if let Some(norm) = sight.norm {
                if self.scale.is_lost(norm) {
                    return Err(self.cause(&mut body, sight));
                }
                self.scale.conclude(norm);
            }
            iteration += 1;
            if let Some(loss) = sight.loss.filter(|loss| !loss.is_finite()) {
                return Err(ExecError::Diverged { iteration, loss });
            }
            tell(sight, self.transport)?;
            if self.saver.as_ref().is_some_and(|saver| saver.is_due(iteration)) {
                self.drive(&mut body, SectionOf::Body, first, Queue::is_drained)?;
                self.save(iteration, Saver::begin)?;
            }
            self.saver.as_mut().map_or(Ok(()), Saver::poll)?;
        }
        self.drive(&mut body, SectionOf::Body, first, Queue::is_drained)?;
        self.once(&self.program.epilogue, SectionOf::Epilogue, iteration.saturating_sub(1))?;
        self.save(iteration, Saver::finish)
    }

    /// Why an iteration ended without a finite gradient. Weights are as they were before it, so all
    /// ranks, which know the same, run it again and look at every number.
    fn cause(&mut self, body: &mut Queue<'a>, sight: Sight) -> ExecError {
        self.compute.watching = true;
        self.again = 1;
        body.open();
        let first = self.run.from.iteration;
        let loss = sight.loss.unwrap_or(f32::NAN);
        let nothing = ExecError::Diverged { iteration: sight.iteration + 1, loss };
        self.drive(body, SectionOf::Body, first, Queue::is_complete).err().unwrap_or(nothing)
    }

    /// Saves the state after so many iterations, if the run is saved at all.
    fn save(
        &mut self,
        iteration: u32,
        how: fn(&mut Saver, &Memory<'_>, TrainingState) -> Result<(), ExecError>,
    ) -> Result<(), ExecError> {
        let state = self.state(iteration);
        self.saver.as_mut().map_or(Ok(()), |saver| how(saver, &self.memory, state))
    }

    /// The state of training after so many iterations.
    fn state(&self, iteration: u32) -> TrainingState {
        let Run { plan, options, data, .. } = self.run;
        TrainingState {
            format: TrainingState::FORMAT,
            iteration,
            seed: options.seed,
            data: DataPosition {
                source: data.name().to_owned(),
                samples: self.run.from.samples_before(iteration, plan.strategy.global_batch),
                path: data.path().map(Path::to_owned),
            },
            optimizer: plan.strategy.optimizer,
            loss_scale: self.scale.reported().map(|_| self.scale),
            strategy: plan.strategy.clone(),
        }
    }

    fn begin_iteration(&mut self, iteration: u32) -> Result<bool, ExecError> {
        let begun = self.run.horizon.begin(iteration, self.transport);
        begun.map_err(during(self.place.rank, "asking how far to go"))
    }

    /// Takes the rank apart.
    pub(crate) fn remains(self) -> Result<Remains, ExecError> {
        let holding = if self.run.options.keep_parameters {
            let read = Holding::read(&self.memory, self.place, self.program);
            Some(read.map_err(|source| ExecError::Memory { rank: self.place.rank, source })?)
        } else {
            None
        };
        let arena_bytes = self.memory.bytes();
        let copy_bytes = self.saver.as_ref().map_or(0, Saver::bytes);
        Ok(Remains { arena_bytes, copy_bytes, recorder: self.recorder, holding })
    }

    /// The iteration, counted from 1, and the op that the rank is at.
    pub(crate) fn whereabouts(&self) -> (u32, String) {
        match self.at {
            Some((at, op)) => (at.iteration + 1, self.describe(at, op)),
            None => (1, "start".into()),
        }
    }

    /// Runs a section once.
    fn once(
        &mut self,
        section: &'a Section,
        which: SectionOf,
        iteration: u32,
    ) -> Result<(), ExecError> {
        let mut queue = Queue::new(section, self.program.lanes.len(), &[]);
        queue.open();
        self.drive(&mut queue, which, iteration, Queue::is_drained)
    }

    /// Gives the lanes turns until the queue is as wanted. Its first pass belongs to iteration
    /// `first`.
    fn drive(
        &mut self,
        queue: &mut Queue<'a>,
        section: SectionOf,
        first: u32,
        until: fn(&Queue<'a>) -> bool,
    ) -> Result<(), ExecError> {
        let mut moved_at = Instant::now();
        while !until(queue) {
            let mut moved = false;
            for lane in (0..queue.lanes()).map(LaneId::from) {
                moved |= self.turn(queue, section, first, lane)?;
            }
            if moved {
                moved_at = Instant::now();
            } else {
                self.wait(queue, section, first, moved_at.elapsed())?;
            }
        }
        Ok(())
    }

    /// A lane's turn: begins its head, or moves it on. Says whether anything happened.
    fn turn(
        &mut self,
        queue: &mut Queue<'a>,
        section: SectionOf,
        first: u32,
        lane: LaneId,
    ) -> Result<bool, ExecError> {
        if let Some(in_flight) = self.flights[lane.index()].take() {
            let (op, _) = queue.head(lane).expect("what is in flight is at the head of its lane");
            return self.advance(queue, lane, op, in_flight);
        }
        let Some((op, pass)) = queue.ready(lane) else { return Ok(false) };
        let at = At { iteration: first + pass as u32, section };
        self.at = Some((at, op));
        let start = self.recorder.now();
        match self.begin(at, op, lane) {
            Ok(Some(flight)) => {
                let progress = Progress::Pending { on: self.place.rank, step: usize::MAX };
                let wait = Wait::default();
                self.advance(queue, lane, op, InFlight { flight, at, start, progress, wait })?;
            }
            Ok(None) => self.finish(queue, lane, op, at, start, Wait::default()),
            Err(source) => return Err(self.failed(at, op, source)),
        }
        Ok(true)
    }

    /// Moves an exchange on.
    fn advance(
        &mut self,
        queue: &mut Queue<'a>,
        lane: LaneId,
        op: OpId,
        mut in_flight: InFlight,
    ) -> Result<bool, ExecError> {
        let InFlight { at, start, progress: before, mut wait, .. } = in_flight;
        self.at = Some((at, op));
        let asked = self.recorder.now();
        let progress = in_flight
            .flight
            .progress(self.transport, &self.memory)
            .map_err(|source| self.failed(at, op, source))?;
        if wait.from.is_none() {
            wait.from = Some(self.recorder.now());
        } else if progress != before {
            wait.until.get_or_insert(asked);
        }
        match progress {
            Progress::Done => {
                self.exchanges.keep(in_flight.flight);
                self.finish(queue, lane, op, at, start, wait);
                Ok(true)
            }
            Progress::Pending { .. } => {
                self.flights[lane.index()] = Some(InFlight { progress, wait, ..in_flight });
                Ok(progress != before)
            }
        }
    }

    fn finish(
        &mut self,
        queue: &mut Queue<'a>,
        lane: LaneId,
        op: OpId,
        at: At,
        start: Seconds,
        wait: Wait,
    ) {
        queue.finish(lane);
        let number = op.0 + self.ops_before(at.section);
        self.recorder.note(lane, number, at.iteration, start, wait);
    }

    /// How many ops of the program stand before a section.
    fn ops_before(&self, section: SectionOf) -> u32 {
        let (prologue, body) = (self.program.prologue.nodes.len(), self.program.body.nodes.len());
        (match section {
            SectionOf::Prologue => 0,
            SectionOf::Body => prologue,
            SectionOf::Epilogue => prologue + body,
        }) as u32
    }

    /// Waits for a message, and gives up when none has helped for too long.
    fn wait(
        &mut self,
        queue: &Queue<'a>,
        section: SectionOf,
        first: u32,
        waited: Duration,
    ) -> Result<(), ExecError> {
        let rank = self.place.rank;
        let lanes = || (0..queue.lanes()).map(LaneId::from);
        let under_way = lanes().find_map(|lane| {
            let in_flight = self.flights[lane.index()].as_ref()?;
            Some((in_flight, queue.head(lane)?.0))
        });
        let Some((in_flight, op)) = under_way else {
            let (op, pass) = lanes().find_map(|lane| queue.head(lane)).unwrap_or_default();
            let at = At { iteration: first + pass as u32, section };
            let (iteration, op) = (at.iteration + 1, self.describe(at, op));
            return Err(ExecError::Stuck { rank, iteration, op });
        };
        let (at, silence) = (in_flight.at, self.run.options.silence);
        if let (Progress::Pending { on: peer, .. }, true) = (in_flight.progress, waited >= silence)
        {
            let (iteration, op) = (at.iteration + 1, self.describe(at, op));
            return Err(ExecError::Silent { rank, iteration, op, peer, waited });
        }
        let patience = silence.saturating_sub(waited);
        self.transport.wait(patience).map_err(|source| self.failed(at, op, source.into()))
    }

    /// Does an op, or begins it if it is an exchange.
    fn begin(&mut self, at: At, op: OpId, lane: LaneId) -> Result<Option<Flight>, Fault> {
        let node = &self.section(at.section).nodes[op.index()];
        let running = |microbatch: Microbatch| {
            u64::from(at.iteration) * u64::from(self.run.plan.strategy.microbatches())
                + u64::from(microbatch.0)
        };
        let now = running(Microbatch(0));
        match node.op {
            Op::Load { what, into, microbatch } => {
                let iteration = at.iteration - self.again;
                self.load(what, into, iteration, microbatch, running(microbatch))?;
            }
            Op::Compute { segment, microbatch, fresh } => {
                let (segment, running) = (self.program.segment(segment), running(microbatch));
                self.compute.segment(&self.memory, segment, running, fresh)?;
            }
            Op::Send { to, channel, view, microbatch } => {
                let running = running(microbatch);
                let data = (self.memory.span(view, running), self.memory.dtype(view.buffer));
                return Ok(Some(self.exchanges.send(to, channel, data, running)?));
            }
            Op::Recv { from, channel, view, microbatch } => {
                let running = running(microbatch);
                let data = (self.memory.span(view, running), self.memory.dtype(view.buffer));
                return Ok(Some(self.exchanges.receive(from, channel, data, running)?));
            }
            Op::Collective { call, microbatch } => {
                let running = running(microbatch);
                return Ok(Some(self.exchanges.collective(&self.memory, call, lane, running)?));
            }
            Op::Accumulate { from, into, mode } => self.accumulate(from, into, mode, now)?,
            Op::Step { bucket } => {
                let norm = self.program.outputs.norm.map(|norm| self.scalar(norm, now));
                let (strategy, norm) = (&self.run.plan.strategy, norm.transpose()?);
                // All ranks see the same norm, and keep their weights if there is nothing to learn.
                if norm.is_some_and(|norm| !norm.is_finite()) {
                    return Ok(None);
                }
                let rule = Rule::new(strategy, self.run.options, at.iteration, norm, &self.scale);
                let bucket = &self.program.buckets[bucket as usize];
                let (types, pool) = (self.run.kernels.types, self.compute.pool());
                rule.step(types, &self.memory, pool, self.place, bucket, now)?;
            }
            // A declaration: the memory is planned, and nothing is given back.
            Op::Free { .. } => {}
            Op::Stash { .. } | Op::Restore { .. } | Op::Serve { .. } => {
                unreachable!("refused before the start")
            }
        }
        Ok(None)
    }

    /// Brings a microbatch of this rank's replica: consecutive samples of the global batch.
    fn load(
        &mut self,
        what: LoadKind,
        into: BufferId,
        iteration: u32,
        microbatch: Microbatch,
        running: u64,
    ) -> Result<(), Fault> {
        let strategy = &self.run.plan.strategy;
        let before = u64::from(self.place.replica) * u64::from(strategy.microbatches())
            + u64::from(microbatch.0);
        let ahead = match what {
            LoadKind::Tokens => 0,
            LoadKind::Targets => 1,
        };
        let span = self.memory.whole(into, running);
        let views = self.memory.views(&[(span, Access::Write)])?;
        let samples = views.take_u32(0).chunks_mut(strategy.seq as usize);
        let first = self.run.from.samples_before(iteration, strategy.global_batch);
        for (sample, tokens) in (before * strategy.micro_batch..).zip(samples) {
            self.run.data.fill(first.wrapping_add(sample), ahead, tokens)?;
        }
        Ok(())
    }

    fn accumulate(
        &self,
        from: View,
        into: View,
        mode: AccumulateMode,
        running: u64,
    ) -> Result<(), ArenaError> {
        let dtype = self.memory.dtype(into.buffer);
        let (from, into) = (self.memory.span(from, running), self.memory.span(into, running));
        match mode {
            AccumulateMode::Move => self.memory.copy(from, into),
            AccumulateMode::Add => {
                let views = self.memory.views(&[(from, Access::Read), (into, Access::Write)])?;
                let pool = self.compute.pool();
                match Float::of(dtype).unwrap_or(Float::F32) {
                    Float::F32 => add::<f32>(pool, views.slice(0), views.take(1)),
                    Float::Bf16 => add::<Bf16>(pool, views.slice(0), views.take(1)),
                    Float::F16 => add::<F16>(pool, views.slice(0), views.take(1)),
                }
                Ok(())
            }
        }
    }

    /// What there is to see at the end of an iteration. `ended` is when the last one ended.
    fn sight(&self, iteration: u32, ended: &mut Seconds) -> Result<Sight, ExecError> {
        let running = u64::from(iteration) * u64::from(self.run.plan.strategy.microbatches());
        let read = |buffer: Option<BufferId>| {
            let value = buffer.map(|buffer| self.scalar(buffer, running)).transpose();
            value.map_err(|source| ExecError::Memory { rank: self.place.rank, source })
        };
        let outputs = self.program.outputs;
        let (loss, norm) = (read(outputs.loss)?, read(outputs.norm)?);
        let now = self.recorder.now();
        let took = now - std::mem::replace(ended, now);
        Ok(Sight { iteration, loss, norm, took })
    }

    fn scalar(&self, buffer: BufferId, running: u64) -> Result<f32, ArenaError> {
        self.memory.read(self.memory.whole(buffer, running), |values: &[f32]| values[0])
    }

    fn section(&self, section: SectionOf) -> &'a Section {
        match section {
            SectionOf::Prologue => &self.program.prologue,
            SectionOf::Body => &self.program.body,
            SectionOf::Epilogue => &self.program.epilogue,
        }
    }

    fn describe(&self, at: At, op: OpId) -> String {
        match self.section(at.section).nodes.get(op.index()) {
            Some(node) => describe(self.run.plan, self.program, &node.op),
            None => format!("op {op}"),
        }
    }

    fn failed(&self, at: At, op: OpId, source: Fault) -> ExecError {
        let (rank, iteration) = (self.place.rank, at.iteration - self.again + 1);
        ExecError::Op { rank, iteration, op: self.describe(at, op), source }
    }
}
