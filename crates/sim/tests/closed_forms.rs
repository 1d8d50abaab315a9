//! Closed-form tests: on every single-dimension topology, the analytic time of every algorithm
//! equals its closed form.
//!
//! The model is α–β with hops and shared links: a round takes α for each hop of its farthest
//! message, plus the bytes that cross its busiest link over β. [`formula`] gives textbook closed
//! forms in the notation of Thakur, Rabenseifner and Gropp, "Optimization of Collective
//! Communication Operations in MPICH" (2005): P ranks, N bytes, α latency and b seconds per byte of
//! one link. [`laid`] independently places every message of every algorithm on links, also for
//! algorithms without a closed form.

use paceline_plan::collective::{
    Action, Algorithm, Chunking, CollectiveKind, DimAlgorithm, Pattern, RingSet, SummationOrder,
    TorusShape,
};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use paceline_sim::cluster::{Cluster, Dimension, DimensionKind, preset};
use paceline_sim::network::{Analytic, CostModel, Vector};
use std::collections::BTreeMap;

use CollectiveKind::{
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter, Scatter,
    SendRecv,
};

const ALPHA: f64 = 3e-6;
const RATE: f64 = 20e9;
const B: f64 = 1.0 / RATE;

/// Cluster of a single dimension.
fn cluster(kind: DimensionKind, size: u32) -> Cluster {
    let dimension = Dimension {
        name: "wire".into(),
        kind,
        size,
        bandwidth: BytesPerSec(RATE),
        latency: Seconds(ALPHA),
        efficiency: 1.0,
        devices_per_link: 1,
        tree: None,
        in_network_reduction: true,
    };
    Cluster { dimensions: vec![dimension], hosts: 1, ..preset::get("laptop").unwrap() }
}

fn topologies() -> Vec<Cluster> {
    let mut all = Vec::new();
    for size in [2, 3, 4, 6, 7, 8, 12, 16] {
        for kind in [DimensionKind::Switch, DimensionKind::FullyConnected, DimensionKind::Ring] {
            all.push(cluster(kind, size));
        }
    }
    let shapes: [&[u32]; 8] =
        [&[5], &[8], &[4, 4], &[3, 4], &[2, 6], &[2, 2, 2], &[4, 2, 4], &[3, 2, 5]];
    for shape in shapes {
        let size = shape.iter().product();
        all.push(cluster(DimensionKind::Torus { shape: shape.to_vec(), wrap: true }, size));
    }
    all
}

fn algorithms(ranks: u32) -> Vec<Algorithm> {
    let mut names: Vec<String> = [
        "ring",
        "multi-ring:2",
        "multi-ring:3",
        "halving-doubling",
        "tree",
        "direct",
        "shared-memory",
        "ps",
        "ps:2",
        "naive",
        "overlapped",
        "one-shot",
        "partitioned",
        "in-network",
    ]
    .map(String::from)
    .to_vec();
    names.push(format!("ps:{ranks}"));
    names.push(format!("per-dimension/{ranks}r"));
    names.push(format!("themis:1/{ranks}d"));
    for a in (2..ranks).filter(|a| ranks.is_multiple_of(*a)) {
        names.push(format!("torus:{a}x{}", ranks / a));
        names.push(format!("per-dimension/{a}dx{}r", ranks / a));
        names.push(format!("hierarchical:ring:halving-doubling/{a}"));
        names.push(format!("hierarchical:shared-memory:tree/{a}"));
        names.push(format!("hierarchical:direct:in-network/{a}"));
    }
    names.into_iter().map(|name| name.parse().unwrap()).collect()
}

fn simulated(cluster: &Cluster, pattern: &Pattern, bytes: u64) -> f64 {
    let members: Vec<Rank> = (0..pattern.ranks()).map(Rank).collect();
    let vector = Vector::of_bytes(Bytes(bytes));
    Analytic::new(cluster).collective(pattern, &members, &vector).unwrap().0
}

#[track_caller]
fn close(found: f64, wanted: f64, what: &str) {
    let error = (found - wanted).abs();
    assert!(error <= 1e-9 * wanted.abs(), "{what}: {found} is not {wanted}");
}

