//! Tests of the analytic backend; closed forms of all algorithms: `tests/closed_forms.rs`.

use super::*;
use crate::cluster::preset;
use paceline_plan::collective::{Algorithm, CollectiveKind, SummationOrder};
use paceline_plan::units::BytesPerSec;
use proptest::prelude::*;

/// Cluster of `size` devices on one switch.
fn switch(size: u32) -> Cluster {
    let mut cluster = preset::get("dgx-a100").unwrap();
    cluster.dimensions.truncate(1);
    cluster.dimensions[0].size = size;
    cluster
}

fn ranks(range: std::ops::Range<u32>) -> Vec<Rank> {
    range.map(Rank).collect()
}

fn time(
    cluster: &Cluster,
    kind: CollectiveKind,
    algorithm: Algorithm,
    members: &[Rank],
    bytes: u64,
) -> f64 {
    let size = members.len() as u32;
    let pattern = Pattern::new(kind, algorithm, SummationOrder::Free, size, 0).unwrap();
    let vector = Vector::of_bytes(Bytes(bytes));
    Analytic::new(cluster).collective(&pattern, members, &vector).unwrap().0
}

/// Latency and seconds per byte of the only dimension.
fn link(cluster: &Cluster) -> (f64, f64) {
    let dimension = &cluster.dimensions[0];
    (dimension.latency.0, 1.0 / dimension.achievable().0)
}

fn close(a: f64, b: f64) {
    assert!((a / b - 1.0).abs() < 1e-9, "{a} is not {b}");
}

/// Patarasuk and Yuan (2009), section 3; Thakur et al. (2005), section 4.5.
#[test]
fn uniform_topologies_follow_the_closed_forms() {
    use CollectiveKind::{AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter};
    for p in [2u32, 4, 8, 32, 1024] {
        let cluster = switch(p);
        let (a, b) = link(&cluster);
        let bytes = u64::from(p) << 16;
        let (n, p, members) = (bytes as f64, f64::from(p), ranks(0..p));
        let time = |kind, algorithm| time(&cluster, kind, algorithm, &members, bytes);
        let all = n * b * (p - 1.0) / p;
        close(time(AllReduce, Algorithm::Ring), 2.0 * ((p - 1.0) * a + all));
        close(time(ReduceScatter, Algorithm::Ring), (p - 1.0) * a + all);
        close(time(AllGather, Algorithm::Ring), (p - 1.0) * a + all);
        close(time(AllReduce, Algorithm::HalvingDoubling), 2.0 * (p.log2() * a + all));
        close(time(AllReduce, Algorithm::Direct), 2.0 * (a + all));
        close(time(AllToAll, Algorithm::Direct), a + all);
        close(time(Broadcast, Algorithm::Direct), a + n * b * (p - 1.0));
    }
}

#[test]
fn three_ranks_on_a_ring_are_exact_too() {
    let cluster = switch(3);
    let (a, b) = link(&cluster);
    let members = ranks(0..3);
    let n = 3e6;
    let ring = time(&cluster, CollectiveKind::AllReduce, Algorithm::Ring, &members, n as u64);
    close(ring, 4.0 * (a + n / 3.0 * b));
}

#[test]
fn a_group_of_one_takes_no_time() {
    let cluster = switch(8);
    for kind in CollectiveKind::ALL {
        let time = time(&cluster, kind, Algorithm::Auto, &ranks(3..4), 1 << 20);
        assert_eq!(time, 0.0, "{kind}");
    }
}

#[test]
fn links_of_their_own_do_not_share() {
    let mut cluster = switch(8);
    cluster.dimensions[0].kind = DimensionKind::FullyConnected;
    let (a, b) = link(&cluster);
    let direct = time(&cluster, CollectiveKind::AllReduce, Algorithm::Direct, &ranks(0..8), 8_000);
    close(direct, 2.0 * (a + 1000.0 * b));
}

/// Every message takes its shortest path; the average link of a ring of 8 carries Σ hops·n / 2 =
/// (1+2+3+4+3+2+1)/2 = 8 parts.
#[test]
fn a_ring_of_wires_carries_its_average_load() {
    let mut cluster = switch(8);
    cluster.dimensions[0].kind = DimensionKind::Ring;
    let (a, b) = link(&cluster);
    let spread = time(&cluster, CollectiveKind::AllToAll, Algorithm::Direct, &ranks(0..8), 8_000);
    close(spread, 4.0 * a + 8.0 * 1000.0 * b);
    let ring = time(&cluster, CollectiveKind::AllGather, Algorithm::Ring, &ranks(0..8), 8_000);
    close(ring, 7.0 * (a + 1000.0 * b));
}

