use super::{Action, Pass, Row};
use crate::ids::{Microbatch, Stage};

/// GPipe: fills the pipeline with all forwards, then drains it with all backwards.
///
/// PyTorch's table leaves three slots per later rank between the two phases. One is for the last
/// forward to travel on; two are for a backward, assumed to cost twice a forward, to come back.
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
