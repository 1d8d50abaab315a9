//! What ops cost a device: every template once for each kind.

use super::beside::{self, Exposure};
use super::calls;
use super::classes::{Class, Classes};
use super::measured::{self, Durations};
use super::moving::Moving;
use super::ring::{self, Sizes};
use super::sharing::Host;
use crate::cluster::Cluster;
use crate::compute::Roofline;
use crate::network::{Network, NoPath, Vector};
use crate::profile::Profile;
use paceline_plan::collective::{Algorithm, CollectiveKind, Order, Pattern};
use paceline_plan::ids::{LaneId, OpId, Rank, RoleId};
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::program::{AccumulateMode, Call, Node, Op, Plan, StepPhase, View};
use paceline_plan::units::{Bytes, Seconds};

/// What a plan's ops cost a device of each kind, and how messages are sent.
#[derive(Clone)]
pub struct Costs<'a> {
    plan: &'a Plan,
    profile: &'a Profile,
    /// By kind of device.
    kinds: Vec<Kind<'a>>,
    /// By role, what software sends more than planned of what goes round.
    rings: Vec<Sizes>,
    /// Whether everything that a rank does by itself takes no time.
    instant: bool,
    /// Where the host was measured.
    measured: Option<Taking>,
}

/// Measured durations, on the cluster's own kind of device.
#[derive(Clone)]
struct Taking {
    host: Host,
    /// By role.
    durations: Vec<Durations>,
    /// By role and op, how long exchanges between hosts keep a core busy; nothing on one host, where
    /// an exchange is all work.
    carried: Vec<Vec<f64>>,
    /// By class and op, how many times longer ops take for what runs beside them.
    stretches: Vec<Vec<f64>>,
    /// By class and op, how long computations are kept waiting by exchanges that their thread moves.
    held: Vec<Vec<f64>>,
    /// How far ranks come apart, in parts of the time since they met.
    uneven: f64,
}

/// Costs on one kind of device.
#[derive(Clone)]
struct Kind<'a> {
    roofline: Roofline<'a>,
    /// By position in the plan.
    templates: Vec<Seconds>,
    /// By role, how much longer computations take because of what is moved beside them.
    slowdown: Vec<f64>,
}

impl<'a> Costs<'a> {
    /// Costs every template on every kind of device.
    pub fn new(plan: &'a Plan, cluster: &'a Cluster, profile: &'a Profile) -> Self {
        let kinds = cluster.kinds().map(|device| {
            let (dtype, microbatches) = (plan.strategy.dtype, plan.strategy.microbatches());
            let roofline = Roofline::new(device, profile, dtype, microbatches);
            let templates: Vec<Seconds> =
                plan.templates.iter().map(|template| roofline.template(template)).collect();
            let ranks = if device.is_accelerator() { plan.mesh.world() } else { 1 };
            let slowdown = (plan.programs.iter())
                .map(|program| beside::slowdown(plan, program, profile, &roofline, &templates))
                .map(|slowdown| slowdown * beside::slowest(ranks))
                .collect();
            Kind { roofline, templates, slowdown }
        });
        let kinds: Vec<Kind<'_>> = kinds.collect();
        let measured = cluster.measured.as_ref().map(|table| {
            let ranks = u64::from(plan.mesh.world()).min(cluster.devices_per_host());
            let threads = table.threads_of(ranks);
            let wire = table.wires.first().filter(|_| cluster.hosts == 1);
            let durations = measured::durations(
                plan,
                (table, wire),
                (ranks as f64, threads),
                &kinds[0].roofline,
            );
            let hosts = u64::from(plan.mesh.world()).div_ceil(cluster.devices_per_host());
            let cores = f64::from(table.cores) / f64::from(threads);
            let host = Host { cores, count: hosts as f64 };
            // Between hosts, bytes go through sockets.
            let sockets = table.wires.iter().find(|wire| wire.transport == "tcp");
            let carried = match sockets.or(table.wires.first()) {
                Some(wire) if cluster.hosts > 1 => calls::carried(plan, wire),
                Some(_) | None => Vec::new(),
            };
            let (stretches, held) = (Vec::new(), Vec::new());
            Taking { host, durations, carried, stretches, held, uneven: table.uneven }
        });
        let sizes = |program| Sizes::new(plan, program, &profile.ring);
        let rings = plan.programs.iter().map(sizes).collect();
        Self { plan, profile, kinds, rings, instant: false, measured }
    }

