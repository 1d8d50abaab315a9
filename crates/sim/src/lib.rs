//! Simulates a plan on a described cluster: iteration time, overlap and exposed communication.
//!
//! ```text
//! Plan ──┐                ┌─ compute: every template once (roofline, profile)
//!        ├─► engine ◄─────┤
//! Cluster┘     │          └─ network: each message and call alone (analytic, NCCL), or all
//!              │                      traffic in flight (flow)
//!              ▼
//!          Timeline ──► outcome: times of the slowest rank, op by op, and a trace
//! ```
//!
//! This crate uses no real time, sockets or threads: the same plan on the same cluster gives
//! bitwise the same result on every machine. `cluster` is the description; all other modules only
//! read it.

#![warn(clippy::wildcard_enum_match_arm)]

pub mod astra;
pub mod cluster;
pub mod compute;
mod engine;
mod error;
mod fit;
mod footprint;
mod jobs;
pub mod network;
mod outcome;
mod prices;
mod profile;
mod symmetry;
pub mod table;
pub mod training;
mod uncertainty;

pub use error::SimError;
pub use fit::{Fit, fit};
pub use footprint::footprint;
pub use jobs::{Job, Placement, simulate_jobs};
pub use network::NetworkKind;
pub use outcome::{
    CriticalPath, Details, DimensionUse, Energy, ExchangeStat, LayerStat, Limits, MemoryCurve,
    MemoryPoint, OpStat, Outcome, PathPart, PathStep, RankGroup, RoleStats, Slowest,
};
pub use prices::{Exchange, Prices};
pub use profile::{Attention, Casts, Kernels, Library, Loss, Profile};
pub use uncertainty::{ErrorBand, Family, error_band, quantile};

use cluster::Cluster;
use paceline_plan::ids::Rank;
use paceline_plan::program::{IterationFilter, Plan};
use paceline_plan::strategy::Offload;
use paceline_plan::units::{Bytes, Seconds};

/// Simulation options besides plan and cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Options {
    /// Software that runs the plan.
    pub profile: Profile,
    /// Network model. The flow network executes the collective steps given by the plan.
    pub network: NetworkKind,
    /// Memory of every device that stays free; by default the profile's.
    pub memory_headroom: Option<Bytes>,
    /// True to trace every op of one rank of each role.
    pub trace: bool,
    /// True to compute critical path, limits, link utilisation and memory over time. This takes a
    /// few times as long as the simulation alone.
    pub details: bool,
}

/// Compute time of each layer of a plan's model in one iteration on a cluster: a profile for
/// balancing stages.
pub fn profile(
    plan: &Plan,
    cluster: &Cluster,
    options: &Options,
) -> Result<Vec<Seconds>, SimError> {
    let costs = engine::Costs::new(plan, cluster, &options.profile);
    engine::layer_times(plan, cluster, &costs)
}

/// Times one iteration of a plan on a cluster. With a compress warm-up, it times one iteration
/// after the warm-up and one of the warm-up.
///
/// The plan must pass [`paceline_plan::validate`]. Rank r of the plan runs on device r of the
/// cluster, which must have at least as many devices as the plan has ranks.
pub fn simulate(plan: &Plan, cluster: &Cluster, options: &Options) -> Result<Outcome, SimError> {
    let mut outcome =
        simulate_filtered(&plan.filtered(IterationFilter::AfterWarmup), cluster, options)?;
    if plan.has_filters() {
        let options = Options { trace: false, details: false, ..*options };
        let warm_up =
            simulate_filtered(&plan.filtered(IterationFilter::Warmup), cluster, &options)?;
        outcome.warm_up = Some(warm_up.iteration);
    }
    Ok(outcome)
}

/// Times an iteration of a plan without iteration filters.
fn simulate_filtered(
    plan: &Plan,
    cluster: &Cluster,
    options: &Options,
) -> Result<Outcome, SimError> {
    check(plan, cluster, &Placement::default())?;
    let moments = engine::ClusterEpochs::new(cluster);
    let epochs = moments.networks(library(options));
    let unrolled = engine::Unrolled::of(plan, 1);
    let timed = unrolled.as_ref().map_or(plan, |unrolled| &unrolled.plan);
    let costs = engine::Costs::new(timed, cluster, &options.profile);
    let run = |costs: &engine::Costs<'_>| {
        let load = engine::Load::new(timed, costs);
        match shares_links(cluster, options) {
            false => engine::run(&load, cluster, &epochs),
            true => engine::run_flow(&load, cluster),
        }
    };
    let resolve = |timeline| {
        engine::resolve(plan, engine::overlap_param_gather(plan, &options.profile, timeline))
    };
    let found = run(&costs)?;
    let timeline = match &unrolled {
        Some(unrolled) => unrolled.last(plan, &found.timeline),
        None => resolve(found.timeline.clone()),
    };
    let mut outcome = outcome::outcome(plan, cluster, costs.placement(), &timeline, options);
    if !outcome.iteration.0.is_finite() {
        let (cluster, seconds) = (cluster.name.clone(), outcome.iteration.0.to_string());
        return Err(SimError::NotFinite { cluster, seconds });
    }
    // Details are not available if an iteration waits for ops of another one.
    if options.details && unrolled.is_none() {
        let (costs, epochs, run, resolve) = (&costs, &epochs, &run, &resolve);
        let context = outcome::SimContext { plan, cluster, costs, epochs, options, run, resolve };
        outcome.details = Some(outcome::details(&context, &found, &timeline, &outcome)?);
    }
    Ok(outcome)
}

/// Library whose collectives a network times; the flow network runs the plan's own steps.
fn library(options: &Options) -> Library {
    match options.network {
        NetworkKind::Analytic => options.profile.library,
        NetworkKind::Flow => Library::Steps,
    }
}

/// Returns true if exchanges are simulated on links that they share. Inside a calibrated host they
/// take the times that were measured, on either network.
fn shares_links(cluster: &Cluster, options: &Options) -> bool {
    match options.network {
        NetworkKind::Analytic => false,
        NetworkKind::Flow => network::measured_transport(cluster).is_none(),
    }
}

/// Checks that a cluster can run a plan.
fn check(plan: &Plan, cluster: &Cluster, placement: &Placement) -> Result<(), SimError> {
    let (ranks, devices) = (u64::from(plan.mesh.world()), cluster.devices());
    if ranks > devices {
        let cluster = cluster.name.clone();
        return Err(SimError::NotEnoughDevices { ranks, devices, cluster });
    }
    network::check_switches(plan, cluster, placement)?;
    if plan.programs.iter().any(|program| program.memory.shared() > Bytes::ZERO) {
        shares_memory(plan, cluster, placement)?;
    }
    let store = plan.strategy.store;
    let mut blind = cluster.kinds().filter(|device| device.store(store).is_none());
    match blind.next() {
        Some(device) if plan.strategy.offload != Offload::None => {
            Err(SimError::NoStore { store, device: device.name.clone() })
        }
        Some(_) | None => Ok(()),
    }
}

/// Checks that ranks that share weights have a common memory.
fn shares_memory(plan: &Plan, cluster: &Cluster, placement: &Placement) -> Result<(), SimError> {
    let ranks = (0..plan.mesh.world()).map(Rank);
    let ranks: Vec<Rank> = ranks.map(|rank| placement.device(rank)).collect();
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
