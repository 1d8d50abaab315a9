use super::*;
use crate::cluster::preset;
use crate::{Library, Options, Profile, simulate};
use paceline_plan::collective::{self as native, SummationOrder};
use paceline_plan::lower::lower_on;
use paceline_plan::model::built_in;
use paceline_plan::strategy::Strategy;
use proptest::prelude::*;

fn ranks(range: std::ops::Range<u32>) -> Vec<Rank> {
    range.map(Rank).collect()
}

fn pattern(
    kind: CollectiveKind,
    algorithm: Algorithm,
    order: SummationOrder,
    ranks: usize,
) -> Pattern {
    Pattern::new(kind, algorithm, order, ranks as u32, 0).unwrap()
}

const OPEN: (native::Library, Option<Algorithm>) = (native::Library::Nccl, None);
const RING: (native::Library, Option<Algorithm>) = (native::Library::Nccl, Some(Algorithm::Ring));

/// Time of a collective whose algorithm is left to NCCL.
fn open(cluster: &Cluster, kind: CollectiveKind, members: &[Rank], bytes: u64) -> f64 {
    let pattern = pattern(kind, Algorithm::Auto, SummationOrder::Free, members.len());
    let vector = Vector::of_bytes(Bytes(bytes));
    Nccl::new(cluster).unwrap().native(OPEN, &pattern, members, &vector).unwrap().0
}

/// Time of a collective with NCCL's ring.
fn ring(cluster: &Cluster, kind: CollectiveKind, members: &[Rank], bytes: u64) -> f64 {
    let pattern = pattern(kind, Algorithm::Ring, SummationOrder::Free, members.len());
    let vector = Vector::of_bytes(Bytes(bytes));
    Nccl::new(cluster).unwrap().native(RING, &pattern, members, &vector).unwrap().0
}

/// Bus bandwidth of an all_reduce, as defined by nccl-tests.
fn bus(members: usize, bytes: u64, time: f64) -> f64 {
    let n = members as f64;
    bytes as f64 * 2.0 * (n - 1.0) / n / time
}

const LARGE: u64 = 8 << 30;

#[test]
fn large_vectors_get_what_the_links_carry() {
    let cluster = preset::get("dgx-a100").unwrap();
    let links = cluster.dimensions[0].achievable().0;
    for gpus in 2..=8 {
        let members = ranks(0..gpus);
        let time = open(&cluster, CollectiveKind::AllReduce, &members, LARGE);
        let share = bus(members.len(), LARGE, time) / links;
        assert!(share > 0.88 && share < 1.0, "{gpus}: {share}");
        let half = open(&cluster, CollectiveKind::ReduceScatter, &members, LARGE);
        assert!(half > 0.5 * time && half < 0.6 * time, "{gpus}: {half} of {time}");
    }
}

#[test]
fn a_cube_mesh_is_as_fast_as_its_rings() {
    let host = preset::get("dgx1-v100").unwrap();
    let link = host.dimensions[0].achievable().0;
    let rings = |gpus: u32| {
        let members = ranks(0..gpus);
        let time = open(&host, CollectiveKind::AllReduce, &members, LARGE);
        bus(members.len(), LARGE, time) / link
    };
    for (gpus, expected) in [(2, 1.0), (3, 2.0), (4, 4.0), (6, 2.0), (7, 4.0), (8, 6.0)] {
        let found = rings(gpus);
        assert!((found / expected - 1.0).abs() < 0.01, "{gpus}: {found}");
    }
    assert!(rings(5) > 1.5 && rings(5) < 2.0, "through GPU 0's memory");
}

/// "Machine Learning Engineering" (Bekman), network chapter: 8 H100s reach 480 GB/s with in-switch
/// reduction and 361 to 367 GB/s without.
#[test]
fn switches_of_the_third_generation_reduce() {
    let cluster = preset::get("dgx-h100").unwrap();
    let members = ranks(0..8);
    let kind = CollectiveKind::AllReduce;
    let chosen = bus(8, LARGE, open(&cluster, kind, &members, LARGE)) / 1e9;
    let rings = bus(8, LARGE, ring(&cluster, kind, &members, LARGE)) / 1e9;
    assert!((chosen / 480.0 - 1.0).abs() < 0.05, "{chosen}");
    assert!((rings / 364.0 - 1.0).abs() < 0.05, "{rings}");
    let older = preset::get("dgx-a100").unwrap();
    assert_eq!(open(&older, kind, &members, LARGE), ring(&older, kind, &members, LARGE));
}

