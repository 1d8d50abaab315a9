//! Worlds of real processes for tests that do them harm.
//!
//! Every rank is the test binary itself, started again with a variable that says what to do; its test
//! `a_rank` calls [`take_part`].

#![allow(dead_code, reason = "not every test binary needs all of it")]

use paceline_comm::collective::{CollectiveSpec, run};
use paceline_comm::process::{ProcessOptions, Wires, connect};
use paceline_comm::rendezvous::{Hub, HubOptions};
use paceline_comm::{CommError, Secret, Tag, Transport};
use paceline_plan::collective::{Algorithm, CollectiveKind, Order, Reduction};
use paceline_plan::ids::Rank;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

pub(crate) const HERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
/// The bound within which a silent rank is to be found.
pub(crate) const DETECTION: Duration = Duration::from_secs(1);
/// Whoever has said nothing for so long hangs, however busy the machine is.
const HANGS: Duration = Duration::from_secs(60);

/// What a rank is told by a variable: `wires rank world hub deed`.
const ROLE: &str = "PACELINE_COMM_FAULT_ROLE";

pub(crate) fn secret() -> Secret {
    Secret::from_text("the secret of the fault tests").unwrap()
}

pub(crate) fn hub(world: u32) -> Hub {
    let hub = HubOptions {
        listen: HERE,
        secret: secret(),
        world,
        in_rank: None,
        join: Duration::from_secs(20),
        detection: DETECTION,
    };
    Hub::start(hub).unwrap()
}

pub(crate) fn options(wires: &str, rank: u32, world: u32, hub: SocketAddr) -> ProcessOptions {
    let mut options = ProcessOptions::new(Rank(rank), world, hub, secret());
    options.hub_in_rank_0 = false;
    options.join = Duration::from_secs(20);
    options.detection = DETECTION;
    match wires {
        "shm" => options.wires = Wires::SharedMemory,
        "tcp" => options.wires = Wires::Tcp,
        _ => options.host = Some(format!("host-{}", rank % 2)),
    }
    options
}

/// All reduces vectors around a ring until something goes wrong.
pub(crate) fn train(transport: &mut dyn Transport, iterations: u32) -> Result<(), CommError> {
    train_by(Algorithm::Ring, transport, iterations)
}

fn train_by(
    algorithm: Algorithm,
    transport: &mut dyn Transport,
    iterations: u32,
) -> Result<(), CommError> {
    let spec = CollectiveSpec {
        kind: CollectiveKind::AllReduce,
        algorithm,
        order: Order::Free,
        reduction: Reduction::Sum,
        root: 0,
        block: 1,
    };
    let members: Vec<_> = (0..transport.world()).map(Rank).collect();
    let mut data = vec![0.0; 1000];
    let patience = Duration::from_secs(30);
    for iteration in 0..iterations {
        let tag = Tag::new(0, iteration);
        run(transport, &spec, &members, tag, &mut data, None, patience)?;
    }
    Ok(())
}

/// What a started process does; nothing in the process that starts them.
pub(crate) fn take_part() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let [wires, rank, world, hub, deed] = words[..] else { panic!("{role}") };
    let (rank, world) = (rank.parse().unwrap(), world.parse().unwrap());
    let mut options = options(wires, rank, world, hub.parse().unwrap());
    options.hub_in_rank_0 = deed.contains("hub-in-0");
    let algorithm = if deed.contains("direct") { Algorithm::Direct } else { Algorithm::Ring };
    let mut transport = connect(&options).unwrap();
    train_by(algorithm, &mut transport, 20).unwrap();
    println!("under way");
    let error = train_by(algorithm, &mut transport, u32::MAX).unwrap_err();
    println!("ended: {error}");
    println!("record: {}", transport.flight_record().to_string().replace('\n', "|"));
}

/// The processes of a world; whatever happens, none of them stays.
pub(crate) struct Processes(Vec<(Child, Receiver<String>)>);

impl Processes {
    pub(crate) fn start(wires: &str, world: u32, hub: SocketAddr, deed: &str) -> Self {
        let spawn = |rank| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "a_rank", "--nocapture", "--test-threads=1"])
                .env(ROLE, format!("{wires} {rank} {world} {hub} {deed}"))
                .stdout(Stdio::piped())
                .stderr(Stdio::inherit())
                .spawn()
                .unwrap();
            let said = BufReader::new(child.stdout.take().unwrap());
            let (tell, told) = channel();
            std::thread::spawn(move || {
                said.lines().map_while(Result::ok).try_for_each(|line| tell.send(line))
            });
            (child, told)
        };
        let mut processes = Self((0..world).map(spawn).collect());
        (0..world).for_each(|rank| drop(processes.line(rank, "under way")));
        processes
    }

    /// The next line of a rank that has these words in it.
    pub(crate) fn line(&mut self, rank: u32, words: &str) -> String {
        let told = &self.0[rank as usize].1;
        loop {
            match told.recv_timeout(HANGS) {
                Ok(line) if line.contains(words) => return line,
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => panic!("rank {rank} hangs; it said no '{words}'"),
                Err(RecvTimeoutError::Disconnected) => panic!("rank {rank} said no '{words}'"),
            }
        }
    }

    pub(crate) fn child(&self, rank: u32) -> &Child {
        &self.0[rank as usize].0
    }

    pub(crate) fn signal(&self, rank: u32, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(self.child(rank));
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
