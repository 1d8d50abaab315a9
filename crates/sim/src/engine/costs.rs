//! Op costs: every template is costed once per device kind.

use super::calls;
use super::classes::{Class, Classes};
use super::contention::Host;
use super::exchange_cost::ExchangeCost;
use super::interference::{self, Exposure};
use super::measured::{self, Durations};
use super::ring_attention::{self, Sizes};
use crate::cluster::Cluster;
use crate::compute::Roofline;
use crate::jobs::Placement;
use crate::network::{CostModel, NoPath};
use crate::prices::{self, Route};
use crate::profile::Profile;
use paceline_plan::ids::{LaneId, OpId, Rank, RoleId};
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::program::{AccumulateMode, Call, Node, Op, Plan, StepPhase, View};
use paceline_plan::units::{Bytes, Seconds};

/// Costs of a plan's ops per device kind, and of its messages.
#[derive(Clone)]
pub(crate) struct Costs<'a> {
    plan: &'a Plan,
    profile: &'a Profile,
    /// Indexed by device kind.
    kinds: Vec<Kind<'a>>,
    /// By role, additional bytes that the software sends around a ring beyond the plan.
    rings: Vec<Sizes>,
    /// Devices of the plan's ranks.
    placement: Placement,
    /// True if all local ops take no time.
    instant: bool,
    /// Measured costs, if the host was calibrated.
    measured: Option<MeasuredCosts>,
}

/// Measured durations on the cluster's default device kind.
#[derive(Clone)]
struct MeasuredCosts {
    host: Host,
    /// Indexed by role.
    durations: Vec<Durations>,
    /// By role and op, time that exchanges between hosts keep a core busy; empty on one host, where
    /// an exchange occupies the core throughout.
    core_busy: Vec<Vec<f64>>,
    /// By class and op, slowdown factor from concurrent ops.
    slowdowns: Vec<Vec<f64>>,
    /// By class and op, progress stall: compute delay caused by exchanges that its thread drives.
    compute_stalls: Vec<Vec<f64>>,
    /// Rank skew, as a fraction of the time since ranks last synchronised.
    rank_skew: f64,
}

/// Costs on one device kind.
#[derive(Clone)]
struct Kind<'a> {
    roofline: Roofline<'a>,
    /// Indexed by template position in the plan.
    templates: Vec<Seconds>,
    /// By role, slowdown factor of compute from concurrent memory traffic.
    slowdown: Vec<f64>,
}

impl<'a> Costs<'a> {
    /// Costs every template on every device kind.
    pub(crate) fn new(plan: &'a Plan, cluster: &'a Cluster, profile: &'a Profile) -> Self {
        let kinds = cluster.kinds().map(|device| {
            let (dtype, microbatches) = (plan.strategy.dtype, plan.strategy.microbatches());
            let roofline = Roofline::new(device, profile, dtype, microbatches);
            let templates: Vec<Seconds> =
                plan.templates.iter().map(|template| roofline.template(template)).collect();
            let ranks = if device.is_accelerator() { plan.mesh.world() } else { 1 };
            let slowdown = (plan.programs.iter())
                .map(|program| {
                    interference::slowdown(plan, program, profile, &roofline, &templates)
                })
                .map(|slowdown| slowdown * interference::slowest(ranks))
                .collect();
            Kind { roofline, templates, slowdown }
        });
        let kinds: Vec<Kind<'_>> = kinds.collect();
        let measured = cluster.measured.as_ref().map(|table| {
            let ranks = u64::from(plan.mesh.world()).min(cluster.devices_per_host());
            let threads = table.threads_of(ranks);
            let wire = table.transports.first().filter(|_| cluster.hosts == 1);
            let durations = measured::durations(
                plan,
                (table, wire),
                (ranks as f64, threads),
                &kinds[0].roofline,
            );
            let hosts = u64::from(plan.mesh.world()).div_ceil(cluster.devices_per_host());
            let cores = f64::from(table.cores) / f64::from(threads);
            let host = Host { cores, count: hosts as f64 };
            // Between hosts, bytes go through TCP sockets.
            let sockets = table.transports.iter().find(|wire| wire.name == "tcp");
            let core_busy = match sockets.or(table.transports.first()) {
                Some(wire) if cluster.hosts > 1 => calls::core_busy(plan, wire),
                Some(_) | None => Vec::new(),
            };
            let (stretches, compute_stall) = (Vec::new(), Vec::new());
            MeasuredCosts {
                host,
                durations,
                core_busy,
                slowdowns: stretches,
                compute_stalls: compute_stall,
                rank_skew: table.rank_skew,
            }
        });
        let sizes = |program| Sizes::new(plan, program, &profile.ring);
        let rings = plan.programs.iter().map(sizes).collect();
        let placement = Placement::default();
        Self { plan, profile, kinds, rings, placement, instant: false, measured }
    }