#[test]
fn rings_over_hosts_use_every_nic_that_the_group_has() {
    let cluster = preset::get("dgx-a100:4").unwrap();
    let nic = cluster.dimensions[1].achievable().0;
    let nics = |members: &[Rank]| {
        let time = ring(&cluster, CollectiveKind::AllReduce, members, LARGE);
        bus(members.len(), LARGE, time) / nic
    };
    let everyone = nics(&ranks(0..32));
    assert!(everyone > 7.8 && everyone < 8.0, "{everyone}");
    let one_each: Vec<Rank> = (0..4).map(|host| Rank(host * 8 + 5)).collect();
    assert!(nics(&one_each) > 0.98 && nics(&one_each) < 1.0, "{}", nics(&one_each));
}

#[test]
fn small_vectors_over_many_hosts_go_by_trees() {
    let cluster = preset::get("dgx-a100:128").unwrap();
    let (members, kind) = (ranks(0..1024), CollectiveKind::AllReduce);
    let rings = ring(&cluster, kind, &members, 1 << 20);
    let chosen = open(&cluster, kind, &members, 1 << 20);
    assert!(chosen < rings / 5.0, "{chosen} {rings}");
    assert!(chosen > 100e-6, "seven levels up and down take their time: {chosen}");
}

#[test]
fn what_nccl_does_not_have_is_timed_by_its_steps() {
    let cluster = preset::get("dgx-a100:2").unwrap();
    let (nccl, steps) = (Nccl::new(&cluster).unwrap(), Analytic::new(&cluster));
    let (members, vector) = (ranks(0..16), Vector::of_bytes(Bytes(1 << 24)));
    let kind = CollectiveKind::AllReduce;
    let mut exact = vec![pattern(kind, Algorithm::Direct, SummationOrder::Canonical, 16)];
    for algorithm in [Algorithm::HalvingDoubling, Algorithm::Direct] {
        exact.push(pattern(kind, algorithm, SummationOrder::Free, 16));
    }
    for pattern in exact {
        let times = [&nccl as &dyn CostModel, &steps]
            .map(|network| network.collective(&pattern, &members, &vector).unwrap());
        assert_eq!(times[0], times[1], "{}", pattern.algorithm());
    }
    let mut ring = cluster.clone();
    ring.dimensions[0].kind = crate::cluster::DimensionKind::Ring;
    let pattern = pattern(kind, Algorithm::Ring, SummationOrder::Free, 16);
    let exact = Analytic::new(&ring).collective(&pattern, &members, &vector).unwrap();
    assert_eq!(Nccl::new(&ring).unwrap().native(RING, &pattern, &members, &vector), Ok(exact));
}

#[test]
fn there_is_no_nccl_without_gpus() {
    for name in preset::names() {
        let others = ["laptop", "tpu-v4", "tpu-v5p", "tpu-v6e", "gaudi2", "cs-2", "dojo"];
        let has_gpus = !others.contains(&name);
        assert_eq!(Nccl::new(&preset::get(name).unwrap()).is_some(), has_gpus, "{name}");
    }
}

