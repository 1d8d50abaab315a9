//! Overlapped decentralised exchange: each rank sends its whole vector to all ranks, in rounds in
//! which no rank receives two.
//!
//! The messages are those of [`naive`](super::naive), each moved to the earliest round in which its
//! receiver is free: in round *k* every rank sends to the rank *k*+1 places ahead. All ranks send
//! and receive all the time, so P−1 rounds suffice where taking turns needs P(P−1). With all
//! messages in one round it is [`one_shot`](super::one_shot); with each rank summing only its part
//! it is [`partitioned`](super::partitioned).
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector.

use super::definition::{AlgorithmDef, Hints, Inner, Rotation};
use super::direct::{ahead, behind};
use super::step::{Chunks, Combine, Step, StepList};
use super::{CollectiveKind, has_steps};

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "overlapped",
    number: 6,
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
