//! Runs the bodies of all roles against each other and says when every op starts and ends.
//!
//! **Folding.** All ranks of a role run one program and, on a cluster without exceptions, take the
//! same time for it, so one of them is simulated for all: as many as there are roles, whatever the
//! world. Where devices or links differ, ranks that cannot be told apart make a class ([`alike`])
//! and one of each class is simulated. A message between ranks of one class meets the class's own
//! counterpart; a server's messages to all ranks of a role meet the one op that stands for them,
//! which lasts until the last is through.
//!
//! **Time.** An op is *posted* when the op before it on its lane and those in its `after` list have
//! ended. It starts then, unless it meets others: a message starts when both sides are posted and a
//! collective across roles when all are. Posting and ending are the only events, and an op's times
//! depend on nothing but those of ops that ended before, so a worklist of lanes finds them in any
//! order: no queue of events, and the same result whatever the order.
//!
//! **Measured hosts.** Where ranks share cores, an op's time depends on what runs beside it, and its
//! start on what its thread is at (`carrying`), so the run is repeated until they agree (`sharing`).
//!
//! The body is run once, from a standing start. Where iterations run into each other, several are
//! written one after the other and the last is told (`steady`).

mod ahead;
mod alike;
mod beside;
mod calls;
mod carrying;
mod classes;
mod costs;
mod engines;
pub mod flow;
mod lanes;
mod lasting;
mod measured;
mod meetings;
mod moving;
mod reuse;
mod ring;
mod serving;
mod sharing;
mod steady;
mod timeline;

pub use ahead::ahead;
pub(crate) use calls::{Calls, vector};
pub(crate) use classes::{Class, Classes};
pub use costs::Costs;
pub use lasting::{Eras, Moments};
pub(crate) use meetings::Meetings;
pub(crate) use serving::settle;
pub(crate) use steady::Unrolled;
pub use timeline::Timeline;

use crate::cluster::Cluster;
use crate::error::SimError;
use paceline_plan::ids::{OpId, RoleId};
use paceline_plan::program::{Op, Plan, Program};
use paceline_plan::units::Seconds;
use paceline_plan::validate::describe;

/// When every op of every role's body starts and ends.
///
/// The plan must be one that validation passes: names that lead nowhere are not looked for again.
pub fn run(
    plan: &Plan,
    cluster: &Cluster,
    costs: &Costs<'_>,
    eras: &Eras<'_>,
) -> Result<Timeline, SimError> {
    run_classes(plan, Classes::of(plan, cluster)?, costs, eras)
}

/// [`run`] with these classes of ranks.
fn run_classes(
    plan: &Plan,
    classes: Classes,
    costs: &Costs<'_>,
    eras: &Eras<'_>,
) -> Result<Timeline, SimError> {
    let calls = Calls::new(plan, &classes, costs, eras)?;
    let once = |costs: &Costs<'_>, classes: Classes| {
        let meetings = meetings::find(plan, &classes, costs, &calls, eras)?;
        lanes::run(plan, classes, &meetings, costs, &calls)
    };
    let mut timeline = once(costs, classes)?;
    let Some(host) = costs.shared_host() else { return Ok(timeline) };
    // Each pass follows what the one before found beside each op; the first few settle it.
    let mut costs = costs.clone();
    for _ in 0..SETTLING {
        let held = carrying::held(plan, &costs, &timeline);
        costs.settle(sharing::stretches(plan, &costs, &timeline, host), held);
        timeline = once(&costs, timeline.into_classes())?;
    }
    Ok(timeline)
}

/// Passes after which durations and what runs beside them agree to a percent or so.
const SETTLING: u32 = 6;

/// [`run`] with collectives that take no time; messages are the network's to say.
pub(crate) fn run_without_collectives(
    plan: &Plan,
    cluster: &Cluster,
    costs: &Costs<'_>,
    eras: &Eras<'_>,
) -> Result<Timeline, SimError> {
    let classes = Classes::of(plan, cluster)?;
    let calls = Calls::instant(plan, &classes);
    let meetings = meetings::find(plan, &classes, costs, &calls, eras)?;
    lanes::run(plan, classes, &meetings, costs, &calls)
}

/// Who meets whom among classes of ranks and how long it takes them, for those who ask why an op
/// started when it did, and what would be if something cost nothing.
pub(crate) struct Encounters<'a> {
    plan: &'a Plan,
    classes: &'a Classes,
    calls: Calls,
    pub(crate) meetings: Meetings,
}

impl<'a> Encounters<'a> {
    /// All encounters of the bodies.
    pub(crate) fn of(
        plan: &'a Plan,
        classes: &'a Classes,
        costs: &Costs<'_>,
        eras: &Eras<'_>,
    ) -> Result<Self, SimError> {
        let calls = Calls::new(plan, classes, costs, eras)?;
        let meetings = meetings::find(plan, classes, costs, &calls, eras)?;
        Ok(Self { plan, classes, calls, meetings })
    }

    /// Whether they take as long whatever computations cost. On measured hosts they do not, since
    /// both share cores, nor at servers, which compute their answers.
    pub(crate) fn stand_alone(&self, costs: &Costs<'_>) -> bool {
        let serves = |program: &Program| !program.services.is_empty();
        costs.shared_host().is_none() && !self.plan.programs.iter().any(serves)
    }

    /// The same where nothing that is exchanged takes time.
    pub(crate) fn instant(&self) -> Self {
        let calls = Calls::instant(self.plan, self.classes);
        Self { calls, meetings: self.meetings.instant(), ..*self }
    }

    /// The bodies with these encounters, and with computations that cost so much.
    pub(crate) fn run(&self, costs: &Costs<'_>) -> Result<Timeline, SimError> {
        lanes::run(self.plan, self.classes.clone(), &self.meetings, costs, &self.calls)
    }
}

/// How long each layer of a plan's model computes for one iteration, on the ranks that hold it: what
/// was measured of a calibrated cluster, or what the device's description comes to.
pub(crate) fn layer_times(
    plan: &Plan,
    cluster: &Cluster,
    costs: &Costs<'_>,
) -> Result<Vec<Seconds>, SimError> {
    let classes = Classes::of(plan, cluster)?;
    let mut times = vec![Seconds::ZERO; plan.layers.len()];
    for role in (0..plan.mesh.pp).map(RoleId) {
        let Some(class) = classes.all.iter().position(|class| class.role == role) else { continue };
        let program = &plan.programs[role.index()];
        for (id, node) in program.body.nodes.iter().enumerate() {
            if let Op::Compute { segment, .. } = node.op
                && let Some(layer) = program.segment(segment).layer
            {
                let took = costs.op(&classes, class as u32, OpId::from(id), &node.op);
                times[layer.index()] = times[layer.index()] + took;
            }
        }
    }
    Ok(times)
}

/// Ranks that play a role.
pub(crate) fn ranks(plan: &Plan, role: RoleId) -> u32 {
    if role.0 < plan.mesh.pp { plan.mesh.size() / plan.mesh.pp } else { 1 }
}

/// An op's place and words, for errors.
fn describe_op(plan: &Plan, role: RoleId, op: OpId) -> String {
    let program = &plan.programs[role.index()];
    describe(plan, program, &program.body.nodes[op.index()].op)
}

#[cfg(test)]
mod tests;