#[test]
fn messages_cost_a_launch() {
    let cluster = preset::get("dgx-a100:2").unwrap();
    let nccl = Nccl::new(&cluster).unwrap();
    let time = |to: u32, bytes: u64| nccl.message(Rank(0), Rank(to), Bytes(bytes)).unwrap().0;
    assert!((time(1, 0) * 1e6 - 21.8).abs() < 1e-9, "start, base and a hop inside the host");
    assert!((time(8, 0) * 1e6 - 32.4).abs() < 1e-9, "and one to the next");
    let nic = cluster.dimensions[1].achievable().0;
    assert!(((time(8, 1 << 30) - time(8, 0)) * nic / f64::from(1 << 30) - 1.0).abs() < 1e-9);
    let members = ranks(0..16);
    let all = open(&cluster, CollectiveKind::AllToAll, &members, 1 << 20);
    let pattern = pattern(CollectiveKind::AllToAll, Algorithm::Direct, SummationOrder::Free, 16);
    let vector = Vector::of_bytes(Bytes(1 << 20));
    let steps = Analytic::new(&cluster).collective(&pattern, &members, &vector).unwrap().0;
    assert!(all > steps && all < steps + 20e-6);
}

#[test]
fn ranks_outside_the_cluster_are_named() {
    let cluster = preset::get("dgx-a100").unwrap();
    let nccl = Nccl::new(&cluster).unwrap();
    let pattern = pattern(CollectiveKind::AllReduce, Algorithm::Auto, SummationOrder::Free, 2);
    let vector = Vector::of_bytes(Bytes(1));
    let error = nccl.native(OPEN, &pattern, &[Rank(1), Rank(9)], &vector).unwrap_err();
    assert_eq!(error.to_string(), "rank 1 has no route to rank 9 on this cluster");
}

/// The library is consulted only if the plan calls it.
#[test]
fn plans_say_where_the_library_may_choose() {
    let model = built_in::get("gpt-1.7b").unwrap().unwrap();
    let cluster = preset::get("dgx-a100").unwrap();
    let base =
        Strategy { dp: 8, leaves: 8, global_batch: 8, seq: model.seq, ..Strategy::default() };
    let differs = |order: SummationOrder, collective: Algorithm| {
        let strategy = Strategy { order, collective, ..base.clone() };
        let time = |library: Library| {
            let profile = Profile { library, ..Profile::MODERN };
            let plan = lower_on(&model, &strategy, &cluster.fabric_with(&profile)).unwrap();
            simulate(&plan, &cluster, &Options { profile, ..Options::default() }).unwrap().iteration
        };
        time(Library::Steps) != time(Library::Nccl)
    };
    assert!(differs(SummationOrder::Free, Algorithm::Auto));
    assert!(differs(SummationOrder::Free, Algorithm::Ring));
    assert!(!differs(SummationOrder::Free, Algorithm::HalvingDoubling));
    assert!(!differs(SummationOrder::Canonical, Algorithm::Auto));
}

proptest! {
    /// For any group and size, the time is finite and never shorter than the links allow.
    #[test]
    fn no_choice_beats_the_links(
        hosts in 1u32..5,
        first in 0u32..8,
        step in 1u32..9,
        bytes in prop_oneof![0u64..1 << 34, Just(u64::MAX)],
        name in prop_oneof![Just("dgx-a100"), Just("dgx1-v100")],
        kind in prop::sample::select(&CollectiveKind::ALL[..]),
    ) {
        let cluster = preset::get(&format!("{name}:{hosts}")).unwrap();
        let members: Vec<Rank> = (first..hosts * 8).step_by(step as usize).map(Rank).collect();
        let time = open(&cluster, kind, &members, bytes);
        prop_assert!(time.is_finite());
        if members.len() < 2 {
            prop_assert_eq!(time, 0.0);
            return Ok(());
        }
        prop_assert!(time >= START);
        // Every rank receives all data it did not have, over at most all of its links.
        let links = if name == "dgx1-v100" { 6.0 } else { 1.0 };
        let n = members.len() as f64;
        let least = bytes as f64 * (n - 1.0) / n / (links * cluster.dimensions[0].achievable().0);
        let arrives_whole = match kind {
            CollectiveKind::AllReduce | CollectiveKind::AllGather => true,
            CollectiveKind::ReduceScatter
            | CollectiveKind::Broadcast
            | CollectiveKind::Reduce
            | CollectiveKind::Gather
            | CollectiveKind::AllToAll
            | CollectiveKind::Scatter
            | CollectiveKind::SendRecv
            | CollectiveKind::Barrier => false,
        };
        prop_assert!(!arrives_whole || time >= least, "{time} {least}");
    }
}
