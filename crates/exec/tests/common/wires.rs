//! Runs a plan over the transports of processes.

use paceline_comm::{LocalWorld, TransportKind};
use paceline_exec::{IterationReport, Outcome, TrainOptions, run_process_rank, train};
use paceline_plan::collective::Fabric;
use paceline_plan::ids::Rank;
use paceline_plan::program::Plan;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(30);

/// Facts of a fabric whose ranks are joined by a transport, by its name on the command line.
pub(crate) fn fabric(transport: &str) -> Fabric {
    let shm_domain = (transport == "shm").then_some(u64::MAX);
    Fabric { shm_domain, ..Fabric::unknown() }
}

/// Trains over a transport, given by its command-line name. Ranks are threads here, but use the
/// transports of processes.
pub(crate) fn train_over(plan: &Plan, transport: &str, options: &TrainOptions) -> Outcome {
    train_reporting(plan, transport, options, &mut |_| {})
}

/// Trains like [`train_over`]; rank 0 calls `report` for every iteration.
pub(crate) fn train_reporting(
    plan: &Plan,
    transport: &str,
    options: &TrainOptions,
    report: &mut (dyn FnMut(&IterationReport) + Send),
) -> Outcome {
    let wires = match transport {
        "thread" => return train(plan, options, report).expect("a sound plan"),
        "shm" => TransportKind::Shm,
        _ => TransportKind::Tcp,
    };
    let ranks = plan.mesh.world();
    let world = LocalWorld::new(wires, ranks, TIMEOUT).expect("a rendezvous server");
    let outcome = std::thread::scope(|scope| {
        let world = &world;
        let mut report = Some(report);
        let rank = |rank| {
            let mut report = report.take();
            scope.spawn(move || {
                let mut wires = world.connect(Rank(rank)).expect("wires");
                let mut report = |done: &IterationReport| {
                    report.iter_mut().for_each(|report| report(done));
                };
                run_process_rank(plan, options, &mut *wires, &mut report).expect("a sound plan")
            })
        };
        let ranks: Vec<_> = (0..ranks).map(rank).collect();
        let mut ends = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
        let first = ends.next().flatten();
        assert!(ends.all(|end| end.is_none()), "rank 0 alone has the outcome");
        first.expect("rank 0 has the outcome")
    });
    world.join().expect("a quiet end");
    outcome
}