#[test]
fn a_ring_over_hosts_uses_every_nic_that_the_group_has() {
    let cluster = preset::get("dgx-a100:4").unwrap();
    let [nvlink, fabric] = &cluster.dimensions[..] else { panic!("two dimensions") };
    let (n, kind) = (32u64 << 20, CollectiveKind::AllReduce);
    let round = |bytes: f64, nics: f64| {
        let across = fabric.latency.0 + bytes / (fabric.achievable().0 * nics);
        across.max(nvlink.latency.0 + bytes / nvlink.achievable().0)
    };
    let everyone = time(&cluster, kind, Algorithm::Ring, &ranks(0..32), n);
    close(everyone, 62.0 * round(n as f64 / 32.0, 8.0));
    let one_each: Vec<Rank> = (0..4).map(|host| Rank(host * 8)).collect();
    let single = time(&cluster, kind, Algorithm::Ring, &one_each, n);
    close(single, 6.0 * round(n as f64 / 4.0, 1.0));
    let inside = time(&cluster, kind, Algorithm::Ring, &ranks(8..16), n);
    close(inside, 14.0 * (nvlink.latency.0 + n as f64 / 8.0 / nvlink.achievable().0));
}

#[test]
fn halving_meets_neighbours_first() {
    // Of 32 ranks, rounds at distance 1, 2 and 4 stay inside a host; those at 8 and 16 do not.
    let cluster = preset::get("dgx-a100:4").unwrap();
    let [nvlink, fabric] = &cluster.dimensions[..] else { panic!("two dimensions") };
    let n = 32u64 << 20;
    let algorithm = Algorithm::HalvingDoubling;
    let time = time(&cluster, CollectiveKind::AllReduce, algorithm, &ranks(0..32), n);
    let share = |dimension: &Dimension, parts: f64, rounds: f64| {
        rounds * dimension.latency.0 + parts * n as f64 / dimension.achievable().0
    };
    close(time, 2.0 * (share(nvlink, 7.0 / 8.0, 3.0) + share(fabric, 3.0 / 32.0, 2.0)));
}

#[test]
fn devices_behind_one_nic_share_it() {
    let mut cluster = preset::get("dgx-a100:2").unwrap();
    let alone = Analytic::new(&cluster).message(Rank(0), Rank(8), Bytes(1 << 30)).unwrap();
    cluster.dimensions[1].devices_per_link = 2;
    let shared = Analytic::new(&cluster).message(Rank(0), Rank(8), Bytes(1 << 30)).unwrap();
    let latency = cluster.dimensions[1].latency;
    close((shared - latency).0, 2.0 * (alone - latency).0);
}

#[test]
fn the_slow_links_of_a_cube_mesh_set_the_pace() {
    let host = preset::get("dgx1-v100").unwrap();
    let n = 8_000_000;
    let ring = time(&host, CollectiveKind::AllReduce, Algorithm::Ring, &ranks(0..8), n);
    // GPUs 0 and 1 are connected by one NVLink, 1 and 2 by two.
    let dimension = &host.dimensions[0];
    let slow = dimension.latency.0 + n as f64 / 8.0 / dimension.achievable().0;
    close(ring, 14.0 * slow);
}

#[test]
fn ranks_outside_the_cluster_are_named() {
    let cluster = switch(4);
    let network = Analytic::new(&cluster);
    let error = network.message(Rank(1), Rank(9), Bytes(1)).unwrap_err();
    assert_eq!(error.to_string(), "rank 1 has no route to rank 9 on this cluster");
}

