//! Laws that hold for every algorithm: each is correct, and [costs] what its doc comment says.

use super::symbolic::{self, Problem};
use super::*;
use CollectiveKind::{
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter, Scatter,
    SendRecv,
};

mod costs;

const ORDERS: [SummationOrder; 2] = [SummationOrder::Canonical, SummationOrder::Free];

/// All algorithms, with a range of parameters.
fn algorithms(ranks: u32) -> Vec<Algorithm> {
    let mut all = levels(ranks);
    all.push(Algorithm::Auto);
    all.extend(grids(ranks));
    let hosts = (1..=ranks).filter(|host| ranks.is_multiple_of(*host));
    let rings = hosts.map(|host| RingSet::new(4).over_hosts(host));
    let orders = [vec![0, 2, 1, 3], vec![1, 0, 3, 2]];
    let ordered = RingSet::new(3).with_orders(&orders[..if ranks == 4 { 1 } else { 2 }]);
    let ordered = ordered.filter(|_| ranks.is_multiple_of(4));
    all.extend(rings.chain(ordered).map(|rings| Algorithm::MultiRing { rings }));
    // A few hierarchies; a separate test covers all combinations.
    let servers = Algorithm::ParameterServer { servers: 2 };
    let pairs = [
        (Algorithm::Ring, Algorithm::HalvingDoubling),
        (servers, Algorithm::Ring),
        (Algorithm::SharedMemory, Algorithm::Direct),
        (Algorithm::HalvingDoubling, Algorithm::Tree),
        (Algorithm::Tree, Algorithm::MultiRing { rings: RingSet::new(2) }),
        (Algorithm::Naive, servers),
        (Algorithm::InNetwork, Algorithm::Ring),
        (Algorithm::Direct, Algorithm::InNetwork),
    ];
    for host in (2..ranks).filter(|host| ranks.is_multiple_of(*host)) {
        all.extend(pairs.map(|(inner, outer)| hierarchical(inner, outer, host)));
    }
    all
}

fn levels(ranks: u32) -> Vec<Algorithm> {
    let mut all: Vec<Algorithm> = Algorithm::for_any_group().collect();
    all.push(Algorithm::InNetwork);
    all.extend([1, 5].map(|rings| Algorithm::MultiRing { rings: RingSet::new(rings) }));
    let divisors = |n: u32| (1..=n).filter(move |d| n.is_multiple_of(*d));
    all.extend((2..=ranks).map(|servers| Algorithm::ParameterServer { servers }));
    for a in divisors(ranks) {
        let shapes = divisors(ranks / a).map(|b| [a, b, ranks / a / b]);
        let shapes = shapes.map(|sizes| TorusShape::new(&sizes).unwrap());
        all.extend(shapes.clone().map(|shape| Algorithm::Torus { shape }));
        all.extend(shapes.map(|shape| Algorithm::PerAxis { shape }));
    }
    all
}

/// Grids of up to four dimensions, in one stream and in several.
fn grids(ranks: u32) -> Vec<Algorithm> {
    let divisors = |n: u32| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let mut shapes = vec![format!("{ranks}r"), format!("{ranks}d")];
    if ranks.is_power_of_two() {
        shapes.push(format!("{ranks}h"));
    }
    for a in divisors(ranks).filter(|a| (2..ranks).contains(a)) {
        let rest = ranks / a;
        shapes.push(format!("{a}rx{rest}d@3x1"));
        if a.is_power_of_two() {
            shapes.push(format!("{a}hx{rest}r@1x5"));
        }
        for b in divisors(rest).filter(|b| (2..rest).contains(b)) {
            let c = rest / b;
            shapes.push(format!("{a}rx{b}rx{c}r@1x1x9"));
            if b.is_power_of_two() {
                shapes.push(format!("{a}dx{b}hx{c}r@7x2x1"));
            }
            if c.is_multiple_of(2) && c > 2 {
                shapes.push(format!("{a}rx{b}dx2rx{}r@5x1x4x2", c / 2));
            }
        }
    }
    // The first shape is tested with all names; the others take the names in turn.
    let names = ["per-dimension", "per-dimension:3", "themis:4"];
    let mut all: Vec<String> = names.iter().map(|name| format!("{name}/{}", shapes[0])).collect();
    let later = (1..).zip(&shapes[1..]);
    all.extend(later.map(|(i, shape): (usize, _)| format!("{}/{shape}", names[i % 3])));
    all.into_iter().map(|name| name.parse().unwrap()).collect()
}

