//! Every layout gives the same losses.

use crate::common::*;
use paceline_exec::{TrainOptions, train};
use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, SummationOrder};
use paceline_plan::model::{Model, ModelDims};
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{OptimizerKind, Recompute, Split, Strategy, Sync, Zero};
use paceline_plan::units::Bytes;
use std::num::NonZeroUsize;

const INTERLEAVED: ScheduleKind = ScheduleKind::Interleaved { chunks: 2 };
const ZERO_BUBBLE: ScheduleKind = ScheduleKind::ZbH1 { chunks: 1 };

/// Eight samples per iteration, one per microbatch, four leaves.
fn one() -> Strategy {
    strategy(8, 1, 4)
}

#[test]
fn replicas_give_the_same_bits() {
    for model in [tiny_gpt(true), tiny_gpt(false), tiny_llama(), tiny_mlp()] {
        let layouts = [
            ("dp 2", Strategy { dp: 2, ..one() }),
            ("dp 4", Strategy { dp: 4, ..one() }),
            ("dp 2, small buckets", Strategy { dp: 2, bucket: Bytes(1), ..one() }),
            ("dp 4, no overlap", Strategy { dp: 4, overlap: false, ..one() }),
            ("dp 4, direct", Strategy { dp: 4, collective: Algorithm::Direct, ..one() }),
        ];
        assert_same_bits(&model, &one(), &layouts);
    }
}

#[test]
fn pipelines_give_the_same_bits() {
    let schedules = [ScheduleKind::GPipe, ScheduleKind::OneFOneB, INTERLEAVED];
    for model in [tiny_gpt(true), tiny_gpt(false), tiny_llama()] {
        for schedule in schedules {
            let pipe = Strategy { schedule, ..one() };
            let mut layouts = vec![
                ("pp 2", Strategy { pp: 2, ..pipe.clone() }),
                ("pp 2, no overlap", Strategy { pp: 2, overlap: false, ..pipe.clone() }),
                ("pp 2, dp 2", Strategy { pp: 2, dp: 2, ..pipe.clone() }),
            ];
            if schedule.chunks() == 1 {
                let split = Split::At(vec![1]);
                layouts.push(("pp 2, cut early", Strategy { pp: 2, split, ..pipe.clone() }));
                layouts.push(("pp 4", Strategy { pp: 4, ..pipe }));
            }
            assert_same_bits(&model, &one(), &layouts);
        }
    }
    assert_same_bits(&tiny_mlp(), &one(), &[("pp 4", Strategy { pp: 4, ..one() })]);
}

/// A split backward pass sums the same terms as a whole one, in the same order.
#[test]
fn zero_bubble_pipelines_give_the_same_bits() {
    let schedules = [ZERO_BUBBLE, ScheduleKind::ZbH1 { chunks: 2 }, ScheduleKind::DualPipeV];
    // With one leaf, norm gradients are in the input half; with several, in the weight half.
    for one in [strategy(8, 1, 1), one()] {
        for model in [tiny_gpt(true), tiny_gpt(false), tiny_llama()] {
            for schedule in schedules {
                let pipe = Strategy { schedule, pp: 2, ..one.clone() };
                let again = Recompute::Full;
                let mut layouts = vec![
                    ("pp 2", pipe.clone()),
                    ("pp 2, no overlap", Strategy { overlap: false, ..pipe.clone() }),
                    ("pp 2, full", Strategy { recompute: again, ..pipe.clone() }),
                ];
                if one.leaves > 1 {
                    let dealt = Strategy { dp: 2, zero: Zero::Parameters, ..pipe.clone() };
                    layouts.push(("pp 2, dp 2, zero 3", dealt));
                }
                if schedule.chunks() == 1 {
                    layouts.push(("pp 4", Strategy { pp: 4, ..pipe }));
                }
                assert_same_bits(&model, &one, &layouts);
            }
        }
    }
}

#[test]
fn zero_gives_the_same_bits() {
    for model in [tiny_gpt(true), tiny_llama()] {
        for zero in [Zero::Optimizer, Zero::Gradients, Zero::Parameters] {
            let dealt = Strategy { zero, ..one() };
            let layouts = [
                ("dp 2", Strategy { dp: 2, ..dealt.clone() }),
                ("dp 4", Strategy { dp: 4, ..dealt.clone() }),
                ("dp 2, small buckets", Strategy { dp: 2, bucket: Bytes(1), ..dealt.clone() }),
                ("dp 2, no overlap", Strategy { dp: 2, overlap: false, ..dealt.clone() }),
                ("dp 2, pp 2", Strategy { dp: 2, pp: 2, ..dealt.clone() }),
            ];
            assert_same_bits(&model, &one(), &layouts);
            // One microbatch per replica: gradients are reduced as soon as they are available.
            let single = strategy(4, 1, 4);
            let layouts = [
                ("dp 4, one microbatch", Strategy { dp: 4, zero, ..single.clone() }),
                (
                    "dp 4, pp 2, one microbatch",
                    Strategy {
                        dp: 4,
                        pp: 2,
                        zero,
                        schedule: ScheduleKind::GPipe,
                        ..single.clone()
                    },
                ),
            ];
            assert_same_bits(&model, &single, &layouts);
        }
    }
}

