use super::{Action, Pass, Row};
use crate::ids::{Microbatch, Stage};

/// GPipe: fill the pipeline with every microbatch's forward, then drain it with every backward.
///
/// PyTorch's table leaves three slots per later rank between the two: one for the last forward to
/// travel on, two for a backward, taken to cost twice a forward, to come back.
pub(super) fn row(rank: u16, ranks: u16, microbatches: u32, row: &mut impl Row) {
    let later_ranks = u64::from(ranks - 1 - rank);
    let stage = Stage(rank);
    row.idle(u64::from(rank));
    for microbatch in (0..microbatches).map(Microbatch) {
        row.run(Action { stage, pass: Pass::Forward, microbatch });
    }
    row.idle(3 * later_ranks);
    for microbatch in (0..microbatches).map(Microbatch) {
        row.run(Action { stage, pass: Pass::Backward, microbatch });
    }
}