    /// Returns the same costs with ranks on these devices.
    pub(crate) fn on(self, placement: Placement) -> Self {
        Self { placement, ..self }
    }

    /// Devices of the plan's ranks.
    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Device of a rank.
    pub(super) fn device(&self, rank: Rank) -> Rank {
        self.placement.device(rank)
    }

    /// Returns the same costs with compute that takes no time.
    pub(crate) fn without_compute(&self) -> Self {
        Self { instant: true, ..self.clone() }
    }

    /// Time of an op at its device kind's nominal speed; zero for exchanges, which are timed when
    /// ranks match.
    pub(super) fn op(&self, classes: &Classes, number: u32, id: OpId, op: &Op) -> Seconds {
        let Class { role, kind, .. } = classes.get(number);
        let program = &self.plan.programs[role.index()];
        let Kind { roofline, templates, slowdown } = &self.kinds[kind];
        let taken = self.measured.as_ref().filter(|_| kind == 0).map(|measured| {
            let taken = measured.durations[role.index()].taken[id.index()];
            Seconds(taken.solo) * self.slowdown(number, id)
        });
        match op {
            Op::Free { .. } => Seconds::ZERO,
            Op::Load { .. } if !self.instant => taken.unwrap_or(Seconds::ZERO),
            Op::Load { .. } => Seconds::ZERO,
            Op::Compute { .. }
            | Op::Accumulate { .. }
            | Op::Step { .. }
            | Op::Stash { .. }
            | Op::Restore { .. }
                if self.instant =>
            {
                Seconds::ZERO
            }
            Op::Compute { .. }
            | Op::Accumulate { .. }
            | Op::Step { .. }
            | Op::Stash { .. }
            | Op::Restore { .. }
                if let Some(time) = taken =>
            {
                time
            }
            Op::Compute { segment, .. } => {
                templates[program.segment(*segment).template as usize] * slowdown[role.index()]
            }
            Op::Accumulate { from, mode, .. } => roofline.accumulate(program, from, *mode),
            Op::Step { bucket, phase } => {
                let bucket = &program.buckets[*bucket as usize];
                let group = bucket.shard.map(|group| self.plan.group(group));
                let parts = group.map_or(1, |group| self.plan.mesh.group_size(group));
                roofline.step(program, bucket, *phase, parts.into())
            }
            Op::Stash { from, .. } | Op::Restore { from, .. } => match program.offloaded(op) {
                Some(bytes) => roofline.offload(self.plan.strategy.store, bytes),
                None => roofline.accumulate(program, from, AccumulateMode::Move),
            },
            // Timed when ranks match; see `calls` and `matching`.
            Op::Collective { .. } | Op::Send { .. } | Op::Recv { .. } | Op::Serve { .. } => {
                Seconds::ZERO
            }
        }
    }

    /// Returns true if an op moves data to or from its rank's offload store.
    pub(super) fn offloads(&self, role: RoleId, op: &Op) -> bool {
        self.plan.programs[role.index()].offloaded(op).is_some()
    }

    /// Host that ranks share, if it was measured.
    pub(super) fn shared_host(&self) -> Option<Host> {
        self.measured.as_ref().map(|measured| measured.host)
    }

    /// Time that a collective between hosts keeps its rank's core busy; `None` if it always does.
    pub(super) fn core_busy(&self, role: RoleId, op: OpId) -> Option<f64> {
        self.measured.as_ref()?.core_busy.get(role.index())?.get(op.index()).copied()
    }

    /// Slowdown factor of a measured op if every core is busy.
    pub(super) fn all_cores_time(&self, role: RoleId, op: OpId) -> f64 {
        let taken = self.measured.as_ref().map(|m| m.durations[role.index()].taken[op.index()]);
        taken.filter(|t| t.solo > 0.0).map_or(1.0, |t| t.all_cores / t.solo)
    }

    /// Cost of an exchange inside a measured host; `None` for other ops.
    pub(super) fn exchange_cost(&self, role: RoleId, op: OpId) -> Option<ExchangeCost> {
        *self.measured.as_ref()?.durations.get(role.index())?.exchanges.get(op.index())?
    }

    /// Skew between ranks that run the same ops, relative to the time since they synchronised.
    pub(super) fn rank_skew(&self) -> f64 {
        self.measured.as_ref().map_or(0.0, |measured| measured.rank_skew)
    }

