use super::*;
use proptest::prelude::*;

fn seconds(warm: f64, cold: f64) -> WarmCold {
    WarmCold { warm: Seconds(warm), cold: Seconds(cold) }
}

/// A machine of two cores whose GEMMs run at 1 GFLOP/s, half of that from memory.
pub(crate) fn two_cores() -> Measured {
    let sample = |shape: [u64; 3]| {
        let work = 2.0 * shape.iter().product::<u64>() as f64;
        let (warm, cold) = (work * 1e-9, work * 2e-9);
        let (alone, together) = (seconds(warm, cold), seconds(warm, 2.0 * cold));
        Sample { shape: shape.to_vec(), work, solo: alone, all_cores: together }
    };
    let products = KernelTable {
        name: "linear.forward".into(),
        dtype: DType::F32,
        threads: 1,
        samples: [[32, 64, 64], [32, 64, 256], [256, 64, 64], [256, 256, 256]].map(sample).to_vec(),
    };
    let rate = |bytes, alone, together| CopyRate {
        bytes: Bytes(bytes),
        solo: BytesPerSec(alone),
        all_cores: BytesPerSec(together),
    };
    let exchanges = |latency: f64| {
        [64, 4096, 1 << 20]
            .map(|bytes| {
                let time = Seconds(latency + bytes as f64 * 1e-9);
                let cold = Some(time + Seconds(3e-5 + bytes as f64 * 2e-9));
                ExchangeSample {
                    bytes: Bytes(bytes),
                    warm: time,
                    cold,
                    cpu_oversubscribed: Some(time * 10.0),
                }
            })
            .to_vec()
    };
    let all_reduce = CollectiveTable {
        kind: CollectiveKind::AllReduce,
        algorithm: Algorithm::HalvingDoubling,
        ranks: 2,
        times: exchanges(2e-5),
    };
    Measured {
        cores: 2,
        threads: None,
        core_round_trip: None,
        op_overhead: Seconds(5e-7),
        exchange_overhead: Seconds(1e-6),
        load_time_per_token: Seconds(2e-8),
        memory: Memory {
            copy_bandwidth: vec![
                rate(1 << 16, 64e9, 64e9),
                rate(1 << 20, 32e9, 32e9),
                rate(1 << 26, 8e9, 4e9),
            ],
        },
        kernels: vec![products],
        cache_decay: Vec::new(),
        rank_skew: 0.0,
        transports: vec![
            TransportTable {
                name: "thread".into(),
                messages: exchanges(1e-5),
                collectives: vec![all_reduce],
            },
            TransportTable {
                name: "tcp".into(),
                messages: exchanges(1e-4),
                collectives: Vec::new(),
            },
        ],
    }
}

#[test]
fn a_sampled_shape_takes_what_it_took() {
    let machine = two_cores();
    let table = machine.kernel("linear.forward", DType::F32, 9).unwrap();
    for sample in &table.samples {
        let time = table.time(&sample.shape, sample.work, CoreLoad::AllCores).unwrap();
        assert!((time.cold.0 / sample.all_cores.cold.0 - 1.0).abs() < 1e-6);
    }
    assert_eq!(machine.kernel("linear.forward", DType::Bf16, 1), None);
    assert_eq!(table.time(&[1, 2], 4.0, CoreLoad::Solo), None);
}

#[test]
fn beyond_the_samples_the_nearest_cost_holds() {
    let machine = two_cores();
    let table = machine.kernel("linear.forward", DType::F32, 0).unwrap();
    for shape in [[1, 1, 1], [u64::MAX, 1, u64::MAX], [0, 0, 0], [4096, 4096, 4096]] {
        let time = table.time(&shape, 1e6, CoreLoad::Solo).unwrap();
        assert!((time.warm.0 - 1e-3).abs() < 1e-9, "{shape:?}: {time:?}");
    }
}

#[test]
fn coldness_follows_the_copies() {
    let memory = two_cores().memory;
    assert_eq!(memory.coldness(0.0, CoreLoad::Solo), 0.0);
    assert_eq!(memory.coldness(1e12, CoreLoad::Solo), 1.0);
    let middle = memory.coldness((1 << 20) as f64, CoreLoad::Solo);
    assert!((middle - 1.0 / 7.0).abs() < 1e-9, "{middle}");
    let flat = Memory { copy_bandwidth: vec![memory.copy_bandwidth[0]] };
    assert_eq!(flat.coldness(1e9, CoreLoad::AllCores), 0.0);
}

#[test]
fn caches_lose_by_what_all_ranks_touch() {
    let machine = two_cores();
    let lost = |bytes: f64, ranks| machine.evicted(|aged| aged.small_data, bytes, ranks);
    assert_eq!(lost(0.0, 2.0), 0.0);
    let some = lost((1 << 20) as f64, 2.0);
    assert_eq!(some, machine.memory.coldness((1 << 20) as f64, CoreLoad::AllCores));
    assert!(some > 0.0 && lost((1 << 20) as f64, 4.0) > some);
    assert_eq!(lost((1 << 20) as f64, 1.0), some, "a core may stay empty");
    assert_eq!(lost(f64::INFINITY, 1.0), 1.0);
}

