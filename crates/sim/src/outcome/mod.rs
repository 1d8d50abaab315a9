//! Results of a simulated iteration.

mod bandwidth;
mod critical_path;
mod details;
mod energy;
mod layers;
mod limits;
mod memory;
mod rank_groups;
mod statistics;
mod trace;

pub use bandwidth::DimensionUse;
pub use critical_path::{CriticalPath, PathPart, PathStep};
pub use details::Details;
pub(crate) use details::{SimContext, details};
pub use energy::Energy;
pub use layers::{ExchangeStat, LayerStat};
pub use limits::Limits;
pub use memory::{MemoryCurve, MemoryPoint};
pub use rank_groups::{RankGroup, Slowest};

use crate::Options;
use crate::cluster::Cluster;
use crate::engine::{Timeline, ranks};
use crate::fit::{Fit, fit_placed};
use crate::jobs::Placement;
use crate::uncertainty::{ErrorBand, error_band};
use paceline_plan::graph::CostClass;
use paceline_plan::ids::{Rank, RoleId};
use paceline_plan::program::{ComputePass, Memory, Op, Plan};
use paceline_plan::staleness::Staleness;
use paceline_plan::trace::Trace;
use paceline_plan::units::{Bytes, Flops, Seconds};
use serde::Serialize;
use statistics::Account;

/// Simulated iteration.
///
/// All ranks' iterations take equally long. `compute`, `communication`, `exposed_communication`,
/// the bubble and `ops` are those of the *slowest rank*: of the ranks that hold layers, the one
/// that waits least, because speeding up any other changes nothing. On it, as on every rank,
///
/// iteration = compute + exposed_communication + bubble_fraction · iteration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Time from the first op's start to the last op's end.
    pub iteration: Seconds,
    /// Time of a compress warm-up iteration, if the plan has one.
    pub warm_up: Option<Seconds>,
    /// Factors on `iteration` that bound the expected measurement.
    pub error_band: ErrorBand,
    /// Time in which the rank computes.
    pub compute: Seconds,
    /// Time in which any of the rank's communication lanes moves bytes.
    pub communication: Seconds,
    /// Part of `communication` in which the rank does not compute.
    pub exposed_communication: Seconds,
    /// Fraction of the iteration in which the rank neither computes nor moves bytes: it waits for
    /// other ranks. With equal stages and free communication this is the textbook (p−1)/(m+p−1)
    /// (Narayanan et al., arXiv 2104.04473, section 2.2.1, as a fraction of the whole).
    pub bubble_fraction: f64,
    /// Largest arena of any rank, including shared memory.
    pub peak_bytes: Bytes,
    /// Memory that the fullest rank needs under the profile, and whether every rank fits.
    pub fit: Fit,
    /// Model FLOPs utilisation: GEMM operations of the model, without recomputation, over the peak
    /// of all ranks' devices in the plan's dtype. Attention counts causally: half of the score
    /// matrix, which is what a fused kernel computes.
    pub mfu: f64,
    /// The same with whole score matrices, as Narayanan et al. count (arXiv 2104.04473, eq. 3).
    /// With long sequences it exceeds what the device sustains.
    pub mfu_full_attention: f64,
    /// Tokens per second divided by the number of ranks.
    pub tokens_per_s_per_device: f64,
    /// Energy of all devices, if their power is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy: Option<Energy>,
    /// Ops of the slowest rank by kind, longest first.
    pub ops: Vec<OpStat>,
    /// Staleness of gradients over the simulated iterations, with asynchronous servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub staleness: Option<Staleness>,
    /// Statistics of every role, from its representative rank.
    pub roles: Vec<RoleStats>,
    /// Slowest rank, which sets the pace.
    pub slowest: Slowest,
    /// Groups of ranks that differ, each by its slowest rank; empty if all are alike.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rank_groups: Vec<RankGroup>,
    /// Critical path, limits and resource use, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Details>,
    /// Timeline of one rank of each role, if requested.
    #[serde(skip)]
    pub trace: Option<Trace>,
}

/// All ops of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpStat {
    /// `forward`, `all_reduce tp`, `send pp`, …
    pub name: String,
    /// Number per iteration.
    pub count: u64,
    /// Total time.
    pub time: Seconds,
    /// Part of `time` that no compute hides; zero for compute ops.
    pub exposed: Seconds,
}

/// Time breakdown and memory of one role's ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoleStats {
    /// The role's name.
    pub name: String,
    /// Number of its ranks.
    pub ranks: u32,
    /// Time in which a rank computes.
    pub compute: Seconds,
    /// Time in which it moves bytes.
    pub communication: Seconds,
    /// Part of `communication` in which it does not compute.
    pub exposed: Seconds,
    /// Rest of the iteration.
    pub idle: Seconds,
    /// Memory of a rank.
    pub memory: Memory,
}

