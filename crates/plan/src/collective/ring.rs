//! Ring algorithms: every rank communicates only with its two neighbours, for any rank count.
//!
//! The ring minimises the bytes per rank and never sends two messages into one rank at once; the
//! number of rounds grows with the group. Its sums start at a different rank for each chunk, so
//! with three or more ranks it cannot keep the canonical order.
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector. The bounds are
//! those of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
//! workstations" (2009), section 3.

use super::definition::{AROUND, AlgorithmDef, Hints, Rotation, ways};
use super::step::{Chunks, Combine, Step, StepList};
use super::{CollectiveKind, Pattern, has_steps, relative};

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "ring",
    number: 0,
    kinds: AROUND,
    is_canonical: |_| false,
    chunks,
    rounds,
    steps,
    hints: Hints {
        is_ring: true,
        rotation: |p| match p.kind {
            CollectiveKind::AllToAll => Rotation::Ranks,
            _ => Rotation::Axes,
        },
        sends_in_place: true,
        has_pipeline: true,
        ..AlgorithmDef::BASE.hints
    },
    ..AlgorithmDef::BASE
};

/// Number of chunks, also of [`multi_ring`](super::multi_ring).
pub(super) fn chunks(p: &Pattern) -> u32 {
    match p.kind {
        CollectiveKind::Broadcast | CollectiveKind::Reduce => chain_chunks(p.ranks),
        _ => p.ranks,
    }
}

/// Number of rounds, also of [`multi_ring`](super::multi_ring).
pub(super) fn rounds(p: &Pattern) -> u32 {
    match p.kind {
        CollectiveKind::Broadcast | CollectiveKind::Reduce => p.ranks - 2 + chain_chunks(p.ranks),
        _ => ways(p) * (p.ranks - 1),
    }
}

fn steps(p: &Pattern, me: u32) -> Vec<Step> {
    let (ranks, root) = (p.ranks, p.root);
    match p.kind {
        CollectiveKind::AllReduce => all_reduce(ranks, me),
        CollectiveKind::ReduceScatter => reduce_scatter(ranks, me),
        CollectiveKind::AllGather => all_gather(ranks, me),
        CollectiveKind::Broadcast => broadcast(ranks, me, root),
        CollectiveKind::Reduce => reduce(ranks, me, root),
        CollectiveKind::Gather => gather(ranks, me, root),
        CollectiveKind::AllToAll => all_to_all(ranks, me),
        CollectiveKind::Scatter => scatter(ranks, me, root),
        CollectiveKind::Barrier => barrier(ranks, me),
        CollectiveKind::SendRecv => Vec::new(),
    }
}

/// Each chunk is reduced in one pass around the ring and distributed in a second pass.
///
/// Rounds 2(P−1); bytes sent and received per rank 2N(P−1)/P; fan-in 1. Chunks: P.
pub fn all_reduce(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        scatter_rounds(&mut script, 0, ranks, me);
        gather_rounds(&mut script, ranks - 1, ranks, me);
    }
    script.done()
}

/// Chunk *c* starts at rank *c*+1 and arrives, reduced, at rank *c*.
///
/// Rounds P−1; bytes sent and received per rank N(P−1)/P; fan-in 1. Chunks: P.
pub fn reduce_scatter(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        scatter_rounds(&mut script, 0, ranks, me);
    }
    script.done()
}

/// Each part travels around the ring from its owner.
///
/// Rounds P−1; bytes sent and received per rank N(P−1)/P; fan-in 1. Chunks: P.
pub fn all_gather(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        gather_rounds(&mut script, 0, ranks, me);
    }
    script.done()
}

/// The vector streams down a chain that starts at the root, chunk after chunk.
///
/// Rounds P−2 + C, where C = 4(P−2) + 1 is the number of chunks; bytes sent and received per rank
/// N; fan-in 1.
pub fn broadcast(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && root < ranks {
        let chunks = chain_chunks(ranks);
        let place = relative(me, root, ranks);
        let (previous, next) = ((me + ranks - 1) % ranks, (me + 1) % ranks);
        // At place d, chunk c arrives in round d−1+c and is sent in round d+c.
        for round in place.saturating_sub(1)..place + chunks {
            if place + 1 < ranks && round >= place {
                script.send(round, next, Chunks::one(round - place));
            }
            if place > 0 && round - (place - 1) < chunks {
                script.recv(round, previous, Chunks::one(round - (place - 1)), Combine::Replace);
            }
        }
    }
    script.done()
}

