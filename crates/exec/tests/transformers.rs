//! Our losses against those of Hugging Face's transformers and PyTorch, from the same weights and tokens.
//!
//! `fixtures/reference.py` made the numbers; the weights follow from the seed.

use paceline_exec::{TrainOptions, train};
use paceline_plan::lower::lower;
use paceline_plan::model::Model;
use paceline_plan::strategy::Strategy;
use serde_json::Value;

fn compare(model: &str, fixture: &str) {
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
    for (ours, theirs) in run.iterations.iter().zip(&theirs) {
        let error = (f64::from(ours.loss) / theirs - 1.0).abs();
        let allowed = if ours.iteration == 1 { 1e-5 } else { 1e-4 };
        let iteration = ours.iteration;
        assert!(
            error <= allowed,
            "iteration {iteration}: {} against {theirs}: {error:e}",
            ours.loss
        );
    }
    // The comparison means something only if there was something to learn.
    assert!(theirs[theirs.len() - 1] < 0.97 * theirs[0], "{theirs:?}");
}

#[test]
fn gpt2_learns_as_in_transformers() {
    compare(include_str!("fixtures/gpt2.toml"), include_str!("fixtures/gpt2.json"));
}

#[test]
fn llama_learns_as_in_transformers() {
    compare(include_str!("fixtures/llama.toml"), include_str!("fixtures/llama.json"));
}
