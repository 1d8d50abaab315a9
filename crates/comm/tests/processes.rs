//! Ranks that are real processes give the same bits as threads, over shared memory, over TCP and
//! over both.
//!
//! Every rank is this test binary, started again with an environment variable that sets its role.

use paceline_comm::process::{ProcessOptions, ProcessTransport, connect};
use paceline_comm::rendezvous::{RendezvousOptions, RendezvousServer};
use paceline_comm::steps::{CollectiveSpec, run_bytes};
use paceline_comm::{CommError, Secret, Tag, Transport, TransportKind, Vector, thread};
use paceline_plan::collective::{Algorithm, CollectiveKind, Reduction, SummationOrder, resolve};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use reference::Known;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

mod reference;

const HERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Thinning factor per transport: messages through sockets cost the most, and there are thousands.
/// `PACELINE_PRODUCT=all` runs every collective on every transport and takes minutes.
fn thinning(wires: &str) -> usize {
    match (wires, std::env::var("PACELINE_PRODUCT").as_deref()) {
        (_, Ok("all")) => 1,
        ("shm", _) => 3,
        _ => 11,
    }
}

const SECRET: &str = "the secret of the process tests";

fn secret() -> Secret {
    Secret::from_text(SECRET).unwrap()
}

/// Environment variable with a rank's role: `wires rank world rendezvous`.
const ROLE: &str = "PACELINE_COMM_TEST_ROLE";

