//! How long each collective of a plan takes: every distinct call of every distinct group once.

use super::classes::Classes;
use super::costs::Costs;
use super::lasting::{Eras, Lasting};
use crate::cluster::measured::Wire;
use crate::error::SimError;
use crate::network::{Measured, Network, NoPath, Vector};
use paceline_plan::collective::{Algorithm, CollectiveKind, Order, Pattern, resolve};
use paceline_plan::ids::{CallId, GroupId, Rank, RoleId};
use paceline_plan::mesh::GroupKind;
use paceline_plan::program::{Call, Op, Plan, Program};
use paceline_plan::units::{Bytes, Seconds};
use std::collections::BTreeMap;

/// Durations of collectives.
pub(crate) struct Calls {
    /// By class and call.
    all: Vec<Vec<Lasting>>,
}

/// What makes two calls of one role take equally long, and the first class of the group.
type CallKey = (CollectiveKind, Algorithm, Order, GroupId, u32, Vector, u32);

impl Calls {
    /// Times the calls of every class, from the moment that all members have come.
    pub(crate) fn new(
        plan: &Plan,
        classes: &Classes,
        costs: &Costs<'_>,
        eras: &Eras<'_>,
    ) -> Result<Self, SimError> {
        let mut known: BTreeMap<(RoleId, CallKey), Lasting> = BTreeMap::new();
        let mut all = Vec::with_capacity(classes.len());
        for number in 0..classes.len() as u32 {
            let class = classes.get(number);
            let program = &plan.programs[class.role.index()];
            // The first class of the group that a class meets, for every group.
            let mut firsts: BTreeMap<GroupId, u32> = BTreeMap::new();
            let mut one = |call: &Call| {
                let first = *firsts.entry(call.group).or_insert_with(|| {
                    let members = plan.mesh.members(plan.group(call.group), class.rank);
                    let of_role = members.into_iter().filter(|&rank| plan.role(rank) == class.role);
                    let of_role: Vec<Rank> = of_role.collect();
                    classes.among(plan, &of_role).first().copied().unwrap_or(number)
                });
                let vector = vector(plan, call);
                let key =
                    (call.kind, call.algorithm, call.order, call.group, call.root, vector, first);
                let time = match known.get(&(class.role, key)) {
                    Some(time) => time.clone(),
                    None => {
                        let time = eras.lasting(|network| {
                            collective(plan, program, class.rank, call, &vector, network)
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

    /// No collective takes any time.
    pub(crate) fn instant(plan: &Plan, classes: &Classes) -> Self {
        let calls = |class| plan.programs[classes.get(class).role.index()].calls.len();
        let all = (0..classes.len() as u32).map(|class| vec![Lasting::ZERO; calls(class)]);
        Self { all: all.collect() }
    }

    /// The time of a class's call.
    pub(super) fn get(&self, class: u32, call: CallId) -> &Lasting {
        &self.all[class as usize][call.index()]
    }
}

/// By role and op of the body: how long a collective keeps its rank's core busy, whatever the link
/// takes. That is what it takes inside a host, where nothing but cores moves bytes.
pub(super) fn carried(plan: &Plan, wire: &Wire) -> Vec<Vec<f64>> {
    let inside = Measured::new(wire, Box::new(Unmeasured));
    let of_role = |at: usize| {
        let (role, program) = (RoleId::from(at), &plan.programs[at]);
        let rank = plan.representative(role);
        let time = |call: &Call| {
            collective(plan, program, rank, call, &vector(plan, call), &inside).map_or(0.0, |t| t.0)
        };
        let calls: Vec<f64> = program.calls.iter().map(time).collect();
        let of_op = |op: &Op| op.call().map_or(0.0, |call| calls[call.index()]);
        program.body.nodes.iter().map(|node| of_op(&node.op)).collect()
    };
    (0..plan.programs.len()).map(of_role).collect()
}

/// Answers nothing: what was not measured is not known to keep a core busy.
struct Unmeasured;

impl Network for Unmeasured {
    fn message(&self, _: Rank, _: Rank, _: Bytes) -> Result<Seconds, NoPath> {
        Ok(Seconds::ZERO)
    }

    fn collective(&self, _: &Pattern, _: &[Rank], _: &Vector) -> Result<Seconds, NoPath> {
        Ok(Seconds::ZERO)
    }
}

fn collective(
    plan: &Plan,
    program: &Program,
    rank: Rank,
    call: &Call,
    vector: &Vector,
    network: &dyn Network,
) -> Result<Seconds, SimError> {
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
