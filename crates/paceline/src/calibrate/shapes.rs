//! Operators and shapes to time.
//!
//! The shapes are those of layers: a family of small and large transformers is lowered like any
//! model, and every resulting operator is timed once. The planner thus determines the operators of
//! a layer, and shapes have the proportions of real models.

use super::DTYPE;
use crate::failure::Failure;
use paceline_plan::lower::lower;
use paceline_plan::model::Model;
use paceline_plan::program::{ComputePass, Plan};
use paceline_plan::strategy::Strategy;
use paceline_sim::compute::{KernelUse, kernel};
use std::collections::BTreeSet;

/// Operators to time, and the plans that contain them.
pub(super) struct Probes {
    /// Single-rank plans.
    pub(super) plans: Vec<Plan>,
    /// Operators, sorted by kernel name.
    pub(super) operators: Vec<Probe>,
}

/// An operator to time.
pub(super) struct Probe {
    pub(super) plan: usize,
    pub(super) template: usize,
    pub(super) op: usize,
    pub(super) used: KernelUse,
}

/// A layer: model family, model width, head width, vocabulary size, number of sequences, and tokens
/// per sequence.
type Layer = (&'static str, u64, u64, u64, u64, u64);

const GPT: &str = "gpt2";
const LLAMA: &str = "llama";

const QUICK: [Layer; 4] = [
    (GPT, 128, 32, 256, 4, 64),
    (LLAMA, 128, 32, 512, 4, 32),
    (GPT, 512, 64, 2048, 2, 64),
    (LLAMA, 512, 64, 1024, 2, 128),
];

const THOROUGH: [Layer; 11] = [
    (GPT, 64, 16, 256, 2, 16),
    (GPT, 256, 64, 1024, 4, 64),
    (LLAMA, 256, 32, 1024, 2, 128),
    (GPT, 64, 16, 256, 16, 64),
    (LLAMA, 128, 64, 8192, 2, 256),
    (GPT, 256, 32, 512, 1, 32),
    (LLAMA, 256, 64, 2048, 8, 128),
    (GPT, 512, 64, 1024, 8, 64),
    (GPT, 768, 64, 4096, 2, 256),
    (LLAMA, 1024, 128, 2048, 1, 128),
    (GPT, 256, 64, 512, 1, 512),
];

/// Limits on a probe's work: beyond them the cost per unit hardly changes and timing takes long.
const MOST_FLOPS: f64 = 3e9;
const MOST_BYTES: f64 = (96 << 20) as f64;

/// The operators of a few layers (`quick`) or of many.
pub(super) fn probes(quick: bool) -> Result<Probes, Failure> {
    let layers: Vec<Layer> =
        if quick { QUICK.to_vec() } else { QUICK.into_iter().chain(THOROUGH).collect() };
    let mut plans = Vec::new();
    let mut operators: Vec<Probe> = Vec::new();
    let mut known = BTreeSet::new();
    for layer in layers {
        let plan = plan(layer)?;
        for probe in self::operators(&plan) {
            let used = &probe.used;
            let most = if used.shape.len() == 3 { MOST_FLOPS } else { MOST_BYTES };
            if used.dtype == DTYPE
                && used.work <= most
                && known.insert((used.name.clone(), used.shape.clone()))
            {
                operators.push(Probe { plan: plans.len(), ..probe });
            }
        }
        plans.push(plan);
    }
    operators.sort_by(|a, b| (&a.used.name, &a.used.shape).cmp(&(&b.used.name, &b.used.shape)));
    Ok(Probes { plans, operators })
}

/// All operators of a plan, except recomputed ones, which cost the same as the first time.
pub(super) fn operators(plan: &Plan) -> impl Iterator<Item = Probe> {
    let templates = plan.templates.iter().enumerate();
    templates.filter(|(_, whole)| whole.pass != ComputePass::Recompute).flat_map(
        |(template, whole)| {
            let used = move |local| kernel(whole, local);
            let ops = whole.ops.iter().enumerate();
            ops.map(move |(op, local)| Probe { plan: 0, template, op, used: used(local) })
        },
    )
}

fn plan((kind, width, head, vocab, batch, seq): Layer) -> Result<Plan, Failure> {
    let heads = width / head;
    let (ffn, kv_heads) = match kind {
        // Two thirds of four times the width, as usual for gated layers.
        LLAMA => (width * 8 / 3 / 32 * 32, (heads / 2).max(1)),
        _ => (width * 4, heads),
    };
    let text = format!(
        "kind = \"{kind}\"\nlayers = 1\nd_model = {width}\nheads = {heads}\nkv_heads = {kv_heads}\n\
         ffn = {ffn}\nseq = {seq}\nvocab = {vocab}\ntied = false\n"
    );
    let wrong = |error: String| Failure::Run(anyhow::anyhow!("a probe is not a model: {error}"));
    let model = Model::parse(&text, "probe.toml").map_err(|error| wrong(error.to_string()))?;
    let strategy = Strategy { seq, micro_batch: batch, global_batch: batch, ..Strategy::default() };
    lower(&model, &strategy).map_err(|error| wrong(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_of_a_transformer_is_probed_at_several_shapes() {
        for quick in [true, false] {
            let probes = probes(quick).unwrap();
            for name in [
                "linear.forward",
                "linear.input",
                "linear.weight",
                "attention.forward",
                "attention.input",
                "norm.layer.weight",
                "norm.rms.input",
                "gelu.forward",
                "swiglu.input",
                "rope.forward",
                "add.forward",
                "softmax_stats.forward",
                "cross_entropy.input",
                "embedding.weight",
                "block_squares.forward",
            ] {
                let samples = probes.operators.iter().filter(|probe| probe.used.name == name);
                assert!(samples.count() >= 2, "{name}");
            }
            assert!(probes.operators.iter().all(|probe| probe.used.work >= 1.0));
        }
    }

    #[test]
    fn no_shape_is_probed_twice() {
        let probes = probes(false).unwrap();
        let mut seen = BTreeSet::new();
        for probe in &probes.operators {
            assert!(seen.insert((&probe.used.name, &probe.used.shape)), "{:?}", probe.used);
        }
    }
}