/// The vectors are summed along a chain that ends at the root, chunk after chunk.
///
/// Rounds P−2 + C, where C = 4(P−2) + 1 is the number of chunks; bytes sent and received per rank
/// N; fan-in 1.
pub fn reduce(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && root < ranks {
        let chunks = chain_chunks(ranks);
        // The chain of `broadcast` reversed: place 0 is the farthest from the root.
        let place = ranks - 1 - relative(me, root, ranks);
        let (previous, next) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        for round in place.saturating_sub(1)..place + chunks {
            if place + 1 < ranks && round >= place {
                script.send(round, next, Chunks::one(round - place));
            }
            if place > 0 && round - (place - 1) < chunks {
                script.recv(round, previous, Chunks::one(round - (place - 1)), Combine::Reduce);
            }
        }
    }
    script.done()
}

/// Each part is passed from neighbour to neighbour until it reaches the root.
///
/// Rounds P−1; bytes sent and received per rank at most N(P−1)/P, by and at the root's last
/// neighbour and the root; fan-in 1. Chunks: P.
pub fn gather(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && root < ranks {
        let place = relative(me, root, ranks);
        let (farther, nearer) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        // In round k a rank forwards the part of the rank k places behind it.
        for round in 0..ranks - place {
            if place > 0 {
                script.send(round, nearer, Chunks::one((me + round) % ranks));
            }
            if place + round + 1 < ranks {
                let part = Chunks::one((me + round + 1) % ranks);
                script.recv(round, farther, part, Combine::Replace);
            }
        }
    }
    script.done()
}

/// The parts travel down a chain that starts at the root, the farthest rank's first.
///
/// Rounds P−1; bytes sent at most N(P−1)/P, by the root; received at most N(P−1)/P, by the next
/// rank; fan-in 1. Chunks: P.
pub fn scatter(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && root < ranks {
        let place = relative(me, root, ranks);
        let (previous, next) = ((me + ranks - 1) % ranks, (me + 1) % ranks);
        // The part of place p leaves the root in round P−1−p; place d forwards it d rounds later.
        let part = |of: u32| Chunks::one((root + of) % ranks);
        for round in place.saturating_sub(1)..ranks - 1 {
            if round >= place && place + 1 < ranks {
                script.send(round, next, part(ranks - 1 - (round - place)));
            }
            if place > 0 {
                let come = part(ranks - 1 - (round + 1 - place));
                script.recv(round, previous, come, Combine::Replace);
            }
        }
    }
    script.done()
}

/// Every rank signals the next in every round; after *k* rounds a rank has heard of *k* others.
///
/// Rounds P−1; no bytes; fan-in 1.
pub fn barrier(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        for round in 0..ranks - 1 {
            script.send(round, (me + 1) % ranks, Chunks::all(0));
            script.recv(round, (me + ranks - 1) % ranks, Chunks::all(0), Combine::Replace);
        }
    }
    script.done()
}

/// In round *k* every rank sends to the rank *k*+1 places ahead: a rotation that loads every link
/// of a physical ring equally.
///
/// Rounds P−1; bytes sent and received per rank N(P−1)/P; fan-in 1. Chunks: P.
pub fn all_to_all(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        script.emit(0, Chunks::one(me));
        for round in 0..ranks - 1 {
            let to = (me + round + 1) % ranks;
            let from = (me + ranks - round - 1) % ranks;
            script.send(round, to, Chunks::one(to));
            script.recv(round, from, Chunks::one(from), Combine::Output);
        }
    }
    script.done()
}

/// Number of chunks into which a chain splits its vector.
///
/// The last rank receives its first chunk after P−2 rounds of waiting; with four times as many
/// chunks that wait adds at most a quarter to the transfer time. Two ranks have nothing to overlap.
pub(super) fn chain_chunks(ranks: u32) -> u32 {
    4 * ranks.saturating_sub(2) + 1
}

/// The P−1 rounds after which rank *i* holds the sum of chunk *i*.
fn scatter_rounds(script: &mut StepList, first_round: u32, ranks: u32, me: u32) {
    let (previous, next) = ((me + ranks - 1) % ranks, (me + 1) % ranks);
    for k in 0..ranks - 1 {
        let gone = (me + ranks - 1 - k) % ranks;
        let come = (gone + ranks - 1) % ranks;
        script.send(first_round + k, next, Chunks::one(gone));
        script.recv(first_round + k, previous, Chunks::one(come), Combine::Reduce);
    }
}

/// The P−1 rounds that pass chunk *i* from rank *i* to all ranks.
fn gather_rounds(script: &mut StepList, first_round: u32, ranks: u32, me: u32) {
    let (previous, next) = ((me + ranks - 1) % ranks, (me + 1) % ranks);
    for k in 0..ranks - 1 {
        let gone = (me + ranks - k) % ranks;
        let come = (gone + ranks - 1) % ranks;
        script.send(first_round + k, next, Chunks::one(gone));
        script.recv(first_round + k, previous, Chunks::one(come), Combine::Replace);
    }
}
