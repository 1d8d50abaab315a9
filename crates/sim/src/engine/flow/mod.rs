//! Runs plans on the flow network: communication time depends on all concurrent traffic.
//!
//! Compute ops take a fixed time, as on other networks. A message starts when both sides are
//! posted, and a collective when all members are. From then on it is a set of flows that share
//! links with all others in flight and end accordingly. A rank continues when its own messages have
//! finished.
//!
//! The part of a tensor-parallel exchange that software hides behind GEMMs (`interference`) follows
//! the exposed part. No rank waits for it, but it takes its share of the links.
//!
//! **Folding.** Ranks of a role run one program, but they are alike only if links treat them alike.
//! All exchanges are therefore mapped to the cluster's links and folded ([`crate::network::flow`]),
//! and one rank of each class is run. If all replicas are placed alike on devices of their own,
//! this is one rank per role for any world size. If a server handles ranks one after the other, it
//! is every rank. Either way the same engine runs and computes the same times.

mod engine_queue;
mod exchanges;
mod lanes;
mod matching;

use super::{Classes, Costs, Timeline};
use crate::cluster::Cluster;
use crate::error::SimError;
use crate::network::flow::Folding;
use exchanges::Exchanges;
use paceline_plan::program::Plan;

/// Computes start and end of every op of every role's body, for the role's slowest rank.
///
/// `costs` gives compute times and decides which messages are sliced.
pub fn run(plan: &Plan, cluster: &Cluster, costs: &Costs<'_>) -> Result<Timeline, SimError> {
    run_folded(plan, cluster, costs, Folding::On)
}

/// Same as [`run`], with folding on or off.
fn run_folded(
    plan: &Plan,
    cluster: &Cluster,
    costs: &Costs<'_>,
    folding: Folding,
) -> Result<Timeline, SimError> {
    let exchanges = Exchanges::of(plan, cluster, costs)?;
    let folded = exchanges.fold(folding)?;
    let classes = Classes::of_traffic(plan, cluster, &folded)?;
    let matches = matching::find(plan, costs, &exchanges, &folded, &classes);
    lanes::run(plan, costs, &folded, classes, &matches)
}

#[cfg(test)]
mod tests;
