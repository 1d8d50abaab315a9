//! Hogwild: threads share one set of weights and update it without locks. They learn, report
//! staleness, and save the weights they leave; a single thread trains as usual.

use crate::common::{bits, options, plan, staleness, strategy, tiny_gpt, tiny_llama};
use paceline_exec::checkpoint::{Checkpoint, SaveOptions};
use paceline_exec::{Staleness, Start, Straggler, TrainOptions, train};
use paceline_plan::collective::SummationOrder;
use paceline_plan::strategy::{OptimizerKind, Strategy, Sync};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Replicas of two samples each.
fn sharing(dp: u32, optimizer: OptimizerKind) -> Strategy {
    let (sync, order) = (Sync::Hogwild, SummationOrder::Free);
    Strategy { dp, sync, order, optimizer, ..strategy(2 * u64::from(dp), 2, dp) }
}

const OPTIMIZERS: [OptimizerKind; 3] =
    [OptimizerKind::Sgd, OptimizerKind::Momentum, OptimizerKind::AdamW];

#[test]
fn one_rank_alone_trains_to_the_bit_as_without_sharing() {
    for model in [tiny_gpt(true), tiny_llama()] {
        for optimizer in OPTIMIZERS {
            let layout = sharing(1, optimizer);
            let plain = Strategy { sync: Sync::AllReduce, ..layout.clone() };
            let two = NonZeroUsize::new(2).unwrap();
            let options = TrainOptions { weight_decay: 0.1, threads_per_rank: two, ..options(8) };
            let expected = train(&plan(&model, &plain), &options, &mut |_| {}).unwrap();
            let found = train(&plan(&model, &layout), &options, &mut |_| {}).unwrap();
            assert_eq!(bits(&found), bits(&expected), "{optimizer}");
            assert_eq!(found.parameters, expected.parameters, "{optimizer}");
            let Staleness { mean, max, max_lead: ahead, histogram } = staleness(&found);
            assert_eq!((mean, max, ahead), (0.0, 0, 0), "{optimizer}");
            assert!(histogram[0] > 0 && histogram[1..].iter().all(|n| *n == 0));
        }
    }
}

#[test]
fn threads_that_race_for_the_weights_learn_all_the_same() {
    let model = tiny_gpt(true);
    // SGD and momentum are slow without second moments.
    let runs = [(0.5, 300), (0.05, 300), (3e-3, 150)];
    for (optimizer, (lr, count)) in OPTIMIZERS.into_iter().zip(runs) {
        let options = TrainOptions { lr, keep_parameters: false, ..options(count) };
        let end = |layout: &Strategy| {
            let outcome = train(&plan(&model, layout), &options, &mut |_| {}).unwrap();
            let numbers: Vec<u32> = outcome.iterations.iter().map(|i| i.iteration).collect();
            assert_eq!(numbers, (1..=count).collect::<Vec<u32>>());
            let last = &outcome.iterations[count as usize - 40..];
            let end = last.iter().map(|i| i.loss).sum::<f32>() / 40.0;
            (outcome.iterations[0].loss, end, outcome)
        };
        let layout = sharing(3, optimizer);
        let (first, waited, _) = end(&Strategy { sync: Sync::AllReduce, ..layout.clone() });
        let (_, found, outcome) = end(&layout);
        let Staleness { mean, max, .. } = staleness(&outcome);
        eprintln!("{optimizer}: {first} to {found}, {waited} where all wait; {mean} missed, {max}");
        // Lost and late steps differ from run to run.
        let (shared, together) = (first - found, first - waited);
        assert!(together > 0.15, "{optimizer}: {first} to {waited}");
        assert!(shared > 0.4 * together, "{optimizer}: {first} to {found}, not {waited}");
        assert!(mean <= max as f64, "{mean} {max}");
    }
}

/// While a slow rank computes, others step: its own steps are stale, and it runs fewer iterations.
#[test]
fn a_straggler_misses_what_the_others_do() {
    let slow = Some(Straggler { rank: 1, factor: 20.0 });
    let options = TrainOptions { straggler: slow, ..options(40) };
    let layout = sharing(2, OptimizerKind::Sgd);
    let outcome = train(&plan(&tiny_gpt(false), &layout), &options, &mut |_| {}).unwrap();
    let Staleness { max, max_lead: ahead, .. } = staleness(&outcome);
    assert!(max > 0 && ahead > 0, "{max} missed at most, {ahead} ahead");
    assert_eq!(outcome.iterations.len(), 40);
}

