//! One rank: interprets its program.
//!
//! The compute thread of a rank computes, and drives exchanges when there is nothing to compute. A
//! progress thread drives them while it computes, see [`crate::progress::thread`].

pub(crate) mod lanes;
mod perform;
pub(crate) mod queue;
pub(crate) mod recorder;
pub(crate) mod serve;
mod staging;
pub(crate) mod task;

use crate::checkpoint::{
    DataPosition, Saver, TrainingState, restore_moments, restore_rank_state, restore_weights,
};
use crate::device::{Device, Pass, Setup, Stream};
use crate::error::{ExecError, Fault};
use crate::hugging_face::Whole;
use crate::interpreter::lanes::{OffloadStatus, OpScheduler, RunningOp};
use crate::interpreter::queue::ReadyQueue;
use crate::interpreter::recorder::Recorder;
use crate::interpreter::serve::ServerState;
use crate::interpreter::staging::StagedExchange;
use crate::interpreter::task::{OpClass, Task};
use crate::memory::{Memory, offload_thread};
use crate::parameters::{self, HeldWeights};
use crate::progress::engine::ProgressEngine;
use crate::progress::exchange::{MpiGroups, join_mpi};
use crate::progress::thread::ProgressThread;
use crate::rank_coords::RankCoords;
use crate::run::control::{during, largest};
use crate::run::job::{ResumePoint, RunContext};
use crate::run::loss_scale::LossScale;
use crate::run::options::Start;
use crate::run::staleness::StalenessTracker;
use paceline_comm::Transport;
use paceline_kernels::arena::Span;
use paceline_plan::collective::Library;
use paceline_plan::ids::BufferId;
use paceline_plan::program::{PROGRESS_HANDOFF_MIN, Program};
use paceline_plan::staleness::Staleness;
use paceline_plan::units::Seconds;
use paceline_plan::validate::SectionKind;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Per-iteration statistics; `None` on ranks whose program does not compute them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IterationStats {
    /// Iteration, counted from 0.
    pub(crate) iteration: u32,
    /// Sum of the losses of all tokens.
    pub(crate) loss: Option<f32>,
    /// Same for multi-token prediction, the mean over its modules.
    pub(crate) mtp_loss: Option<f32>,
    /// Gradient norm.
    pub(crate) norm: Option<f32>,
    /// Number of token-to-expert assignments dropped because the expert was full.
    pub(crate) dropped: Option<f32>,
    /// Duration of the iteration, from the end of the previous one.
    pub(crate) took: Seconds,
    /// Staleness of asynchronously applied gradients.
    pub(crate) staleness: Option<Staleness>,
}

/// Callback that receives a rank's statistics, and may use its transport to forward them.
pub(crate) type ReportFn<'t> =
    dyn FnMut(IterationStats, &mut dyn Transport) -> Result<(), ExecError> + 't;

/// Result of a rank after its run.
#[derive(Debug)]
pub(crate) struct RankResult {
    pub(crate) arena_bytes: u64,
    pub(crate) copy_bytes: u64,
    /// Memory of a device besides the host's.
    pub(crate) device_bytes: Option<u64>,
    pub(crate) recorder: Recorder,
    pub(crate) weights: Option<HeldWeights>,
}

/// Rank that executes its program of the plan.
pub(crate) struct Rank<'a, D: Device> {
    run: &'a RunContext<'a, D>,
    program: &'a Program,
    place: RankCoords,
    memory: Arc<Memory<'a>>,
    lanes: Arc<OpScheduler<'a>>,
    progress: Arc<ProgressThread<'a>>,
    device: D,
    /// Tasks that the device was issued in this pass, and end events by op.
    issued: Vec<Issued<'a, D>>,
    /// Iteration that the device was issued last and may still compute, with its tasks.
    left: Option<(u32, Vec<Issued<'a, D>>)>,
    /// Time at which the device was opened.
    opened: Seconds,
    ends: Vec<Option<D::Event>>,
    /// Exchanges that wait for the device.
    staged: Vec<StagedExchange<'a, D>>,
    saver: Option<Saver>,
    scale: LossScale,
    /// State of an asynchronous server about its replicas.
    serving: Option<ServerState>,
    /// Staleness of this rank's steps on shared weights.
    staleness: Option<StalenessTracker>,
    /// Loss and norm of the last iteration, sent with the request for the next grant.
    saw: Option<[f32; 2]>,
    /// Last duration of each op of the body.
    took: Vec<Seconds>,
    /// Op computed last, for messages.
    at: Option<RunningOp<'a>>,
}

