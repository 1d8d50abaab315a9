//! Ranks that do the same at the same time, and one of each.

use crate::network::flow::{FlowError, Folded};
use paceline_plan::ids::{OpId, Rank, RoleId};
use paceline_plan::program::Plan;

/// The classes of a plan's ranks. The ops of all classes are numbered through, class after class.
pub(super) struct Classes {
    pub(super) all: Vec<Class>,
    /// By rank.
    pub(super) of_rank: Vec<u32>,
    /// How many ops the classes have together.
    pub(super) ops: u32,
}

/// One rank of a class, which stands for all.
#[derive(Clone, Copy)]
pub(super) struct Class {
    pub(super) rank: Rank,
    pub(super) role: RoleId,
    /// The number of its first op.
    pub(super) first: u32,
}

/// More ops than fit into memory with all that is known about them.
const MAX_OPS: u64 = 1 << 26;

impl Classes {
    pub(super) fn new(plan: &Plan, folded: &Folded) -> Result<Self, FlowError> {
        let mut all: Vec<Class> = Vec::new();
        let mut first = 0u64;
        for (rank, &class) in folded.ranks.iter().enumerate() {
            // Classes are counted as they first appear.
            if class as usize == all.len() {
                let rank = Rank::from(rank);
                let role = plan.role(rank);
                all.push(Class { rank, role, first: first as u32 });
                first += plan.programs[role.index()].body.nodes.len() as u64;
                if first > MAX_OPS {
                    return Err(FlowError::TooManyMessages);
                }
            }
        }
        Ok(Self { all, of_rank: folded.ranks.clone(), ops: first as u32 })
    }

    /// The number of a class's op.
    pub(super) fn number(&self, class: u32, op: OpId) -> u32 {
        self.all[class as usize].first + op.0
    }

    /// The class and op of a number.
    pub(super) fn op(&self, number: u32) -> (Class, OpId) {
        // Classes without ops start where the next one does.
        let after = self.all.partition_point(|class| class.first <= number);
        let class = self.all[after - 1];
        (class, OpId(number - class.first))
    }
}
