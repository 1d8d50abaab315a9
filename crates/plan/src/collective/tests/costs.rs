//! Every algorithm costs what its doc comment says.

use super::*;

/// Rounds, bytes sent, received and read, and fan-in as the doc comments state them.
fn formulas(pattern: &Pattern, n: u64) -> [u64; 5] {
    let ranks = u64::from(pattern.ranks());
    let others = ranks - 1;
    let part = n * others / ranks;
    let core = 1 << ranks.ilog2();
    let (s, sigma) = (u64::from(ranks.ilog2()), u64::from(core < ranks));
    let core_part = n * (core - 1) / core;
    let halves = (1..=s).map(|k| n / ranks * ranks.div_ceil(1 << k)).sum::<u64>();
    let at_most_whole = if sigma == 1 { n } else { part };
    let chain = (ranks - 2) + 4 * (ranks - 2) + 1;
    let coprime = (1..ranks).filter(|&a| (2..=a).all(|d| a % d > 0 || ranks % d > 0)).count();
    match (pattern.algorithm(), pattern.kind()) {
        (Algorithm::Ring, AllReduce) => [2 * others, 2 * part, 2 * part, 0, 1],
        (Algorithm::Ring, ReduceScatter | AllGather | Gather | AllToAll) => {
            [others, part, part, 0, 1]
        }
        (Algorithm::Ring, Broadcast | Reduce) => [chain, n, n, 0, 1],
        (Algorithm::Ring, Scatter) => [others, part, part, 0, 1],
        (_, Barrier) => {
            let rounds = match pattern.algorithm() {
                Algorithm::Ring => others,
                Algorithm::Bruck => s + sigma,
                _ => 1,
            };
            let fan_in = if pattern.algorithm() == Algorithm::Direct { others } else { 1 };
            [rounds, 0, 0, 0, fan_in]
        }
        (Algorithm::Ring, SendRecv) => unreachable!(),
        (Algorithm::Direct, SendRecv) => [1, n, n, 0, 1],
        (Algorithm::SharedMemory, SendRecv) => [1, 0, 0, n, 1],
        (Algorithm::Direct, Scatter) => [1, part, n / ranks, 0, 1],
        (Algorithm::SharedMemory, Scatter) => [1, 0, 0, n / ranks, 1],
        (Algorithm::MultiRing { rings }, kind) => {
            let room = match rings.host().filter(|&host| u64::from(host) < ranks) {
                _ if !rings.orders().is_empty() => 2 * rings.orders().len() as u64,
                // Two hosts of one member have one link each way, and both rings would take it.
                Some(1) if ranks == 2 => 1,
                Some(host) => 2 * u64::from(host / 2).max(1),
                None => coprime as u64,
            };
            let orders = u64::from(rings.count()).min(room);
            match kind {
                AllReduce => [2 * others, 2 * part, 2 * part, 0, orders],
                ReduceScatter | AllGather => [others, part, part, 0, orders],
                Broadcast | Reduce => [chain, n, n, 0, orders],
                _ => unreachable!(),
            }
        }
        (Algorithm::HalvingDoubling, AllReduce) => {
            let bytes = 2 * core_part + sigma * n;
            [2 * s + 2 * sigma, bytes, bytes, 0, 1]
        }
        (Algorithm::HalvingDoubling, ReduceScatter) => {
            [s + 2 * sigma, at_most_whole, sigma * n + halves, 0, 1]
        }
        (Algorithm::HalvingDoubling, AllGather) => {
            [s + 2 * sigma, sigma * n + halves, at_most_whole, 0, 1]
        }
        (Algorithm::HalvingDoubling, Broadcast) => {
            [2 * s + sigma, 2 * core_part + sigma * n, n / 2 + core_part, 0, 1]
        }
        (Algorithm::HalvingDoubling, Reduce) => {
            [2 * s + sigma, n / 2 + core_part, 2 * core_part + sigma * n, 0, 1]
        }
        (Algorithm::Tree, AllReduce) if pattern.order() == SummationOrder::Free => {
            let bytes = [n, 3 * n / 2, 2 * n][others.min(3) as usize - 1];
            [2 * (s + 4 * (s - 1)), bytes, bytes, 0, others.min(2)]
        }
        (Algorithm::Tree, kind) => {
            let l = u64::from(others.ilog2());
            match kind {
                AllReduce => {
                    let sent = if others == 1 { n } else { 5 * n / 2 };
                    let received = [n, 2 * n, 2 * n, 5 * n / 2][others.min(4) as usize - 1];
                    [4 * (5 * l + 1), sent, received, 0, others.min(2)]
                }
                _ => [5 * l + 1, n, n, 0, others.min(2)],
            }
        }
        (Algorithm::Direct, AllReduce) => [2, 2 * part, 2 * part, 0, others],
        (Algorithm::Direct, ReduceScatter | AllGather | AllToAll) => [1, part, part, 0, others],
        (Algorithm::Direct, Broadcast) => [1, n * others, n, 0, 1],
        (Algorithm::Direct, Reduce) => [1, n, n * others, 0, others],
        (Algorithm::Direct, Gather) => [1, n / ranks, part, 0, others],
        (Algorithm::SharedMemory, AllReduce) => [2, 0, 0, part, others],
        (Algorithm::SharedMemory, Reduce) => [2, 0, 0, 2 * part, others],
        (Algorithm::SharedMemory, ReduceScatter | AllGather | Gather | AllToAll) => {
            [1, 0, 0, part, others]
        }
        (Algorithm::SharedMemory, Broadcast) => [1, 0, 0, n, 1],
        (Algorithm::ParameterServer { servers }, kind) => {
            let k = u64::from(servers);
            let (busy, rounds) = (n * (ranks + k - 2) / k, 1 + u64::from(k > 1));
            match kind {
                AllReduce => [2, busy, busy, 0, others],
                Reduce => [rounds, n, busy, 0, others],
                Broadcast => [rounds, busy, n, 0, k.min(others)],
                _ => unreachable!(),
            }
        }
        (Algorithm::Naive, _) => [ranks * others, n * others, n * others, 0, 1],
        (Algorithm::Overlapped, _) => [others, n * others, n * others, 0, 1],
        (Algorithm::OneShot, _) => [1, n * others, n * others, 0, others],
        (Algorithm::Partitioned, AllReduce) => [2 * others, 2 * part, 2 * part, 0, 1],
        (Algorithm::Partitioned, _) => [others, part, part, 0, 1],
        (Algorithm::Torus { shape }, kind) => {
            let d = shape.sizes().map(|size| u64::from(size) - 1).sum::<u64>();
            let ways = 1 + u64::from(kind == AllReduce);
            [ways * d, ways * part, ways * part, 0, 1]
        }
        (Algorithm::PerAxis { shape }, _) => {
            let d = shape.sizes().map(|size| u64::from(size) - 1).sum::<u64>();
            let bytes = shape.sizes().map(|size| 2 * n * u64::from(size - 1) / u64::from(size));
            let bytes = bytes.sum::<u64>();
            [2 * d, bytes, bytes, 0, 1]
        }
        (Algorithm::InNetwork, AllReduce) => [1, n, n, 0, 1],
        (Algorithm::InNetwork, ReduceScatter) => [1, n, n / ranks, 0, 1],
        (Algorithm::InNetwork, AllGather) => [1, n / ranks, part, 0, 1],
        (Algorithm::InNetwork, _) => [1, n, n, 0, 1],
        // The others are checked where they are defined.
        _ => counted(pattern, n),
    }
}