fn hierarchical(inner: Algorithm, outer: Algorithm, host: u32) -> Algorithm {
    Algorithm::hierarchical(inner, outer).unwrap().with_host(host)
}

/// Every legal combination for `ranks` ranks with the given root.
fn patterns(ranks: u32, root: u32) -> impl Iterator<Item = Pattern> {
    CollectiveKind::ALL.into_iter().flat_map(move |kind| {
        // Without sums, all orders are the same.
        let orders =
            ORDERS.into_iter().filter(move |o| *o == SummationOrder::Free || kind.reduces());
        orders.flat_map(move |order| {
            let all = algorithms(ranks).into_iter();
            all.filter_map(move |a| Pattern::new(kind, a, order, ranks, root).ok())
        })
    })
}

fn pattern(kind: CollectiveKind, algorithm: Algorithm, ranks: u32) -> Pattern {
    Pattern::new(kind, algorithm, SummationOrder::Free, ranks, 0).unwrap()
}

/// Returns true if the steps depend on the root.
fn root_matters(pattern: &Pattern) -> bool {
    let servers = matches!(pattern.algorithm(), Algorithm::ParameterServer { .. });
    let levels = pattern.levels();
    pattern.kind().has_root()
        || servers
        || levels.is_some_and(|(inner, outer)| root_matters(&inner) || root_matters(&outer))
}

/// After a barrier every rank has heard, directly or not, that every other has begun.
#[test]
fn barriers_tell_every_rank_of_every_other() {
    use std::collections::BTreeSet;
    for ranks in 1..=33u32 {
        let all: BTreeSet<u32> = (0..ranks).collect();
        for algorithm in [Algorithm::Ring, Algorithm::Direct, Algorithm::Bruck, Algorithm::Auto] {
            let pattern = pattern(Barrier, algorithm, ranks);
            let programs: Vec<Vec<Step>> = (0..ranks).map(|me| pattern.steps(me)).collect();
            let mut known: Vec<BTreeSet<u32>> = (0..ranks).map(|me| BTreeSet::from([me])).collect();
            for round in 0..pattern.rounds() {
                let before = known.clone();
                for (me, program) in programs.iter().enumerate() {
                    for step in program.iter().filter(|step| step.round == round) {
                        if let Action::Recv { from, .. } = step.action {
                            known[me].extend(&before[from as usize]);
                        }
                    }
                }
            }
            assert!(known.iter().all(|known| *known == all), "{pattern:?}");
        }
    }
}

#[test]
fn every_algorithm_is_right() {
    for ranks in 1..=17 {
        let mut roots = vec![0, 1, ranks / 2, ranks - 1];
        roots.retain(|root| *root < ranks);
        roots.dedup();
        for root in roots {
            for pattern in patterns(ranks, root).filter(|p| root == 0 || root_matters(p)) {
                let result = symbolic::check(&pattern);
                assert!(result.is_ok(), "{pattern:?}: {}", result.unwrap_err());
            }
        }
    }
    for ranks in [32, 33, 63] {
        for pattern in patterns(ranks, ranks - 1) {
            let many = match pattern.algorithm() {
                Algorithm::ParameterServer { servers } => servers > 1,
                Algorithm::MultiRing { rings } => rings.count() > 2,
                Algorithm::Hierarchical { .. } => true,
                Algorithm::PerDimension { chunks, .. } => chunks > 1,
                _ => false,
            };
            if !many {
                assert_eq!(symbolic::check(&pattern), Ok(()), "{pattern:?}");
            }
        }
    }
}

