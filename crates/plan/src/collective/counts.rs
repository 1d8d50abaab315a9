//! Costs of a collective, counted from its steps.

use super::Pattern;
use super::definition::Counted;
use super::step::{Action, Chunking, Combine};
use crate::units::Bytes;

/// Rounds, bytes and fan-in, as the doc comments of the algorithms state them in formulas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of rounds from the first message to the last.
    pub rounds: u32,
    /// Maximum bytes that any one rank sends.
    pub bytes_sent_per_rank_max: Bytes,
    /// Maximum bytes that any one rank receives.
    pub bytes_received_per_rank_max: Bytes,
    /// Maximum bytes that any one rank sends, lends or writes in one round.
    pub bytes_out_per_round_max: Bytes,
    /// Maximum bytes that any one rank receives or reads in one round.
    pub bytes_in_per_round_max: Bytes,
    /// Maximum bytes that any one rank reads from the memory of others.
    pub bytes_read_per_rank_max: Bytes,
    /// Maximum bytes that any one rank writes to the memory of others.
    pub bytes_written_per_rank_max: Bytes,
    /// Maximum number of messages received, or loans read, by any one rank in one round.
    pub fan_in_max: u32,
    /// Maximum bytes that any one rank buffers at once for a sum in canonical order.
    pub bytes_held_max: Bytes,
}

impl Counts {
    /// Counts the steps of a set of ranks that includes the busiest of the group; see
    /// [`Pattern::counts`].
    pub(super) fn of(pattern: &Pattern, bytes: Bytes) -> Self {
        busiest(pattern)
            .into_iter()
            .map(|rank| Self::of_rank(pattern, rank, bytes))
            .fold(Self::default(), Self::most)
    }

    /// Bytes that all ranks together receive, read from others' memory and write to it.
    pub(super) fn total(pattern: &Pattern, bytes: Bytes) -> Bytes {
        let mut sum = Bytes::ZERO;
        for rank in 0..pattern.ranks() {
            let one = Self::of_rank(pattern, rank, bytes);
            let moved = [
                one.bytes_received_per_rank_max,
                one.bytes_read_per_rank_max,
                one.bytes_written_per_rank_max,
            ];
            moved.iter().for_each(|moved| add(&mut sum, moved.0));
        }
        sum
    }

    #[cfg(test)]
    pub(super) fn of_ranks(
        pattern: &Pattern,
        ranks: impl IntoIterator<Item = u32>,
        bytes: Bytes,
    ) -> Self {
        let each = ranks.into_iter().map(|rank| Self::of_rank(pattern, rank, bytes));
        each.fold(Self::default(), Self::most)
    }

    fn of_rank(pattern: &Pattern, rank: u32, bytes: Bytes) -> Self {
        let cut = Chunking { elements: bytes.0, chunks: pattern.chunks(), block: 1 };
        let [mut sent, mut received, mut read, mut written] = [Bytes::ZERO; 4];
        let (mut held, mut held_max) = (Bytes::ZERO, Bytes::ZERO);
        let (mut rounds, mut fan_in, mut fan_in_max) = (0, 0, 0);
        let [mut out, mut into, mut out_max, mut into_max] = [Bytes::ZERO; 4];
        for step in pattern.steps(rank) {
            if step.round >= rounds {
                (rounds, fan_in) = (step.round + 1, 0);
                [out, into] = [Bytes::ZERO; 2];
            }
            let moved = || cut.elements_in(step.action.chunks());
            match step.action {
                Action::Send { .. }
                | Action::Offer { .. }
                | Action::Lend { .. }
                | Action::Write { .. } => add(&mut out, moved()),
                Action::Recv { .. } | Action::Take { .. } | Action::Read { .. } => {
                    add(&mut into, moved());
                }
                Action::Fold { .. } | Action::Emit { .. } => {}
            }
            (out_max, into_max) = (out_max.max(out), into_max.max(into));
            match step.action {
                Action::Send { chunks, .. } | Action::Offer { chunks, .. } => {
                    add(&mut sent, cut.elements_in(chunks));
                }
                // A switch sends a rank one message, whatever its size.
                Action::Take { chunks, .. } => {
                    add(&mut received, cut.elements_in(chunks));
                    fan_in_max = fan_in_max.max(1);
                }
                Action::Recv { chunks, how, .. } => {
                    add(&mut received, cut.elements_in(chunks));
                    fan_in += 1;
                    fan_in_max = fan_in_max.max(fan_in);
                    if how == Combine::Hold {
                        add(&mut held, cut.elements_in(chunks));
                        held_max = held_max.max(held);
                    }
                }
                Action::Read { chunks, .. } => {
                    add(&mut read, cut.elements_in(chunks));
                    fan_in += 1;
                    fan_in_max = fan_in_max.max(fan_in);
                }
                Action::Write { chunks, .. } => add(&mut written, cut.elements_in(chunks)),
                Action::Fold { .. } => held = Bytes::ZERO,
                Action::Emit { .. } | Action::Lend { .. } => {}
            }
        }
        if pattern.ranks() == 1 {
            // A single rank may still copy its input to its output; that is not a round.
            rounds = 0;
        }
        Self {
            rounds,
            bytes_sent_per_rank_max: sent,
            bytes_received_per_rank_max: received,
            bytes_out_per_round_max: out_max,
            bytes_in_per_round_max: into_max,
            bytes_read_per_rank_max: read,
            bytes_written_per_rank_max: written,
            fan_in_max,
            bytes_held_max: held_max,
        }
    }

