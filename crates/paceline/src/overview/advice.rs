//! Warnings about a plan before it is run.

use super::table::percent;
use paceline_plan::program::{MemoryKind, Plan};
use paceline_plan::strategy::Zero;
use paceline_plan::summary::Summary;
use paceline_sim::Fit;
use paceline_sim::cluster::Cluster;

/// A bubble above this share causes a warning.
const LARGE_BUBBLE: f64 = 0.25;

/// Properties of the plan, also on a cluster, that the user may not have intended.
pub(crate) fn warnings(plan: &Plan, summary: &Summary, on: Option<(&Cluster, Fit)>) -> Vec<String> {
    let s = &plan.strategy;
    let mut warnings = Vec::new();
    if let Some((cluster, fit)) = on {
        on_cluster(plan, cluster, fit, &mut warnings);
    }
    if s.keeps_whole_gradients() {
        warnings.push(format!(
            "--zero {} with --order canonical keeps whole gradients, {} a rank, because the {} \
             microbatches of a replica are summed before replicas exchange; --order free keeps one \
             of {} shards, and a bucket",
            s.zero,
            summary.memory.of(MemoryKind::Gradients),
            s.microbatches(),
            plan.mesh.replicas(),
        ));
    }
    if s.pp > 1 && summary.bubble_fraction > LARGE_BUBBLE {
        warnings.push(format!(
            "the pipeline is idle {} of the time: {} microbatches on {} stages; a larger \
             --global-batch or a smaller --micro-batch shrinks the bubble",
            percent(summary.bubble_fraction),
            s.microbatches(),
            s.pp
        ));
    }
    warnings
}

fn on_cluster(plan: &Plan, cluster: &Cluster, fit: Fit, warnings: &mut Vec<String>) {
    let s = &plan.strategy;
    let Fit { needed, headroom, memory, fits } = fit;
    if !fits {
        let (name, remedies) = (&cluster.device.name, remedies(plan));
        warnings.push(format!(
            "does not fit: the fullest role needs {needed} and {name} has {memory}, of which {headroom} \
             are kept free (--memory-headroom){remedies}"
        ));
    }
    if !cluster.device.supports(s.dtype) {
        warnings.push(format!(
            "{} has no unit for {}: products are computed in a wider type",
            cluster.device.name, s.dtype
        ));
    }
    // Tensor-parallel groups are runs of consecutive ranks, so they stay inside the innermost
    // dimension only if it holds a whole number of them.
    if let Some(inner) = cluster.dimensions.first()
        && s.tp > 1
        && !inner.size.is_multiple_of(s.tp)
        && plan.mesh.world() > inner.size
    {
        warnings.push(format!(
            "tensor-parallel groups of {} reach beyond {} ({} devices): their all_reduces will \
             dominate; use a --tp that divides {}",
            s.tp, inner.name, inner.size, inner.size
        ));
    }
}

/// Flags that would save memory and are not set.
fn remedies(plan: &Plan) -> String {
    use paceline_plan::strategy::{Offload, Recompute};
    let s = &plan.strategy;
    let mut remedies = Vec::new();
    if s.recompute != Recompute::Full {
        remedies.push("--recompute full");
    }
    if s.zero < Zero::Optimizer && plan.mesh.replicas() > 1 {
        remedies.push("--zero 1");
    }
    if s.offload == Offload::None {
        remedies.push("--offload auto");
    }
    if s.micro_batch > 1 {
        remedies.push("a smaller --micro-batch");
    }
    remedies.extend(["more --tp", "more --pp"]);
    format!("; {} would save memory", remedies.join(", "))
}
