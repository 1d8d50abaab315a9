//! Runs a plan over the transports of processes.

use paceline_comm::{LocalWorld, TransportKind};
use paceline_exec::{Outcome, TrainOptions, run_process_rank, train};
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
    let wires = match transport {
        "thread" => return train(plan, options, &mut |_| {}).expect("a sound plan"),
        "shm" => TransportKind::Shm,
        _ => TransportKind::Tcp,
    };
    let ranks = plan.mesh.world();
    let world = LocalWorld::new(wires, ranks, TIMEOUT).expect("a rendezvous server");
    let outcome = std::thread::scope(|scope| {
        let world = &world;
        let rank = |rank| {
            scope.spawn(move || {
                let mut wires = world.connect(Rank(rank)).expect("wires");
                run_process_rank(plan, options, &mut *wires, &mut |_| {}).expect("a sound plan")
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
