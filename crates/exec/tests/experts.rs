//! Experts on any ranks: the same losses, and the same dropped tokens.

use crate::common::wires::train_over;
use crate::common::{
    assert_same_bits, dropless_moe, latent_moe, options, plan, run, strategy, tiny_moe, try_run,
};
use paceline_exec::checkpoint::{Checkpoint, SaveOptions};
use paceline_exec::{ExecError, IterationReport, Outcome, Start, TrainOptions, train};
use paceline_plan::DType;
use paceline_plan::collective::SummationOrder;
use paceline_plan::model::{Experts, Model, ModelDims};
use paceline_plan::schedule::{ScheduleKind, Versions};
use paceline_plan::strategy::{OptimizerKind, Recompute, Strategy, Zero};
use std::sync::Arc;

/// Eight samples per iteration, one per microbatch, four leaves.
fn one() -> Strategy {
    Strategy { expert_buffer_factor: 4.0, ..strategy(8, 1, 4) }
}

/// Layouts with expert parallelism, combined with other features.
fn layouts() -> Vec<(&'static str, Strategy)> {
    let sp = |tp: u32| Strategy { tp, sp: true, ..one() };
    let zero = Zero::Optimizer;
    vec![
        ("dp 2, ep 2", Strategy { dp: 2, ep: 2, ..one() }),
        ("dp 4, ep 2", Strategy { dp: 4, ep: 2, ..one() }),
        ("dp 4, ep 4, zero 1", Strategy { dp: 4, ep: 4, zero, ..one() }),
        ("dp 2, etp 2", Strategy { dp: 2, etp: 2, ..one() }),
        (
            "dp 4, ep 2, etp 2, full",
            Strategy { dp: 4, ep: 2, etp: 2, recompute: Recompute::Full, ..one() },
        ),
        ("tp 2", sp(2)),
        ("tp 2, ep 2", Strategy { ep: 2, ..sp(2) }),
        ("dp 2, tp 2, ep 2, zero 1", Strategy { dp: 2, ep: 2, zero, ..sp(2) }),
        ("dp 2, tp 2, ep 2, etp 2", Strategy { dp: 2, ep: 2, etp: 2, overlap: false, ..sp(2) }),
        ("pp 2, dp 2, ep 2", Strategy { pp: 2, dp: 2, ep: 2, ..one() }),
        (
            "pp 2, dp 2, tp 2, ep 4, zero bubble, zero 1",
            Strategy {
                pp: 2,
                dp: 2,
                ep: 4,
                zero,
                schedule: ScheduleKind::ZbH1 { chunks: 1 },
                micro_batch: 2,
                leaves: 2,
                ..sp(2)
            },
        ),
        ("dp 4, ep 2, zero 2", Strategy { dp: 4, ep: 2, zero: Zero::Gradients, ..one() }),
        ("dp 4, ep 2, zero 3", Strategy { dp: 4, ep: 2, zero: Zero::Parameters, ..one() }),
        // No two ranks hold the same experts, and gradients of the rest are reduced one by one.
        (
            "dp 2, ep 2, zero 2, free",
            Strategy { dp: 2, ep: 2, zero: Zero::Gradients, order: SummationOrder::Free, ..one() },
        ),
        (
            "dp 4, ep 2, zero 3, free",
            Strategy { dp: 4, ep: 2, zero: Zero::Parameters, order: SummationOrder::Free, ..one() },
        ),
        ("cp 2", Strategy { cp: 2, ..one() }),
        (
            "dp 2, cp 2, ep 4, zero 3",
            Strategy { dp: 2, cp: 2, ep: 4, zero: Zero::Parameters, ..one() },
        ),
        ("cp 2, tp 2, ep 2, full", Strategy { cp: 2, ep: 2, recompute: Recompute::Full, ..sp(2) }),
        // Experts have replicas, the rest has none.
        ("tp 2, zero 3", Strategy { zero: Zero::Parameters, ..sp(2) }),
        (
            "pp 2, dp 2, tp 2, ep 2, zero 3",
            Strategy { pp: 2, dp: 2, ep: 2, zero: Zero::Parameters, ..sp(2) },
        ),
        (
            "pp 2, interleaved, dp 2, ep 2",
            Strategy {
                pp: 2,
                dp: 2,
                ep: 2,
                schedule: ScheduleKind::Interleaved { chunks: 2 },
                ..one()
            },
        ),
    ]
}

