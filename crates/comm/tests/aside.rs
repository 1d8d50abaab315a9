//! A message that is queued while another one is requested must end a wait.

use paceline_comm::{LocalWorld, Tag, TransportKind, Wait, point};
use paceline_plan::ids::Rank;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Longer than any wait that ends without news.
const AGES: Duration = Duration::from_secs(30);

/// Two channels that share every connection.
const ASKED_FIRST: Tag = Tag::new(0, 0);
const ASKED_LATER: Tag = Tag::new(64, 0);

/// Rank 1 requests the first message before it is sent. It then requests a second one, never sent,
/// and queues the first on the way.
fn found_on_the_way(wires: TransportKind) {
    let world = LocalWorld::new(wires, 2, AGES).unwrap();
    let ((asked, hear_asked), (sent, hear_sent)) = (mpsc::channel(), mpsc::channel());
    thread::scope(|scope| {
        let world = &world;
        scope.spawn(move || {
            let mut wires = world.connect(Rank(0)).unwrap();
            hear_asked.recv().unwrap();
            point::send(&mut *wires, Rank(1), ASKED_FIRST, &[7.0]).unwrap();
            sent.send(()).unwrap();
            hear_asked.recv().unwrap();
        });
        scope.spawn(move || {
            let mut wires = world.connect(Rank(1)).unwrap();
            assert!(!wires.try_recv(Rank(0), ASKED_FIRST, &mut |_, _| ()).unwrap());
            asked.send(()).unwrap();
            hear_sent.recv().unwrap();
            let began = Instant::now();
            // The message may take a moment to arrive, and a wait may end early.
            let mut found = false;
            while !found && began.elapsed() < AGES {
                assert!(!wires.try_recv(Rank(0), ASKED_LATER, &mut |_, _| ()).unwrap());
                wires.wait(Wait::Spin, AGES).unwrap();
                found = wires.try_recv(Rank(0), ASKED_FIRST, &mut |_, _| ()).unwrap();
            }
            assert!(found && began.elapsed() < AGES / 2, "it slept over a message");
            asked.send(()).unwrap();
        });
    });
    world.join().unwrap();
}

#[test]
fn over_tcp() {
    found_on_the_way(TransportKind::Tcp);
}

#[test]
fn over_shared_memory() {
    found_on_the_way(TransportKind::Shm);
}
