//! Partitioned exchange: every rank sums one part for all ranks, one message at a time.
//!
//! The vector is split into as many parts as there are ranks; rank *i* collects and sums part *i*,
//! then sends it to all ranks. The messages are those of [`direct`](super::direct), which sends
//! them all in one round and so has a fan-in of P−1; here a rank sends one and receives one per
//! round. It moves as many bytes in as many rounds as the [`ring`](super::ring), but every part
//! goes directly to its owner. Messages therefore occur between all pairs of ranks, and sums can be
//! in canonical order.
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector.

use super::definition::{AlgorithmDef, Hints, PARTS, Rotation, ways};
use super::direct::{ahead, behind};
use super::step::{Chunks, Combine, Step, StepList};
use super::{CollectiveKind, SummationOrder, has_steps};

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "partitioned",
    number: 7,
    kinds: PARTS,
    rounds: |p| ways(p) * (p.ranks - 1),
    steps: |p, me| match p.kind {
        CollectiveKind::AllReduce => all_reduce(p.ranks, me, p.order),
        CollectiveKind::ReduceScatter => reduce_scatter(p.ranks, me, p.order),
        CollectiveKind::AllGather => all_gather(p.ranks, me),
        _ => Vec::new(),
    },
    hints: Hints {
        rotation: |_| Rotation::Ranks,
        sends_in_place: true,
        ..AlgorithmDef::BASE.hints
    },
    ..AlgorithmDef::BASE
};

/// The owner of each part collects and sums it, then distributes it.
///
/// Rounds 2(P−1); bytes sent and received per rank 2N(P−1)/P; fan-in 1. Chunks: P. Held in
/// canonical order: N(P−1)/P.
pub fn all_reduce(ranks: u32, me: u32, order: SummationOrder) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        scatter_rounds(&mut script, ranks, me, order);
        gather_rounds(&mut script, ranks - 1, ranks, me);
    }
    script.done()
}

/// In round *k* every rank sends to the rank *k*+1 places ahead the part that rank sums.
///
/// Rounds P−1; bytes sent and received per rank N(P−1)/P; fan-in 1. Chunks: P. Held in canonical
/// order: N(P−1)/P.
pub fn reduce_scatter(ranks: u32, me: u32, order: SummationOrder) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        scatter_rounds(&mut script, ranks, me, order);
    }
    script.done()
}

/// In round *k* every rank sends its part to the rank *k*+1 places ahead.
///
/// Rounds P−1; bytes sent and received per rank N(P−1)/P; fan-in 1. Chunks: P.
pub fn all_gather(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        gather_rounds(&mut script, 0, ranks, me);
    }
    script.done()
}

fn scatter_rounds(script: &mut StepList, ranks: u32, me: u32, order: SummationOrder) {
    let how = match order {
        SummationOrder::Canonical => Combine::Hold,
        SummationOrder::Free => Combine::Reduce,
    };
    for (round, (to, from)) in (0..).zip(ahead(ranks, me).zip(behind(ranks, me))) {
        script.send(round, to, Chunks::one(to));
        script.recv(round, from, Chunks::one(me), how);
    }
    if how == Combine::Hold && ranks > 1 {
        script.fold(ranks - 2, Chunks::one(me));
    }
}

fn gather_rounds(script: &mut StepList, first_round: u32, ranks: u32, me: u32) {
    for (round, (to, from)) in (first_round..).zip(ahead(ranks, me).zip(behind(ranks, me))) {
        script.send(round, to, Chunks::one(me));
        script.recv(round, from, Chunks::one(from), Combine::Replace);
    }
}
