//! Guarantees of the README about layouts, over twenty iterations.

use crate::common::wires::{fabric, train_over};
use crate::common::{bits, options, plan, strategy, tiny_gpt, tiny_llama};
use paceline_exec::{Outcome, TrainOptions, train};
use paceline_plan::collective::{Algorithm, SummationOrder};
use paceline_plan::lower::lower_on;
use paceline_plan::model::Model;
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Recompute, Strategy, Zero};
use std::num::NonZeroUsize;

const ITERATIONS: u32 = 20;

/// Eight samples per iteration, one per microbatch, eight leaves.
fn one() -> Strategy {
    strategy(8, 1, 8)
}

fn run(model: &Model, strategy: &Strategy) -> Outcome {
    let run = train(&plan(model, strategy), &options(ITERATIONS), &mut |_| {});
    run.unwrap_or_else(|error| panic!("{strategy:?}: {error}"))
}

#[test]
fn layouts_keep_every_bit() {
    let dp = |dp, zero| Strategy { dp, zero, ..one() };
    let pp = |pp, schedule| Strategy { pp, schedule, ..one() };
    let layouts = [
        dp(2, Zero::None),
        dp(4, Zero::None),
        dp(8, Zero::None),
        dp(2, Zero::Optimizer),
        dp(8, Zero::Gradients),
        dp(4, Zero::Parameters),
        pp(2, ScheduleKind::GPipe),
        pp(2, ScheduleKind::OneFOneB),
        pp(2, ScheduleKind::Interleaved { chunks: 2 }),
        pp(4, ScheduleKind::OneFOneB),
        pp(2, ScheduleKind::ZbH1 { chunks: 1 }),
        pp(2, ScheduleKind::ZbH1 { chunks: 2 }),
        pp(4, ScheduleKind::ZbH1 { chunks: 1 }),
        pp(2, ScheduleKind::DualPipeV),
        Strategy { dp: 2, ..pp(2, ScheduleKind::DualPipeV) },
        Strategy { recompute: Recompute::Selective, ..one() },
        Strategy { recompute: Recompute::Full, ..one() },
        Strategy { dp: 2, pp: 2, recompute: Recompute::Full, zero: Zero::Gradients, ..one() },
    ];
    for model in [tiny_gpt(true), tiny_llama()] {
        let expected = run(&model, &one());
        assert_eq!(expected.iterations.len(), ITERATIONS as usize);
        for layout in &layouts {
            let found = run(&model, layout);
            assert_eq!(bits(&found), bits(&expected), "{} {layout:?}", model.name());
            assert!(found.parameters == expected.parameters, "{} {layout:?}", model.name());
        }
    }
}

#[test]
fn transports_and_threads_keep_every_bit() {
    let layouts = [
        Strategy { dp: 2, zero: Zero::Parameters, ..one() },
        Strategy { dp: 2, pp: 2, ..one() },
        Strategy { tp: 2, sp: true, ..one() },
    ];
    for layout in layouts {
        let run = |transport: &str, threads: usize| {
            let plan = lower_on(&tiny_gpt(true), &layout, &fabric(transport)).expect("a plan");
            let threads_per_rank = NonZeroUsize::new(threads).expect("not zero");
            let options = TrainOptions { threads_per_rank, ..options(ITERATIONS) };
            let outcome = train_over(&plan, transport, &options);
            (bits(&outcome), outcome.parameters)
        };
        let expected = run("thread", 1);
        for (transport, threads) in [("thread", 2), ("shm", 1), ("shm", 2), ("tcp", 1), ("tcp", 2)]
        {
            let same = run(transport, threads) == expected;
            assert!(same, "{layout:?} over {transport} with {threads} threads");
        }
    }
}

/// Tensor and sequence parallelism and free order change the order of sums, not their terms.
#[test]
fn other_sums_end_within_a_ten_thousandth() {
    let free = Strategy { order: SummationOrder::Free, leaves: 1, ..one() };
    let layouts = [
        Strategy { tp: 2, ..one() },
        Strategy { tp: 4, ..one() },
        Strategy { tp: 2, sp: true, ..one() },
        Strategy { dp: 2, tp: 2, pp: 2, sp: true, zero: Zero::Optimizer, ..one() },
        Strategy { dp: 4, collective: Algorithm::Ring, ..free.clone() },
        Strategy { dp: 8, collective: Algorithm::HalvingDoubling, zero: Zero::Gradients, ..free },
    ];
    let expected = run(&tiny_gpt(true), &one());
    let last = |outcome: &Outcome| outcome.iterations.last().expect("some iterations").loss;
    for layout in &layouts {
        let found = run(&tiny_gpt(true), layout);
        let error = (last(&found) - last(&expected)).abs() / last(&expected);
        assert!(error <= 1e-4, "{layout:?}: {} against {}", last(&found), last(&expected));
    }
}
