//! A running run allocates nothing and uses no more memory in total than its plan states. One test,
//! because the counter counts for the whole process.

mod common;

use common::*;
use paceline_exec::{IterationReport, TrainOptions, train};
use paceline_plan::DType;
use paceline_plan::strategy::{Recompute, Strategy};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;
use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Number of allocations between the reports of the third iteration and of iteration `last`.
fn asked(strategy: &Strategy, threads: usize, last: u32) -> usize {
    let plan = plan(&tiny_gpt(true), strategy);
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
    let outcome = train(&plan, &options, &mut report).expect("a sound plan");
    if let Some(peak) = outcome.peak_bytes {
        for (peak, planned) in peak.iter().zip(&outcome.arena_bytes) {
            assert!(*peak <= planned + planned / 10 + (64 << 20), "{peak} of {planned} planned");
        }
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
        let fewest = (0..3).map(|_| asked(&strategy, threads, 12)).min();
        assert_eq!(fewest, Some(0), "{name}");
    }
    // Replicas retain the buffers of received messages, four per rank, and may allocate another
    // when more messages are in flight than ever before. That does not depend on the length of a
    // run.
    let replicas = Strategy { dp: 2, ..one };
    let (short, long) = (asked(&replicas, 1, 12), asked(&replicas, 1, 200));
    assert!(short <= 8 && long <= 8, "{short} times in 9 iterations, {long} in 197");
}
