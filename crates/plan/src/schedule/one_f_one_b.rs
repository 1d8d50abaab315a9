use super::{Action, Pass, Row};
use crate::ids::{Microbatch, Stage};

/// 1F1B with a flush: warmup forwards to reach the last rank, then alternating forwards and
/// backwards, then the remaining backwards.
///
/// Rank `r` of `p` warms up with `p − 1 − r` forwards, so it never has more than `p − r`
/// microbatches in flight. PyTorch's table gives a backward two slots per later rank to come back,
/// and alternates idle slots with the last backwards. It rejects fewer microbatches than ranks; the
/// order of its runtime is still well defined in that case and is used here. The table then keeps
/// its shape, with the missing forwards blank.
pub(super) fn row(rank: u16, ranks: u16, microbatches: u32, row: &mut impl Row) {
    let stage = Stage(rank);
    let forward = |index| Action { stage, pass: Pass::Forward, microbatch: Microbatch(index) };
    let backward = |index| Action { stage, pass: Pass::Backward, microbatch: Microbatch(index) };
    let later_ranks = u32::from(ranks - 1 - rank);
    let warmup = later_ranks.min(microbatches);

    row.idle(u64::from(rank));
    for index in 0..warmup {
        row.run(forward(index));
    }
    row.idle(u64::from(later_ranks - warmup) + 2 * u64::from(later_ranks));
    for index in warmup..microbatches {
        row.run(forward(index));
        row.run(backward(index - warmup));
    }
    for index in microbatches - warmup..microbatches {
        row.idle(1);
        row.run(backward(index));
    }
}
