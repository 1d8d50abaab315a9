//! Properties of the whole simulation: folding changes nothing, counts and closed forms hold, and
//! nonsense gives errors.
//!
//! The tests of `table::astra` hold ASTRA-sim's own results.

use super::*;
use proptest::prelude::*;

fn dim(kind: Kind, size: u32, bandwidth_gibps: f64, latency_ns: f64) -> Dimension {
    Dimension { kind, size, bandwidth_gibps, latency_ns }
}

fn one_dim(backend: Backend, collective: Collective, dim: Dimension, algorithm: Algorithm) -> Case {
    Case {
        backend,
        collective,
        bytes: 1 << 20,
        dims: vec![dim],
        algorithms: Algorithms::PerDimension(vec![algorithm]),
        splits: 1,
        active_chunks: 1,
        optimization: Optimization::LocalBwAware,
        endpoint_delay_ns: 10,
        local_mem_gbps: 1600.0,
    }
}

const DIRECT: Algorithm = Algorithm::Direct { window: None };

fn kinds() -> impl Strategy<Value = Kind> {
    prop::sample::select(vec![Kind::Ring, Kind::Switch, Kind::FullyConnected])
}

fn collectives() -> impl Strategy<Value = Collective> {
    use Collective::{AllGather, AllReduce, AllToAll, ReduceScatter};
    prop::sample::select(vec![AllReduce, AllReduce, AllGather, ReduceScatter, AllToAll])
}

fn algorithms() -> impl Strategy<Value = Algorithm> {
    prop_oneof![
        Just(Algorithm::Ring),
        Just(DIRECT),
        (1u32..5).prop_map(|window| Algorithm::Direct { window: Some(window) }),
        Just(Algorithm::HalvingDoubling),
        Just(Algorithm::DoubleBinaryTree),
    ]
}

/// A dimension and an algorithm for it, with a power-of-two size if the algorithm needs it.
fn layers(largest: u32) -> impl Strategy<Value = (Dimension, Algorithm)> {
    let rates = prop::sample::select(vec![1.0, 25.0, 37.5, 400.0]);
    let latencies = prop::sample::select(vec![0.0, 10.0, 500.0, 936.25]);
    (kinds(), 2..=largest, rates, latencies, algorithms()).prop_map(
        |(kind, size, rate, latency, algorithm)| {
            let size = match algorithm {
                Algorithm::HalvingDoubling | Algorithm::DoubleBinaryTree => 1 << size.ilog2(),
                Algorithm::Ring | Algorithm::Direct { .. } => size,
            };
            (dim(kind, size, rate, latency), algorithm)
        },
    )
}

fn networks() -> impl Strategy<Value = (Backend, Vec<(Dimension, Algorithm)>)> {
    prop_oneof![
        prop::collection::vec(layers(9), 1..3).prop_map(|l| (Backend::CongestionUnaware, l)),
        prop::collection::vec(layers(4), 3..5).prop_map(|l| (Backend::CongestionUnaware, l)),
        prop::collection::vec(layers(12), 1).prop_map(|l| (Backend::CongestionAware, l)),
    ]
}

prop_compose! {
    fn cases()(
        (backend, layers) in networks(),
        over_all in prop::option::weighted(0.1, prop::sample::select(vec![Algorithm::Ring, DIRECT])),
        collective in collectives(),
        bytes in prop_oneof![Just(64u64), Just(1 << 20), 1u64..1 << 24],
        splits in 1u32..9,
        active_chunks in 1u32..5,
        baseline: bool,
        endpoint_delay_ns in prop::sample::select(vec![0u64, 10, 500]),
        local_mem_gbps in prop::sample::select(vec![50.0, 1600.0]),
    ) -> Case {
        let (dims, algorithms): (Vec<_>, Vec<_>) = layers.into_iter().unzip();
        Case {
            backend,
            collective,
            bytes,
            dims,
            algorithms: over_all.map_or(Algorithms::PerDimension(algorithms), Algorithms::OverAll),
            splits,
            active_chunks,
            optimization: if baseline { Optimization::Baseline } else { Optimization::LocalBwAware },
            endpoint_delay_ns,
            local_mem_gbps,
        }
    }
}

