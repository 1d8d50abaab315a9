//! Number of tokens dropped for lack of expert capacity; reported only, and summed like the loss.

use super::role::RoleIr;
use crate::collective::{CollectiveKind, Reduction};
use crate::dtype::DType;
use crate::graph::{OpKind, OpPass, TensorClass};
use crate::ids::{BufferId, Microbatch, OpId, SegmentId};
use crate::mesh::{Axis, GroupKind};
use crate::program::{
    Access, ComputePass, LocalOp, MemoryKind, Op, Operand, Segment, Template, View,
};
use std::ops::Range;

/// Buffers that count dropped tokens.
pub(super) struct Dropped {
    /// Layers of this rank that count, in order. Each has its own element in the buffers.
    layers: Vec<usize>,
    /// Counts of this rank, if any of its layers counts.
    here: Option<BufferId>,
    /// Sums of leaves that wait for their sibling in the tree.
    tree: Vec<BufferId>,
}

impl RoleIr<'_> {
    /// Declares the counts of the layers `mine`, if any layer of the model counts.
    pub(super) fn declare_dropped(&mut self, mine: impl Iterator<Item = usize>) {
        let counts = |kind: usize| {
            let values = &self.context.sharded[kind].values;
            values.iter().any(|value| value.class == TensorClass::Dropped)
        };
        if !(0..self.context.sharded.len()).any(counts) {
            return;
        }
        let layers: Vec<usize> =
            mine.filter(|&layer| counts(self.context.graph.layers[layer].kind)).collect();
        let (mut here, mut tree) = (None, Vec::new());
        if !layers.is_empty() {
            let len = layers.len() as u64;
            let mut buffer =
                |name: String| self.buffer(name, DType::F32, len, 1, MemoryKind::Gradients);
            here = Some(buffer("dropped".into()));
            for level in 0..self.context.strategy.local_leaves().trailing_zeros() {
                let name = format!("dropped.leaf{level}");
                tree.push(self.buffer(name, DType::F32, len, 1, MemoryKind::Gradients));
            }
        }
        let total =
            self.buffer("dropped.total".into(), DType::F32, 1, 1, MemoryKind::Communication);
        self.outputs.dropped = Some(total);
        self.dropped = Some(Dropped { layers, here, tree });
    }

    /// Location of a layer's count.
    pub(super) fn dropped_place(&self, layer: usize) -> Option<View> {
        let dropped = self.dropped.as_ref()?;
        let offset = dropped.layers.iter().position(|&known| known == layer)? as u64;
        Some(View { buffer: dropped.here?, offset, len: 1 })
    }

    /// Joins the counts of the leaf that just ended in the forward pass of `layers`, if one did.
    pub(super) fn dropped_leaf_done(&mut self, layers: &Range<usize>, k: usize) {
        let (Some(leaf), Some(dropped)) = (self.leaf(k), &self.dropped) else { return };
        let of_stage = |layer: &&usize| layers.contains(layer);
        let len = dropped.layers.iter().filter(of_stage).count() as u64;
        let Some(first) = dropped.layers.iter().position(|layer| layers.contains(layer)) else {
            return;
        };
        let part = |buffer: BufferId| View { buffer, offset: first as u64, len };
        let (here, tree) = (dropped.here.map(part), dropped.tree.iter().map(|&b| part(b)));
        let tree: Vec<View> = tree.collect();
        if let Some(here) = here {
            self.join(leaf, here, &tree, &[]);
        }
    }

    /// Sums the counts over this rank's layers and over all ranks that have their own tokens.
    pub(super) fn reduce_dropped(&mut self) {
        let (Some(dropped), Some(total)) = (&self.dropped, self.outputs.dropped) else { return };
        let (here, total) = (dropped.here.map(|here| self.whole(here)), self.whole(total));
        let operand =
            |view: View, access| Operand { dims: [1, view.len], dtype: DType::F32, access };
        let reads: Vec<u16> = here.iter().map(|_| 1).collect();
        let template = Template {
            name: "U.total".into(),
            pass: ComputePass::Update,
            operands: [operand(total, Access::Write)]
                .into_iter()
                .chain(here.map(|here| operand(here, Access::Read)))
                .collect(),
            ops: vec![LocalOp {
                kind: OpKind::Total,
                pass: OpPass::Forward,
                inputs: reads,
                params: Vec::new(),
                outputs: vec![0],
            }],
        };
        let template = self.context.template(template);
        let operands = [total].into_iter().chain(here).collect();
        self.segments.push(Segment { template, layer: None, operands });
        let segment = SegmentId::from(self.segments.len() - 1);
        let op = Op::Compute { segment, microbatch: Microbatch(0), fresh: true };
        let mut after: Vec<OpId> = vec![self.compute(op, &[])];

        let mesh = self.context.mesh;
        // Stages that do not wait for each other count separately.
        let flushes = self.context.strategy.schedule.flushes();
        let groups = [
            (GroupKind::Replicas, mesh.replicas()),
            (super::TENSOR, mesh.tp),
            (GroupKind::Axis(Axis::Pp), if flushes { mesh.pp } else { 1 }),
        ];
        for (group, _) in groups.into_iter().filter(|&(_, size)| size > 1) {
            let (kind, sum) = (CollectiveKind::AllReduce, Reduction::Sum);
            let call = self.call("dropped", kind, sum, group, total, total, 1);
            let lane = self.lane("control");
            let op = Op::Collective { call, microbatch: Microbatch(0) };
            after = vec![self.body.push(lane, op, &after)];
        }
    }
}
