//! Bruck's algorithms: the fewest rounds with one message per rank in each, for any rank count.
//!
//! In round *k* every rank exchanges with the ranks 2ᵏ places away, the last round with what is left.
//! An all_gather moves as few bytes as the [`ring`](super::ring). An all_to_all passes every part on
//! by the powers of two in its distance, so that it moves about ½ log₂ P times as many bytes as
//! [`direct`](super::direct) messages; it is for small vectors and many ranks.
//!
//! In the formulas *P* is the number of ranks, *S* = ⌈log₂ P⌉, and *N* the bytes of the whole vector.
//! See Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications
//! in multiport message-passing systems" (1997), sections 3 and 4. The rotations of their buffers are
//! in the positions of the messages.

use super::definition::{AlgorithmDef, Counted, Hints, Rotation};
use super::step::{Chunks, Combine, Step, StepList};
use super::{CollectiveKind, Pattern, has_steps};

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "bruck",
    number: 12,
    kinds: &[CollectiveKind::AllGather, CollectiveKind::AllToAll, CollectiveKind::Barrier],
    rounds: |p| p.ranks.next_power_of_two().ilog2(),
    steps: |p: &Pattern, me| match p.kind {
        CollectiveKind::AllToAll => all_to_all(p.ranks, me),
        CollectiveKind::Barrier => barrier(p.ranks, me),
        _ => all_gather(p.ranks, me),
    },
    counted: Counted::All,
    hints: Hints { rotation: |_| Rotation::Ranks, ..AlgorithmDef::BASE.hints },
    ..AlgorithmDef::BASE
};

/// After round *k* a rank holds the parts of the 2ᵏ⁺¹ ranks from itself on.
///
/// Rounds S; bytes sent and received per rank N(P−1)/P; fan-in 1. Chunks: P.
pub fn all_gather(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        for (round, distance) in distances(ranks) {
            let (to, from) = ((me + ranks - distance) % ranks, (me + distance) % ranks);
            let run = |first| Chunks::around(first, distance.min(ranks - distance), 1, ranks);
            script.send(round, to, run(me));
            script.recv(round, from, run(from), Combine::Replace);
        }
    }
    script.done()
}

/// A part for the rank *d* places ahead stands *d* chunks after its holder's own, all the way. In
/// round *k* it moves if *d* has the bit 2ᵏ; at the end every part is copied to its position.
///
/// Rounds S; bytes sent and received per rank N/P · Σₖ mₖ, where mₖ is the count of numbers below P
/// with the bit 2ᵏ; fan-in 1. Chunks: P.
pub fn all_to_all(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        let mut last = 0;
        for (round, bit) in distances(ranks) {
            let (runs, rest) = (ranks / (2 * bit), ranks % (2 * bit));
            let missing = if rest > bit { 2 * bit - rest } else { 0 };
            let count = runs + u32::from(rest > bit);
            let moved = Chunks::around((me + bit) % ranks, count, 2 * bit, ranks);
            let moved = Chunks { width: bit, missing, ..moved };
            script.send(round, (me + bit) % ranks, moved);
            script.recv(round, (me + ranks - bit) % ranks, moved, Combine::Replace);
            last = round;
        }
        let at = Chunks::around(me, ranks, 1, ranks);
        script.emit_into(last, at, Chunks::around(me, ranks, ranks - 1, ranks));
    }
    script.done()
}

/// Dissemination barrier: in round *k* every rank signals the rank 2ᵏ places ahead that it, and all
/// ranks it has heard of, have arrived. See Hensgen, Finkel and Manber, "Two algorithms for barrier
/// synchronization" (1988).
///
/// Rounds S; no bytes; fan-in 1.
pub fn barrier(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) {
        for (round, distance) in distances(ranks) {
            script.send(round, (me + distance) % ranks, Chunks::all(0));
            let from = (me + ranks - distance) % ranks;
            script.recv(round, from, Chunks::all(0), Combine::Replace);
        }
    }
    script.done()
}

/// The rounds and their distances 1, 2, 4, … below the number of ranks.
fn distances(ranks: u32) -> impl Iterator<Item = (u32, u32)> {
    (0..).map(|round| (round, 1 << round)).take_while(move |(_, distance)| *distance < ranks)
}

#[cfg(test)]
mod tests {
    use super::super::{Algorithm, SummationOrder, symbolic};
    use super::*;
    use crate::units::Bytes;

    #[test]
    fn costs_are_as_documented() {
        for ranks in 2..=70 {
            for kind in [CollectiveKind::AllGather, CollectiveKind::AllToAll] {
                let pattern =
                    Pattern::new(kind, Algorithm::Bruck, SummationOrder::Free, ranks, 0).unwrap();
                assert_eq!(symbolic::check(&pattern), Ok(()), "{pattern:?}");
                let counts = pattern.counts(Bytes(100 * u64::from(ranks)));
                let parts: u32 = match kind {
                    CollectiveKind::AllToAll => (0..ranks).map(u32::count_ones).sum(),
                    _ => ranks - 1,
                };
                assert_eq!(counts.rounds, (ranks - 1).ilog2() + 1);
                assert_eq!(counts.bytes_sent_per_rank_max, Bytes(100 * u64::from(parts)));
                assert_eq!(counts.bytes_received_per_rank_max, counts.bytes_sent_per_rank_max);
                assert_eq!(counts.fan_in_max, 1);
            }
        }
    }
}