/// Task that a device was issued, between two events.
#[derive(Debug)]
struct Issued<'a, D: Device> {
    op: RunningOp<'a>,
    begin: D::Event,
    end: D::Event,
}

/// Longest sleep where the awaited thread ends the sleep.
const A_WHILE: Duration = Duration::from_millis(50);
/// Time between two looks at a device that has not done what an exchange waits for.
const GLANCE: Duration = Duration::from_micros(20);

impl<'a, D: Device> Rank<'a, D> {
    /// Sets up a rank: its memory and its initial weights.
    pub(crate) fn new(
        run: &'a RunContext<'a, D>,
        transport: &'a mut dyn Transport,
    ) -> Result<Self, ExecError> {
        let rank = transport.rank();
        let program = run.plan.program(rank);
        let place = RankCoords::of(run.plan, rank);
        let memory = match D::ISSUES {
            true => Memory::beside_device(program),
            false => Memory::new(program, transport),
        };
        let memory = memory.map_err(|source| ExecError::Op {
            rank,
            iteration: 1,
            op: "start".into(),
            source,
        })?;
        let refused = |source| ExecError::Memory { rank, source };
        let memory = memory
            .with_store(run.plan.strategy.store, &run.options.offload_folder)
            .map_err(|source| refused(source.into()))?
            .with_shared_weights(run.shared_weights.clone());
        match &run.options.start {
            Start::Seed => {
                let (types, seed) = (run.types, run.options.seed);
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
        let setup = Setup {
            plan: run.plan,
            kernels: run.kernels,
            types: run.types,
            place,
            vocab: run.vocab,
            options: run.options,
        };
        let opened = D::open(&setup, &memory).and_then(|mut device| {
            device.join(&setup, transport)?;
            Ok(device)
        });
        let device = opened.map_err(|fault| {
            if let Fault::Threads(source) = fault {
                ExecError::Thread { rank, source }
            } else {
                ExecError::Op { rank, iteration: 1, op: "start".into(), source: fault }
            }
        })?;
        let opened = Seconds(run.clock.elapsed().as_secs_f64());
        let lanes = OpScheduler::new(run.plan, rank, run.clock, run.options.traced);
        let lanes = Arc::new(lanes.warming_up(run.from.warm_up));
        let memory = Arc::new(memory);
        let groups = match D::LIBRARY {
            Some(Library::Mpi) => join_mpi(run.plan, rank),
            Some(Library::Nccl) | None => Ok(MpiGroups::new()),
        };
        let groups = groups.map_err(|source| ExecError::Op {
            rank,
            iteration: 1,
            op: "start".into(),
            source: source.into(),
        })?;
        let engine = ProgressEngine::new(run.plan, transport, &memory, &lanes, groups);
        let progress = Arc::new(match D::ISSUES {
            true => ProgressThread::without(engine.staged()),
            false => ProgressThread::new(engine),
        });
        Ok(Self {
            run,
            program,
            place,
            memory,
            lanes,
            progress,
            device,
            opened,
            issued: Vec::new(),
            left: None,
            ends: Vec::new(),
            staged: Vec::new(),
            saver,
            scale: LossScale::new(&run.plan.strategy, run.options),
            serving: ServerState::of(run.plan, rank, run.from.iteration, run.options.iterations),
            staleness: run
                .shared_weights
                .as_ref()
                .map(|_| StalenessTracker::new(program.buckets.len())),
            saw: None,
            took: vec![Seconds(f64::INFINITY); program.body.nodes.len()],
            at: None,
        })
    }

    /// Runs the whole program. `report` is called for every iteration.
    pub(crate) fn work(&mut self, report: &mut ReportFn<'_>) -> Result<(), ExecError> {
        let done = self.work_on_threads(report);
        if let Err(error) = &done {
            // Else a device would wait for ranks that will not come.
            self.device.abort(&error.to_string());
            if let Ok(mut engine) = self.progress.acquire() {
                engine.abort(&error.to_string());
            }
        }
        done
    }

    fn work_on_threads(&mut self, report: &mut ReportFn<'_>) -> Result<(), ExecError> {
        let (progress, rank) = (Arc::clone(&self.progress), self.place.rank);
        let (lanes, memory) = (Arc::clone(&self.lanes), Arc::clone(&self.memory));
        let stores = self.program.memory.stored().0 > 0;
        if !progress.can_overlap() && !stores {
            return self.run_program(report);
        }
        let microbatches = self.run.plan.strategy.microbatches();
        thread::scope(|scope| {
            // Shuts the other threads down on any exit path: the scope joins them.
            let (_end, _over) =
                (progress.shutdown_on_drop(), offload_thread::ShutdownGuard(&lanes));
            let thread = |name: &str| thread::Builder::new().name(format!("{name} {rank}"));
            let failed = |source| ExecError::Thread { rank, source };
            if progress.can_overlap() {
                thread("progress").spawn_scoped(scope, || progress.run()).map_err(failed)?;
            }
            if stores {
                let (progress, lanes, memory) = (&progress, &lanes, &memory);
                let done = move || progress.wake();
                let attend = move || offload_thread::run(rank, microbatches, memory, lanes, done);
                thread("store").spawn_scoped(scope, attend).map_err(failed)?;
            }
            self.run_program(report)
        })
    }

    fn run_program(&mut self, report: &mut ReportFn<'_>) -> Result<(), ExecError> {
        let first = self.run.from.iteration;
        self.prime(first)?;
        self.once(SectionKind::Prologue, first)?;
        if let Start::Checkpoint(checkpoint) = &self.run.options.start {
            restore_rank_state(&self.memory, self.run.plan, self.place.rank, checkpoint)?;
            self.transfer(D::upload)?;
        }
        self.lanes.enter(SectionKind::Body, first);
        let mut iteration = first;
        let mut ended = self.lanes.now();
        while self.begin_iteration(iteration)? {
            self.lanes.open();
            self.device.begin_pass(self.pass(iteration, false));
            self.drive(ReadyQueue::is_complete)?;
            if self.reads_late() {
                let before = self.left.take();
                self.leave(iteration)?;
                if let Some(before) = before {
                    self.catch_up(before, &mut ended, report)?;
                }
            } else {
                self.settle()?;
                let stats = self.iteration_stats(iteration, &mut ended)?;
                if self.serving.as_ref().is_some_and(|serving| serving.iterations() <= iteration) {
                    // The replicas left in the middle of this iteration.
                    break;
                }
                self.conclude(stats, report)?;
            }
            iteration += 1;
            if self.saver.as_ref().is_some_and(|saver| saver.is_due(iteration)) {
                if let Some(before) = self.left.take() {
                    self.catch_up(before, &mut ended, report)?;
                }
                self.drive(ReadyQueue::is_drained)?;
                self.settle()?;
                self.save(iteration, Saver::begin)?;
            }
            self.saver.as_mut().map_or(Ok(()), Saver::poll)?;
        }
        if let Some(before) = self.left.take() {
            self.catch_up(before, &mut ended, report)?;
        }
        self.drive(ReadyQueue::is_drained)?;
        self.settle()?;
        let iteration = self.run.stop.end().filter(|_| self.serving.is_none()).unwrap_or(iteration);
        self.once(SectionKind::Epilogue, iteration.saturating_sub(1))?;
        match self.run.options.save_at_end {
            true => self.save(iteration, Saver::finish),
            false => Ok(()),
        }
    }

    /// Returns true if an iteration is issued before the results of the last one are known. The scale
    /// of 16-bit gradients depends on them.
    fn reads_late(&self) -> bool {
        D::ISSUES && self.scale.reported().is_none()
    }

    /// Ends an iteration that the device has been issued, without waiting for it.
    fn leave(&mut self, iteration: u32) -> Result<(), ExecError> {
        let left = self.device.leave_pass(&self.outputs(iteration));
        left.map_err(|source| self.at_the_end(source))?;
        self.ends.clear();
        self.left = Some((iteration, std::mem::take(&mut self.issued)));
        Ok(())
    }

    /// Memory of the numbers that an iteration reports.
    fn outputs(&self, iteration: u32) -> Vec<Span> {
        let running = u64::from(iteration) * u64::from(self.run.plan.strategy.microbatches());
        let outputs = self.program.outputs;
        let outputs = [outputs.loss, outputs.norm, outputs.dropped].into_iter().flatten();
        outputs.map(|buffer| self.memory.whole(buffer, running)).collect()
    }

    /// Waits for the results of an iteration that was left, and reports them.
    fn catch_up(
        &mut self,
        (iteration, issued): (u32, Vec<Issued<'a, D>>),
        ended: &mut Seconds,
        report: &mut ReportFn<'_>,
    ) -> Result<(), ExecError> {
        self.wait_for_device(&issued, D::has_left)?;
        let finished = self.device.finish_pass(&self.memory);
        finished.map_err(|source| self.at_the_end(source))?;
        self.record(issued)?;
        let stats = self.iteration_stats(iteration, ended)?;
        self.conclude(stats, report)
    }

    /// Reports an iteration, unless its numbers are no longer finite.
    fn conclude(
        &mut self,
        stats: IterationStats,
        report: &mut ReportFn<'_>,
    ) -> Result<(), ExecError> {
        if let Some(norm) = stats.norm {
            if !norm.is_finite()
                && let Some(overflow) = self.expert_overflow(stats.iteration)?
            {
                return Err(overflow);
            }
            if self.scale.is_lost(norm) {
                return Err(match self.run.facts.repeatable && !D::ISSUES {
                    true => self.cause(stats),
                    false => unfinite(&stats),
                });
            }
            self.scale.conclude(norm);
        }
        if let Some(loss) = stats.loss.filter(|loss| !loss.is_finite()) {
            return Err(ExecError::Diverged { iteration: stats.iteration + 1, loss });
        }
        report(stats, self.progress.acquire()?.transport)
    }

    /// Asks all ranks if the buffers of experts have overflowed in an iteration, which has changed no
    /// weight then. If so, saves the state before it.
    fn expert_overflow(&mut self, iteration: u32) -> Result<Option<ExecError>, ExecError> {
        if !self.run.finishes_overflow {
            return Ok(None);
        }
        let own = self.device.take_overflow().map_or(0.0, |full| full.factor());
        self.drive(ReadyQueue::is_drained)?;
        self.settle()?;
        let needed = self.largest(own, 2 * iteration)?;
        if needed == 0.0 {
            return Ok(None);
        }
        if iteration > self.run.from.iteration {
            self.save(iteration, Saver::finish)?;
        }
        // Nobody leaves before the checkpoint is complete.
        self.largest(0.0, 2 * iteration + 1)?;
        let factor = self.run.plan.strategy.expert_buffer_factor;
        Ok(Some(ExecError::ExpertOverflow { iteration: iteration + 1, needed, factor }))
    }

    /// Largest of all ranks' numbers.
    fn largest(&self, own: f64, sequence: u32) -> Result<f64, ExecError> {
        let timeout = self.run.options.exchange_timeout;
        let mut engine = self.progress.acquire()?;
        let found = largest(engine.transport, own, sequence, timeout);
        found.map_err(during(self.place.rank, "agreeing on the size of the experts' buffers"))
    }

    /// Finds the cause of a non-finite gradient. Weights are unchanged since before the iteration.
    /// All ranks see the same norm, so all repeat the iteration and check every value.
    fn cause(&mut self, stats: IterationStats) -> ExecError {
        self.device.begin_pass(self.pass(stats.iteration, true));
        self.lanes.repeat_iteration();
        self.drive(ReadyQueue::is_complete).err().unwrap_or_else(|| unfinite(&stats))
    }

    /// Saves the state after `iteration` iterations, if the run is saved at all.
    fn save(
        &mut self,
        iteration: u32,
        how: fn(&mut Saver, &Memory<'_>, TrainingState) -> Result<(), ExecError>,
    ) -> Result<(), ExecError> {
        if self.saver.is_some() {
            self.transfer(D::download)?;
        }
        let state = self.state(iteration);
        self.saver.as_mut().map_or(Ok(()), |saver| how(saver, &self.memory, state))
    }

    /// Constants of an iteration.
    fn pass(&self, iteration: u32, watching: bool) -> Pass {
        let batch = self.run.plan.strategy.global_batch;
        let rate = self.run.options.lr_at(iteration, batch) as f32;
        let share = self.run.data.client_factor(self.place.replica, iteration);
        Pass { rate, loss_scale: self.scale.factor(), watching, share }
    }

    /// Copies weights and optimizer state to or from the device.
    fn transfer(
        &mut self,
        copy: fn(&mut D, Stream, &Memory<'_>, Span) -> Result<(), Fault>,
    ) -> Result<(), ExecError> {
        let copied = self
            .memory
            .kept()
            .into_iter()
            .try_for_each(|span| copy(&mut self.device, 0, &self.memory, span));
        copied.map_err(|source| self.at_the_end(source))
    }

    /// Adds rank and op to a fault of the device after what it was issued.
    fn at_the_end(&self, source: Fault) -> ExecError {
        let (iteration, op) = self.current_op();
        ExecError::Op { rank: self.place.rank, iteration, op, source }
    }

    /// State of training after `iteration` iterations.
    fn state(&self, iteration: u32) -> TrainingState {
        let RunContext { plan, options, data, from: ResumePoint { warm_up, .. }, .. } = *self.run;
        let strategy = &plan.strategy;
        TrainingState {
            format: TrainingState::FORMAT,
            iteration,
            seed: options.seed,
            data: DataPosition {
                source: data.name().to_owned(),
                samples: self.run.from.samples_before(iteration, strategy.global_batch),
                // Found from any working directory.
                path: data.path().and_then(|path| std::path::absolute(path).ok()),
            },
            optimizer: strategy.optimizer,
            loss_scale: self.scale.reported().map(|_| self.scale),
            compress_warmup_done: (strategy.has_compress_warmup() && iteration > warm_up)
                .then_some(warm_up),
            strategy: strategy.clone(),
        }
    }

    fn begin_iteration(&mut self, iteration: u32) -> Result<bool, ExecError> {
        if let Some(serving) = &self.serving {
            return Ok(serving.is_open());
        }
        let begun = self.run.stop.begin(iteration, self.saw, self.progress.acquire()?.transport);
        begun.map_err(during(self.place.rank, "asking how far to go"))
    }

    /// Consumes the rank and returns its result.
    pub(crate) fn into_result(mut self) -> Result<RankResult, ExecError> {
        let holding = if self.run.options.keep_parameters {
            self.transfer(D::download)?;
            let read = HeldWeights::read(&self.memory, self.place, self.program);
            Some(read.map_err(|source| ExecError::Memory { rank: self.place.rank, source })?)
        } else {
            None
        };
        let arena_bytes = self.memory.bytes();
        let copy_bytes = self.saver.as_ref().map_or(0, Saver::bytes);
        Ok(RankResult {
            arena_bytes,
            copy_bytes,
            device_bytes: self.device.taken(),
            recorder: self.lanes.take_notes(),
            weights: holding,
        })
    }

    /// Current iteration, counted from 1, and current op.
    pub(crate) fn current_op(&self) -> (u32, String) {
        let carried = self.progress.after_panic().and_then(|engine| engine.at());
        match carried.or(self.at) {
            Some(at) => (at.iteration + 1, self.lanes.describe(&at)),
            None => (1, "start".into()),
        }
    }

    /// Runs a section once.
    fn once(&mut self, section: SectionKind, iteration: u32) -> Result<(), ExecError> {
        self.lanes.enter(section, iteration);
        self.lanes.open();
        self.drive(ReadyQueue::is_drained)?;
        self.settle()
    }

    /// Computes and drives exchanges until the queue satisfies `wanted`.
    fn drive(&mut self, wanted: fn(&ReadyQueue<'a>) -> bool) -> Result<(), ExecError> {
        let progress = Arc::clone(&self.progress);
        let mut progressing = Some(progress.acquire()?);
        loop {
            let moves = self.lanes.moves();
            if self.lanes.are(wanted) {
                break;
            }
            let mut moved = false;
            if let Some(engine) = &mut progressing {
                moved = self.make_progress(engine)?;
            }
            let Some(started) = self.lanes.start(OpClass::Compute) else {
                self.lanes.error()?;
                match &mut progressing {
                    None => progressing = Some(progress.acquire()?),
                    Some(engine) if !moved => match self.lanes.offload_status(moves) {
                        OffloadStatus::Ready => {}
                        OffloadStatus::Busy => {
                            if progress.can_overlap() {
                                engine.sleep(A_WHILE)?;
                            } else {
                                self.lanes.wait_for_offload(moves);
                            }
                            engine.is_back();
                        }
                        OffloadStatus::Idle if self.is_staging() => {
                            thread::sleep(GLANCE);
                            engine.is_back();
                        }
                        OffloadStatus::Idle => engine.wait(self.run.options.exchange_timeout)?,
                    },
                    Some(_) => {}
                }
                continue;
            };
            if let Task::Serve(service) = started.task {
                let mut engine = match progressing.take() {
                    Some(engine) => engine,
                    None => progress.acquire()?,
                };
                self.serve(&started, service, engine.transport)?;
                progressing = Some(engine);
                continue;
            }
            match &progressing {
                Some(engine) if engine.is_under_way() && self.should_hand_off(&started) => {
                    progressing = None;
                    progress.release();
                }
                Some(_) => {}
                None if self.lanes.has(OpClass::Exchange) => progress.wake(),
                None => {}
            }
            self.perform(&started)?;
        }
        // Between two calls of `drive`, the compute thread owns the transport.
        if progressing.is_none() {
            drop(progress.acquire()?);
        }
        Ok(())
    }

    fn should_hand_off(&self, started: &RunningOp<'a>) -> bool {
        let took = match started.section {
            SectionKind::Body => self.took[started.id.index()],
            SectionKind::Prologue | SectionKind::Epilogue => Seconds(f64::INFINITY),
        };
        self.progress.can_overlap() && took >= PROGRESS_HANDOFF_MIN
    }

    /// Statistics at the end of an iteration. `ended` is the end of the previous one.
    fn iteration_stats(
        &mut self,
        iteration: u32,
        ended: &mut Seconds,
    ) -> Result<IterationStats, ExecError> {
        let running = u64::from(iteration) * u64::from(self.run.plan.strategy.microbatches());
        let outputs = self.program.outputs;
        let late = self.reads_late();
        let mut read = |buffer: Option<BufferId>| {
            let value = buffer.map(|buffer| match late {
                true => self.number(buffer, running),
                false => self.scalar(0, buffer, running),
            });
            let value = value.transpose();
            value.map_err(|source| self.at_the_end(source))
        };
        let (mut loss, mut norm) = (read(outputs.loss)?, read(outputs.norm)?);
        let (dropped, further) = (read(outputs.dropped)?, self.mtp_loss(running)?);
        let now = self.lanes.now();
        let took = now - std::mem::replace(ended, now);
        Ok(match &mut self.serving {
            Some(serving) => {
                let seen = std::mem::take(&mut serving.seen);
                if let Some([mean_loss, mean_norm]) = seen.means() {
                    // Scaled as if all replicas had reported this iteration.
                    loss = Some((mean_loss * f64::from(self.run.plan.mesh.size())) as f32);
                    norm = Some(mean_norm as f32);
                }
                let staleness = seen.staleness();
                IterationStats {
                    iteration,
                    loss,
                    mtp_loss: further,
                    norm,
                    dropped,
                    took,
                    staleness,
                }
            }
            None => {
                self.saw = loss.zip(norm).map(|(loss, norm)| [loss, norm]);
                let ahead = self.run.stop.ahead();
                let staleness = self.staleness.as_mut().and_then(|watch| watch.take(ahead));
                IterationStats {
                    iteration,
                    loss,
                    mtp_loss: further,
                    norm,
                    dropped,
                    took,
                    staleness,
                }
            }
        })
    }

    /// Mean of the multi-token-prediction losses, if any; they are stored after the main loss.
    fn mtp_loss(&self, running: u64) -> Result<Option<f32>, ExecError> {
        let Some(loss) = self.program.outputs.loss else { return Ok(None) };
        let read = self.memory.read(self.memory.whole(loss, running), |values: &[f32]| {
            let modules = values.len() - 1;
            (modules > 0).then(|| values[1..].iter().sum::<f32>() / modules as f32)
        });
        read.map_err(|source| ExecError::Memory { rank: self.place.rank, source: source.into() })
    }

    /// First number of a buffer, behind what a stream was issued.
    fn scalar(&mut self, on: Stream, buffer: BufferId, running: u64) -> Result<f32, Fault> {
        let span = self.memory.whole(buffer, running);
        self.device.download(on, &self.memory, span)?;
        self.number(buffer, running)
    }

    /// First number of a buffer in the host's memory.
    fn number(&self, buffer: BufferId, running: u64) -> Result<f32, Fault> {
        let span = self.memory.whole(buffer, running);
        Ok(self.memory.read(span, |values: &[f32]| values[0])?)
    }
}

/// Error for an iteration without a finite gradient whose cause is unknown.
fn unfinite(stats: &IterationStats) -> ExecError {
    let loss = stats.loss.unwrap_or(f32::NAN);
    ExecError::Diverged { iteration: stats.iteration + 1, loss }
}
