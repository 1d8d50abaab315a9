//! The golden plans under `plans/`. Some are the planner's output for small cases. Others are
//! hand-written examples of what it will produce later, to prove that the types can express it.
//! Each validates, and prints and parses to itself.
//!
//! After a deliberate change, run `UPDATE_GOLDEN=1 cargo test -p paceline-plan --test
//! golden_plans`, then review the diff.

mod build;
mod downpour;
mod pipedream;
mod ring_attention;

use paceline_plan::collective::SummationOrder;
use paceline_plan::lower::lower;
use paceline_plan::model::{Activation, Experts, Latent, Model, ModelDims, ModelKind, Mtp};
use paceline_plan::program::Plan;
use paceline_plan::schedule::{ScheduleKind, Versions};
use paceline_plan::strategy::{Recompute, Strategy, Sync, Zero};
use paceline_plan::{text, validate};
use std::path::PathBuf;

/// A model small enough that its plans can be read.
fn tiny(kind: ModelKind) -> Model {
    let mlp = kind == ModelKind::Mlp;
    let shape = ModelDims {
        kind,
        layers: 2,
        d_model: 16,
        heads: if mlp { 0 } else { 2 },
        kv_heads: if mlp { 0 } else { 2 },
        head_dim: if mlp { 0 } else { 8 },
        ffn: 32,
        seq: 16,
        max_positions: if kind == ModelKind::Gpt2 { 16 } else { 0 },
        vocab: 64,
        tied: kind == ModelKind::Gpt2,
        activation: match kind {
            ModelKind::Mlp | ModelKind::Resnet | ModelKind::Dlrm | ModelKind::Graph => {
                Activation::Relu
            }
            ModelKind::Gpt2 => Activation::Gelu,
            ModelKind::Llama | ModelKind::Moe | ModelKind::Decoder => Activation::SwiGlu,
        },
        norm_eps: if mlp { 0.0 } else { 1e-5 },
        rope_theta: if kind.is_rotary() { 10000.0 } else { 0.0 },
        qk_norm: false,
        experts: match kind {
            ModelKind::Moe => Experts {
                experts: 4,
                topk: 2,
                route_scale: 1.0,
                capacity: 1.0,
                balance: 0.01,
                ..Experts::default()
            },
            ModelKind::Mlp
            | ModelKind::Gpt2
            | ModelKind::Llama
            | ModelKind::Resnet
            | ModelKind::Dlrm
            | ModelKind::Decoder
            | ModelKind::Graph => Experts::default(),
        },
        latent: Latent::default(),
        mtp: Mtp::default(),
    };
    Model::new(format!("tiny-{}", kind.name()), shape).unwrap()
}

fn lowered(kind: ModelKind, strategy: Strategy) -> Plan {
    let strategy = Strategy { seq: 16, leaves: strategy.dp.max(strategy.leaves), ..strategy };
    lower(&tiny(kind), &strategy).unwrap()
}

