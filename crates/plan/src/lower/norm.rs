//! The gradient's norm, which clipping needs and people want to see.

use super::bucket::norm_entries;
use super::role::Role;
use crate::collective::{CollectiveKind, Reduction};
use crate::dtype::DType;
use crate::graph::{BLOCK, OpKind, Part};
use crate::ids::{Microbatch, OpId, SegmentId};
use crate::mesh::{Axis, GroupKind};
use crate::program::{
    Access, LocalOp, MemoryKind, Op, Operand, Segment, SegmentPass, Template, View,
};

impl Role<'_> {
    /// The gradient's norm: sums of squares per block, per tensor, over all tensors. Blocks that other
    /// ranks hold count as zero until a sum along each axis fills them in, so that the result has the
    /// same bits however the gradient is dealt out. Returns what the step must wait for.
    pub(super) fn norm(&mut self) -> Vec<OpId> {
        let parts =
            self.buckets.first().and_then(|b| b.shard).map_or(1, |_| self.context.mesh.replicas());
        let blocks: u64 = self.buckets.iter().map(|b| b.shape.elements / BLOCK).sum();
        let entries = u64::from(norm_entries(&self.context.graph));
        let block_sums =
            self.buffer("norm.blocks".into(), DType::F32, blocks, 1, MemoryKind::Communication);
        let tensor_sums =
            self.buffer("norm.tensors".into(), DType::F32, entries, 1, MemoryKind::Communication);
        let total = self.buffer("norm".into(), DType::F32, 1, 1, MemoryKind::Communication);
        self.outputs.norm = Some(total);

        let mut offset = 0;
        for bucket in 0..self.buckets.len() {
            let (grads, ready) = (self.buckets[bucket].step_grads, self.buckets[bucket].ready);
            let len = self.buckets[bucket].shape.elements / BLOCK;
            let sums = View { buffer: block_sums, offset, len };
            let after: Vec<OpId> = ready.into_iter().collect();
            self.small(OpKind::BlockSquares { parts }, grads, sums, &after);
            offset += len;
        }
        let all_blocks = self.whole(block_sums);
        let mut after = Vec::new();
        if parts > 1 {
            after = self.sum("norm.blocks", GroupKind::Replicas, all_blocks);
        }
        let tensors = self.whole(tensor_sums);
        self.small(OpKind::TensorSquares, all_blocks, tensors, &after);
        after.clear();
        // Stages that do not wait for each other clip by their own gradients' norms.
        let flushes = self.context.strategy.schedule.flushes();
        for axis in [Axis::Tp, Axis::Pp] {
            if self.context.mesh.axis(axis) > 1 && (axis == Axis::Tp || flushes) {
                after = self.sum("norm.tensors", GroupKind::Axis(axis), tensors);
            }
        }
        let total = self.whole(total);
        vec![self.small(OpKind::Norm2, tensors, total, &after)]
    }

    /// A small all_reduce on the control lane.
    pub(super) fn sum(&mut self, name: &str, group: GroupKind, view: View) -> Vec<OpId> {
        let call = self.call(name, CollectiveKind::AllReduce, Reduction::Sum, group, view, view, 1);
        let after: Vec<OpId> = self.last_compute.into_iter().collect();
        let lane = self.lane("control");
        vec![self.body.push(lane, Op::Collective { call, microbatch: Microbatch(0) }, &after)]
    }

    /// A segment of one operator around the step.
    pub(super) fn small(
        &mut self,
        kind: OpKind,
        input: View,
        output: View,
        after: &[OpId],
    ) -> OpId {
        let dtype = |v: View| self.buffers[v.buffer.index()].dtype;
        let template =
            update_template(kind, (input.len, dtype(input)), (output.len, dtype(output)));
        let template = self.context.template(template);
        self.segments.push(Segment { template, layer: None, operands: vec![input, output] });
        let segment = SegmentId::from(self.segments.len() - 1);
        self.compute(Op::Compute { segment, microbatch: Microbatch(0), fresh: true }, after)
    }
}

/// The template of an operator around the step.
pub(super) fn update_template(kind: OpKind, input: (u64, DType), output: (u64, DType)) -> Template {
    let operand = |(len, dtype): (u64, DType), access| Operand { dims: [1, len], dtype, access };
    Template {
        name: format!("U.{}", kind.name()),
        pass: SegmentPass::Update,
        operands: vec![operand(input, Access::Read), operand(output, Access::Write)],
        ops: vec![LocalOp {
            kind,
            part: Part::Forward,
            inputs: vec![0],
            params: Vec::new(),
            outputs: vec![1],
        }],
    }
}
