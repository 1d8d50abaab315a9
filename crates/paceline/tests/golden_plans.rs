//! Runs every golden plan through the simulator, and every one that the executor supports through
//! the executor.

use paceline_exec::TrainOptions;
use paceline_plan::program::Plan;
use paceline_plan::text;
use paceline_sim::cluster::preset;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Prefix of handwritten plans for future features: validated and simulated, not executed.
const LATER: &str = "later-";

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
        let options = TrainOptions { iterations: 10, lr: 1e-2, seed: 7, ..TrainOptions::default() };
        let outcome = paceline_exec::train(&plan, &options, &mut |_| ());
        if name.starts_with(LATER) {
            assert!(outcome.is_err(), "{name} runs by now: it is no plan for later");
            continue;
        }
        let outcome = outcome.unwrap_or_else(|e| panic!("{name}: {e}"));
        let curve: Vec<f32> = outcome.iterations.iter().map(|i| i.loss).collect();
        assert_eq!(curve.len(), 10, "{name}");
        assert!(curve[9] < curve[0], "{name} does not learn: {curve:?}");
        losses.insert(name, curve.iter().map(|l| l.to_bits()).collect());
    }
    // The same model, batch and leaves: servers and replicas sum in the same order.
    assert_eq!(losses["mlp-dp2"], losses["mlp-ps2"]);
}
