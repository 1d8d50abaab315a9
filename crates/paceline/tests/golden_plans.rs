//! Runs every golden plan through the simulator, and every one that the executor supports through
//! the executor.

use paceline_exec::TrainOptions;
use paceline_plan::lower::lower;
use paceline_plan::model::built_in;
use paceline_plan::program::Plan;
use paceline_plan::strategy::{OptimizerKind, Strategy};
use paceline_plan::text;
use paceline_plan::validate::validate;
use paceline_sim::cluster::preset;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::PathBuf;

/// Prefix of handwritten plans that belong to no model: validated and simulated, not executed.
const BY_HAND: &str = "hand-";

fn plans() -> BTreeMap<String, Plan> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../plans");
    let mut plans = BTreeMap::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        let text = std::fs::read_to_string(&path).unwrap();
        let plan = text::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        plans.insert(name, plan);
    }
    assert!(plans.len() >= 12, "only {} golden plans", plans.len());
    plans
}

#[test]
fn every_golden_plan_is_simulated() {
    let cluster = preset::get("dgx-a100:2").unwrap();
    let options = paceline_sim::Options { trace: true, ..Default::default() };
    for (name, plan) in plans() {
        let outcome = paceline_sim::simulate(&plan, &cluster, &options)
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        let seconds = outcome.iteration.0;
        assert!(seconds > 0.0 && seconds < 1.0, "{name} takes {seconds} s");
        let spans = outcome.trace.unwrap().spans;
        assert!(!spans.is_empty(), "{name} leaves no trace");
    }
}

#[test]
fn every_golden_plan_that_can_run_is_run() {
    let mut losses: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for (name, plan) in plans() {
        if name.starts_with(BY_HAND) {
            continue;
        }
        let options = TrainOptions { iterations: 10, lr: 1e-2, seed: 7, ..TrainOptions::default() };
        let outcome = paceline_exec::train(&plan, &options, &mut |_| ());
        let outcome = outcome.unwrap_or_else(|e| panic!("{name}: {e}"));
        let curve: Vec<f32> = outcome.iterations.iter().map(|i| i.loss).collect();
        assert_eq!(curve.len(), 10, "{name}");
        assert!(curve[9] < curve[0], "{name} does not learn: {curve:?}");
        losses.insert(name, curve.iter().map(|l| l.to_bits()).collect());
    }
    // The same model, batch and leaves: servers and replicas sum in the same order.
    assert_eq!(losses["mlp-dp2"], losses["mlp-ps2"]);
}

/// Gated GELU in the place of SwiGLU: its row in the table of operators, its kernel and its binding
/// make a plan that is valid, simulated and executed. Along the gradient, a small step lowers the
/// loss by its length times the gradient's.
#[test]
fn an_operator_of_one_row_is_planned_simulated_and_executed() {
    let model = built_in::get("mini-llama").unwrap().unwrap();
    let strategy = Strategy {
        tp: 2,
        global_batch: 4,
        seq: 32,
        optimizer: OptimizerKind::Sgd,
        ..Strategy::default()
    };
    let swiglu = lower(&model, &strategy).unwrap();
    let text = text::print(&swiglu);
    assert!(text.contains("swiglu"));
    let plan = text::parse(&text.replace("swiglu", "geglu")).unwrap();
    assert!(validate(&plan, None).is_empty());

    let cluster = preset::get("dgx-a100").unwrap();
    let times = [&swiglu, &plan].map(|plan| {
        paceline_sim::simulate(plan, &cluster, &Default::default()).unwrap().iteration.0
    });
    assert_eq!(times[0], times[1], "both are gated activations");

    let decrease = |lr: f64| {
        let options = TrainOptions {
            iterations: 2,
            lr,
            weight_decay: 0.0,
            clip: None,
            seed: 7,
            // Every iteration sees the same samples.
            distinct: NonZeroU64::new(strategy.global_batch),
            ..TrainOptions::default()
        };
        let run = paceline_exec::train(&plan, &options, &mut |_| ()).unwrap().iterations;
        let squared = f64::from(run[0].grad_norm).powi(2);
        (f64::from(run[0].loss) - f64::from(run[1].loss)) / (lr * squared)
    };
    // Richardson's extrapolation removes the term of the curvature.
    let slope = 2.0 * decrease(5e-4) - decrease(1e-3);
    assert!((slope - 1.0).abs() < 0.01, "the loss falls by {slope} of what the gradient says");
}
