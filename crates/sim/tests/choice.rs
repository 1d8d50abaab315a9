//! `auto` against every named algorithm, and rings against the links that they run over.

use paceline_plan::collective::{Algorithm, Ask, CollectiveKind, Pattern, SummationOrder::Free};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, BytesPerSec};
use paceline_sim::cluster::{Cluster, preset};
use paceline_sim::network::{Analytic, CostModel, Flow, Vector};

const CLUSTERS: [&str; 13] = [
    "dgx1-v100",
    "dgx1-v100:2",
    "dgx-a100:2",
    "dgx-h100:4",
    "dgx-b200:3",
    "gb200-nvl72:2",
    "tpu-v4:16",
    "laptop:4",
    "zionex:2",
    "a100-pcie:2",
    "gaudi2:2",
    "dojo",
    "cs-2:4",
];

/// Algorithms as people name them; those that a cluster or a group cannot run are left out there.
const NAMES: [&str; 32] = [
    "ring",
    "multi-ring:2",
    "multi-ring:3",
    "multi-ring:4",
    "multi-ring:6",
    "multi-ring:8",
    "halving-doubling",
    "tree",
    "direct",
    "ps",
    "ps:4",
    "naive",
    "overlapped",
    "one-shot",
    "partitioned",
    "bruck",
    "torus:4x4",
    "torus:8x2",
    "in-network",
    "hierarchical:ring:ring",
    "hierarchical:ring:tree",
    "hierarchical:halving-doubling:ring",
    "hierarchical:direct:ring",
    "hierarchical:direct:direct",
    "hierarchical:direct:halving-doubling",
    "hierarchical:tree:tree",
    "hierarchical:multi-ring:2:ring",
    "per-dimension",
    "per-dimension:8",
    "themis:2",
    "themis:16",
    "themis:64",
];

fn cluster(name: &str) -> (Cluster, Vec<Rank>) {
    let cluster = preset::get(name).unwrap();
    let members = (0..cluster.devices() as u32).map(Rank).collect();
    (cluster, members)
}

fn pattern(
    cluster: &Cluster,
    kind: CollectiveKind,
    name: &str,
    members: &[Rank],
) -> Option<Pattern> {
    let settled = cluster.fabric().resolve(name.parse().unwrap(), members).ok()?;
    Pattern::new(kind, settled, Free, members.len() as u32, 0).ok()
}

#[test]
fn auto_is_as_fast_as_the_best_named_algorithm() {
    for name in CLUSTERS {
        let (cluster, members) = cluster(name);
        let (fabric, network) = (cluster.fabric(), Analytic::new(&cluster));
        for kind in CollectiveKind::ALL {
            let named: Vec<Pattern> =
                NAMES.iter().filter_map(|named| pattern(&cluster, kind, named, &members)).collect();
            for bytes in [1u64 << 10, 1 << 16, 1 << 20, 1 << 25, 1 << 30, 1 << 32] {
                let vector = Vector::of_bytes(Bytes(bytes));
                let ask = Ask {
                    kind,
                    algorithm: Algorithm::Auto,
                    order: Free,
                    elements: bytes,
                    element: Bytes(1),
                    dtype: None,
                    block: 1,
                };
                let chosen = fabric.fastest(&members, &ask);
                let time =
                    |pattern: &Pattern| network.collective(pattern, &members, &vector).unwrap().0;
                let chosen = Pattern::new(kind, chosen, Free, members.len() as u32, 0).unwrap();
                let ours = time(&chosen);
                for other in &named {
                    let theirs = time(other);
                    assert!(
                        ours <= 1.05 * theirs,
                        "{kind} of {bytes} bytes on {name}: {} takes {ours}, {} {theirs}",
                        chosen.algorithm(),
                        other.algorithm()
                    );
                }
            }
        }
    }
}

