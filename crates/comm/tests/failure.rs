//! A dead, silent or disagreeing rank causes an error that names it, on every other rank: by a
//! notice, not by the timeout of an exchange, whose error would be another.

use paceline_comm::steps::{ActiveCollective, CollectiveSpec, run};
use paceline_comm::thread::{ThreadTransport, world};
use paceline_comm::{CommError, Tag, Transport, barrier, point};
use paceline_plan::collective::{Algorithm, CollectiveKind, Reduction, SummationOrder};
use paceline_plan::ids::Rank;
use std::thread::JoinHandle;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(30);

fn all_reduce(algorithm: Algorithm) -> CollectiveSpec {
    CollectiveSpec {
        kind: CollectiveKind::AllReduce,
        algorithm,
        order: SummationOrder::Free,
        reduction: Reduction::Sum,
        root: 0,
        block: 1,
    }
}

fn everyone(ranks: u32) -> Vec<Rank> {
    (0..ranks).map(Rank).collect()
}

type Outcome = Result<(), CommError>;

/// Starts every rank of a world on its own thread.
fn spawn<F>(ranks: u32, body: F) -> Vec<JoinHandle<Outcome>>
where
    F: Fn(&mut ThreadTransport) -> Outcome + Clone + Send + 'static,
{
    let spawn = |mut transport: ThreadTransport| {
        let body = body.clone();
        std::thread::spawn(move || body(&mut transport))
    };
    world(ranks).into_iter().map(spawn).collect()
}

/// Runs `iterations` collectives, if nothing fails.
fn train(transport: &mut dyn Transport, algorithm: Algorithm, iterations: u32) -> Outcome {
    let members = everyone(transport.world());
    let mut data = vec![0.0; 100];
    for iteration in 0..iterations {
        let tag = Tag::new(0, iteration);
        run(transport, &all_reduce(algorithm), &members, tag, &mut data, None, TIMEOUT)?;
    }
    Ok(())
}

const ALGORITHMS: [Algorithm; 4] = [
    Algorithm::Ring,
    Algorithm::HalvingDoubling,
    Algorithm::Direct,
    Algorithm::ParameterServer { servers: 2 },
];

#[test]
fn a_panic_is_known_everywhere() {
    for algorithm in ALGORITHMS {
        let threads = spawn(5, move |transport| {
            if transport.rank() == Rank(3) {
                train(transport, algorithm, 10)?;
                // Like a panic, but without its message in the test output.
                std::panic::resume_unwind(Box::new("gone"));
            }
            train(transport, algorithm, u32::MAX)
        });
        for (rank, thread) in threads.into_iter().enumerate() {
            match thread.join() {
                Ok(outcome) => {
                    let reason = "its thread panicked".to_owned();
                    assert_eq!(outcome, Err(CommError::Failed { rank: Rank(3), reason }));
                }
                Err(_) => assert_eq!(rank, 3),
            }
        }
    }
}

#[test]
fn an_abort_is_known_everywhere_with_its_reason() {
    for algorithm in ALGORITHMS {
        let threads = spawn(4, move |transport| {
            if transport.rank() == Rank(1) {
                std::thread::sleep(Duration::from_millis(20));
                transport.abort("iteration 7, F1.2: loss is not a number");
            }
            train(transport, algorithm, u32::MAX)
        });
        for thread in threads {
            let error = thread.join().unwrap().unwrap_err();
            assert_eq!(error.to_string(), "rank 1 failed: iteration 7, F1.2: loss is not a number");
        }
    }
}

#[test]
fn a_rank_that_leaves_early_is_missed() {
    let threads = spawn(3, |transport| match transport.rank() {
        Rank(2) => Ok(()),
        _ => train(transport, Algorithm::Ring, u32::MAX),
    });
    let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert!(matches!(outcomes[0], Err(CommError::PeerClosed { .. })), "{:?}", outcomes[0]);
    assert!(matches!(outcomes[1], Err(CommError::PeerClosed { .. })), "{:?}", outcomes[1]);
}

#[test]
fn a_silent_rank_is_named() {
    let mut world = world(2);
    let mut data = [0.0];
    let timeout = Duration::from_millis(30);
    let error = point::recv(&mut world[0], Rank(1), Tag::new(0, 0), &mut data, timeout);
    match error {
        Err(CommError::Timeout { rank: Rank(1), after }) => assert!(after >= timeout),
        other => panic!("{other:?}"),
    }
}

