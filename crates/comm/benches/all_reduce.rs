//! How long an all_reduce takes between processes of this host, over shared memory and TCP.
//!
//! `cargo bench -p paceline-comm --bench all_reduce [-- RANKS]`. Every rank is this program, started
//! again with a variable that says which one it is. Times are medians of rank 0.

use paceline_comm::collective::{CollectiveSpec, Running};
use paceline_comm::process::{ProcessOptions, Wires, connect};
use paceline_comm::rendezvous::{Hub, HubOptions};
use paceline_comm::{CommError, Secret, Tag, barrier, finish};
use paceline_plan::collective::{Algorithm, CollectiveKind, Order, Reduction};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::time::{Duration, Instant};

const ROLE: &str = "PACELINE_BENCH_ROLE";
const SECRET: &str = "PACELINE_BENCH_SECRET";
const PATIENCE: Duration = Duration::from_secs(60);
const SIZES: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20];

fn main() -> Result<(), CommError> {
    if let Ok(role) = std::env::var(ROLE) {
        return measure(&role);
    }
    let ranks = std::env::args().find_map(|word| word.parse().ok()).unwrap_or(2);
    println!("{:>4} {:>5} {:>16} {:>10} {:>12} {:>8}", "", "ranks", "", "KiB", "median µs", "GB/s");
    let only = std::env::args().nth(2).unwrap_or_default();
    for case in [
        "shm read-reduce",
        "shm direct",
        "shm ring",
        "shm halving-doubling",
        "tcp ring",
        "tcp halving-doubling",
    ] {
        if case.contains(&only) {
            world(case, ranks)?;
        }
    }
    Ok(())
}

fn world(case: &str, ranks: u32) -> Result<(), CommError> {
    let secret = Secret::random()?;
    let hub = Hub::start(HubOptions {
        listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
        secret: secret.clone(),
        world: ranks,
        in_rank: None,
        join: PATIENCE,
        detection: PATIENCE,
    })?;
    let start = |rank| {
        let program = std::env::current_exe().ok()?;
        let role = format!("{case} {rank} {ranks} {}", hub.address());
        Command::new(program).env(ROLE, role).env(SECRET, secret.as_text()).spawn().ok()
    };
    let children: Vec<_> = (0..ranks).filter_map(start).collect();
    for mut child in children {
        let _ = child.wait();
    }
    hub.join()
}

fn measure(role: &str) -> Result<(), CommError> {
    let problem = || CommError::Job { problem: format!("{role} is no role") };
    let words: Vec<&str> = role.split(' ').collect();
    let [wires, algorithm, rank, world, hub] = words[..] else { return Err(problem()) };
    let secret = Secret::from_text(&std::env::var(SECRET).unwrap_or_default())?;
    let number = |text: &str| text.parse::<u32>().map_err(|_| problem());
    let hub = hub.parse().map_err(|_| problem())?;
    let mut options = ProcessOptions::new(Rank(number(rank)?), number(world)?, hub, secret);
    options.hub_in_rank_0 = false;
    options.wires = if wires == "tcp" { Wires::Tcp } else { Wires::SharedMemory };
    paceline_comm::affinity::keep_to_share(options.rank.0, options.world);
    let mut transport = connect(&options)?;
    let spec = CollectiveSpec {
        kind: CollectiveKind::AllReduce,
        algorithm: algorithm.parse::<Algorithm>().map_err(|_| problem())?,
        order: Order::Free,
        reduction: Reduction::Sum,
        root: 0,
        block: 1,
    };
    let members: Vec<_> = (0..options.world).map(Rank).collect();
    let mut buffer = transport.shared_buffer(SIZES[SIZES.len() - 1])?;
    let mut tag = Tag::new(0, 0);
    let mut running = Running::start(&spec, &members, options.rank, tag)?;
    for bytes in SIZES {
        let data = &mut buffer[..bytes];
        let laps = ((256 << 20) / bytes).clamp(5, 5000);
        let mut times = Vec::with_capacity(laps);
        for lap in 0..laps + laps / 4 + 2 {
            tag = tag.next();
            running.restart(tag);
            if bytes > 1 << 20 {
                barrier::wait(&mut transport, &members, Tag::new(1, tag.sequence()), PATIENCE)?;
            }
            let began = Instant::now();
            finish(&mut transport, PATIENCE, |transport| {
                running.progress_bytes(transport, DType::F32, data, None)
            })?;
            if lap >= laps / 4 + 2 {
                times.push(began.elapsed());
            }
        }
        times.sort_unstable();
        if options.rank == Rank(0) {
            let median = times[times.len() / 2].as_secs_f64();
            let (kib, rate) = (bytes >> 10, bytes as f64 / median / 1e9);
            let (micros, ranks) = (median * 1e6, options.world);
            println!("{wires:>4} {ranks:>5} {algorithm:>16} {kib:>10} {micros:>12.2} {rate:>8.2}");
        }
    }
    Ok(())
}
