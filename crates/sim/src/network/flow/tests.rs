//! Closed forms, agreement with the analytic backend, and invariance under folding.

use super::jobs::{Job, Work, run};
use super::*;
use crate::cluster::{Dimension, DimensionKind, GraphLink, Tree, preset};
use paceline_plan::collective::{Algorithm, CollectiveKind, SummationOrder};
use paceline_plan::units::BytesPerSec;
use proptest::prelude::*;

use CollectiveKind::{AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter};

const LATENCY: f64 = 1e-5;
const RATE: f64 = 1e9;

fn dimension(kind: DimensionKind, size: u32) -> Dimension {
    Dimension {
        name: "wire".into(),
        kind,
        size,
        bandwidth: BytesPerSec(RATE),
        latency: Seconds(LATENCY),
        efficiency: 1.0,
        devices_per_link: 1,
        tree: None,
        in_network_reduction: false,
    }
}

fn cluster(dimensions: Vec<Dimension>) -> Cluster {
    Cluster { dimensions, ..preset::get("laptop").unwrap() }
}

fn switch(size: u32) -> Cluster {
    cluster(vec![dimension(DimensionKind::Switch, size)])
}

fn ring(size: u32) -> Cluster {
    cluster(vec![dimension(DimensionKind::Ring, size)])
}

fn ranks(range: std::ops::Range<u32>) -> Vec<Rank> {
    range.map(Rank).collect()
}

fn message(from: u32, to: u32, bytes: u64) -> Job {
    Job::new(Work::Message { from: Rank(from), to: Rank(to), bytes: Bytes(bytes) })
}

fn collective(kind: CollectiveKind, algorithm: Algorithm, members: &[Rank], bytes: u64) -> Job {
    let size = members.len() as u32;
    let pattern = Pattern::new(kind, algorithm, SummationOrder::Free, size, 0).unwrap();
    let vector = Vector::of_bytes(Bytes(bytes));
    Job::new(Work::Collective { pattern, members: members.to_vec(), vector })
}

fn ends(cluster: &Cluster, jobs: &[Job]) -> Vec<f64> {
    simulate_flows(cluster, jobs).unwrap().into_iter().map(|end| end.0).collect()
}

fn alone(cluster: &Cluster, job: Job) -> f64 {
    ends(cluster, &[job])[0]
}

fn analytic(cluster: &Cluster, job: &Job) -> f64 {
    let network = Analytic::new(cluster);
    match &job.work {
        Work::Message { from, to, bytes } => network.message(*from, *to, *bytes).unwrap().0,
        Work::Collective { pattern, members, vector } => {
            network.collective(pattern, members, vector).unwrap().0
        }
    }
}

#[track_caller]
fn close(a: f64, b: f64) {
    assert!((a / b - 1.0).abs() < 1e-9, "{a} is not {b}");
}

/// Chunks pass through the dimensions as in a flow shop: one is in the second dimension while the
/// next is in the first. The analytic backend counts the same.
#[test]
fn chunks_overlap_in_different_dimensions() {
    let cluster =
        cluster(vec![dimension(DimensionKind::Switch, 4), dimension(DimensionKind::Switch, 4)]);
    let members = ranks(0..16);
    let times = |algorithm: &str, kind| {
        let algorithm = algorithm.parse().unwrap();
        let job = collective(kind, algorithm, &members, 48 << 20);
        let Work::Collective { pattern, vector, .. } = &job.work else { unreachable!() };
        let analytic = Analytic::new(&cluster).collective(pattern, &members, vector).unwrap();
        (alone(&cluster, job), analytic.0)
    };
    for kind in [AllReduce, ReduceScatter, AllGather] {
        let grid = "4rx4r@1000x1000";
        let (single, _) = times(&format!("per-dimension:1/{grid}"), kind);
        for (chunks, most) in [(1, 1.001), (2, 0.95), (8, 0.85)] {
            for name in ["per-dimension", "themis"] {
                let (flow, analytic) = times(&format!("{name}:{chunks}/{grid}"), kind);
                assert!((flow / analytic - 1.0).abs() < 1e-9, "{name}:{chunks}: {flow} {analytic}");
                assert!(flow < most * single, "{name}:{chunks} {kind:?}: {flow} {single}");
            }
        }
    }
}