    fn most(self, other: Self) -> Self {
        Self {
            rounds: self.rounds.max(other.rounds),
            bytes_sent_per_rank_max: self
                .bytes_sent_per_rank_max
                .max(other.bytes_sent_per_rank_max),
            bytes_received_per_rank_max: self
                .bytes_received_per_rank_max
                .max(other.bytes_received_per_rank_max),
            bytes_out_per_round_max: self
                .bytes_out_per_round_max
                .max(other.bytes_out_per_round_max),
            bytes_in_per_round_max: self.bytes_in_per_round_max.max(other.bytes_in_per_round_max),
            bytes_read_per_rank_max: self
                .bytes_read_per_rank_max
                .max(other.bytes_read_per_rank_max),
            bytes_written_per_rank_max: self
                .bytes_written_per_rank_max
                .max(other.bytes_written_per_rank_max),
            fan_in_max: self.fan_in_max.max(other.fan_in_max),
            bytes_held_max: self.bytes_held_max.max(other.bytes_held_max),
        }
    }
}

fn add(sum: &mut Bytes, bytes: u64) {
    sum.0 = sum.0.saturating_add(bytes);
}

/// Ranks that include the maximum of every count over the group; see [`Pattern::busiest`].
pub(super) fn busiest(pattern: &Pattern) -> Vec<u32> {
    /// Number of steps that can be generated and counted in a few milliseconds.
    const MAX_COUNTED_STEPS: u64 = 1 << 20;
    let steps = || u64::from(pattern.ranks()) * u64::from(pattern.rounds());
    let all = match pattern.algorithm().def().counted {
        Counted::All => true,
        Counted::AllIfSmall => steps() <= MAX_COUNTED_STEPS,
        Counted::Edges => false,
    };
    if all { (0..pattern.ranks()).collect() } else { at_edges(pattern) }
}

/// The ranks around the edges of the group.
///
/// A rank's load depends on its distance from the root and on the sizes of its chunks, which never
/// grow along the vector; so the ranks around the edges of both suffice. Several rings, dimensions
/// or levels have different edges; there they suffice up to the rounding of chunk sizes. Tests
/// compare with all ranks for every algorithm.
pub(super) fn at_edges(pattern: &Pattern) -> Vec<u32> {
    (pattern.algorithm().def().edges)(pattern)
}

/// The two ranks before and the two behind every edge, which lies in front of a rank.
pub(super) fn around(ranks: u32, edges: &[u32]) -> Vec<u32> {
    let around = |&edge: &u32| [edge, edge + 1, edge + 2 * ranks - 2, edge + ranks - 1];
    let mut busiest: Vec<u32> = edges.iter().flat_map(around).map(|r| r % ranks).collect();
    busiest.sort_unstable();
    busiest.dedup();
    busiest
}

/// The ranks around the edges in every dimension.
pub(super) fn around_in_grid(sizes: impl Iterator<Item = u32>) -> Vec<u32> {
    let (mut busiest, mut below) = (vec![0], 1);
    for size in sizes {
        let places = around(size, &[0]);
        let at = |place: u32| busiest.iter().map(move |rank| rank + place * below);
        busiest = places.into_iter().flat_map(at).collect();
        below *= size;
    }
    busiest
}
