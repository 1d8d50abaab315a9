//! One rank: interprets its program.
//!
//! The thread of a rank computes, and carries messages when there is nothing to compute; a second
//! one carries them while it computes, see [`crate::relay`].

use crate::checkpoint::{
    DataPosition, Saver, TrainingState, restore_carried, restore_moments, restore_weights,
};
use crate::compute::{Compute, add};
use crate::control::during;
use crate::courier::Courier;
use crate::error::{ExecError, Fault};
use crate::hugging_face::Whole;
use crate::lanes::{Kind, Lanes, SectionOf, Started, Stored, Wait};
use crate::loss_scale::LossScale;
use crate::memory::Memory;
use crate::options::Start;
use crate::parameters::{self, Holding};
use crate::place::Place;
use crate::queue::Queue;
use crate::recorder::Recorder;
use crate::relay::Relay;
use crate::run::{From, Run};
use crate::serve::Serving;
use crate::settled::On;
use crate::staleness::{Staleness, Watch};
use crate::storage;
use crate::types::{Float, typed};
use crate::unlocked;
use crate::update::{Rule, norm_of};
use paceline_comm::Transport;
use paceline_kernels::arena::{Access, ArenaError};
use paceline_kernels::element::narrow;
use paceline_kernels::pool::Pool;
use paceline_kernels::{Bf16, Element, F16};
use paceline_plan::ids::{BufferId, Microbatch};
use paceline_plan::program::{
    AccumulateMode, LoadKind, Op, Program, StepPhase, View, WORTH_A_THREAD,
};
use paceline_plan::units::Seconds;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// What a rank sees at the end of an iteration, where its program says that it has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight {
    /// Counted from 0.
    pub(crate) iteration: u32,
    /// The sum of all tokens' losses.
    pub(crate) loss: Option<f32>,
    /// The same of predictions of further tokens, the mean of all modules for them.
    pub(crate) further: Option<f32>,
    /// The norm of the gradient.
    pub(crate) norm: Option<f32>,
    /// Choices whose expert had its fill.
    pub(crate) dropped: Option<f32>,
    /// How long the iteration took, from the end of the one before.
    pub(crate) took: Seconds,
    /// How stale the gradients were that were applied as they came.
    pub(crate) staleness: Option<Staleness>,
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
    memory: Arc<Memory<'a>>,
    lanes: Arc<Lanes<'a>>,
    relay: Arc<Relay<'a>>,
    compute: Compute<'a>,
    saver: Option<Saver>,
    scale: LossScale,
    /// What is known of the replicas that this rank serves as they come.
    serving: Option<Serving>,
    /// What this rank misses of others' steps on what they share.
    watch: Option<Watch>,
    /// The loss and the norm of the last iteration, for whoever asks for leave to run the next.
    saw: Option<[f32; 2]>,
    /// By op of the body: how long it took the last time.
    took: Vec<Seconds>,
    /// What was computed last, for messages.
    at: Option<Started<'a>>,
}