#[test]
fn recomputation_gives_the_same_bits() {
    for model in [tiny_gpt(true), tiny_llama(), tiny_mlp()] {
        for recompute in [
            Recompute::Selective,
            Recompute::SelectiveOp,
            Recompute::Full,
            Recompute::FullOf(1),
            Recompute::FullForward,
        ] {
            let again = Strategy { recompute, ..one() };
            let layouts = [
                ("one rank", again.clone()),
                ("dp 2, pp 2", Strategy { dp: 2, pp: 2, ..again.clone() }),
                ("dp 2, zero 3", Strategy { dp: 2, zero: Zero::Parameters, ..again.clone() }),
            ];
            assert_same_bits(&model, &one(), &layouts);
        }
    }
}

#[test]
fn servers_give_the_same_bits() {
    for model in [tiny_gpt(true), tiny_gpt(false), tiny_mlp()] {
        for servers in [1, 2, 3] {
            let served = Strategy { sync: Sync::Servers(servers), ..one() };
            let layouts = [
                ("served dp 1", served.clone()),
                ("served dp 2", Strategy { dp: 2, ..served.clone() }),
                ("served dp 4", Strategy { dp: 4, overlap: false, ..served.clone() }),
            ];
            assert_same_bits(&model, &one(), &layouts);
        }
    }
}

#[test]
fn any_optimizer_is_cut_anywhere() {
    for optimizer in [OptimizerKind::Sgd, OptimizerKind::Momentum] {
        let one = Strategy { optimizer, ..one() };
        let layouts = [
            ("dp 4, zero 1", Strategy { dp: 4, zero: Zero::Optimizer, ..one.clone() }),
            ("dp 2, zero 3", Strategy { dp: 2, zero: Zero::Parameters, ..one.clone() }),
            ("dp 2, ps:2", Strategy { dp: 2, sync: Sync::Servers(2), ..one.clone() }),
        ];
        assert_same_bits(&tiny_gpt(true), &one, &layouts);
    }
}

/// Model with tensors of several blocks, so that ranks hold shards of them.
fn several_blocks(tied: bool) -> Model {
    let shape = ModelDims { d_model: 64, head_dim: 16, ffn: 128, tied, ..GPT };
    Model::new("small-gpt", shape).expect("sound")
}

/// LAMB and LARS steps depend on the whole tensor, but not on its sharding.
#[test]
fn gauged_tensors_are_cut_anywhere() {
    for optimizer in [OptimizerKind::Lamb, OptimizerKind::Lars] {
        gauged(optimizer);
    }
}

fn gauged(optimizer: OptimizerKind) {
    let one = Strategy { optimizer, ..one() };
    let zero = |zero, dp, pp| Strategy { zero, dp, pp, ..one.clone() };
    let layouts = [
        ("dp 2", Strategy { dp: 2, ..one.clone() }),
        ("dp 4, zero 1", zero(Zero::Optimizer, 4, 1)),
        ("dp 2, zero 2", zero(Zero::Gradients, 2, 1)),
        ("dp 2, zero 3", zero(Zero::Parameters, 2, 1)),
        ("dp 2, pp 2, zero 1", zero(Zero::Optimizer, 2, 2)),
        ("pp 4", Strategy { pp: 4, ..one.clone() }),
        ("dp 2, ps:3", Strategy { dp: 2, sync: Sync::Servers(3), ..one.clone() }),
    ];
    let cut = [
        ("tp 2", Strategy { tp: 2, ..one.clone() }),
        ("tp 2, sp, dp 2, zero 3", Strategy { tp: 2, sp: true, ..zero(Zero::Parameters, 2, 1) }),
    ];
    for tied in [true, false] {
        assert_same_bits(&several_blocks(tied), &one, &layouts);
        assert_close(&several_blocks(tied), &one, 1e-4, &cut);
    }
    let half = Strategy { dtype: DType::Bf16, ..one.clone() };
    let dealt = Strategy { dp: 2, zero: Zero::Optimizer, ..half.clone() };
    assert_same_bits(&several_blocks(true), &half, &[("bf16, dp 2, zero 1", dealt)]);
}

