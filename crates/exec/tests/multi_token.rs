//! Multi-token prediction: the same losses wherever the model is split.

use crate::common::wires::train_over;
use crate::common::{
    assert_close, assert_same_bits, further, latent_moe, options, plan, run, strategy, tiny_llama,
    tiny_moe,
};
use paceline_plan::collective::SummationOrder;
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Offload, Recompute, Strategy, Sync, Zero};

/// Eight samples per iteration, one per microbatch, four leaves.
fn one() -> Strategy {
    Strategy { expert_buffer_factor: 4.0, ..strategy(8, 1, 4) }
}

/// Layouts that leave every layer and every sum unchanged.
fn same() -> Vec<(&'static str, Strategy)> {
    let pipeline = |pp, schedule| Strategy { pp, schedule, ..one() };
    vec![
        ("dp 2", Strategy { dp: 2, ..one() }),
        ("dp 4, zero 1", Strategy { dp: 4, zero: Zero::Optimizer, ..one() }),
        ("dp 2, zero 2", Strategy { dp: 2, zero: Zero::Gradients, ..one() }),
        ("dp 2, zero 3", Strategy { dp: 2, zero: Zero::Parameters, ..one() }),
        ("full", Strategy { recompute: Recompute::Full, ..one() }),
        ("selective, offload", {
            Strategy { recompute: Recompute::Selective, offload: Offload::All, ..one() }
        }),
        ("pp 2", pipeline(2, ScheduleKind::OneFOneB)),
        ("pp 4, dp 2, zero 3, full", {
            let (zero, recompute) = (Zero::Parameters, Recompute::Full);
            Strategy { dp: 2, zero, recompute, ..pipeline(4, ScheduleKind::GPipe) }
        }),
        ("interleaved", pipeline(2, ScheduleKind::Interleaved { chunks: 2 })),
        ("zero bubble", pipeline(2, ScheduleKind::ZbH1 { chunks: 1 })),
        ("dualpipev", pipeline(2, ScheduleKind::DualPipeV)),
        ("ps:2", Strategy { dp: 2, sync: Sync::Servers(2), ..one() }),
    ]
}

#[test]
fn further_tokens_give_the_same_bits_on_whole_layers() {
    for model in [further(&tiny_llama(), 2, true), further(&latent_moe(), 2, false)] {
        assert_same_bits(&model, &one(), &same());
    }
}

#[test]
fn further_tokens_give_the_same_losses_where_layers_are_cut() {
    let sp = Strategy { tp: 2, sp: true, ..one() };
    let cut = [
        ("tp 2", sp.clone()),
        ("cp 2", Strategy { cp: 2, ..one() }),
        ("pp 2, tp 2, dp 2, ep 2, zero 1", {
            Strategy { pp: 2, dp: 2, ep: 2, zero: Zero::Optimizer, ..sp.clone() }
        }),
        ("dp 2, ep 2, zero 3, free", {
            Strategy { dp: 2, ep: 2, zero: Zero::Parameters, order: SummationOrder::Free, ..one() }
        }),
        ("dp 2, tp 2, full", Strategy { dp: 2, recompute: Recompute::Full, ..sp }),
    ];
    for model in [further(&tiny_moe(), 1, false), further(&latent_moe(), 2, true)] {
        assert_close(&model, &one(), 1e-4, &cut);
    }
    let tensor = ("tp 2", Strategy { tp: 2, ..one() });
    assert_close(&further(&tiny_llama(), 1, false), &one(), 1e-4, &[tensor]);
}

/// Modules train the layers below them: without modules, the same weights learn differently. The
/// modules' own loss improves too.
#[test]
fn modules_are_learnt_and_learnt_from() {
    let (plain, model) = (tiny_llama(), further(&tiny_llama(), 1, false));
    let (without, with) = (run(&plain, &one()), run(&model, &one()));
    assert_eq!(without.iterations[0].loss.to_bits(), with.iterations[0].loss.to_bits());
    assert_ne!(without.iterations[4].loss.to_bits(), with.iterations[4].loss.to_bits());
    let losses: Vec<f32> = with.iterations.iter().filter_map(|i| i.mtp_loss).collect();
    assert!(losses.len() == 5 && losses[4] < losses[0], "{losses:?}");
    assert!(without.iterations.iter().all(|i| i.mtp_loss.is_none()));
}

#[test]
fn losses_of_further_tokens_travel_over_wires() {
    let model = further(&tiny_llama(), 1, false);
    let layout = Strategy { pp: 2, dp: 2, ..one() };
    let expected = run(&model, &layout);
    let found = train_over(&plan(&model, &layout), "shm", &options(5));
    for (found, expected) in found.iterations.iter().zip(&expected.iterations) {
        assert_eq!(found.loss.to_bits(), expected.loss.to_bits());
        assert_eq!(found.mtp_loss, expected.mtp_loss);
    }
}
