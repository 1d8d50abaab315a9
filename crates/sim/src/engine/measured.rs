//! Op durations from measurements.
//!
//! Unlike a template's roofline time, the time of a measured segment depends on its position. A
//! layer that runs right after the one that produced its input finds it in a cache; weights last
//! used one microbatch ago may have been evicted. The body is therefore walked once to fill the
//! caches, and once more to see what a steady iteration finds in them ([`ReuseDistance`]). The
//! vectors of exchanges are treated in the same way.

use super::calls::vector;
use super::exchange_cost::{CacheLoss, ExchangeCost};
use super::reuse_distance::ReuseDistance;
use crate::cluster::Measured;
use crate::cluster::measured::{CoreLoad, TransportTable, WarmCold};
use crate::compute::{KernelUse, Roofline, accumulate_kernel, kernel, step_kernel};
use paceline_plan::collective::CollectiveKind;
use paceline_plan::ids::{Microbatch, RoleId};
use paceline_plan::program::{AccumulateMode, Bucket, Call, Op, Plan, Program, StepPhase, View};
use paceline_plan::units::{Bytes, Seconds};

/// Time of a local op with one active rank, and with one on every core.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct OpTime {
    pub(super) solo: f64,
    pub(super) all_cores: f64,
}

/// Durations of the ops of a role's body.
#[derive(Clone, Debug, Default)]
pub(super) struct Durations {
    /// By op; zero for exchanges.
    pub(super) taken: Vec<OpTime>,
    /// By op; `Some` for exchanges over a measured transport.
    pub(super) exchanges: Vec<Option<ExchangeCost>>,
}

/// Returns durations by role; `on_host` is the number of ranks on a host and of threads per rank.
/// Without a transport table, exchanges are left to the network.
pub(super) fn durations(
    plan: &Plan,
    (measured, wire): (&Measured, Option<&TransportTable>),
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
    wire: Option<&'a TransportTable>,
    /// Number of ranks that share a host and its caches.
    ranks: f64,
    /// Number of compute threads of this rank.
    threads: u32,
    roofline: &'a Roofline<'a>,
    reuse: ReuseDistance,
    /// Clock value of the last exchange.
    exchanged: u64,
    /// By kernel, the `reuse` clock at its end and the bytes it touched.
    kernels: Vec<(u64, f64)>,
    /// Number of microbatches of the previous iterations.
    before: u64,
}

/// Bytes of operands, and their coldness-weighted bytes by core load.
#[derive(Clone, Copy, Default)]
struct Reach {
    bytes: f64,
    solo: f64,
    all_cores: f64,
}

impl<'a> Walk<'a> {
    fn new(
        plan: &'a Plan,
        role: RoleId,
        (measured, wire): (&'a Measured, Option<&'a TransportTable>),
        (ranks, threads): (f64, u32),
        roofline: &'a Roofline<'a>,
    ) -> Self {
        let program = &plan.programs[role.index()];
        let (reuse, exchanged, before) = (ReuseDistance::default(), 0, 0);
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
        Durations { taken, exchanges: moving }
    }

