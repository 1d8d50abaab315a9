//! Local SGD and DiLoCo.

use crate::common::wires::train_over;
use crate::common::{bits, options, plan, strategy, tiny_gpt, tiny_llama};
use paceline_exec::{Outcome, TrainOptions, train};
use paceline_plan::collective::SummationOrder;
use paceline_plan::ids::Rank;
use paceline_plan::outer_optimizer::{LocalSgd, OuterOptimizer};
use paceline_plan::strategy::{OptimizerKind, Strategy};
use paceline_plan::summary::program_traffic;

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
