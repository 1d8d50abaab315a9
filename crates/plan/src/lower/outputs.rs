//! Numbers that are reported: the loss, and the count of dropped tokens.

use super::role::RoleIr;
use super::slots::Point;
use crate::collective::{CollectiveKind, Reduction};
use crate::dtype::DType;
use crate::ids::{Microbatch, OpId};
use crate::mesh::GroupKind;
use crate::program::{MemoryKind, Op, View};
use crate::schedule::Pass;

/// Joins and reduces what is reported.
pub(super) fn pass(ir: &mut RoleIr<'_>, point: Point<'_>) {
    match point {
        Point::End(turn) if turn.pass == Pass::Forward => {
            ir.dropped_leaf_done(&turn.layers(), turn.k());
            if turn.end == ir.context.graph.layers.len() {
                ir.loss_leaf_done(turn.k());
            }
        }
        // An asynchronous replica reports only its own samples and does not wait for the others'.
        Point::Report if !ir.context.strategy.sync.is_async() => {
            ir.reduce_loss();
            ir.reduce_dropped();
        }
        _ => {}
    }
}

impl RoleIr<'_> {
    /// Declares the loss of the last stage.
    pub(super) fn declare_loss(&mut self) {
        let heads = self.heads().len() as u64;
        let loss = self.buffer("loss".into(), DType::F32, heads, 1, MemoryKind::Gradients);
        self.outputs.loss = Some(loss);
        let levels = self.context.strategy.local_leaves().trailing_zeros();
        self.loss_tree = (0..levels)
            .map(|level| {
                let name = format!("loss.leaf{level}");
                self.buffer(name, DType::F32, heads, 1, MemoryKind::Gradients)
            })
            .collect();
    }

    /// Layers with a loss, in order: the head, and those of multi-token prediction modules.
    fn heads(&self) -> Vec<usize> {
        let graph = &self.context.graph;
        (0..graph.layers.len()).filter(|&layer| graph.layer(layer.into()).has_loss()).collect()
    }

    /// Location of a layer's loss.
    pub(super) fn loss_place(&self, layer: usize) -> Option<View> {
        let offset = self.heads().iter().position(|&head| head == layer)? as u64;
        Some(View { buffer: self.outputs.loss?, offset, len: 1 })
    }

    /// Joins the losses of the leaf that just ended in the forward pass, if one did. The next
    /// leaf's forward passes may come before this one's backward passes.
    fn loss_leaf_done(&mut self, k: usize) {
        let (Some(leaf), Some(loss)) = (self.leaf(k), self.outputs.loss) else { return };
        let tree: Vec<View> = self.loss_tree.iter().map(|&level| self.whole(level)).collect();
        let view = self.whole(loss);
        self.join(leaf, view, &tree, &[]);
    }

    fn reduce_loss(&mut self) {
        let Some(loss) = self.outputs.loss.filter(|_| self.context.mesh.replicas() > 1) else {
            return;
        };
        let view = self.whole(loss);
        let call = self.call(
            "loss",
            CollectiveKind::AllReduce,
            Reduction::Sum,
            GroupKind::Replicas,
            view,
            view,
            1,
        );
        let after: Vec<OpId> = self.walk.last_compute.into_iter().collect();
        let lane = self.lane("control");
        self.body.push(lane, Op::Collective { call, microbatch: Microbatch(0) }, &after);
    }
}
