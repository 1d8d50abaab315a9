//! A running run allocates nothing and uses no more memory in total than its plan states. One test,
//! because the counter counts for the whole process.

mod common;

use common::wires::train_reporting;
use common::*;
use paceline_exec::{IterationReport, TrainOptions};
use paceline_plan::DType;
use paceline_plan::collective::Fabric;
use paceline_plan::lower::lower_on;
use paceline_plan::program::Plan;
use paceline_plan::strategy::{Recompute, Strategy, Zero};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;
use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Number of allocations between the reports of the third iteration and of iteration `last`.
fn asked(plan: &Plan, transport: &str, threads: usize, last: u32) -> usize {
    let threads_per_rank = NonZeroUsize::new(threads).expect("not zero");
    let options = TrainOptions { threads_per_rank, keep_parameters: false, ..options(100_000) };
    let (mut first, mut asked) = (0, None);
    let mut report = |i: &IterationReport| {
        let stats = ALLOCATOR.stats();
        let so_far = stats.allocations + stats.reallocations;
        if i.iteration == 3 {
            first = so_far;
        } else if i.iteration == last {
            asked = Some(so_far - first);
            // Not before: allocations at the end of a run do not count.
            options.stop.store(true, Ordering::Relaxed);
        }
    };
    let outcome = train_reporting(plan, transport, &options, &mut report);
    for (peak, planned) in outcome.peak_bytes.iter().flatten().zip(&outcome.arena_bytes) {
        assert!(*peak <= planned + planned / 10 + (64 << 20), "{peak} of {planned} planned");
    }
    asked.expect("the run went that far")
}

#[test]
fn a_rank_under_way_allocates_nothing() {
    let one = strategy(4, 1, 2);
    for (name, strategy, threads) in [
        ("f32", one.clone(), 1),
        ("two threads", one.clone(), 2),
        ("bf16", Strategy { dtype: DType::Bf16, grad_dtype: DType::Bf16, ..one.clone() }, 1),
        ("f16", Strategy { dtype: DType::F16, ..one.clone() }, 1),
        ("full recomputation", Strategy { recompute: Recompute::Full, ..one.clone() }, 1),
    ] {
        // Other threads of the process may allocate at any time, but not in every run.
        let plan = plan(&tiny_gpt(true), &strategy);
        let fewest = (0..3).map(|_| asked(&plan, "thread", threads, 12)).min();
        assert_eq!(fewest, Some(0), "{name}");
    }
    // Replicas retain the buffers of received messages, four per rank, and may allocate another
    // when more messages are in flight than ever before. That does not depend on the length of a
    // run.
    let replicas = plan(&tiny_gpt(true), &Strategy { dp: 2, ..one.clone() });
    let (short, long) = (asked(&replicas, "thread", 1, 12), asked(&replicas, "thread", 1, 200));
    assert!(short <= 8 && long <= 8, "{short} times in 9 iterations, {long} in 197");

    // Processes, which lend each other vectors or send messages. Theirs grow in the same way.
    let shared = Fabric { shm_domain: Some(2), ..Fabric::unknown() };
    for layout in [
        Strategy { dp: 2, ..one.clone() },
        Strategy { dp: 2, zero: Zero::Parameters, ..one.clone() },
        Strategy { tp: 2, sp: true, ..one.clone() },
        Strategy { pp: 2, ..one },
    ] {
        for fabric in [&shared, &Fabric::unknown()] {
            let plan = lower_on(&tiny_gpt(true), &layout, fabric).expect("sound");
            // Heartbeats of the service threads allocate too, by time.
            let few = |_| asked(&plan, "shm", 1, 43) < 40;
            assert!((0..3).any(few), "an allocation in every iteration of {layout:?}");
        }
    }
}