#[test]
fn caches_lose_by_and_by() {
    let aged = |bytes, wires, vectors| {
        let (alone, together, small, large) = (0.5 * vectors, vectors, vectors, 0.0);
        CacheDecay {
            bytes: Bytes(bytes),
            solo: alone,
            all_cores: together,
            path: wires,
            small_data: small,
            large_data: large,
        }
    };
    let aging = vec![aged(1 << 10, 0.2, 0.1), aged(1 << 20, 1.0, 0.5)];
    let machine = Measured { cache_decay: aging, ..two_cores() };
    let vectors = |bytes: u64| machine.evicted(|aged| aged.data(64.0), bytes as f64, 2.0);
    assert_eq!([0, 1 << 9, 1 << 10, 1 << 20, 1 << 30].map(vectors), [0.0, 0.05, 0.1, 0.5, 0.5]);
    assert!((vectors(1 << 15) - 0.3).abs() < 1e-12, "{}", vectors(1 << 15));
    assert_eq!(machine.evicted(|aged| aged.path, 1024.0, 2.0), 0.2);
    assert_eq!(machine.evicted(|aged| aged.small_data, 512.0, 4.0), 0.1, "ranks that take turns");
    let half = ((CacheDecay::SMALL * CacheDecay::LARGE) as f64).sqrt();
    assert!((machine.cache_decay[1].data(half) - 0.25).abs() < 1e-12);
    assert_eq!(machine.coldness(1024.0, CoreLoad::AllCores), 0.1);
    assert_eq!(machine.coldness(1024.0, CoreLoad::Solo), 0.05);
}

#[test]
fn the_chosen_wire_answers() {
    let mut machine = two_cores();
    assert!(machine.select_transport("tcp") && !machine.select_transport("mpi"));
    assert_eq!(machine.transports[0].name, "tcp");
    let wire = &machine.transports[1];
    let (kind, two) = (CollectiveKind::AllReduce, Algorithm::HalvingDoubling);
    assert_eq!(wire.collective(kind, Algorithm::Ring, 2, Bytes(64)), None);
    assert_eq!(wire.collective(kind, two, 4, Bytes(64)), None);
    let large = wire.collective(kind, two, 2, Bytes(2 << 20)).unwrap();
    assert!((large.0 - 2.0 * (2e-5 + (1 << 20) as f64 * 1e-9)).abs() < 1e-9);
}

#[test]
fn what_comes_on_top_of_an_exchange_is_told_apart() {
    let machine = two_cores();
    let wire = &machine.transports[0];
    let large = Bytes(1 << 20);
    let ExchangeTimes { warm, cold_path: unready, cold, sched_delay: turns } =
        wire.message_times(large).unwrap();
    assert_eq!(warm, wire.message(large).unwrap());
    assert!((unready.0 - 3e-5).abs() < 1e-6, "{unready:?}");
    assert!((cold.0 / (2e-9 * large.as_f64()) - 1.0).abs() < 1e-3, "{cold:?}");
    assert!((turns.0 / warm.0 - 9.0).abs() < 1e-9);
    // An older file has neither value.
    let old = |e: &ExchangeSample| ExchangeSample { cold: None, cpu_oversubscribed: None, ..*e };
    let old: Vec<ExchangeSample> = wire.messages.iter().map(old).collect();
    let plain = exchange_times(&old, large).unwrap();
    assert_eq!((plain.cold_path, plain.cold), (Seconds::ZERO, Seconds::ZERO));
    assert_eq!((plain.warm, plain.sched_delay), (warm, warm));
    assert_eq!(exchange_times(&[], large), None);
}

proptest! {
    /// An interpolated cost is between the smallest and the largest of the samples.
    #[test]
    fn costs_stay_among_those_measured(
        costs in proptest::collection::vec((1u64..4096, 1u64..4096, 1e-12..1e-6f64), 1..12),
        shape in (1u64..1 << 40, 1u64..1 << 40),
    ) {
        let samples = costs.iter().map(|&(a, b, cost)| {
            let (work, time) = (1e3, seconds(cost * 1e3, cost * 2e3));
            Sample { shape: vec![a, b], work, solo: time, all_cores: time }
        });
        let table =
            KernelTable { name: "x".into(), dtype: DType::F32, threads: 1, samples: samples.collect() };
        let time = table.time(&[shape.0, shape.1], 1.0, CoreLoad::Solo).unwrap().warm.0;
        let least = costs.iter().map(|c| c.2).fold(f64::MAX, f64::min);
        let most = costs.iter().map(|c| c.2).fold(0.0, f64::max);
        prop_assert!(time >= least * 0.999_999 && time <= most * 1.000_001);
    }

    /// More bytes never take less time if the samples are monotonic.
    #[test]
    fn larger_messages_take_longer(a in 0u64..1 << 40, b in 0u64..1 << 40) {
        let wire = &two_cores().transports[0];
        let time = |bytes: u64| wire.message(Bytes(bytes)).unwrap().0;
        prop_assert!(time(a.min(b)) <= time(a.max(b)));
    }
}
