//! Pipelining of large vectors, piece by piece.
//!
//! A rank sends on in the next round the data it has just received and reduced. The beginning of a
//! large chunk has left the caches by then and is read from memory again. So every chunk is split
//! into pieces, and one piece of all chunks after the other passes through the rounds. Two pieces
//! are in flight at a time, so that the transport has work while a rank waits for the other piece.
//!
//! An element stays in its chunk, so its summation order and every bit of the result are the same
//! as without pieces. The bytes per rank are unchanged too. All links are busy in every round here,
//! so the transfer time is also unchanged.

use paceline_plan::collective::{Action, Pattern, Step};

/// Bytes of a piece of a chunk: a fraction of a host's caches, and large compared with the cost of
/// a message (measured: 20 µs, with eight ranks taking turns on two cores).
pub(super) const PIECE: u64 = 512 << 10;
/// Chunks of up to this many pieces fit the caches and stay whole: messages cost more than misses.
const WHOLE: u64 = 4;
/// Number of pieces in flight at a time.
const AT_A_TIME: u32 = 2;

/// Number of pieces of about `piece` bytes per chunk, for a vector of `bytes` bytes.
pub(super) fn pieces(pattern: &Pattern, bytes: u64, piece: u64) -> u32 {
    let suits = pattern.algorithm().def().hints.has_pipeline;
    let chunk = bytes.div_ceil(u64::from(pattern.chunks().max(1)));
    if !suits || chunk <= piece.saturating_mul(WHOLE) {
        return 1;
    }
    u32::try_from(chunk.div_ceil(piece.max(1))).unwrap_or(u32::MAX).clamp(1, 1 << 16)
}

/// Returns the steps of one rank with its chunks split into `pieces`. Each piece starts when half
/// of the rounds of the previous one are over. `rounds` is that of the pattern, the same for all
/// ranks.
///
/// The two pieces in flight take turns. Each sends the data for its next round as soon as it has
/// received that of its last one: while a rank works on one piece, the transport carries the other.
/// Rounds are numbered across all pieces, and a message is sent two numbers before its receive. So
/// messages are sent in the order in which they are received. No deadlock arises: the rank furthest
/// behind waits for a message that its sender, no further behind, has already sent.
pub(super) fn pipelined(steps: &[Step], rounds: u32, pieces: u32) -> Vec<Step> {
    let stride = rounds.div_ceil(AT_A_TIME);
    let mut all = Vec::with_capacity(steps.len() * pieces as usize);
    for piece in 0..pieces {
        let turn = piece % AT_A_TIME;
        all.extend(steps.iter().map(|step| {
            let action = of_piece(step.action, piece, pieces);
            Step { round: AT_A_TIME * (piece * stride + step.round) + turn, action }
        }));
    }
    // The sort is stable: order within a piece and a round is kept.
    all.sort_by_key(|step| match step.action {
        Action::Send { .. } | Action::Lend { .. } | Action::Offer { .. } => (step.round, true),
        Action::Recv { .. }
        | Action::Fold { .. }
        | Action::Emit { .. }
        | Action::Write { .. }
        | Action::Read { .. }
        | Action::Take { .. } => (step.round + AT_A_TIME, false),
    });
    all
}

