//! In which iterations an op takes place.
//!
//! Where compression sets in after a warm-up, the first iterations reduce gradients as they are, and all others
//! what they are compressed to. Both stand in one body, on the same lanes and in the same memory; an op whose turn it is
//! not is done as soon as it may start. So an op keeps its number, and a plan stays one plan.

use super::{Op, Plan};
use crate::ids::Microbatch;
use std::borrow::Cow;

/// In which iterations an op takes place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Turn {
    /// In all of them.
    #[default]
    Always,
    /// In the first ones, before compression sets in.
    WarmUp,
    /// In all after those.
    Steady,
}

impl Turn {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Always, Self::WarmUp, Self::Steady];

    /// The turn of an iteration, counted from 0, in a run with a warm-up of so many.
    pub const fn of(iteration: u32, warm_up: u32) -> Self {
        if iteration < warm_up { Self::WarmUp } else { Self::Steady }
    }

    /// The word in plans.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::WarmUp => "warm-up",
            Self::Steady => "steady",
        }
    }

    /// Whether an op with this turn takes place in iterations of the turn `now`.
    pub fn takes_place(self, now: Self) -> bool {
        self == Self::Always || self == now
    }
}

impl Plan {
    /// Whether some ops do not take place in every iteration.
    pub fn has_turns(&self) -> bool {
        let bodies = self.programs.iter().flat_map(|program| &program.body.nodes);
        bodies.into_iter().any(|node| node.turn != Turn::Always)
    }

    /// The plan of the iterations of one turn alone: in the place of all other ops stand some that take no time, so
    /// that every op keeps its number.
    pub fn in_turn(&self, now: Turn) -> Cow<'_, Self> {
        if !self.has_turns() {
            return Cow::Borrowed(self);
        }
        let mut plan = self.clone();
        for program in &mut plan.programs {
            let nothing = program.frames.len() as u32;
            program.frames.push(Vec::new());
            for node in &mut program.body.nodes {
                if !node.turn.takes_place(now) {
                    node.op = Op::Free { frame: nothing, microbatch: Microbatch(0) };
                }
                node.turn = Turn::Always;
            }
        }
        Cow::Owned(plan)
    }
}
