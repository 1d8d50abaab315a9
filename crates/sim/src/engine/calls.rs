//! Durations of a plan's collectives: every distinct call of every distinct group is timed once.

use super::classes::Classes;
use super::costs::Costs;
use super::time_varying::{NetworkEpochs, SimDuration};
use crate::cluster::measured::TransportTable;
use crate::error::SimError;
use crate::jobs::Placement;
use crate::network::{CostModel, Measured, NoPath, Vector};
use crate::prices;
use paceline_plan::collective::{CollectiveKind, Method, Pattern, SummationOrder};
use paceline_plan::ids::{CallId, GroupId, Rank, RoleId};
use paceline_plan::program::{Call, Op, Plan, Program};
use paceline_plan::units::{Bytes, Seconds};
use std::collections::BTreeMap;

/// Durations of collectives.
pub(crate) struct Calls {
    /// Indexed by class and call.
    all: Vec<Vec<SimDuration>>,
}

/// Key of equally long calls of one role: the call's parameters and the first class of the group.
type CallKey = (CollectiveKind, Method, SummationOrder, GroupId, u32, Vector, u32);

impl Calls {
    /// Times the calls of every class, starting when all members have arrived.
    pub(crate) fn new(
        plan: &Plan,
        classes: &Classes,
        costs: &Costs<'_>,
        eras: &NetworkEpochs<'_>,
    ) -> Result<Self, SimError> {
        let mut known: BTreeMap<(RoleId, CallKey), SimDuration> = BTreeMap::new();
        let mut all = Vec::with_capacity(classes.len());
        for number in 0..classes.len() as u32 {
            let class = classes.get(number);
            let program = &plan.programs[class.role.index()];
            // First class among a group's members of this role, per group.
            let mut firsts: BTreeMap<GroupId, u32> = BTreeMap::new();
            let mut one = |call: &Call| {
                let first = *firsts.entry(call.group).or_insert_with(|| {
                    let members = plan.mesh.members(plan.group(call.group), class.rank);
                    let of_role = members.into_iter().filter(|&rank| plan.role(rank) == class.role);
                    let of_role: Vec<Rank> = of_role.collect();
                    classes.among(plan, 0, &of_role).first().copied().unwrap_or(number)
                });
                let vector = vector(plan, call);
                let key =
                    (call.kind, call.method, call.order, call.group, call.root, vector, first);
                let time = match known.get(&(class.role, key)) {
                    Some(time) => time.clone(),
                    None => {
                        let time = eras.duration(|network| {
                            collective(
                                (plan, program),
                                class.rank,
                                call,
                                &vector,
                                (network, costs.placement()),
                            )
                        })?;
                        known.insert((class.role, key), time.clone());
                        time
                    }
                };
                let exposure = costs.exposure(&class, call);
                Ok(time.map(|alone| exposure.of(alone)))
            };
            all.push(program.calls.iter().map(&mut one).collect::<Result<_, SimError>>()?);
        }
        Ok(Self { all })
    }

    /// Returns durations of zero for all collectives.
    pub(crate) fn instant(plan: &Plan, classes: &Classes) -> Self {
        let calls = |class| plan.programs[classes.get(class).role.index()].calls.len();
        let all = (0..classes.len() as u32).map(|class| vec![SimDuration::ZERO; calls(class)]);
        Self { all: all.collect() }
    }

    /// Duration of a class's call.
    pub(super) fn get(&self, class: u32, call: CallId) -> &SimDuration {
        &self.all[class as usize][call.index()]
    }
}

/// Returns how long each collective keeps its rank's core busy, by role and body op, independent of
/// the link. This equals its time inside a host, where only cores move bytes.
pub(super) fn core_busy(plan: &Plan, wire: &TransportTable) -> Vec<Vec<f64>> {
    let inside = Measured::new(wire, Box::new(Unmeasured));
    let of_role = |at: usize| {
        let (role, program) = (RoleId::from(at), &plan.programs[at]);
        let rank = plan.representative(role);
        let time = |call: &Call| {
            let inside = (&inside as &dyn CostModel, &Placement::default());
            let vector = vector(plan, call);
            collective((plan, program), rank, call, &vector, inside).map_or(0.0, |t| t.0)
        };
        let calls: Vec<f64> = program.calls.iter().map(time).collect();
        let of_op = |op: &Op| op.call().map_or(0.0, |call| calls[call.index()]);
        program.body.nodes.iter().map(|node| of_op(&node.op)).collect()
    };
    (0..plan.programs.len()).map(of_role).collect()
}

/// Network that returns zero: unmeasured collectives are not known to keep a core busy.
struct Unmeasured;

impl CostModel for Unmeasured {
    fn message(&self, _: Rank, _: Rank, _: Bytes) -> Result<Seconds, NoPath> {
        Ok(Seconds::ZERO)
    }

    fn collective(&self, _: &Pattern, _: &[Rank], _: &Vector) -> Result<Seconds, NoPath> {
        Ok(Seconds::ZERO)
    }
}

fn collective(
    (plan, program): (&Plan, &Program),
    rank: Rank,
    call: &Call,
    vector: &Vector,
    (network, placement): (&dyn CostModel, &Placement),
) -> Result<Seconds, SimError> {
    let mut members = plan.mesh.members(plan.group(call.group), rank);
    members.iter_mut().for_each(|member| *member = placement.device(*member));
    let located = |source| SimError::Collective {
        rank,
        role: program.name.clone(),
        what: call.name.clone(),
        source,
    };
    let ranks = u32::try_from(members.len()).unwrap_or(u32::MAX);
    let pattern = call.pattern(ranks).map_err(located)?;
    let time = prices::collective(network, call.method, &pattern, &members, vector);
    time.map_err(|source| {
        let op = program.body.nodes.iter().position(
            |node| matches!(node.op, Op::Collective { call: id, .. } if program.call(id) == call),
        );
        let (role, what) = (program.name.clone(), call.name.clone());
        SimError::NoPath { rank, role, op: op.unwrap_or(0).into(), what, source }
    })
}

/// Returns the full vector of a call, even if this rank contributes or keeps only a shard.
pub(crate) fn vector(plan: &Plan, call: &Call) -> Vector {
    let ranks = u64::from(plan.mesh.group_size(plan.group(call.group)));
    let elements = match call.kind {
        // Non-root ranks may hold only their shard; only the root holds the whole vector.
        CollectiveKind::Gather => call.elements().max(call.input.len.saturating_mul(ranks)),
        CollectiveKind::Scatter => call.elements().max(call.output.len.saturating_mul(ranks)),
        CollectiveKind::AllReduce
        | CollectiveKind::ReduceScatter
        | CollectiveKind::AllGather
        | CollectiveKind::Broadcast
        | CollectiveKind::Reduce
        | CollectiveKind::AllToAll
        | CollectiveKind::SendRecv => call.elements(),
        CollectiveKind::Barrier => 0,
    };
    Vector { elements, element: Bytes(call.dtype.size()), block: call.block }
}