#[test]
fn flows_over_one_link_share_it_equally() {
    for n in [1u32, 2, 5, 100] {
        let cluster = switch(n + 1);
        let jobs: Vec<Job> = (1..=n).map(|from| message(from, 0, 1_000_000)).collect();
        for end in ends(&cluster, &jobs) {
            close(end, LATENCY + f64::from(n) * 1e-3);
        }
    }
}

/// Two messages through one port, one half as long: both get half until the shorter one ends.
#[test]
fn who_stays_gets_what_others_leave() {
    let cluster = switch(3);
    let both = ends(&cluster, &[message(0, 2, 1_000_000), message(1, 2, 2_000_000)]);
    close(both[0], LATENCY + 2e-3);
    close(both[1], LATENCY + 3e-3);
    let later = Job { start: Seconds(1e-3), ..message(1, 2, 1_000_000) };
    let staggered = ends(&cluster, &[message(0, 2, 2_000_000), later]);
    close(staggered[0], LATENCY + 3e-3);
    close(staggered[1], LATENCY + 3e-3);
}

#[test]
fn jobs_start_after_those_they_name() {
    let cluster = switch(4);
    let after = |job: Job, after: &[usize]| Job { after: after.to_vec(), ..job };
    let chain = [
        after(message(1, 2, 1_000_000), &[1]),
        message(0, 1, 1_000_000),
        after(message(2, 3, 0), &[0, 1]),
    ];
    let ends = ends(&cluster, &chain);
    close(ends[1], LATENCY + 1e-3);
    close(ends[0], 2.0 * (LATENCY + 1e-3));
    close(ends[2], 3.0 * LATENCY + 2e-3);
}

#[test]
fn jobs_that_make_no_sense_are_told() {
    let cluster = switch(4);
    let told = |jobs: &[Job]| simulate_flows(&cluster, jobs).unwrap_err();
    let circle = Job { after: vec![0], ..message(0, 1, 1) };
    assert_eq!(told(&[circle]), FlowError::After { job: 0 });
    let nowhere = Job { after: vec![7], ..message(0, 1, 1) };
    assert_eq!(told(&[message(0, 1, 1), nowhere]), FlowError::After { job: 1 });
    for start in [-1.0, f64::NAN, f64::INFINITY] {
        let never = Job { start: Seconds(start), ..message(0, 1, 1) };
        assert_eq!(told(&[never]), FlowError::Start { job: 0 });
    }
    let mut short = collective(AllReduce, Algorithm::Ring, &ranks(0..4), 4);
    if let Work::Collective { members, .. } = &mut short.work {
        members.pop();
    }
    assert_eq!(told(&[short]), FlowError::Members { job: 0, ranks: 4, members: 3 });
    assert_eq!(
        told(&[message(1, 9, 1)]).to_string(),
        "rank 1 has no route to rank 9 on this cluster"
    );
    assert_eq!(simulate_flows(&cluster, &[]), Ok(Vec::new()));
    assert!(alone(&cluster, message(0, 1, u64::MAX)) > 1e9);
}

/// With uniform link loads and no other traffic, both backends agree.
#[test]
fn uniform_collectives_take_what_the_analytic_backend_says() {
    for size in [2u32, 3, 4, 8, 30, 32] {
        for cluster in [switch(size), ring(size)] {
            let members = ranks(0..size);
            let bytes = u64::from(size) << 16;
            for kind in [AllReduce, ReduceScatter, AllGather] {
                let job = collective(kind, Algorithm::Ring, &members, bytes);
                let expected = analytic(&cluster, &job);
                close(alone(&cluster, job), expected);
            }
        }
        let cluster = switch(size);
        let members = ranks(0..size);
        for kind in [AllReduce, ReduceScatter, AllGather, AllToAll] {
            let job = collective(kind, Algorithm::Direct, &members, u64::from(size) << 16);
            let expected = analytic(&cluster, &job);
            close(alone(&cluster, job), expected);
        }
        if size.is_power_of_two() {
            for kind in [AllReduce, ReduceScatter, AllGather] {
                let algorithm = Algorithm::HalvingDoubling;
                let job = collective(kind, algorithm, &members, u64::from(size) << 16);
                let expected = analytic(&cluster, &job);
                close(alone(&cluster, job), expected);
            }
        }
    }
}

