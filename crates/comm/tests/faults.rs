//! Processes that are killed, stopped or cut off, and unauthenticated connections: every survivor
//! ends with an error that names the rank, and nothing is left behind. The error says how the loss
//! was detected, which is by the connection or the heartbeats, not by an exchange's timeout.

use paceline_comm::process::{ProcessOptions, connect};
use paceline_comm::rendezvous::{RendezvousOptions, RendezvousServer};
use paceline_comm::{CommError, Secret, Tag, Transport, TransportKind};
use paceline_plan::ids::Rank;
use ranks::{HEARTBEAT_TIMEOUT, HERE, Processes, options, rendezvous, secret, train};
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

mod ranks;

/// Not a test: entry point of the started processes.
#[test]
fn a_rank() {
    ranks::take_part();
}

/// Sends `signal` to rank `victim` of four and returns the errors of the others.
fn strike(wires: &str, signal: rustix::process::Signal, victim: u32) -> Vec<String> {
    let rendezvous = rendezvous(4);
    let mut processes = Processes::start(wires, 4, rendezvous.address(), "-");
    // Heartbeats describe a rank's operation and are sent five times per heartbeat timeout.
    std::thread::sleep(HEARTBEAT_TIMEOUT / 2);
    processes.signal(victim, signal);
    let survivors = (0..4).filter(|rank| *rank != victim);
    let said: Vec<_> = survivors.map(|rank| processes.line(rank, "ended: ")).collect();
    let cause = rendezvous.join().unwrap_err();
    assert!(
        matches!(&cause, CommError::PeerLost { rank, .. } if rank.0 == victim),
        "the launcher's side: {cause}"
    );
    said
}

#[test]
fn a_killed_rank_is_named_by_all() {
    for wires in ["shm", "tcp", "auto"] {
        for said in strike(wires, rustix::process::Signal::KILL, 2) {
            assert!(said.contains("rank 2 on ") && said.contains("died"), "{wires}: {said}");
            assert!(said.contains("all_reduce of 1000 f32 elements by ring"), "{wires}: {said}");
        }
    }
}

#[test]
fn a_stopped_rank_is_named_after_the_heartbeat_timeout() {
    for wires in ["shm", "tcp"] {
        for said in strike(wires, rustix::process::Signal::STOP, 0) {
            assert!(said.contains("rank 0 on ") && said.contains("stopped answering"), "{said}");
            let silent =
                said.split("last heard of ").nth(1).and_then(|rest| rest.split(' ').next());
            let silent: f64 = silent.unwrap().parse().unwrap();
            assert!(silent >= HEARTBEAT_TIMEOUT.as_secs_f64(), "{wires}: {said}");
        }
    }
}

#[test]
fn the_rank_with_the_hub_is_named_too() {
    for (signal, how) in
        [(rustix::process::Signal::KILL, "died"), (rustix::process::Signal::STOP, "stopped")]
    {
        let at = ranks::unused_address();
        let mut processes = Processes::start("shm", 3, at, "rendezvous-in-0");
        processes.signal(0, signal);
        for rank in [1, 2] {
            let said = processes.line(rank, "ended: ");
            assert!(said.contains("rank 0 on ") && said.contains(how), "{said}");
            let record = processes.line(rank, "record: ");
            assert!(record.contains("sent to rank") && record.contains("all_reduce"), "{record}");
        }
    }
}

#[test]
fn strangers_at_the_door_change_nothing() {
    let rendezvous = rendezvous(3);
    let at = rendezvous.address();
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
    assert!(matches!(rendezvous.join(), Err(CommError::PeerLost { rank: Rank(1), .. })));
}

