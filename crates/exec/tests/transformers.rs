//! Losses and generated tokens against those of Hugging Face's transformers and PyTorch, from the
//! same weights and tokens.
//!
//! `fixtures/reference.py` generated the numbers; the weights follow from the seed.

use paceline_exec::inference::{Network, Sampling, generate};
use paceline_exec::{TrainOptions, train};
use paceline_plan::lower::lower;
use paceline_plan::model::Model;
use paceline_plan::program::Plan;
use paceline_plan::strategy::Strategy;
use serde_json::Value;

/// Compares the first `held` losses of a run with the fixture, and the tokens generated before it.
fn compare(model: &str, fixture: &str, held: usize) {
    let model = Model::parse(model, "fixture.toml").unwrap_or_else(|errors| panic!("{errors}"));
    let fixture: Value = serde_json::from_str(fixture).unwrap();
    let setting = |name: &str| fixture["settings"][name].as_f64().unwrap();
    let samples = setting("samples") as u64;
    let strategy = Strategy {
        global_batch: samples,
        micro_batch: samples,
        seq: model.seq,
        ..Strategy::default()
    };
    let options = TrainOptions {
        iterations: setting("iterations") as u32,
        lr: setting("lr"),
        warmup: setting("warmup") as u32,
        weight_decay: setting("weight_decay"),
        clip: Some(setting("clip")),
        seed: setting("seed") as u64,
        ..TrainOptions::default()
    };
    let plan = lower(&model, &strategy).unwrap_or_else(|problems| panic!("{problems}"));
    let run = train(&plan, &options, &mut |_| {}).unwrap();
    let theirs: Vec<f64> =
        fixture["losses"].as_array().unwrap().iter().map(|l| l.as_f64().unwrap()).collect();
    assert_eq!(run.iterations.len(), theirs.len());
    for (ours, theirs) in run.iterations.iter().zip(&theirs).take(held) {
        let error = (f64::from(ours.loss) / theirs - 1.0).abs();
        let allowed = if ours.iteration == 1 { 1e-5 } else { 1e-4 };
        let iteration = ours.iteration;
        assert!(
            error <= allowed,
            "iteration {iteration}: {} against {theirs}: {error:e}",
            ours.loss
        );
    }
    says_the_same(&model, &fixture, &plan);
    // The comparison is meaningful only if the loss decreases.
    assert!(theirs[theirs.len() - 1] < 0.97 * theirs[0], "{theirs:?}");
}

/// Before training, the likeliest tokens after a prompt equal those of the fixture.
fn says_the_same(model: &Model, fixture: &Value, plan: &Plan) {
    let tokens = |name: &str| -> Vec<u32> {
        fixture[name].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect()
    };
    let seed = fixture["settings"]["seed"].as_u64().unwrap();
    let options =
        TrainOptions { iterations: 0, seed, keep_parameters: true, ..TrainOptions::default() };
    let first = train(plan, &options, &mut |_| {}).unwrap().parameters.unwrap();
    let network = Network::from_parameters(model, first);
    let (theirs, mut ours) = (tokens("said"), Vec::new());
    let bold = Sampling { temperature: 0.0, top_k: None, seed: 0 };
    generate(&network, &tokens("prompt"), theirs.len(), bold, &mut |token| {
        ours.push(token);
        true
    })
    .unwrap();
    assert_eq!(ours, theirs);
}

#[test]
fn gpt2_learns_as_in_transformers() {
    compare(include_str!("fixtures/gpt2.toml"), include_str!("fixtures/gpt2.json"), 10);
}

#[test]
fn llama_learns_as_in_transformers() {
    compare(include_str!("fixtures/llama.toml"), include_str!("fixtures/llama.json"), 10);
}

#[test]
fn mixtral_learns_as_in_transformers() {
    compare(include_str!("fixtures/mixtral.toml"), include_str!("fixtures/mixtral.json"), 10);
}

#[test]
fn qwen3_moe_learns_as_in_transformers() {
    compare(include_str!("fixtures/qwen3-moe.toml"), include_str!("fixtures/qwen3-moe.json"), 10);
}

/// The router bias follows the loads here and is constant there: only one loss is equal.
#[test]
fn deepseek_v3_is_that_of_transformers() {
    compare(
        include_str!("fixtures/deepseek-v3.toml"),
        include_str!("fixtures/deepseek-v3.json"),
        1,
    );
}