#[test]
fn every_algorithm_takes_what_its_messages_take() {
    let (mut cases, mut with_formula) = (0, 0);
    for cluster in topologies() {
        let dimension = &cluster.dimensions[0];
        let ranks = dimension.size;
        for algorithm in algorithms(ranks) {
            for kind in CollectiveKind::ALL {
                let Ok(pattern) = Pattern::new(kind, algorithm, SummationOrder::Free, ranks, 0)
                else {
                    continue;
                };
                if uses_a_switch(&pattern) && dimension.kind != DimensionKind::Switch {
                    continue;
                }
                for parts in [0, 1, 4096, 1 << 20] {
                    // All splits are even: into chunks, and these into pieces.
                    let bytes = parts * u64::from(pattern.chunks()) * 12;
                    let what = format!("{:?} of {bytes} on {:?}", pattern, dimension.kind);
                    let found = simulated(&cluster, &pattern, bytes);
                    close(found, laid(&dimension.kind, &pattern, bytes), &what);
                    cases += 1;
                    if let Some(wanted) = formula(&dimension.kind, &pattern, bytes as f64) {
                        close(found, wanted, &what);
                        with_formula += 1;
                    }
                }
            }
        }
    }
    assert!(cases > 5000 && with_formula > 2500, "{cases} {with_formula}");
}

fn uses_a_switch(pattern: &Pattern) -> bool {
    pattern.steps(0).iter().any(|step| matches!(step.action, Action::Offer { .. }))
}

/// Link by ends and kind: `(from, to, 0)` if direct, `(rank, rank, 1 or 2)` for switch ports.
type Link = (u32, u32, u8);

/// Time from placing all messages of each round on links.
fn laid(kind: &DimensionKind, pattern: &Pattern, bytes: u64) -> f64 {
    let cut = Chunking { elements: bytes, chunks: pattern.chunks(), block: 1 };
    let mut rounds: BTreeMap<u32, (u32, BTreeMap<Link, f64>)> = BTreeMap::new();
    for me in 0..pattern.ranks() {
        for step in pattern.steps(me) {
            let (hops, loads) = rounds.entry(step.round).or_default();
            let mut load = |link: Link, bytes: f64| *loads.entry(link).or_default() += bytes;
            match step.action {
                Action::Send { to, chunks }
                | Action::Lend { to, chunks }
                | Action::Write { to, chunks } => {
                    let bytes = cut.elements_in(chunks) as f64;
                    *hops = (*hops).max(way(kind, pattern.ranks(), me, to, bytes, &mut load));
                }
                Action::Offer { chunks, .. } => {
                    load((me, me, 1), cut.elements_in(chunks) as f64);
                    *hops = (*hops).max(1);
                }
                Action::Take { chunks, .. } => {
                    load((me, me, 2), cut.elements_in(chunks) as f64);
                    *hops = (*hops).max(1);
                }
                Action::Recv { .. }
                | Action::Read { .. }
                | Action::Fold { .. }
                | Action::Emit { .. } => {}
            }
        }
    }
    let round = |(hops, loads): &(u32, BTreeMap<Link, f64>)| {
        let busiest = loads.values().fold(0.0, |a: f64, &b| a.max(b));
        // No message is faster than one link, even if half of it goes each way.
        f64::from(*hops) * ALPHA + busiest * B
    };
    rounds.values().map(round).sum()
}

/// Adds the link loads of one message and returns its number of hops.
fn way(
    kind: &DimensionKind,
    ranks: u32,
    from: u32,
    to: u32,
    bytes: f64,
    load: &mut impl FnMut(Link, f64),
) -> u32 {
    let shape = match kind {
        DimensionKind::Switch => {
            load((from, from, 1), bytes);
            load((to, to, 2), bytes);
            return 1;
        }
        DimensionKind::FullyConnected => {
            load((from, to, 0), bytes);
            return 1;
        }
        DimensionKind::Ring => vec![ranks],
        DimensionKind::Torus { shape, .. } => shape.clone(),
        DimensionKind::Graph { .. } => unreachable!(),
    };
    // The whole message crosses at least one link: a bound that splitting both ways does not lower.
    load((from, to, 3), bytes);
    let (mut at, mut stride, mut hops) = (from, 1, 0);
    for size in shape {
        let (here, there) = (at / stride % size, to / stride % size);
        let up = (there + size - here) % size;
        let down = (size - up) % size;
        let ways: &[(bool, f64)] = match () {
            () if up == 0 => &[],
            () if size == 2 || up < down => &[(true, 1.0)],
            () if up > down => &[(false, 1.0)],
            () => &[(true, 0.5), (false, 0.5)],
        };
        for &(is_up, share) in ways {
            let mut place = here;
            for _ in 0..(if is_up { up } else { down }) {
                let next = if is_up { (place + 1) % size } else { (place + size - 1) % size };
                let rank = |place: u32| at - here * stride + place * stride;
                load((rank(place), rank(next), 0), bytes * share);
                place = next;
            }
        }
        if !ways.is_empty() {
            hops += up.min(down);
        }
        at = at - here * stride + there * stride;
        stride *= size;
    }
    hops
}