/// Asserts that losses and norms are equal within 1e-4, and dropped tokens exactly.
fn assert_alike(name: &str, found: &Outcome, expected: &Outcome) {
    for (found, expected) in found.iterations.iter().zip(&expected.iterations) {
        let at = expected.iteration;
        let off = (found.loss / expected.loss - 1.0).abs();
        assert!(off < 1e-4, "{name}, iteration {at}: {} against {}", found.loss, expected.loss);
        let off = (found.grad_norm / expected.grad_norm - 1.0).abs();
        assert!(
            off < 1e-4,
            "{name}, iteration {at}: norm {} against {}",
            found.grad_norm,
            expected.grad_norm
        );
        assert_eq!(found.dropped_tokens, expected.dropped_tokens, "{name}, iteration {at}");
    }
}

#[test]
fn experts_anywhere_give_the_same_losses() {
    for model in [tiny_moe(), dropless_moe(), latent_moe()] {
        let expected = run(&model, &one());
        let dropped: u64 = expected.iterations.iter().filter_map(|i| i.dropped_tokens).sum();
        let bounded = model.experts.capacity > 0.0;
        assert_eq!(expected.iterations[0].dropped_tokens.is_some(), bounded);
        assert_eq!(dropped > 0, bounded, "a bound at an equal share drops some: {dropped}");
        for (name, layout) in layouts() {
            let found = run(&model, &layout);
            assert_alike(&format!("{}: {name}", model.name()), &found, &expected);
        }
    }
}

/// The step depends on the norm of a whole tensor, of which no rank holds all experts.
#[test]
fn lengths_of_experts_that_are_dealt_out_are_those_of_whole_tensors() {
    let model = tiny_moe();
    let sp = Strategy { tp: 2, sp: true, ..one() };
    for optimizer in [OptimizerKind::Lamb, OptimizerKind::Lars] {
        let expected = run(&model, &Strategy { optimizer, ..one() });
        for (name, layout) in [
            ("dp 2, ep 2", Strategy { dp: 2, ep: 2, ..one() }),
            ("dp 4, ep 2, zero 2", Strategy { dp: 4, ep: 2, zero: Zero::Gradients, ..one() }),
            (
                "dp 2, tp 2, ep 2, etp 2, zero 1",
                Strategy { dp: 2, ep: 2, etp: 2, zero: Zero::Optimizer, ..sp.clone() },
            ),
            ("pp 2, dp 2, etp 2", Strategy { pp: 2, dp: 2, etp: 2, ..one() }),
        ] {
            let found = run(&model, &Strategy { optimizer, ..layout });
            assert_alike(&format!("{optimizer}: {name}"), &found, &expected);
        }
    }
}

#[test]
fn whole_replicas_with_experts_give_the_same_bits() {
    let layouts = [
        ("dp 2", Strategy { dp: 2, ..one() }),
        ("dp 4, zero 3", Strategy { dp: 4, zero: Zero::Parameters, ..one() }),
        ("pp 2", Strategy { pp: 2, ..one() }),
        ("full", Strategy { recompute: Recompute::Full, ..one() }),
    ];
    for model in [tiny_moe(), latent_moe()] {
        assert_same_bits(&model, &one(), &layouts);
    }
}

/// Model whose tokens go to one of two experts, and whose routing becomes uneven.
fn uneven() -> Model {
    let model = dropless_moe();
    let experts = Experts { topk: 1, experts: 2, balance: 0.0, ..model.experts };
    Model::new("uneven", ModelDims { experts, ..*model }).unwrap()
}

fn saving(name: &str) -> (std::path::PathBuf, TrainOptions) {
    let directory = std::env::temp_dir().join(format!("paceline-{name}-{}", std::process::id()));
    let save = SaveOptions {
        directory: directory.clone(),
        every: None,
        keep: 4,
        attempt: 1,
        extra_files: Vec::new(),
    };
    (directory, TrainOptions { save: Some(save), save_at_end: false, ..options(12) })
}