/// Patarasuk and Yuan (2009), section 3, on a physical ring.
#[test]
fn a_ring_on_a_ring_is_exact() {
    let (size, bytes) = (16u32, 16u64 << 20);
    let job = collective(AllReduce, Algorithm::Ring, &ranks(0..size), bytes);
    let round = LATENCY + bytes as f64 / f64::from(size) / RATE;
    close(alone(&ring(size), job), 2.0 * f64::from(size - 1) * round);
}

#[test]
fn two_rings_on_the_same_links_take_twice_as_long() {
    let mut cluster = ring(8);
    cluster.dimensions[0].latency = Seconds::ZERO;
    let job = collective(AllReduce, Algorithm::Ring, &ranks(0..8), 8 << 20);
    let one = alone(&cluster, job.clone());
    for end in ends(&cluster, &[job.clone(), job.clone()]) {
        close(end, 2.0 * one);
    }
    // The other direction has separate links.
    let backwards: Vec<Rank> = (0..8).rev().map(Rank).collect();
    let other = collective(AllReduce, Algorithm::Ring, &backwards, 8 << 20);
    for end in ends(&cluster, &[job, other]) {
        close(end, one);
    }
}

/// Two all_reduces of different groups share only the fabric: across hosts each gets half.
#[test]
fn collectives_of_different_groups_contend_where_they_meet() {
    let mut cluster = preset::get("dgx-a100:4").unwrap();
    for dimension in &mut cluster.dimensions {
        dimension.latency = Seconds::ZERO;
    }
    // One device of each host, and its neighbour behind the same NIC.
    cluster.dimensions[1].devices_per_link = 2;
    let group = |first: u32| -> Vec<Rank> { (0..4).map(|host| Rank(host * 8 + first)).collect() };
    let job = |first| collective(AllReduce, Algorithm::Ring, &group(first), 64 << 20);
    let one = alone(&cluster, job(0));
    for end in ends(&cluster, &[job(0), job(1)]) {
        close(end, 2.0 * one);
    }
    for end in ends(&cluster, &[job(0), job(2)]) {
        close(end, one);
    }
    // A later job shares the link only with the rest of the first.
    let later = Job { start: Seconds(one / 2.0), ..job(1) };
    let both = ends(&cluster, &[job(0), later]);
    close(both[0], 1.5 * one);
    close(both[1], 2.0 * one);
}

/// Each rank's vector goes up once and the sum comes down once, concurrently.
#[test]
fn a_switch_that_sums_takes_one_vector_of_time() {
    let cluster = switch(8);
    for (kind, bytes) in [(AllReduce, 1.0), (ReduceScatter, 1.0), (AllGather, 7.0 / 8.0)] {
        let job = collective(kind, Algorithm::InNetwork, &ranks(0..8), 8 << 20);
        let expected = analytic(&cluster, &job);
        close(expected, LATENCY + bytes * f64::from(8 << 20) / RATE);
        close(alone(&cluster, job), expected);
    }
}

/// P−1 parts pass each device's port.
#[test]
fn all_to_all_through_a_switch_is_bound_by_the_port() {
    for size in [4u32, 16, 64] {
        let job = collective(AllToAll, Algorithm::Direct, &ranks(0..size), u64::from(size) << 20);
        let through = f64::from(size - 1) * f64::from(1 << 20) / RATE;
        close(alone(&switch(size), job), LATENCY + through);
    }
}

