//! Direct algorithms: every message goes straight to its destination, all in one round.
//!
//! They need the fewest rounds possible, but the fan-in grows with the group. Contributions that
//! must be summed in canonical order are buffered until all have arrived. In free order they are
//! summed as listed, which needs no memory beyond the current message.
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector.

use super::definition::{AlgorithmDef, Hints, Rotation, ways};
use super::step::{Chunks, Combine, Step, StepList};
use super::{CollectiveKind, Pattern, SummationOrder, has_steps};

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "direct",
    number: 3,
    chunks: |p| match p.kind {
        CollectiveKind::Broadcast | CollectiveKind::Reduce => 1,
        _ => p.ranks,
    },
    rounds: ways,
    steps,
    hints: Hints { rotation: |_| Rotation::Axes, sends_in_place: true, ..AlgorithmDef::BASE.hints },
    ..AlgorithmDef::BASE
};

fn steps(p: &Pattern, me: u32) -> Vec<Step> {
    let (ranks, root, order) = (p.ranks, p.root, p.order);
    match p.kind {
        CollectiveKind::AllReduce => all_reduce(ranks, me, order),
        CollectiveKind::ReduceScatter => reduce_scatter(ranks, me, order),
        CollectiveKind::AllGather => all_gather(ranks, me),
        CollectiveKind::Broadcast => broadcast(ranks, me, root),
        CollectiveKind::Reduce => reduce(ranks, me, root, order),
        CollectiveKind::Gather => gather(ranks, me, root),
        CollectiveKind::AllToAll => all_to_all(ranks, me),
        CollectiveKind::Scatter => scatter(ranks, me, root),
        CollectiveKind::SendRecv => send_recv(ranks, me),
        CollectiveKind::Barrier => barrier(ranks, me),
    }
}

/// Rank *i* sums chunk *i* of all ranks, then sends it to all ranks.
///
/// Rounds 2; bytes sent and received per rank 2N(P−1)/P; fan-in P−1. Chunks: P. Held in canonical
/// order: N(P−1)/P.
pub fn all_reduce(ranks: u32, me: u32, order: SummationOrder) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        scatter_round(&mut script, 0, ranks, me, order);
        gather_round(&mut script, 1, ranks, me);
    }
    script.done()
}

/// Rank *i* sums chunk *i* of all ranks.
///
/// Rounds 1; bytes sent and received per rank N(P−1)/P; fan-in P−1. Chunks: P. Held in canonical
/// order: N(P−1)/P.
pub fn reduce_scatter(ranks: u32, me: u32, order: SummationOrder) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        scatter_round(&mut script, 0, ranks, me, order);
    }
    script.done()
}

/// Every rank sends its part to all others.
///
/// Rounds 1; bytes sent and received per rank N(P−1)/P; fan-in P−1. Chunks: P.
pub fn all_gather(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        gather_round(&mut script, 0, ranks, me);
    }
    script.done()
}

/// The root sends its vector to all other ranks.
///
/// Rounds 1; bytes sent N(P−1) by the root; received per rank N; fan-in 1. Chunks: 1.
pub fn broadcast(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && root < ranks {
        if me == root {
            for to in ahead(ranks, me) {
                script.send(0, to, Chunks::one(0));
            }
        } else {
            script.recv(0, root, Chunks::one(0), Combine::Replace);
        }
    }
    script.done()
}

/// Every rank sends its vector to the root, which sums them.
///
/// Rounds 1; bytes sent per rank N; received N(P−1) by the root; fan-in P−1. Chunks: 1. Held in
/// canonical order: N(P−1).
pub fn reduce(ranks: u32, me: u32, root: u32, order: SummationOrder) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && root < ranks {
        if me == root {
            take_in(&mut script, 0, behind(ranks, me), Chunks::one(0), order);
        } else {
            script.send(0, root, Chunks::one(0));
        }
    }
    script.done()
}

/// Every rank sends its part to the root.
///
/// Rounds 1; bytes sent per rank N/P; received N(P−1)/P by the root; fan-in P−1. Chunks: P.
pub fn gather(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && root < ranks {
        if me == root {
            for from in behind(ranks, me) {
                script.recv(0, from, Chunks::one(from), Combine::Replace);
            }
        } else {
            script.send(0, root, Chunks::one(me));
        }
    }
    script.done()
}

/// The root sends every other rank its part.
///
/// Rounds 1; bytes sent N(P−1)/P by the root; received per rank N/P; fan-in 1. Chunks: P.
pub fn scatter(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && root < ranks {
        if me == root {
            for to in ahead(ranks, me) {
                script.send(0, to, Chunks::one(to));
            }
        } else {
            script.recv(0, root, Chunks::one(me), Combine::Replace);
        }
    }
    script.done()
}

/// Every rank sends its vector to the next rank.
///
/// Rounds 1; bytes sent and received per rank N; fan-in 1. Chunks: 1.
pub fn send_recv(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        let whole = Chunks::one(0);
        if ranks == 1 {
            script.emit(0, whole);
        } else {
            script.send(0, (me + 1) % ranks, whole);
            script.recv(0, (me + ranks - 1) % ranks, whole, Combine::Output);
        }
    }
    script.done()
}

/// Every rank tells every other that it has arrived.
///
/// Rounds 1; no bytes; fan-in P−1.
pub fn barrier(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        for to in ahead(ranks, me) {
            script.send(0, to, Chunks::all(0));
        }
        for from in behind(ranks, me) {
            script.recv(0, from, Chunks::all(0), Combine::Replace);
        }
    }
    script.done()
}

/// Every rank sends every other rank its part.
///
/// Rounds 1; bytes sent and received per rank N(P−1)/P; fan-in P−1. Chunks: P.
pub fn all_to_all(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        script.emit(0, Chunks::one(me));
        for to in ahead(ranks, me) {
            script.send(0, to, Chunks::one(to));
        }
        for from in behind(ranks, me) {
            script.recv(0, from, Chunks::one(from), Combine::Output);
        }
    }
    script.done()
}

/// Receives these chunks from the given ranks and sums them into this rank's own.
pub(super) fn take_in(
    script: &mut StepList,
    round: u32,
    from: impl Iterator<Item = u32>,
    chunks: Chunks,
    order: SummationOrder,
) {
    match order {
        SummationOrder::Canonical => {
            for from in from {
                script.recv(round, from, chunks, Combine::Hold);
            }
            script.fold(round, chunks);
        }
        SummationOrder::Free => {
            for from in from {
                script.recv(round, from, chunks, Combine::Reduce);
            }
        }
    }
}

/// The other ranks in sending order, the next one first, so that no rank is first for all.
pub(super) fn ahead(ranks: u32, me: u32) -> impl Iterator<Item = u32> {
    (1..ranks).map(move |k| (me + k) % ranks)
}

/// The other ranks, the previous one first: the order in which messages sent [`ahead`] arrive.
pub(super) fn behind(ranks: u32, me: u32) -> impl Iterator<Item = u32> {
    (1..ranks).map(move |k| (me + ranks - k) % ranks)
}

fn scatter_round(script: &mut StepList, round: u32, ranks: u32, me: u32, order: SummationOrder) {
    for to in ahead(ranks, me) {
        script.send(round, to, Chunks::one(to));
    }
    take_in(script, round, behind(ranks, me), Chunks::one(me), order);
}

fn gather_round(script: &mut StepList, round: u32, ranks: u32, me: u32) {
    for to in ahead(ranks, me) {
        script.send(round, to, Chunks::one(me));
    }
    for from in behind(ranks, me) {
        script.recv(round, from, Chunks::one(from), Combine::Replace);
    }
}
