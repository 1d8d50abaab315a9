//! Every collective with every algorithm equals a naive computation in one place.

use paceline_comm::steps::{ActiveCollective, CollectiveSpec, run};
use paceline_comm::thread::{ThreadTransport, world};
use paceline_comm::{Barrier, CommError, Progress, Tag, Transport, Wait, barrier, point};
use paceline_plan::collective::{
    Algorithm, CollectiveKind, Reduction, SummationOrder, canonical_fold, resolve,
};
use paceline_plan::ids::Rank;
use proptest::prelude::*;
use reference::{algorithms, everyone, specs};
use std::time::Duration;

mod reference;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Runs the same function on every rank of a world, one thread per rank.
fn on_all<R: Send>(ranks: u32, body: impl Fn(&mut ThreadTransport) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = world(ranks)
            .into_iter()
            .map(|mut transport| scope.spawn(move || body(&mut transport)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_algorithm_equals_the_naive_result() {
    for ranks in 1..=9 {
        on_all(ranks, |transport| reference::product(transport, 1));
    }
}

/// Numbers of very different magnitude, whose sum depends on the summation order.
fn rough(rank: u32, i: usize) -> f32 {
    let mut x = (u64::from(rank) << 32 | i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let exponent = ((x >> 60) as i32 - 8) * 2;
    ((x >> 20) as u32 as f32 / u32::MAX as f32 - 0.5) * 2f32.powi(exponent)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn canonical_order_gives_the_same_bits_whatever_the_algorithm() {
    let n = 3001;
    for ranks in 1..=9 {
        let wanted: Vec<f32> = (0..n)
            .map(|i| canonical_fold((0..ranks).map(|r| rough(r, i)), |a, b| a + b).unwrap())
            .collect();
        for algorithm in algorithms(ranks) {
            let kind = CollectiveKind::AllReduce;
            let order = SummationOrder::Canonical;
            if resolve(kind, algorithm, ranks, order).is_err() {
                continue;
            }
            let reduction = Reduction::Sum;
            let spec = CollectiveSpec { kind, algorithm, order, reduction, root: 0, block: 1 };
            let results = on_all(ranks, |transport| {
                let me = transport.rank().0;
                let mut data: Vec<f32> = (0..n).map(|i| rough(me, i)).collect();
                let tag = Tag::new(0, 0);
                run(transport, &spec, &everyone(ranks), tag, &mut data, None, TIMEOUT).unwrap();
                data
            });
            for result in results {
                assert_eq!(bits(&result), bits(&wanted), "{algorithm}, {ranks} ranks");
            }
        }
    }
}

#[test]
fn free_order_is_told_from_canonical_order_by_these_numbers() {
    let sums = |fold: &dyn Fn(Vec<f32>) -> f32| -> Vec<f32> {
        (0..1000).map(|i| fold((0..8).map(|r| rough(r, i)).collect())).collect()
    };
    let tree = sums(&|parts| canonical_fold(parts, |a, b| a + b).unwrap());
    let chain = sums(&|parts| parts.into_iter().reduce(|a, b| a + b).unwrap());
    assert_ne!(bits(&tree), bits(&chain));
}

/// Polls all ranks on one thread in a given order, until all are done.
fn interleave(spec: &CollectiveSpec, ranks: u32, n: usize, picks: &[u8]) -> Vec<Vec<f32>> {
    let mut transports = world(ranks);
    let members = everyone(ranks);
    let tag = Tag::new(0, 0);
    let mut sides: Vec<_> = members
        .iter()
        .map(|me| ActiveCollective::start(spec, &members, *me, tag).unwrap())
        .collect();
    let mut data: Vec<Vec<f32>> =
        (0..ranks).map(|r| (0..n).map(|i| rough(r, i)).collect()).collect();
    let mut done = vec![false; ranks as usize];
    let orderly = (0..10_000).map(|i| i % ranks as usize);
    for rank in picks.iter().map(|pick| *pick as usize % ranks as usize).chain(orderly) {
        let progress = sides[rank].progress(&mut transports[rank], &mut data[rank], None).unwrap();
        done[rank] = progress == Progress::Done;
        if done.iter().all(|done| *done) {
            return data;
        }
    }
    panic!("{spec:?} never ends");
}

/// Number of random cases: `PROPTEST_CASES`, or few enough for every `cargo test`.
fn cases(few: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(few)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(24)))]

    #[test]
    fn timing_never_changes_a_bit(
        ranks in 2u32..8,
        picks in prop::collection::vec(any::<u8>(), 200),
    ) {
        for spec in specs(ranks, 1) {
            if matches!(spec.kind, CollectiveKind::AllReduce | CollectiveKind::Broadcast) {
                let orderly = interleave(&spec, ranks, 100, &[]);
                let random = interleave(&spec, ranks, 100, &picks);
                for (a, b) in orderly.iter().zip(&random) {
                    prop_assert_eq!(bits(a), bits(b));
                }
            }
        }
    }
}

#[test]
fn collectives_of_two_channels_run_at_once() {
    let spec = CollectiveSpec {
        kind: CollectiveKind::AllReduce,
        algorithm: Algorithm::Ring,
        order: SummationOrder::Free,
        reduction: Reduction::Sum,
        root: 0,
        block: 1,
    };
    on_all(4, |transport| {
        let me = transport.rank();
        let members = everyone(4);
        let start =
            |channel| ActiveCollective::start(&spec, &members, me, Tag::new(channel, 0)).unwrap();
        let mut lanes = [start(0), start(1)];
        let mut data = [vec![1.0; 100], vec![2.0; 50]];
        loop {
            let mut pending = false;
            // Half of the ranks poll the lanes in the other order.
            for lane in 0..2 {
                let lane = (lane + me.index()) % 2;
                let progress = lanes[lane].progress(transport, &mut data[lane], None).unwrap();
                pending |= progress != Progress::Done;
            }
            if !pending {
                break;
            }
            transport.wait(Wait::Spin, TIMEOUT).unwrap();
        }
        assert_eq!(data, [vec![4.0; 100], vec![8.0; 50]]);
    });
}

#[test]
fn a_group_may_be_part_of_the_world_in_any_order_and_start_again() {
    let spec = CollectiveSpec {
        kind: CollectiveKind::Reduce,
        algorithm: Algorithm::Direct,
        order: SummationOrder::Canonical,
        reduction: Reduction::Sum,
        root: 1,
        block: 1,
    };
    let members = [Rank(4), Rank(2), Rank(0)];
    on_all(5, |transport| {
        let me = transport.rank();
        if !members.contains(&me) {
            return;
        }
        let mut tag = Tag::new(9, 0);
        let mut running = ActiveCollective::start(&spec, &members, me, tag).unwrap();
        for n in [10, 3] {
            let mut data = vec![me.0 as f32; n];
            let progress = |t: &mut dyn Transport| running.progress(t, &mut data, None);
            paceline_comm::finish(transport, TIMEOUT, progress).unwrap();
            if me == Rank(2) {
                assert_eq!(data, vec![6.0; n]);
            }
            tag = tag.next();
            running.restart(tag);
        }
    });
}

#[test]
fn what_needs_shared_memory_is_refused_without() {
    let hierarchical = |inner, outer| Algorithm::hierarchical(inner, outer).unwrap();
    for algorithm in [
        Algorithm::SharedMemory,
        hierarchical(Algorithm::SharedMemory, Algorithm::Ring).with_host(2),
        hierarchical(Algorithm::Ring, Algorithm::SharedMemory).with_host(2),
    ] {
        let spec = CollectiveSpec {
            kind: CollectiveKind::AllReduce,
            algorithm,
            order: SummationOrder::Free,
            reduction: Reduction::Sum,
            root: 0,
            block: 1,
        };
        on_all(4, |transport| {
            let (rank, tag) = (transport.rank(), Tag::new(0, 0));
            let mut data = vec![1.0; 8];
            let error = run(transport, &spec, &everyone(4), tag, &mut data, None, TIMEOUT);
            assert_eq!(error, Err(CommError::NoSharedMemory { rank, algorithm }));
        });
    }
}

#[test]
fn messages_and_barriers_go_around() {
    let ranks = 5;
    on_all(ranks, |transport| {
        let me = transport.rank().0;
        let (next, previous) = (Rank((me + 1) % ranks), Rank((me + ranks - 1) % ranks));
        let mut token = [0.0; 2];
        for lap in 0..3 {
            let tag = Tag::new(1, lap);
            point::send(transport, next, tag, &[me as f32, lap as f32]).unwrap();
            point::recv(transport, previous, tag, &mut token, TIMEOUT).unwrap();
            assert_eq!(token, [previous.0 as f32, lap as f32]);
            barrier::wait(transport, &everyone(ranks), Tag::new(2, lap), TIMEOUT).unwrap();
        }
    });
}

#[test]
fn nobody_passes_a_barrier_early() {
    for ranks in 1..=9 {
        let mut transports = world(ranks);
        let members = everyone(ranks);
        for (channel, kind) in (0..).zip([Barrier::start, Barrier::central]) {
            let start = |me: &Rank| kind(&members, *me, Tag::new(channel, 0)).unwrap();
            let mut barriers: Vec<_> = members.iter().map(start).collect();
            let late = ranks as usize - 1;
            for rank in (0..late).cycle().take(100 * late) {
                let progress = barriers[rank].progress(&mut transports[rank]).unwrap();
                assert_ne!(progress, Progress::Done, "rank {rank} did not wait for rank {late}");
            }
            let mut done = vec![false; ranks as usize];
            for rank in (0..ranks as usize).cycle().take(100 * ranks as usize) {
                let progress = barriers[rank].progress(&mut transports[rank]).unwrap();
                done[rank] = progress == Progress::Done;
            }
            assert!(done.into_iter().all(|done| done));
        }
    }
}

/// The textbook's examples of `MPI_Reduce` with a sum (Kendall, "MPI Tutorial", "MPI Reduce and
/// Allreduce"): four processes with one number each, then with two.
#[test]
fn mpi_reduce_sums_what_the_textbook_says() {
    let one = [[5.0], [2.0], [7.0], [4.0]];
    let two = [[5.0, 1.0], [2.0, 3.0], [7.0, 8.0], [4.0, 2.0]];
    let reduced = |inputs: &[&[f32]], kind| {
        let spec = CollectiveSpec {
            kind,
            algorithm: Algorithm::Auto,
            order: SummationOrder::Free,
            reduction: Reduction::Sum,
            root: 0,
            block: 1,
        };
        on_all(4, |transport| {
            let mut data = inputs[transport.rank().index()].to_vec();
            let members: Vec<Rank> = (0..4).map(Rank).collect();
            run(transport, &spec, &members, Tag::new(1, 0), &mut data, None, TIMEOUT).unwrap();
            data
        })
    };
    let one: Vec<&[f32]> = one.iter().map(|numbers| &numbers[..]).collect();
    let two: Vec<&[f32]> = two.iter().map(|numbers| &numbers[..]).collect();
    assert_eq!(reduced(&one, CollectiveKind::Reduce)[0], [18.0]);
    assert_eq!(reduced(&two, CollectiveKind::Reduce)[0], [18.0, 14.0]);
    for result in reduced(&two, CollectiveKind::AllReduce) {
        assert_eq!(result, [18.0, 14.0]);
    }
}