/// The textbook's table of all-reduces: rounds, peak bytes at one rank in one round, fan-in.
#[test]
fn all_reduces_grow_as_the_textbook_says() {
    for ranks in 2..=17u32 {
        let (p, n) = (u64::from(ranks), 240 * u64::from(ranks));
        let of = |algorithm| {
            let pattern = pattern(AllReduce, algorithm, ranks);
            let counts = pattern.counts(Bytes(n));
            let peak = counts.bytes_in_per_round_max.max(counts.bytes_out_per_round_max).0;
            let total = pattern.total_bytes(Bytes(n)).0;
            [u64::from(counts.rounds), peak, u64::from(counts.fan_in_max), total]
        };
        let others = p - 1;
        // Parameter server: O(1) rounds, O(N·P) bytes and O(P) messages at the server.
        let server = Algorithm::ParameterServer { servers: 1 };
        assert_eq!(of(server), [2, n * others, others, 2 * n * others]);
        let sharded = Algorithm::ParameterServer { servers: ranks };
        assert_eq!(of(sharded), [2, n / p * others, others, 2 * n * others]);
        // Decentralised: whole vectors between all pairs, in turn, one at a time, or at once.
        assert_eq!(of(Algorithm::Naive), [p * others, n, 1, n * p * others]);
        assert_eq!(of(Algorithm::Overlapped), [others, n, 1, n * p * others]);
        assert_eq!(of(Algorithm::OneShot), [1, n * others, others, n * p * others]);
        // Split vectors: 2(P−1) rounds of one part of N/P bytes.
        assert_eq!(of(Algorithm::Partitioned), [2 * others, n / p, 1, 2 * n * others]);
        assert_eq!(of(Algorithm::Ring), [2 * others, n / p, 1, 2 * n * others]);
    }
}

