//! A plan gives the same result on a GPU as on the CPU. Prints that it skips if there is no GPU.
#![cfg(feature = "cuda")]

mod common;

use common::{options, plan, strategy, tiny_mlp};
use paceline_exec::{Device, ExecError, TrainOptions, train};
use paceline_plan::DType;
use paceline_plan::model::Model;
use paceline_plan::strategy::{OptimizerKind, Strategy};
use paceline_plan::trace::SpanKind;

/// Returns true and prints a note if a run failed because there is no GPU.
fn skipped(error: &ExecError) -> bool {
    let text = error.to_string();
    let absent = text.contains("cannot be loaded") || text.contains("there is no CUDA device");
    if absent {
        eprintln!("skipped: {text}");
    }
    absent
}

#[test]
fn an_mlp_learns_as_on_the_cpu() {
    for optimizer in [OptimizerKind::AdamW, OptimizerKind::Sgd, OptimizerKind::Momentum] {
        let layout = Strategy { optimizer, ..strategy(8, 2, 2) };
        let plan = plan(&tiny_mlp(), &layout);
        let cpu = TrainOptions { iterations: 20, ..options(20) };
        let gpu = TrainOptions { device: Device::Cuda(0), ..cpu.clone() };
        let expected = train(&plan, &cpu, &mut |_| {}).unwrap();
        let found = match train(&plan, &gpu, &mut |_| {}) {
            Err(error) if skipped(&error) => return,
            found => found.unwrap(),
        };
        assert_eq!(found.iterations.len(), 20);
        // The same plan twice gives the same bits.
        let twice = train(&plan, &gpu, &mut |_| {}).unwrap();
        for (f, t) in found.iterations.iter().zip(&twice.iterations) {
            let bits = [f.loss, f.grad_norm].map(f32::to_bits);
            assert_eq!(bits, [t.loss, t.grad_norm].map(f32::to_bits), "{optimizer:?}");
        }
        // Rounding stays a rounding of the first loss and norm, also when both become small.
        let first = &expected.iterations[0];
        for (at, (f, e)) in found.iterations.iter().zip(&expected.iterations).enumerate() {
            let pairs = [(f.loss, e.loss, first.loss), (f.grad_norm, e.grad_norm, first.grad_norm)];
            for (f, e, scale) in pairs {
                let error = (f - e).abs() / scale.abs();
                let bound = if at == 0 { 1e-6 } else { 1e-4 };
                assert!(error < bound, "{optimizer:?}: {f} against {e}, {error}");
            }
        }
        // Weights too, except with Adam, which amplifies the rounding of tiny gradients.
        if optimizer != OptimizerKind::AdamW {
            let (found, expected) = (found.parameters.unwrap(), expected.parameters.unwrap());
            for (name, expected) in expected {
                for (f, e) in found[&name].iter().zip(expected) {
                    assert!((f - e).abs() < 1e-5, "{name}: {f} against {e}");
                }
            }
        }
        // Ops of both lanes are timed by the device's own clock.
        let computed = |kind| found.trace.spans.iter().any(|span| span.kind == kind);
        assert!(computed(SpanKind::Load) && computed(SpanKind::Backward));
        assert!(found.trace.spans.iter().all(|span| span.end.0 >= span.start.0));
    }
}

#[test]
fn language_models_learn_as_on_the_cpu() {
    for model in [common::tiny_gpt(true), common::tiny_gpt(false), common::tiny_llama()] {
        let plan = plan(&model, &strategy(8, 2, 2));
        let cpu = TrainOptions { clip: Some(1.0), ..options(20) };
        let gpu = TrainOptions { device: Device::Cuda(0), ..cpu.clone() };
        let expected = train(&plan, &cpu, &mut |_| {}).unwrap();
        let found = match train(&plan, &gpu, &mut |_| {}) {
            Err(error) if skipped(&error) => return,
            found => found.unwrap(),
        };
        for (at, (f, e)) in found.iterations.iter().zip(&expected.iterations).enumerate() {
            for (f, e) in [(f.loss, e.loss), (f.grad_norm, e.grad_norm)] {
                let (error, bound) = ((f - e).abs() / e.abs(), if at == 0 { 1e-5 } else { 1e-4 });
                assert!(error < bound, "{}, {at}: {f} against {e}, {error}", plan.model);
            }
        }
        for (number, dtype) in [DType::Bf16, DType::F16].into_iter().enumerate() {
            let layout = Strategy { dtype, ..strategy(8, 2, 2) };
            let plan = common::plan(&model, &layout);
            let [first, again] = [(); 2].map(|()| train(&plan, &gpu, &mut |_| {}).unwrap());
            let last = |outcome: &paceline_exec::Outcome| outcome.iterations[19].loss;
            assert_eq!(last(&first).to_bits(), last(&again).to_bits(), "{number}");
            let error = (last(&first) - last(&expected)).abs() / last(&expected);
            assert!(error < 2e-2, "{}, {dtype}: {error}", plan.model);
        }
    }
}

#[test]
fn what_a_gpu_cannot_do_yet_is_refused_by_name() {
    let gpu = TrainOptions { device: Device::Cuda(0), ..options(1) };
    let told = |model: &Model, layout: Strategy| {
        train(&plan(model, &layout), &gpu, &mut |_| {}).unwrap_err().to_string()
    };
    let images = told(&common::tiny_resnet(), Strategy { seq: 1, ..strategy(2, 1, 1) });
    assert!(images.contains("on a GPU cannot be run yet"), "{images}");
    let optimizer = OptimizerKind::Lamb;
    let norms = told(&tiny_mlp(), Strategy { optimizer, ..strategy(2, 1, 1) });
    assert!(norms.contains("an optimizer with tensor norms"), "{norms}");
    let grad_dtype = DType::Bf16;
    let narrow = told(&tiny_mlp(), Strategy { dtype: grad_dtype, grad_dtype, ..strategy(2, 1, 1) });
    assert!(narrow.contains("gradients in bf16"), "{narrow}");
}