/// Runs two ranks with different operations at the same point; returns the first error reported.
fn disagreement(theirs: CollectiveSpec, elements: usize, sequence: u32) -> String {
    let ours = all_reduce(Algorithm::Ring);
    let mut world = world(2);
    let members = everyone(2);
    let mut sides = [
        (ActiveCollective::start(&ours, &members, Rank(0), Tag::new(5, 1)).unwrap(), vec![0.0; 8]),
        (
            ActiveCollective::start(&theirs, &members, Rank(1), Tag::new(5, sequence)).unwrap(),
            vec![0.0; elements],
        ),
    ];
    for rank in [1, 0] {
        let (running, data) = &mut sides[rank];
        if let Err(error) = running.progress(&mut world[rank], data, None) {
            return error.to_string();
        }
    }
    panic!("nobody noticed");
}

#[test]
fn disagreeing_ranks_are_told_what_each_does() {
    let ring = all_reduce(Algorithm::Ring);
    assert_eq!(
        disagreement(CollectiveSpec { kind: CollectiveKind::ReduceScatter, ..ring }, 8, 1),
        "rank 0 is at all_reduce of 8 f32 elements by ring among 2 ranks, sum in free order \
         (channel 5, operation 1, round 0), but rank 1 is at reduce_scatter of 8 f32 elements by ring \
         among 2 ranks, sum in free order (channel 5, operation 1, round 0)"
    );
    assert!(disagreement(ring, 9, 1).contains("rank 1 is at all_reduce of 9 f32 elements"));
    let text = disagreement(ring, 8, 2);
    assert!(text.contains("operation 1, round 0), but rank 1"), "{text}");
    assert!(text.ends_with("(channel 5, operation 2, round 0)"), "{text}");
    let max = CollectiveSpec { reduction: Reduction::Max, ..ring };
    assert!(disagreement(max, 8, 1).contains("max in free order"));
    let direct = all_reduce(Algorithm::Direct);
    assert!(disagreement(direct, 8, 1).contains("by direct among"));
}

#[test]
fn a_message_where_a_barrier_is_expected_is_a_disagreement() {
    let mut world = world(2);
    let tag = Tag::new(0, 0);
    point::send(&mut world[1], Rank(0), tag, &[1.0, 2.0]).unwrap();
    let error = barrier::wait(&mut world[0], &everyone(2), tag, TIMEOUT).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("rank 0 is at a barrier of 2 ranks"), "{text}");
    assert!(text.contains("rank 1 is at a message of 2 f32 elements"), "{text}");
}

#[test]
fn wrong_groups_and_buffers_are_refused() {
    let ring = all_reduce(Algorithm::Ring);
    let tag = Tag::new(0, 0);
    let start = |members: &[Rank], me| ActiveCollective::start(&ring, members, me, tag).map(drop);
    let error = |result: Outcome| result.unwrap_err().to_string();
    assert_eq!(error(start(&everyone(3), Rank(7))), "rank 7 is not in the group {0, 1, 2}");
    assert_eq!(error(start(&[Rank(1), Rank(0), Rank(1)], Rank(0))), "rank 1 is in the group twice");
    assert!(start(&[], Rank(0)).is_err());
    let canonical = CollectiveSpec { order: SummationOrder::Canonical, ..ring };
    assert!(ActiveCollective::start(&canonical, &everyone(3), Rank(0), tag).is_err());

    let mut world = world(2);
    let mut progress = |spec: &CollectiveSpec, data: &mut [f32], output: Option<&mut [f32]>| {
        let mut running = ActiveCollective::start(spec, &everyone(2), Rank(0), tag).unwrap();
        running.progress(&mut world[0], data, output).unwrap_err().to_string()
    };
    let all_to_all =
        CollectiveSpec { kind: CollectiveKind::AllToAll, ..all_reduce(Algorithm::Direct) };
    let mut other = [0.0; 3];
    assert!(progress(&all_to_all, &mut [0.0; 4], None).contains("output buffer is needed"));
    assert!(progress(&all_to_all, &mut [0.0; 3], None).contains("not 2 equal parts"));
    let text = progress(&all_to_all, &mut [0.0; 4], Some(&mut other));
    assert!(text.contains("3 elements instead of 4"), "{text}");
    assert!(progress(&ring, &mut [0.0; 4], Some(&mut other)).contains("in place"));

    let mut running = ActiveCollective::start(&ring, &everyone(2), Rank(0), tag).unwrap();
    let wrong_end = running.progress(&mut world[1], &mut [0.0; 4], None);
    assert!(matches!(wrong_end, Err(CommError::NotAMember { rank: Rank(1), .. })));
    running.progress(&mut world[0], &mut [0.0; 4], None).unwrap();
    let shrunk = running.progress(&mut world[0], &mut [0.0; 3], None).unwrap_err();
    assert!(shrunk.to_string().contains("had 4 elements and now has 3"), "{shrunk}");
}