/// In no round does a rank receive two messages, and all messages of a turn are of one rank.
#[test]
fn naive_ranks_take_turns_and_overlapped_ones_do_not_wait() {
    for ranks in 2..=17 {
        for (algorithm, at_once) in
            [(Algorithm::Naive, 1), (Algorithm::Overlapped, ranks), (Algorithm::OneShot, u32::MAX)]
        {
            let pattern = pattern(AllReduce, algorithm, ranks);
            let mut senders = vec![0; pattern.rounds() as usize];
            for rank in 0..ranks {
                for step in pattern.steps(rank) {
                    if let Action::Send { .. } = step.action {
                        senders[step.round as usize] += 1;
                    }
                }
            }
            let wanted = at_once.min(ranks * (ranks - 1));
            assert!(senders.iter().all(|&found| found == wanted), "{algorithm}: {senders:?}");
        }
    }
}

/// Counted costs, in the order of [`formulas`].
fn counted(pattern: &Pattern, n: u64) -> [u64; 5] {
    let counts = pattern.counts(Bytes(n));
    [
        u64::from(counts.rounds),
        counts.bytes_sent_per_rank_max.0,
        counts.bytes_received_per_rank_max.0,
        counts.bytes_read_per_rank_max.0,
        u64::from(counts.fan_in_max),
    ]
}

#[test]
fn costs_are_as_documented() {
    for ranks in 2..=17 {
        for pattern in patterns(ranks, 0) {
            if pattern.levels().is_none() && pattern.visits().is_empty() {
                let n = 240 * u64::from(ranks) * u64::from(pattern.chunks());
                assert_eq!(counted(&pattern, n), formulas(&pattern, n), "{pattern:?}");
            }
        }
    }
}

/// The costs of a hierarchy are the sum of its levels' costs, the outer level's for its share.
#[test]
fn hierarchies_cost_what_their_levels_do() {
    for ranks in 2..=17u32 {
        for host in (1..=ranks).filter(|host| ranks.is_multiple_of(*host)) {
            for inner in levels(host) {
                for outer in levels(ranks / host) {
                    for kind in CollectiveKind::ALL {
                        let algorithm = hierarchical(inner, outer, host);
                        if let Ok(pattern) =
                            Pattern::new(kind, algorithm, SummationOrder::Free, ranks, 0)
                        {
                            check_costs_of_levels(&pattern, inner);
                        }
                    }
                }
            }
        }
    }
}

