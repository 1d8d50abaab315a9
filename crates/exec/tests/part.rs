//! Ranks that share only a transport give the same result as threads that share a process.

use crate::common::{bits, options, plan, strategy, tiny_gpt};
use paceline_comm::Transport;
use paceline_comm::thread::world;
use paceline_exec::{Outcome, TrainOptions, run_process_rank, train};
use paceline_plan::collective::{Fabric, Library, SummationOrder};
use paceline_plan::ids::Rank;
use paceline_plan::lower::lower_on;
use paceline_plan::program::Plan;
use paceline_plan::strategy::{Strategy, Sync};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Runs every rank as a process rank. Returns rank 0's outcome and the losses reported to it.
fn apart(plan: &Plan, options: &TrainOptions) -> (Outcome, Vec<u32>) {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = world(plan.mesh.world())
            .into_iter()
            .map(|mut wires| {
                // Only the leader's stop flag may count.
                let mut options = options.clone();
                if wires.rank() != Rank(0) {
                    options.stop = Arc::default();
                }
                scope.spawn(move || {
                    let mut told = Vec::new();
                    let part = run_process_rank(plan, &options, &mut wires, &mut |report| {
                        told.push(report.loss.to_bits());
                    });
                    (part.unwrap(), told, wires)
                })
            })
            .collect();
        let mut ends: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert!(ends[1..].iter().all(|(outcome, told, _)| outcome.is_none() && told.is_empty()));
        let (outcome, told, _) = ends.swap_remove(0);
        (outcome.unwrap(), told)
    })
}

#[test]
fn the_bits_are_those_of_threads() {
    let model = tiny_gpt(true);
    for layout in [
        strategy(8, 2, 4),
        Strategy { dp: 2, pp: 2, ..strategy(8, 1, 4) },
        Strategy { tp: 2, pp: 2, ..strategy(8, 1, 4) },
        Strategy { dp: 2, sync: Sync::Servers(2), ..strategy(8, 1, 4) },
    ] {
        let (plan, options) = (plan(&model, &layout), options(5));
        let together = train(&plan, &options, &mut |_| {}).unwrap();
        let (found, told) = apart(&plan, &options);
        assert_eq!(bits(&found), bits(&together), "{layout:?}");
        assert_eq!(told, together.iterations.iter().map(|i| i.loss.to_bits()).collect::<Vec<_>>());
        assert_eq!(found.parameters, together.parameters, "{layout:?}");
        assert_eq!(found.arena_bytes, together.arena_bytes);
        // Every rank's spans have arrived, and the ops are the same.
        let ops = |outcome: &Outcome| {
            let mut ops: Vec<_> = outcome
                .trace
                .spans
                .iter()
                .map(|span| (span.rank, span.iteration, span.op))
                .collect();
            ops.sort_unstable();
            ops.dedup();
            ops
        };
        assert_eq!(ops(&found), ops(&together));
    }
}

#[test]
fn the_leaders_wish_stops_all() {
    let plan = plan(&tiny_gpt(true), &Strategy { dp: 2, ..strategy(8, 1, 2) });
    let options = TrainOptions { iterations: 1000, ..options(1000) };
    let stop = Arc::clone(&options.stop);
    let wish = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(30));
        stop.store(true, Ordering::Relaxed);
    });
    let (outcome, told) = apart(&plan, &options);
    wish.join().unwrap();
    assert!(outcome.stopped && told.len() < 1000, "{} iterations", told.len());
    assert_eq!(told.len(), outcome.iterations.len());
}

/// The plan was made with facts that do not hold here: nothing is replaced, and the reason is named.
#[test]
fn facts_that_do_not_hold_are_refused_by_name() {
    let refusal = |fabric: Fabric, order| {
        let layout = Strategy { dp: 2, order, ..strategy(8, 1, 2) };
        let plan = lower_on(&tiny_gpt(true), &layout, &fabric).unwrap();
        let mut wires = world(2);
        let error = run_process_rank(&plan, &options(3), &mut wires[0], &mut |_| {});
        error.unwrap_err().to_string()
    };
    let shared = Fabric { shm_domain: Some(2), ..Fabric::unknown() };
    let told = refusal(shared, SummationOrder::Canonical);
    assert!(told.contains("between rank 0 and rank 1 in shared memory cannot be run"), "{told}");
    let library = Fabric { library: Some(Library::Mpi), ..Fabric::unknown() };
    let told = refusal(library, SummationOrder::Free);
    assert!(told.contains("by MPI, for which there is no communicator"), "{told}");
}

#[test]
fn a_rank_that_cannot_start_takes_the_others_with_it() {
    let plan = plan(&tiny_gpt(true), &Strategy { dp: 2, ..strategy(8, 1, 2) });
    let mut wires = world(2);
    let (mut second, mut first) = (wires.pop().unwrap(), wires.pop().unwrap());
    let wrong = TrainOptions { lr: f64::NAN, ..options(3) };
    let cause = run_process_rank(&plan, &wrong, &mut second, &mut |_| {}).unwrap_err().to_string();
    assert!(cause.starts_with("--lr is NaN"), "{cause}");
    let echo =
        run_process_rank(&plan, &options(3), &mut first, &mut |_| {}).unwrap_err().to_string();
    assert!(echo.contains("rank 1 failed: --lr is NaN"), "{echo}");
}
