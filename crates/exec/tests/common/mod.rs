//! Tiny models, and runs of them to compare.

#![allow(dead_code, reason = "every test file uses a part of it")]

pub(crate) mod wires;

use paceline_exec::{ExecError, Outcome, Staleness, TrainOptions, train};
use paceline_plan::lower::lower;
use paceline_plan::model::{
    Activation, Dlrm, Experts, Latent, Model, ModelDims, ModelKind, Mtp, ResNet, Router, Stem,
};
use paceline_plan::program::Plan;
use paceline_plan::strategy::Strategy;
use paceline_plan::validate::validate;

pub(crate) const GPT: ModelDims = ModelDims {
    kind: ModelKind::Gpt2,
    layers: 4,
    d_model: 16,
    heads: 4,
    kv_heads: 4,
    head_dim: 4,
    ffn: 32,
    seq: 16,
    max_positions: 16,
    vocab: 40,
    tied: true,
    activation: Activation::Gelu,
    norm_eps: 1e-5,
    rope_theta: 0.0,
    qk_norm: false,
    experts: DENSE,
    latent: Latent { q_lora: 0, kv_lora: 0, qk_rope: 0, v_dim: 0 },
    mtp: Mtp { depth: 0, weight: 0.0 },
};

const DENSE: Experts = Experts {
    experts: 0,
    topk: 0,
    shared_experts: 0,
    dense_layers: 0,
    dense_ffn: 0,
    router: Router::Softmax,
    groups: 0,
    group_topk: 0,
    route_scale: 0.0,
    capacity: 0.0,
    balance: 0.0,
};

pub(crate) fn tiny_gpt(tied: bool) -> Model {
    Model::new("tiny-gpt", ModelDims { tied, ..GPT }).expect("sound")
}

pub(crate) fn gpt_of(vocab: u64, tied: bool) -> Model {
    Model::new("tiny-gpt", ModelDims { vocab, tied, ..GPT }).expect("sound")
}

pub(crate) fn tiny_llama() -> Model {
    let shape = ModelDims {
        kind: ModelKind::Llama,
        kv_heads: 2,
        max_positions: 0,
        tied: false,
        activation: Activation::SwiGlu,
        rope_theta: 10_000.0,
        ..GPT
    };
    Model::new("tiny-llama", shape).expect("sound")
}

/// A model of kind `decoder` with the sizes of the others, described by some more keys.
fn decoder(name: &str, keys: &str) -> Model {
    let ModelDims { layers, d_model, heads, head_dim, seq, vocab, .. } = GPT;
    let text = format!(
        "name = \"{name}\"\nkind = \"decoder\"\nlayers = {layers}\nd_model = {d_model}\nheads = {heads}\n\
         kv_heads = 2\nhead_dim = {head_dim}\nseq = {seq}\nvocab = {vocab}\n{keys}"
    );
    Model::parse(&text, name).unwrap_or_else(|errors| panic!("{errors}"))
}

/// Qwen3's layers: norms of queries and keys.
pub(crate) fn tiny_qwen3() -> Model {
    decoder("tiny-qwen3", "ffn = 32\ntied = true\nquery_key_norm = \"head\"\n")
}

/// Gemma 3's layers: windows with another rotary base, sandwich norms, scaled embeddings.
pub(crate) fn tiny_gemma3() -> Model {
    decoder(
        "tiny-gemma3",
        "ffn = 32\ntied = true\nactivation = \"geglu\"\nnorm = \"rms-unit\"\nnorms = \"sandwich\"\n\
         query_key_norm = \"head-unit\"\nembedding_scale = 4.0\nattention_pattern = \"sf\"\nwindow = 5\n\
         window_theta = 100.0\nlogit_softcap = 8.0\nrope_scaling = \"linear\"\nrope_factor = 2.0\n",
    )
}

/// gpt-oss's layers: windows, scores of no key, clamped experts with biases.
pub(crate) fn tiny_gpt_oss() -> Model {
    decoder(
        "tiny-gpt-oss",
        "ffn = 16\nactivation = \"clamped-swiglu\"\nexperts = 4\ntopk = 2\nqkv_bias = true\n\
         attention_bias = true\nffn_bias = true\nrouter_bias = true\nsinks = true\n\
         attention_pattern = \"sf\"\nwindow = 6\n",
    )
}

/// MoE with query and key norms, a dense first layer, a shared expert, too little capacity.
pub(crate) fn tiny_moe() -> Model {
    moe("tiny-moe", Experts { capacity: 1.0, ..EXPERTS }, Latent::default())
}

/// Same without a capacity bound: no token is dropped.
pub(crate) fn dropless_moe() -> Model {
    moe("dropless-moe", EXPERTS, Latent::default())
}

/// Latent attention, and a sigmoid router with a bias.
pub(crate) fn latent_moe() -> Model {
    let experts = Experts { router: Router::Sigmoid, route_scale: 2.5, topk: 1, ..EXPERTS };
    moe("latent-moe", experts, Latent { q_lora: 12, kv_lora: 8, qk_rope: 2, v_dim: 3 })
}

const EXPERTS: Experts = Experts {
    experts: 4,
    topk: 2,
    shared_experts: 1,
    dense_layers: 1,
    dense_ffn: 24,
    route_scale: 1.0,
    balance: 0.05,
    ..DENSE
};

fn moe(name: &str, experts: Experts, latent: Latent) -> Model {
    let shape = ModelDims {
        kind: ModelKind::Moe,
        kv_heads: if latent.is_none() { 2 } else { GPT.heads },
        ffn: 16,
        max_positions: 0,
        tied: false,
        activation: Activation::SwiGlu,
        rope_theta: 10_000.0,
        qk_norm: latent.is_none(),
        experts,
        latent,
        ..GPT
    };
    Model::new(name, shape).expect("sound")
}

