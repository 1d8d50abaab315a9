//! One rank: interprets its program.
//!
//! The compute thread of a rank computes, and drives exchanges when there is nothing to compute. A
//! progress thread drives them while it computes, see [`crate::progress::thread`].

pub(crate) mod lanes;
pub(crate) mod queue;
pub(crate) mod recorder;
pub(crate) mod serve;

use crate::checkpoint::{
    DataPosition, Saver, TrainingState, restore_moments, restore_rank_state, restore_weights,
};
use crate::device::cpu::compressed_adam::MomentumExchange;
use crate::device::cpu::hogwild;
use crate::device::cpu::step::{Rule, norm_of};
use crate::device::cpu::{Compute, add};
use crate::error::{ExecError, Fault};
use crate::hugging_face::Whole;
use crate::interpreter::lanes::{OffloadStatus, OpClass, OpScheduler, RunningOp, WaitSpan};
use crate::interpreter::queue::ReadyQueue;
use crate::interpreter::recorder::Recorder;
use crate::interpreter::serve::ServerState;
use crate::memory::Memory;
use crate::memory::offload_thread;
use crate::parameters::{self, HeldWeights};
use crate::progress::engine::ProgressEngine;
use crate::progress::thread::ProgressThread;
use crate::rank_coords::RankCoords;
use crate::run::control::during;
use crate::run::job::{ResumePoint, RunContext};
use crate::run::loss_scale::LossScale;
use crate::run::options::Start;
use crate::run::staleness::{Staleness, StalenessTracker};
use crate::types::{Float, typed};
use paceline_comm::Transport;
use paceline_kernels::arena::{Access, ArenaError};
use paceline_kernels::element::narrow;
use paceline_kernels::pool::Pool;
use paceline_kernels::{Bf16, Element, F16};
use paceline_plan::ids::{BufferId, Microbatch};
use paceline_plan::program::{
    AccumulateMode, LoadKind, Op, PROGRESS_HANDOFF_MIN, Program, StepPhase, View,
};
use paceline_plan::units::Seconds;
use paceline_plan::validate::SectionKind;
use std::path::Path;
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
    pub(crate) recorder: Recorder,
    pub(crate) weights: Option<HeldWeights>,
}

/// Rank that executes its program of the plan.
pub(crate) struct Rank<'a> {
    run: &'a RunContext<'a>,
    program: &'a Program,
    place: RankCoords,
    memory: Arc<Memory<'a>>,
    lanes: Arc<OpScheduler<'a>>,
    progress: Arc<ProgressThread<'a>>,
    compute: Compute<'a>,
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

/// Longest sleep where the awaited thread ends the sleep.
const A_WHILE: Duration = Duration::from_millis(50);