/// Returns true for a direct all-reduce. Its second half is sent when a packet becomes ready after
/// the last one has arrived. An earlier arrival may therefore be sent later, and less data may take
/// longer.
fn has_barrier(case: &Case) -> bool {
    let is_direct = |algorithm: &Algorithm| matches!(algorithm, Algorithm::Direct { .. });
    let direct = match &case.algorithms {
        Algorithms::PerDimension(algorithms) => algorithms.iter().any(is_direct),
        Algorithms::OverAll(algorithm) => is_direct(algorithm),
    };
    direct && case.collective == Collective::AllReduce
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn folded_is_unfolded(case in cases()) {
        prop_assert_eq!(simulate(&case), simulate_every_rank(&case));
    }

    /// Only with one chunk: an additional byte can mean one chunk less, as the remainder of the
    /// division is a chunk of its own.
    #[test]
    fn more_bytes_take_no_less_time(case in cases(), more in 1u64..1 << 20) {
        let case = Case { splits: 1, backend: Backend::CongestionUnaware, ..case };
        let larger = Case { bytes: case.bytes + more, ..case.clone() };
        if let (Ok(less), Ok(more)) = (simulate(&case), simulate(&larger)) {
            prop_assert_eq!(less.messages, more.messages);
            if !has_barrier(&case) {
                prop_assert!(less.time_ns_max <= more.time_ns_max);
                prop_assert!(less.time_ns_min <= more.time_ns_min);
            }
        }
    }

    /// Without latency, twice the bytes take twice the time, except for the rounding of each step.
    #[test]
    fn time_is_linear_in_bytes_without_latency(case in cases(), shares in 1u64..100_000) {
        let mut case = Case { splits: 1, endpoint_delay_ns: 0, ..case };
        case.dims.iter_mut().for_each(|dim| dim.latency_ns = 0.0);
        case.bytes = shares * case.ranks() * 2;
        let twice = Case { bytes: 2 * case.bytes, ..case.clone() };
        if let (Ok(once), Ok(twice)) = (simulate(&case), simulate(&twice)) {
            // A step is rounded once per link (one or two links) and three times for memory.
            let rounded = 5 * once.messages;
            prop_assert!(twice.time_ns_max >= 2 * once.time_ns_max);
            prop_assert!(twice.time_ns_max <= 2 * once.time_ns_max + rounded);
        }
    }

    #[test]
    fn congestion_only_slows(case in cases()) {
        let mut case = case;
        case.dims.truncate(1);
        if let Algorithms::PerDimension(algorithms) = &mut case.algorithms {
            algorithms.truncate(1);
        }
        // A fraction would be truncated at each hop instead of once.
        case.dims[0].latency_ns = case.dims[0].latency_ns.floor();
        let aware = Case { backend: Backend::CongestionAware, ..case.clone() };
        let unaware = Case { backend: Backend::CongestionUnaware, ..case.clone() };
        if let (Ok(aware), Ok(unaware)) = (simulate(&aware), simulate(&unaware)) {
            prop_assert_eq!(aware.messages, unaware.messages);
            prop_assert!(has_barrier(&case) || aware.time_ns_max >= unaware.time_ns_max);
        }
    }

    #[test]
    fn nonsense_gets_an_answer_or_a_reason(
        case in cases(),
        bytes in prop::sample::select(vec![0, 1, u64::MAX]),
        splits in prop::sample::select(vec![0, 1, u32::MAX]),
        active_chunks in prop::sample::select(vec![0, 1, u32::MAX]),
        endpoint_delay_ns in prop::sample::select(vec![0, u64::MAX]),
        local_mem_gbps in prop::sample::select(vec![0.0, -1.0, f64::NAN, f64::INFINITY, 1e-300]),
        rate in prop::sample::select(vec![0.0, -1.0, f64::NAN, f64::INFINITY, 1e-300, 1e300]),
        latency in prop::sample::select(vec![-1.0, f64::NAN, f64::INFINITY, 1e300, 0.0]),
        size in prop::sample::select(vec![0, 1, 2, u32::MAX]),
        which in 0u32..256,
    ) {
        let mut case = case;
        let chosen = |bit: u32| which & (1 << bit) != 0;
        if chosen(0) { case.bytes = bytes; }
        if chosen(1) { case.splits = splits; }
        if chosen(2) { case.active_chunks = active_chunks; }
        if chosen(3) { case.endpoint_delay_ns = endpoint_delay_ns; }
        if chosen(4) { case.local_mem_gbps = local_mem_gbps; }
        if chosen(5) { case.dims[0].bandwidth_gibps = rate; }
        if chosen(6) { case.dims[0].latency_ns = latency; }
        if chosen(7) { case.dims[0].size = size; }
        match simulate(&case) {
            Ok(outcome) => prop_assert!(outcome.time_ns_min <= outcome.time_ns_max),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

/// Time of a ring all-reduce: 2(n − 1) steps on every rank, with reductions in the first half.
fn ring_all_reduce_ns(n: u64, step_ns: u64, reduce_ns: u64, endpoint_ns: u64) -> u64 {
    endpoint_ns + 2 * (n - 1) * (step_ns + endpoint_ns) + (n - 1) * reduce_ns
}

#[test]
fn a_large_ring_is_its_closed_form() {
    let ring = dim(Kind::Ring, 4096, 50.0, 500.0);
    let mut case =
        one_dim(Backend::CongestionUnaware, Collective::AllReduce, ring, Algorithm::Ring);
    case.bytes = 64 << 20;
    // 16 KiB at 50 GiB/s and 1.6 TB/s.
    let expected = ring_all_reduce_ns(4096, 805, 30, 10);
    for backend in [Backend::CongestionUnaware, Backend::CongestionAware] {
        case.backend = backend;
        let outcome = simulate(&case).unwrap();
        assert_eq!((outcome.time_ns_min, outcome.time_ns_max), (expected, expected));
        assert_eq!(outcome.messages, 4096 * 2 * 4095);
    }
}

#[test]
fn a_torus_of_65536_ranks_is_simulated_by_one() {
    let dims = [64, 32, 32].map(|size| dim(Kind::Ring, size, 100.0, 500.0)).to_vec();
    let case = Case {
        bytes: 1 << 30,
        dims,
        algorithms: Algorithms::PerDimension(vec![Algorithm::Ring; 3]),
        splits: 4,
        ..one_dim(
            Backend::CongestionUnaware,
            Collective::AllReduce,
            dim(Kind::Ring, 2, 1.0, 0.0),
            Algorithm::Ring,
        )
    };
    let outcome = simulate(&case).unwrap();
    assert_eq!(outcome.messages, 65536 * 4 * 2 * (63 + 31 + 31));
    assert_eq!(outcome.time_ns_min, outcome.time_ns_max);
    let schedule = schedule::schedule(&case).unwrap();
    assert_eq!(Fold::by_symmetry(&case, &schedule).unwrap().ranks, 1);
}

#[test]
fn trees_are_simulated_rank_by_rank_and_what_is_beside_them_is_folded() {
    let mut case = one_dim(
        Backend::CongestionUnaware,
        Collective::AllReduce,
        dim(Kind::Switch, 8, 100.0, 500.0),
        Algorithm::DoubleBinaryTree,
    );
    let schedule = schedule::schedule(&case).unwrap();
    assert_eq!(Fold::by_symmetry(&case, &schedule), None);
    case.dims.insert(0, dim(Kind::Ring, 5, 100.0, 500.0));
    case.algorithms = Algorithms::PerDimension(vec![DIRECT, Algorithm::DoubleBinaryTree]);
    let schedule = schedule::schedule(&case).unwrap();
    let fold = Fold::by_symmetry(&case, &schedule).unwrap();
    assert_eq!((fold.ranks, fold.copies), (8, 5));
    assert_eq!(simulate(&case), simulate_every_rank(&case));
}

#[test]
fn every_algorithm_sends_what_its_definition_says() {
    let n = 16u64;
    let pairs = n * (n - 1);
    let log = 4;
    let switch = dim(Kind::Switch, 16, 100.0, 500.0);
    let sent = |collective, algorithm| {
        let case = one_dim(Backend::CongestionUnaware, collective, switch, algorithm);
        simulate(&case).map(|outcome| outcome.messages).ok()
    };
    for (collective, ring, direct, halving) in [
        (Collective::AllReduce, 2 * pairs, 2 * pairs, Some(2 * n * log)),
        (Collective::ReduceScatter, pairs, pairs, Some(n * log)),
        (Collective::AllGather, pairs, pairs, Some(n * log)),
        (Collective::AllToAll, n * pairs / 2, pairs, None),
    ] {
        assert_eq!(sent(collective, Algorithm::Ring), Some(ring));
        assert_eq!(sent(collective, DIRECT), Some(direct));
        assert_eq!(sent(collective, Algorithm::Direct { window: Some(3) }), Some(direct));
        assert_eq!(sent(collective, Algorithm::HalvingDoubling), halving);
        assert_eq!(sent(collective, Algorithm::DoubleBinaryTree), Some(2 * (n - 1)));
    }
}

#[test]
fn an_order_that_could_differ_between_ranks_is_not_folded() {
    // Chunks from dimensions 0 and 2 enter dimension 1 in the same tick.
    let dims = vec![
        dim(Kind::Ring, 3, 100.0, 500.0),
        dim(Kind::Ring, 2, 100.0, 500.0),
        dim(Kind::Switch, 2, 100.0, 500.0),
    ];
    let case = Case {
        backend: Backend::CongestionUnaware,
        collective: Collective::AllReduce,
        bytes: 1000,
        dims,
        algorithms: Algorithms::PerDimension(vec![
            Algorithm::Ring,
            Algorithm::HalvingDoubling,
            DIRECT,
        ]),
        splits: 16,
        active_chunks: 2,
        optimization: Optimization::LocalBwAware,
        endpoint_delay_ns: 500,
        local_mem_gbps: 50.0,
    };
    let schedule = schedule::schedule(&case).unwrap();
    let fold = Fold::by_symmetry(&case, &schedule).unwrap();
    assert_eq!(run(&case, &schedule, &fold), Ok(None));
    assert_eq!(simulate(&case), simulate_every_rank(&case));
}

#[test]
fn the_rest_of_a_division_is_one_more_chunk() {
    let ring = dim(Kind::Ring, 4, 100.0, 0.0);
    let mut case =
        one_dim(Backend::CongestionUnaware, Collective::AllReduce, ring, Algorithm::Ring);
    case.splits = 4;
    let even = simulate(&case).unwrap();
    case.bytes += 1;
    let odd = simulate(&case).unwrap();
    assert_eq!(4 * odd.messages, 5 * even.messages);
    assert_eq!(4 * odd.time_ns_max, 5 * even.time_ns_max);
}

#[test]
fn what_cannot_be_simulated_is_told() {
    let told = |case: &Case| simulate(case).unwrap_err().to_string();
    let switch = dim(Kind::Switch, 6, 100.0, 500.0);
    let base = one_dim(Backend::CongestionAware, Collective::AllReduce, switch, Algorithm::Ring);
    let two = Case {
        dims: vec![switch; 2],
        algorithms: Algorithms::PerDimension(vec![Algorithm::Ring; 2]),
        ..base.clone()
    };
    assert_eq!(
        told(&two),
        "the congestion-aware backend has one dimension, not 2; use the congestion-unaware one, \
         or a network of one dimension"
    );
    let with =
        |algorithm| Case { algorithms: Algorithms::PerDimension(vec![algorithm]), ..base.clone() };
    assert_eq!(
        told(&with(Algorithm::HalvingDoubling)),
        "the number of ranks in halving-doubling is 6; without a power of two, ranks wait without \
         end"
    );
    assert_eq!(
        told(&with(Algorithm::DoubleBinaryTree)),
        "size of dimension 0 is 6; a double binary tree needs a power of two"
    );
    assert_eq!(
        told(&Case { algorithms: Algorithms::PerDimension(vec![]), ..base.clone() }),
        "the number of algorithms is 0 for 1 dimensions; give one for each dimension, or one over \
         all"
    );
    let huge = Case { dims: vec![dim(Kind::Ring, u32::MAX, 1.0, 0.0)], ..base };
    assert_eq!(told(&huge), "ranks: 4294967295 is over the limit of 16777216; use fewer ranks");
}
