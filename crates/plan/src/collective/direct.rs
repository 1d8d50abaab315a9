//! Direct algorithms: every message goes straight to where it is needed, all in one round.
//!
//! The fewest rounds possible, at the price of a fan-in that grows with the group. Contributions
//! that must be summed in canonical order are held until all are there; in free order they are
//! summed as listed, which needs no room beside the message at hand.
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector.

use super::step::{Chunks, Combine, Script, Step};
use super::{Order, has_steps};

/// Rank *i* sums chunk *i* of everyone, then sends it to everyone.
///
/// Rounds 2; bytes sent and received per rank 2N(P−1)/P; fan-in P−1. Chunks: P.
/// Held in canonical order: N(P−1)/P.
pub fn all_reduce(ranks: u32, me: u32, order: Order) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) {
        scatter_round(&mut script, 0, ranks, me, order);
        gather_round(&mut script, 1, ranks, me);
    }
    script.done()
}

/// Rank *i* sums chunk *i* of everyone.
///
/// Rounds 1; bytes sent and received per rank N(P−1)/P; fan-in P−1. Chunks: P.
/// Held in canonical order: N(P−1)/P.
pub fn reduce_scatter(ranks: u32, me: u32, order: Order) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) {
        scatter_round(&mut script, 0, ranks, me, order);
    }
    script.done()
}

/// Everyone sends its part to everyone.
///
/// Rounds 1; bytes sent and received per rank N(P−1)/P; fan-in P−1. Chunks: P.
pub fn all_gather(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) {
        gather_round(&mut script, 0, ranks, me);
    }
    script.done()
}

/// The root sends its vector to everyone.
///
/// Rounds 1; bytes sent N(P−1) by the root; received per rank N; fan-in 1. Chunks: 1.
pub fn broadcast(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = Script::default();
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

/// Everyone sends its vector to the root, which sums them.
///
/// Rounds 1; bytes sent per rank N; received N(P−1) by the root; fan-in P−1. Chunks: 1.
/// Held in canonical order: N(P−1).
pub fn reduce(ranks: u32, me: u32, root: u32, order: Order) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) && root < ranks {
        if me == root {
            take_in(&mut script, 0, behind(ranks, me), Chunks::one(0), order);
        } else {
            script.send(0, root, Chunks::one(0));
        }
    }
    script.done()
}

/// Everyone sends its part to the root.
///
/// Rounds 1; bytes sent per rank N/P; received N(P−1)/P by the root; fan-in P−1. Chunks: P.
pub fn gather(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = Script::default();
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

/// Everyone sends everyone its part.
///
/// Rounds 1; bytes sent and received per rank N(P−1)/P; fan-in P−1. Chunks: P.
pub fn all_to_all(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = Script::default();
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

/// Sums what the given ranks send of these chunks into this rank's own.
pub(super) fn take_in(
    script: &mut Script,
    round: u32,
    from: impl Iterator<Item = u32>,
    chunks: Chunks,
    order: Order,
) {
    match order {
        Order::Canonical => {
            for from in from {
                script.recv(round, from, chunks, Combine::Hold);
            }
            script.fold(round, chunks);
        }
        Order::Free => {
            for from in from {
                script.recv(round, from, chunks, Combine::Reduce);
            }
        }
    }
}

/// The other ranks, the next one first: whom to send to, so that no rank is everyone's first.
pub(super) fn ahead(ranks: u32, me: u32) -> impl Iterator<Item = u32> {
    (1..ranks).map(move |k| (me + k) % ranks)
}

/// The other ranks, the previous one first: the order in which messages sent [`ahead`] arrive.
pub(super) fn behind(ranks: u32, me: u32) -> impl Iterator<Item = u32> {
    (1..ranks).map(move |k| (me + ranks - k) % ranks)
}

fn scatter_round(script: &mut Script, round: u32, ranks: u32, me: u32, order: Order) {
    for to in ahead(ranks, me) {
        script.send(round, to, Chunks::one(to));
    }
    take_in(script, round, behind(ranks, me), Chunks::one(me), order);
}

fn gather_round(script: &mut Script, round: u32, ranks: u32, me: u32) {
    for to in ahead(ranks, me) {
        script.send(round, to, Chunks::one(me));
    }
    for from in behind(ranks, me) {
        script.recv(round, from, Chunks::one(from), Combine::Replace);
    }
}
