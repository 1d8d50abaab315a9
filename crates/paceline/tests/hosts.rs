//! Ranks on several hosts: four network namespaces on a switch, every port shaped to 1 Gbit/s in
//! both directions.
//!
//! ```text
//! cargo test --release -p paceline --test hosts -- --ignored --nocapture
//! ```
//!
//! The test needs root, `ip`, `tc` and a kernel with `tbf`, and takes about a minute and a half. It
//! compares measured times with arithmetic and with the simulator. It therefore has to be requested
//! by name, as `.ci/run` does. If it cannot run, it says so.

#[path = "hosts/network.rs"]
mod network;

use network::{EFFICIENCY, Network, PAYLOAD_PER_SECOND, namespaces};
use serde_json::Value;
use std::collections::BTreeMap;
use std::process::{Child, Command, Output};
use std::time::Duration;

const HOSTS: u32 = 4;
const BYTES: u64 = 64 << 20;
const SECRET: &str = "what the hosts of this test know";

/// Number of vectors that the busiest port carries in sequence; sending and receiving at once count
/// as one.
///
/// A single server receives a vector from each of the three others and then sends one to each.
/// Without a server every rank sends its vector to all others: in turn, so that one port is busy at a
/// time; all ranks one at a time; or all at once. The
/// algorithms that split the vector send every part twice, except for the rank's own: 2 (P − 1) / P
/// (Patarasuk and Yuan 2009, section 3).
///
/// Sums are taken in training's default order, except for the ring, which cannot keep it.
const VECTORS: [(&str, &str, f64); 7] = [
    ("ps:1", "canonical", 6.0),
    ("naive", "canonical", 12.0),
    ("overlapped", "canonical", 3.0),
    ("one-shot", "canonical", 3.0),
    ("partitioned", "canonical", 1.5),
    ("halving-doubling", "canonical", 1.5),
    ("ring", "free", 1.5),
];

/// The same network as a cluster file.
fn cluster() -> String {
    format!(
        r#"
name = "four-shaped-hosts"
hosts = {HOSTS}

[device]
name = "host"
memory = "8 GiB"
memory_bandwidth = "10 GB/s"
peak = {{ f32 = "100 GFLOP/s" }}

[[dimension]]
name = "ethernet"
kind = "switch"
size = {HOSTS}
bandwidth = "1 Gbit/s"
latency = "100 us"
efficiency = {EFFICIENCY}
"#
    )
}

/// All tests in sequence on one network.
#[test]
#[ignore = "needs root and a quiet minute: `cargo test --release -p paceline --test hosts -- --ignored`"]
fn ranks_of_several_hosts() {
    let network = match Network::build(HOSTS) {
        Ok(network) => network,
        Err(why) => {
            println!("NOT RUN: ranks on several hosts need root, ip and tc; {why}");
            return;
        }
    };
    every_algorithm_runs(&network);
    hosts_share_memory_inside_and_wires_across(&network);
    times_are_those_of_the_textbook_and_of_the_simulator(&network);
    a_host_that_is_cut_off_is_named_by_all_others(&network);
    drop(network);
    assert_eq!(namespaces(), 0);
}

fn every_algorithm_runs(network: &Network) {
    let algorithms = [
        "auto",
        "ring",
        "multi-ring:2",
        "halving-doubling",
        "tree",
        "direct",
        "ps:1",
        "ps:2",
        "ps:4",
        "naive",
        "overlapped",
        "one-shot",
        "partitioned",
        "torus:2x2",
        "hierarchical:ring:ring/2",
        "hierarchical:ps:1:ring/2",
        "hierarchical:halving-doubling:partitioned/2",
        "hierarchical:direct:tree/2",
    ];
    let line = format!("--sizes 4,256KiB,2MiB --budget 1 --algorithm {}", algorithms.join(","));
    let lines = measure(network, 1, &line);
    assert_eq!(lines.len(), 3 * algorithms.len(), "{lines:?}");
    let ops = "--op all_reduce,reduce_scatter,all_gather,broadcast,reduce,gather,all_to_all,scatter,send_recv,barrier";
    assert_eq!(measure(network, 1, &format!("{ops} --sizes 100000 --budget 1")).len(), 10);
}

/// Two ranks on each host: ranks of one host communicate through shared memory.
fn hosts_share_memory_inside_and_wires_across(network: &Network) {
    let algorithms =
        ["hierarchical:shared-memory:ring/2", "hierarchical:ring:halving-doubling/2", "ring"];
    let line = format!("--sizes 1MiB --budget 1 --algorithm {}", algorithms.join(","));
    assert_eq!(measure(network, 2, &line).len(), algorithms.len());
}

