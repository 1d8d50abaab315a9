//! Which operators are timed, on which shapes.
//!
//! The shapes are those of layers: a family of small and large transformers is lowered like any
//! model, and every operator that comes out is timed once. What a model's layers are made of is
//! thus asked of the planner, and shapes come in the proportions that models have.

use super::DTYPE;
use crate::failure::Failure;
use paceline_plan::lower::lower;
use paceline_plan::model::Model;
use paceline_plan::program::{Plan, SegmentPass};
use paceline_plan::strategy::Strategy;
use paceline_sim::compute::{KernelUse, kernel};
use std::collections::BTreeSet;

/// Operators to time, and the plans that they stand in.
pub(super) struct Probes {
    /// Each runs on one rank.
    pub(super) plans: Vec<Plan>,
    /// In the order of their kernels' names.
    pub(super) operators: Vec<Probe>,
}

/// One operator.
pub(super) struct Probe {
    pub(super) plan: usize,
    pub(super) template: usize,
    pub(super) op: usize,
    pub(super) used: KernelUse,
}

/// A layer: the family, the model's width and the width of a head, words, sequences and tokens of
/// each.
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

/// Beyond these, a cost per unit of work hardly changes, and a measurement takes long.
const MOST_FLOPS: f64 = 3e9;
const MOST_BYTES: f64 = (96 << 20) as f64;

/// The operators of a few layers, or of many.
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

/// All operators of a plan; what is computed again is computed as before.
pub(super) fn operators(plan: &Plan) -> impl Iterator<Item = Probe> {
    let templates = plan.templates.iter().enumerate();
    templates.filter(|(_, whole)| whole.pass != SegmentPass::Recompute).flat_map(
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
        // Two thirds of four widths, as gated layers have it.
        LLAMA => (width * 8 / 3 / 32 * 32, (heads / 2).max(1)),
        _ => (width * 4, heads),
    };
    let text = format!(
        "kind = \"{kind}\"\nlayers = 1\nd_model = {width}\nheads = {heads}\nkv_heads = {kv_heads}\n\
         ffn = {ffn}\nseq = {seq}\nvocab = {vocab}\ntied = false\n"
    );
    let wrong = |error: String| Failure::Run(anyhow::anyhow!("a probe is no model: {error}"));
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