/// How long to sleep at most where whoever is waited for ends the sleep.
const A_WHILE: Duration = Duration::from_millis(50);

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
        let memory = memory
            .with_store(run.plan.strategy.store, &run.options.offload_folder)
            .map_err(|source| refused(source.into()))?
            .with_commons(run.commons.clone());
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
        let lanes = Lanes::new(run.plan, rank, run.clock, run.options.traced);
        let lanes = Arc::new(lanes.warming_up(run.from.warm_up));
        let memory = Arc::new(memory);
        let relay = Arc::new(Relay::new(Courier::new(run.plan, transport, &memory, &lanes)));
        Ok(Self {
            run,
            program,
            place,
            memory,
            lanes,
            relay,
            compute: Compute::new(run.plan, run.kernels, place, run.vocab, pool),
            saver,
            scale: LossScale::new(&run.plan.strategy, run.options),
            serving: Serving::of(run.plan, rank, run.from.iteration, run.options.iterations),
            watch: run.commons.as_ref().map(|_| Watch::new(program.buckets.len())),
            saw: None,
            took: vec![Seconds(f64::INFINITY); program.body.nodes.len()],
            at: None,
        })
    }

    /// Runs the whole program. `tell` hears of every iteration.
    pub(crate) fn work(&mut self, tell: &mut Tell<'_>) -> Result<(), ExecError> {
        let (relay, rank) = (Arc::clone(&self.relay), self.place.rank);
        let (lanes, memory) = (Arc::clone(&self.lanes), Arc::clone(&self.memory));
        let stores = self.program.memory.stored().0 > 0;
        if !relay.can_overlap() && !stores {
            return self.run_program(tell);
        }
        let microbatches = self.run.plan.strategy.microbatches();
        thread::scope(|scope| {
            // However this ends, the other threads must not be waited for in vain.
            let (_end, _over) = (relay.end_on_drop(), storage::End(&lanes));
            let thread = |name: &str| thread::Builder::new().name(format!("{name} {rank}"));
            let failed = |source| ExecError::Thread { rank, source };
            if relay.can_overlap() {
                thread("wires").spawn_scoped(scope, || relay.attend()).map_err(failed)?;
            }
            if stores {
                let (relay, lanes, memory) = (&relay, &lanes, &memory);
                let done = move || relay.nudge();
                let attend = move || storage::attend(rank, microbatches, memory, lanes, done);
                thread("store").spawn_scoped(scope, attend).map_err(failed)?;
            }
            self.run_program(tell)
        })
    }

    fn run_program(&mut self, tell: &mut Tell<'_>) -> Result<(), ExecError> {
        let first = self.run.from.iteration;
        self.once(SectionOf::Prologue, first)?;
        if let Start::Checkpoint(checkpoint) = &self.run.options.start {
            restore_carried(&self.memory, self.run.plan, self.place.rank, checkpoint)?;
        }
        self.lanes.enter(SectionOf::Body, first);
        let mut iteration = first;
        let mut ended = self.lanes.now();
        while self.begin_iteration(iteration)? {
            self.lanes.open();
            self.compute.loss_scale = self.scale.factor();
            let batch = self.run.plan.strategy.global_batch;
            self.compute.rate = self.run.options.lr_at(iteration, batch) as f32;
            self.drive(Queue::is_complete)?;
            let sight = self.sight(iteration, &mut ended)?;
            if self.serving.as_ref().is_some_and(|serving| serving.iterations() <= iteration) {
                // The replicas have left in the middle of it.
                break;
            }
            if let Some(norm) = sight.norm {
                if self.scale.is_lost(norm) {
                    // Of replicas that train apart or wait for nobody, the others do not know.
                    let strategy = &self.run.plan.strategy;
                    let alike = strategy.local.is_none() && !strategy.sync.is_async();
                    return Err(match alike && self.program.in_flight.is_empty() {
                        true => self.cause(sight),
                        // Iterations that run into each other cannot be run again one by one.
                        false => unfinite(&sight),
                    });
                }
                self.scale.conclude(norm);
            }
            iteration += 1;
            if let Some(loss) = sight.loss.filter(|loss| !loss.is_finite()) {
                return Err(ExecError::Diverged { iteration, loss });
            }
            tell(sight, self.relay.take()?.transport)?;
            if self.saver.as_ref().is_some_and(|saver| saver.is_due(iteration)) {
                self.drive(Queue::is_drained)?;
                self.save(iteration, Saver::begin)?;
            }
            self.saver.as_mut().map_or(Ok(()), Saver::poll)?;
        }
        self.drive(Queue::is_drained)?;
        let iteration =
            self.run.horizon.end().filter(|_| self.serving.is_none()).unwrap_or(iteration);
        self.once(SectionOf::Epilogue, iteration.saturating_sub(1))?;
        self.save(iteration, Saver::finish)
    }

    /// Why an iteration ended without a finite gradient. Weights are as they were before it, so all
    /// ranks, which know the same, run it again and look at every number.
    fn cause(&mut self, sight: Sight) -> ExecError {
        self.compute.watching = true;
        self.lanes.open_again();
        self.drive(Queue::is_complete).err().unwrap_or_else(|| unfinite(&sight))
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
        let Run { plan, options, data, from: From { warm_up, .. }, .. } = *self.run;
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
            settled: (strategy.warms_up() && iteration > warm_up).then_some(warm_up),
            strategy: strategy.clone(),
        }
    }

    fn begin_iteration(&mut self, iteration: u32) -> Result<bool, ExecError> {
        if let Some(serving) = &self.serving {
            return Ok(serving.is_open());
        }
        let begun = self.run.horizon.begin(iteration, self.saw, self.relay.take()?.transport);
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
        Ok(Remains { arena_bytes, copy_bytes, recorder: self.lanes.take_notes(), holding })
    }

    /// The iteration, counted from 1, and the op that the rank is at.
    pub(crate) fn whereabouts(&self) -> (u32, String) {
        let carried = self.relay.after_panic().and_then(|courier| courier.at());
        match carried.or(self.at) {
            Some(at) => (at.iteration + 1, self.lanes.describe(&at)),
            None => (1, "start".into()),
        }
    }

    /// Runs a section once.
    fn once(&mut self, section: SectionOf, iteration: u32) -> Result<(), ExecError> {
        self.lanes.enter(section, iteration);
        self.lanes.open();
        self.drive(Queue::is_drained)
    }

    /// Computes and carries until the queue is as wanted.
    fn drive(&mut self, wanted: fn(&Queue<'a>) -> bool) -> Result<(), ExecError> {
        let relay = Arc::clone(&self.relay);
        let mut carrying = Some(relay.take()?);
        loop {
            let moves = self.lanes.moves();
            if self.lanes.are(wanted) {
                break;
            }
            let mut moved = false;
            if let Some(courier) = &mut carrying {
                moved = courier.carry()?;
            }
            let Some(started) = self.lanes.start(Kind::Work) else {
                self.lanes.trouble()?;
                match &mut carrying {
                    None => carrying = Some(relay.take()?),
                    Some(courier) if !moved => match self.lanes.stored(moves) {
                        Stored::Ready => {}
                        Stored::Busy => {
                            if relay.can_overlap() {
                                courier.sleep(A_WHILE)?;
                            } else {
                                self.lanes.wait_for_store(moves);
                            }
                            courier.is_back();
                        }
                        Stored::Idle => courier.wait(self.run.options.silence)?,
                    },
                    Some(_) => {}
                }
                continue;
            };
            if let Op::Serve { service } = *started.op {
                let mut courier = match carrying.take() {
                    Some(courier) => courier,
                    None => relay.take()?,
                };
                self.serve(&started, service, courier.transport)?;
                carrying = Some(courier);
                continue;
            }
            match &carrying {
                Some(courier) if courier.is_under_way() && self.is_worth_a_thread(&started) => {
                    carrying = None;
                    relay.lend();
                }
                Some(_) => {}
                None if self.lanes.has(Kind::Exchange) => relay.nudge(),
                None => {}
            }
            self.perform(&started)?;
        }
        // Between two drives the wires are this thread's.
        if carrying.is_none() { relay.take().map(|_| ()) } else { Ok(()) }
    }

    fn is_worth_a_thread(&self, started: &Started<'a>) -> bool {
        let took = match started.section {
            SectionOf::Body => self.took[started.id.index()],
            SectionOf::Prologue | SectionOf::Epilogue => Seconds(f64::INFINITY),
        };
        self.relay.can_overlap() && took >= WORTH_A_THREAD
    }

    /// Does an op that is no exchange.
    fn perform(&mut self, started: &Started<'a>) -> Result<(), ExecError> {
        self.at = Some(*started);
        self.compute_op(started).map_err(|source| self.lanes.failed(started, source))?;
        if started.section == SectionOf::Body {
            self.took[started.id.index()] = self.lanes.now() - started.start;
        }
        if let (Some(slow), Op::Compute { .. }) = (self.run.options.straggler, started.op)
            && slow.rank == self.place.rank.0
        {
            let took = (self.lanes.now() - started.start).0;
            thread::sleep(Duration::from_secs_f64(took * (slow.factor - 1.0)));
        }
        self.lanes.finish(started, Wait::default());
        Ok(())
    }

    fn compute_op(&mut self, started: &Started<'a>) -> Result<(), Fault> {
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
                // Shares are made before the norm of all is known.
                let known = self.program.outputs.norm.filter(|_| phase != StepPhase::Share);
                let norm = known.map(|norm| self.scalar(norm, now));
                let (strategy, norm) = (&self.run.plan.strategy, norm.transpose()?);
                // All ranks see the same norm, and keep their weights if there is nothing to learn.
                if norm.is_some_and(|norm| !norm.is_finite()) {
                    return Ok(());
                }
                let (options, iteration) = (self.run.options, started.iteration);
                let number = bucket as usize;
                let bucket = &self.program.buckets[number];
                let norm = norm.filter(|_| bucket.is_clipped());
                let update = match (strategy.local, self.memory.commons(bucket.params)) {
                    (None, None) => None,
                    (Some(local), _) => {
                        let before = u64::from(iteration) * u64::from(local.steps);
                        Some((iteration, before + self.earlier_steps(started), 1.0))
                    }
                    (None, Some(commons)) => {
                        let steps = commons.count(number);
                        self.watch.iter_mut().for_each(|watch| watch.steps(number, steps));
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
                let settled = || rule.settled(self.run.from.warm_up, ranks());
                let on = On { types, memory, pool, place, bucket, running: now };
                match (phase, settled()) {
                    (StepPhase::Gauge | StepPhase::Apply, _) => {
                        rule.step(types, memory, pool, place, bucket, phase, now)?;
                    }
                    (StepPhase::Share, Some(settled)) => on.share(&settled)?,
                    (StepPhase::Follow, Some(settled)) => on.follow(&settled)?,
                    (StepPhase::Share | StepPhase::Follow, None) => {}
                }
            }
            // A declaration: the memory is planned, and nothing is given back.
            Op::Free { .. } => {}
            Op::Send { .. } | Op::Recv { .. } | Op::Collective { .. } => {
                unreachable!("exchanges are carried")
            }
            Op::Restore { from, into, .. } if self.memory.commons(from).is_some() => {
                self.pull(from, into, now)?;
            }
            Op::Stash { from, into, microbatch } | Op::Restore { from, into, microbatch } => {
                let running = running(microbatch);
                let span = |view| self.memory.span(view, running);
                self.memory.copy(span(from), span(into))?;
            }
            Op::Serve { .. } => unreachable!("servers have the wires in hand"),
        }
        Ok(())
    }

    /// Copies what all ranks share, as it now is, to where this rank computes on it.
    fn pull(&mut self, from: View, into: View, running: u64) -> Result<(), ArenaError> {
        let Some(commons) = self.memory.commons(from) else { return Ok(()) };
        let bucket = self.program.buckets.iter().position(|bucket| bucket.params == from);
        if let (Some(watch), Some(bucket)) = (&mut self.watch, bucket) {
            watch.reads(bucket, commons.steps(bucket));
        }
        let (from, into) = (self.memory.span(from, running), self.memory.span(into, running));
        unlocked::pull(self.compute.pool(), &self.memory, commons, from, into)
    }

    /// How many steps of the same bucket stand before one in the iteration.
    fn earlier_steps(&self, started: &Started<'_>) -> u64 {
        let before = &self.program.body.nodes[..started.id.index()];
        before.iter().filter(|node| node.op == *started.op).count() as u64
    }

    /// Serves replicas as they come, for one iteration's worth of requests.
    fn serve(
        &mut self,
        started: &Started<'a>,
        service: u32,
        transport: &mut dyn Transport,
    ) -> Result<(), ExecError> {
        self.at = Some(*started);
        let Some(mut serving) = self.serving.take() else { return Ok(()) };
        let (program, silence) = (self.program, self.run.options.silence);
        let (memory, service) = (Arc::clone(&self.memory), &program.services[service as usize]);
        let mut apply = |bucket: u32, updates: u64| self.apply(bucket, updates, service.requests);
        let served = serving.serve(transport, &memory, program, service, silence, &mut apply);
        self.serving = Some(serving);
        served?;
        self.lanes.finish(started, Wait::default());
        Ok(())
    }

    /// Applies the gradients of one request to this server's part of a bucket, after so many updates of
    /// it. They are clipped by their own norm: a server has not seen the rest.
    fn apply(&mut self, bucket: u32, updates: u64, requests: u32) -> Result<(), Fault> {
        let Run { plan, options, kernels, .. } = self.run;
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
        let microbatches = strategy.microbatches().max(1);
        // A number that reaches beyond the iteration is a later one's.
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
            LoadKind::Further(places) => u64::from(places),
            LoadKind::Features => {
                typed!(self.run.kernels.types, <T, _G> self.features::<T>(first, views.take(0)));
                return Ok(());
            }
        };
        if let (LoadKind::Tokens, Some(each)) = (what, self.run.data.counted()) {
            // What all replicas' samples look up, or what this one's do.
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

    /// Brings what consecutive samples show.
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

    /// What there is to see at the end of an iteration. `ended` is when the last one ended.
    fn sight(&mut self, iteration: u32, ended: &mut Seconds) -> Result<Sight, ExecError> {
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
        let (dropped, further) = (read(outputs.dropped)?, self.further(running)?);
        let now = self.lanes.now();
        let took = now - std::mem::replace(ended, now);
        Ok(match &mut self.serving {
            Some(serving) => {
                let seen = std::mem::take(&mut serving.seen);
                if let Some([mean_loss, mean_norm]) = seen.means() {
                    // As if all replicas had told of this iteration.
                    loss = Some((mean_loss * f64::from(self.run.plan.mesh.size())) as f32);
                    norm = Some(mean_norm as f32);
                }
                let staleness = seen.staleness();
                Sight { iteration, loss, further, norm, dropped, took, staleness }
            }
            None => {
                self.saw = loss.zip(norm).map(|(loss, norm)| [loss, norm]);
                let ahead = self.run.horizon.ahead();
                let staleness = self.watch.as_mut().and_then(|watch| watch.take(ahead));
                Sight { iteration, loss, further, norm, dropped, took, staleness }
            }
        })
    }

    /// The mean over modules for further tokens of what stands behind the loss, where there are any.
    fn further(&self, running: u64) -> Result<Option<f32>, ExecError> {
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

/// What is said of an iteration without a finite gradient where nothing more is known.
fn unfinite(sight: &Sight) -> ExecError {
    let loss = sight.loss.unwrap_or(f32::NAN);
    ExecError::Diverged { iteration: sight.iteration + 1, loss }
}