/// A server receives P vectors of N bytes at B bytes per second and sends as many back.
#[test]
fn a_single_server_is_as_slow_as_its_port() {
    let (size, bytes) = (9u32, 1u64 << 20);
    let single = Algorithm::ParameterServer { servers: 1 };
    let job = collective(AllReduce, single, &ranks(0..size), bytes);
    let one_way = LATENCY + f64::from(size - 1) * bytes as f64 / RATE;
    close(alone(&switch(size), job), 2.0 * one_way);
    let job = collective(Reduce, Algorithm::Direct, &ranks(0..size), bytes);
    close(alone(&switch(size), job), one_way);
    let job = collective(Broadcast, Algorithm::Direct, &ranks(0..size), bytes);
    close(alone(&switch(size), job), one_way);
}

/// Four hosts of four under leaves of two hosts: crossing traffic gets an eighth of a port.
#[test]
fn an_oversubscribed_uplink_is_shared_by_all_that_cross_it() {
    let mut cluster =
        cluster(vec![dimension(DimensionKind::Switch, 4), dimension(DimensionKind::Switch, 4)]);
    cluster.dimensions[1].tree = Some(Tree { leaf: 2, oversubscription: 8.0 });
    let crossing: Vec<Job> = (0..8).map(|from| message(from, from + 8, 1_000_000)).collect();
    for end in ends(&cluster, &crossing) {
        close(end, LATENCY + 8e-3);
    }
    let under_one_leaf: Vec<Job> = (0..4).map(|from| message(from, from + 4, 1_000_000)).collect();
    for end in ends(&cluster, &under_one_leaf) {
        close(end, LATENCY + 1e-3);
    }
    close(alone(&cluster, message(0, 8, 1_000_000)), LATENCY + 1e-3);
    assert_eq!(analytic(&cluster, &crossing[0]), LATENCY + 8e-3);
}

#[test]
fn devices_behind_one_nic_share_it_only_when_both_send() {
    let mut cluster = preset::get("dgx-a100:2").unwrap();
    let nic = cluster.dimensions[1].achievable().0;
    let latency = cluster.dimensions[1].latency.0;
    cluster.dimensions[1].devices_per_link = 2;
    close(alone(&cluster, message(0, 8, 1 << 30)), latency + f64::from(1 << 30) / nic);
    let both = ends(&cluster, &[message(0, 8, 1 << 30), message(1, 9, 1 << 30)]);
    close(both[0], latency + 2.0 * f64::from(1 << 30) / nic);
    let apart = ends(&cluster, &[message(0, 8, 1 << 30), message(2, 10, 1 << 30)]);
    close(apart[0], latency + f64::from(1 << 30) / nic);
}

#[test]
fn a_ring_over_hosts_uses_every_nic_that_the_group_has() {
    let cluster = preset::get("dgx-a100:4").unwrap();
    let job = collective(AllReduce, Algorithm::Ring, &ranks(0..32), 32 << 20);
    let expected = analytic(&cluster, &job);
    close(alone(&cluster, job), expected);
}

/// Halving-doubling messages inside a host do not wait for those between hosts.
#[test]
fn halving_over_hosts_takes_what_the_analytic_backend_says() {
    let cluster = preset::get("dgx-a100:4").unwrap();
    let job = collective(AllReduce, Algorithm::HalvingDoubling, &ranks(0..32), 32 << 20);
    let expected = analytic(&cluster, &job);
    close(alone(&cluster, job), expected);
}

/// Messages around a ring of 8 in both directions load every link equally, so the analytic
/// backend's average is exact, except that short routes end early.
#[test]
fn spreading_around_a_ring_is_bound_by_its_links() {
    let mut cluster = ring(8);
    cluster.dimensions[0].latency = Seconds::ZERO;
    let job = collective(AllToAll, Algorithm::Direct, &ranks(0..8), 8_000_000);
    close(alone(&cluster, job), 8e-3);
}

#[test]
fn a_group_of_one_and_an_empty_vector_take_no_bandwidth() {
    let cluster = switch(8);
    for kind in CollectiveKind::ALL {
        let job = collective(kind, Algorithm::Auto, &ranks(3..4), 1 << 20);
        assert_eq!(alone(&cluster, job), 0.0, "{kind}");
    }
    close(alone(&cluster, collective(AllReduce, Algorithm::Ring, &ranks(0..8), 0)), 14.0 * LATENCY);
}

