//! One-shot exchange: each rank sends its whole vector to all ranks in one round.
//!
//! The messages are those of [`naive`](super::naive) and [`overlapped`](super::overlapped), all at
//! once: P−1 messages share a rank's links. Arrivals are held until all are there: summed on
//! arrival, they would be added in a different order on every rank, and replicas would diverge.
//! Inference engines sum short vectors like this, because one latency is all that it costs.
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector.

use super::definition::{AlgorithmDef, Hints, Inner, Rotation};
use super::direct::{ahead, behind, take_in};
use super::step::{Chunks, Step, StepList};
use super::{CollectiveKind, SummationOrder, has_steps};

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "one-shot",
    number: 13,
    kinds: &[CollectiveKind::AllReduce],
    chunks: |_| 1,
    steps: |p, me| all_reduce(p.ranks, me),
    inner: Inner { is_replicated: true, ..AlgorithmDef::BASE.inner },
    hints: Hints { rotation: |_| Rotation::Axes, ..AlgorithmDef::BASE.hints },
    ..AlgorithmDef::BASE
};

/// Every rank sends its vector to all others and sums everything it receives.
///
/// Rounds 1; bytes sent and received per rank N(P−1); fan-in P−1. Chunks: 1. Held: N(P−1).
pub fn all_reduce(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && ranks > 1 {
        let whole = Chunks::one(0);
        for to in ahead(ranks, me) {
            script.send(0, to, whole);
        }
        take_in(&mut script, 0, behind(ranks, me), whole, SummationOrder::Canonical);
    }
    script.done()
}