/// Ranks synchronise after the last step: the run returns the weights it saved. Any layout resumes
/// from there, and Hogwild resumes from any layout.
#[test]
fn what_is_saved_is_what_the_last_step_left() {
    let folder = std::env::temp_dir().join(format!("paceline-hogwild-{}", std::process::id()));
    let model = tiny_gpt(true);
    let shared = sharing(2, OptimizerKind::AdamW);
    let plain = Strategy { sync: Sync::AllReduce, ..shared.clone() };
    for (first, then) in [(&shared, &plain), (&plain, &shared)] {
        let _ = std::fs::remove_dir_all(&folder);
        let save = SaveOptions {
            directory: folder.clone(),
            every: None,
            keep: 1,
            attempt: 1,
            extra_files: Vec::new(),
        };
        let options = TrainOptions { lr: 3e-3, ..options(60) };
        let saving = TrainOptions { save: Some(save), ..options.clone() };
        let outcome = train(&plan(&model, first), &saving, &mut |_| {}).unwrap();
        let checkpoint = Arc::new(Checkpoint::open(&folder).unwrap());
        assert_eq!(checkpoint.state().iteration, 60);
        // A run without iterations returns the weights it was given.
        let start = Start::Checkpoint(checkpoint);
        let none = TrainOptions { start: start.clone(), ..options.clone() };
        let again = train(&plan(&model, then), &none, &mut |_| {}).unwrap();
        assert_eq!(again.parameters, outcome.parameters, "to {}", then.sync);
        let more = TrainOptions { start, iterations: 100, ..options };
        let resumed = train(&plan(&model, then), &more, &mut |_| {}).unwrap();
        assert_eq!(resumed.iterations.first().map(|i| i.iteration), Some(61));
        let mean = |run: &[paceline_exec::IterationReport]| {
            run.iter().map(|i| i.loss).sum::<f32>() / run.len() as f32
        };
        let (before, after) = (mean(&outcome.iterations[50..]), mean(&resumed.iterations[30..]));
        assert!(after < before, "{} to {}: {before}, {after}", first.sync, then.sync);
    }
    let _ = std::fs::remove_dir_all(&folder);
}

#[test]
fn a_wish_to_stop_ends_the_run_for_all() {
    let stop = Arc::new(AtomicBool::new(false));
    let options = TrainOptions { stop: Arc::clone(&stop), ..options(100_000) };
    let plan = plan(&tiny_gpt(true), &sharing(3, OptimizerKind::Momentum));
    let outcome = train(&plan, &options, &mut |report| {
        if report.iteration == 3 {
            stop.store(true, Ordering::Relaxed);
        }
    })
    .unwrap();
    assert!(outcome.stopped);
    assert!((3..100_000).contains(&outcome.iterations.len()));
}

/// Weights and moments exist once for all ranks; each rank adds a copy and its gradients.
#[test]
fn what_is_shared_is_planned_once() {
    let model = tiny_gpt(true);
    let memory = |dp| plan(&model, &sharing(dp, OptimizerKind::AdamW)).programs[0].memory;
    let plain = Strategy { sync: Sync::AllReduce, ..sharing(1, OptimizerKind::AdamW) };
    let alone = plan(&model, &plain).programs[0].memory;
    for dp in [1, 2, 8] {
        assert_eq!(memory(dp).shared().0, 3 * memory(dp).by_kind[0].0, "weights, two moments");
        assert_eq!(memory(dp).by_kind[..2], alone.by_kind[..2]);
        assert_eq!(memory(dp).by_kind[2].0, 0, "no moments of its own");
    }
    let plan = plan(&model, &sharing(4, OptimizerKind::AdamW));
    let outcome = train(&plan, &options(1), &mut |_| {}).unwrap();
    let (own, shared) = (memory(4).total().0, memory(4).shared().0);
    assert_eq!(outcome.arena_bytes, [own + shared, own, own, own]);
}