#[test]
fn the_seam_answers_for_one_thing_at_a_time() {
    let cluster = preset::get("dgx1-v100:2").unwrap();
    let (flow, plain) = (Flow::new(&cluster), Analytic::new(&cluster));
    let inside =
        |network: &dyn CostModel| network.message(Rank(0), Rank(5), Bytes(1 << 20)).unwrap();
    assert_eq!(inside(&flow), inside(&plain));
    let pattern = Pattern::new(AllReduce, Algorithm::Ring, SummationOrder::Free, 8, 0).unwrap();
    let vector = Vector::of_bytes(Bytes(8_000_000));
    let time = |network: &dyn CostModel| network.collective(&pattern, &ranks(0..8), &vector);
    close(time(&flow).unwrap().0, time(&plain).unwrap().0);
    assert!(flow.message(Rank(0), Rank(99), Bytes(1)).is_err());
    assert!(flow.collective(&pattern, &ranks(12..20), &vector).is_err());
}

#[test]
fn absurdly_large_groups_are_refused_and_not_followed() {
    let pattern =
        Pattern::new(AllReduce, Algorithm::Ring, SummationOrder::Free, 1 << 20, 0).unwrap();
    let cluster = switch(1 << 20);
    let vector = Vector::of_bytes(Bytes(1 << 30));
    let members = ranks(0..1 << 20);
    let told = collective_time(&cluster, &pattern, &members, &vector).unwrap_err();
    assert_eq!(told, FlowError::TooManyMessages);
}

/// 256 devices on a switch form one class, and a ring has one message in each round.
#[test]
fn what_is_alike_is_simulated_once() {
    let job = collective(AllReduce, Algorithm::Ring, &ranks(0..256), 256 << 10);
    let (_, messages) = run(&switch(256), std::slice::from_ref(&job), Folding::On).unwrap();
    assert_eq!(messages, 2 * 255);
    let job = collective(AllToAll, Algorithm::Direct, &ranks(0..64), 64 << 10);
    let (_, messages) = run(&switch(64), &[job], Folding::On).unwrap();
    assert_eq!(messages, 1);
    let hosts = preset::get("dgx-a100:8").unwrap();
    let job = collective(AllReduce, Algorithm::Ring, &ranks(0..64), 64 << 10);
    let (_, messages) = run(&hosts, &[job], Folding::On).unwrap();
    assert!(messages <= 2 * 63 * 8, "{messages}");
}

/// Networks with asymmetries.
fn networks() -> impl Strategy<Value = Cluster> {
    let torus = |shape: Vec<u32>, wrap| {
        let size = shape.iter().product();
        dimension(DimensionKind::Torus { shape, wrap }, size)
    };
    let tree = |leaf, oversubscription| Dimension {
        tree: Some(Tree { leaf, oversubscription }),
        ..dimension(DimensionKind::Switch, 6)
    };
    let nic = |sharing| Dimension {
        devices_per_link: sharing,
        bandwidth: BytesPerSec(RATE / 4.0),
        ..dimension(DimensionKind::Switch, 3)
    };
    let edge = |a, b, width| GraphLink { between: [a, b], width, bandwidth: None, latency: None };
    let links = vec![edge(0, 1, 2), edge(1, 2, 1), edge(2, 3, 2), edge(3, 0, 1), edge(0, 2, 1)];
    let graph = dimension(DimensionKind::Graph { switches: 0, links }, 4);
    prop_oneof![
        Just(switch(12)),
        Just(ring(12)),
        Just(cluster(vec![dimension(DimensionKind::FullyConnected, 12)])),
        Just(cluster(vec![torus(vec![4, 3], true)])),
        Just(cluster(vec![torus(vec![4, 3], false)])),
        Just(cluster(vec![dimension(DimensionKind::Switch, 2), tree(2, 3.0)])),
        Just(cluster(vec![dimension(DimensionKind::Switch, 4), nic(2)])),
        Just(cluster(vec![dimension(DimensionKind::Ring, 4), nic(1)])),
        Just(cluster(vec![graph.clone(), dimension(DimensionKind::Ring, 3)])),
        Just(cluster(vec![graph, nic(4)])),
    ]
}