    /// The same with computation that takes no time.
    pub(crate) fn without_compute(&self) -> Self {
        Self { instant: true, ..self.clone() }
    }

    /// How long an op takes a device at its kind's own pace; nothing for what is told where ranks
    /// meet.
    pub(super) fn op(&self, classes: &Classes, number: u32, id: OpId, op: &Op) -> Seconds {
        let Class { role, kind, .. } = classes.get(number);
        let program = &self.plan.programs[role.index()];
        let Kind { roofline, templates, slowdown } = &self.kinds[kind];
        let taken = self.measured.as_ref().filter(|_| kind == 0).map(|measured| {
            let taken = measured.durations[role.index()].taken[id.index()];
            Seconds(taken.alone) * self.stretched(number, id)
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
            // These take their time where ranks meet; see `calls` and `meetings`.
            Op::Collective { .. } | Op::Send { .. } | Op::Recv { .. } | Op::Serve { .. } => {
                Seconds::ZERO
            }
        }
    }

    /// Whether an op moves something to or from its rank's store.
    pub(super) fn offloads(&self, role: RoleId, op: &Op) -> bool {
        self.plan.programs[role.index()].offloaded(op).is_some()
    }

    /// The host that ranks share, where it was measured.
    pub(super) fn shared_host(&self) -> Option<Host> {
        self.measured.as_ref().map(|measured| measured.host)
    }

    /// How long a collective between hosts keeps its rank's core busy; none where it always does.
    pub(super) fn carried(&self, role: RoleId, op: OpId) -> Option<f64> {
        self.measured.as_ref()?.carried.get(role.index())?.get(op.index()).copied()
    }

    /// How many times longer a measured op takes when every core is busy.
    pub(super) fn together(&self, role: RoleId, op: OpId) -> f64 {
        let taken = self.measured.as_ref().map(|m| m.durations[role.index()].taken[op.index()]);
        taken.filter(|t| t.alone > 0.0).map_or(1.0, |t| t.together / t.alone)
    }

    /// What an exchange inside a measured host takes; none for others.
    pub(super) fn moving(&self, role: RoleId, op: OpId) -> Option<Moving> {
        *self.measured.as_ref()?.durations.get(role.index())?.moving.get(op.index())?
    }

    /// How far ranks that do the same come apart, in parts of the time since they met.
    pub(super) fn uneven(&self) -> f64 {
        self.measured.as_ref().map_or(0.0, |measured| measured.uneven)
    }

    /// Sets how many times longer measured ops take, and how long they are kept waiting, by class and op.
    pub(super) fn settle(&mut self, stretches: Vec<Vec<f64>>, held: Vec<Vec<f64>>) {
        if let Some(measured) = &mut self.measured {
            (measured.stretches, measured.held) = (stretches, held);
        }
    }

    /// How long a measured computation that could start is kept waiting.
    pub(super) fn held(&self, class: u32, op: OpId) -> f64 {
        let held = self
            .measured
            .as_ref()
            .filter(|_| !self.instant)
            .and_then(|m| m.held.get(class as usize));
        held.and_then(|ops| ops.get(op.index())).copied().unwrap_or(0.0)
    }

    /// How many times longer an op takes for what runs beside it on a measured host.
    pub(super) fn stretched(&self, class: u32, op: OpId) -> f64 {
        let stretches = self.measured.as_ref().and_then(|m| m.stretches.get(class as usize));
        stretches.and_then(|ops| ops.get(op.index())).copied().unwrap_or(1.0)
    }

    /// What a rank waits for of a collective: all of one that was measured.
    pub(super) fn exposure(&self, class: &Class, call: &Call) -> Exposure {
        if self.measured.is_some() {
            return Exposure::WHOLE;
        }
        let roofline = &self.kinds[class.kind].roofline;
        beside::exposure(self.plan, call, self.profile, roofline)
    }

    /// The lane on which an op takes its turn.
    pub(super) fn lane(&self, node: &Node) -> LaneId {
        ring::lane(node, &self.profile.ring)
    }

    /// The bytes of a message that a role sends or receives.
    pub(super) fn bytes(&self, role: RoleId, view: &View) -> Bytes {
        let buffer = self.plan.programs[role.index()].buffer(view.buffer);
        let planned = Bytes(view.len.saturating_mul(buffer.dtype.size()));
        let times = self.rings[role.index()].of(view.buffer);
        if times > 1.0 { Bytes((planned.as_f64() * times) as u64) } else { planned }
    }

    /// The time of a message between two roles' ranks.
    pub(super) fn message(
        &self,
        network: &dyn Network,
        from: Rank,
        to: Rank,
        bytes: Bytes,
    ) -> Result<Seconds, NoPath> {
        let whole = network.message(from, to, bytes)?;
        let sliced = self.sliced(network, from, to, bytes)?;
        // Where it does not pay, as inside a host, it is not done.
        Ok(sliced.filter(|sliced| sliced.0 < whole.0).unwrap_or(whole))
    }

    /// Into how many parts a message is cut: one for each tensor-parallel rank, or just one.
    pub(crate) fn parts(&self, network: &dyn Network, from: Rank, to: Rank, bytes: Bytes) -> u32 {
        let whole = network.message(from, to, bytes);
        let sliced = self.sliced(network, from, to, bytes);
        let pays = matches!((whole, sliced), (Ok(whole), Ok(Some(sliced))) if sliced.0 < whole.0);
        if pays { self.plan.mesh.tp } else { 1 }
    }

    /// The time of a message that is cut among the tensor-parallel ranks and gathered again; none
    /// where that is not possible.
    fn sliced(
        &self,
        network: &dyn Network,
        from: Rank,
        to: Rank,
        bytes: Bytes,
    ) -> Result<Option<Seconds>, NoPath> {
        let Plan { mesh, strategy, .. } = self.plan;
        // What goes round the ranks of a stage differs from one tensor-parallel rank to the next.
        let stage = |rank| mesh.coordinates(rank).map(|at| at.pp);
        let between_stages = matches!((stage(from), stage(to)), (Some(a), Some(b)) if a != b);
        if !self.profile.sliced_messages || mesh.tp == 1 || strategy.sp || !between_stages {
            return Ok(None);
        }
        let part = network.message(from, to, bytes / u64::from(mesh.tp))?;
        let members = mesh.members(GroupKind::Axis(Axis::Tp), to);
        let (kind, ring) = (CollectiveKind::AllGather, Algorithm::Ring);
        let Ok(pattern) = Pattern::new(kind, ring, Order::Free, mesh.tp, 0) else {
            return Ok(None);
        };
        let gather = network.collective(&pattern, &members, &Vector::of_bytes(bytes))?;
        Ok(Some(part + gather))
    }

    /// The time in which a service takes in and answers all requests that it declares.
    pub(super) fn service(
        &self,
        network: &dyn Network,
        role: RoleId,
        service: u32,
    ) -> Result<Seconds, NoPath> {
        let program = &self.plan.programs[role.index()];
        let service = &program.services[service as usize];
        let me = self.plan.representative(role);
        let bytes =
            |view: &View| Bytes(view.len.saturating_mul(program.buffer(view.buffer).dtype.size()));
        let servers = self.plan.mesh.servers.max(1);
        let update = match self.instant {
            true => Seconds::ZERO,
            false => (program.buckets.iter())
                .map(|bucket| {
                    let roofline = &self.kinds[0].roofline;
                    roofline.step(program, bucket, StepPhase::Apply, servers.into())
                })
                .sum(),
        };
        let mut time = Seconds::ZERO;
        let peers = self.plan.mesh.members(self.plan.group(service.group), me);
        for peer in peers.into_iter().filter(|&peer| peer != me) {
            let request = network.message(peer, me, bytes(&service.receives))?;
            let answer = network.message(me, peer, bytes(&service.sends))?;
            time += (request + update + answer) * f64::from(service.requests);
        }
        Ok(time)
    }
}
