//! Durations from what was measured, op by op.
//!
//! Unlike a template's time by the roofline, that of a measured segment depends on where it stands:
//! a layer that runs right behind the one whose output it reads finds it in a cache, and weights
//! that were last used a microbatch ago may have left it. So the body is walked once to fill the
//! caches, and once more to see what a steady iteration finds in them ([`Reuse`]). Exchanges find
//! their vectors there, or not, in the same way.

use super::calls::vector;
use super::moving::{Lost, Moving};
use super::reuse::Reuse;
use crate::cluster::Measured;
use crate::cluster::measured::{Company, Temperatures, Wire};
use crate::compute::{KernelUse, Roofline, accumulate_kernel, kernel, step_kernel};
use paceline_plan::collective::{CollectiveKind, Pattern};
use paceline_plan::ids::{Microbatch, RoleId};
use paceline_plan::program::{AccumulateMode, Bucket, Call, Op, Plan, Program, StepPhase, View};
use paceline_plan::units::{Bytes, Seconds};

/// What an op of a rank takes by itself, with one rank at work and with one on every core.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Taken {
    pub(super) alone: f64,
    pub(super) together: f64,
}

/// What the ops of a role's body take.
#[derive(Clone, Debug, Default)]
pub(super) struct Durations {
    /// By op; nothing for those that meet other ranks.
    pub(super) taken: Vec<Taken>,
    /// By op; for exchanges over a measured wire.
    pub(super) moving: Vec<Option<Moving>>,
}

/// By role, for so many ranks on a host with so many threads each. Without a wire, exchanges are left to
/// the network.
pub(super) fn durations(
    plan: &Plan,
    (measured, wire): (&Measured, Option<&Wire>),
    on_host: (f64, u32),
    roofline: &Roofline<'_>,
) -> Vec<Durations> {
    let roles = (0..plan.programs.len()).map(RoleId::from);
    roles.map(|role| Walk::new(plan, role, (measured, wire), on_host, roofline).run()).collect()
}