fn of_piece(action: Action, piece: u32, pieces: u32) -> Action {
    match action {
        Action::Send { to, chunks } => Action::Send { to, chunks: chunks.piece(piece, pieces) },
        Action::Recv { from, chunks, how } => {
            Action::Recv { from, chunks: chunks.piece(piece, pieces), how }
        }
        Action::Fold { chunks } => Action::Fold { chunks: chunks.piece(piece, pieces) },
        Action::Emit { chunks, into } => {
            Action::Emit { chunks: chunks.piece(piece, pieces), into: into.piece(piece, pieces) }
        }
        Action::Lend { to, chunks } => Action::Lend { to, chunks: chunks.piece(piece, pieces) },
        Action::Read { from, chunks, how } => {
            Action::Read { from, chunks: chunks.piece(piece, pieces), how }
        }
        Action::Write { to, chunks } => Action::Write { to, chunks: chunks.piece(piece, pieces) },
        Action::Offer { to, chunks } => Action::Offer { to, chunks: chunks.piece(piece, pieces) },
        Action::Take { from, chunks } => Action::Take { from, chunks: chunks.piece(piece, pieces) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::{ActiveCollective, CollectiveSpec};
    use crate::transport::thread;
    use crate::transport::{Progress, Tag};
    use paceline_plan::collective::{
        Algorithm, CollectiveKind, Reduction, SummationOrder, resolve,
    };
    use paceline_plan::ids::Rank;

    fn pattern(algorithm: Algorithm, ranks: u32) -> Pattern {
        Pattern::new(CollectiveKind::AllReduce, algorithm, SummationOrder::Free, ranks, 0).unwrap()
    }

    #[test]
    fn small_vectors_and_idle_links_are_left_whole() {
        let ring = pattern(Algorithm::Ring, 4);
        let pieces = |pattern: &Pattern, bytes| pieces(pattern, bytes, PIECE);
        assert_eq!(pieces(&ring, 0), 1);
        assert_eq!(pieces(&ring, 16 * PIECE), 1);
        assert_eq!(pieces(&ring, 16 * PIECE + 1), 5);
        assert_eq!(pieces(&ring, 64 << 20), 32);
        assert_eq!(pieces(&ring, u64::MAX), 1 << 16);
        assert_eq!(pieces(&pattern(Algorithm::Partitioned, 4), 64 << 20), 1);
        assert_eq!(pieces(&pattern(Algorithm::Tree, 4), 64 << 20), 1);
    }

    /// Every rank sends each peer exactly what that peer receives from it, in the same order.
    #[test]
    fn every_message_meets_its_receive() {
        let algorithms = [Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::Direct];
        for (algorithm, ranks) in algorithms.into_iter().flat_map(|a| (2..=9).map(move |n| (a, n)))
        {
            let pattern = pattern(algorithm, ranks);
            let steps = |me| pipelined(&pattern.steps(me), pattern.rounds(), 5);
            for (a, b) in (0..ranks).flat_map(|a| (0..ranks).map(move |b| (a, b))) {
                let sent = steps(a).into_iter().filter_map(|step| match step.action {
                    Action::Send { to, chunks } if to == b => Some((step.round, chunks.piece)),
                    _ => None,
                });
                let received = steps(b).into_iter().filter_map(|step| match step.action {
                    Action::Recv { from, chunks, .. } if from == a => {
                        Some((step.round, chunks.piece))
                    }
                    _ => None,
                });
                assert!(sent.eq(received), "{algorithm}, {ranks} ranks, from {a} to {b}");
            }
        }
    }
    /// Every rank's result of a collective whose sum depends on summation order, and the number of
    /// pieces per chunk.
    fn outcome(spec: &CollectiveSpec, ranks: u32, piece: u64) -> (Vec<Vec<u32>>, u32) {
        const ELEMENTS: u32 = 501;
        let members: Vec<Rank> = (0..ranks).map(Rank).collect();
        let mut transports = thread::world(ranks);
        let mut sides: Vec<ActiveCollective> = members
            .iter()
            .map(|me| ActiveCollective::start(spec, &members, *me, Tag::new(0, 0)).unwrap())
            .collect();
        let value = |rank: u32, i: u32| 1.0 / (1 + (rank * 37 + i * 11) % 101) as f32;
        let vector = |rank| (0..ELEMENTS).map(|i| value(rank, i)).collect();
        let mut data: Vec<Vec<f32>> = (0..ranks).map(vector).collect();
        sides.iter_mut().for_each(|side| side.piece = piece);
        let mut done = vec![false; ranks as usize];
        for rank in (0..ranks as usize).cycle().take(10_000) {
            let (side, transport) = (&mut sides[rank], &mut transports[rank]);
            done[rank] = side.progress(transport, &mut data[rank], None) == Ok(Progress::Done);
            if done.iter().all(|done| *done) {
                break;
            }
        }
        assert!(done.iter().all(|done| *done), "{spec:?} never ends");
        let bits = |vector: &Vec<f32>| vector.iter().map(|value| value.to_bits()).collect();
        (data.iter().map(bits).collect(), sides[0].pieces)
    }

    #[test]
    fn pieces_change_no_bit() {
        let algorithms = [Algorithm::Ring, Algorithm::HalvingDoubling];
        let mut cut = 0;
        for (algorithm, ranks) in algorithms.into_iter().flat_map(|a| (2..=7).map(move |n| (a, n)))
        {
            for order in [SummationOrder::Free, SummationOrder::Canonical] {
                let (kind, reduction) = (CollectiveKind::AllReduce, Reduction::Sum);
                if resolve(kind, algorithm, ranks, order).is_err() {
                    continue;
                }
                let spec = CollectiveSpec { kind, algorithm, order, reduction, root: 0, block: 1 };
                let (whole, one) = outcome(&spec, ranks, u64::MAX);
                let (pieces, many) = outcome(&spec, ranks, 48);
                assert_eq!(whole, pieces, "{algorithm}, {ranks} ranks, {order} order");
                assert_eq!(one, 1);
                cut += u32::from(many > 3);
            }
        }
        assert!(cut > 10, "only {cut} collectives went in pieces");
    }
}