fn check_costs_of_levels(pattern: &Pattern, inner: Algorithm) {
    let (inside, across) = pattern.levels().unwrap();
    let host = inside.ranks();
    let crossing = match (pattern.kind(), inner) {
        (Broadcast | Reduce, _) => 1,
        (_, Algorithm::Naive | Algorithm::Overlapped | Algorithm::OneShot) => 1,
        (_, Algorithm::PerAxis { .. }) => 1,
        _ if host == 1 => 1,
        (_, Algorithm::HalvingDoubling) => halving_doubling::core(host),
        (_, Algorithm::ParameterServer { servers }) => servers,
        (_, Algorithm::Tree) => 2,
        _ => host,
    };
    let n = 240 * u64::from(host * pattern.ranks()) * u64::from(pattern.chunks());
    let (found, mut inside, across) =
        (counted(pattern, n), counted(&inside, n), counted(&across, n / u64::from(crossing)));
    if inner == Algorithm::InNetwork && pattern.kind() == AllReduce && host > 1 {
        // Within a hierarchy the switch sums first and distributes later.
        inside = [2, n + n / u64::from(host), n, 0, 1];
    }
    if inner == Algorithm::SharedMemory && pattern.kind() == AllReduce {
        // Within a hierarchy parts are read twice; alone, the second read is a write.
        inside[3] *= 2;
    }
    assert_eq!(found[0], inside[0] + across[0], "{pattern:?}");
    assert_eq!(found[4], inside[4].max(across[4]), "{pattern:?}");
    // If the busiest rank of a host does not communicate across hosts, the sum is an upper bound.
    let uneven = match pattern.kind() {
        Broadcast | Reduce => true,
        _ => matches!(inner, Algorithm::Tree | Algorithm::HalvingDoubling),
    };
    for i in 1..4 {
        let sum = inside[i] + across[i];
        assert!(found[i] == sum || (uneven && found[i] < sum), "{pattern:?}: {found:?}, {sum}");
    }
}

/// Every order of dimensions moves the same bytes, and streams never add rounds.
#[test]
fn grids_cost_what_is_documented() {
    for ranks in 2..=24 {
        for algorithm in grids(ranks) {
            for (kind, ways) in [(AllReduce, 2), (ReduceScatter, 1), (AllGather, 1)] {
                let pattern = pattern(kind, algorithm, ranks);
                let Algorithm::PerDimension { chunks, grid: Some(grid), .. } = algorithm else {
                    unreachable!()
                };
                let n = 240 * u64::from(ranks) * u64::from(chunks);
                let [rounds, sent, received, read, fan_in] = counted(&pattern, n);
                let part = ways * (n - n / u64::from(ranks));
                assert_eq!([sent, received, read], [part, part, 0], "{pattern:?}");
                let dimensions = grid.dimensions();
                let d: u32 = dimensions.iter().map(|d| d.way.rounds(d.size)).sum();
                let (one, all) = (ways * u64::from(d), ways * u64::from(d * chunks));
                assert!((one..=all).contains(&rounds), "{pattern:?}: {rounds}");
                assert!(chunks > 1 || rounds == one, "{pattern:?}: {rounds}");
                let most =
                    |d: &GridDimension| if d.way == DimAlgorithm::Direct { d.size - 1 } else { 1 };
                let most: u32 = dimensions.iter().map(most).sum();
                assert!(fan_in <= u64::from(most), "{pattern:?}: {fan_in}");
            }
        }
    }
}

#[test]
fn rounds_are_known_without_steps() {
    for ranks in 1..=17 {
        for pattern in patterns(ranks, ranks / 3) {
            assert_eq!(pattern.rounds(), pattern.counts(Bytes(1)).rounds, "{pattern:?}");
        }
    }
}

