//! How long each op of a plan takes once it has started: every template and every call once.

use super::beside;
use super::measured::{self, Taken};
use super::sharing::Host;
use crate::cluster::Cluster;
use crate::compute::Roofline;
use crate::error::SimError;
use crate::network::{Network, NoPath, Vector};
use crate::profile::Profile;
use paceline_plan::collective::{Algorithm, CollectiveKind, Order, Pattern, resolve};
use paceline_plan::ids::{GroupId, OpId, Rank, RoleId};
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::program::{AccumulateMode, Call, Op, Plan, Program, View};
use paceline_plan::units::{Bytes, Seconds};
use std::collections::BTreeMap;

/// Durations of everything that a plan's ops refer to.
#[derive(Clone)]
pub struct Costs<'a> {
    plan: &'a Plan,
    roofline: Roofline<'a>,
    profile: &'a Profile,
    /// By position in the plan.
    templates: Vec<Seconds>,
    /// By role and call.
    calls: Vec<Vec<Seconds>>,
    /// By role, how much longer computations take because of what is moved beside them.
    slowdown: Vec<f64>,
    /// Whether everything that a rank does by itself takes no time.
    instant: bool,
    /// Where the host was measured.
    measured: Option<Taking>,
}

/// Measured durations.
#[derive(Clone)]
struct Taking {
    host: Host,
    /// By role and op.
    taken: Vec<Vec<Taken>>,
    /// How many times longer ops take for what runs beside them.
    stretches: Vec<Vec<f64>>,
}

/// What makes two calls of one role take equally long.
type CallKey = (CollectiveKind, Algorithm, Order, GroupId, u32, Vector);

impl<'a> Costs<'a> {
    /// Costs every template and every distinct call.
    pub fn new(
        plan: &'a Plan,
        cluster: &'a Cluster,
        profile: &'a Profile,
        network: &dyn Network,
    ) -> Result<Self, SimError> {
        let roofline = Roofline::new(
            &cluster.device,
            profile,
            plan.strategy.dtype,
            plan.strategy.microbatches(),
        );
        let templates: Vec<Seconds> =
            plan.templates.iter().map(|template| roofline.template(template)).collect();
        let roles = (0..plan.programs.len()).map(RoleId::from);
        let calls = roles.map(|role| calls(plan, role, network)).collect::<Result<_, _>>()?;
        let ranks = if cluster.device.is_accelerator() { plan.mesh.world() } else { 1 };
        let slowdown = (plan.programs.iter())
            .map(|program| beside::slowdown(plan, program, profile, &roofline, &templates))
            .map(|slowdown| slowdown * beside::slowest(ranks))
            .collect();
        let measured = cluster.measured.as_ref().map(|table| {
            let taken = measured::durations(plan, table, &roofline);
            let stretches = taken.iter().map(|ops| vec![1.0; ops.len()]).collect();
            let hosts = u64::from(plan.mesh.world()).div_ceil(cluster.devices_per_host());
            let host = Host { cores: f64::from(table.cores), count: hosts as f64 };
            Taking { host, taken, stretches }
        });
        Ok(Self { plan, roofline, profile, templates, calls, slowdown, instant: false, measured })
    }

    /// The same with computation that takes no time.
    pub(crate) fn without_compute(&self) -> Self {
        Self { instant: true, ..self.clone() }
    }

    /// The same with collectives that take no time; messages are the network's to say.
    pub(crate) fn without_collectives(&self) -> Self {
        let calls = self.calls.iter().map(|calls| vec![Seconds::ZERO; calls.len()]).collect();
        Self { calls, ..self.clone() }
    }

    /// How long an op takes from its start, if it meets nobody.
    pub(super) fn op(&self, role: RoleId, id: OpId, op: &Op) -> Seconds {
        let program = &self.plan.programs[role.index()];
        let taken = self.measured.as_ref().map(|measured| {
            let (role, id) = (role.index(), id.index());
            (Seconds(measured.taken[role][id].alone), measured.stretches[role][id])
        });
        match op {
            Op::Free { .. } => Seconds::ZERO,
            Op::Load { .. } if !self.instant => taken.map_or(Seconds::ZERO, |(t, s)| t * s),
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
                if let Some((time, stretch)) = taken =>
            {
                time * stretch
            }
            Op::Compute { segment, .. } => {
                let alone = self.templates[program.segment(*segment).template as usize];
                alone * self.slowdown[role.index()]
            }
            Op::Collective { call, .. } => {
                let alone = self.calls[role.index()][call.index()];
                let call = program.call(*call);
                match taken {
                    Some((_, stretch)) => alone * stretch,
                    None => beside::exchange(self.plan, call, self.profile, &self.roofline, alone),
                }
            }
            Op::Accumulate { from, mode, .. } => self.roofline.accumulate(program, from, *mode),
            Op::Step { bucket } => {
                let bucket = &program.buckets[*bucket as usize];
                let group = bucket.shard.map(|group| self.plan.group(group));
                let parts = group.map_or(1, |group| self.plan.mesh.group_size(group));
                self.roofline.step(program, bucket, parts.into())
            }
            Op::Stash { from, .. } | Op::Restore { from, .. } => {
                self.roofline.accumulate(program, from, AccumulateMode::Move)
            }
            // These take their time where they meet others; see `meetings`.
            Op::Send { .. } | Op::Recv { .. } | Op::Serve { .. } => Seconds::ZERO,
        }
    }

