//! Durations from what was measured, op by op.
//!
//! Unlike a template's time by the roofline, that of a measured segment depends on where it stands:
//! a layer that runs right behind the one whose output it reads finds it in a cache, and weights
//! that were last used a microbatch ago may have left it. So the body is walked once to fill the
//! caches, and once more to see what a steady iteration finds in them ([`Reuse`]).

use super::reuse::Reuse;
use crate::cluster::Measured;
use crate::cluster::measured::{Company, Temperatures};
use crate::compute::{KernelUse, Roofline, accumulate_kernel, kernel, step_kernel};
use paceline_plan::ids::{Microbatch, RoleId};
use paceline_plan::program::{AccumulateMode, Bucket, Op, Plan, Program, StepPhase, View};

/// What an op of a rank takes by itself, with one rank at work and with one on every core.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Taken {
    pub(super) alone: f64,
    pub(super) together: f64,
}

/// By role and op of the body; nothing for ops that meet other ranks.
pub(super) fn durations(
    plan: &Plan,
    measured: &Measured,
    threads: u32,
    roofline: &Roofline<'_>,
) -> Vec<Vec<Taken>> {
    let roles = (0..plan.programs.len()).map(RoleId::from);
    roles.map(|role| Walk::new(plan, role, measured, threads, roofline).run()).collect()
}

struct Walk<'a> {
    plan: &'a Plan,
    program: &'a Program,
    measured: &'a Measured,
    /// That compute for this rank.
    threads: u32,
    roofline: &'a Roofline<'a>,
    reuse: Reuse,
    /// The microbatches of the iterations before.
    before: u64,
}

/// How far operands were on average, by company, and how many bytes they are.
#[derive(Clone, Copy, Default)]
struct Reach {
    bytes: f64,
    alone: f64,
    together: f64,
}

impl<'a> Walk<'a> {
    fn new(
        plan: &'a Plan,
        role: RoleId,
        measured: &'a Measured,
        threads: u32,
        roofline: &'a Roofline<'a>,
    ) -> Self {
        let program = &plan.programs[role.index()];
        Self { plan, program, measured, threads, roofline, reuse: Reuse::default(), before: 0 }
    }

    fn run(mut self) -> Vec<Taken> {
        let nodes = &self.program.body.nodes;
        nodes.iter().for_each(|node| _ = self.op(&node.op));
        self.before += u64::from(self.plan.strategy.microbatches());
        nodes.iter().map(|node| self.op(&node.op)).collect()
    }

    fn running(&self, microbatch: Microbatch) -> u64 {
        self.before + u64::from(microbatch.0)
    }

    fn op(&mut self, op: &Op) -> Taken {
        let mut taken = match *op {
            Op::Load { into, microbatch, .. } => {
                let len = self.program.buffer(into).elements;
                let view = View { buffer: into, offset: 0, len };
                self.touch(&[view], self.running(microbatch));
                let time = len as f64 * self.measured.per_token.0;
                Taken { alone: time, together: time }
            }
            Op::Compute { segment, microbatch, fresh: _ } => {
                self.segment(segment, self.running(microbatch))
            }
            Op::Step { bucket, phase } => self.step(&self.program.buckets[bucket as usize], phase),
            Op::Accumulate { from, into, mode } => {
                self.copy(&[from, into], mode, self.running(Microbatch(0)))
            }
            Op::Stash { .. } | Op::Restore { .. }
                if let Some(bytes) = self.program.offloaded(op) =>
            {
                let time = self.roofline.offload(self.plan.strategy.store, bytes).0;
                Taken { alone: time, together: time }
            }
            Op::Stash { from, into, microbatch } | Op::Restore { from, into, microbatch } => {
                self.copy(&[from, into], AccumulateMode::Move, self.running(microbatch))
            }
            Op::Collective { call, microbatch } => {
                let call = self.program.call(call);
                self.touch(&[call.input, call.output], self.running(microbatch));
                return Taken::default();
            }
            Op::Send { view, microbatch, .. } | Op::Recv { view, microbatch, .. } => {
                self.touch(&[view], self.running(microbatch));
                return Taken::default();
            }
            Op::Free { .. } | Op::Serve { .. } => return Taken::default(),
        };
        taken.alone += self.measured.per_op.0;
        taken.together += self.measured.per_op.0;
        taken
    }