/// Closed form, if there is one.
fn formula(kind: &DimensionKind, pattern: &Pattern, n: f64) -> Option<f64> {
    match kind {
        DimensionKind::Switch => switch(pattern, n),
        DimensionKind::FullyConnected => fully_connected(pattern, n),
        DimensionKind::Ring => ring(pattern, n),
        DimensionKind::Torus { shape, .. } if shape.len() == 1 => ring(pattern, n),
        DimensionKind::Torus { shape, .. } => torus(shape, pattern, n),
        DimensionKind::Graph { .. } => None,
    }
}

/// Rounds of a ring on any topology: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
/// for clusters of workstations" (2009), section 3; the chain is pipelined in K pieces. `step` is
/// the time of a round in which every rank sends the given bytes to the next.
fn neighbours(pattern: &Pattern, n: f64, step: impl Fn(f64) -> f64) -> Option<f64> {
    let p = f64::from(pattern.ranks());
    match pattern.kind() {
        AllReduce => Some(2.0 * (p - 1.0) * step(n / p)),
        ReduceScatter | AllGather => Some((p - 1.0) * step(n / p)),
        Broadcast | Reduce | Gather | AllToAll | Scatter | SendRecv | Barrier => None,
    }
}

/// Closed form on a switch: all messages of a device pass its port.
fn switch(pattern: &Pattern, n: f64) -> Option<f64> {
    let p = f64::from(pattern.ranks());
    let part = n * (p - 1.0) / p;
    let time = |rounds: f64, bytes: f64| Some(rounds * ALPHA + bytes * B);
    let power = pattern.ranks().is_power_of_two();
    let ways = if pattern.kind() == AllReduce { 2.0 } else { 1.0 };
    let chain = 4.0 * (p - 2.0) + 1.0;
    match (pattern.algorithm(), pattern.kind()) {
        (_, Barrier) => time(f64::from(pattern.rounds()), 0.0),
        (_, SendRecv) => time(1.0, n),
        (Algorithm::Ring, Broadcast | Reduce) => Some((p - 2.0 + chain) * (ALPHA + n / chain * B)),
        (Algorithm::Ring, _) => time(ways * (p - 1.0), ways * part),
        // Several rings share the port.
        (Algorithm::MultiRing { .. }, AllReduce | ReduceScatter | AllGather) => {
            time(ways * (p - 1.0), ways * part)
        }
        // Thakur et al., section 4.5: the same bytes as the ring in 2 log P rounds.
        (Algorithm::HalvingDoubling, AllReduce | ReduceScatter | AllGather) if power => {
            time(ways * p.log2(), ways * part)
        }
        // Section 4.2: a scatter, then an all_gather.
        (Algorithm::HalvingDoubling, Broadcast | Reduce) if power => {
            time(2.0 * p.log2(), 2.0 * part)
        }
        (Algorithm::Direct | Algorithm::SharedMemory, AllReduce) => time(2.0, 2.0 * part),
        (Algorithm::Direct, Reduce) => time(1.0, n * (p - 1.0)),
        (Algorithm::SharedMemory, Reduce) => time(2.0, 2.0 * part),
        (Algorithm::Direct | Algorithm::SharedMemory, Broadcast) => time(1.0, n * (p - 1.0)),
        (Algorithm::Direct | Algorithm::SharedMemory, _) => time(1.0, part),
        (Algorithm::ParameterServer { servers }, AllReduce) => {
            time(2.0, 2.0 * n * (p - 1.0) / f64::from(servers))
        }
        (Algorithm::ParameterServer { servers: 1 }, _) => time(1.0, n * (p - 1.0)),
        (Algorithm::ParameterServer { servers }, _) => {
            let k = f64::from(servers);
            time(2.0, n * (k - 1.0 + p - 1.0) / k)
        }
        (Algorithm::Naive, _) => time(p * (p - 1.0), n * p * (p - 1.0)),
        (Algorithm::Overlapped, _) => time(p - 1.0, n * (p - 1.0)),
        (Algorithm::OneShot, _) => time(1.0, n * (p - 1.0)),
        (Algorithm::Partitioned, _) => time(ways * (p - 1.0), ways * part),
        (Algorithm::Torus { shape }, _) => {
            let rounds: u32 = shape.sizes().map(|size| size - 1).sum();
            time(ways * f64::from(rounds), ways * part)
        }
        (Algorithm::PerDimension { grid, .. }, _) => {
            let rounds = grid?.dimensions().iter().map(|d| d.way.rounds(d.size)).sum::<u32>();
            time(ways * f64::from(rounds), ways * part)
        }
        // Graham et al., SHArP (2016): every vector is sent up once and the sum comes down once.
        (Algorithm::InNetwork, AllGather) => time(1.0, part),
        (Algorithm::InNetwork, _) => time(1.0, n),
        _ => None,
    }
}

