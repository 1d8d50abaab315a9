//! Serialises compute and communication if overlap is disabled.

use super::role::RoleIr;
use super::slots::Point;
use crate::ids::{CallId, OpId};
use crate::mesh::GroupKind;
use crate::program::{Op, Section};

/// Makes compute and collectives of the body alternate.
pub(super) fn pass(ir: &mut RoleIr<'_>, point: Point<'_>) {
    if let Point::Finish = point {
        ir.serialize_comm();
    }
}

impl RoleIr<'_> {
    /// Makes compute and collectives of the body alternate.
    ///
    /// All ranks of a group run the same ops in the same order, and all wait for the same ones
    /// here. Messages between stages are not serialised: a rank that waited for its message to be
    /// received could deadlock with a peer that does the same.
    fn serialize_comm(&mut self) {
        let body = std::mem::take(&mut self.body);
        let mut turns = Section::default();
        let (mut computed, mut exchanged) = (None, None);
        for (at, node) in body.nodes.iter().enumerate() {
            let mut after = body.after(OpId::from(at)).to_vec();
            let mut wait = |op: Option<OpId>| {
                after.extend(op.filter(|op| !after.contains(op)));
            };
            match node.op {
                Op::Collective { call, .. } if self.is_serialized(call) => {
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
            turns.push_filtered(node.filter, node.lane, node.op, &after);
        }
        self.body = turns;
    }

    /// Returns true if all members of a call's group are at the same position of the pipeline.
    fn is_serialized(&self, call: CallId) -> bool {
        match self.context.groups[self.calls[call.index()].group.index()] {
            GroupKind::Axis(_) | GroupKind::Replicas => true,
            GroupKind::Ends | GroupKind::Served(_) | GroupKind::Servers => false,
        }
    }
}
