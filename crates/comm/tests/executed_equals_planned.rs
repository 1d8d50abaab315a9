//! Executed = planned: the messages and memory accesses of a collective are the steps of its
//! pattern, and carry its name.

mod recording;

use paceline_comm::steps::{CollectiveSpec, run};
use paceline_comm::{LocalWorld, Purpose, Tag, Transport, TransportKind};
use paceline_plan::collective::{
    Action, Algorithm, Chunking, Chunks, CollectiveKind, Pattern, Reduction, SummationOrder,
};
use paceline_plan::ids::Rank;
use recording::{Recording, Way};
use std::collections::BTreeSet;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Chunks differ in size, and most are not empty.
const ELEMENTS: usize = 1003;

/// Every algorithm of `ranks` ranks, alone and as levels of a hierarchy.
fn algorithms(ranks: u32, shares_memory: bool) -> Vec<Algorithm> {
    let needs_memory = |algorithm: &Algorithm| *algorithm == Algorithm::SharedMemory;
    let any = Algorithm::for_any_group();
    let mut all: Vec<Algorithm> = any.filter(|a| shares_memory || !needs_memory(a)).collect();
    let mut names = vec!["multi-ring:3".to_owned(), "ps:2".to_owned()];
    for size in (2..ranks).filter(|size| ranks.is_multiple_of(*size)) {
        let others = ranks / size;
        names.push(format!("torus:{size}x{others}"));
        names.push(format!("per-dimension:2/{size}rx{others}d"));
        names.push(format!("themis:4/{size}dx{others}r"));
        for levels in ["ring:halving-doubling", "ps:ring", "tree:multi-ring:3", "naive:direct"] {
            names.push(format!("hierarchical:{levels}/{size}"));
        }
        if shares_memory {
            names.push(format!("hierarchical:shared-memory:ring/{size}"));
        }
    }
    all.extend(names.iter().map(|n| n.parse::<Algorithm>().unwrap_or_else(|e| panic!("{n}: {e}"))));
    all
}

/// Every legal collective.
fn specs(ranks: u32, shares_memory: bool) -> Vec<CollectiveSpec> {
    let mut specs = Vec::new();
    for kind in CollectiveKind::ALL {
        for algorithm in algorithms(ranks, shares_memory) {
            for order in [SummationOrder::Canonical, SummationOrder::Free] {
                let (root, reduction, block) = ((ranks - 1).min(2), Reduction::Sum, 1);
                if Pattern::new(kind, algorithm, order, ranks, root).is_ok() {
                    specs.push(CollectiveSpec { kind, algorithm, order, reduction, root, block });
                }
            }
        }
    }
    specs
}

/// A message or an access: its peer, its round, its length in bytes.
type Event = (Way, Rank, u32, u64);

/// Messages and accesses of rank `me` according to the plan, by way and peer. A loan ends with an
/// empty message of its reader, in the same round.
fn planned(pattern: &Pattern, me: u32, cut: &Chunking) -> Vec<Event> {
    let mut events = Vec::new();
    for step in pattern.steps(me) {
        let mut event = |way, peer, bytes| events.push((way, Rank(peer), step.round, bytes));
        let bytes = |chunks| cut.elements_in(chunks) * 4;
        match step.action {
            Action::Send { to, chunks } => event(Way::Sent, to, bytes(chunks)),
            Action::Recv { from, chunks, .. } => event(Way::Received, from, bytes(chunks)),
            Action::Lend { to, chunks } => {
                event(Way::Lent, to, bytes(chunks));
                event(Way::Received, to, 0);
            }
            Action::Read { from, chunks, .. } => {
                event(Way::Read, from, bytes(chunks));
                event(Way::Sent, from, 0);
            }
            Action::Fold { .. } | Action::Emit { .. } | Action::Write { .. } => {}
            Action::Offer { .. } | Action::Take { .. } => panic!("there is no switch here"),
        }
    }
    // Messages to one peer keep their order; those to different peers have none.
    events.sort_by_key(|&(way, peer, ..)| (way, peer));
    events
}