/// Closed form with a link per pair: only messages of different rounds are sequential.
fn fully_connected(pattern: &Pattern, n: f64) -> Option<f64> {
    let p = f64::from(pattern.ranks());
    let time = |rounds: f64, bytes: f64| Some(rounds * (ALPHA + bytes * B));
    let ways = if pattern.kind() == AllReduce { 2.0 } else { 1.0 };
    match (pattern.algorithm(), pattern.kind()) {
        (_, Barrier | SendRecv) => switch(pattern, n),
        (Algorithm::Ring | Algorithm::HalvingDoubling, _) => switch(pattern, n),
        (
            Algorithm::Naive
            | Algorithm::Overlapped
            | Algorithm::Partitioned
            | Algorithm::Torus { .. },
            _,
        ) => switch(pattern, n),
        (Algorithm::MultiRing { rings }, AllReduce | ReduceScatter | AllGather) => {
            let ranks = pattern.ranks();
            let coprime =
                |a: &u32| (2..=*a).all(|d| !a.is_multiple_of(d) || !ranks.is_multiple_of(d));
            let orders = (1..ranks).filter(coprime).count().min(rings.count() as usize) as f64;
            time(ways * (p - 1.0), n / p / orders)
        }
        (Algorithm::Direct | Algorithm::SharedMemory, Broadcast) | (Algorithm::Direct, Reduce) => {
            time(1.0, n)
        }
        (Algorithm::SharedMemory, Reduce) => time(2.0, n / p),
        (Algorithm::Direct | Algorithm::SharedMemory, _) => time(ways, n / p),
        (Algorithm::OneShot, _) => time(1.0, n),
        (Algorithm::ParameterServer { servers }, kind) => {
            let rounds = if servers > 1 { 2.0 } else { ways };
            (kind == AllReduce || servers > 1 || ways == 1.0)
                .then_some(())
                .and_then(|()| time(rounds, n / f64::from(servers)))
        }
        _ => None,
    }
}

/// Hops between ring positions `k` apart, and messages per link if every rank sends one.
fn apart(k: u32, p: u32) -> (f64, f64) {
    let hops = f64::from(k.min(p - k));
    let half = 2 * k == p && p > 2;
    (hops, if half { (hops / 2.0).max(1.0) } else { hops })
}

/// Longest path, and number of messages per link of a ring, if every rank sends to all others.
fn everyone(p: u32) -> (f64, f64) {
    let square = f64::from(p) * f64::from(p);
    let load = match p {
        2 => 1.0,
        even if even.is_multiple_of(2) => square / 8.0,
        _ => (square - 1.0) / 8.0,
    };
    (f64::from(p / 2), load)
}