fn times_are_those_of_the_textbook_and_of_the_simulator(network: &Network) {
    let time = |order: &str, names: &str| {
        let line = format!("--sizes {BYTES} --budget 1 --order {order} --algorithm {names}");
        let seconds = |record: &Value| record["median_us"].as_f64().unwrap() / 1e6;
        measure(network, 1, &line).iter().map(seconds).collect::<Vec<f64>>()
    };
    let mut measured = Vec::new();
    for wanted in ["canonical", "free"] {
        let names = VECTORS.iter().filter(|(_, order, _)| *order == wanted);
        let names = names.map(|(name, ..)| *name).collect::<Vec<_>>().join(",");
        measured.extend(time(wanted, &names));
    }
    assert_eq!(measured.len(), VECTORS.len());
    println!("64 MiB on {HOSTS} hosts, seconds: arithmetic, flow simulation, measured");
    let mut wrong = Vec::new();
    let mut found = BTreeMap::new();
    for ((name, order, vectors), measured) in VECTORS.into_iter().zip(measured) {
        let arithmetic = vectors * BYTES as f64 / PAYLOAD_PER_SECOND;
        let simulated = simulate(name, order);
        // Other work on this machine can only increase the time: a slow case is measured again.
        let again = || time(order, name).into_iter();
        let measured = match measured > 1.15 * arithmetic.max(simulated) {
            true => again().chain(again()).fold(measured, f64::min),
            false => measured,
        };
        println!("{name:>20} {arithmetic:8.3} {simulated:8.3} {measured:8.3}");
        for (what, expected, bound) in
            [("arithmetic", arithmetic, 0.25), ("simulation", simulated, 0.2)]
        {
            let error = measured / expected - 1.0;
            if error.abs() > bound {
                wrong.push(format!("{name}: {:+.0} % from {what}", error * 100.0));
            }
        }
        found.insert(name, measured);
    }
    assert!(wrong.is_empty(), "{wrong:?}");
    // Turns are slowest, then one server, then whole vectors between all; split vectors are fastest.
    let of = |names: &[&str]| names.iter().map(|name| found[name]).collect::<Vec<f64>>();
    let least = |times: Vec<f64>| times.into_iter().fold(f64::INFINITY, f64::min);
    let most = |times: Vec<f64>| times.into_iter().fold(0.0, f64::max);
    assert!(found["naive"] > 1.5 * found["ps:1"], "{found:?}");
    assert!(found["ps:1"] > 1.5 * most(of(&["overlapped", "one-shot"])), "{found:?}");
    let cutting = most(of(&["partitioned", "ring", "halving-doubling"]));
    assert!(least(of(&["overlapped", "one-shot"])) > 1.5 * cutting, "{found:?}");
}

fn a_host_that_is_cut_off_is_named_by_all_others(network: &Network) {
    let ranks =
        start(network, 1, "--sizes 1MiB --budget 60000 --algorithm ring --heartbeat-timeout 2");
    std::thread::sleep(Duration::from_secs(4));
    network.cut_off(2);
    let ended: Vec<Output> =
        ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect();
    for (rank, output) in ended.iter().enumerate() {
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "rank {rank}: {said}");
        // From the view of host 2, the others are lost.
        let name = if rank == 2 { "rank 0 on shaped-host-0" } else { "rank 2 on shaped-host-2" };
        assert!(said.contains(name), "rank {rank}: {said}");
    }
    println!("cut off: {}", String::from_utf8_lossy(&ended[0].stderr).trim());
}

/// Runs `bench collectives` on `per_host` ranks of every host; returns the records of rank 0.
fn measure(network: &Network, per_host: u32, line: &str) -> Vec<Value> {
    let mut records = Vec::new();
    for rank in start(network, per_host, line) {
        let Output { status, stdout, stderr } = rank.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&stderr);
        assert!(status.success(), "{line}: {said}");
        let lines = String::from_utf8(stdout).unwrap();
        records.extend(lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()));
    }
    assert!(records.iter().all(|record| record["wrong"] == 0), "{records:?}");
    records
}

fn start(network: &Network, per_host: u32, line: &str) -> Vec<Child> {
    // A new port each time, so that no world meets leftovers of the previous one.
    static PORT: std::sync::atomic::AtomicU16 = std::sync::atomic::AtomicU16::new(29_600);
    let port = PORT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let rank = |rank: u32| {
        network.start(rank / per_host, |command| {
            command
                .args(["bench", "collectives", "--json", "--launch", "env"])
                .args(["--bind", &network.address(rank / per_host)])
                .args(line.split_whitespace())
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", (HOSTS * per_host).to_string())
                .env("MASTER_ADDR", network.address(0))
                .env("MASTER_PORT", port.to_string())
                .env("PACELINE_SECRET", SECRET);
        })
    };
    (0..HOSTS * per_host).map(rank).collect()
}

/// Time that the flow simulator predicts for the same algorithm on the same network.
fn simulate(algorithm: &str, order: &str) -> f64 {
    let file = std::env::temp_dir().join(format!("paceline-hosts-{}.toml", std::process::id()));
    std::fs::write(&file, cluster()).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_paceline"))
        .args(["collective", "--op", "all_reduce", "--network", "flow", "--json"])
        .args(["--algorithm", algorithm, "--order", order])
        .args(["--size", &BYTES.to_string(), "--cluster"])
        .arg(&file)
        .output()
        .unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let record: Value = serde_json::from_slice(&output.stdout).unwrap();
    record["time_s"].as_f64().unwrap()
}