struct Walk<'a> {
    plan: &'a Plan,
    program: &'a Program,
    measured: &'a Measured,
    wire: Option<&'a Wire>,
    /// That share a host and its caches.
    ranks: f64,
    /// That compute for this rank.
    threads: u32,
    roofline: &'a Roofline<'a>,
    reuse: Reuse,
    /// When the last exchange was.
    exchanged: u64,
    /// Up to which moment of `reuse` each kernel went, and how many bytes it touched.
    kernels: Vec<(u64, f64)>,
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
        (measured, wire): (&'a Measured, Option<&'a Wire>),
        (ranks, threads): (f64, u32),
        roofline: &'a Roofline<'a>,
    ) -> Self {
        let program = &plan.programs[role.index()];
        let (reuse, exchanged, before) = (Reuse::default(), 0, 0);
        Self {
            plan,
            program,
            measured,
            wire,
            ranks,
            threads,
            roofline,
            reuse,
            exchanged,
            kernels: Vec::new(),
            before,
        }
    }

    fn run(mut self) -> Durations {
        let nodes = &self.program.body.nodes;
        nodes.iter().for_each(|node| _ = self.either(&node.op));
        self.before += u64::from(self.plan.strategy.microbatches());
        let (taken, moving) = nodes.iter().map(|node| self.either(&node.op)).unzip();
        Durations { taken, moving }
    }

    fn either(&mut self, op: &Op) -> (Taken, Option<Moving>) {
        match *op {
            Op::Collective { call, microbatch } => {
                let call = self.program.call(call);
                let running = self.running(microbatch);
                (Taken::default(), self.collective(call, running))
            }
            Op::Send { view, microbatch, .. } | Op::Recv { view, microbatch, .. } => {
                (Taken::default(), self.message(view, self.running(microbatch)))
            }
            Op::Load { .. }
            | Op::Compute { .. }
            | Op::Accumulate { .. }
            | Op::Step { .. }
            | Op::Stash { .. }
            | Op::Restore { .. }
            | Op::Free { .. }
            | Op::Serve { .. } => (self.op(op), None),
        }
    }

    fn collective(&mut self, call: &Call, running: u64) -> Option<Moving> {
        let views = [call.input, call.output];
        // In place, the second is the first.
        let views = &views[..1 + usize::from(call.input != call.output)];
        let lost = self.lost(views, running);
        let ranks = self.plan.mesh.group_size(self.plan.group(call.group));
        let (bytes, wire) = (vector(self.plan, call).bytes(), self.wire?);
        let pattern = Pattern::new(call.kind, call.algorithm, call.order, ranks, call.root);
        let algorithm = pattern.map_or(call.algorithm, |pattern| pattern.algorithm());
        let whole = wire.moved_collective(call.kind, algorithm, ranks, bytes);
        // One that was not measured is made of messages, of a rank's part each.
        let parts = || wire.moved_message(bytes / u64::from(ranks.max(1)));
        let moved = whole.or_else(parts)?;
        let brought =
            self.brought(call, ranks).map_or(Seconds::ZERO, |Temperatures { warm, cold }| {
                warm + (cold - warm).max(Seconds::ZERO) * lost.vectors
            });
        let more = brought + self.measured.per_exchange;
        Some(Moving::new(&moved, (ranks, self.apart()), lost).with(more, &moved))
    }

    /// What bringing a vector to where a collective works takes, or its result from there: they all work
    /// in place, on the whole of it.
    fn brought(&self, call: &Call, ranks: u32) -> Option<Temperatures> {
        let elements = match call.kind {
            _ if call.input == call.output => return None,
            CollectiveKind::AllReduce | CollectiveKind::Reduce | CollectiveKind::Broadcast => {
                call.elements()
            }
            CollectiveKind::ReduceScatter | CollectiveKind::AllGather | CollectiveKind::Gather => {
                call.elements() / u64::from(ranks.max(1))
            }
            CollectiveKind::AllToAll => return None,
        };
        let used = accumulate_kernel(AccumulateMode::Move, call.dtype, elements);
        // By the one thread that moves a rank's bytes.
        let table = self.measured.kernel(&used.name, used.dtype, 1)?;
        table.time(&used.shape, used.work, Company::Together)
    }

    fn message(&mut self, view: View, running: u64) -> Option<Moving> {
        let lost = self.lost(&[view], running);
        let size = self.program.buffer(view.buffer).dtype.size();
        let moved = self.wire?.moved_message(Bytes(view.len.saturating_mul(size)))?;
        let more = self.measured.per_exchange;
        Some(Moving::new(&moved, (2, self.apart()), lost).with(more, &moved))
    }

    /// Whether every rank has a core of its own.
    fn apart(&self) -> bool {
        self.ranks * f64::from(self.threads) <= f64::from(self.measured.cores)
    }

    /// What the caches have lost of the wires since the last exchange, and of these views since they
    /// were touched.
    fn lost(&mut self, views: &[View], running: u64) -> Lost {
        let whole: f64 = views.iter().map(|view| self.bytes(view)).fold(0.0, f64::max);
        let since = self.reuse.since(self.exchanged);
        let wires = self.measured.lost(|aged| aged.wires, since, self.ranks);
        let (mut bytes, mut gone) = (0.0, 0.0);
        for view in views {
            for part in self.reuse.touch(self.program, view, running) {
                bytes += part.bytes;
                // What a kernel touched it touched all the while it ran, on average when half was done.
                let distance = part.distance.max(self.halfway(part.at));
                let lost = self.measured.lost(|aged| aged.vectors(whole), distance, self.ranks);
                gone += part.bytes * lost;
            }
        }
        self.exchanged = self.reuse.now();
        Lost { wires, vectors: if bytes > 0.0 { gone / bytes } else { 0.0 } }
    }

    fn bytes(&self, view: &View) -> f64 {
        view.len as f64 * self.program.buffer(view.buffer).dtype.size() as f64
    }

    /// The bytes touched since the kernel that touched something at a moment was halfway.
    fn halfway(&self, at: u64) -> f64 {
        let number = self.kernels.partition_point(|&(end, _)| end < at);
        let kernel = self.kernels.get(number).filter(|_| at > 0);
        kernel.map_or(0.0, |&(end, bytes)| self.reuse.since(end) + 0.5 * bytes)
    }

    /// How far operands lie beyond where a kernel that runs on them over and over finds them, which is
    /// as far as they are large.
    fn farther(&self, coldness: f64, bytes: f64, company: Company) -> f64 {
        let bytes = bytes.max(1.0);
        let least = self.measured.coldness(bytes, company);
        let farther = if least < 1.0 { (coldness / bytes - least) / (1.0 - least) } else { 0.0 };
        farther.clamp(0.0, 1.0)
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
            Op::Collective { .. }
            | Op::Send { .. }
            | Op::Recv { .. }
            | Op::Free { .. }
            | Op::Serve { .. } => return Taken::default(),
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
                    |company| self.measured.coldness(part.distance, company) * part.bytes;
                reach.bytes += part.bytes;
                reach.alone += coldness(Company::Alone);
                reach.together += coldness(Company::Together);
            }
        }
        self.kernels.push((self.reuse.now(), reach.bytes));
        reach
    }

    /// A kernel on operands that lie so far away; none if it was not measured.
    fn kernel(&self, used: &KernelUse, reach: Reach) -> Option<Taken> {
        let table = self.measured.kernel(&used.name, used.dtype, self.threads)?;
        let time = |company, coldness: f64| {
            let Temperatures { warm, cold } = table.time(&used.shape, used.work, company)?;
            let farther = self.farther(coldness, reach.bytes, company);
            Some(warm.0 + (cold.0 - warm.0).max(0.0) * farther)
        };
        let alone = time(Company::Alone, reach.alone)?;
        let together = time(Company::Together, reach.together)?;
        Some(Taken { alone, together: together.max(alone) })
    }
}
