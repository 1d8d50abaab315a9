//! Processes that are killed, stopped or cut off, and strangers at the door: every survivor ends
//! soon with an error that names the rank, and nothing is left behind.

use paceline_comm::process::{ProcessOptions, connect};
use paceline_comm::rendezvous::{Hub, HubOptions};
use paceline_comm::{CommError, Tag, Transport};
use paceline_plan::ids::Rank;
use ranks::{DETECTION, HERE, Processes, hub, options, secret, train};
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

mod ranks;

/// A second of detection, and as much again for a machine that has other things to do.
const SOON: Duration = Duration::from_secs(4);

/// Not a test by itself: what the started processes do.
#[test]
fn a_rank() {
    ranks::take_part();
}

/// Does something to rank 2 of four and returns what the others say about it.
fn strike(wires: &str, signal: rustix::process::Signal, victim: u32) -> Vec<String> {
    let hub = hub(4);
    let mut processes = Processes::start(wires, 4, hub.address(), "-");
    // Signs of life say what a rank does, and come five times within the bound.
    std::thread::sleep(DETECTION / 2);
    let began = Instant::now();
    processes.signal(victim, signal);
    let survivors = (0..4).filter(|rank| *rank != victim);
    let said: Vec<_> = survivors.map(|rank| processes.line(rank, "ended: ")).collect();
    assert!(began.elapsed() < SOON, "{wires}: {:?}", began.elapsed());
    let cause = hub.join().unwrap_err();
    assert!(
        matches!(&cause, CommError::Lost { rank, .. } if rank.0 == victim),
        "the launcher's side: {cause}"
    );
    said
}

#[test]
fn a_killed_rank_is_named_at_once_by_all() {
    for wires in ["shm", "tcp", "auto"] {
        for said in strike(wires, rustix::process::Signal::KILL, 2) {
            assert!(said.contains("rank 2 on ") && said.contains("died"), "{wires}: {said}");
            assert!(said.contains("all_reduce of 1000 f32 elements by ring"), "{wires}: {said}");
        }
    }
}

#[test]
fn a_stopped_rank_is_named_within_the_bound() {
    for wires in ["shm", "tcp"] {
        for said in strike(wires, rustix::process::Signal::STOP, 0) {
            assert!(said.contains("rank 0 on ") && said.contains("stopped answering"), "{said}");
            assert!(said.contains("last heard of 1."), "{wires}: {said}");
        }
    }
}

#[test]
fn the_rank_with_the_hub_is_named_too() {
    // The port is free again when the listener is gone; nobody else takes it in between.
    for (signal, how) in
        [(rustix::process::Signal::KILL, "died"), (rustix::process::Signal::STOP, "stopped")]
    {
        let at = std::net::TcpListener::bind(HERE).unwrap().local_addr().unwrap();
        let mut processes = Processes::start("shm", 3, at, "hub-in-0");
        let began = Instant::now();
        processes.signal(0, signal);
        for rank in [1, 2] {
            let said = processes.line(rank, "ended: ");
            assert!(said.contains("rank 0 on ") && said.contains(how), "{said}");
            let record = processes.line(rank, "record: ");
            assert!(record.contains("sent to rank") && record.contains("all_reduce"), "{record}");
        }
        assert!(began.elapsed() < SOON, "{how}: {:?}", began.elapsed());
    }
}

#[test]
fn strangers_at_the_door_change_nothing() {
    let hub = hub(3);
    let at = hub.address();
    let garbage = std::thread::spawn(move || {
        for i in 0..60u8 {
            let Ok(mut stream) = TcpStream::connect(at) else { return };
            let said = vec![i.wrapping_mul(37); usize::from(i) * 50];
            let _ = stream.write_all(&said);
            let _ = stream.write_all(b"PACELINE\x02\0\0\0");
            if i % 3 == 0 {
                std::mem::forget(stream);
            }
        }
    });
    let mut processes = Processes::start("tcp", 3, at, "-");
    garbage.join().unwrap();
    processes.signal(1, rustix::process::Signal::KILL);
    assert!(processes.line(0, "ended: ").contains("rank 1 on"));
    assert!(matches!(hub.join(), Err(CommError::Lost { rank: Rank(1), .. })));
}

