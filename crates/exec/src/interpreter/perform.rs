//! Execution of tasks on the compute thread.

use super::lanes::{RunningOp, WaitSpan};
use super::task::{DeviceTask, Task};
use super::{Issued, Rank};
use crate::device::cpu::step::{Rule, norm_of};
use crate::device::{Device, Step, Stream};
use crate::error::{ExecError, Fault};
use crate::run::job::RunContext;
use crate::types::typed;
use paceline_comm::Transport;
use paceline_kernels::Element;
use paceline_kernels::arena::{Access, Span};
use paceline_kernels::element::narrow;
use paceline_plan::ids::Microbatch;
use paceline_plan::program::{LoadKind, Numbering, StepPhase};
use paceline_plan::validate::SectionKind;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

impl<'a, D: Device> Rank<'a, D> {
    /// Executes a task of the device, or issues it.
    pub(super) fn perform(&mut self, started: &RunningOp<'a>) -> Result<(), ExecError> {
        self.at = Some(*started);
        self.issue(started).map_err(|source| self.lanes.failed(started, source))?;
        if D::ISSUES {
            self.lanes.finish_issued(started);
            return Ok(());
        }
        if started.section == SectionKind::Body {
            self.took[started.id.index()] = self.lanes.now() - started.start;
        }
        if let (Some(slow), Task::Device(DeviceTask::Segment { .. })) =
            (self.run.options.straggler, started.task)
            && slow.rank == self.place.rank.0
        {
            let took = (self.lanes.now() - started.start).0;
            thread::sleep(Duration::from_secs_f64(took * (slow.factor - 1.0)));
        }
        self.lanes.finish(started, WaitSpan::default());
        Ok(())
    }

    /// Runs a task, behind the tasks of other streams that its op comes after.
    fn issue(&mut self, started: &RunningOp<'a>) -> Result<(), Fault> {
        // A freed buffer may be written again behind its last use: that needs an event, too.
        let task = match started.task {
            Task::Device(task) => Some(task),
            Task::Nothing => None,
            Task::Exchange(_) | Task::Storage(_) | Task::Serve(_) => return Ok(()),
        };
        let stream = started.lane.index();
        if !D::ISSUES {
            return task.map_or(Ok(()), |task| self.run_task(stream, task, started));
        }
        self.wait_for_earlier(started)?;
        let begin = self.device.record(stream)?;
        if let Some(task) = task {
            self.run_task(stream, task, started)?;
        }
        let end = self.device.record(stream)?;
        self.ended_at(started, end);
        self.issued.push(Issued { op: *started, begin, end });
        Ok(())
    }

    /// Lets the stream of an op wait for those before it on other streams.
    pub(super) fn wait_for_earlier(&mut self, started: &RunningOp<'a>) -> Result<(), Fault> {
        let section = started.section.of(self.program);
        let after = section.after(started.id).iter().copied();
        let carried = self.program.in_flight.iter().filter(|carryover| {
            started.section == SectionKind::Body && carryover.before.contains(&started.id)
        });
        for earlier in after.chain(carried.map(|carryover| carryover.op)) {
            if section.nodes[earlier.index()].lane != started.lane
                && let Some(&Some(event)) = self.ends.get(earlier.index())
            {
                self.device.wait(started.lane.index(), event)?;
            }
        }
        Ok(())
    }

    /// Keeps the event behind an op for those after it.
    pub(super) fn ended_at(&mut self, started: &RunningOp<'a>, end: D::Event) {
        self.ends.resize(started.section.of(self.program).nodes.len(), None);
        self.ends[started.id.index()] = Some(end);
    }

    /// Waits for what the device was issued, and records its times.
    pub(super) fn settle(&mut self) -> Result<(), ExecError> {
        let issued = std::mem::take(&mut self.issued);
        self.wait_for_device(&issued, D::is_idle)?;
        self.device.end_pass().map_err(|source| self.at_the_end(source))?;
        self.ends.clear();
        self.record(issued)
    }

    /// Records the times of tasks that the device has done.
    pub(super) fn record(&mut self, issued: Vec<Issued<'a, D>>) -> Result<(), ExecError> {
        for Issued { op, begin, end } in issued {
            let at = |event| self.device.time(event).map(|time| self.opened + time);
            let times = at(begin).and_then(|begin| Ok((begin, at(end)?)));
            let times = times.map_err(|source| self.lanes.failed(&op, source))?;
            self.lanes.record(&op, times);
        }
        Ok(())
    }

