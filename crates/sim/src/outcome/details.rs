//! Optional analysis of an iteration, which takes longer than the simulation itself.

use super::bandwidth::{DimensionUse, bandwidth};
use super::critical_path::{CriticalPath, critical_path};
use super::layers::{ExchangeStat, LayerStat, layers};
use super::limits::{Limits, limits};
use super::memory::{MemoryCurve, memory};
use super::{Outcome, RoleStats};
use crate::Options;
use crate::cluster::Cluster;
use crate::engine::{Costs, NetworkEpochs, Run, Timeline};
use crate::error::SimError;
use paceline_plan::program::Plan;
use paceline_plan::units::Seconds;
use serde::Serialize;

/// Analysis of the iteration time and resource use.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Details {
    /// Critical path of the iteration.
    pub critical_path: CriticalPath,
    /// Iteration time without one of its costs.
    pub limits: Limits,
    /// Utilisation of the cluster's dimensions, innermost first.
    pub bandwidth: Vec<DimensionUse>,
    /// Memory of a rank of each role over time.
    pub memory: Vec<MemoryCurve>,
    /// Times by layer, in the layers' order.
    pub layers: Vec<LayerStat>,
    /// Exchanges by name, of every role.
    pub exchanges: Vec<ExchangeStat>,
}

/// Inputs of a simulation, for repeating it with changes.
#[derive(Clone, Copy)]
pub(crate) struct SimContext<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) cluster: &'a Cluster,
    pub(crate) costs: &'a Costs<'a>,
    pub(crate) epochs: &'a NetworkEpochs<'a>,
    pub(crate) options: &'a Options,
    /// Runs the plan with other costs.
    pub(crate) run: &'a dyn Fn(&Costs<'_>) -> Result<Run, SimError>,
    /// Cuts off the part of a timeline that belongs to the next iteration.
    pub(crate) resolve: &'a dyn Fn(Timeline) -> Timeline,
}

/// Computes the details of a simulated iteration; `timeline` is that of `run`, resolved.
pub(crate) fn details(
    context: &SimContext<'_>,
    run: &Run,
    timeline: &Timeline,
    outcome: &Outcome,
) -> Result<Details, SimError> {
    let busy = |role: &RoleStats| role.compute + role.exposed;
    let busiest = outcome.roles.iter().map(busy).fold(Seconds::ZERO, Seconds::max);
    let (layers, exchanges) = layers(context, timeline, outcome.iteration);
    Ok(Details {
        layers,
        exchanges,
        critical_path: critical_path(context.plan, timeline, &run.matches),
        limits: limits(context, run, busiest)?,
        bandwidth: bandwidth(context, outcome.iteration),
        memory: memory(context.plan, timeline),
    })
}