/// LAMB learns: from the initial loss, most of the way that AdamW goes. Its rate is relative to a
/// tensor's norm, so it needs other rates than AdamW.
#[test]
fn gauged_steps_learn() {
    let learnt = |optimizer, lr| {
        let strategy = Strategy { optimizer, ..strategy(32, 32, 1) };
        let options = TrainOptions { lr, clip: Some(1.0), ..options(150) };
        let outcome = train(&plan(&several_blocks(true), &strategy), &options, &mut |_| {});
        let losses: Vec<f32> = outcome.expect("sound").iterations.iter().map(|i| i.loss).collect();
        losses[0] - losses[140..].iter().sum::<f32>() / 10.0
    };
    let (lamb, adamw) = (learnt(OptimizerKind::Lamb, 0.02), learnt(OptimizerKind::AdamW, 0.01));
    assert!(adamw > 2.0 && lamb > 0.8 * adamw, "{lamb} of {adamw}");
}

/// A single rank cannot have three leaves, but servers and replicas sum them in one order.
#[test]
fn three_replicas_agree_with_servers() {
    let three = Strategy { dp: 3, ..strategy(6, 1, 3) };
    let layouts = [
        ("ps:1", Strategy { sync: Sync::Servers(1), ..three.clone() }),
        ("ps:2", Strategy { sync: Sync::Servers(2), ..three.clone() }),
        ("zero 1", Strategy { zero: Zero::Optimizer, ..three.clone() }),
        ("zero 3", Strategy { zero: Zero::Parameters, ..three.clone() }),
        ("pp 2", Strategy { pp: 2, ..three.clone() }),
    ];
    assert_same_bits(&tiny_gpt(true), &three, &layouts);
}

/// Leaves fix the order of summation. The microbatch size does not change the terms, but changes
/// the shapes of the GEMMs.
#[test]
fn accumulation_depends_on_leaves_alone() {
    let one = strategy(8, 2, 1);
    let layouts = [
        ("pp 2", Strategy { pp: 2, ..one.clone() }),
        ("pp 4, gpipe", Strategy { pp: 4, schedule: ScheduleKind::GPipe, ..one.clone() }),
    ];
    assert_same_bits(&tiny_gpt(true), &one, &layouts);
    let close = [("one sample a microbatch", strategy(8, 1, 1)), ("eight", strategy(8, 8, 1))];
    assert_close(&tiny_gpt(true), &one, 1e-5, &close);
}

#[test]
fn tensor_parallelism_is_close() {
    for model in [tiny_gpt(true), tiny_gpt(false), tiny_llama(), tiny_mlp()] {
        let layouts = [
            ("tp 2", Strategy { tp: 2, ..one() }),
            ("tp 2, no overlap", Strategy { tp: 2, overlap: false, ..one() }),
            ("tp 2, sp", Strategy { tp: 2, sp: true, ..one() }),
            ("tp 2, sp, no overlap", Strategy { tp: 2, sp: true, overlap: false, ..one() }),
            (
                "tp 2, sp, full recomputation",
                Strategy { tp: 2, sp: true, recompute: Recompute::Full, ..one() },
            ),
            (
                "tp 2, selective recomputation",
                Strategy { tp: 2, recompute: Recompute::Selective, ..one() },
            ),
        ];
        assert_close(&model, &one(), 1e-5, &layouts);
    }
    let layouts = [
        ("tp 4", Strategy { tp: 4, ..one() }),
        ("tp 4, sp", Strategy { tp: 4, sp: true, ..one() }),
    ];
    assert_close(&tiny_gpt(true), &one(), 1e-5, &layouts);
}

/// Ring attention passes around the ranks that share a sequence.
#[test]
fn context_parallelism_is_close() {
    let one = one();
    for model in [tiny_gpt(true), tiny_gpt(false), tiny_llama()] {
        let layouts = [
            ("cp 2", Strategy { cp: 2, ..one.clone() }),
            ("cp 4", Strategy { cp: 4, ..one.clone() }),
            ("cp 2, no overlap", Strategy { cp: 2, overlap: false, ..one.clone() }),
            ("cp 2, selective", Strategy { cp: 2, recompute: Recompute::Selective, ..one.clone() }),
            ("cp 2, full", Strategy { cp: 2, recompute: Recompute::Full, ..one.clone() }),
            (
                "cp 2, dp 2, zero 3",
                Strategy { cp: 2, dp: 2, zero: Zero::Parameters, ..one.clone() },
            ),
            ("cp 2, tp 2, sp", Strategy { cp: 2, tp: 2, sp: true, ..one.clone() }),
            ("cp 2, pp 2", Strategy { cp: 2, pp: 2, ..one.clone() }),
            (
                "cp 4, pp 2, zero bubble",
                Strategy { cp: 4, pp: 2, schedule: ZERO_BUBBLE, ..one.clone() },
            ),
        ];
        assert_close(&model, &one, 1e-4, &layouts);
    }
}

