//! Runs the bodies of all roles against each other and says when every op starts and ends.
//!
//! **Folding.** All ranks of a role run one program and, here, take the same time for it, so one of
//! them is simulated for all: as many as there are roles, whatever the world. A message between
//! ranks of one role meets the role's own counterpart; a server's messages to all ranks of a role
//! meet the one op that stands for them, which lasts until the last is through.
//!
//! **Time.** An op is *posted* when the op before it on its lane and those in its `after` list have
//! ended. It starts then, unless it meets others: a message starts when both sides are posted and a
//! collective across roles when all are. Posting and ending are the only events, and an op's times
//! depend on nothing but those of ops that ended before, so a worklist of lanes finds them in any
//! order: no queue of events, and the same result whatever the order.
//!
//! **Measured hosts.** Where ranks share cores, an op's time depends on what runs beside it, so the
//! run is repeated until the two agree (`sharing`).
//!
//! The body is run once, from a standing start. No plan leaves ops in flight into the next
//! iteration yet; one that does is timed as if the next iteration waited for them.

mod ahead;
mod beside;
mod costs;
pub mod flow;
mod lanes;
mod measured;
mod meetings;
mod reuse;
mod sharing;

pub use ahead::ahead;
pub use costs::Costs;
pub(crate) use costs::vector;
pub use lanes::Timeline;
pub(crate) use meetings::Meetings;

use crate::error::SimError;
use crate::network::Network;
use paceline_plan::ids::{OpId, RoleId};
use paceline_plan::program::Plan;
use paceline_plan::validate::describe;

/// When every op of every role's body starts and ends.
///
/// The plan must be one that validation passes: names that lead nowhere are not looked for again.
pub fn run(plan: &Plan, costs: &Costs<'_>, network: &dyn Network) -> Result<Timeline, SimError> {
    let ops = Numbering::new(plan);
    let meetings = meetings::find(plan, &ops, costs, network)?;
    let mut timeline = lanes::run(plan, ops, &meetings, costs)?;
    let Some(host) = costs.shared_host() else { return Ok(timeline) };
    // Each pass follows what the one before found beside each op; the first few settle it.
    let mut costs = costs.clone();
    for _ in 0..SETTLING {
        costs.stretch(sharing::stretches(plan, &costs, &timeline, host));
        let ops = Numbering::new(plan);
        let meetings = meetings::find(plan, &ops, &costs, network)?;
        timeline = lanes::run(plan, ops, &meetings, &costs)?;
    }
    Ok(timeline)
}

/// Passes after which durations and what runs beside them agree to a percent or so.
const SETTLING: u32 = 6;

/// Who meets whom in [`run`], for those who ask why an op started when it did.
pub(crate) fn meetings(
    plan: &Plan,
    costs: &Costs<'_>,
    network: &dyn Network,
) -> Result<Meetings, SimError> {
    meetings::find(plan, &Numbering::new(plan), costs, network)
}

/// Numbers the ops of all roles' bodies through.
#[derive(Clone, Debug)]
pub(crate) struct Numbering {
    /// The number of each role's first op, and at the end that of all ops.
    first: Vec<u32>,
}

impl Numbering {
    fn new(plan: &Plan) -> Self {
        let mut first = vec![0u32];
        for program in &plan.programs {
            let last = first.last().copied().unwrap_or(0);
            first.push(last.saturating_add(program.body.nodes.len() as u32));
        }
        Self { first }
    }

    /// How many ops there are.
    fn len(&self) -> usize {
        self.first.last().map_or(0, |&all| all as usize)
    }

    /// The number of a role's op.
    pub(crate) fn number(&self, role: RoleId, op: OpId) -> u32 {
        self.first[role.index()] + op.0
    }

    /// The role and op of a number.
    fn op(&self, number: u32) -> (RoleId, OpId) {
        let role = self.first.partition_point(|&first| first <= number) - 1;
        (RoleId(role as u32), OpId(number - self.first[role]))
    }
}

/// An op's place and words, for errors.
fn describe_op(plan: &Plan, role: RoleId, op: OpId) -> String {
    let program = &plan.programs[role.index()];
    describe(plan, program, &program.body.nodes[op.index()].op)
}

#[cfg(test)]
mod tests;
