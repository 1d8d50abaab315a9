//! Runs in 16-bit types: the same guarantees, and losses close to those of f32.

use crate::common::*;
use paceline_exec::{Outcome, TrainOptions, train};
use paceline_plan::DType;
use paceline_plan::model::built_in;
use paceline_plan::strategy::{Recompute, Strategy, Sync, Zero};

/// Strategy with separate types for weights and activations, and for gradients.
fn stored(dtype: DType, grad_dtype: DType) -> Strategy {
    Strategy { dtype, grad_dtype, ..strategy(8, 1, 4) }
}

#[test]
fn layouts_give_the_same_bits_in_sixteen() {
    for (dtype, grad_dtype) in [
        (DType::Bf16, DType::F32),
        (DType::Bf16, DType::Bf16),
        (DType::F16, DType::F32),
        (DType::F32, DType::Bf16),
    ] {
        let one = stored(dtype, grad_dtype);
        let cut = |zero| Strategy { dp: 2, zero, ..one.clone() };
        let layouts = [
            ("dp 4", Strategy { dp: 4, ..one.clone() }),
            ("pp 2", Strategy { pp: 2, ..one.clone() }),
            ("dp 2, pp 2", Strategy { dp: 2, pp: 2, ..one.clone() }),
            ("zero 1", cut(Zero::Optimizer)),
            ("zero 2", cut(Zero::Gradients)),
            ("zero 3", cut(Zero::Parameters)),
            ("full recomputation", Strategy { recompute: Recompute::Full, ..one.clone() }),
        ];
        for model in [tiny_gpt(true), tiny_llama()] {
            assert_same_bits(&model, &one, &layouts);
        }
        if dtype != DType::F16 {
            let served = Strategy { dp: 2, sync: Sync::Servers(2), ..one.clone() };
            assert_same_bits(&tiny_gpt(true), &one, &[("ps:2", served)]);
        }
    }
}

#[test]
fn tensor_parallelism_is_near_in_sixteen() {
    for (dtype, tolerance) in [(DType::Bf16, 2e-2), (DType::F16, 1e-2)] {
        let one = stored(dtype, DType::F32);
        let both = Strategy { tp: 2, sp: true, dp: 2, zero: Zero::Optimizer, ..one.clone() };
        let layouts = [("tp 2", Strategy { tp: 2, ..one.clone() }), ("tp 2, sp, dp 2", both)];
        for model in [tiny_gpt(true), tiny_llama()] {
            assert_close(&model, &one, tolerance, &layouts);
        }
    }
}

fn learnt(dtype: DType, grad_dtype: DType) -> Outcome {
    let model = built_in::get("mini").expect("built in").expect("sound");
    let strategy = Strategy { dtype, grad_dtype, seq: model.seq, ..strategy(4, 2, 1) };
    let options = TrainOptions { iterations: 30, lr: 3e-3, seed: 1, ..TrainOptions::default() };
    train(&plan(&model, &strategy), &options, &mut |_| {}).expect("a sound plan")
}

/// Final loss of a run: the mean of its last ten losses.
fn level(outcome: &Outcome) -> f32 {
    let last = &outcome.iterations[outcome.iterations.len() - 10..];
    last.iter().map(|i| i.loss).sum::<f32>() / last.len() as f32
}

#[test]
fn sixteen_bits_learn_as_well_as_thirty_two() {
    let full = level(&learnt(DType::F32, DType::F32));
    for (dtype, grad_dtype) in
        [(DType::Bf16, DType::F32), (DType::Bf16, DType::Bf16), (DType::F16, DType::F32)]
    {
        let half = learnt(dtype, grad_dtype);
        let error = (level(&half) - full) / full;
        assert!(error.abs() < 0.02, "{dtype}, {grad_dtype}: {} against {full}", level(&half));
        let scaled = dtype == DType::F16;
        assert!(half.iterations.iter().all(|i| i.loss_scale.is_some() == scaled));
    }
}

/// A gradient beyond the range of f16 changes no weight, and the loss scale is reduced.
#[test]
fn an_overflow_skips_the_iteration_and_halves_the_scale() {
    let plan = plan(&tiny_gpt(true), &stored(DType::F16, DType::F32));
    let options = TrainOptions { loss_scale: 1.6e7, ..options(16) };
    let outcome = train(&plan, &options, &mut |_| {}).expect("a sound plan");
    let reports = &outcome.iterations;
    assert!(reports[0].skipped, "{reports:?}");
    for pair in reports.windows(2) {
        let [before, after] = pair else { continue };
        let wanted = if before.skipped { 0.5 } else { 1.0 };
        assert_eq!(after.loss_scale.zip(before.loss_scale).map(|(a, b)| a / b), Some(wanted));
    }
    assert!(reports.iter().any(|i| !i.skipped && i.grad_norm.is_finite()), "{reports:?}");
}
