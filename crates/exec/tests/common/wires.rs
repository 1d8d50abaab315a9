//! Runs a plan over the transports of processes.

use paceline_comm::process::{ProcessOptions, connect};
use paceline_comm::rendezvous::{RendezvousOptions, RendezvousServer};
use paceline_comm::{Secret, TransportKind};
use paceline_exec::{Outcome, TrainOptions, run_process_rank, train};
use paceline_plan::collective::Fabric;
use paceline_plan::ids::Rank;
use paceline_plan::program::Plan;
use std::net::{Ipv4Addr, SocketAddr};
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
    let (world, secret) = (plan.mesh.world(), Secret::random().expect("random bytes"));
    let rendezvous = RendezvousServer::start(RendezvousOptions {
        listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        secret: secret.clone(),
        world,
        in_rank: None,
        join: TIMEOUT,
        heartbeat_timeout: TIMEOUT,
    })
    .expect("a rendezvous server");
    let address = rendezvous.address();
    let outcome = std::thread::scope(|scope| {
        let rank = |rank| {
            let mut join = ProcessOptions::new(Rank(rank), world, address, secret.clone());
            (join.rendezvous_in_rank_0, join.transport) = (false, wires);
            scope.spawn(move || {
                let mut wires = connect(&join).expect("wires");
                run_process_rank(plan, options, &mut wires, &mut |_| {}).expect("a sound plan")
            })
        };
        let ranks: Vec<_> = (0..world).map(rank).collect();
        let mut ends = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
        let first = ends.next().flatten();
        assert!(ends.all(|end| end.is_none()), "rank 0 alone has the outcome");
        first.expect("rank 0 has the outcome")
    });
    rendezvous.join().expect("a quiet end");
    outcome
}
