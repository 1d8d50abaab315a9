use super::{Action, Pass, Row, ScheduleError};
use crate::ids::{Microbatch, Stage};

/// Number of microbatches that pass through one chunk before the rank switches to its next chunk.
///
/// Megatron-LM runs rounds of one microbatch per pipeline rank and requires whole rounds. PyTorch
/// keeps the number of rounds and allows them to be longer if all are equal. Below two rounds'
/// worth, any count is a single round.
pub(super) fn per_round(ranks: u16, microbatches: u32) -> Result<u32, ScheduleError> {
    let rounds = rounds(ranks, microbatches);
    if !divides(ranks, microbatches) {
        // Multiples of `ranks` always work, so both searches end soon.
        return Err(ScheduleError::Rounds {
            ranks,
            microbatches,
            rounds,
            below: (1..microbatches).rev().find(|&count| divides(ranks, count)).unwrap_or(1),
            above: (microbatches..=u32::MAX).find(|&count| divides(ranks, count)),
        });
    }
    Ok(microbatches / rounds)
}

fn rounds(ranks: u16, microbatches: u32) -> u32 {
    (microbatches / u32::from(ranks)).max(1)
}

fn divides(ranks: u16, microbatches: u32) -> bool {
    microbatches.is_multiple_of(rounds(ranks, microbatches))
}

/// An interleaved schedule: 1F1B with one microbatch in one chunk as the unit.
///
/// A rank numbers its units in forward order: a round's microbatches through chunk 0, the same
/// through chunk 1, …, then the next round. Backwards use the same numbers with the chunks
/// reversed.
pub(super) struct InterleavedLayout {
    pub(super) ranks: u16,
    pub(super) chunks: u16,
    pub(super) microbatches: u32,
    /// From [`per_round`].
    pub(super) per_round: u32,
}

impl InterleavedLayout {
    /// Writes the row of a rank. Warmup reaches the last chunk (`chunks − 1` rounds) and gives each
    /// later rank two units of lead: one for the forward to arrive, one for the backward to return.
    /// The idle slots after it align the first backwards of all ranks, as in PyTorch's table.
    pub(super) fn row(&self, rank: u16, row: &mut impl Row) {
        let [ranks, chunks] = [self.ranks, self.chunks].map(u64::from);
        let lead = 2 * u64::from(self.ranks - 1 - rank);
        let units = self.units();
        let warmup = units.min((chunks - 1) * u64::from(self.per_round) + lead);

        row.idle(u64::from(rank));
        for unit in 0..warmup {
            row.run(self.forward(rank, unit));
        }
        if warmup > 0 {
            row.idle((chunks * ranks + lead).saturating_sub(warmup + u64::from(rank)));
        }
        for unit in warmup..units {
            row.run(self.forward(rank, unit));
            row.run(self.backward(rank, unit - warmup, Pass::Backward));
        }
        for unit in units - warmup..units {
            row.idle(1);
            row.run(self.backward(rank, unit, Pass::Backward));
        }
    }

    /// Number of units per rank.
    pub(super) fn units(&self) -> u64 {
        u64::from(self.chunks) * u64::from(self.microbatches)
    }

    pub(super) fn forward(&self, rank: u16, unit: u64) -> Action {
        let (chunk, microbatch) = self.split(unit);
        Action { stage: Stage(chunk * self.ranks + rank), pass: Pass::Forward, microbatch }
    }

    pub(super) fn backward(&self, rank: u16, unit: u64, pass: Pass) -> Action {
        let (chunk, microbatch) = self.split(unit);
        let chunk = self.chunks - 1 - chunk;
        Action { stage: Stage(chunk * self.ranks + rank), pass, microbatch }
    }

    /// Chunk (in execution order) and microbatch of a unit. Both are below the counts they index,
    /// so the narrowing casts are lossless.
    fn split(&self, unit: u64) -> (u16, Microbatch) {
        let [chunks, per_round] = [u64::from(self.chunks), u64::from(self.per_round)];
        let turn = unit / per_round;
        let microbatch = turn / chunks * per_round + unit % per_round;
        ((turn % chunks) as u16, Microbatch(microbatch as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_may_be_longer_than_the_pipeline() {
        assert_eq!(per_round(4, 8), Ok(4));
        assert_eq!(per_round(4, 10), Ok(5));
        assert_eq!(per_round(4, 3), Ok(3));
        assert_eq!(per_round(4, 7), Ok(7));
    }

    #[test]
    fn uneven_rounds_name_the_nearest_counts() {
        let error = per_round(4, 13).unwrap_err();
        assert_eq!(
            error,
            ScheduleError::Rounds {
                ranks: 4,
                microbatches: 13,
                rounds: 3,
                below: 12,
                above: Some(15)
            }
        );
        assert!(error.to_string().ends_with("the nearest counts that work are 12 and 15"));
    }

    #[test]
    fn the_search_stops_at_the_largest_number() {
        // 2³² − 1 = 3 · 5 · 17 · 257 · 65537 is odd: two ranks cannot halve it, and no larger count
        // exists.
        let error = per_round(2, u32::MAX).unwrap_err();
        let ScheduleError::Rounds { below, above, .. } = error else { panic!("{error}") };
        assert_eq!((below, above), (u32::MAX - 1, None));
        assert!(error.to_string().ends_with("that work are 4294967294"));
    }
}