/// Same model with `depth` multi-token-prediction modules.
pub(crate) fn further(model: &Model, depth: u64, tied: bool) -> Model {
    let mtp = Mtp { depth, weight: 0.6 };
    let name = format!("{} and {depth} further", model.name());
    Model::new(name, ModelDims { mtp, tied, ..**model }).expect("sound")
}

pub(crate) fn tiny_mlp() -> Model {
    let shape = ModelDims {
        kind: ModelKind::Mlp,
        layers: 2,
        heads: 0,
        kv_heads: 0,
        head_dim: 0,
        max_positions: 0,
        tied: false,
        activation: Activation::Relu,
        norm_eps: 0.0,
        ..GPT
    };
    Model::new("tiny-mlp", shape).expect("sound")
}

/// Two blocks of two convolutions, on images of 8 × 8 pixels.
pub(crate) fn tiny_resnet() -> Model {
    let net = ResNet {
        image: 8,
        channels: 3,
        classes: 4,
        blocks: vec![1, 1],
        width: 4,
        bottleneck: false,
        stem: Stem::Small,
    };
    Model::resnet("tiny-resnet", net).expect("sound")
}

/// Five tables of different sizes, and networks of two layers.
pub(crate) fn tiny_dlrm() -> Model {
    let net = Dlrm {
        dense: 3,
        tables: vec![50, 7, 30, 1, 12],
        width: 4,
        lookups: 2,
        bottom: vec![8],
        top: vec![8],
    };
    Model::dlrm("tiny-dlrm", net).expect("sound")
}

/// One-rank strategy with the given global batch, microbatch size and leaves.
pub(crate) fn strategy(global_batch: u64, micro_batch: u64, leaves: u32) -> Strategy {
    Strategy { global_batch, micro_batch, leaves, seq: 16, ..Strategy::default() }
}

/// Lowers and validates a plan.
pub(crate) fn plan(model: &Model, strategy: &Strategy) -> Plan {
    let plan = lower(model, strategy).unwrap_or_else(|problems| panic!("{problems}"));
    let violations = validate(&plan, None);
    assert!(
        violations.is_empty(),
        "{}",
        violations.iter().map(|v| format!("{v}\n")).collect::<String>()
    );
    plan
}

pub(crate) fn options(iterations: u32) -> TrainOptions {
    TrainOptions {
        iterations,
        lr: 1e-2,
        warmup: 2,
        weight_decay: 0.1,
        clip: Some(0.5),
        seed: 7,
        keep_parameters: true,
        exchange_timeout: std::time::Duration::from_secs(10),
        ..TrainOptions::default()
    }
}

pub(crate) fn try_run(model: &Model, strategy: &Strategy) -> Result<Outcome, ExecError> {
    train(&plan(model, strategy), &options(5), &mut |_| {})
}

pub(crate) fn run(model: &Model, strategy: &Strategy) -> Outcome {
    try_run(model, strategy).unwrap_or_else(|error| panic!("{strategy:?}: {error}"))
}

/// Bits of the losses and norms of a run.
pub(crate) fn bits(outcome: &Outcome) -> Vec<[u32; 2]> {
    outcome.iterations.iter().map(|i| [i.loss.to_bits(), i.grad_norm.to_bits()]).collect()
}

/// Checks that all layouts give bitwise the losses, norms and final weights of `one`.
pub(crate) fn assert_same_bits(model: &Model, one: &Strategy, layouts: &[(&str, Strategy)]) {
    let expected = run(model, one);
    let mut wrong = Vec::new();
    for (name, layout) in layouts {
        let found = run(model, layout);
        if bits(&found) != bits(&expected) {
            let line = |o: &Outcome| -> Vec<(f32, f32)> {
                o.iterations.iter().map(|i| (i.loss, i.grad_norm)).collect()
            };
            wrong.push(format!("{name}:\n  {:?}\n  {:?}", line(&found), line(&expected)));
        } else if found.parameters != expected.parameters {
            wrong.push(format!("{name}: other weights"));
        }
    }
    assert!(wrong.is_empty(), "{}:\n{}", model.name(), wrong.join("\n"));
}

/// Checks that all layouts give the losses and norms of `one` within a relative tolerance.
pub(crate) fn assert_close(
    model: &Model,
    one: &Strategy,
    tolerance: f32,
    layouts: &[(&str, Strategy)],
) {
    let expected = run(model, one);
    for (name, layout) in layouts {
        let found = run(model, layout);
        assert_eq!(found.iterations.len(), expected.iterations.len());
        for (f, e) in found.iterations.iter().zip(&expected.iterations) {
            for (f, e) in [(f.loss, e.loss), (f.grad_norm, e.grad_norm)] {
                let error = (f - e).abs() / e.abs();
                assert!(error <= tolerance, "{} {name}: {f} against {e}, {error}", model.name());
            }
        }
    }
}

/// Staleness of a run: its mean, the maximum over all iterations, and the summed histogram.
pub(crate) fn staleness(outcome: &Outcome) -> Staleness {
    let all: Vec<Staleness> = outcome.iterations.iter().filter_map(|i| i.staleness).collect();
    assert_eq!(all.len(), outcome.iterations.len(), "every iteration says so");
    Staleness {
        mean: all.iter().map(|s| s.mean).sum::<f64>() / all.len() as f64,
        max: all.iter().map(|s| s.max).max().unwrap(),
        max_lead: all.iter().map(|s| s.max_lead).max().unwrap(),
        histogram: std::array::from_fn(|at| all.iter().map(|s| s.histogram[at]).sum()),
    }
}
