//! A message that was found while somebody looked for another one is not slept over.

use paceline_comm::process::{ProcessOptions, Wires, connect};
use paceline_comm::rendezvous::{Hub, HubOptions};
use paceline_comm::{Secret, Tag, Transport, point};
use paceline_plan::ids::Rank;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Longer than any wait that ends by itself.
const AGES: Duration = Duration::from_secs(30);

/// Two channels that share every connection.
const ASKED_FIRST: Tag = Tag::new(0, 0);
const ASKED_LATER: Tag = Tag::new(64, 0);

/// Rank 1 asks for the first message before it was sent, then for the second, which never comes, and
/// finds the first on the way.
fn found_on_the_way(wires: Wires) {
    let (world, secret) = (2, Secret::random().unwrap());
    let hub = Hub::start(HubOptions {
        listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        secret: secret.clone(),
        world,
        in_rank: None,
        join: AGES,
        detection: AGES,
    })
    .unwrap();
    let join = |rank| {
        let mut join = ProcessOptions::new(Rank(rank), world, hub.address(), secret.clone());
        (join.hub_in_rank_0, join.wires) = (false, wires);
        join
    };
    let (joins, (asked, hear_asked), (sent, hear_sent)) =
        ([join(0), join(1)], mpsc::channel(), mpsc::channel());
    thread::scope(|scope| {
        let [first, second] = &joins;
        scope.spawn(move || {
            let mut wires = connect(first).unwrap();
            hear_asked.recv().unwrap();
            point::send(&mut wires, Rank(1), ASKED_FIRST, &[7.0]).unwrap();
            sent.send(()).unwrap();
            hear_asked.recv().unwrap();
        });
        scope.spawn(move || {
            let mut wires = connect(second).unwrap();
            assert!(wires.try_recv(Rank(0), ASKED_FIRST).unwrap().is_none());
            asked.send(()).unwrap();
            hear_sent.recv().unwrap();
            let began = Instant::now();
            // What was sent may take a moment, and a wait may end early.
            let mut found = None;
            while found.is_none() && began.elapsed() < AGES {
                assert!(wires.try_recv(Rank(0), ASKED_LATER).unwrap().is_none());
                wires.wait(AGES).unwrap();
                found = wires.try_recv(Rank(0), ASKED_FIRST).unwrap();
            }
            assert!(found.is_some() && began.elapsed() < AGES / 2, "it slept over a message");
            asked.send(()).unwrap();
        });
    });
    hub.join().unwrap();
}

#[test]
fn over_tcp() {
    found_on_the_way(Wires::Tcp);
}

#[test]
fn over_shared_memory() {
    found_on_the_way(Wires::SharedMemory);
}
