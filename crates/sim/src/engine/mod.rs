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
//! and a collective when all members are. The network then says when each of them ends
//! ([`network::Network`]): at once, by a cost model ([`closed_form`]), or when its traffic is
//! through, on links that it shares with all other traffic in flight ([`flow`]).
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
mod closed_form;
mod contention;
mod copy_engines;
mod costs;
mod events;
mod exchange_cost;
mod flow;
pub(crate) mod interference;
mod lanes;
mod matching;
mod measured;
mod network;
mod param_gather_overlap;
mod progress_stalls;
mod reuse_distance;
mod ring_attention;
mod steady_state;
mod time_varying;
mod timeline;
mod workload;

pub(crate) use async_servers::resolve;
pub(crate) use calls::vector;
pub(crate) use classes::Class;
pub(crate) use costs::Costs;
pub(crate) use matching::MatchedOps;
pub(crate) use param_gather_overlap::overlap_param_gather;
pub(crate) use steady_state::Unrolled;
pub(crate) use time_varying::{ClusterEpochs, NetworkEpochs};
pub(crate) use timeline::Timeline;
pub(crate) use workload::Load;

use crate::cluster::Cluster;
use crate::error::SimError;
use crate::network::flow::Folding;
use calls::Calls;
use classes::Classes;
use closed_form::ClosedForm;
use flow::Prepared;
use paceline_plan::ids::{OpId, RoleId};
use paceline_plan::program::label::describe;
use paceline_plan::program::{Op, Plan, Program};
use paceline_plan::units::Seconds;
use workload::Workload;

/// Run of a plan: its times, and how its ops were matched.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) timeline: Timeline,
    pub(crate) matches: MatchedOps,
    /// Durations of the exchanges, if no traffic changes them.
    times: Option<ClosedForm>,
}

/// Computes start and end of every op of every role's body, with exchanges timed one by one.
///
/// The plan must pass validation: dangling references are not checked again.
pub(crate) fn run(
    load: &Load<'_>,
    cluster: &Cluster,
    epochs: &NetworkEpochs<'_>,
) -> Result<Run, SimError> {
    let classes = Classes::of(load.plan, cluster, load.costs.placement())?;
    run_classes(load, classes, epochs)
}

/// Same as [`run`], with the given rank classes.
fn run_classes(
    load: &Load<'_>,
    classes: Classes,
    epochs: &NetworkEpochs<'_>,
) -> Result<Run, SimError> {
    let calls = Calls::new(load.plan, &classes, load.costs, epochs)?;
    converge(load, classes, |load, classes| timed(load, classes, &calls, epochs))
}

/// Runs a plan once, with exchanges timed one by one.
fn timed(
    job: Load<'_>,
    classes: Classes,
    calls: &Calls,
    epochs: &NetworkEpochs<'_>,
) -> Result<Run, SimError> {
    let load = Workload { jobs: &[job], classes: &classes };
    let (mut net, matches) = ClosedForm::of(&load, calls, epochs)?;
    let times = lanes::run(&load, &matches, &mut net)?.since(job.start);
    Ok(Run { timeline: Timeline::new(job.plan, classes, times), matches, times: Some(net) })
}

/// Computes start and end of every op of every role's body, with all traffic sharing links.
pub(crate) fn run_flow(load: &Load<'_>, cluster: &Cluster) -> Result<Run, SimError> {
    run_folded(load, cluster, Folding::On)
}

/// Same as [`run_flow`], with folding on or off.
fn run_folded(load: &Load<'_>, cluster: &Cluster, folding: Folding) -> Result<Run, SimError> {
    let prepared = Prepared::new(std::slice::from_ref(load), cluster, folding)?;
    converge(load, prepared.classes()?, |job, classes| {
        let (times, matches) = prepared.run(&[job], &classes)?;
        let timeline = Timeline::new(job.plan, classes, times.since(job.start));
        Ok(Run { timeline, matches, times: None })
    })
}

