//! Local SGD and DiLoCo.

use crate::common::wires::train_over;
use crate::common::{bits, options, plan, strategy, tiny_gpt, tiny_llama};
use paceline_exec::checkpoint::{Checkpoint, SaveOptions};
use paceline_exec::{Outcome, Parameters, Start, TrainOptions, train};
use paceline_plan::collective::SummationOrder;
use paceline_plan::ids::Rank;
use paceline_plan::model::Model;
use paceline_plan::outer_optimizer::{LocalSgd, OuterOptimizer};
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{OptimizerKind, Strategy};
use paceline_plan::summary::program_traffic;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::sync::Arc;

fn apart(dp: u32, steps: u32, outer: OuterOptimizer) -> Strategy {
    let local = Some(LocalSgd { steps, outer });
    let batch = u64::from(dp) * u64::from(steps);
    Strategy { dp, local, order: SummationOrder::Free, ..strategy(batch, 1, dp) }
}

/// With one local step, plain SGD and averaging, local SGD gives the weights of data parallelism: a
/// mean of steps is a step along the mean gradient.
#[test]
fn the_mean_of_single_steps_is_a_step_along_the_mean() {
    for model in [tiny_gpt(true), tiny_llama()] {
        let options = TrainOptions { clip: None, lr: 0.1, ..options(6) };
        let local =
            Strategy { optimizer: OptimizerKind::Sgd, ..apart(4, 1, OuterOptimizer::Average) };
        let shared = Strategy { local: None, ..local.clone() };
        let [found, expected] =
            [&local, &shared].map(|s| train(&plan(&model, s), &options, &mut |_| {}).unwrap());
        for (f, e) in found.iterations.iter().zip(&expected.iterations) {
            assert!((f.loss - e.loss).abs() <= 1e-4 * e.loss, "{} against {}", f.loss, e.loss);
        }
    }
}

/// Writes weights and a position in the data into a checkpoint of one rank without moments.
fn set_state(checkpoint: &Path, weights: &Parameters, samples: u64) {
    let file = checkpoint.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let length = u64::from_le_bytes(*length) as usize;
    let header: Value = serde_json::from_slice(&rest[..length]).unwrap();
    for (name, values) in weights {
        let place = header[name]["data_offsets"][0].as_u64().unwrap() as usize;
        let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        bytes[8 + length + place..][..raw.len()].copy_from_slice(&raw);
    }
    fs::write(file, bytes).unwrap();
    let file = checkpoint.join("training.json");
    let mut state: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    state["data"]["samples"] = samples.into();
    fs::write(file, state.to_string()).unwrap();
}

/// Losses and final weights of local SGD as its definition has it: one rank makes the steps of one
/// replica after the other, each from the common weights, and the mean of what they moved is the
/// gradient of the outer step.
fn replayed(
    model: &Model,
    options: &TrainOptions,
    (dp, steps, outer): (u32, u32, OuterOptimizer),
) -> (Vec<f32>, Parameters) {
    let optimizer = OptimizerKind::Sgd;
    let plan = plan(model, &Strategy { optimizer, ..strategy(1, 1, 1) });
    let directory =
        std::env::temp_dir().join(format!("paceline-replayed-{outer}-{}", std::process::id()));
    let save = SaveOptions {
        directory: directory.clone(),
        every: None,
        keep: 1,
        attempt: 1,
        extra_files: Vec::new(),
    };
    let run = |options: TrainOptions| train(&plan, &options, &mut |_| {}).unwrap();
    run(TrainOptions { save: Some(save), iterations: 1, ..options.clone() });
    let checkpoint = directory.join("iteration-00000001");
    let initial = run(TrainOptions { iterations: 0, ..options.clone() });
    let (mut weights, mut losses) = (initial.parameters.unwrap(), Vec::new());
    let (rate, momentum) = outer.rule();
    let mut velocity: Parameters =
        weights.iter().map(|(name, values)| (name.clone(), vec![0.0; values.len()])).collect();
    for iteration in 0..options.iterations {
        let (mut moved, mut loss) = (velocity.clone(), 0.0);
        moved.values_mut().for_each(|values| values.fill(0.0));
        for replica in 0..dp {
            let samples = u64::from(steps) * u64::from(iteration * dp + replica);
            set_state(&checkpoint, &weights, samples);
            let start = Start::Checkpoint(Arc::new(Checkpoint::open(&checkpoint).unwrap()));
            let done = run(TrainOptions { start, iterations: 1 + steps, ..options.clone() });
            loss += done.iterations.iter().map(|i| i.loss).sum::<f32>();
            for (name, values) in done.parameters.unwrap() {
                let moved = moved.get_mut(&name).unwrap().iter_mut();
                for ((moved, anchor), value) in moved.zip(&weights[&name]).zip(values) {
                    *moved += (anchor - value) / dp as f32;
                }
            }
        }
        losses.push(loss / (dp * steps) as f32);
        for (name, moved) in moved {
            let each = weights.get_mut(&name).unwrap().iter_mut();
            for ((weight, velocity), moved) in each.zip(velocity.get_mut(&name).unwrap()).zip(moved)
            {
                *velocity = momentum as f32 * *velocity + moved;
                *weight -= rate as f32 * (moved + momentum as f32 * *velocity);
            }
        }
    }
    fs::remove_dir_all(directory).unwrap();
    (losses, weights)
}