#[test]
fn trees_are_right_for_any_rank_count() {
    for ranks in (18..=40).chain([64, 65, 127]) {
        for (kind, order) in [
            (AllReduce, SummationOrder::Canonical),
            (AllReduce, SummationOrder::Free),
            (Broadcast, SummationOrder::Free),
            (Reduce, SummationOrder::Free),
        ] {
            let pattern = Pattern::new(kind, Algorithm::Tree, order, ranks, ranks / 3).unwrap();
            assert_eq!(symbolic::check(&pattern), Ok(()), "{pattern:?}");
        }
    }
}

#[test]
fn any_algorithm_may_stand_inside_any_other() {
    let mut kinds_done = std::collections::BTreeMap::new();
    for (ranks, host) in [(4, 2), (6, 2), (6, 3), (8, 4), (12, 4), (12, 3), (5, 1), (5, 5)] {
        for inner in levels(host) {
            for outer in levels(ranks / host) {
                let algorithm = hierarchical(inner, outer, host);
                for kind in CollectiveKind::ALL {
                    for order in ORDERS {
                        let root = ranks / 2;
                        let Ok(pattern) = Pattern::new(kind, algorithm, order, ranks, root) else {
                            let alone = |level, n| resolve(kind, level, n, order).is_ok();
                            let both = alone(inner, host) && alone(outer, ranks / host);
                            let must = kind == AllReduce && order == SummationOrder::Free && both;
                            assert!(!must, "{algorithm} cannot do {kind} of {ranks}");
                            continue;
                        };
                        assert_eq!(symbolic::check(&pattern), Ok(()), "{pattern:?}");
                        *kinds_done.entry((kind, order)).or_insert(0) += 1;
                    }
                }
            }
        }
    }
    for kind in [AllReduce, ReduceScatter, AllGather, Broadcast, Reduce] {
        assert!(ORDERS.iter().all(|order| kinds_done[&(kind, *order)] > 100), "{kind}");
    }
}

/// [`resolve`] accepts the canonical order exactly if the algorithm keeps it.
#[test]
fn orders_are_kept_where_they_can_be() {
    for ranks in 3..=17 {
        for kind in [AllReduce, ReduceScatter, Reduce] {
            for algorithm in algorithms(ranks) {
                let Ok(pattern) = Pattern::new(kind, algorithm, SummationOrder::Free, ranks, 0)
                else {
                    continue;
                };
                let algorithm = pattern.algorithm();
                let kept = resolve(kind, algorithm, ranks, SummationOrder::Canonical).is_ok();
                let canonical = Pattern { order: SummationOrder::Canonical, ..pattern };
                let found = symbolic::check(&canonical).is_ok();
                // For some rank counts an order is canonical by chance; no rule covers these.
                let themis = |order| order == ChunkOrder::Themis;
                let by_chance = ranks <= 4
                    || matches!(algorithm, Algorithm::Hierarchical { .. })
                    || matches!(algorithm, Algorithm::PerDimension { order, .. } if themis(order));
                assert!(found == kept || (found && by_chance), "{pattern:?}");
            }
        }
    }
}

#[test]
fn a_lone_rank_exchanges_nothing() {
    for pattern in patterns(1, 0) {
        let steps = pattern.steps(0);
        let messages = |s: &Step| matches!(s.action, Action::Send { .. } | Action::Recv { .. });
        assert!(!steps.iter().any(messages), "{pattern:?}: {steps:?}");
        assert_eq!(pattern.counts(Bytes(100)), Counts::default());
    }
}

