//! Without overlap, nothing is computed beside an exchange.

use super::role::Role;
use crate::ids::{CallId, OpId};
use crate::mesh::GroupKind;
use crate::program::{Op, Section};

impl Role<'_> {
    /// Makes computations and collectives of the body take turns, where the strategy wants no overlap.
    ///
    /// All ranks of a group run the same ops in the same order, and all wait for the same ones here. What
    /// goes from stage to stage stays free: whoever waited for its own message to be taken might wait for
    /// one who does the same.
    pub(super) fn keep_apart(&mut self) {
        if self.context.strategy.overlap {
            return;
        }
        let body = std::mem::take(&mut self.body);
        let mut turns = Section::default();
        let (mut computed, mut exchanged) = (None, None);
        for (at, node) in body.nodes.iter().enumerate() {
            let mut after = body.after(OpId::from(at)).to_vec();
            let mut wait = |op: Option<OpId>| {
                after.extend(op.filter(|op| !after.contains(op)));
            };
            match node.op {
                Op::Collective { call, .. } if self.takes_turns(call) => {
                    wait(computed);
                    exchanged = Some(OpId::from(at));
                }
                Op::Load { .. } | Op::Compute { .. } | Op::Accumulate { .. } | Op::Step { .. } => {
                    wait(exchanged);
                    computed = Some(OpId::from(at));
                }
                Op::Collective { .. }
                | Op::Send { .. }
                | Op::Recv { .. }
                | Op::Stash { .. }
                | Op::Restore { .. }
                | Op::Free { .. }
                | Op::Serve { .. } => {}
            }
            turns.push_in_turn(node.turn, node.lane, node.op, &after);
        }
        self.body = turns;
    }

    /// Whether the members of a call's group stand at the same place of the pipeline.
    fn takes_turns(&self, call: CallId) -> bool {
        match self.context.groups[self.calls[call.index()].group.index()] {
            GroupKind::Axis(_) | GroupKind::Replicas => true,
            GroupKind::Ends | GroupKind::Served(_) | GroupKind::Servers => false,
        }
    }
}