fn spawn(wires: &str, rank: u32, world: u32, rendezvous: SocketAddr) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_rank", "--nocapture", "--test-threads=1"])
        .env(ROLE, format!("{wires} {rank} {world} {rendezvous}"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Not a test: entry point of the started processes.
#[test]
fn a_rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let [wires, rank, world, rendezvous] = words[..] else { panic!("{role}") };
    let (rank, world) = (Rank(rank.parse().unwrap()), world.parse().unwrap());
    let mut options = ProcessOptions::new(rank, world, rendezvous.parse().unwrap(), secret());
    options.rendezvous_in_rank_0 = false;
    options.join = Duration::from_secs(20);
    match wires {
        "shm" | "read" | "large-shm" => options.transport = TransportKind::Shm,
        "tcp" | "large-tcp" | "late" => {
            (options.transport, options.connections) = (TransportKind::Tcp, 2)
        }
        "encrypted" | "large-encrypted" => {
            (options.transport, options.connections) = (TransportKind::Tcp, 2);
            options.encrypt = true;
        }
        // Three hosts, by name only.
        _ => options.host = Some(format!("host-{}", rank.0 % 3)),
    }
    let mut transport = connect(&options).unwrap();
    let digest = match wires {
        "read" => read_in_place(&mut transport),
        "read-auto" => refuse_to_read_between_hosts(&mut transport),
        "large-shm" | "large-tcp" | "large-encrypted" | "large-auto" => {
            reference::large(&mut transport)
        }
        "late" => overwrite_at_once(&mut transport),
        _ => reference::product(&mut transport, thinning(wires)),
    };
    println!("digest {digest:016x}");
}

/// Broadcasts from a root that overwrites its vector at once, to peers that arrive late.
fn overwrite_at_once(transport: &mut ProcessTransport) -> u64 {
    const ROOT: u32 = 1;
    let members = reference::everyone(transport.world());
    let is_root = transport.rank() == Rank(ROOT);
    let byte = |i: usize| (i % 251) as u8;
    let mut tag = Tag::new(9, 0);
    for algorithm in [Algorithm::Direct, Algorithm::Ring, Algorithm::HalvingDoubling] {
        let spec = CollectiveSpec {
            kind: CollectiveKind::Broadcast,
            algorithm,
            order: SummationOrder::Free,
            reduction: Reduction::Sum,
            root: ROOT,
            block: 1,
        };
        let mut data: Vec<u8> =
            (0..4 << 20).map(|i| if is_root { byte(i) } else { 0xff }).collect();
        if !is_root {
            // Data that the root sends meanwhile fits into its socket and waits there.
            std::thread::sleep(Duration::from_millis(50));
        }
        let vector = (DType::U8, &mut data[..]);
        run_bytes(transport, &spec, &members, tag, vector, None, Duration::from_secs(20)).unwrap();
        assert!(is_root || data.iter().enumerate().all(|(i, found)| *found == byte(i)));
        data.fill(0x55);
        tag = tag.next();
    }
    0
}

/// Checks that memory is never shared between hosts: the plan must not ask for it.
fn refuse_to_read_between_hosts(transport: &mut ProcessTransport) -> u64 {
    let (ranks, rank) = (transport.world(), transport.rank());
    let spec = shared_memory(ranks)[0];
    let (members, timeout) = (reference::everyone(ranks), Duration::from_secs(20));
    let mut data = vec![0; 4096];
    let vector = (DType::F32, data.as_mut_slice());
    let error = run_bytes(transport, &spec, &members, Tag::new(8, 0), vector, None, timeout);
    let algorithm = Algorithm::SharedMemory;
    assert_eq!(error, Err(CommError::NoSharedMemory { rank, algorithm }));
    0
}

/// Runs every collective with shared-memory, on vectors in shared memory and in private memory.
fn read_in_place(transport: &mut ProcessTransport) -> u64 {
    let ranks = transport.world();
    let mut shared = Vector::new(transport, 1 << 21, true).unwrap();
    assert_eq!(shared.is_shared(), ranks > 1, "a rank alone shares nothing");
    shared.with(|shared| read_vector_in_place(transport, shared))
}

fn read_vector_in_place(transport: &mut ProcessTransport, shared: &mut [u8]) -> u64 {
    let (ranks, me) = (transport.world(), transport.rank());
    let members = reference::everyone(ranks);
    let timeout = Duration::from_secs(20);
    let mut tag = Tag::new(8, 0);
    for size in reference::SIZES {
        let known = Known::new(ranks, size);
        for dtype in reference::TYPES {
            for spec in shared_memory(ranks) {
                let naive = known.naive(spec.kind, dtype);
                let n = naive.n;
                let input = naive.input(&spec, me.0);
                let (range, wanted) = naive.outcome(&spec, me.0);
                for in_place in [true, false] {
                    let mut private = input.clone();
                    let mut output = spec.kind.has_output().then(|| vec![0xff; input.len()]);
                    // Neither at the buffer's beginning nor aligned.
                    let data =
                        if in_place { &mut shared[6..][..input.len()] } else { &mut private };
                    data.copy_from_slice(&input);
                    let (vector, out) = ((dtype, &mut *data), output.as_deref_mut());
                    run_bytes(transport, &spec, &members, tag, vector, out, timeout).unwrap();
                    let found = output.as_deref().unwrap_or(data);
                    assert!(found[range.clone()] == wanted, "{spec:?}, {n} {dtype}, at {me}");
                    tag = tag.next();
                }
            }
        }
    }
    // Only locations are sent with loans, and whole vectors with messages.
    let kinds =
        [CollectiveKind::AllReduce, CollectiveKind::ReduceScatter, CollectiveKind::AllGather];
    for (kind, algorithm) in kinds.into_iter().flat_map(|kind| {
        [Algorithm::SharedMemory, Algorithm::Direct].map(|algorithm| (kind, algorithm))
    }) {
        let order = SummationOrder::Canonical;
        let spec = CollectiveSpec { kind, algorithm, order, ..shared_memory(ranks)[0] };
        let vector = (DType::F32, &mut shared[..1 << 20]);
        run_bytes(transport, &spec, &members, tag, vector, None, timeout).unwrap();
        let record = transport.flight_record().unwrap();
        let own = record.entries().filter(|entry| entry.header.tag == tag);
        let most = own.map(|entry| entry.bytes).max();
        let lends = algorithm == Algorithm::SharedMemory;
        assert!(ranks == 1 || lends == (most < Some(1000)), "{kind} {algorithm}: {most:?} bytes");
        tag = tag.next();
    }
    // The canonical order equals that of messages.
    let [messages, reads] = [Algorithm::Direct, Algorithm::SharedMemory].map(|algorithm| {
        let data: &mut [u8] = &mut shared[..4000];
        for (i, element) in data.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let value = 1.0 / (1 + i * 7 % 13 + me.index() * 3) as f32;
            *element = value.to_ne_bytes();
        }
        let order = SummationOrder::Canonical;
        let spec = CollectiveSpec { algorithm, order, ..shared_memory(ranks)[0] };
        let vector = (DType::F32, &mut *data);
        run_bytes(transport, &spec, &members, tag, vector, None, timeout).unwrap();
        tag = tag.next();
        data.to_vec()
    });
    assert_eq!(messages, reads);
    0
}