#[test]
fn canonical_sums_hold_what_is_documented() {
    let held = |kind, algorithm| {
        let pattern = Pattern::new(kind, algorithm, SummationOrder::Canonical, 8, 0).unwrap();
        pattern.counts(Bytes(1600)).bytes_held_max.0
    };
    assert_eq!(held(AllReduce, Algorithm::Direct), 1400);
    assert_eq!(held(Reduce, Algorithm::Direct), 7 * 1600);
    assert_eq!(held(AllReduce, Algorithm::ParameterServer { servers: 4 }), 7 * 400);
    assert_eq!(held(AllReduce, Algorithm::HalvingDoubling), 0);
    assert_eq!(held(AllReduce, Algorithm::Tree), 0);
    assert_eq!(held(AllReduce, Algorithm::SharedMemory), 0);
    assert_eq!(held(AllReduce, Algorithm::Overlapped), 7 * 1600);
    assert_eq!(held(AllReduce, Algorithm::OneShot), 7 * 1600);
    assert_eq!(held(AllReduce, Algorithm::Partitioned), 1400);
    assert_eq!(held(AllReduce, hierarchical(Algorithm::Direct, Algorithm::Direct, 2)), 800);
    let naive = pattern(AllReduce, Algorithm::Naive, 8);
    assert_eq!(naive.counts(Bytes(1600)).bytes_held_max.0, 7 * 1600);
    assert_eq!(pattern(AllReduce, Algorithm::Direct, 8).counts(Bytes(1600)).bytes_held_max.0, 0);
}

#[test]
fn the_busiest_ranks_stand_for_all() {
    for ranks in (1..=13).chain([17, 24]) {
        for root in [0, 1 % ranks, ranks / 2, ranks - 1] {
            for pattern in patterns(ranks, root) {
                for bytes in [0, 5, 1001] {
                    let all = Counts::of_ranks(&pattern, 0..ranks, Bytes(bytes));
                    assert_eq!(pattern.counts(Bytes(bytes)), all, "{pattern:?}, {bytes} bytes");
                }
            }
        }
    }
}

#[test]
fn few_ranks_stand_for_all_of_a_large_group() {
    for ranks in (9..=13).chain([24, 36]) {
        for pattern in patterns(ranks, ranks / 2) {
            if pattern.algorithm() != Algorithm::HalvingDoubling {
                let bytes = Bytes(1_000_003);
                let few = Counts::of_ranks(&pattern, counts::at_edges(&pattern), bytes);
                let all = Counts::of_ranks(&pattern, 0..ranks, bytes);
                assert_eq!((few.rounds, few.fan_in_max), (all.rounds, all.fan_in_max));
                let close = |few: Bytes, all: Bytes| few <= all && few.0 + 20 >= all.0;
                assert!(
                    close(few.bytes_sent_per_rank_max, all.bytes_sent_per_rank_max)
                        && close(few.bytes_received_per_rank_max, all.bytes_received_per_rank_max)
                        && close(few.bytes_read_per_rank_max, all.bytes_read_per_rank_max),
                    "{pattern:?}: {few:?} for {all:?}"
                );
            }
        }
    }
}

#[test]
fn ranks_of_every_shape_stand_for_all_of_large_trees() {
    for ranks in [6000, 6145] {
        for kind in [AllReduce, CollectiveKind::Broadcast, CollectiveKind::Reduce] {
            for order in [SummationOrder::Free, SummationOrder::Canonical] {
                let Ok(pattern) = Pattern::new(kind, Algorithm::Tree, order, ranks, ranks / 3)
                else {
                    continue;
                };
                let (bytes, stand) = (Bytes(1_000_003), counts::at_edges(&pattern));
                assert!(stand.len() < ranks as usize, "{ranks}: {}", stand.len());
                let [few, all] = [
                    Counts::of_ranks(&pattern, stand, bytes),
                    Counts::of_ranks(&pattern, 0..ranks, bytes),
                ];
                assert_eq!(few, all, "{pattern:?}");
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
    let hosts = hierarchical(Algorithm::SharedMemory, Algorithm::Ring, 8);
    let counts = pattern(AllReduce, hosts, 4096).counts(Bytes(4096 << 10));
    assert_eq!(counts.rounds, 2 + 2 * 511);
    assert_eq!(counts.bytes_sent_per_rank_max, Bytes((2 * 511) << 10));
    let torus = Algorithm::Torus { shape: TorusShape::new(&[16, 16, 16]).unwrap() };
    assert_eq!(pattern(AllReduce, torus, 4096).counts(Bytes(1 << 20)).rounds, 90);
}
