//! Randomly generated layouts.

use crate::common::*;
use paceline_plan::collective::SummationOrder;
use paceline_plan::lower::lower;
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Recompute, Split, Strategy as Layout, Sync, Zero};
use paceline_plan::units::Bytes;
use proptest::prelude::*;

fn any_layout() -> impl Strategy<Value = Layout> {
    let axes = (0u32..3, 0u32..2, 0u32..3).prop_map(|(d, t, p)| (1 << d, 1 << t, 1 << p));
    let zero =
        prop::sample::select(vec![Zero::None, Zero::Optimizer, Zero::Gradients, Zero::Parameters]);
    let schedule = prop::sample::select(vec![
        ScheduleKind::GPipe,
        ScheduleKind::OneFOneB,
        ScheduleKind::Interleaved { chunks: 2 },
        ScheduleKind::ZbH1 { chunks: 1 },
        ScheduleKind::ZbH1 { chunks: 2 },
        ScheduleKind::DualPipeV,
    ]);
    let recompute = prop::sample::select(vec![
        Recompute::None,
        Recompute::Selective,
        Recompute::SelectiveOp,
        Recompute::Full,
        Recompute::FullOf(1),
        Recompute::FullForward,
    ]);
    let split = prop::sample::select(vec![Split::Cost, Split::Count]);
    let sync = prop::sample::select(vec![Sync::AllReduce, Sync::AllReduce, Sync::Servers(2)]);
    let bucket = prop::sample::select(vec![1u64, 8 << 10, 25 << 20]);
    let again = (recompute, split);
    (axes, zero, schedule, again, sync, bucket, any::<[bool; 3]>(), 0u32..3).prop_map(
        |((dp, tp, pp), zero, schedule, again, sync, bucket, [sp, overlap, free], more)| {
            let (recompute, split) = again;
            Layout {
                dp,
                tp,
                pp,
                sp,
                zero,
                schedule,
                recompute,
                split,
                sync,
                bucket: Bytes(bucket),
                overlap,
                order: if free { SummationOrder::Free } else { SummationOrder::Canonical },
                leaves: dp << more,
                ..strategy(16, 2, 1)
            }
        },
    )
}

/// Number of random cases: `PROPTEST_CASES`, or few enough for every `cargo test`.
fn cases(few: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(few)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(60),
        max_global_rejects: 200 * cases(60),
        ..Default::default()
    })]
    #[test]
    fn any_layout_trains_as_one_rank_does(layout in any_layout(), which in 0usize..3) {
        let model = [tiny_gpt(true), tiny_gpt(false), tiny_llama()][which].clone();
        prop_assume!(lower(&model, &layout).is_ok());
        let one = strategy(16, 2, layout.leaves);
        prop_assume!(lower(&model, &one).is_ok());
        if layout.tp == 1 && layout.order == SummationOrder::Canonical {
            assert_same_bits(&model, &one, &[("layout", layout)]);
        } else {
            assert_close(&model, &one, 1e-5, &[("layout", layout)]);
        }
    }
}