/// Vocabularies of 41 on 2 and 4 ranks, and of 5 on 4, where the last rank holds only padding.
#[test]
fn an_uneven_vocabulary_is_padded() {
    for (vocab, tp) in [(41, 2), (41, 4), (5, 4)] {
        for tied in [true, false] {
            let model = gpt_of(vocab, tied);
            let layouts = [
                ("tp", Strategy { tp, ..one() }),
                (
                    "tp, sp, dp 2, zero 1",
                    Strategy { tp, sp: true, dp: 2, zero: Zero::Optimizer, ..one() },
                ),
            ];
            assert_close(&model, &one(), 1e-5, &layouts);
        }
    }
}

#[test]
fn free_order_is_close() {
    let free = Strategy { order: SummationOrder::Free, leaves: 1, ..one() };
    for collective in [Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::Direct] {
        let layouts = [
            ("dp 2", Strategy { dp: 2, collective, ..free.clone() }),
            ("dp 4", Strategy { dp: 4, collective, ..free.clone() }),
            ("dp 4, zero 1", Strategy { dp: 4, collective, zero: Zero::Optimizer, ..free.clone() }),
            ("dp 2, zero 2", Strategy { dp: 2, collective, zero: Zero::Gradients, ..free.clone() }),
            (
                "dp 2, zero 3",
                Strategy { dp: 2, collective, zero: Zero::Parameters, ..free.clone() },
            ),
            (
                "dp 2, zero 3, pp 2, gpipe",
                Strategy {
                    dp: 2,
                    pp: 2,
                    collective,
                    zero: Zero::Parameters,
                    schedule: ScheduleKind::GPipe,
                    ..free.clone()
                },
            ),
            (
                "dp 2, zero 3, pp 2, a V",
                Strategy {
                    dp: 2,
                    pp: 2,
                    collective,
                    zero: Zero::Parameters,
                    schedule: ScheduleKind::DualPipeV,
                    ..free.clone()
                },
            ),
        ];
        assert_close(&tiny_gpt(true), &one(), 1e-5, &layouts);
        assert_close(&tiny_gpt(false), &one(), 1e-5, &layouts);
    }
}

#[test]
fn products_of_everything() {
    let cube = Strategy { dp: 2, tp: 2, pp: 2, zero: Zero::Optimizer, ..one() };
    let layouts = [
        ("2×2×2", cube.clone()),
        ("2×2×2, sp", Strategy { sp: true, ..cube.clone() }),
        ("2×2×2, sp, zero 3", Strategy { sp: true, zero: Zero::Parameters, ..cube.clone() }),
        (
            "2×2×2, interleaved, selective",
            Strategy { schedule: INTERLEAVED, recompute: Recompute::Selective, ..cube.clone() },
        ),
        ("2×2×2, sp, zero bubble", Strategy { sp: true, schedule: ZERO_BUBBLE, ..cube.clone() }),
        (
            "2×2×2, sp, a V",
            Strategy { sp: true, schedule: ScheduleKind::DualPipeV, ..cube.clone() },
        ),
        (
            "2×2×2, zero 2, full, gpipe, no overlap",
            Strategy {
                zero: Zero::Gradients,
                recompute: Recompute::Full,
                schedule: ScheduleKind::GPipe,
                overlap: false,
                ..cube.clone()
            },
        ),
    ];
    for model in [tiny_gpt(true), tiny_llama()] {
        assert_close(&model, &one(), 1e-5, &layouts);
    }
    // With the same tensor-parallel degree, everything else is bitwise identical.
    let one = Strategy { tp: 2, ..one() };
    assert_same_bits(&tiny_gpt(true), &one, &[("2×2×2", cube)]);
}

#[test]
fn threads_give_the_same_bits() {
    for model in [tiny_gpt(true), tiny_llama()] {
        let plan = plan(&model, &Strategy { dp: 2, ..one() });
        let run = |threads: usize| {
            let threads_per_rank = NonZeroUsize::new(threads).expect("not zero");
            let options = TrainOptions { threads_per_rank, ..options(4) };
            let outcome = train(&plan, &options, &mut |_| {}).expect("a sound plan");
            (bits(&outcome), outcome.parameters)
        };
        let alone = run(1);
        assert!(run(2) == alone, "two threads differ from one");
        assert!(run(3) == alone, "three threads differ from one");
    }
}
