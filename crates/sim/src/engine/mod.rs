//! Runs the bodies of all roles against each other and computes start and end of every op.
//!
//! **Folding.** All ranks of a role run one program and, on a cluster without overrides, take the
//! same time for it. One of them is simulated for all, so the cost depends on the number of roles,
//! not on world size. If devices or links differ, indistinguishable ranks form a class
//! ([`symmetry`]) and one of each class is simulated. A message between ranks of one class matches
//! the class's own counterpart. A server's messages to all ranks of a role match the one op that
//! represents them, which lasts until the last one has finished.
//!
//! **Time.** An op is *posted* when the op before it on its lane and those in its `after` list have
//! ended. It starts then, unless it must be matched: a message starts when both sides are posted,
//! and a collective across roles when all members are. Posting and ending are the only events. An
//! op's times depend only on ops that ended before, so a worklist of lanes computes them in any
//! order with the same result; no event queue is needed.
//!
//! **Measured hosts.** If ranks share cores, an op's duration depends on concurrent ops
//! (`contention`) and its start on what its thread is doing (`progress_stalls`). The run is
//! therefore repeated until both agree.
//!
//! The body is run once, from an idle start. If iterations overlap, several are unrolled one after
//! the other and the last is reported (`steady_state`).

mod async_servers;
mod calls;
mod classes;
mod contention;
mod copy_engines;
mod costs;
mod exchange_cost;
pub mod flow;
mod interference;
mod lanes;
mod matching;
mod measured;
mod param_gather_overlap;
mod progress_stalls;
mod reuse_distance;
mod ring_attention;
mod steady_state;
mod symmetry;
mod time_varying;
mod timeline;

pub(crate) use async_servers::resolve;
pub(crate) use calls::{Calls, vector};
pub(crate) use classes::{Class, Classes};
pub use costs::Costs;
pub(crate) use matching::MatchedOps;
pub use param_gather_overlap::overlap_param_gather;
pub(crate) use steady_state::Unrolled;
pub use time_varying::{ClusterEpochs, NetworkEpochs};
pub use timeline::Timeline;

use crate::cluster::Cluster;
use crate::error::SimError;
use paceline_plan::ids::{OpId, RoleId};
use paceline_plan::program::label::describe;
use paceline_plan::program::{Op, Plan, Program};
use paceline_plan::units::Seconds;

/// Computes start and end of every op of every role's body.
///
/// The plan must pass validation: dangling references are not checked again.
pub fn run(
    plan: &Plan,
    cluster: &Cluster,
    costs: &Costs<'_>,
    eras: &NetworkEpochs<'_>,
) -> Result<Timeline, SimError> {
    run_classes(plan, Classes::of(plan, cluster)?, costs, eras)
}

/// Same as [`run`], with the given rank classes.
fn run_classes(
    plan: &Plan,
    classes: Classes,
    costs: &Costs<'_>,
    eras: &NetworkEpochs<'_>,
) -> Result<Timeline, SimError> {
    let calls = Calls::new(plan, &classes, costs, eras)?;
    let once = |costs: &Costs<'_>, classes: Classes| {
        let matches = matching::find(plan, &classes, costs, &calls, eras)?;
        lanes::run(plan, classes, &matches, costs, &calls)
    };
    let mut timeline = once(costs, classes)?;
    let Some(host) = costs.shared_host() else { return Ok(timeline) };
    // Each pass uses the concurrency found by the one before; a few passes converge.
    let mut costs = costs.clone();
    for _ in 0..SETTLING {
        let held = progress_stalls::compute_stalls(plan, &costs, &timeline);
        costs.set_contention(contention::slowdowns(plan, &costs, &timeline, host), held);
        timeline = once(&costs, timeline.into_classes())?;
    }
    Ok(timeline)
}

/// Number of passes after which durations and concurrency agree to about one percent.
const SETTLING: u32 = 6;

/// Same as [`run`], with collectives that take no time; the network still times messages.
pub(crate) fn run_without_collectives(
    plan: &Plan,
    cluster: &Cluster,
    costs: &Costs<'_>,
    eras: &NetworkEpochs<'_>,
) -> Result<Timeline, SimError> {
    let classes = Classes::of(plan, cluster)?;
    let calls = Calls::instant(plan, &classes);
    let matches = matching::find(plan, &classes, costs, &calls, eras)?;
    lanes::run(plan, classes, &matches, costs, &calls)
}

/// Op matches between rank classes and their durations, for analyses of op start times and of the
/// effect of free components.
pub(crate) struct MatchedRun<'a> {
    plan: &'a Plan,
    classes: &'a Classes,
    calls: Calls,
    pub(crate) matches: MatchedOps,
}

impl<'a> MatchedRun<'a> {
    /// Finds all op matches of the bodies.
    pub(crate) fn of(
        plan: &'a Plan,
        classes: &'a Classes,
        costs: &Costs<'_>,
        eras: &NetworkEpochs<'_>,
    ) -> Result<Self, SimError> {
        let calls = Calls::new(plan, classes, costs, eras)?;
        let matches = matching::find(plan, classes, costs, &calls, eras)?;
        Ok(Self { plan, classes, calls, matches })
    }

    /// Returns true if the matches' durations do not depend on compute costs. They do on measured
    /// hosts, where both share cores, and at servers, which compute their answers.
    pub(crate) fn stand_alone(&self, costs: &Costs<'_>) -> bool {
        let serves = |program: &Program| !program.services.is_empty();
        costs.shared_host().is_none() && !self.plan.programs.iter().any(serves)
    }

    /// Returns the same matches with exchanges that take no time.
    pub(crate) fn instant(&self) -> Self {
        let calls = Calls::instant(self.plan, self.classes);
        Self { calls, matches: self.matches.instant(), ..*self }
    }

    /// Runs the bodies with these matches and the given compute costs.
    pub(crate) fn run(&self, costs: &Costs<'_>) -> Result<Timeline, SimError> {
        lanes::run(self.plan, self.classes.clone(), &self.matches, costs, &self.calls)
    }
}

/// Compute time of each layer in one iteration, on the ranks that hold it: measured on a calibrated
/// cluster, otherwise from the device description.
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

/// Number of ranks of a role.
pub(crate) fn ranks(plan: &Plan, role: RoleId) -> u32 {
    if role.0 < plan.mesh.pp { plan.mesh.size() / plan.mesh.pp } else { 1 }
}

/// Returns a text description of an op, for errors.
fn describe_op(plan: &Plan, role: RoleId, op: OpId) -> String {
    let program = &plan.programs[role.index()];
    describe(plan, program, &program.body.nodes[op.index()].op)
}

#[cfg(test)]
mod tests;
