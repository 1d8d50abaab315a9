//! Runs plans on the flow network: how long communication takes depends on what else is under way.
//!
//! Compute ops take a fixed time, as everywhere. A message starts when both sides are posted and a
//! collective when all members are; from there on it is flows, which share links with all others
//! that are under way and end when they end. A rank goes on when its own messages are through.
//!
//! What software hides of a tensor-parallel exchange behind products (`beside`) follows behind the
//! part that is waited for, with nobody waiting, and takes its share of the links there.
//!
//! **Folding.** Ranks of a role run one program, but they are alike only if links treat them alike.
//! All ranks' exchanges are therefore laid on the cluster's links and folded
//! ([`crate::network::flow`]); one rank of each class is run. Where each replica stands on its own
//! devices in the same way, that is one rank of each role, whatever the world; where a server deals
//! with ranks one after the other, it is every rank. Either way it is the same engine, and it comes
//! to the same times.

mod exchanges;
mod lanes;
mod line;
mod meetings;

use super::{Classes, Costs, Timeline};
use crate::cluster::Cluster;
use crate::error::SimError;
use crate::network::flow::Folding;
use exchanges::Exchanges;
use paceline_plan::program::Plan;

/// When every op of every role's body starts and ends: those of the role's slowest rank.
///
/// `costs` are those of computing, and say which messages are sent in parts.
pub fn run(plan: &Plan, cluster: &Cluster, costs: &Costs<'_>) -> Result<Timeline, SimError> {
    run_folded(plan, cluster, costs, Folding::On)
}

/// [`run`], folded or not.
fn run_folded(
    plan: &Plan,
    cluster: &Cluster,
    costs: &Costs<'_>,
    folding: Folding,
) -> Result<Timeline, SimError> {
    let exchanges = Exchanges::of(plan, cluster, costs)?;
    let folded = exchanges.fold(folding)?;
    let classes = Classes::of_traffic(plan, cluster, &folded)?;
    let meetings = meetings::find(plan, costs, &exchanges, &folded, &classes);
    lanes::run(plan, costs, &folded, classes, &meetings)
}

#[cfg(test)]
mod tests;
