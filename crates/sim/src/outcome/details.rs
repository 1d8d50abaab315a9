//! What only some want to know of an iteration, because finding it out takes longer than the
//! simulation itself.

use super::bandwidth::{DimensionUse, bandwidth};
use super::critical_path::{CriticalPath, critical_path};
use super::limits::{Limits, limits};
use super::memory::{MemoryCurve, memory};
use super::{Outcome, RoleStats};
use crate::Options;
use crate::cluster::Cluster;
use crate::engine::{Costs, Encounters, Eras, Timeline};
use crate::error::SimError;
use paceline_plan::program::Plan;
use paceline_plan::units::Seconds;
use serde::Serialize;

/// Why an iteration takes as long as it does, and what it uses.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Details {
    /// What it waits for.
    pub critical_path: CriticalPath,
    /// How long it would take without one of its costs.
    pub limits: Limits,
    /// How busy the cluster's dimensions are, innermost first.
    pub bandwidth: Vec<DimensionUse>,
    /// What a rank of each role holds over time.
    pub memory: Vec<MemoryCurve>,
}

/// How an iteration was simulated, to do it again.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) cluster: &'a Cluster,
    pub(crate) costs: &'a Costs<'a>,
    pub(crate) eras: &'a Eras<'a>,
    pub(crate) options: &'a Options,
    /// Runs the plan with costs that differ from these.
    pub(crate) run: &'a dyn Fn(&Costs<'_>) -> Result<Timeline, SimError>,
    /// What becomes of a run's end: what is left to the next iteration is cut off.
    pub(crate) settle: &'a dyn Fn(Timeline) -> Timeline,
}

/// Finds them out for an iteration that was simulated.
pub(crate) fn details(
    run: &Run<'_>,
    timeline: &Timeline,
    outcome: &Outcome,
) -> Result<Details, SimError> {
    let met = Encounters::of(run.plan, timeline.classes(), run.costs, run.eras)?;
    let busy = |role: &RoleStats| role.compute + role.exposed;
    let busiest = outcome.roles.iter().map(busy).fold(Seconds::ZERO, Seconds::max);
    Ok(Details {
        critical_path: critical_path(run.plan, timeline, &met.meetings),
        limits: limits(run, &met, busiest)?,
        bandwidth: bandwidth(run, outcome.iteration),
        memory: memory(run.plan, timeline),
    })
}
