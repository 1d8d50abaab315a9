//! Runs a plan on a described cluster and says how long it takes, what overlaps and what does not.
//!
//! ```text
//! Plan ──┐                ┌─ compute: every template once (roofline, profile)
//!        ├─► engine ◄─────┤
//! Cluster┘     │          └─ network: every message and call once (analytic)
//!              ▼
//!          Timeline ──► outcome: times of the slowest rank, op by op, and a trace
//! ```
//!
//! This crate touches no real time, socket or thread: the same plan on the same cluster gives the
//! same answer, to the bit, on every machine. `cluster` is the description; everything else reads
//! it and changes nothing in it.

#![warn(clippy::wildcard_enum_match_arm)]

pub mod cluster;
pub mod compute;
pub mod engine;
mod error;
pub mod network;
mod outcome;
mod profile;
pub mod table;

pub use error::SimError;
pub use outcome::{OpStat, Outcome, RoleStats};
pub use profile::Profile;

use cluster::Cluster;
use network::Analytic;
use paceline_plan::program::Plan;

/// What a simulation can be asked for beside the plan and the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The software that runs the plan.
    pub profile: Profile,
    /// Whether to write down every op of one rank of each role.
    pub trace: bool,
}

/// Times one iteration of a plan on a cluster.
///
/// The plan must be one that [`paceline_plan::validate`] passes. Rank r of the plan stands on
/// device r of the cluster, which must have at least as many.
pub fn simulate(plan: &Plan, cluster: &Cluster, options: &Options) -> Result<Outcome, SimError> {
    let (ranks, devices) = (u64::from(plan.mesh.world()), cluster.devices());
    if ranks > devices {
        let cluster = cluster.name.clone();
        return Err(SimError::TooFewDevices { ranks, devices, cluster });
    }
    let network = Analytic::new(cluster);
    let costs = engine::Costs::new(plan, cluster, &options.profile, &network)?;
    let timeline = engine::run(plan, &costs, &network)?;
    Ok(outcome::outcome(plan, cluster, &timeline, options))
}