#[test]
fn absurd_numbers_are_refused_or_saturate() {
    let new =
        |ranks, root| Pattern::new(AllReduce, Algorithm::Auto, SummationOrder::Free, ranks, root);
    assert!(matches!(new(0, 0), Err(CollectiveError::Ranks { .. })));
    assert!(matches!(new(u32::MAX, 0), Err(CollectiveError::Ranks { .. })));
    assert!(matches!(new(4, 4), Err(CollectiveError::Root { .. })));
    let counts = pattern(Broadcast, Algorithm::Direct, 8).counts(Bytes(u64::MAX));
    assert_eq!(counts.bytes_sent_per_rank_max, Bytes(u64::MAX));
    assert!(ring::all_reduce(u32::MAX, 1).is_empty());
    assert!(direct::broadcast(4, 9, 0).is_empty());
    assert!(halving_doubling::reduce(4, 1, 7).is_empty());
    assert!(parameter_server::all_reduce(4, 1, 0, 0, SummationOrder::Free).is_empty());
    assert!(multi_ring::all_reduce(4, 1, RingSet::new(0)).is_empty());
    assert!(multi_ring::broadcast(4, 1, 4, RingSet::new(2)).is_empty());
    assert!(tree::reduce(4, 1, 4).is_empty());
    assert!(tree::all_reduce(u32::MAX, 1, SummationOrder::Canonical).is_empty());
    assert!(torus::all_gather(TorusShape::new(&[u32::MAX; 6]).unwrap(), 1).is_empty());
    let most = pattern(Broadcast, hierarchical(Algorithm::Tree, Algorithm::Ring, 2), MAX_RANKS);
    assert_eq!(most.chunks(), 4 * (MAX_RANKS / 2 - 2) + 1);
}

#[test]
fn refusals_name_what_would_work() {
    let message =
        |kind, algorithm, order| resolve(kind, algorithm, 6, order).unwrap_err().to_string();
    assert_eq!(
        message(AllReduce, Algorithm::Ring, SummationOrder::Canonical),
        "ring does not support all_reduce of 6 ranks in canonical order; use one of tree, direct, \
         shared-memory, ps, naive, overlapped, one-shot, partitioned"
    );
    let able = "does not support all_gather; use one of ring, multi-ring:2, halving-doubling, direct, \
                shared-memory, partitioned";
    let servers = Algorithm::ParameterServer { servers: 2 };
    let told = message(AllGather, servers, SummationOrder::Canonical);
    assert!(told.starts_with(&format!("ps:2 {able}")), "{told}");
    assert_eq!(
        message(AllReduce, Algorithm::ParameterServer { servers: 7 }, SummationOrder::Free),
        "ps:7 in a group of 6: servers are ranks of the group, from 1 to 6"
    );
    let open = Algorithm::hierarchical(Algorithm::Ring, Algorithm::Tree).unwrap();
    assert_eq!(
        message(AllReduce, open, SummationOrder::Free),
        "hierarchical:ring:tree needs to know how many of the 6 ranks share a host; write it \
         after a slash, such as hierarchical:ring:tree/6"
    );
    assert_eq!(
        message(AllReduce, open.with_host(4), SummationOrder::Free),
        "6 ranks cannot share hosts evenly, 4 to each; give a divisor of 6"
    );
    let servers = Algorithm::ParameterServer { servers: 3 };
    assert_eq!(
        message(AllReduce, hierarchical(servers, Algorithm::Ring, 2), SummationOrder::Free),
        "ps:3 in a group of 2: servers are ranks of the group, from 1 to 2"
    );
    let trees = hierarchical(Algorithm::Tree, Algorithm::Ring, 2);
    let told = message(AllGather, trees, SummationOrder::Free);
    assert!(told.starts_with(&format!("hierarchical:tree:ring/2 {able}")), "{told}");
    let torus = Algorithm::Torus { shape: TorusShape::new(&[2, 2]).unwrap() };
    assert_eq!(
        message(AllReduce, torus, SummationOrder::Free),
        "torus:2x2 has 4 places, but the group has 6 ranks"
    );
    assert_eq!(
        message(AllReduce, Algorithm::MultiRing { rings: RingSet::new(0) }, SummationOrder::Free),
        "multi-ring:0: there can be from 1 to 256 rings"
    );
    assert!(resolve(AllReduce, Algorithm::Ring, 2, SummationOrder::Canonical).is_ok());
    assert!(resolve(AllReduce, Algorithm::HalvingDoubling, 8, SummationOrder::Canonical).is_ok());
}