impl<'a> Rank<'a> {
    /// Sets up a rank: its memory and its initial weights.
    pub(crate) fn new(
        run: &'a RunContext<'a>,
        transport: &'a mut dyn Transport,
    ) -> Result<Self, ExecError> {
        let rank = transport.rank();
        let program = run.plan.program(rank);
        let place = RankCoords::of(run.plan, rank);
        let memory = Memory::new(program, transport).map_err(|source| ExecError::Op {
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
        let lanes = OpScheduler::new(run.plan, rank, run.clock, run.options.traced);
        let lanes = Arc::new(lanes.warming_up(run.from.warm_up));
        let memory = Arc::new(memory);
        let progress = Arc::new(ProgressThread::new(ProgressEngine::new(
            run.plan, transport, &memory, &lanes,
        )));
        Ok(Self {
            run,
            program,
            place,
            memory,
            lanes,
            progress,
            compute: Compute::new(run.plan, run.kernels, place, run.vocab, pool),
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
        self.once(SectionKind::Prologue, first)?;
        if let Start::Checkpoint(checkpoint) = &self.run.options.start {
            restore_rank_state(&self.memory, self.run.plan, self.place.rank, checkpoint)?;
        }
        self.lanes.enter(SectionKind::Body, first);
        let mut iteration = first;
        let mut ended = self.lanes.now();
        while self.begin_iteration(iteration)? {
            self.lanes.open();
            self.compute.loss_scale = self.scale.factor();
            let batch = self.run.plan.strategy.global_batch;
            self.compute.rate = self.run.options.lr_at(iteration, batch) as f32;
            self.drive(ReadyQueue::is_complete)?;
            let stats = self.iteration_stats(iteration, &mut ended)?;
            if self.serving.as_ref().is_some_and(|serving| serving.iterations() <= iteration) {
                // The replicas left in the middle of this iteration.
                break;
            }
            if let Some(norm) = stats.norm {
                if self.scale.is_lost(norm) {
                    // With local SGD or asynchronous replicas, the other ranks do not know of it.
                    let strategy = &self.run.plan.strategy;
                    let same = strategy.local.is_none() && !strategy.sync.is_async();
                    return Err(match same && self.program.in_flight.is_empty() {
                        true => self.cause(stats),
                        // Overlapping iterations cannot be repeated one by one.
                        false => unfinite(&stats),
                    });
                }
                self.scale.conclude(norm);
            }
            iteration += 1;
            if let Some(loss) = stats.loss.filter(|loss| !loss.is_finite()) {
                return Err(ExecError::Diverged { iteration, loss });
            }
            report(stats, self.progress.acquire()?.transport)?;
            if self.saver.as_ref().is_some_and(|saver| saver.is_due(iteration)) {
                self.drive(ReadyQueue::is_drained)?;
                self.save(iteration, Saver::begin)?;
            }
            self.saver.as_mut().map_or(Ok(()), Saver::poll)?;
        }
        self.drive(ReadyQueue::is_drained)?;
        let iteration = self.run.stop.end().filter(|_| self.serving.is_none()).unwrap_or(iteration);
        self.once(SectionKind::Epilogue, iteration.saturating_sub(1))?;
        self.save(iteration, Saver::finish)
    }

    /// Finds the cause of a non-finite gradient. Weights are unchanged since before the iteration.
    /// All ranks see the same norm, so all repeat the iteration and check every value.
    fn cause(&mut self, stats: IterationStats) -> ExecError {
        self.compute.watching = true;
        self.lanes.repeat_iteration();
        self.drive(ReadyQueue::is_complete).err().unwrap_or_else(|| unfinite(&stats))
    }

    /// Saves the state after `iteration` iterations, if the run is saved at all.
    fn save(
        &mut self,
        iteration: u32,
        how: fn(&mut Saver, &Memory<'_>, TrainingState) -> Result<(), ExecError>,
    ) -> Result<(), ExecError> {
        let state = self.state(iteration);
        self.saver.as_mut().map_or(Ok(()), |saver| how(saver, &self.memory, state))
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
                path: data.path().map(Path::to_owned),
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
    pub(crate) fn into_result(self) -> Result<RankResult, ExecError> {
        let holding = if self.run.options.keep_parameters {
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
        self.drive(ReadyQueue::is_drained)
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
                moved = engine.make_progress()?;
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
                        OffloadStatus::Idle => engine.wait(self.run.options.exchange_timeout)?,
                    },
                    Some(_) => {}
                }
                continue;
            };
            if let Op::Serve { service } = *started.op {
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
        if progressing.is_none() { progress.acquire().map(|_| ()) } else { Ok(()) }
    }

    fn should_hand_off(&self, started: &RunningOp<'a>) -> bool {
        let took = match started.section {
            SectionKind::Body => self.took[started.id.index()],
            SectionKind::Prologue | SectionKind::Epilogue => Seconds(f64::INFINITY),
        };
        self.progress.can_overlap() && took >= PROGRESS_HANDOFF_MIN
    }

    /// Executes an op that is not an exchange.
    fn perform(&mut self, started: &RunningOp<'a>) -> Result<(), ExecError> {
        self.at = Some(*started);
        self.compute_op(started).map_err(|source| self.lanes.failed(started, source))?;
        if started.section == SectionKind::Body {
            self.took[started.id.index()] = self.lanes.now() - started.start;
        }
        if let (Some(slow), Op::Compute { .. }) = (self.run.options.straggler, started.op)
            && slow.rank == self.place.rank.0
        {
            let took = (self.lanes.now() - started.start).0;
            thread::sleep(Duration::from_secs_f64(took * (slow.factor - 1.0)));
        }
        self.lanes.finish(started, WaitSpan::default());
        Ok(())
    }

    fn compute_op(&mut self, started: &RunningOp<'a>) -> Result<(), Fault> {
        let running = |microbatch: Microbatch| {
            u64::from(started.pass) * u64::from(self.run.plan.strategy.microbatches())
                + u64::from(microbatch.0)
        };
        let now = running(Microbatch(0));
        match *started.op {
            Op::Load { what, into, microbatch } => {
                self.load(what, into, started.iteration, microbatch, running(microbatch))?;
            }
            Op::Compute { segment, microbatch, fresh } => {
                let (segment, running) = (self.program.segment(segment), running(microbatch));
                self.compute.segment(&self.memory, segment, running, fresh)?;
            }
            Op::Accumulate { from, into, mode } => self.accumulate(from, into, mode, now)?,
            Op::Step { bucket, phase } => {
                // Local momenta are computed before the global norm is known.
                let known = self.program.outputs.norm.filter(|_| phase != StepPhase::LocalMomentum);
                let norm = known.map(|norm| self.scalar(norm, now));
                let (strategy, norm) = (&self.run.plan.strategy, norm.transpose()?);
                // All ranks see the same norm, and keep their weights if it is not finite.
                if norm.is_some_and(|norm| !norm.is_finite()) {
                    return Ok(());
                }
                let (options, iteration) = (self.run.options, started.iteration);
                let number = bucket as usize;
                let bucket = &self.program.buckets[number];
                let norm = norm.filter(|_| bucket.is_clipped());
                let update = match (strategy.local, self.memory.shared_weights(bucket.params)) {
                    (None, None) => None,
                    (Some(local), _) => {
                        let before = u64::from(iteration) * u64::from(local.steps);
                        Some((iteration, before + self.earlier_steps(started), 1.0))
                    }
                    (None, Some(shared_weights)) => {
                        let steps = shared_weights.count(number);
                        self.staleness.iter_mut().for_each(|watch| watch.steps(number, steps));
                        Some(self.run.unordered_update(steps, 1))
                    }
                };
                let rule = match update {
                    None => Rule::new(strategy, options, iteration, norm, &self.scale),
                    Some(update) => Rule::of_update(strategy, options, update, norm, &self.scale),
                };
                let (types, pool, place) =
                    (self.run.kernels.types, self.compute.pool(), self.place);
                let memory = &*self.memory;
                let ranks = || self.run.plan.mesh.group_size(self.run.plan.holders(bucket));
                let compressed_adam = || rule.compressed_adam(self.run.from.warm_up, ranks());
                let on = MomentumExchange { types, memory, pool, place, bucket, running: now };
                match (phase, compressed_adam()) {
                    (StepPhase::TensorNorms | StepPhase::Apply, _) => {
                        rule.step(types, memory, pool, place, bucket, phase, now)?;
                    }
                    (StepPhase::LocalMomentum, Some(compressed_adam)) => {
                        on.local_momentum(&compressed_adam)?
                    }
                    (StepPhase::ApplyMomentum, Some(compressed_adam)) => {
                        on.apply_momentum(&compressed_adam)?
                    }
                    (StepPhase::LocalMomentum | StepPhase::ApplyMomentum, None) => {}
                }
            }
            // A declaration only: memory is planned, and nothing is released.
            Op::Free { .. } => {}
            Op::Send { .. } | Op::Recv { .. } | Op::Collective { .. } => {
                unreachable!("exchanges are carried")
            }
            Op::Restore { from, into, .. } if self.memory.shared_weights(from).is_some() => {
                self.pull(from, into, now)?;
            }
            Op::Stash { from, into, microbatch } | Op::Restore { from, into, microbatch } => {
                let running = running(microbatch);
                let span = |view| self.memory.span(view, running);
                self.memory.copy(span(from), span(into))?;
            }
            Op::Serve { .. } => unreachable!("servers own the transport"),
        }
        Ok(())
    }

    /// Copies the current shared weights to the buffer that this rank computes on.
    fn pull(&mut self, from: View, into: View, running: u64) -> Result<(), ArenaError> {
        let Some(shared_weights) = self.memory.shared_weights(from) else { return Ok(()) };
        let bucket = self.program.buckets.iter().position(|bucket| bucket.params == from);
        if let (Some(watch), Some(bucket)) = (&mut self.staleness, bucket) {
            watch.reads(bucket, shared_weights.steps(bucket));
        }
        let (from, into) = (self.memory.span(from, running), self.memory.span(into, running));
        hogwild::pull(self.compute.pool(), &self.memory, shared_weights, from, into)
    }

    /// Number of earlier steps of the same bucket in the iteration.
    fn earlier_steps(&self, started: &RunningOp<'_>) -> u64 {
        let before = &self.program.body.nodes[..started.id.index()];
        before.iter().filter(|node| node.op == *started.op).count() as u64
    }

    /// Serves replicas asynchronously, for one iteration's worth of requests.
    fn serve(
        &mut self,
        started: &RunningOp<'a>,
        service: u32,
        transport: &mut dyn Transport,
    ) -> Result<(), ExecError> {
        self.at = Some(*started);
        let Some(mut serving) = self.serving.take() else { return Ok(()) };
        let (program, exchange_timeout) = (self.program, self.run.options.exchange_timeout);
        let (memory, service) = (Arc::clone(&self.memory), &program.services[service as usize]);
        let mut apply = |bucket: u32, updates: u64| self.apply(bucket, updates, service.requests);
        let served =
            serving.serve(transport, &memory, program, service, exchange_timeout, &mut apply);
        self.serving = Some(serving);
        served?;
        self.lanes.finish(started, WaitSpan::default());
        Ok(())
    }

    /// Applies the gradients of one request to this server's shard of a bucket, after `updates`
    /// earlier updates. They are clipped by their own norm: a server has not seen the rest.
    fn apply(&mut self, bucket: u32, updates: u64, requests: u32) -> Result<(), Fault> {
        let RunContext { plan, options, kernels, .. } = self.run;
        let bucket = &self.program.buckets[bucket as usize];
        let grads = self.memory.span(bucket.grads, 0);
        let types = kernels.types;
        let norm = typed!(types, <_T, G> self.memory.read(grads, |grads: &[G]| norm_of(grads)))?;
        if !norm.is_finite() {
            return Ok(());
        }
        let update = self.run.unordered_update(updates, requests);
        let norm = Some(norm).filter(|_| bucket.is_clipped());
        let rule = Rule::of_update(&plan.strategy, options, update, norm, &self.scale);
        let (pool, apply) = (self.compute.pool(), StepPhase::Apply);
        Ok(rule.step(types, &self.memory, pool, self.place, bucket, apply, 0)?)
    }

    /// Loads a microbatch of this rank's replica: consecutive samples of the global batch.
    fn load(
        &mut self,
        what: LoadKind,
        into: BufferId,
        iteration: u32,
        microbatch: Microbatch,
        running: u64,
    ) -> Result<(), Fault> {
        let strategy = &self.run.plan.strategy;
        let microbatches = strategy.microbatches().max(1);
        // A microbatch number beyond the iteration belongs to a later one.
        let iteration = iteration.saturating_add(microbatch.0 / microbatches);
        let before = u64::from(self.place.replica) * u64::from(microbatches)
            + u64::from(microbatch.0 % microbatches);
        let all = self.run.from.samples_before(iteration, strategy.global_batch);
        let first = all.wrapping_add(before * strategy.micro_batch);
        let span = self.memory.whole(into, running);
        let views = self.memory.views(&[(span, Access::Write)])?;
        let ahead = match what {
            LoadKind::Tokens => 0,
            LoadKind::Targets => 1,
            LoadKind::Lookahead(places) => u64::from(places),
            LoadKind::Features => {
                typed!(self.run.kernels.types, <T, _G> self.features::<T>(first, views.take(0)));
                return Ok(());
            }
        };
        if let (LoadKind::Tokens, Some(each)) = (what, self.run.data.counted()) {
            // Indices that the samples of all replicas look up, or those of this replica only.
            let ids = views.take_u32(0);
            let here = (ids.len() / each) as u64 == strategy.micro_batch;
            let of_replica = strategy.micro_batch * u64::from(microbatches);
            for (sample, ids) in (0..).zip(ids.chunks_mut(each)) {
                let number = if here {
                    first.wrapping_add(sample)
                } else {
                    let [replica, at] =
                        [sample / strategy.micro_batch, sample % strategy.micro_batch];
                    let before = u64::from(microbatch.0 % microbatches) * strategy.micro_batch;
                    all.wrapping_add(replica * of_replica + before + at)
                };
                self.run.data.fill(number, 0, ids)?;
            }
            return Ok(());
        }
        let runs = self.place.runs(strategy.seq);
        let own = runs.iter().map(|run| (run.end - run.start) as usize).sum();
        let samples = views.take_u32(0).chunks_mut(own);
        for (sample, mut tokens) in (0..).zip(samples) {
            for run in runs.iter().filter(|run| !run.is_empty()) {
                let (part, rest) = tokens.split_at_mut((run.end - run.start) as usize);
                self.run.data.fill(first.wrapping_add(sample), ahead + run.start, part)?;
                tokens = rest;
            }
        }
        Ok(())
    }

    /// Loads the features of consecutive samples.
    fn features<T: Element>(&self, first: u64, into: &mut [T]) {
        let samples = self.run.plan.strategy.micro_batch.max(1) as usize;
        let mut wide = vec![0.0; into.len() / samples];
        for (sample, into) in (0..).zip(into.chunks_mut(wide.len().max(1))) {
            let sample = first.wrapping_add(sample);
            match T::singles_mut(into) {
                Some(into) => self.run.data.features(sample, into),
                None => {
                    self.run.data.features(sample, &mut wide);
                    narrow(&wide, into);
                }
            }
        }
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

    /// Statistics at the end of an iteration. `ended` is the end of the previous one.
    fn iteration_stats(
        &mut self,
        iteration: u32,
        ended: &mut Seconds,
    ) -> Result<IterationStats, ExecError> {
        let running = u64::from(iteration) * u64::from(self.run.plan.strategy.microbatches());
        let read = |buffer: Option<BufferId>| {
            let value = buffer.map(|buffer| self.scalar(buffer, running)).transpose();
            value.map_err(|source| ExecError::Memory {
                rank: self.place.rank,
                source: source.into(),
            })
        };
        let outputs = self.program.outputs;
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

    fn scalar(&self, buffer: BufferId, running: u64) -> Result<f32, ArenaError> {
        self.memory.read(self.memory.whole(buffer, running), |values: &[f32]| values[0])
    }
}

/// Error for an iteration without a finite gradient whose cause is unknown.
fn unfinite(stats: &IterationStats) -> ExecError {
    let loss = stats.loss.unwrap_or(f32::NAN);
    ExecError::Diverged { iteration: stats.iteration + 1, loss }
}
