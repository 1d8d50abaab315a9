use super::interleaved::InterleavedLayout;
use super::{Pass, Row};

/// ZB-H1 and, with several chunks per rank, its interleaved form (Qi et al., 2023, arXiv
/// 2401.10241, section 2.1 and figure 3, top).
///
/// 1F1B whose backward passes compute only the input gradient. Rank `r` delays weight gradients by
/// `r` units, so each rank has as many microbatches in flight as the first rank of 1F1B. The weight
/// gradients left at the end fill the time in which the last input gradients travel back. An
/// input-gradient pass returns sooner than a full backward, so one unit of lead per later rank is
/// enough.
pub(super) fn row(shape: &InterleavedLayout, rank: u16, row: &mut impl Row) {
    let lead = u64::from(shape.ranks - 1 - rank);
    let units = shape.units();
    let warmup = units.min(u64::from(shape.chunks - 1) * u64::from(shape.per_round) + lead);
    let late = u64::from(rank);
    for unit in 0..warmup {
        row.run(shape.forward(rank, unit));
    }
    for unit in 0..units {
        if unit + warmup < units {
            row.run(shape.forward(rank, unit + warmup));
        }
        row.run(shape.backward(rank, unit, Pass::BackwardInput));
        if let Some(weight) = unit.checked_sub(late) {
            row.run(shape.backward(rank, weight, Pass::BackwardWeight));
        }
    }
    for unit in units.saturating_sub(late)..units {
        row.run(shape.backward(rank, unit, Pass::BackwardWeight));
    }
}