    /// The host that ranks share, where it was measured.
    pub(super) fn shared_host(&self) -> Option<Host> {
        self.measured.as_ref().map(|measured| measured.host)
    }

    /// How many times longer a measured op takes when every core is busy.
    pub(super) fn together(&self, role: RoleId, op: OpId) -> f64 {
        let taken = self.measured.as_ref().map(|m| m.taken[role.index()][op.index()]);
        taken.filter(|t| t.alone > 0.0).map_or(1.0, |t| t.together / t.alone)
    }

    /// Sets how many times longer measured ops take, by role and op.
    pub(super) fn stretch(&mut self, stretches: Vec<Vec<f64>>) {
        if let Some(measured) = &mut self.measured {
            measured.stretches = stretches;
        }
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
        let between_stages = mesh.coordinates(from).is_some() && mesh.coordinates(to).is_some();
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
        let mut time = Seconds::ZERO;
        let peers = self.plan.mesh.members(self.plan.group(service.group), me);
        for peer in peers.into_iter().filter(|&peer| peer != me) {
            let request = network.message(peer, me, bytes(&service.receives))?;
            let answer = network.message(me, peer, bytes(&service.sends))?;
            time += (request + answer) * f64::from(service.requests);
        }
        Ok(time)
    }
}

/// The durations of a role's calls.
fn calls(plan: &Plan, role: RoleId, network: &dyn Network) -> Result<Vec<Seconds>, SimError> {
    let program = &plan.programs[role.index()];
    let mut known: BTreeMap<CallKey, Seconds> = BTreeMap::new();
    let cost = |call: &Call| {
        let vector = vector(plan, call);
        let key = (call.kind, call.algorithm, call.order, call.group, call.root, vector);
        if let Some(&time) = known.get(&key) {
            return Ok(time);
        }
        let time = collective(plan, program, role, call, &vector, network)?;
        known.insert(key, time);
        Ok(time)
    };
    program.calls.iter().map(cost).collect()
}

fn collective(
    plan: &Plan,
    program: &Program,
    role: RoleId,
    call: &Call,
    vector: &Vector,
    network: &dyn Network,
) -> Result<Seconds, SimError> {
    let rank = plan.representative(role);
    let members = plan.mesh.members(plan.group(call.group), rank);
    let located = |source| SimError::Collective {
        rank,
        role: program.name.clone(),
        what: call.name.clone(),
        source,
    };
    let ranks = u32::try_from(members.len()).unwrap_or(u32::MAX);
    let pattern =
        Pattern::new(call.kind, call.algorithm, call.order, ranks, call.root).map_err(located)?;
    let time = if is_open(plan, call, ranks) {
        network.delegated(&pattern, &members, vector)
    } else {
        network.collective(&pattern, &members, vector)
    };
    time.map_err(|source| {
        let op = program.body.nodes.iter().position(
            |node| matches!(node.op, Op::Collective { call: id, .. } if program.call(id) == call),
        );
        let (role, what) = (program.name.clone(), call.name.clone());
        SimError::NoPath { rank, role, op: op.unwrap_or(0).into(), what, source }
    })
}

/// Whether a call's algorithm is left to whoever carries it out: nobody asked for one, the plan has
/// the one that lowering fills in, and no order of summation depends on it.
fn is_open(plan: &Plan, call: &Call, ranks: u32) -> bool {
    let asked = match plan.group(call.group) {
        GroupKind::Replicas => plan.strategy.collective,
        GroupKind::Axis(_) | GroupKind::Ends | GroupKind::Served(_) | GroupKind::Servers => {
            Algorithm::Auto
        }
    };
    asked == Algorithm::Auto
        && (call.order == Order::Free || !call.kind.reduces())
        && resolve(call.kind, Algorithm::Auto, ranks, call.order) == Ok(call.algorithm)
}

/// The whole vector of a call, also where this rank brings or keeps only its part.
pub(crate) fn vector(plan: &Plan, call: &Call) -> Vector {
    let ranks = u64::from(plan.mesh.group_size(plan.group(call.group)));
    let elements = match call.kind {
        // Every rank may hold no more than its part, and the whole only at the root.
        CollectiveKind::Gather => call.elements().max(call.input.len.saturating_mul(ranks)),
        CollectiveKind::AllReduce
        | CollectiveKind::ReduceScatter
        | CollectiveKind::AllGather
        | CollectiveKind::Broadcast
        | CollectiveKind::Reduce
        | CollectiveKind::AllToAll => call.elements(),
    };
    Vector { elements, element: Bytes(call.dtype.size()), block: call.block }
}