/// All golden plans, by name.
fn plans() -> Vec<(&'static str, Plan)> {
    use ModelKind::{Gpt2, Llama, Mlp, Moe};
    let base = Strategy::default;
    vec![
        ("mlp-dp2", lowered(Mlp, Strategy { dp: 2, global_batch: 4, ..base() })),
        ("mlp-pp2", lowered(Mlp, Strategy { pp: 2, global_batch: 4, ..base() })),
        ("gpt2-tp2-sp", lowered(Gpt2, Strategy { tp: 2, sp: true, global_batch: 2, ..base() })),
        (
            "gpt2-dp2-tp2-pp2",
            lowered(
                Gpt2,
                Strategy {
                    dp: 2,
                    tp: 2,
                    pp: 2,
                    zero: Zero::Optimizer,
                    global_batch: 8,
                    recompute: Recompute::Selective,
                    ..base()
                },
            ),
        ),
        (
            "llama-pp2-interleaved",
            lowered(
                Llama,
                Strategy {
                    pp: 2,
                    schedule: ScheduleKind::Interleaved { chunks: 2 },
                    global_batch: 4,
                    recompute: Recompute::Full,
                    ..base()
                },
            ),
        ),
        (
            "llama-pp2-zero-bubble",
            lowered(
                Llama,
                Strategy {
                    pp: 2,
                    schedule: ScheduleKind::ZbH1 { chunks: 1 },
                    global_batch: 3,
                    ..base()
                },
            ),
        ),
        (
            "gpt2-pp2-dualpipev",
            lowered(
                Gpt2,
                Strategy { pp: 2, schedule: ScheduleKind::DualPipeV, global_batch: 4, ..base() },
            ),
        ),
        (
            "llama-pp2-pipedream",
            lowered(
                Llama,
                Strategy {
                    pp: 2,
                    schedule: ScheduleKind::PipeDream { versions: Versions::Stashed },
                    ..base()
                },
            ),
        ),
        (
            "llama-pp2-2bw",
            lowered(
                Llama,
                Strategy {
                    pp: 2,
                    schedule: ScheduleKind::PipeDream { versions: Versions::Two },
                    global_batch: 2,
                    ..base()
                },
            ),
        ),
        ("llama-cp4", lowered(Llama, Strategy { cp: 4, ..base() })),
        (
            "gpt2-zero3-pp2",
            lowered(
                Gpt2,
                Strategy { dp: 2, pp: 2, zero: Zero::Parameters, global_batch: 4, ..base() },
            ),
        ),
        (
            "gpt2-zero3-pp2-free",
            lowered(
                Gpt2,
                Strategy {
                    dp: 2,
                    pp: 2,
                    zero: Zero::Parameters,
                    global_batch: 8,
                    order: SummationOrder::Free,
                    ..base()
                },
            ),
        ),
        (
            "moe-dp2-tp2-ep2-etp2",
            lowered(
                Moe,
                Strategy {
                    dp: 2,
                    tp: 2,
                    sp: true,
                    ep: 2,
                    etp: 2,
                    zero: Zero::Optimizer,
                    global_batch: 2,
                    ..base()
                },
            ),
        ),
        (
            "mlp-ps2",
            lowered(Mlp, Strategy { dp: 2, sync: Sync::Servers(2), global_batch: 4, ..base() }),
        ),
        ("hand-pipedream", pipedream::plan()),
        ("hand-ring-attention", ring_attention::plan()),
        ("hand-downpour", downpour::plan()),
    ]
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../plans")
}

#[test]
fn golden_plans_are_what_they_were() {
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    for (name, plan) in plans() {
        let path = folder().join(format!("{name}.plan"));
        let printed = text::print(&plan);
        if update {
            #[allow(clippy::disallowed_methods)]
            std::fs::write(&path, &printed).unwrap();
        }
        #[allow(clippy::disallowed_methods)]
        let golden = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        if golden != printed {
            let differs = golden.lines().zip(printed.lines()).position(|(a, b)| a != b);
            let line =
                differs.unwrap_or_else(|| golden.lines().count().min(printed.lines().count()));
            panic!(
                "{name} differs from its golden file in line {}:\n  was {:?}\n  is  {:?}",
                line + 1,
                golden.lines().nth(line),
                printed.lines().nth(line)
            );
        }
    }
}

#[test]
fn golden_plans_are_valid() {
    for (name, plan) in plans() {
        let violations = validate::validate(&plan, None);
        let told: Vec<String> = violations.iter().take(5).map(ToString::to_string).collect();
        assert!(
            violations.is_empty(),
            "{name}: {} violations\n{}",
            violations.len(),
            told.join("\n")
        );
    }
}

#[test]
fn golden_plans_parse_to_themselves() {
    for (name, plan) in plans() {
        let parsed = text::parse(&text::print(&plan)).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(parsed == plan, "{name} does not parse to itself");
    }
}