/// Ranks of one process: enough where nobody has to die.
fn together<R: Send>(
    world: u32,
    change: impl Fn(&mut ProcessOptions) + Sync,
    body: impl Fn(Result<paceline_comm::process::ProcessTransport, CommError>) -> R + Sync,
) -> (Vec<R>, Result<(), CommError>) {
    let hub = hub(world);
    let at = hub.address();
    let outcomes = std::thread::scope(|scope| {
        let (change, body) = (&change, &body);
        let start = |rank| {
            scope.spawn(move || {
                let mut options = options("auto", rank, world, at);
                change(&mut options);
                body(connect(&options))
            })
        };
        let threads: Vec<_> = (0..world).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    (outcomes, hub.join())
}

#[test]
fn ranks_with_different_plans_do_not_start() {
    let change = |options: &mut ProcessOptions| {
        let plan = if options.rank == Rank(1) { "9f3c" } else { "a001" };
        options.facts.insert("plan".into(), plan.into());
        options.facts.insert("model".into(), "gpt2".into());
        options.host = Some("somewhere".into());
    };
    let (outcomes, cause) = together(3, change, |transport| transport.map(drop).unwrap_err());
    let cause = cause.unwrap_err();
    for error in outcomes {
        // Whoever came after the end finds nobody to talk to.
        let text = error.to_string();
        let gone = text.contains("cannot connect") || text.contains("gone");
        assert!(error == cause || gone, "{text}");
    }
    let text = cause.to_string();
    assert!(text.starts_with("ranks disagree about the plan: rank "), "{text}");
    assert!(text.contains("'9f3c'") && text.contains("'a001'"), "{text}");
}

#[test]
fn a_missing_rank_is_named() {
    let hub = Hub::start(HubOptions {
        listen: HERE,
        secret: secret(),
        world: 3,
        in_rank: None,
        join: Duration::from_millis(300),
        detection: DETECTION,
    })
    .unwrap();
    let mut options = options("shm", 1, 3, hub.address());
    options.join = Duration::from_secs(5);
    let error = connect(&options).map(drop).unwrap_err().to_string();
    assert_eq!(error, "ranks 0, 2 of 3 did not come within 0.3 s");
    assert_eq!(hub.join().unwrap_err().to_string(), error);
}

#[test]
fn an_abort_reaches_all_with_its_reason() {
    let body = |transport: Result<_, _>| {
        let mut transport: paceline_comm::process::ProcessTransport = transport.unwrap();
        if transport.rank() == Rank(1) {
            train(&mut transport, 5).unwrap();
            transport.abort("iteration 7, F1.2: loss is not a number");
        }
        train(&mut transport, u32::MAX).unwrap_err().to_string()
    };
    let (outcomes, cause) = together(4, |_| {}, body);
    for said in outcomes.iter().chain([&cause.unwrap_err().to_string()]) {
        assert_eq!(said, "rank 1 failed: iteration 7, F1.2: loss is not a number");
    }
}

#[test]
fn who_leaves_early_is_missed_and_its_messages_still_arrive() {
    let body = |transport: Result<_, _>| {
        let mut transport: paceline_comm::process::ProcessTransport = transport.unwrap();
        let large = vec![1.0; 1 << 20];
        let tag = Tag::new(4, 0);
        match transport.rank() {
            Rank(2) => {
                for to in [Rank(0), Rank(1)] {
                    paceline_comm::point::send(&mut transport, to, tag, &large).unwrap();
                }
                Ok(())
            }
            _ => {
                let mut data = vec![0.0; 1 << 20];
                let patience = Duration::from_secs(5);
                let transport: &mut dyn Transport = &mut transport;
                paceline_comm::point::recv(transport, Rank(2), tag, &mut data, patience).unwrap();
                assert_eq!(data, large);
                paceline_comm::point::recv(transport, Rank(2), tag, &mut data, patience)
            }
        }
    };
    let (outcomes, cause) = together(3, |_| {}, body);
    assert_eq!(outcomes[2], Ok(()));
    for (rank, outcome) in (0..).map(Rank).zip(&outcomes[..2]) {
        assert_eq!(*outcome, Err(CommError::Departed { rank, peer: Rank(2) }));
    }
    assert_eq!(cause, Ok(()));
}

#[test]
fn nothing_stays_open_after_a_world() {
    let count = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = || {
        let text = std::fs::read_to_string("/proc/self/maps").unwrap();
        text.lines().filter(|line| line.contains("memfd:paceline")).count()
    };
    let run = || {
        let (outcomes, cause) = together(
            3,
            |_| {},
            |transport| {
                let mut transport = transport.unwrap();
                train(&mut transport, 3)
            },
        );
        assert_eq!((outcomes, cause), (vec![Ok(()); 3], Ok(())));
    };
    // Other tests of this process open and close descriptors meanwhile: look until it is quiet.
    let before = count();
    (0..5).for_each(|_| run());
    let end = Instant::now() + Duration::from_secs(10);
    while (count() > before + 4 || maps() > 0) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(maps(), 0);
    assert!(count() <= before + 4, "{} descriptors before, {} after", before, count());
}
