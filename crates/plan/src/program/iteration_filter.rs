//! Iteration filters: ops that run only during or only after the compression warm-up.
//!
//! During the warm-up, gradients are reduced uncompressed; afterwards they are compressed. One body
//! holds the ops of both phases, on the same lanes and in the same memory. A filtered-out op
//! completes as soon as it may start, so op numbers do not change and one plan covers both phases.

use super::{Op, Plan};
use crate::ids::Microbatch;
use std::borrow::Cow;

/// Iterations in which an op runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum IterationFilter {
    /// Every iteration.
    #[default]
    All,
    /// Warm-up iterations, before compression starts.
    Warmup,
    /// Iterations after the warm-up.
    AfterWarmup,
}

impl IterationFilter {
    /// All variants.
    pub const ALL: [Self; 3] = [Self::All, Self::Warmup, Self::AfterWarmup];

    /// Phase of `iteration` (counted from 0) in a run with `warm_up` warm-up iterations.
    pub const fn of(iteration: u32, warm_up: u32) -> Self {
        if iteration < warm_up { Self::Warmup } else { Self::AfterWarmup }
    }

    /// Keyword in the plan's text form.
    pub const fn word(self) -> &'static str {
        match self {
            Self::All => "always",
            Self::Warmup => "warmup",
            Self::AfterWarmup => "after_warmup",
        }
    }

    /// Returns true if an op with this filter runs in iterations of phase `now`.
    pub fn includes(self, now: Self) -> bool {
        self == Self::All || self == now
    }
}

impl Plan {
    /// Returns true if some ops do not run in every iteration.
    pub fn has_filters(&self) -> bool {
        let bodies = self.programs.iter().flat_map(|program| &program.body.nodes);
        bodies.into_iter().any(|node| node.filter != IterationFilter::All)
    }

    /// Plan of the iterations of phase `now` only. Filtered-out ops are replaced by ops that take
    /// no time, so op numbers do not change.
    pub fn filtered(&self, now: IterationFilter) -> Cow<'_, Self> {
        if !self.has_filters() {
            return Cow::Borrowed(self);
        }
        let mut plan = self.clone();
        for program in &mut plan.programs {
            let nothing = program.frames.len() as u32;
            program.frames.push(Vec::new());
            for node in &mut program.body.nodes {
                if !node.filter.includes(now) {
                    node.op = Op::Free { frame: nothing, microbatch: Microbatch(0) };
                }
                node.filter = IterationFilter::All;
            }
        }
        Cow::Owned(plan)
    }
}