#[test]
fn auto_is_always_possible() {
    for ranks in 1..=20 {
        for kind in CollectiveKind::ALL {
            for order in ORDERS {
                let chosen = resolve(kind, Algorithm::Auto, ranks, order).unwrap();
                assert_ne!(chosen, Algorithm::Auto);
                assert_eq!(resolve(kind, chosen, ranks, order), Ok(chosen));
            }
        }
    }
}

/// Streams may run concurrently because they touch disjoint memory: each has its own piece.
#[test]
fn a_stream_keeps_to_its_piece() {
    for ranks in [6, 12] {
        for algorithm in grids(ranks) {
            let pattern = pattern(AllReduce, algorithm, ranks);
            let visits = pattern.visits();
            let dimensions = match algorithm {
                Algorithm::PerDimension { grid: Some(grid), chunks, .. } => {
                    grid.dimensions().len() * chunks as usize
                }
                _ => unreachable!(),
            };
            assert_eq!(visits.len(), 2 * dimensions, "{algorithm}");
            let mut of_visits: Vec<Vec<Step>> = vec![Vec::new(); ranks as usize];
            for visit in &visits {
                for me in 0..ranks {
                    for mut step in pattern.visit_steps(visit, me) {
                        let (Action::Send { chunks, .. } | Action::Recv { chunks, .. }) =
                            step.action
                        else {
                            panic!("{step:?}");
                        };
                        assert_eq!(chunks.piece, visit.chunk);
                        step.round += visit.rounds.start;
                        of_visits[me as usize].push(step);
                    }
                }
            }
            for me in 0..ranks {
                let mut steps = pattern.steps(me);
                let key = |s: &Step| format!("{s:?}");
                steps.sort_by_key(key);
                of_visits[me as usize].sort_by_key(key);
                assert_eq!(steps, of_visits[me as usize]);
            }
        }
    }
}