/// Elements of rank `me` that its own steps write, and those that its peers write.
fn written(pattern: &Pattern, me: u32, cut: &Chunking) -> [BTreeSet<u64>; 2] {
    let elements = |chunks: Chunks| cut.ranges(chunks).flatten();
    let own = pattern.steps(me).into_iter().filter_map(|step| match step.action {
        Action::Recv { chunks, .. } | Action::Read { chunks, .. } | Action::Fold { chunks } => {
            Some(chunks)
        }
        _ => None,
    });
    let peers = (0..pattern.ranks()).filter(|&peer| peer != me);
    let writes = peers.flat_map(|peer| pattern.steps(peer)).filter_map(|step| match step.action {
        Action::Write { to, chunks } if to == me => Some(chunks),
        _ => None,
    });
    [own.flat_map(elements).collect(), writes.flat_map(elements).collect()]
}

/// Runs every `thinning`-th collective and compares what happened with the plan; returns their
/// number.
fn check(transport: Box<dyn Transport>, thinning: usize) -> usize {
    let (ranks, me) = (transport.world(), transport.rank());
    let mut transport = Recording::new(transport);
    let members: Vec<Rank> = (0..ranks).map(Rank).collect();
    let shares_memory = transport.memory().is_some();
    let specs = specs(ranks, shares_memory);
    let uses_memory = |spec: &CollectiveSpec| spec.algorithm.to_string().contains("shared-memory");
    let chosen = specs
        .iter()
        .enumerate()
        .filter(|(i, spec)| uses_memory(spec) || (i + ranks as usize).is_multiple_of(thinning));
    let mut tag = Tag::new(1, 0);
    let mut count = 0;
    for (_, spec) in chosen {
        let all_to_all = spec.kind == CollectiveKind::AllToAll;
        let n = if all_to_all { ELEMENTS / ranks as usize * ranks as usize } else { ELEMENTS };
        let input: Vec<f32> = (0..n).map(|i| (1 + me.0) as f32 + i as f32 / 4096.0).collect();
        let (mut data, mut output) = (input.clone(), vec![0.0; n]);
        let output = spec.kind.has_output().then_some(&mut output[..]);
        transport.records.clear();
        run(&mut transport, spec, &members, tag, &mut data, output, TIMEOUT)
            .unwrap_or_else(|error| panic!("{spec:?} at {me} of {ranks}: {error}"));

        let pattern =
            Pattern::new(spec.kind, spec.algorithm, spec.order, ranks, spec.root).unwrap();
        let cut = Chunking { elements: n as u64, chunks: pattern.chunks(), block: 1 };
        let mut found = Vec::new();
        for record in &transport.records {
            let Purpose::Collective { spec: named, elements, .. } = record.header.purpose else {
                panic!("{spec:?}: {record:?}")
            };
            assert_eq!((named, elements), (*spec, n as u64), "the name of what is executed");
            assert_eq!(record.header.tag, tag);
            found.push((record.way, record.peer, record.header.round, record.bytes));
        }
        found.sort_by_key(|&(way, peer, ..)| (way, peer));
        let wanted = planned(&pattern, me.0, &cut);
        assert_eq!(found, wanted, "{spec:?} at {me} of {ranks}");

        let [own, peers] = written(&pattern, me.0, &cut);
        for (i, (before, after)) in (0..).zip(input.iter().zip(&data)) {
            let changed = before.to_bits() != after.to_bits();
            assert!(!changed || own.contains(&i) || peers.contains(&i), "{spec:?}: element {i}");
            assert!(changed || !peers.contains(&i), "{spec:?}: element {i} was not written");
        }
        tag = tag.next();
        count += 1;
    }
    count
}

/// Runs the collectives on ranks joined by a transport; each runs at least `least` of them.
fn check_all(kind: TransportKind, ranks: u32, thinning: usize, least: usize) {
    let world = LocalWorld::new(kind, ranks, TIMEOUT).unwrap();
    std::thread::scope(|scope| {
        for rank in (0..ranks).map(Rank) {
            let world = &world;
            scope.spawn(move || {
                assert!(check(world.connect(rank).unwrap(), thinning) >= least);
            });
        }
    });
    world.join().unwrap();
}

#[test]
fn on_threads() {
    (2..=9).for_each(|ranks| check_all(TransportKind::Thread, ranks, 1, 50));
}

#[test]
fn over_shared_memory() {
    (2..=9).for_each(|ranks| check_all(TransportKind::Shm, ranks, 5, 10));
}

#[test]
fn over_tcp() {
    [2, 3, 4, 6, 9].into_iter().for_each(|ranks| check_all(TransportKind::Tcp, ranks, 5, 10));
}