#[test]
fn replicas_step_as_one_rank_that_makes_their_steps_in_turn() {
    for (model, outer) in
        [(tiny_gpt(true), OuterOptimizer::Average), (tiny_llama(), OuterOptimizer::Nesterov)]
    {
        let options =
            TrainOptions { clip: None, lr: 0.1, warmup: 0, weight_decay: 0.0, ..options(4) };
        // No forward of a step may come before the update of the one before it.
        let schedule = ScheduleKind::GPipe;
        let layout = Strategy { optimizer: OptimizerKind::Sgd, schedule, ..apart(3, 2, outer) };
        let found = train(&plan(&model, &layout), &options, &mut |_| {}).unwrap();
        let (losses, weights) = replayed(&model, &options, (3, 2, outer));
        for (found, expected) in found.iterations.iter().zip(&losses) {
            let found = found.loss;
            assert!((found - expected).abs() < 1e-5 * expected, "{outer}: {found}, {expected}");
        }
        for (name, found) in found.parameters.unwrap() {
            for (found, expected) in found.iter().zip(&weights[&name]) {
                assert!((found - expected).abs() < 1e-5, "{outer}, {name}: {found}, {expected}");
            }
        }
    }
}

fn end(outcome: &Outcome) -> f32 {
    let last = &outcome.iterations[outcome.iterations.len() - 5..];
    last.iter().map(|i| i.loss).sum::<f32>() / last.len() as f32
}

#[test]
fn replicas_that_compare_seldom_learn_all_the_same() {
    let model = tiny_gpt(true);
    let options = TrainOptions { lr: 5e-3, keep_parameters: false, ..options(40) };
    let loss = |layout: &Strategy| {
        let outcome = train(&plan(&model, layout), &options, &mut |_| {}).unwrap();
        (outcome.iterations[0].loss, end(&outcome))
    };
    for outer in [OuterOptimizer::Average, OuterOptimizer::Nesterov] {
        let (first, found) = loss(&apart(2, 8, outer));
        eprintln!("{outer}: {first} to {found}");
        assert!(found < 0.7 * first, "{outer}: {first} to {found}");
    }
}

#[test]
fn replicas_end_alike_over_every_transport() {
    let model = tiny_llama();
    let layout =
        Strategy { micro_batch: 1, global_batch: 12, ..apart(2, 3, OuterOptimizer::Nesterov) };
    let plan = plan(&model, &layout);
    let expected = train_over(&plan, "thread", &options(4));
    for transport in ["shm", "tcp"] {
        let found = train_over(&plan, transport, &options(4));
        assert_eq!(bits(&found), bits(&expected), "{transport}");
        assert_eq!(found.parameters, expected.parameters, "{transport}");
    }
}

/// For any number of local steps, replicas exchange the weights once per iteration.
#[test]
fn traffic_does_not_grow_with_the_updates() {
    let model = tiny_gpt(false);
    let bytes = |steps| {
        let plan = plan(&model, &apart(2, steps, OuterOptimizer::Nesterov));
        program_traffic(&plan, plan.program(Rank(0)))["dp"].bytes
    };
    assert_eq!(bytes(1), bytes(16));
}
