//! What a collective costs, counted from its steps.

use super::step::{Action, Combine, Cut};
use super::{Algorithm, Pattern};
use crate::units::Bytes;

/// How long, how much and how crowded: what the doc comments of the algorithms state as formulas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rounds from the first message to the last.
    pub rounds: u32,
    /// The most bytes that any one rank sends.
    pub bytes_sent_per_rank_max: Bytes,
    /// The most bytes that any one rank receives.
    pub bytes_received_per_rank_max: Bytes,
    /// The most messages that any one rank receives in one round.
    pub fan_in_max: u32,
    /// The most bytes that any one rank holds aside at once for a sum in canonical order.
    pub bytes_held_max: Bytes,
}

impl Counts {
    /// Counts the steps of those ranks that between them are the busiest of their group; see
    /// [`Pattern::counts`].
    pub(super) fn of(pattern: &Pattern, bytes: Bytes) -> Self {
        busiest(pattern)
            .into_iter()
            .map(|rank| Self::of_rank(pattern, rank, bytes))
            .fold(Self::default(), Self::most)
    }

    #[cfg(test)]
    pub(super) fn of_some_and_of_all(pattern: &Pattern, bytes: Bytes) -> (Self, Self) {
        let all = (0..pattern.ranks()).map(|rank| Self::of_rank(pattern, rank, bytes));
        (Self::of(pattern, bytes), all.fold(Self::default(), Self::most))
    }

    fn of_rank(pattern: &Pattern, rank: u32, bytes: Bytes) -> Self {
        let cut = Cut { elements: bytes.0, chunks: pattern.chunks(), block: 1 };
        let (mut sent, mut received) = (Bytes::ZERO, Bytes::ZERO);
        let (mut held, mut held_max) = (Bytes::ZERO, Bytes::ZERO);
        let (mut rounds, mut fan_in, mut fan_in_max) = (0, 0, 0);
        for step in pattern.steps(rank) {
            if step.round >= rounds {
                (rounds, fan_in) = (step.round + 1, 0);
            }
            match step.action {
                Action::Send { chunks, .. } => add(&mut sent, cut.elements_in(chunks)),
                Action::Recv { chunks, how, .. } => {
                    add(&mut received, cut.elements_in(chunks));
                    fan_in += 1;
                    fan_in_max = fan_in_max.max(fan_in);
                    if how == Combine::Hold {
                        add(&mut held, cut.elements_in(chunks));
                        held_max = held_max.max(held);
                    }
                }
                Action::Fold { .. } => held = Bytes::ZERO,
                Action::Emit { .. } => {}
            }
        }
        if pattern.ranks() == 1 {
            // A lone rank may still copy its input to its output; that is no round.
            rounds = 0;
        }
        Self {
            rounds,
            bytes_sent_per_rank_max: sent,
            bytes_received_per_rank_max: received,
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
            fan_in_max: self.fan_in_max.max(other.fan_in_max),
            bytes_held_max: self.bytes_held_max.max(other.bytes_held_max),
        }
    }
}

fn add(sum: &mut Bytes, bytes: u64) {
    sum.0 = sum.0.saturating_add(bytes);
}

/// Ranks among which every maximum over the group is found.
///
/// A rank's load depends on its distance from the root and on the sizes of the chunks it deals with,
/// which never grow along the vector; so the ranks around the edges of both suffice. Halving is less
/// regular, but a rank has so few steps there that all can be counted. A test compares with all
/// ranks for every algorithm.
fn busiest(pattern: &Pattern) -> Vec<u32> {
    let (ranks, root) = (pattern.ranks(), pattern.root());
    let edges = match pattern.algorithm() {
        Algorithm::HalvingDoubling => return (0..ranks).collect(),
        Algorithm::ParameterServer { servers } => [0, root, root + servers],
        Algorithm::Auto | Algorithm::Ring | Algorithm::Direct => [0, root, root],
    };
    let around = |edge| [edge, edge + 1, edge + 2 * ranks - 2, edge + ranks - 1];
    let mut busiest: Vec<u32> = edges.into_iter().flat_map(around).map(|r| r % ranks).collect();
    busiest.sort_unstable();
    busiest.dedup();
    busiest
}