/// Closed form on a ring: a message crosses one link per position it advances.
fn ring(pattern: &Pattern, n: f64) -> Option<f64> {
    let ranks = pattern.ranks();
    let p = f64::from(ranks);
    let ways = if pattern.kind() == AllReduce { 2.0 } else { 1.0 };
    // In round k of a rotation, every rank sends to its k-th successor.
    let rotation = |bytes: f64| {
        let round = |k| {
            let (hops, load) = apart(k, ranks);
            hops * ALPHA + load * bytes * B
        };
        (1..ranks).map(round).sum::<f64>()
    };
    let (far, load) = everyone(ranks);
    let at_once = |bytes: f64| far * ALPHA + load * bytes * B;
    // One message at a time, from every rank to all others.
    let in_turn = |bytes: f64| {
        let one = |k| apart(k, ranks).0 * ALPHA + bytes * B;
        p * (1..ranks).map(one).sum::<f64>()
    };
    // Messages from one rank to all others, or from all to one, go half each way.
    let from_one = |bytes: f64| far * ALPHA + ((p - 1.0) / 2.0).max(1.0) * bytes * B;
    let chain = 4.0 * (p - 2.0) + 1.0;
    match (pattern.algorithm(), pattern.kind()) {
        (Algorithm::Ring, Barrier) => Some((p - 1.0) * ALPHA),
        (Algorithm::Direct, Barrier) => Some(far * ALPHA),
        (_, SendRecv) => Some(ALPHA + n * B),
        (Algorithm::Ring, AllToAll) => Some(rotation(n / p)),
        (Algorithm::Ring, Gather) => Some((p - 1.0) * (ALPHA + n / p * B)),
        (Algorithm::Ring, Broadcast | Reduce) => Some((p - 2.0 + chain) * (ALPHA + n / chain * B)),
        (Algorithm::Ring, _) => neighbours(pattern, n, |bytes| ALPHA + bytes * B),
        // Both directions concurrently, with half of the vector each.
        (Algorithm::MultiRing { rings }, AllReduce | ReduceScatter | AllGather)
            if rings == RingSet::new(2) =>
        {
            let rings = if ranks == 2 { 1.0 } else { 2.0 };
            neighbours(pattern, n, |bytes| ALPHA + bytes / rings * B)
        }
        // Pairs 2ᵏ apart share the middle of their block; those half-way round use both directions.
        (Algorithm::HalvingDoubling, AllReduce | ReduceScatter | AllGather)
            if ranks.is_power_of_two() =>
        {
            Some(ways * halving(ranks, n))
        }
        (Algorithm::Direct | Algorithm::SharedMemory, AllReduce) => Some(2.0 * at_once(n / p)),
        (Algorithm::Direct | Algorithm::SharedMemory, Broadcast) | (Algorithm::Direct, Reduce) => {
            Some(from_one(n))
        }
        (Algorithm::Direct | Algorithm::SharedMemory, Gather | Scatter) => Some(from_one(n / p)),
        (Algorithm::SharedMemory, Reduce) => Some(at_once(n / p) + from_one(n / p)),
        (Algorithm::Direct | Algorithm::SharedMemory, _) => Some(at_once(n / p)),
        (Algorithm::ParameterServer { servers: 1 }, AllReduce) => Some(2.0 * from_one(n)),
        (Algorithm::ParameterServer { servers: 1 }, _) => Some(from_one(n)),
        (Algorithm::Naive, _) => Some(in_turn(n)),
        (Algorithm::Overlapped, _) => Some(rotation(n)),
        (Algorithm::OneShot, _) => Some(at_once(n)),
        (Algorithm::Partitioned, _) => Some(ways * rotation(n / p)),
        (Algorithm::PerDimension { grid, .. }, _) => match grid?.dimensions() {
            [only] if only.way == DimAlgorithm::Ring => neighbours(pattern, n, |b| ALPHA + b * B),
            [_] => Some(ways * at_once(n / p)),
            _ => None,
        },
        _ => None,
    }
}

/// Time of one pass of halving-doubling along a ring.
fn halving(ranks: u32, n: f64) -> f64 {
    let round = |k: u32| {
        let (distance, bytes) = (f64::from(1 << k), n / f64::from(2 << k));
        let load = match (2 << k) == ranks {
            true => (f64::from(ranks) / 4.0).max(1.0),
            false => distance,
        };
        distance * ALPHA + load * bytes * B
    };
    (0..ranks.ilog2()).map(round).sum()
}