pub(crate) fn outcome(
    plan: &Plan,
    cluster: &Cluster,
    placement: &Placement,
    timeline: &Timeline,
    options: &Options,
) -> Outcome {
    let iteration = timeline.end();
    let accounts: Vec<Account> = (0..plan.programs.len())
        .map(|role| {
            Account::new(plan, timeline.representative(RoleId::from(role)), timeline, iteration)
        })
        .collect();
    let stages = &accounts[..accounts.len().min(plan.mesh.pp as usize)];
    let busiest = (0..stages.len()).rev().max_by(|&a, &b| {
        let busy = |at: usize| stages[at].compute + stages[at].exposed;
        busy(a).0.total_cmp(&busy(b).0)
    });
    let slowest = RoleId::from(busiest.unwrap_or(0));
    let of_slowest = accounts.get(slowest.index()).cloned().unwrap_or_default();
    let ops = of_slowest.ops(plan, slowest, timeline);
    let peak_bytes = plan.programs.iter().map(|p| p.memory.with_shared()).max().unwrap_or_default();
    let devices = f64::from(plan.mesh.world());
    let peaks = peaks(plan, cluster, placement);
    let (products, attention) = model_flops(plan);
    let over = |amount: f64| if iteration.0 > 0.0 { amount / iteration.0 } else { 0.0 };
    let roles = accounts.iter().enumerate().map(|(role, account)| {
        let program = &plan.programs[role];
        RoleStats {
            name: program.name.clone(),
            ranks: ranks(plan, RoleId::from(role)),
            compute: account.compute,
            communication: account.communication,
            exposed: account.exposed,
            idle: account.idle,
            memory: program.memory,
        }
    });
    let roles: Vec<RoleStats> = roles.collect();
    Outcome {
        energy: energy::energy(plan, cluster, placement, &roles, iteration),
        iteration,
        warm_up: None,
        error_band: error_band(&options.profile, plan, cluster),
        compute: of_slowest.compute,
        communication: of_slowest.communication,
        exposed_communication: of_slowest.exposed,
        bubble_fraction: over(of_slowest.idle.0),
        peak_bytes,
        fit: fit_placed(plan, cluster, placement, &options.profile, options.memory_headroom),
        mfu: over(products.0 + 0.5 * attention.0) / peaks,
        mfu_full_attention: over(products.0 + attention.0) / peaks,
        tokens_per_s_per_device: over(plan.strategy.tokens() as f64) / devices,
        ops,
        staleness: timeline.staleness(),
        roles,
        slowest: rank_groups::slowest(
            cluster,
            timeline.classes().get(timeline.representative(slowest)),
        ),
        rank_groups: rank_groups::rank_groups(plan, cluster, timeline, iteration),
        details: None,
        trace: options.trace.then(|| trace::trace(plan, cluster, timeline)),
    }
}

/// Peak operations per second of all ranks' devices.
fn peaks(plan: &Plan, cluster: &Cluster, placement: &Placement) -> f64 {
    let dtype = plan.strategy.dtype;
    if cluster.heterogeneity.kinds.is_empty() {
        return f64::from(plan.mesh.world()) * cluster.device.rate(dtype).0;
    }
    let ranks = (0..plan.mesh.world()).map(Rank);
    ranks.map(|rank| cluster.device_of(placement.device(rank)).rate(dtype).0).sum()
}

/// GEMM operations of one iteration over all ranks, without recomputation: those of products, and
/// those of attention with whole score matrices.
fn model_flops(plan: &Plan) -> (Flops, Flops) {
    let of_template = plan.templates.iter().map(|template| match template.pass {
        ComputePass::Recompute => [0.0; 2],
        ComputePass::Forward
        | ComputePass::Backward
        | ComputePass::BackwardInput
        | ComputePass::BackwardWeight
        | ComputePass::Update => template.ops.iter().fold([0.0; 2], |mut sums, op| {
            let attention = matches!(op.kind.cost_class(), CostClass::Attention { .. });
            sums[usize::from(attention)] += template.cost(op).matrix.0;
            sums
        }),
    });
    let of_template: Vec<[f64; 2]> = of_template.collect();
    let mut flops = [0.0; 2];
    for (role, program) in plan.programs.iter().enumerate() {
        let ranks = f64::from(ranks(plan, RoleId::from(role)));
        for node in &program.body.nodes {
            if let Op::Compute { segment, .. } = node.op {
                let [products, attention] = of_template[program.segment(segment).template as usize];
                flops[0] += ranks * products;
                flops[1] += ranks * attention;
            }
        }
    }
    let [products, attention] = flops;
    (Flops(products), Flops(attention))
}

#[cfg(test)]
mod cases;
#[cfg(test)]
mod tests;
