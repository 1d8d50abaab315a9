//! Shared memory: ranks that share memory read each other's buffers instead of sending messages.
//!
//! Every rank reduces one part of the vector directly from the other ranks' buffers. In an
//! all_reduce it also writes the result directly to all of them, so that each byte of each vector
//! crosses the memory bus once in and once out: 2 P N bytes for P vectors of N, the minimum. Nothing
//! is packed, sent or unpacked. A rank waits only until a peer lends the chunks it reads and, at the end of a
//! round, until its own loans have been read ([`Action`](super::Action)). Lent contributions stay
//! in place until they are summed, so the canonical order costs no memory.
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector. No bytes are
//! sent; fan-in is the number of peers that a rank reads in one round.

use super::definition::{AlgorithmDef, Hints, Inner, Rotation, WITH_DATA};
use super::direct::{ahead, behind};
use super::step::{Chunks, Combine, Step, StepList};
use super::{CollectiveKind, Pattern, SummationOrder, has_steps};

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "shared-memory",
    number: 4,
    kinds: WITH_DATA,
    chunks: |p| if p.kind == CollectiveKind::Broadcast { 1 } else { p.ranks },
    rounds: |p| match p.kind {
        CollectiveKind::AllReduce | CollectiveKind::Reduce => 2,
        _ => 1,
    },
    steps,
    inner: Inner {
        steps: Some(|p, me| all_reduce_by_reads(p.ranks, me, p.order)),
        ..AlgorithmDef::BASE.inner
    },
    hints: Hints { rotation: |_| Rotation::Axes, ..AlgorithmDef::BASE.hints },
    ..AlgorithmDef::BASE
};

fn steps(p: &Pattern, me: u32) -> Vec<Step> {
    let (ranks, root, order) = (p.ranks, p.root, p.order);
    match p.kind {
        CollectiveKind::AllReduce => all_reduce(ranks, me),
        CollectiveKind::ReduceScatter => reduce_scatter(ranks, me, order),
        CollectiveKind::AllGather => all_gather(ranks, me),
        CollectiveKind::Broadcast => broadcast(ranks, me, root),
        CollectiveKind::Reduce => reduce(ranks, me, root, order),
        CollectiveKind::Gather => gather(ranks, me, root),
        CollectiveKind::AllToAll => all_to_all(ranks, me),
        CollectiveKind::Scatter => scatter(ranks, me, root),
        CollectiveKind::SendRecv => send_recv(ranks, me),
        CollectiveKind::Barrier => Vec::new(),
    }
}

/// Rank *i* reduces part *i* of all ranks in place, then writes it to all ranks. The sums are in
/// canonical order, also where the order is free.
///
/// Rounds 2; bytes read and bytes written per rank N(P−1)/P each; fan-in P−1. Chunks: P.
pub fn all_reduce(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        scatter_round(&mut script, ranks, me, SummationOrder::Canonical);
        for to in ahead(ranks, me) {
            script.write(1, to, Chunks::one(me));
        }
    }
    script.done()
}

/// Rank *i* reduces part *i* of all ranks in place, then all ranks read the parts. A hierarchy puts
/// its outer level between the two rounds, where no loan is open.
///
/// Rounds 2; bytes read per rank 2N(P−1)/P; fan-in P−1. Chunks: P.
fn all_reduce_by_reads(ranks: u32, me: u32, order: SummationOrder) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        scatter_round(&mut script, ranks, me, order);
        gather_round(&mut script, 1, ranks, me);
    }
    script.done()
}

/// Rank *i* reduces part *i* of all ranks in place.
///
/// Rounds 1; bytes read per rank N(P−1)/P; fan-in P−1. Chunks: P.
pub fn reduce_scatter(ranks: u32, me: u32, order: SummationOrder) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        scatter_round(&mut script, ranks, me, order);
    }
    script.done()
}

/// Every rank reads every other rank's part.
///
/// Rounds 1; bytes read per rank N(P−1)/P; fan-in P−1. Chunks: P.
pub fn all_gather(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        gather_round(&mut script, 0, ranks, me);
    }
    script.done()
}

/// Every rank reads the root's vector.
///
/// Rounds 1; bytes read per rank N; fan-in 1. Chunks: 1.
pub fn broadcast(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = StepList::default();
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

/// Rank *i* reduces part *i* of all ranks in place, then the root reads the parts.
///
/// Rounds 2; bytes read at most 2N(P−1)/P, by the root; fan-in P−1. Chunks: P.
pub fn reduce(ranks: u32, me: u32, root: u32, order: SummationOrder) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && root < ranks {
        scatter_round(&mut script, ranks, me, order);
        gather_at(&mut script, 1, ranks, me, root);
    }
    script.done()
}

/// The root reads every rank's part.
///
/// Rounds 1; bytes read N(P−1)/P by the root; fan-in P−1. Chunks: P.
pub fn gather(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && root < ranks {
        gather_at(&mut script, 0, ranks, me, root);
    }
    script.done()
}

/// Every rank reads its part of the root's vector.
///
/// Rounds 1; bytes read per rank N/P; fan-in 1. Chunks: P.
pub fn scatter(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && root < ranks {
        if me == root {
            for to in ahead(ranks, me) {
                script.lend(0, to, Chunks::one(to));
            }
        } else {
            script.read(0, root, Chunks::one(me), Combine::Replace);
        }
    }
    script.done()
}

/// Every rank reads the vector of the rank before it.
///
/// Rounds 1; bytes read per rank N; fan-in 1. Chunks: 1.
pub fn send_recv(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        let whole = Chunks::one(0);
        if ranks == 1 {
            script.emit(0, whole);
        } else {
            script.lend(0, (me + 1) % ranks, whole);
            script.read(0, (me + ranks - 1) % ranks, whole, Combine::Output);
        }
    }
    script.done()
}

/// Every rank reads from every other rank the part addressed to it.
///
/// Rounds 1; bytes read per rank N(P−1)/P; fan-in P−1. Chunks: P.
pub fn all_to_all(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
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

/// A rank writes only to its own part, which no other rank reads in this round.
fn scatter_round(script: &mut StepList, ranks: u32, me: u32, order: SummationOrder) {
    for to in ahead(ranks, me) {
        script.lend(0, to, Chunks::one(to));
    }
    let how = match order {
        SummationOrder::Canonical => Combine::Hold,
        SummationOrder::Free => Combine::Reduce,
    };
    for from in behind(ranks, me) {
        script.read(0, from, Chunks::one(me), how);
    }
    if how == Combine::Hold && ranks > 1 {
        script.fold(0, Chunks::one(me));
    }
}

/// A rank writes to all parts but its own, and only its own is read.
fn gather_round(script: &mut StepList, round: u32, ranks: u32, me: u32) {
    for to in ahead(ranks, me) {
        script.lend(round, to, Chunks::one(me));
    }
    for from in behind(ranks, me) {
        script.read(round, from, Chunks::one(from), Combine::Replace);
    }
}

fn gather_at(script: &mut StepList, round: u32, ranks: u32, me: u32, root: u32) {
    if me == root {
        for from in behind(ranks, me) {
            script.read(round, from, Chunks::one(from), Combine::Replace);
        }
    } else {
        script.lend(round, root, Chunks::one(me));
    }
}