proptest! {
    /// More bytes never take less time, and no algorithm beats the bound set by its busiest rank.
    #[test]
    fn time_grows_with_bytes_and_keeps_the_bound(
        size in 2u32..40,
        algorithm in prop_oneof![
            Just(Algorithm::Ring), Just(Algorithm::HalvingDoubling), Just(Algorithm::Direct)
        ],
        bytes in 0u64..1 << 30,
        all: bool,
    ) {
        let kind = if all { CollectiveKind::AllReduce } else { CollectiveKind::ReduceScatter };
        let mut cluster = switch(size);
        cluster.dimensions[0].bandwidth = BytesPerSec(1e9);
        cluster.dimensions[0].efficiency = 1.0;
        let members = ranks(0..size);
        let less = time(&cluster, kind, algorithm, &members, bytes);
        let more = time(&cluster, kind, algorithm, &members, bytes + 4096);
        prop_assert!(less <= more);
        let pattern = Pattern::new(kind, algorithm, SummationOrder::Free, size, 0).unwrap();
        let counts = pattern.counts(Bytes(bytes));
        let bound = counts.rounds as f64 * cluster.dimensions[0].latency.0
            + counts.bytes_sent_per_rank_max.0 as f64 / 1e9;
        prop_assert!(less >= bound * (1.0 - 1e-9), "{less} under {bound}");
    }
}

/// Representative ranks give bitwise the time of all ranks if the odd ones are included.
#[test]
fn every_message_says_what_few_ranks_say() {
    let small = &["ring", "multi-ring:2", "halving-doubling", "tree", "direct", "ps:3"][..];
    // 8,000 ranks: in a tree of that size, some stand for others of their shape.
    let cases = [("dgx-a100:4", small), ("gb200-nvl72", small), ("dgx-a100:1000", &["tree"])];
    for (cluster, names) in cases {
        let cluster = &preset::get(cluster).unwrap();
        let size = cluster.devices() as u32;
        let members = ranks(0..size);
        for name in names {
            let algorithm = name.parse().unwrap();
            let pattern =
                Pattern::new(CollectiveKind::AllReduce, algorithm, SummationOrder::Free, size, 0)
                    .unwrap();
            let vector = Vector::of_bytes(Bytes(u64::from(size * pattern.chunks()) << 8));
            let network = Analytic::new(cluster);
            let (every, messages) = network.every_message(&pattern, &members, &vector).unwrap();
            assert_eq!(network.collective(&pattern, &members, &vector), Ok(every), "{name}");
            assert!(messages >= u64::from(size), "{name}: {messages}");
        }
    }
}

/// Phases and dimensions of a group add up to the bytes it moves.
#[test]
fn a_profile_says_where_the_time_goes() {
    let cluster = preset::get("dgx-a100:4").unwrap();
    let members = ranks(0..32);
    let vector = Vector::of_bytes(Bytes(32 << 20));
    let profile = |name: &str| {
        let algorithm = cluster.fabric().resolve(name.parse().unwrap(), &members).unwrap();
        let kind = CollectiveKind::AllReduce;
        let pattern = Pattern::new(kind, algorithm, SummationOrder::Free, 32, 0).unwrap();
        let network = Analytic::new(&cluster);
        let profile = network.profile(&pattern, &members, &vector).unwrap();
        assert_eq!(network.collective(&pattern, &members, &vector), Ok(profile.time), "{name}");
        profile
    };
    let [nvlink, fabric] = &cluster.dimensions[..] else { panic!("two dimensions") };
    let n = f64::from(32 << 20);
    let two = profile("hierarchical:ring:ring");
    let names: Vec<&str> = two.phases.iter().map(|phase| phase.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "first half in nvlink",
            "first half in infiniband",
            "second half in infiniband",
            "second half in nvlink"
        ]
    );
    close(two.phases[0].messages_per_rank, 7.0);
    close(two.phases[0].message_latency_s, nvlink.latency.0 + n / 8.0 / nvlink.achievable().0);
    close(two.dimensions[0].bytes_per_rank, 2.0 * n * 7.0 / 8.0);
    close(two.dimensions[1].bytes_per_rank, 2.0 * n / 8.0 * 3.0 / 4.0);
    close(
        two.dimensions[1].utilisation,
        2.0 * n / 8.0 * 3.0 / 4.0 / fabric.achievable().0 / two.time.0,
    );
    let one = profile("per-dimension");
    assert_eq!(one.phases[1].name, "reduce_scatter in infiniband");
    close(one.phases[1].messages_per_rank, 2.0);
    let piped = profile("per-dimension:8");
    assert!(piped.time < one.time);
    assert!(piped.dimensions[1].utilisation > one.dimensions[1].utilisation);
    let summed = profile("hierarchical:ring:in-network");
    close(summed.dimensions[1].bytes_per_rank, n / 8.0);
    assert!(summed.time < two.time, "half the bytes between hosts, in one round");
}