/// The checker must detect any omitted step and some modified ones.
#[test]
fn the_checker_finds_broken_steps() {
    for ranks in [2, 3, 6, 8] {
        for pattern in patterns(ranks, 1) {
            let steps: Vec<_> = (0..ranks).map(|me| pattern.steps(me)).collect();
            if steps.iter().map(Vec::len).sum::<usize>() > 200 {
                continue;
            }
            for rank in 0..ranks as usize {
                for index in 0..steps[rank].len() {
                    let mut broken = steps.clone();
                    let step = broken[rank].remove(index);
                    // Contributions held within a host may be summed with those from other hosts.
                    let folded_later = matches!(step.action, Action::Fold { .. });
                    if !(folded_later && pattern.levels().is_some()) {
                        let result = symbolic::check_steps(&pattern, &broken);
                        assert!(result.is_err(), "{pattern:?}: rank {rank} without step {index}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_checker_names_what_is_wrong() {
    let problem = |pattern: &Pattern, change: &dyn Fn(&mut [Vec<Step>])| {
        let mut steps: Vec<_> = (0..pattern.ranks()).map(|me| pattern.steps(me)).collect();
        change(&mut steps);
        symbolic::check_steps(pattern, &steps).unwrap_err().problem
    };
    let ring = pattern(AllReduce, Algorithm::Ring, 4);
    let reduce = |steps: &mut [Vec<Step>]| {
        // Overwriting instead of reducing loses a contribution.
        if let Action::Recv { how, .. } = &mut steps[2][1].action {
            *how = Combine::Replace;
        }
    };
    assert!(matches!(problem(&ring, &reduce), Problem::Wrong { .. }));
    let chunk = |steps: &mut [Vec<Step>]| {
        if let Action::Send { chunks, .. } = &mut steps[1][0].action {
            chunks.first = 9;
        }
    };
    assert_eq!(problem(&ring, &chunk), Problem::NoSuchChunk(9));
    assert_eq!(problem(&ring, &|steps| steps[3].swap(0, 1)), Problem::SendAfterReceive);
    assert_eq!(problem(&ring, &|steps| steps[3].swap(0, 2)), Problem::RoundDecreases);
    let gather = pattern(AllGather, Algorithm::Ring, 4);
    let early = |steps: &mut [Vec<Step>]| {
        for steps in steps {
            steps[0].action = match steps[0].action {
                Action::Send { to, .. } => Action::Send { to, chunks: Chunks::one(to) },
                other => other,
            };
        }
    };
    assert_eq!(problem(&gather, &early), Problem::NotValid(1));

    // The ring's order is not canonical, and the checker detects it.
    let canonical = Pattern { order: SummationOrder::Canonical, ..ring };
    let violation = symbolic::check(&canonical).unwrap_err();
    assert!(matches!(violation.problem, Problem::Wrong { .. }), "{violation}");
    let uneven = pattern(AllReduce, Algorithm::HalvingDoubling, 5);
    let canonical = Pattern { order: SummationOrder::Canonical, ..uneven };
    assert!(symbolic::check(&canonical).is_err());
}

#[test]
fn the_checker_knows_the_rules_of_shared_memory() {
    let problem = |pattern: &Pattern, change: &dyn Fn(&mut [Vec<Step>])| {
        let mut steps: Vec<_> = (0..pattern.ranks()).map(|me| pattern.steps(me)).collect();
        change(&mut steps);
        symbolic::check_steps(pattern, &steps).unwrap_err().problem
    };
    let sum = pattern(AllReduce, Algorithm::SharedMemory, 3);
    let scatter = pattern(ReduceScatter, Algorithm::SharedMemory, 3);
    // Rank 0 writes in the round in which its peers still read.
    let early = |steps: &mut [Vec<Step>]| steps[0].iter_mut().for_each(|step| step.round = 0);
    assert_eq!(problem(&sum, &early), Problem::AmongWrites);
    let elsewhere = |steps: &mut [Vec<Step>]| {
        for step in &mut steps[0] {
            if let Action::Write { chunks, .. } = &mut step.action {
                *chunks = Chunks::one(1);
            }
        }
    };
    assert_eq!(problem(&sum, &elsewhere), Problem::NotFolded(1));
    let to_itself = |steps: &mut [Vec<Step>]| {
        for step in &mut steps[0] {
            if let Action::Write { to, .. } = &mut step.action {
                *to = 0;
            }
        }
    };
    assert_eq!(problem(&sum, &to_itself), Problem::NotAPeer(0));
    let forgotten = |steps: &mut [Vec<Step>]| {
        steps[0].retain(|step| !matches!(step.action, Action::Write { to: 2, .. }));
    };
    assert!(matches!(problem(&sum, &forgotten), Problem::Wrong { chunk: 0, .. }));
    let over = |steps: &mut [Vec<Step>]| {
        // Rank 0 writes to part 1 in the round in which it lends it to rank 1.
        for step in &mut steps[0] {
            if let Action::Read { from: 2, chunks, .. } = &mut step.action {
                *chunks = Chunks::one(1);
            }
        }
        for step in &mut steps[2] {
            if let Action::Lend { to: 0, chunks } = &mut step.action {
                *chunks = Chunks::one(1);
            }
        }
    };
    assert_eq!(problem(&scatter, &over), Problem::WrittenWhileLent(1));
    let message = |steps: &mut [Vec<Step>]| {
        if let Action::Lend { to, chunks } = steps[1][0].action {
            steps[1][0].action = Action::Send { to, chunks };
        }
    };
    assert_eq!(problem(&scatter, &message), Problem::NotLent(1));
    let canonical = Pattern { order: SummationOrder::Canonical, ..scatter };
    let late = |steps: &mut [Vec<Step>]| {
        // A contribution read in place must be summed before the round, and so the loan, ends.
        for step in &mut steps[0] {
            if matches!(step.action, Action::Fold { .. }) {
                step.round = 1;
            }
        }
    };
    assert_eq!(problem(&canonical, &late), Problem::StillHeld(1));
}