#[test]
fn a_thousand_half_open_connections_and_a_wrong_secret_change_nothing() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    let most = limit.maximum.unwrap_or(4096).saturating_sub(300) as usize;
    let rendezvous = rendezvous(3);
    let at = rendezvous.address();
    let crowd = (0..most.min(1000)).filter_map(|i| {
        let mut stream = TcpStream::connect(at).ok()?;
        let bytes = (0..i as u32 % 100).map(|byte| (byte * 167 + i as u32) as u8);
        let _ = stream.write_all(&bytes.collect::<Vec<_>>());
        Some(stream)
    });
    let crowd: Vec<_> = crowd.collect();
    assert_eq!(crowd.len(), most.min(1000));
    let outcomes = std::thread::scope(|scope| {
        let stranger = scope.spawn(move || {
            let mut options = options("tcp", 1, 3, at);
            options.secret = Secret::from_text("not the secret of these tests").unwrap();
            connect(&options).map(drop).unwrap_err().to_string()
        });
        let rank = |rank| {
            scope.spawn(move || {
                let mut transport = connect(&options("tcp", rank, 3, at))?;
                train(&mut transport, 5)
            })
        };
        let ranks: Vec<_> = (0..3).map(rank).collect();
        let outcomes = ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>();
        let told = stranger.join().unwrap();
        let known = ["does not know the secret", "cannot connect", "ended the handshake"];
        assert!(known.iter().any(|known| told.contains(known)), "{told}");
        outcomes
    });
    assert_eq!((outcomes, rendezvous.join()), (vec![Ok(()); 3], Ok(())));
    drop(crowd);
}

/// Runs all ranks in one process; sufficient if no rank has to die.
fn together<R: Send>(
    world: u32,
    change: impl Fn(&mut ProcessOptions) + Sync,
    body: impl Fn(Result<paceline_comm::process::ProcessTransport, CommError>) -> R + Sync,
) -> (Vec<R>, Result<(), CommError>) {
    let rendezvous = rendezvous(world);
    let at = rendezvous.address();
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
    (outcomes, rendezvous.join())
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
        // A rank that joined after the end finds no server.
        let text = error.to_string();
        let gone = text.contains("cannot connect") || text.contains("gone");
        assert!(error == cause || gone, "{text}");
    }
    let text = cause.to_string();
    assert!(text.starts_with("ranks disagree about the plan: rank "), "{text}");
    assert!(text.contains("'9f3c'") && text.contains("'a001'"), "{text}");
}

#[test]
fn ranks_with_different_connections_do_not_start() {
    type Change = fn(&mut ProcessOptions);
    let changes: [(&str, Change); 4] = [
        ("transport", |options| options.transport = TransportKind::Tcp),
        ("encryption of messages", |options| options.encrypt = true),
        ("number of connections between two ranks", |options| options.connections = 3),
        ("bytes of a shared-memory ring", |options| options.ring = 8192),
    ];
    for (name, change) in changes {
        let change = |options: &mut ProcessOptions| {
            if options.rank == Rank(1) {
                change(options);
            }
        };
        let (_, cause) = together(2, change, |transport| transport.map(drop).unwrap_err());
        let text = cause.unwrap_err().to_string();
        assert!(text.starts_with(&format!("ranks disagree about the {name}: rank ")), "{text}");
    }
}

#[test]
fn a_missing_rank_is_named() {
    let rendezvous = RendezvousServer::start(RendezvousOptions {
        listen: HERE,
        secret: secret(),
        world: 3,
        in_rank: None,
        join: Duration::from_millis(300),
        heartbeat_timeout: HEARTBEAT_TIMEOUT,
    })
    .unwrap();
    let mut options = options("shm", 1, 3, rendezvous.address());
    options.join = Duration::from_secs(5);
    let error = connect(&options).map(drop).unwrap_err().to_string();
    assert_eq!(error, "rendezvous timed out after 0.3 s; missing ranks 0, 2 of 3");
    assert_eq!(rendezvous.join().unwrap_err().to_string(), error);
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
                let timeout = Duration::from_secs(5);
                let transport: &mut dyn Transport = &mut transport;
                paceline_comm::point::recv(transport, Rank(2), tag, &mut data, timeout).unwrap();
                assert_eq!(data, large);
                paceline_comm::point::recv(transport, Rank(2), tag, &mut data, timeout)
            }
        }
    };
    let (outcomes, cause) = together(3, |_| {}, body);
    assert_eq!(outcomes[2], Ok(()));
    for (rank, outcome) in (0..).map(Rank).zip(&outcomes[..2]) {
        assert_eq!(*outcome, Err(CommError::PeerClosed { rank, peer: Rank(2) }));
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
    // Other tests of this process open and close descriptors: poll until it is quiet.
    let before = count();
    (0..5).for_each(|_| run());
    let end = Instant::now() + Duration::from_secs(10);
    while (count() > before + 4 || maps() > 0) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(maps(), 0);
    assert!(count() <= before + 4, "{} descriptors before, {} after", before, count());
}
