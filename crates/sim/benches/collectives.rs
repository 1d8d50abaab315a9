//! Single collectives: folded, message by message, and with ASTRA-sim's semantics.

// The macro generates undocumented items.
#![allow(missing_docs)]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use paceline_plan::collective::{CollectiveKind, Pattern, SummationOrder};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use paceline_sim::astra;
use paceline_sim::cluster::{Cluster, Dimension, DimensionKind, preset};
use paceline_sim::network::{Analytic, CostModel, Flow, Vector};
use std::hint::black_box;

/// Creates a cluster that consists of one dimension.
fn cluster(kind: DimensionKind, size: u32) -> Cluster {
    let dimension = Dimension {
        name: "wire".into(),
        kind,
        size,
        bandwidth: BytesPerSec(50e9),
        latency: Seconds(5e-7),
        efficiency: 1.0,
        devices_per_link: 1,
        tree: None,
        in_network_reduction: false,
    };
    Cluster { dimensions: vec![dimension], hosts: 1, ..preset::get("laptop").unwrap() }
}

fn torus(shape: &[u32]) -> Cluster {
    let kind = DimensionKind::Torus { shape: shape.to_vec(), wrap: true };
    cluster(kind, shape.iter().product())
}

fn all_reduce(cluster: &Cluster, name: &str) -> (Pattern, Vec<Rank>) {
    let ranks = cluster.devices() as u32;
    let members: Vec<Rank> = (0..ranks).map(Rank).collect();
    let algorithm = cluster.fabric().resolve(name.parse().unwrap(), &members).unwrap();
    let kind = CollectiveKind::AllReduce;
    (Pattern::new(kind, algorithm, SummationOrder::Free, ranks, 0).unwrap(), members)
}

fn folded(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("all_reduce of 1 GiB, folded");
    group.sample_size(10);
    let vector = Vector::of_bytes(Bytes(1 << 30));
    let large = torus(&[64, 32, 32]);
    for (what, cluster, algorithm) in [
        ("ring on 4,096 devices in a ring", &cluster(DimensionKind::Ring, 4096), "ring"),
        ("ring on a torus of 65,536", &large, "ring"),
        ("per-dimension:4 on a torus of 65,536", &large, "per-dimension:4"),
        ("themis:64 on a torus of 65,536", &large, "themis:64"),
    ] {
        let (pattern, members) = all_reduce(cluster, algorithm);
        let network = Analytic::new(cluster);
        group.bench_function(format!("analytic, {what}"), |bencher| {
            bencher.iter(|| network.collective(black_box(&pattern), &members, &vector).unwrap());
        });
    }
    let hosts = preset::get("dgx-a100:128").unwrap();
    let (pattern, members) = all_reduce(&hosts, "ring");
    group.bench_function("flow, ring on 1,024 devices of dgx-a100", |bencher| {
        bencher.iter(|| Flow::new(&hosts).collective(black_box(&pattern), &members, &vector));
    });
    group.finish();
}

fn unfolded(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("message by message");
    group.sample_size(10);
    let vector = Vector::of_bytes(Bytes(1 << 30));
    for (what, cluster) in [
        ("a ring of 1,024", cluster(DimensionKind::Ring, 1024)),
        ("a switch of 1,024", cluster(DimensionKind::Switch, 1024)),
        ("dgx-a100:128", preset::get("dgx-a100:128").unwrap()),
    ] {
        let (pattern, members) = all_reduce(&cluster, "ring");
        let network = Analytic::new(&cluster);
        let (_, messages) = network.every_message(&pattern, &members, &vector).unwrap();
        group.throughput(Throughput::Elements(messages));
        group.bench_function(format!("analytic, ring all_reduce on {what}"), |bencher| {
            bencher.iter(|| network.every_message(black_box(&pattern), &members, &vector));
        });
    }
    group.finish();
}

/// The two slowest of ASTRA-sim's own runs: 186 s and 585 s.
fn as_astra_sim(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ASTRA-sim's semantics");
    group.sample_size(10);
    let dimension = |size| astra::Dimension {
        kind: astra::Kind::Ring,
        size,
        bandwidth_gibps: 50.0,
        latency_ns: 500.0,
    };
    let case = |dims: Vec<astra::Dimension>, splits| astra::Case {
        backend: astra::Backend::CongestionUnaware,
        collective: astra::Collective::AllReduce,
        bytes: 1 << 30,
        algorithms: astra::Algorithms::PerDimension(vec![astra::Algorithm::Ring; dims.len()]),
        dims,
        splits,
        active_chunks: 1,
        optimization: astra::Optimization::LocalBwAware,
        endpoint_delay_ns: 10,
        local_mem_gbps: 1600.0,
    };
    for (what, case) in [
        ("ring all_reduce on 4,096 devices", case(vec![dimension(4096)], 1)),
        ("a torus of 65,536", case([64, 32, 32].map(dimension).to_vec(), 4)),
    ] {
        group.bench_function(what, |bencher| {
            bencher.iter(|| astra::simulate(black_box(&case)).unwrap().time_ns_max);
        });
    }
    group.finish();
}

criterion_group!(benches, folded, unfolded, as_astra_sim);
criterion_main!(benches);
