//! Runs a plan on a described cluster and says how long it takes, what overlaps and what does not.
//!
//! ```text
//! Plan ──┐                ┌─ compute: every template once (roofline, profile)
//!        ├─► engine ◄─────┤
//! Cluster┘     │          └─ network: each message and call by itself (analytic, NCCL), or all that
//!              │                      is under way at once (flow)
//!              ▼
//!          Timeline ──► outcome: times of the slowest rank, op by op, and a trace
//! ```
//!
//! This crate touches no real time, socket or thread: the same plan on the same cluster gives the
//! same answer, to the bit, on every machine. `cluster` is the description; everything else reads
//! it and changes nothing in it.

#![warn(clippy::wildcard_enum_match_arm)]

pub mod astra;
pub mod cluster;
pub mod compute;
pub mod engine;
mod error;
mod footprint;
pub mod network;
mod outcome;
mod profile;
pub mod table;
pub mod training;
mod uncertainty;

pub use error::SimError;
pub use footprint::footprint;
pub use network::NetworkKind;
pub use outcome::{
    CriticalPath, Details, DimensionUse, Limits, MemoryCurve, MemoryPoint, OpStat, Outcome,
    PathPart, PathStep, RoleStats, Slowest, UnequalRanks,
};
pub use profile::{Attention, Casts, Kernels, Library, Loss, Profile};
pub use uncertainty::{ErrorBand, error_band, quantile};

use cluster::Cluster;
use paceline_plan::ids::Rank;
use paceline_plan::program::{Plan, Turn};
use paceline_plan::strategy::Offload;
use paceline_plan::units::{Bytes, Seconds};

/// What a simulation can be asked for beside the plan and the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Options {
    /// The software that runs the plan.
    pub profile: Profile,
    /// How communication is timed. The flow network plays the steps that the plan spells out.
    pub network: NetworkKind,
    /// Whether to write down every op of one rank of each role.
    pub trace: bool,
    /// Whether to find out what the iteration waits for, what limits it, how busy the links are and
    /// how memory fills. It takes a few times as long as the simulation alone.
    pub details: bool,
}

/// How long each layer of a plan's model computes in one iteration on a cluster: a profile, by which
/// stages can be cut.
pub fn profile(
    plan: &Plan,
    cluster: &Cluster,
    options: &Options,
) -> Result<Vec<Seconds>, SimError> {
    let costs = engine::Costs::new(plan, cluster, &options.profile);
    engine::layer_times(plan, cluster, &costs)
}

/// Times one iteration of a plan on a cluster, and beside one after a warm-up one of the warm-up itself.
///
/// The plan must be one that [`paceline_plan::validate`] passes. Rank r of the plan stands on
/// device r of the cluster, which must have at least as many.
pub fn simulate(plan: &Plan, cluster: &Cluster, options: &Options) -> Result<Outcome, SimError> {
    let mut outcome = in_turn(&plan.in_turn(Turn::Steady), cluster, options)?;
    if plan.has_turns() {
        let options = Options { trace: false, details: false, ..*options };
        let warm_up = in_turn(&plan.in_turn(Turn::WarmUp), cluster, &options)?;
        outcome.warm_up = Some(warm_up.iteration);
    }
    Ok(outcome)
}

/// Times an iteration of a plan without turns.
fn in_turn(plan: &Plan, cluster: &Cluster, options: &Options) -> Result<Outcome, SimError> {
    let (ranks, devices) = (u64::from(plan.mesh.world()), cluster.devices());
    if ranks > devices {
        let cluster = cluster.name.clone();
        return Err(SimError::TooFewDevices { ranks, devices, cluster });
    }
    network::check_switches(plan, cluster)?;
    if plan.programs.iter().any(|program| program.memory.shared() > Bytes::ZERO) {
        shares_memory(plan, cluster)?;
    }
    let store = plan.strategy.store;
    let mut blind = cluster.kinds().filter(|device| device.store(store).is_none());
    if let (true, Some(device)) = (plan.strategy.offload != Offload::None, blind.next()) {
        return Err(SimError::NoStore { store, device: device.name.clone() });
    }
    let library = match options.network {
        NetworkKind::Analytic => options.profile.library,
        NetworkKind::Flow => Library::Steps,
    };
    let moments = engine::Moments::new(cluster);
    let eras = moments.networks(library);
    let unrolled = engine::Unrolled::of(plan);
    let timed = unrolled.as_ref().map_or(plan, |unrolled| &unrolled.plan);
    let costs = engine::Costs::new(timed, cluster, &options.profile);
    let settle = |timeline| engine::settle(plan, engine::ahead(plan, &options.profile, timeline));
    let run = |costs: &engine::Costs<'_>| {
        let timeline = match options.network {
            NetworkKind::Analytic => engine::run(timed, cluster, costs, &eras),
            NetworkKind::Flow => engine::flow::run(timed, cluster, costs),
        }?;
        match &unrolled {
            Some(unrolled) => unrolled.last(plan, cluster, &timeline),
            None => Ok(settle(timeline)),
        }
    };
    let timeline = run(&costs)?;
    let mut outcome = outcome::outcome(plan, cluster, &timeline, options);
    // What an iteration waits for is not told where that lies in another.
    if options.details && unrolled.is_none() {
        let (eras, run, settle) = (&eras, &run, &settle);
        let run = outcome::Run { plan, cluster, costs: &costs, eras, options, run, settle };
        outcome.details = Some(outcome::details(&run, &timeline, &outcome)?);
    }
    Ok(outcome)
}

/// Ranks that share weights need a memory that all of them reach.
fn shares_memory(plan: &Plan, cluster: &Cluster) -> Result<(), SimError> {
    let ranks: Vec<Rank> = (0..plan.mesh.world()).map(Rank).collect();
    let why = if cluster.hosts_of(&ranks) > 1 {
        "they stand on several hosts"
    } else if cluster.kinds().any(|device| device.is_accelerator()) {
        "every device has a memory of its own"
    } else {
        return Ok(());
    };
    let cluster = cluster.name.clone();
    Err(SimError::NoSharedMemory { ranks: ranks.len() as u64, cluster, why })
}
