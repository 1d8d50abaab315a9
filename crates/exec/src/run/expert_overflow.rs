//! Experts whose buffers are too small for the tokens sent to them.
//!
//! A run does not end because routing is uneven. A rank whose buffers overflow computes the iteration
//! to its end with the tokens that have a place, and makes a gradient of it not finite. The norm is
//! then not finite either, on all ranks, so that none changes a weight. They agree on the size that is
//! needed, save the state before the iteration, and end: the caller plans larger buffers, and goes on
//! from there with the numbers that larger buffers give from the start.

use crate::error::{ExecError, Fault};
use paceline_plan::program::Plan;

/// Returns true if ranks finish an iteration whose experts overflow, because it leaves their state as
/// it was. Otherwise the rank that overflows fails, and the run goes on from its last checkpoint.
pub(crate) fn finishes_overflow(plan: &Plan) -> bool {
    let known = plan.programs.iter().all(|program| program.outputs.norm.is_some());
    known && plan.facts().repeatable && plan.expert_buffers().is_some()
}

impl ExecError {
    /// Size of the experts' buffers that the failed run needs, in equal shares; `None` if it failed
    /// for another reason.
    pub fn needed_expert_buffers(&self) -> Option<f64> {
        if let Self::ExpertOverflow { needed, .. } = self {
            return Some(*needed);
        }
        let Self::Op { source: Fault::Full(full), .. } = self else { return None };
        Some(full.factor())
    }
}
