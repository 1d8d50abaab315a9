//! How long each op of a plan takes once it has started: every template and every call once.

use crate::cluster::Cluster;
use crate::compute::Roofline;
use crate::error::SimError;
use crate::network::{Network, NoPath, Vector};
use crate::profile::Profile;
use paceline_plan::collective::{Algorithm, CollectiveKind, Order, Pattern};
use paceline_plan::ids::{GroupId, Rank, RoleId};
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::program::{AccumulateMode, Call, Op, Plan, Program, View};
use paceline_plan::units::{Bytes, Seconds};
use std::collections::BTreeMap;

/// Durations of everything that a plan's ops refer to.
pub struct Costs<'a> {
    plan: &'a Plan,
    roofline: Roofline<'a>,
    profile: &'a Profile,
    /// By position in the plan.
    templates: Vec<Seconds>,
    /// By role and call.
    calls: Vec<Vec<Seconds>>,
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
        let roofline = Roofline::new(&cluster.device, profile, plan.strategy.dtype);
        let templates = plan.templates.iter().map(|template| roofline.template(template)).collect();
        let roles = (0..plan.programs.len()).map(RoleId::from);
        let calls = roles.map(|role| calls(plan, role, network)).collect::<Result<_, _>>()?;
        Ok(Self { plan, roofline, profile, templates, calls })
    }

    /// How long an op takes from its start, if it meets nobody.
    pub(super) fn op(&self, role: RoleId, op: &Op) -> Seconds {
        let program = &self.plan.programs[role.index()];
        match op {
            Op::Load { .. } | Op::Free { .. } => Seconds::ZERO,
            Op::Compute { segment, .. } => {
                self.templates[program.segment(*segment).template as usize]
            }
            Op::Collective { call, .. } => self.calls[role.index()][call.index()],
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

    /// The time of a message between two roles' ranks.
    pub(super) fn message(
        &self,
        network: &dyn Network,
        from: Rank,
        to: Rank,
        bytes: Bytes,
    ) -> Result<Seconds, NoPath> {
        let whole = network.message(from, to, bytes)?;
        let Plan { mesh, strategy, .. } = self.plan;
        let between_stages = mesh.coordinates(from).is_some() && mesh.coordinates(to).is_some();
        if !self.profile.sliced_messages || mesh.tp == 1 || strategy.sp || !between_stages {
            return Ok(whole);
        }
        let part = network.message(from, to, bytes / u64::from(mesh.tp))?;
        let members = mesh.members(GroupKind::Axis(Axis::Tp), to);
        let (kind, ring) = (CollectiveKind::AllGather, Algorithm::Ring);
        let gather = match Pattern::new(kind, ring, Order::Free, mesh.tp, 0) {
            Ok(pattern) => network.collective(&pattern, &members, &Vector::of_bytes(bytes))?,
            Err(_) => return Ok(whole),
        };
        // Where it does not pay, as inside a host, it is not done.
        let sliced = part + gather;
        Ok(if sliced.0 < whole.0 { sliced } else { whole })
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
    network.collective(&pattern, &members, vector).map_err(|source| {
        let op = program.body.nodes.iter().position(
            |node| matches!(node.op, Op::Collective { call: id, .. } if program.call(id) == call),
        );
        let (role, what) = (program.name.clone(), call.name.clone());
        SimError::NoPath { rank, role, op: op.unwrap_or(0).into(), what, source }
    })
}

/// The whole vector of a call, also where this rank brings or keeps only its part.
fn vector(plan: &Plan, call: &Call) -> Vector {
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
