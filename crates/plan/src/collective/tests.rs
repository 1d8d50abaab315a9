//! Laws that hold for every algorithm: each is right, and costs what its doc comment says.

use super::symbolic::{self, Problem};
use super::*;
use CollectiveKind::{AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, ReduceScatter};

const ORDERS: [Order; 2] = [Order::Canonical, Order::Free];

fn algorithms(ranks: u32) -> impl Iterator<Item = Algorithm> {
    [Algorithm::Auto, Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::Direct]
        .into_iter()
        .chain((1..=ranks).map(|servers| Algorithm::ParameterServer { servers }))
}

/// Every legal combination for so many ranks, with the given root.
fn patterns(ranks: u32, root: u32) -> impl Iterator<Item = Pattern> {
    CollectiveKind::ALL.into_iter().flat_map(move |kind| {
        ORDERS.into_iter().flat_map(move |order| {
            algorithms(ranks).filter_map(move |a| Pattern::new(kind, a, order, ranks, root).ok())
        })
    })
}

fn pattern(kind: CollectiveKind, algorithm: Algorithm, ranks: u32) -> Pattern {
    Pattern::new(kind, algorithm, Order::Free, ranks, 0).unwrap()
}

#[test]
fn every_algorithm_is_right() {
    for ranks in 1..=17 {
        for root in [0, 1, ranks / 2, ranks - 1] {
            for pattern in patterns(ranks, root % ranks) {
                let result = symbolic::check(&pattern);
                assert!(result.is_ok(), "{pattern:?}: {}", result.unwrap_err());
            }
        }
    }
    for ranks in [32, 33, 63] {
        for pattern in patterns(ranks, ranks - 1) {
            if !matches!(pattern.algorithm(), Algorithm::ParameterServer { servers: 2.. }) {
                assert_eq!(symbolic::check(&pattern), Ok(()), "{pattern:?}");
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

/// Rounds, bytes sent, bytes received and fan-in as the doc comments state them.
fn formulas(pattern: &Pattern, n: u64) -> [u64; 4] {
    let ranks = u64::from(pattern.ranks());
    let others = ranks - 1;
    let part = n * others / ranks;
    let core = 1 << ranks.ilog2();
    let (s, sigma) = (u64::from(ranks.ilog2()), u64::from(core < ranks));
    let core_part = n * (core - 1) / core;
    let halves = (1..=s).map(|k| n / ranks * ranks.div_ceil(1 << k)).sum::<u64>();
    let at_most_whole = if sigma == 1 { n } else { part };
    let chain = (ranks - 2) + 4 * (ranks - 2) + 1;
    match (pattern.algorithm(), pattern.kind()) {
        (Algorithm::Ring, AllReduce) => [2 * others, 2 * part, 2 * part, 1],
        (Algorithm::Ring, ReduceScatter | AllGather | Gather | AllToAll) => [others, part, part, 1],
        (Algorithm::Ring, Broadcast | Reduce) => [chain, n, n, 1],
        (Algorithm::HalvingDoubling, AllReduce) => {
            let bytes = 2 * core_part + sigma * n;
            [2 * s + 2 * sigma, bytes, bytes, 1]
        }
        (Algorithm::HalvingDoubling, ReduceScatter) => {
            [s + 2 * sigma, at_most_whole, sigma * n + halves, 1]
        }
        (Algorithm::HalvingDoubling, AllGather) => {
            [s + 2 * sigma, sigma * n + halves, at_most_whole, 1]
        }
        (Algorithm::HalvingDoubling, Broadcast) => {
            [2 * s + sigma, 2 * core_part + sigma * n, n / 2 + core_part, 1]
        }
        (Algorithm::HalvingDoubling, Reduce) => {
            [2 * s + sigma, n / 2 + core_part, 2 * core_part + sigma * n, 1]
        }
        (Algorithm::Direct, AllReduce) => [2, 2 * part, 2 * part, others],
        (Algorithm::Direct, ReduceScatter | AllGather | AllToAll) => [1, part, part, others],
        (Algorithm::Direct, Broadcast) => [1, n * others, n, 1],
        (Algorithm::Direct, Reduce) => [1, n, n * others, others],
        (Algorithm::Direct, Gather) => [1, n / ranks, part, others],
        (Algorithm::ParameterServer { servers }, kind) => {
            let k = u64::from(servers);
            let (busy, rounds) = (n * (ranks + k - 2) / k, 1 + u64::from(k > 1));
            match kind {
                AllReduce => [2, busy, busy, others],
                Reduce => [rounds, n, busy, others],
                Broadcast => [rounds, busy, n, k.min(others)],
                ReduceScatter | AllGather | Gather | AllToAll => unreachable!(),
            }
        }
        (Algorithm::Auto, _) | (Algorithm::HalvingDoubling, Gather | AllToAll) => unreachable!(),
    }
}

#[test]
fn costs_are_as_documented() {
    for ranks in 2..=17 {
        for pattern in patterns(ranks, 0) {
            let n = 16 * u64::from(ranks) * u64::from(pattern.chunks());
            let counts = pattern.counts(Bytes(n));
            let counted = [
                u64::from(counts.rounds),
                counts.bytes_sent_per_rank_max.0,
                counts.bytes_received_per_rank_max.0,
                u64::from(counts.fan_in_max),
            ];
            assert_eq!(counted, formulas(&pattern, n), "{pattern:?}");
        }
    }
}

#[test]
fn canonical_sums_hold_what_is_documented() {
    let held = |kind, algorithm| {
        let pattern = Pattern::new(kind, algorithm, Order::Canonical, 8, 0).unwrap();
        pattern.counts(Bytes(1600)).bytes_held_max.0
    };
    assert_eq!(held(AllReduce, Algorithm::Direct), 1400);
    assert_eq!(held(Reduce, Algorithm::Direct), 7 * 1600);
    assert_eq!(held(AllReduce, Algorithm::ParameterServer { servers: 4 }), 7 * 400);
    assert_eq!(held(AllReduce, Algorithm::HalvingDoubling), 0);
    assert_eq!(pattern(AllReduce, Algorithm::Direct, 8).counts(Bytes(1600)).bytes_held_max.0, 0);
}

#[test]
fn the_busiest_ranks_stand_for_all() {
    for ranks in (1..=13).chain([17, 24]) {
        for root in [0, 1 % ranks, ranks / 2, ranks - 1] {
            for pattern in patterns(ranks, root) {
                for bytes in [0, 5, 1001] {
                    let (few, all) = Counts::of_some_and_of_all(&pattern, Bytes(bytes));
                    assert_eq!(few, all, "{pattern:?}, {bytes} bytes");
                }
            }
        }
    }
}

#[test]
fn large_groups_cost_only_their_own_steps() {
    let counts = pattern(AllReduce, Algorithm::Ring, 4096).counts(Bytes(4096 << 10));
    assert_eq!(counts.rounds, 2 * 4095);
    assert_eq!(counts.bytes_sent_per_rank_max, Bytes((2 * 4095) << 10));
    let counts = pattern(AllReduce, Algorithm::HalvingDoubling, 1 << 16).counts(Bytes(1 << 20));
    assert_eq!(counts.rounds, 32);
}

#[test]
fn absurd_numbers_are_refused_or_saturate() {
    let new = |ranks, root| Pattern::new(AllReduce, Algorithm::Auto, Order::Free, ranks, root);
    assert!(matches!(new(0, 0), Err(CollectiveError::Ranks { .. })));
    assert!(matches!(new(u32::MAX, 0), Err(CollectiveError::Ranks { .. })));
    assert!(matches!(new(4, 4), Err(CollectiveError::Root { .. })));
    let counts = pattern(Broadcast, Algorithm::Direct, 8).counts(Bytes(u64::MAX));
    assert_eq!(counts.bytes_sent_per_rank_max, Bytes(u64::MAX));
    assert!(ring::all_reduce(u32::MAX, 1).is_empty());
    assert!(direct::broadcast(4, 9, 0).is_empty());
    assert!(halving_doubling::reduce(4, 1, 7).is_empty());
    assert!(parameter_server::all_reduce(4, 1, 0, 0, Order::Free).is_empty());
}

#[test]
fn refusals_name_what_would_work() {
    let message =
        |kind, algorithm, order| resolve(kind, algorithm, 6, order).unwrap_err().to_string();
    assert_eq!(
        message(AllReduce, Algorithm::Ring, Order::Canonical),
        "ring cannot do all_reduce of 6 ranks in canonical order; what can: direct, ps"
    );
    assert_eq!(
        message(AllGather, Algorithm::ParameterServer { servers: 2 }, Order::Canonical),
        "ps:2 cannot do all_gather; what can: ring, halving-doubling, direct"
    );
    assert_eq!(
        message(AllReduce, Algorithm::ParameterServer { servers: 7 }, Order::Free),
        "ps:7 in a group of 6: servers are ranks of the group, from 1 to 6"
    );
    assert!(resolve(AllReduce, Algorithm::Ring, 2, Order::Canonical).is_ok());
    assert!(resolve(AllReduce, Algorithm::HalvingDoubling, 8, Order::Canonical).is_ok());
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

/// The checker must see what is wrong: any step left out, and some that are changed.
#[test]
fn the_checker_finds_broken_steps() {
    for ranks in [2, 3, 6, 8] {
        for pattern in patterns(ranks, 1) {
            let steps: Vec<_> = (0..ranks).map(|me| pattern.steps(me)).collect();
            for rank in 0..ranks as usize {
                for index in 0..steps[rank].len() {
                    let mut broken = steps.clone();
                    broken[rank].remove(index);
                    let result = symbolic::check_steps(&pattern, &broken);
                    assert!(result.is_err(), "{pattern:?}: rank {rank} without step {index}");
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

    // The ring's order is not the canonical one, and the checker can tell.
    let canonical = Pattern { order: Order::Canonical, ..ring };
    let violation = symbolic::check(&canonical).unwrap_err();
    assert!(matches!(violation.problem, Problem::Wrong { .. }), "{violation}");
    let uneven = pattern(AllReduce, Algorithm::HalvingDoubling, 5);
    let canonical = Pattern { order: Order::Canonical, ..uneven };
    assert!(symbolic::check(&canonical).is_err());
}