/// Trains with buffers of one equal share, and goes on with larger ones whenever they overflow.
/// Returns all iterations, and where the run was interrupted.
fn train_enlarging(
    name: &str,
    model: &Model,
    layout: &Strategy,
) -> (Vec<IterationReport>, Vec<u32>) {
    let (directory, options) = saving(name);
    let (mut iterations, mut overflows): (Vec<IterationReport>, Vec<u32>) = Default::default();
    let mut layout = Strategy { expert_buffer_factor: 1.0, ..layout.clone() };
    loop {
        let resume = Checkpoint::newest_whole(&directory, u32::MAX).ok();
        let start = resume.map_or(Start::Seed, |(found, _)| Start::Checkpoint(Arc::new(found)));
        let options = TrainOptions { start, ..options.clone() };
        let plan = plan(model, &layout);
        let error = match train(&plan, &options, &mut |done| iterations.push(*done)) {
            Ok(_) => break,
            Err(error) => error,
        };
        assert!(matches!(error, ExecError::ExpertOverflow { .. }), "{name}: {error}");
        assert!(error.to_string().contains("raise --expert-buffer-factor"), "{error}");
        let needed = error.needed_expert_buffers().unwrap();
        assert!(needed > layout.expert_buffer_factor, "{name}: {error}");
        layout.expert_buffer_factor = plan.expert_buffers().unwrap().enlarged(needed);
        overflows.push(iterations.len() as u32 + 1);
    }
    let _ = std::fs::remove_dir_all(&directory);
    (iterations, overflows)
}

/// The numbers are those of buffers that were large enough from the start, bit by bit, and the
/// iterations before an overflow are not computed again.
#[test]
fn a_run_whose_experts_overflow_goes_on_with_larger_buffers() {
    let layout = Strategy { dp: 2, ep: 2, ..one() };
    let sp = |tp| Strategy { tp, sp: true, ..layout.clone() };
    for (name, model, layout) in [
        ("overflow", uneven(), layout.clone()),
        ("overflow-pp", uneven(), Strategy { pp: 2, dp: 2, ep: 2, ..one() }),
        (
            "overflow-zero",
            dropless_moe(),
            Strategy { dp: 4, ep: 4, zero: Zero::Gradients, ..one() },
        ),
        ("overflow-etp", dropless_moe(), Strategy { ep: 2, etp: 2, overlap: false, ..sp(2) }),
        (
            "overflow-recompute",
            latent_moe(),
            Strategy { dp: 4, ep: 4, recompute: Recompute::Full, ..one() },
        ),
        ("overflow-f16", uneven(), Strategy { dtype: DType::F16, ..layout.clone() }),
    ] {
        let expected = train(&plan(&model, &layout), &options(12), &mut |_| {}).unwrap();
        let (found, overflows) = train_enlarging(name, &model, &layout);
        assert!(!overflows.is_empty(), "{name} never overflows");
        let bits = |all: &[IterationReport]| -> Vec<_> {
            let of = |i: &IterationReport| {
                (i.iteration, i.loss.to_bits(), i.grad_norm.to_bits(), i.loss_scale, i.skipped)
            };
            all.iter().map(of).collect()
        };
        assert_eq!(bits(&found), bits(&expected.iterations), "{name}: {overflows:?}");
    }
}

/// A run that is not saved has no state before the iteration, and says what it needs.
#[test]
fn an_overflow_changes_nothing_that_others_could_miss() {
    let layout = Strategy { dp: 2, ep: 2, expert_buffer_factor: 1.0, ..one() };
    let error = try_run(&uneven(), &layout).unwrap_err();
    assert!(matches!(error, ExecError::ExpertOverflow { iteration: 1, .. }), "{error}");
    // Iterations that overlap others cannot be undone: the rank that overflows fails.
    let overlapping = Strategy {
        pp: 2,
        schedule: ScheduleKind::PipeDream { versions: Versions::Stashed },
        order: SummationOrder::Free,
        micro_batch: 4,
        leaves: 2,
        ..layout
    };
    let error = try_run(&uneven(), &overlapping).unwrap_err();
    assert!(matches!(error, ExecError::Op { .. }), "{error}");
    assert!(error.needed_expert_buffers() > Some(1.0), "{error}");
}

#[test]
fn experts_travel_over_every_wire() {
    let model = tiny_moe();
    let layout = Strategy { dp: 2, ep: 2, ..one() };
    let expected = run(&model, &layout);
    for transport in ["shm", "tcp"] {
        let found = train_over(&plan(&model, &layout), transport, &options(5));
        for (found, expected) in found.iterations.iter().zip(&expected.iterations) {
            assert_eq!(found.loss.to_bits(), expected.loss.to_bits(), "{transport}");
            assert_eq!(found.dropped_tokens, expected.dropped_tokens, "{transport}");
        }
    }
}
