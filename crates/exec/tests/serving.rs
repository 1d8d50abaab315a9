//! Asynchronous servers: replicas learn, staleness is reported, the staleness bound holds, and a
//! single replica trains as usual.

use crate::common::wires::train_over;
use crate::common::{bits, options, plan, staleness, strategy, tiny_gpt, tiny_llama};
use paceline_exec::{Outcome, Staleness, Straggler, TrainOptions, train};
use paceline_plan::collective::SummationOrder;
use paceline_plan::strategy::{Strategy, Sync};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Replicas of one sample each that push to servers.
fn served(dp: u32, servers: u32, staleness: Option<u32>) -> Strategy {
    let sync = Sync::Async { servers, staleness };
    Strategy { dp, sync, order: SummationOrder::Free, ..strategy(dp.into(), 1, dp) }
}

#[test]
fn one_replica_trains_as_with_a_server_that_waits() {
    let options = TrainOptions { clip: None, ..options(8) };
    for model in [tiny_gpt(true), tiny_llama()] {
        for servers in [1, 2] {
            let waits = Strategy { sync: Sync::Servers(servers), ..served(1, servers, None) };
            let expected = train(&plan(&model, &waits), &options, &mut |_| {}).unwrap();
            for bound in [None, Some(0), Some(3)] {
                let layout = served(1, servers, bound);
                let found = train(&plan(&model, &layout), &options, &mut |_| {}).unwrap();
                let losses = |outcome: &Outcome| -> Vec<u32> {
                    bits(outcome).iter().map(|[loss, _]| *loss).collect()
                };
                assert_eq!(losses(&found), losses(&expected), "{}", layout.sync);
                assert_eq!(found.parameters, expected.parameters, "{}", layout.sync);
                let Staleness { mean, max, max_lead: ahead, histogram } = staleness(&found);
                assert_eq!((mean, max, ahead), (0.0, 0, 0));
                assert!(histogram[0] > 0 && histogram[1..].iter().all(|n| *n == 0));
            }
        }
    }
}

#[test]
fn replicas_that_wait_for_nobody_learn_all_the_same() {
    let model = tiny_gpt(true);
    let options = TrainOptions { lr: 3e-3, keep_parameters: false, ..options(150) };
    let end = |sync: Sync| {
        let order = SummationOrder::Free;
        let layout = Strategy { dp: 3, sync, order, ..strategy(6, 2, 3) };
        let outcome = train(&plan(&model, &layout), &options, &mut |_| {}).unwrap();
        assert_eq!(outcome.iterations.len(), 150);
        if sync.is_async() {
            // Two others can push between a pull and its push, and more if one is slow.
            let Staleness { mean, max, .. } = staleness(&outcome);
            assert!(mean > 0.0 && mean <= max as f64, "{mean} {max}");
        }
        let last = &outcome.iterations[130..];
        (outcome.iterations[0].loss, last.iter().map(|i| i.loss).sum::<f32>() / 20.0)
    };
    let (first, waited) = end(Sync::AllReduce);
    for sync in ["async-ps:1", "async-ps:2", "ssp:1:1", "ssp:2:3"] {
        let (_, found) = end(sync.parse().unwrap());
        eprintln!("{sync}: {first} to {found}, {waited} where all wait");
        // Stale gradients differ from run to run.
        assert!(found < 0.8 * first && found < 1.3 * waited, "{sync}: {found}, {waited}");
    }
}

#[test]
fn nobody_gets_further_ahead_of_a_straggler_than_the_bound() {
    let model = tiny_gpt(false);
    let slow = Some(Straggler { rank: 1, factor: 8.0 });
    let options = TrainOptions { straggler: slow, keep_parameters: false, ..options(30) };
    for servers in [1, 2] {
        for bound in [0, 1, 4] {
            let layout = served(3, servers, Some(bound));
            let outcome = train(&plan(&model, &layout), &options, &mut |_| {}).unwrap();
            let Staleness { max_lead: ahead, max, .. } = staleness(&outcome);
            assert!(ahead <= bound, "{}: {ahead} ahead", layout.sync);
            // Between a pull and its push, both others are at most `bound` ahead or behind.
            let most = 2 * (2 * u64::from(bound) + 1);
            assert!(max <= most, "{}: {max} updates missed", layout.sync);
        }
    }
}

#[test]
fn processes_come_to_an_end_too() {
    let model = tiny_llama();
    for sync in ["async-ps:2", "ssp:1:1"] {
        let layout = Strategy { sync: sync.parse().unwrap(), ..served(2, 1, None) };
        for transport in ["shm", "tcp"] {
            let outcome = train_over(&plan(&model, &layout), transport, &options(6));
            assert_eq!(outcome.iterations.len(), 6, "{sync} over {transport}");
            let numbers: Vec<u32> = outcome.iterations.iter().map(|i| i.iteration).collect();
            assert_eq!(numbers, [1, 2, 3, 4, 5, 6]);
            assert!(outcome.iterations.iter().all(|i| i.loss.is_finite() && i.grad_norm > 0.0));
            assert!(outcome.parameters.is_some_and(|parameters| !parameters.is_empty()));
        }
    }
}

#[test]
fn a_wish_to_stop_ends_the_run_for_all() {
    let stop = Arc::new(AtomicBool::new(false));
    let options = TrainOptions { stop: Arc::clone(&stop), ..options(100_000) };
    let plan = plan(&tiny_gpt(true), &served(2, 2, None));
    let outcome = train(&plan, &options, &mut |report| {
        if report.iteration == 3 {
            stop.store(true, Ordering::Relaxed);
        }
    })
    .unwrap();
    assert!(outcome.stopped);
    assert!((3..100_000).contains(&outcome.iterations.len()));
}