fn jobs() -> impl Strategy<Value = Vec<Job>> {
    let kind = proptest::sample::select(CollectiveKind::ALL.to_vec());
    let algorithm = proptest::sample::select(vec![
        "ring",
        "halving-doubling",
        "direct",
        "ps:2",
        "tree",
        "multi-ring:2",
        "shared-memory",
        "hierarchical:ring:halving-doubling/2",
        "torus:3x4",
    ]);
    let algorithm = algorithm.prop_map(|name| name.parse::<Algorithm>().unwrap());
    let members = (0u32..12, 2u32..13, 1u32..6).prop_map(|(first, size, stride)| {
        let mut members: Vec<u32> = (0..size).map(|i| (first + i * stride) % 12).collect();
        members.sort_unstable();
        members.dedup();
        members.into_iter().map(Rank).collect::<Vec<_>>()
    });
    let group =
        (kind, algorithm, members, 0u64..1 << 22).prop_map(|(kind, how, members, bytes)| {
            let size = members.len() as u32;
            let how = if Pattern::new(kind, how, SummationOrder::Free, size, 0).is_ok() {
                how
            } else {
                Algorithm::Auto
            };
            collective(kind, how, &members, bytes)
        });
    let pair = (0u32..12, 1u32..12, 0u64..1 << 22)
        .prop_map(|(from, ahead, bytes)| message(from, (from + ahead) % 12, bytes));
    let job = (prop_oneof![3 => group, 1 => pair], 0u32..3);
    proptest::collection::vec(job, 1..5).prop_map(|jobs| {
        let place = |(index, (job, delay)): (usize, (Job, u32))| {
            let after = if delay == 2 { (0..index).take(1).collect() } else { Vec::new() };
            Job { start: Seconds(f64::from(delay) * 3e-4), after, ..job }
        };
        jobs.into_iter().enumerate().map(place).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Folded and unfolded runs agree, and folded runs are bitwise reproducible.
    #[test]
    fn folding_changes_nothing(cluster in networks(), jobs in jobs()) {
        let (folded, few) = run(&cluster, &jobs, Folding::On).unwrap();
        let (unfolded, all) = run(&cluster, &jobs, Folding::Off).unwrap();
        prop_assert!(few <= all);
        for (a, b) in folded.iter().zip(&unfolded) {
            prop_assert!((a.0 - b.0).abs() <= 1e-9 * b.0, "{} {}", a.0, b.0);
        }
        prop_assert_eq!(folded, run(&cluster, &jobs, Folding::On).unwrap().0);
    }

    /// No job is faster with concurrent jobs, and none beats the bound set by its busiest rank.
    #[test]
    fn nothing_is_faster_than_its_ports(
        size in 2u32..13,
        algorithm in prop_oneof![
            Just(Algorithm::Ring), Just(Algorithm::HalvingDoubling), Just(Algorithm::Direct)
        ],
        parts in 0u64..1 << 12,
    ) {
        // Divisible by every group size used.
        let bytes = parts * 27720;
        let cluster = switch(size);
        let job = collective(AllReduce, algorithm, &ranks(0..size), bytes);
        let Work::Collective { pattern, .. } = &job.work else { unreachable!() };
        let counts = pattern.counts(Bytes(bytes));
        let bound = counts.rounds as f64 * LATENCY + counts.bytes_sent_per_rank_max.0 as f64 / RATE;
        let time = alone(&cluster, job.clone());
        prop_assert!(time >= bound * (1.0 - 1e-9), "{time} under {bound}");
        // If some ranks wait out a round, ranks ahead of them share their links.
        if algorithm != Algorithm::HalvingDoubling || size.is_power_of_two() {
            prop_assert!(time <= analytic(&cluster, &job) * (1.0 + 1e-9));
        }
        let both = ends(&cluster, &[job.clone(), job]);
        prop_assert!(both[0] >= time * (1.0 - 1e-9));
    }
}