    fn either(&mut self, op: &Op) -> (OpTime, Option<ExchangeCost>) {
        match *op {
            Op::Collective { call, microbatch } => {
                let call = self.program.call(call);
                let running = self.running(microbatch);
                (OpTime::default(), self.collective(call, running))
            }
            Op::Send { view, microbatch, .. } | Op::Recv { view, microbatch, .. } => {
                (OpTime::default(), self.message(view, self.running(microbatch)))
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

    fn collective(&mut self, call: &Call, running: u64) -> Option<ExchangeCost> {
        let views = [call.input, call.output];
        // In place, both views are the same.
        let views = &views[..1 + usize::from(call.input != call.output)];
        let lost = self.cache_loss(views, running);
        let ranks = self.plan.mesh.group_size(self.plan.group(call.group));
        let (bytes, wire) = (vector(self.plan, call).bytes(), self.wire?);
        let whole = call.pattern(ranks).ok().and_then(|pattern| {
            wire.collective_times(call.kind, pattern.algorithm(), ranks, bytes)
        });
        // An unmeasured collective is approximated by messages of one rank's shard each.
        let parts = || wire.message_times(bytes / u64::from(ranks.max(1)));
        let moved = whole.or_else(parts)?;
        let brought =
            self.staging_time(call, ranks).map_or(Seconds::ZERO, |WarmCold { warm, cold }| {
                warm + (cold - warm).max(Seconds::ZERO) * lost.data
            });
        let more = brought + self.measured.exchange_overhead;
        Some(
            ExchangeCost::new(&moved, (ranks, self.has_dedicated_cores()), lost).with(more, &moved),
        )
    }

    /// Time to copy a vector into the collective's buffer, or its result out of it: all collectives
    /// work in place on the whole vector.
    fn staging_time(&self, call: &Call, ranks: u32) -> Option<WarmCold> {
        let elements = match call.kind {
            _ if call.input == call.output => return None,
            CollectiveKind::AllReduce | CollectiveKind::Reduce | CollectiveKind::Broadcast => {
                call.elements()
            }
            CollectiveKind::ReduceScatter
            | CollectiveKind::AllGather
            | CollectiveKind::Gather
            | CollectiveKind::Scatter => call.elements() / u64::from(ranks.max(1)),
            CollectiveKind::AllToAll | CollectiveKind::SendRecv | CollectiveKind::Barrier => {
                return None;
            }
        };
        let used = accumulate_kernel(AccumulateMode::Move, call.dtype, elements);
        // Done by the one thread that moves a rank's bytes.
        let table = self.measured.kernel(&used.name, used.dtype, 1)?;
        table.time(&used.shape, used.work, CoreLoad::AllCores)
    }

    fn message(&mut self, view: View, running: u64) -> Option<ExchangeCost> {
        let lost = self.cache_loss(&[view], running);
        let size = self.program.buffer(view.buffer).dtype.size();
        let moved = self.wire?.message_times(Bytes(view.len.saturating_mul(size)))?;
        let more = self.measured.exchange_overhead;
        Some(ExchangeCost::new(&moved, (2, self.has_dedicated_cores()), lost).with(more, &moved))
    }

    /// Returns true if every rank has dedicated cores.
    fn has_dedicated_cores(&self) -> bool {
        self.ranks * f64::from(self.threads) <= f64::from(self.measured.cores)
    }

    /// Returns the cache loss of the message path since the last exchange, and of these views since
    /// their last access.
    fn cache_loss(&mut self, views: &[View], running: u64) -> CacheLoss {
        let whole: f64 = views.iter().map(|view| self.bytes(view)).fold(0.0, f64::max);
        let since = self.reuse.since(self.exchanged);
        let wires = self.measured.evicted(|aged| aged.path, since, self.ranks);
        let (mut bytes, mut gone) = (0.0, 0.0);
        for view in views {
            for part in self.reuse.touch(self.program, view, running) {
                bytes += part.bytes;
                // A kernel touches its operands throughout its run, so on average at its midpoint.
                let distance = part.distance.max(self.halfway(part.at));
                let lost = self.measured.evicted(|aged| aged.data(whole), distance, self.ranks);
                gone += part.bytes * lost;
            }
        }
        self.exchanged = self.reuse.now();
        CacheLoss { path: wires, data: if bytes > 0.0 { gone / bytes } else { 0.0 } }
    }

    fn bytes(&self, view: &View) -> f64 {
        view.len as f64 * self.program.buffer(view.buffer).dtype.size() as f64
    }

    /// Bytes touched since the midpoint of the kernel that was running at clock `at`.
    fn halfway(&self, at: u64) -> f64 {
        let number = self.kernels.partition_point(|&(end, _)| end < at);
        let kernel = self.kernels.get(number).filter(|_| at > 0);
        kernel.map_or(0.0, |&(end, bytes)| self.reuse.since(end) + 0.5 * bytes)
    }

    /// Fraction (0–1) by which operands are colder than in a kernel that runs on them repeatedly,
    /// whose reuse distance is their own size.
    fn farther(&self, coldness: f64, bytes: f64, company: CoreLoad) -> f64 {
        let bytes = bytes.max(1.0);
        let least = self.measured.coldness(bytes, company);
        let farther = if least < 1.0 { (coldness / bytes - least) / (1.0 - least) } else { 0.0 };
        farther.clamp(0.0, 1.0)
    }

    fn running(&self, microbatch: Microbatch) -> u64 {
        self.before + u64::from(microbatch.0)
    }

    fn op(&mut self, op: &Op) -> OpTime {
        let mut taken = match *op {
            Op::Load { into, microbatch, .. } => {
                let len = self.program.buffer(into).elements;
                let view = View { buffer: into, offset: 0, len };
                self.touch(&[view], self.running(microbatch));
                let time = len as f64 * self.measured.load_time_per_token.0;
                OpTime { solo: time, all_cores: time }
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
                OpTime { solo: time, all_cores: time }
            }
            Op::Stash { from, into, microbatch } | Op::Restore { from, into, microbatch } => {
                self.copy(&[from, into], AccumulateMode::Move, self.running(microbatch))
            }
            Op::Collective { .. }
            | Op::Send { .. }
            | Op::Recv { .. }
            | Op::Free { .. }
            | Op::Serve { .. } => return OpTime::default(),
        };
        taken.solo += self.measured.op_overhead.0;
        taken.all_cores += self.measured.op_overhead.0;
        taken
    }

    fn segment(&mut self, segment: paceline_plan::ids::SegmentId, running: u64) -> OpTime {
        let segment = self.program.segment(segment);
        let template = &self.plan.templates[segment.template as usize];
        let mut sum = OpTime::default();
        for op in &template.ops {
            let operands = op.inputs.iter().chain(&op.params).chain(&op.outputs);
            let views: Vec<View> = operands.map(|&i| segment.operands[usize::from(i)]).collect();
            let reach = self.touch(&views, running);
            let taken = self.kernel(&kernel(template, op), reach).unwrap_or_else(|| {
                let model = self.roofline.unmeasured(template, op).0;
                OpTime { solo: model, all_cores: model }
            });
            sum.solo += taken.solo;
            sum.all_cores += taken.all_cores;
        }
        sum
    }

    fn step(&mut self, bucket: &Bucket, phase: StepPhase) -> OpTime {
        if !bucket.updated {
            return OpTime::default();
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
            OpTime { solo: model, all_cores: model }
        })
    }

    fn copy(&mut self, views: &[View; 2], mode: AccumulateMode, running: u64) -> OpTime {
        let [from, _] = views;
        let reach = self.touch(views, running);
        let dtype = self.program.buffer(from.buffer).dtype;
        let used = accumulate_kernel(mode, dtype, from.len);
        self.kernel(&used, reach).unwrap_or_else(|| {
            let model = self.roofline.accumulate(self.program, from, mode).0;
            OpTime { solo: model, all_cores: model }
        })
    }

    fn touch(&mut self, views: &[View], running: u64) -> Reach {
        let mut reach = Reach::default();
        for view in views {
            for part in self.reuse.touch(self.program, view, running) {
                let coldness =
                    |company| self.measured.coldness(part.distance, company) * part.bytes;
                reach.bytes += part.bytes;
                reach.solo += coldness(CoreLoad::Solo);
                reach.all_cores += coldness(CoreLoad::AllCores);
            }
        }
        self.kernels.push((self.reuse.now(), reach.bytes));
        reach
    }

    /// Time of a kernel on operands of this coldness; `None` if it was not measured.
    fn kernel(&self, used: &KernelUse, reach: Reach) -> Option<OpTime> {
        let table = self.measured.kernel(&used.name, used.dtype, self.threads)?;
        let time = |company, coldness: f64| {
            let WarmCold { warm, cold } = table.time(&used.shape, used.work, company)?;
            let farther = self.farther(coldness, reach.bytes, company);
            Some(warm.0 + (cold.0 - warm.0).max(0.0) * farther)
        };
        let solo = time(CoreLoad::Solo, reach.solo)?;
        let all_cores = time(CoreLoad::AllCores, reach.all_cores)?;
        Some(OpTime { solo, all_cores: all_cores.max(solo) })
    }
}