/// Closed form on several axes, each a ring.
fn torus(shape: &[u32], pattern: &Pattern, n: f64) -> Option<f64> {
    let p = f64::from(pattern.ranks());
    let ways = if pattern.kind() == AllReduce { 2.0 } else { 1.0 };
    let along = TorusShape::new(shape)?;
    match (pattern.algorithm(), pattern.kind()) {
        // At the end of a row, the next rank is one step away along each axis.
        (Algorithm::Ring, AllReduce | ReduceScatter | AllGather) => {
            let axes = shape.len() as f64;
            neighbours(pattern, n, |bytes| axes * ALPHA + bytes * B)
        }
        // Every rank's neighbours along an axis are its physical neighbours.
        (Algorithm::Torus { shape: same }, _) if same == along => {
            let mut left = n;
            let mut sum = 0.0;
            for size in shape.iter().map(|&size| f64::from(size)) {
                left /= size;
                sum += (size - 1.0) * (ALPHA + left * B);
            }
            Some(ways * sum)
        }
        // Each bit of the rank is a bit of one coordinate.
        (Algorithm::HalvingDoubling, AllReduce | ReduceScatter | AllGather)
            if shape.iter().all(|size| size.is_power_of_two()) =>
        {
            let mut left = n;
            let mut sum = 0.0;
            for &size in shape {
                sum += halving(size, left);
                left /= f64::from(size);
            }
            Some(ways * sum)
        }
        // Over all messages, coordinates on the other axes take every value.
        (
            Algorithm::Direct | Algorithm::SharedMemory,
            AllReduce | ReduceScatter | AllGather | AllToAll,
        ) => {
            let loads = shape.iter().map(|&size| everyone(size).1 * p / f64::from(size));
            let far: f64 = shape.iter().map(|&size| everyone(size).0).sum();
            let busiest = loads.fold(0.0, f64::max);
            Some(ways * (far * ALPHA + busiest * n / p * B))
        }
        _ => None,
    }
}

/// On one dimension, chunks do not overlap: the same bytes, plus the latencies of every chunk.
#[test]
fn chunks_on_one_dimension_follow_each_other() {
    let cluster = cluster(DimensionKind::Ring, 8);
    let n = 8 * 4 * 1000;
    for (kind, ways) in [(AllReduce, 2.0), (ReduceScatter, 1.0), (AllGather, 1.0)] {
        let algorithm = "per-dimension:4/8r".parse().unwrap();
        let pattern = Pattern::new(kind, algorithm, SummationOrder::Free, 8, 0).unwrap();
        let wanted = ways * 4.0 * 7.0 * (ALPHA + 1000.0 * B);
        close(simulated(&cluster, &pattern, n), wanted, "four chunks");
    }
}

/// Two dimensions form a flow shop of two machines: C equal jobs of p₁ and p₂ take C·max(p₁, p₂) +
/// min(p₁, p₂) (Johnson, "Optimal two- and three-stage production schedules with setup times
/// included", 1954).
#[test]
fn chunks_overlap_in_two_dimensions() {
    let mut cluster = cluster(DimensionKind::Ring, 4);
    cluster.dimensions.push(Dimension {
        name: "across".into(),
        size: 2,
        bandwidth: BytesPerSec(RATE / 3.0),
        ..cluster.dimensions[0].clone()
    });
    for chunks in [1u32, 2, 5, 16] {
        let algorithm = format!("per-dimension:{chunks}/4rx2r@3x1").parse().unwrap();
        let pattern = Pattern::new(ReduceScatter, algorithm, SummationOrder::Free, 8, 0).unwrap();
        let bytes = u64::from(chunks) * 8 * 5000;
        let chunk = bytes as f64 / f64::from(chunks);
        let inside = 3.0 * (ALPHA + chunk / 4.0 * B);
        let across = ALPHA + chunk / 8.0 * 3.0 * B;
        let wanted = f64::from(chunks) * inside.max(across) + inside.min(across);
        close(simulated(&cluster, &pattern, bytes), wanted, &format!("{chunks} chunks"));
    }
}

/// Equal axes: with a fixed order the first carries most. With Themis's orders all carry the same,
/// and more chunks come closer to using all links.
#[test]
fn themis_uses_what_baseline_leaves_idle() {
    let shape = vec![8, 8, 8];
    let torus = cluster(DimensionKind::Torus { shape, wrap: true }, 512);
    let time = |name: &str| {
        let grid = "/8rx8rx8r";
        let algorithm = format!("{name}{grid}").parse().unwrap();
        let pattern = Pattern::new(AllReduce, algorithm, SummationOrder::Free, 512, 0).unwrap();
        simulated(&torus, &pattern, 1 << 30)
    };
    let (single, baseline, themis) =
        (time("per-dimension"), time("per-dimension:64"), time("themis:64"));
    // With all links of one direction of three axes busy, the time would be a third of the whole.
    let whole = 2.0 * f64::from(1 << 30) * 511.0 / 512.0 * B;
    assert!(baseline < single && themis < baseline, "{single} {baseline} {themis}");
    assert!(baseline > whole * 7.0 / 8.0 * 512.0 / 511.0 * 0.99, "{baseline} {whole}");
    assert!(themis > whole / 3.0 && themis < whole / 3.0 * 1.25, "{themis} {}", whole / 3.0);
}
