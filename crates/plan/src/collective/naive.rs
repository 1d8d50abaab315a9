//! Naive decentralised exchange: each rank sends its whole vector to all ranks, one after the
//! other.
//!
//! There is no special rank and no splitting: each rank sends its vector to every other rank and
//! sums all vectors itself. It needs only point-to-point messages and is the baseline for all other
//! algorithms. A receiver must keep all arrivals until its own vector has been sent to the last
//! peer. This takes P−1 vectors of memory and makes the canonical order free.
//!
//! With all messages sent at once the same exchange is [`overlapped`](super::overlapped); with each
//! rank summing only its part it is [`partitioned`](super::partitioned).
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector.

use super::definition::{AlgorithmDef, Hints, Inner, Rotation};
use super::direct::{ahead, behind};
use super::step::{Chunks, Combine, Step, StepList};
use super::{CollectiveKind, has_steps};

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "naive",
    number: 5,
    kinds: &[CollectiveKind::AllReduce],
    chunks: |_| 1,
    rounds: |p| p.ranks - 1,
    steps: |p, me| all_reduce(p.ranks, me),
    inner: Inner { is_replicated: true, ..AlgorithmDef::BASE.inner },
    hints: Hints { rotation: |_| Rotation::Ranks, ..AlgorithmDef::BASE.hints },
    ..AlgorithmDef::BASE
};

/// In round *k* every rank sends its vector to the rank *k*+1 places ahead; at the end it sums all.
///
/// Rounds P−1; bytes sent and received per rank N(P−1); fan-in 1. Chunks: 1. Held: N(P−1).
pub fn all_reduce(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && ranks > 1 {
        let whole = Chunks::one(0);
        for (round, (to, from)) in (0..).zip(ahead(ranks, me).zip(behind(ranks, me))) {
            script.send(round, to, whole);
            script.recv(round, from, whole, Combine::Hold);
        }
        script.fold(ranks - 2, whole);
    }
    script.done()
}