    pub(super) fn run_task(
        &mut self,
        on: Stream,
        task: DeviceTask,
        started: &RunningOp<'a>,
    ) -> Result<(), Fault> {
        let running = |microbatch: Microbatch| {
            u64::from(started.pass) * u64::from(self.run.plan.strategy.microbatches())
                + u64::from(microbatch.0)
        };
        let now = running(Microbatch(0));
        match task {
            DeviceTask::Load { what, into, microbatch } => {
                let span = self.memory.whole(into, running(microbatch));
                self.load(what, span, started.iteration, microbatch)?;
                self.device.upload(on, &self.memory, span)
            }
            DeviceTask::Segment { segment, microbatch, fresh } => {
                let (segment, running) = (self.program.segment(segment), running(microbatch));
                let template = &self.run.plan.templates[segment.template as usize];
                self.device.segment(on, &self.memory, (template, segment), running, fresh)
            }
            DeviceTask::Accumulate { from, into, mode, microbatch } => {
                let (dtype, running) = (self.memory.dtype(into.buffer), running(microbatch));
                let spans = (self.memory.span(from, running), self.memory.span(into, running));
                self.device.accumulate(on, &self.memory, spans, dtype, mode)
            }
            DeviceTask::Step { bucket, phase, earlier } => {
                self.step(on, bucket as usize, phase, (started.iteration, earlier), now)
            }
            DeviceTask::Pull { from, into } => {
                let bucket = self.program.buckets.iter().position(|bucket| bucket.params == from);
                let shared = self.memory.shared_weights(from);
                if let (Some(watch), Some(bucket), Some(shared)) =
                    (&mut self.staleness, bucket, shared)
                {
                    watch.reads(bucket, shared.steps(bucket));
                }
                let (from, into) = (self.memory.span(from, now), self.memory.span(into, now));
                self.device.pull(&self.memory, from, into)
            }
        }
    }

    /// Runs a phase of the update of a bucket, behind `earlier` steps of it in the iteration.
    fn step(
        &mut self,
        on: Stream,
        number: usize,
        phase: StepPhase,
        (iteration, earlier): (u32, u64),
        running: u64,
    ) -> Result<(), Fault> {
        // Local momenta are computed before the global norm is known.
        let known = self.program.outputs.norm.filter(|_| phase != StepPhase::LocalMomentum);
        let issued = known.filter(|_| D::ISSUES).map(|norm| self.memory.whole(norm, running));
        let known = known.filter(|_| !D::ISSUES);
        let norm = known.map(|norm| self.scalar(on, norm, running)).transpose()?;
        // All ranks see the same norm, and keep their weights if it is not finite.
        if norm.is_some_and(|norm| !norm.is_finite()) {
            return Ok(());
        }
        let RunContext { plan, options, .. } = *self.run;
        let (strategy, bucket) = (&plan.strategy, &self.program.buckets[number]);
        let norm = norm.filter(|_| bucket.is_clipped());
        let shared = self.memory.shared_weights(bucket.params);
        let update = match (self.run.facts.numbering, shared) {
            (Numbering::Iteration, _) | (Numbering::Arrival, None) => None,
            (Numbering::Local(steps), _) => {
                let before = u64::from(iteration) * u64::from(steps);
                Some((iteration, before + earlier, 1.0))
            }
            (Numbering::Arrival, Some(shared_weights)) => {
                let steps = shared_weights.count(number);
                self.staleness.iter_mut().for_each(|watch| watch.steps(number, steps));
                Some(self.run.unordered_update(steps, 1))
            }
        };
        let rule = match update {
            None => Rule::new(strategy, options, iteration, norm, &self.scale),
            Some(update) => Rule::of_update(strategy, options, update, norm, &self.scale),
        };
        let momentum = match phase {
            StepPhase::LocalMomentum | StepPhase::ApplyMomentum => {
                let ranks = plan.mesh.group_size(plan.holders(bucket));
                rule.compressed_adam(self.run.from.warm_up, ranks)
            }
            StepPhase::TensorNorms | StepPhase::Apply => None,
        };
        let step = Step { bucket, phase, rule, momentum, running, norm: issued };
        self.device.step(on, &self.memory, &step)
    }

    /// Serves replicas asynchronously, for one iteration's worth of requests.
    pub(super) fn serve(
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
        let RunContext { plan, options, types, .. } = *self.run;
        let bucket = &self.program.buckets[bucket as usize];
        let grads = self.memory.span(bucket.grads, 0);
        let norm = typed!(types, <_T, G> self.memory.read(grads, |grads: &[G]| norm_of(grads)))?;
        if !norm.is_finite() {
            return Ok(());
        }
        let update = self.run.unordered_update(updates, requests);
        let norm = Some(norm).filter(|_| bucket.is_clipped());
        let rule = Rule::of_update(&plan.strategy, options, update, norm, &self.scale);
        let (phase, momentum) = (StepPhase::Apply, None);
        let step = Step { bucket, phase, rule, momentum, running: 0, norm: None };
        self.device.step(0, &self.memory, &step)
    }

    /// Writes a microbatch of this rank's replica to host memory: consecutive samples of the global batch.
    fn load(
        &self,
        what: LoadKind,
        span: Span,
        iteration: u32,
        microbatch: Microbatch,
    ) -> Result<(), Fault> {
        let strategy = &self.run.plan.strategy;
        let microbatches = strategy.microbatches().max(1);
        // A microbatch number beyond the iteration belongs to a later one.
        let iteration = iteration.saturating_add(microbatch.0 / microbatches);
        let before = u64::from(self.place.replica) * u64::from(microbatches)
            + u64::from(microbatch.0 % microbatches);
        let all = self.run.from.samples_before(iteration, strategy.global_batch);
        let first = all.wrapping_add(before * strategy.micro_batch);
        let views = self.memory.views(&[(span, Access::Write)])?;
        let ahead = match what {
            LoadKind::Tokens => 0,
            LoadKind::Targets => 1,
            LoadKind::Lookahead(places) => u64::from(places),
            LoadKind::Features => {
                typed!(self.run.types, <T, _G> self.features::<T>(first, views.take(0)));
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
}