fn shared_memory(ranks: u32) -> Vec<CollectiveSpec> {
    let hierarchy = Algorithm::hierarchical(Algorithm::SharedMemory, Algorithm::Ring).unwrap();
    let mut specs = Vec::new();
    for algorithm in [Algorithm::SharedMemory, hierarchy.with_host(ranks.min(3))] {
        for kind in CollectiveKind::ALL {
            for order in [SummationOrder::Free, SummationOrder::Canonical] {
                if resolve(kind, algorithm, ranks, order).is_ok() {
                    let (reduction, root, block) = (Reduction::Sum, ranks / 2, 1);
                    specs.push(CollectiveSpec { kind, algorithm, order, reduction, root, block });
                }
            }
        }
    }
    specs
}

#[test]
fn ranks_read_each_others_memory() {
    for ranks in [1, 2, 3, 4, 6, 9] {
        assert_eq!(world("read", ranks), vec![0; ranks as usize]);
    }
    assert_eq!(world("read-auto", 6), vec![0; 6]);
}

/// Runs all collectives in a world of processes; returns the digest of each rank.
fn world(wires: &str, ranks: u32) -> Vec<u64> {
    let rendezvous = RendezvousServer::start(RendezvousOptions {
        listen: HERE,
        secret: secret(),
        world: ranks,
        in_rank: None,
        join: Duration::from_secs(20),
        heartbeat_timeout: Duration::from_secs(10),
    })
    .unwrap();
    let children: Vec<_> =
        (0..ranks).map(|rank| spawn(wires, rank, ranks, rendezvous.address())).collect();
    let outputs: Vec<_> =
        children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    let complaints: Vec<_> = outputs
        .iter()
        .filter(|output| !output.status.success())
        .map(|output| String::from_utf8_lossy(&output.stderr))
        .collect();
    assert!(complaints.is_empty(), "{wires}, {ranks} ranks: {}", complaints.join("\n"));
    let digest = |output: &Output| {
        let said = String::from_utf8_lossy(&output.stdout);
        let at = said.find("digest ").unwrap() + "digest ".len();
        u64::from_str_radix(&said[at..at + 16], 16).unwrap()
    };
    let digests = outputs.iter().map(digest).collect();
    rendezvous.join().unwrap();
    digests
}

/// Reference digests of the thread transport, checked with all collectives elsewhere.
fn threads(ranks: u32, thinning: usize) -> Vec<u64> {
    on_threads(ranks, move |transport| reference::product(transport, thinning))
}

fn on_threads(
    ranks: u32,
    body: impl Fn(&mut dyn Transport) -> u64 + Copy + Send + Sync,
) -> Vec<u64> {
    std::thread::scope(|scope| {
        let run = |mut transport| scope.spawn(move || body(&mut transport));
        let threads: Vec<_> = thread::world(ranks).into_iter().map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn shared_memory_gives_the_bits_of_threads() {
    for ranks in 1..=9 {
        assert_eq!(world("shm", ranks), threads(ranks, thinning("shm")), "{ranks} ranks");
    }
}

/// Vectors too large to send at once: sent in pieces, blocked for space, read in place.
#[test]
fn large_vectors_are_right_on_every_wire() {
    for ranks in 2..=4 {
        let wanted = on_threads(ranks, reference::large);
        for wires in ["large-shm", "large-tcp", "large-encrypted", "large-auto"] {
            assert_eq!(world(wires, ranks), wanted, "{wires}, {ranks} ranks");
        }
    }
}

#[test]
fn a_vector_is_handed_back_when_nobody_reads_it_any_more() {
    assert_eq!(world("late", 3), [0; 3]);
}

#[test]
fn tcp_gives_the_bits_of_threads() {
    for ranks in 2..=9 {
        assert_eq!(world("tcp", ranks), threads(ranks, thinning("tcp")), "{ranks} ranks");
    }
}

#[test]
fn encrypted_tcp_gives_the_bits_of_threads() {
    for ranks in [2, 3, 6] {
        assert_eq!(
            world("encrypted", ranks),
            threads(ranks, thinning("encrypted")),
            "{ranks} ranks"
        );
    }
}

#[test]
fn both_together_give_the_bits_of_threads() {
    for ranks in 2..=9 {
        assert_eq!(world("auto", ranks), threads(ranks, thinning("auto")), "{ranks} ranks");
    }
}
