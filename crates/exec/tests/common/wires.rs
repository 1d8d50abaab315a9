//! Runs of a plan over the wires of processes.

use paceline_comm::Secret;
use paceline_comm::process::{ProcessOptions, Wires, connect};
use paceline_comm::rendezvous::{Hub, HubOptions};
use paceline_exec::{Outcome, TrainOptions, take_part, train};
use paceline_plan::ids::Rank;
use paceline_plan::program::Plan;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(30);

/// Trains over a transport, by its word on the command line. Ranks are threads here, whose wires are
/// those of processes.
pub(crate) fn train_over(plan: &Plan, transport: &str, options: &TrainOptions) -> Outcome {
    let wires = match transport {
        "thread" => return train(plan, options, &mut |_| {}).expect("a sound plan"),
        "shm" => Wires::SharedMemory,
        _ => Wires::Tcp,
    };
    let (world, secret) = (plan.mesh.world(), Secret::random().expect("random bytes"));
    let hub = Hub::start(HubOptions {
        listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        secret: secret.clone(),
        world,
        in_rank: None,
        join: PATIENCE,
        detection: PATIENCE,
    })
    .expect("a hub");
    let address = hub.address();
    let outcome = std::thread::scope(|scope| {
        let rank = |rank| {
            let mut join = ProcessOptions::new(Rank(rank), world, address, secret.clone());
            (join.hub_in_rank_0, join.wires) = (false, wires);
            scope.spawn(move || {
                let mut wires = connect(&join).expect("wires");
                take_part(plan, options, &mut wires, &mut |_| {}).expect("a sound plan")
            })
        };
        let ranks: Vec<_> = (0..world).map(rank).collect();
        let mut ends = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
        let first = ends.next().flatten();
        assert!(ends.all(|end| end.is_none()), "rank 0 alone has the outcome");
        first.expect("rank 0 has the outcome")
    });
    hub.join().expect("a quiet end");
    outcome
}
