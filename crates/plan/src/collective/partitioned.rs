//! The partitioned exchange: every rank sums one part for all, and messages go one at a time.
//!
//! The vector is cut into as many parts as there are ranks; part *i* is collected and summed by rank
//! *i*, which then hands it to everyone. The messages are those of [`direct`](super::direct), which
//! sends them all in one round and so has a fan-in of P−1; here a rank sends one and receives one in
//! a round. It moves as many bytes in as many rounds as the [`ring`](super::ring), but every part goes
//! straight to its owner: between any two ranks, and so in canonical order if asked.
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector.

use super::direct::{ahead, behind};
use super::step::{Chunks, Combine, Script, Step};
use super::{Order, has_steps};

/// Each part is collected by its owner and summed, then handed out by it.
///
/// Rounds 2(P−1); bytes sent and received per rank 2N(P−1)/P; fan-in 1. Chunks: P.
/// Held in canonical order: N(P−1)/P.
pub fn all_reduce(ranks: u32, me: u32, order: Order) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) {
        scatter_rounds(&mut script, ranks, me, order);
        gather_rounds(&mut script, ranks - 1, ranks, me);
    }
    script.done()
}

/// In round *k* every rank sends to the rank *k*+1 places ahead the part that is summed there.
///
/// Rounds P−1; bytes sent and received per rank N(P−1)/P; fan-in 1. Chunks: P.
/// Held in canonical order: N(P−1)/P.
pub fn reduce_scatter(ranks: u32, me: u32, order: Order) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) {
        scatter_rounds(&mut script, ranks, me, order);
    }
    script.done()
}

/// In round *k* every rank sends its part to the rank *k*+1 places ahead.
///
/// Rounds P−1; bytes sent and received per rank N(P−1)/P; fan-in 1. Chunks: P.
pub fn all_gather(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) {
        gather_rounds(&mut script, 0, ranks, me);
    }
    script.done()
}

fn scatter_rounds(script: &mut Script, ranks: u32, me: u32, order: Order) {
    let how = match order {
        Order::Canonical => Combine::Hold,
        Order::Free => Combine::Reduce,
    };
    for (round, (to, from)) in (0..).zip(ahead(ranks, me).zip(behind(ranks, me))) {
        script.send(round, to, Chunks::one(to));
        script.recv(round, from, Chunks::one(me), how);
    }
    if how == Combine::Hold && ranks > 1 {
        script.fold(ranks - 2, Chunks::one(me));
    }
}

fn gather_rounds(script: &mut Script, first_round: u32, ranks: u32, me: u32) {
    for (round, (to, from)) in (first_round..).zip(ahead(ranks, me).zip(behind(ranks, me))) {
        script.send(round, to, Chunks::one(me));
        script.recv(round, from, Chunks::one(from), Combine::Replace);
    }
}
