//! Read-reduce: ranks that share memory read each other's buffers instead of sending messages.
//!
//! Every rank reduces one part of the vector, straight from where the others hold it, and then
//! everyone reads the reduced parts. Nothing is packed, sent or unpacked, so a vector crosses the memory
//! bus once for each time that it is needed; what is waited for is only that a peer lends what is to
//! be read and, at the end of a round, that it has been read ([`Action`](super::Action)). Lent
//! contributions stay where they are until they are summed, so the canonical order costs no memory.
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector. No bytes are sent;
//! fan-in is how many peers a rank reads in one round.

use super::direct::{ahead, behind};
use super::step::{Chunks, Combine, Script, Step};
use super::{Order, has_steps};

/// Rank *i* reduces part *i* of everyone in place, then everyone reads the parts.
///
/// Rounds 2; bytes read per rank 2N(P−1)/P; fan-in P−1. Chunks: P.
pub fn all_reduce(ranks: u32, me: u32, order: Order) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) {
        scatter_round(&mut script, ranks, me, order);
        gather_round(&mut script, 1, ranks, me);
    }
    script.done()
}

/// Rank *i* reduces part *i* of everyone in place.
///
/// Rounds 1; bytes read per rank N(P−1)/P; fan-in P−1. Chunks: P.
pub fn reduce_scatter(ranks: u32, me: u32, order: Order) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) {
        scatter_round(&mut script, ranks, me, order);
    }
    script.done()
}

/// Everyone reads everyone's part.
///
/// Rounds 1; bytes read per rank N(P−1)/P; fan-in P−1. Chunks: P.
pub fn all_gather(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) {
        gather_round(&mut script, 0, ranks, me);
    }
    script.done()
}

/// Everyone reads the root's vector.
///
/// Rounds 1; bytes read per rank N; fan-in 1. Chunks: 1.
pub fn broadcast(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) && root < ranks {
        if me == root {
            for to in ahead(ranks, me) {
                script.lend(0, to, Chunks::one(0));
            }
        } else {
            script.read(0, root, Chunks::one(0), Combine::Replace);
        }
    }
    script.done()
}

/// Rank *i* reduces part *i* of everyone in place, then the root reads the parts.
///
/// Rounds 2; bytes read at most 2N(P−1)/P, by the root; fan-in P−1. Chunks: P.
pub fn reduce(ranks: u32, me: u32, root: u32, order: Order) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) && root < ranks {
        scatter_round(&mut script, ranks, me, order);
        gather_at(&mut script, 1, ranks, me, root);
    }
    script.done()
}

/// The root reads everyone's part.
///
/// Rounds 1; bytes read N(P−1)/P by the root; fan-in P−1. Chunks: P.
pub fn gather(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) && root < ranks {
        gather_at(&mut script, 0, ranks, me, root);
    }
    script.done()
}

/// Everyone reads from everyone the part that is for it.
///
/// Rounds 1; bytes read per rank N(P−1)/P; fan-in P−1. Chunks: P.
pub fn all_to_all(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) {
        script.emit(0, Chunks::one(me));
        for to in ahead(ranks, me) {
            script.lend(0, to, Chunks::one(to));
        }
        for from in behind(ranks, me) {
            script.read(0, from, Chunks::one(from), Combine::Output);
        }
    }
    script.done()
}

/// A rank writes to its own part only, which nobody else reads in this round.
fn scatter_round(script: &mut Script, ranks: u32, me: u32, order: Order) {
    for to in ahead(ranks, me) {
        script.lend(0, to, Chunks::one(to));
    }
    let how = match order {
        Order::Canonical => Combine::Hold,
        Order::Free => Combine::Reduce,
    };
    for from in behind(ranks, me) {
        script.read(0, from, Chunks::one(me), how);
    }
    if how == Combine::Hold {
        script.fold(0, Chunks::one(me));
    }
}

/// A rank writes to all parts but its own, and only its own is read.
fn gather_round(script: &mut Script, round: u32, ranks: u32, me: u32) {
    for to in ahead(ranks, me) {
        script.lend(round, to, Chunks::one(me));
    }
    for from in behind(ranks, me) {
        script.read(round, from, Chunks::one(from), Combine::Replace);
    }
}

fn gather_at(script: &mut Script, round: u32, ranks: u32, me: u32, root: u32) {
    if me == root {
        for from in behind(ranks, me) {
            script.read(round, from, Chunks::one(from), Combine::Replace);
        }
    } else {
        script.lend(round, root, Chunks::one(me));
    }
}
