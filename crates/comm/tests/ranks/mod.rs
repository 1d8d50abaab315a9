//! Worlds of real processes for fault injection.
//!
//! Every rank is the test binary itself, started again with an environment variable that sets its
//! role; its test `a_rank` calls [`take_part`].

#![allow(dead_code, reason = "not every test binary needs all of it")]

use paceline_comm::process::{ProcessOptions, connect};
use paceline_comm::rendezvous::{RendezvousOptions, RendezvousServer};
use paceline_comm::steps::{CollectiveSpec, run};
use paceline_comm::{CommError, Secret, Tag, Transport, TransportKind};
use paceline_plan::collective::{Algorithm, CollectiveKind, Reduction, SummationOrder};
use paceline_plan::ids::Rank;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

pub(crate) const HERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Returns an unused address for a server that another process starts.
///
/// Each call takes a loopback address of its own. The kernel gives clients ports of 127.0.0.1, so no
/// connection can take the port between this call and the server's start.
pub(crate) fn unused_address() -> SocketAddr {
    static CALLS: AtomicU32 = AtomicU32::new(1);
    let [high, low] = (std::process::id() as u16).to_be_bytes();
    let call = CALLS.fetch_add(1, Ordering::Relaxed) % 250;
    let own = Ipv4Addr::new(127, 1 + high % 250, low, 2 + call as u8);
    TcpListener::bind((own, 0)).unwrap().local_addr().unwrap()
}

/// Time within which a silent rank must be detected.
pub(crate) const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(1);
/// A rank without output for this long hangs, even on a busy machine.
const HANGS: Duration = Duration::from_secs(60);

/// Environment variable with a rank's role: `wires rank world rendezvous deed`.
const ROLE: &str = "PACELINE_COMM_FAULT_ROLE";

pub(crate) fn secret() -> Secret {
    Secret::from_text("the secret of the fault tests").unwrap()
}

pub(crate) fn rendezvous(world: u32) -> RendezvousServer {
    let rendezvous = RendezvousOptions {
        listen: HERE,
        secret: secret(),
        world,
        in_rank: None,
        join: Duration::from_secs(20),
        heartbeat_timeout: HEARTBEAT_TIMEOUT,
    };
    RendezvousServer::start(rendezvous).unwrap()
}

pub(crate) fn options(
    wires: &str,
    rank: u32,
    world: u32,
    rendezvous: SocketAddr,
) -> ProcessOptions {
    let mut options = ProcessOptions::new(Rank(rank), world, rendezvous, secret());
    options.rendezvous_in_rank_0 = false;
    options.join = Duration::from_secs(20);
    options.heartbeat_timeout = HEARTBEAT_TIMEOUT;
    match wires {
        "shm" => options.transport = TransportKind::Shm,
        "tcp" => options.transport = TransportKind::Tcp,
        _ => options.host = Some(format!("host-{}", rank % 2)),
    }
    options
}

/// All-reduces vectors around a ring until an error occurs.
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
        order: SummationOrder::Free,
        reduction: Reduction::Sum,
        root: 0,
        block: 1,
    };
    let members: Vec<_> = (0..transport.world()).map(Rank).collect();
    let mut data = vec![0.0; 1000];
    let timeout = Duration::from_secs(30);
    for iteration in 0..iterations {
        let tag = Tag::new(0, iteration);
        run(transport, &spec, &members, tag, &mut data, None, timeout)?;
    }
    Ok(())
}

/// Entry point of a started process; does nothing in the process that starts them.
pub(crate) fn take_part() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let [wires, rank, world, rendezvous, deed] = words[..] else { panic!("{role}") };
    let (rank, world) = (rank.parse().unwrap(), world.parse().unwrap());
    let mut options = options(wires, rank, world, rendezvous.parse().unwrap());
    options.rendezvous_in_rank_0 = deed.contains("rendezvous-in-0");
    let algorithm = if deed.contains("direct") { Algorithm::Direct } else { Algorithm::Ring };
    let mut transport = connect(&options).unwrap();
    train_by(algorithm, &mut transport, 20).unwrap();
    println!("under way");
    let error = train_by(algorithm, &mut transport, u32::MAX).unwrap_err();
    println!("ended: {error}");
    println!("record: {}", transport.flight_record().unwrap().to_string().replace('\n', "|"));
}

/// Processes of a world; all of them are killed on drop.
pub(crate) struct Processes(Vec<(Child, Receiver<String>)>);

impl Processes {
    pub(crate) fn start(wires: &str, world: u32, rendezvous: SocketAddr, deed: &str) -> Self {
        let spawn = |rank| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "a_rank", "--nocapture", "--test-threads=1"])
                .env(ROLE, format!("{wires} {rank} {world} {rendezvous} {deed}"))
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

    /// Next output line of a rank that contains `words`.
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