/// Runs several jobs, with all traffic sharing links; times are from each job's start on.
pub(crate) fn run_jobs(jobs: &[Load<'_>], cluster: &Cluster) -> Result<Vec<Timeline>, SimError> {
    let prepared = Prepared::new(jobs, cluster, Folding::On)?;
    let classes = prepared.classes()?;
    let (times, _) = prepared.run(jobs, &classes)?;
    let of_job = |(job, load): (usize, &Load<'_>)| {
        Timeline::of_job(load.plan, (&classes, job), &times, load.start)
    };
    Ok(jobs.iter().enumerate().map(of_job).collect())
}

/// Runs a plan until the times of its ops agree with what runs concurrently on measured hosts.
fn converge(
    load: &Load<'_>,
    classes: Classes,
    once: impl Fn(Load<'_>, Classes) -> Result<Run, SimError>,
) -> Result<Run, SimError> {
    let mut run = once(*load, classes)?;
    let Some(host) = load.costs.shared_host() else { return Ok(run) };
    // Each pass uses the concurrency found by the one before; a few passes converge.
    let (plan, mut costs) = (load.plan, load.costs.clone());
    for _ in 0..SETTLING {
        let held = progress_stalls::compute_stalls(plan, &costs, &run.timeline);
        costs.set_contention(contention::slowdowns(plan, &costs, &run.timeline, host), held);
        run = once(Load { costs: &costs, ..*load }, run.timeline.into_classes())?;
    }
    Ok(run)
}

/// Number of passes after which durations and concurrency agree to about one percent.
const SETTLING: u32 = 6;

/// Same as [`run`], with collectives that take no time; the network still times messages.
pub(crate) fn run_without_collectives(
    plan: &Plan,
    cluster: &Cluster,
    costs: &Costs<'_>,
    epochs: &NetworkEpochs<'_>,
) -> Result<Timeline, SimError> {
    let classes = Classes::of(plan, cluster, costs.placement())?;
    let calls = Calls::instant(plan, &classes);
    Ok(timed(Load::new(plan, costs), classes, &calls, epochs)?.timeline)
}

impl Run {
    /// Returns true if the exchanges' durations do not depend on compute costs. They do on measured
    /// hosts, where both share cores, and at servers, which compute their answers.
    pub(crate) fn stands_alone(&self, plan: &Plan, costs: &Costs<'_>) -> bool {
        let serves = |program: &Program| !program.services.is_empty();
        costs.shared_host().is_none() && !plan.programs.iter().any(serves)
    }

    /// Runs the plan again with other compute costs; `None` if that changes the exchanges'
    /// durations.
    pub(crate) fn rerun(
        &self,
        plan: &Plan,
        costs: &Costs<'_>,
    ) -> Option<Result<Timeline, SimError>> {
        let times = self.times.clone().filter(|_| self.stands_alone(plan, costs))?;
        Some(self.with(plan, costs, times))
    }

    /// Runs the plan again with exchanges that take no time.
    pub(crate) fn instant(&self, plan: &Plan, costs: &Costs<'_>) -> Result<Timeline, SimError> {
        self.with(plan, costs, ClosedForm::instant(self.matches.len()))
    }

    fn with(
        &self,
        plan: &Plan,
        costs: &Costs<'_>,
        mut net: ClosedForm,
    ) -> Result<Timeline, SimError> {
        let classes = self.timeline.classes();
        let load = Workload { jobs: &[Load::new(plan, costs)], classes };
        let times = lanes::run(&load, &self.matches, &mut net)?;
        Ok(Timeline::new(plan, classes.clone(), times))
    }
}

/// Compute time of each layer in one iteration, on the ranks that hold it: measured on a calibrated
/// cluster, otherwise from the device description.
pub(crate) fn layer_times(
    plan: &Plan,
    cluster: &Cluster,
    costs: &Costs<'_>,
) -> Result<Vec<Seconds>, SimError> {
    let classes = Classes::of(plan, cluster, costs.placement())?;
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