/// The links of no dimension are busy for longer than the collective takes.
#[test]
fn no_link_is_busy_for_more_than_the_whole_time() {
    for name in CLUSTERS {
        let (cluster, members) = cluster(name);
        for kind in CollectiveKind::ALL {
            for named in NAMES {
                let Some(pattern) = pattern(&cluster, kind, named, &members) else { continue };
                for bytes in [1u64 << 16, 1 << 30] {
                    let vector = Vector::of_bytes(Bytes(bytes));
                    let profile =
                        Analytic::new(&cluster).profile(&pattern, &members, &vector).unwrap();
                    for load in profile.dimensions {
                        assert!(
                            load.utilisation <= 1.0 + 1e-6,
                            "{kind} by {} on {name}: {} of {}",
                            pattern.algorithm(),
                            load.utilisation,
                            load.dimension
                        );
                    }
                }
            }
        }
    }
}

/// Rings of their own links take as long message by message as in closed form.
#[test]
fn backends_agree_where_rings_share_no_link() {
    let vector = Vector::of_bytes(Bytes(1 << 30));
    for (name, rings) in [
        ("dgx1-v100", "multi-ring:4"),
        ("dgx1-v100:2", "multi-ring:2"),
        ("dgx1-v100:2", "multi-ring:4"),
        ("dgx-a100:2", "multi-ring:4"),
        ("dgx-a100:2", "multi-ring:8"),
        ("dgx-h100:4", "multi-ring:8"),
    ] {
        let (cluster, members) = cluster(name);
        let pattern = pattern(&cluster, CollectiveKind::AllReduce, rings, &members).unwrap();
        let closed = Analytic::new(&cluster).collective(&pattern, &members, &vector).unwrap().0;
        let flow = Flow::new(&cluster).collective(&pattern, &members, &vector).unwrap().0;
        let text = format!("{} on {name}: {closed} and {flow}", pattern.algorithm());
        assert!((flow / closed - 1.0).abs() < 0.05, "{text}");
    }
}

/// Published bandwidths of rings. A ring of *n* ranks moves 2(n−1)/n of the vector through every
/// link, so that the vector's bytes over its time are n/(2(n−1)) of a ring's bandwidth.
#[test]
fn rings_reach_published_bandwidths() {
    let bus = |cluster: &Cluster, rings: &str| {
        let members: Vec<Rank> = (0..cluster.devices() as u32).map(Rank).collect();
        let pattern = pattern(cluster, CollectiveKind::AllReduce, rings, &members).unwrap();
        let bytes = 4u64 << 30;
        let vector = Vector::of_bytes(Bytes(bytes));
        let time = Analytic::new(cluster).collective(&pattern, &members, &vector).unwrap().0;
        let ranks = members.len() as f64;
        bytes as f64 / time * 2.0 * (ranks - 1.0) / ranks / 1e9
    };
    let near = |found: f64, published: f64| {
        assert!((found / published - 1.0).abs() < 0.01, "{found} and {published} GB/s");
    };
    // NVIDIA, "NCCL 2.0" (GTC 2017): four rings of 22 to 23 GB/s in a DGX-1.
    let dgx1 = preset::get("dgx1-v100").unwrap();
    near(bus(&dgx1, "multi-ring:4"), 4.0 * 22.5);
    // Four EDR NICs of 12.5 GB/s each, of which 42 of 50 GB/s were reached.
    let mut pair = preset::get("dgx1-v100:2").unwrap();
    pair.dimensions[1].efficiency = 0.84;
    near(bus(&pair, "multi-ring:4"), 42.0);
    // Eight HDR NICs of 25 GB/s, of which 160 of 200 GB/s were reached.
    let mut a100 = preset::get("dgx-a100:2").unwrap();
    a100.dimensions[1].efficiency = 0.80;
    assert_eq!(a100.dimensions[1].bandwidth, BytesPerSec(25e9));
    near(bus(&a100, "multi-ring:8"), 160.0);
}