    /// Sets slowdown factors and progress stalls of measured ops, by class and op.
    pub(super) fn set_contention(&mut self, stretches: Vec<Vec<f64>>, held: Vec<Vec<f64>>) {
        if let Some(measured) = &mut self.measured {
            (measured.slowdowns, measured.compute_stalls) = (stretches, held);
        }
    }

    /// Progress stall of a measured compute op that is ready to start, in seconds.
    pub(super) fn held(&self, class: u32, op: OpId) -> f64 {
        let held = self
            .measured
            .as_ref()
            .filter(|_| !self.instant)
            .and_then(|m| m.compute_stalls.get(class as usize));
        held.and_then(|ops| ops.get(op.index())).copied().unwrap_or(0.0)
    }

    /// Slowdown factor of an op from concurrent ops on a measured host.
    pub(super) fn slowdown(&self, class: u32, op: OpId) -> f64 {
        let stretches = self.measured.as_ref().and_then(|m| m.slowdowns.get(class as usize));
        stretches.and_then(|ops| ops.get(op.index())).copied().unwrap_or(1.0)
    }

    /// Exposed part of a collective: all of it if it was measured.
    pub(super) fn exposure(&self, class: &Class, call: &Call) -> Exposure {
        if self.measured.is_some() {
            return Exposure::WHOLE;
        }
        let roofline = &self.kinds[class.kind].roofline;
        let (group, bytes) = (self.plan.group(call.group), call.bytes());
        let exchange = (group, call.kind, bytes);
        interference::exposure(exchange, self.plan.strategy.micro_batch, self.profile, roofline)
    }

    /// Lane on which an op runs.
    pub(super) fn lane(&self, node: &Node) -> LaneId {
        ring_attention::lane(node, &self.profile.ring)
    }

    /// Bytes of a message that a role sends or receives.
    pub(super) fn bytes(&self, role: RoleId, view: &View) -> Bytes {
        let buffer = self.plan.programs[role.index()].buffer(view.buffer);
        let planned = Bytes(view.len.saturating_mul(buffer.dtype.size()));
        let times = self.rings[role.index()].of(view.buffer);
        if times > 1.0 { Bytes((planned.as_f64() * times) as u64) } else { planned }
    }

    /// Time of a message between ranks of two roles.
    pub(super) fn message(
        &self,
        network: &dyn CostModel,
        from: Rank,
        to: Rank,
        bytes: Bytes,
    ) -> Result<Seconds, NoPath> {
        prices::message(network, &self.route(from, to), bytes)
    }

    /// Ends of a message and the ranks that may share it.
    fn route(&self, from: Rank, to: Rank) -> Route {
        let Plan { mesh, strategy, .. } = self.plan;
        // Ring messages within a stage differ between tensor-parallel ranks and cannot be sliced.
        let stage = |rank| mesh.coordinates(rank).map(|at| at.pp);
        let between_stages = matches!((stage(from), stage(to)), (Some(a), Some(b)) if a != b);
        let slices = prices::slices(self.profile, mesh, strategy.sp) && between_stages;
        let mut receivers = Vec::new();
        if slices {
            receivers = mesh.members(GroupKind::Axis(Axis::Tp), to);
            receivers.iter_mut().for_each(|member| *member = self.device(*member));
        }
        Route { from: self.device(from), to: self.device(to), receivers }
    }

    /// Number of slices of a message: one per tensor-parallel rank, or 1 if slicing does not pay.
    pub(crate) fn parts(&self, network: &dyn CostModel, from: Rank, to: Rank, bytes: Bytes) -> u32 {
        let whole = network.message(self.device(from), self.device(to), bytes);
        let sliced = prices::sliced(network, &self.route(from, to), bytes);
        let pays = matches!((whole, sliced), (Ok(whole), Ok(Some(sliced))) if sliced.0 < whole.0);
        if pays { self.plan.mesh.tp } else { 1 }
    }

    /// Time in which an asynchronous server applies a push of a bucket.
    pub(super) fn apply(&self, of: Class, bucket: u32) -> Seconds {
        let program = &self.plan.programs[of.role.index()];
        let servers = self.plan.mesh.servers.max(1);
        match program.buckets.get(bucket as usize).filter(|_| !self.instant) {
            Some(bucket) => {
                let roofline = &self.kinds[of.kind].roofline;
                roofline.step(program, bucket, StepPhase::Apply, servers.into())
            }
            None => Seconds::ZERO,
        }
    }
}