    fn segment(&mut self, segment: paceline_plan::ids::SegmentId, running: u64) -> Taken {
        let segment = self.program.segment(segment);
        let template = &self.plan.templates[segment.template as usize];
        let mut sum = Taken::default();
        for op in &template.ops {
            let operands = op.inputs.iter().chain(&op.params).chain(&op.outputs);
            let views: Vec<View> = operands.map(|&i| segment.operands[usize::from(i)]).collect();
            let reach = self.touch(&views, running);
            let taken = self.kernel(&kernel(template, op), reach).unwrap_or_else(|| {
                let model = self.roofline.unmeasured(template, op).0;
                Taken { alone: model, together: model }
            });
            sum.alone += taken.alone;
            sum.together += taken.together;
        }
        sum
    }

    fn step(&mut self, bucket: &Bucket, phase: StepPhase) -> Taken {
        if !bucket.updated {
            return Taken::default();
        }
        let group = bucket.shard.map(|group| self.plan.group(group));
        let parts = u64::from(group.map_or(1, |group| self.plan.mesh.group_size(group)).max(1));
        let state = bucket.master.iter().chain(&bucket.moments);
        let views: Vec<View> = [bucket.params, bucket.grads].iter().chain(state).copied().collect();
        let reach = self.touch(&views, self.before);
        let dtype = self.program.buffer(bucket.params.buffer).dtype;
        let optimizer = self.plan.strategy.optimizer;
        let used = step_kernel(optimizer, phase, dtype, bucket.elements / parts);
        self.kernel(&used, reach).unwrap_or_else(|| {
            let model = self.roofline.step(self.program, bucket, phase, parts).0;
            Taken { alone: model, together: model }
        })
    }

    fn copy(&mut self, views: &[View; 2], mode: AccumulateMode, running: u64) -> Taken {
        let [from, _] = views;
        let reach = self.touch(views, running);
        let dtype = self.program.buffer(from.buffer).dtype;
        let used = accumulate_kernel(mode, dtype, from.len);
        self.kernel(&used, reach).unwrap_or_else(|| {
            let model = self.roofline.accumulate(self.program, from, mode).0;
            Taken { alone: model, together: model }
        })
    }

    fn touch(&mut self, views: &[View], running: u64) -> Reach {
        let mut reach = Reach::default();
        for view in views {
            for part in self.reuse.touch(self.program, view, running) {
                let coldness =
                    |company| self.measured.memory.coldness(part.distance, company) * part.bytes;
                reach.bytes += part.bytes;
                reach.alone += coldness(Company::Alone);
                reach.together += coldness(Company::Together);
            }
        }
        reach
    }

    /// A kernel on operands that lie so far away; none if it was not measured.
    fn kernel(&self, used: &KernelUse, reach: Reach) -> Option<Taken> {
        let table = self.measured.kernel(&used.name, used.dtype, self.threads)?;
        let bytes = reach.bytes.max(1.0);
        let time = |company, coldness: f64| {
            let Temperatures { warm, cold } = table.time(&used.shape, used.work, company)?;
            // A kernel that runs on one set of operands over and over finds them as far away as
            // they are large; only what lies beyond that makes it slower.
            let least = self.measured.memory.coldness(bytes, company);
            let farther =
                if least < 1.0 { (coldness / bytes - least) / (1.0 - least) } else { 0.0 };
            Some(warm.0 + (cold.0 - warm.0).max(0.0) * farther.clamp(0.0, 1.0))
        };
        let alone = time(Company::Alone, reach.alone)?;
        let together = time(Company::Together, reach.together)?;
        Some(Taken { alone, together: together.max(alone) })
    }
}
