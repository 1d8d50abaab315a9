//! Gradient norm, used for clipping and reporting.

use super::bucket::{dense_norm_entries, norm_entries};
use super::bucket_plan::BucketPlan;
use super::role::RoleIr;
use crate::collective::{CollectiveKind, Reduction};
use crate::dtype::DType;
use crate::graph::{BLOCK, OpKind, OpPass};
use crate::ids::{BufferId, Microbatch, OpId, SegmentId};
use crate::mesh::{Axis, GroupKind};
use crate::program::{
    Access, ComputePass, LocalOp, MemoryKind, Op, Operand, Segment, Template, View,
};
use std::ops::Range;

impl RoleIr<'_> {
    /// Computes the gradient norm: sums of squares per block, per tensor, over all tensors. Blocks
    /// of other ranks count as zero until a sum along each axis fills them in. The result is
    /// bitwise identical for every sharding of the gradient. Returns the ops that the step must
    /// wait for.
    pub(super) fn norm(&mut self) -> Vec<OpId> {
        let counted = self.buckets.iter().filter(|b| !b.shape.tables);
        let blocks: u64 = counted.map(|b| b.shape.elements / BLOCK).sum();
        let entries = u64::from(norm_entries(&self.context.graph));
        let block_sums = self.norm_buffer("norm.blocks", blocks);
        let tensor_sums = self.norm_buffer("norm.tensors", entries);
        let total = self.norm_buffer("norm", 1);
        self.outputs.norm = Some(total);

        let mut offset = 0;
        let (mut after, mut uncounted) = (Vec::new(), Vec::new());
        for bucket in 0..self.buckets.len() {
            let state = &self.buckets[bucket];
            let ready: Vec<OpId> = state.ready.into_iter().chain(state.ready_warming_up).collect();
            // Tables are the last bucket. Only networks are clipped, but the step of tables waits
            // as well.
            if state.shape.tables {
                uncounted = ready;
                continue;
            }
            let (grads, holders) = (state.step_grads, self.dealt_among(state));
            let len = state.shape.elements / BLOCK;
            let sums = View { buffer: block_sums, offset, len };
            let parts = holders.map_or(1, |group| self.context.mesh.group_size(group));
            let experts = state.shape.experts;
            self.small(OpKind::BlockSquares { parts, experts }, grads, sums, &ready);
            offset += len;
        }
        let all_blocks = self.whole(block_sums);
        for (group, blocks) in self.dealt() {
            let (offset, len) = (blocks.start, blocks.end - blocks.start);
            after = self.sum("norm.blocks", group, View { offset, len, ..all_blocks });
        }
        let tensors = self.whole(tensor_sums);
        self.small(OpKind::TensorSquares, all_blocks, tensors, &after);
        after.clear();
        let dense = u64::from(dense_norm_entries(&self.context.graph));
        let experts = View { offset: dense, len: entries - dense, ..tensors };
        let parts = [(Axis::Tp, View { len: dense, ..tensors })];
        let separate = [(Axis::Ep, experts), (Axis::Etp, experts)];
        // Stages that do not wait for each other clip by the norms of their own gradients.
        let flushes = self.context.strategy.schedule.flushes();
        let stages = flushes.then_some((Axis::Pp, tensors));
        for (axis, view) in parts.into_iter().chain(separate).chain(stages) {
            if self.context.mesh.axis(axis) > 1 && view.len > 0 {
                after = self.sum("norm.tensors", GroupKind::Axis(axis), view);
            }
        }
        let total = self.whole(total);
        after.append(&mut uncounted);
        vec![self.small(OpKind::Norm2, tensors, total, &after)]
    }

    /// Buffer of the norm, declared on first use: local SGD needs it several times.
    fn norm_buffer(&mut self, name: &str, elements: u64) -> BufferId {
        match self.buffers.iter().position(|buffer| buffer.name == name) {
            Some(at) => BufferId::from(at),
            None => {
                let kind = MemoryKind::Communication;
                self.buffer(name.into(), DType::F32, elements, 1, kind)
            }
        }
    }

    /// Ranges of blocks, over all buckets but tables, sharded among the same group: dense
    /// parameters and experts.
    pub(super) fn dealt(&self) -> Vec<(GroupKind, Range<u64>)> {
        let mut runs: Vec<(GroupKind, Range<u64>)> = Vec::new();
        let mut offset = 0;
        for state in self.buckets.iter().filter(|b| !b.shape.tables) {
            let end = offset + state.shape.elements / BLOCK;
            match (self.dealt_among(state), runs.last_mut()) {
                (Some(group), Some((last, run))) if group == *last && run.end == offset => {
                    run.end = end;
                }
                (Some(group), _) => runs.push((group, offset..end)),
                (None, _) => {}
            }
            offset = end;
        }
        runs
    }

    /// Group among which a bucket's gradients are sharded at the step, if they are.
    fn dealt_among(&self, state: &BucketPlan) -> Option<GroupKind> {
        state.optimizer.shard.map(|group| self.context.groups[group.index()])
    }

    /// Adds a small all_reduce on the control lane.
    pub(super) fn sum(&mut self, name: &str, group: GroupKind, view: View) -> Vec<OpId> {
        let call = self.call(name, CollectiveKind::AllReduce, Reduction::Sum, group, view, view, 1);
        let after: Vec<OpId> = self.walk.last_compute.into_iter().collect();
        let lane = self.lane("control");
        vec![self.body.push(lane, Op::Collective { call, microbatch: Microbatch(0) }, &after)]
    }

    /// Adds a segment of one operator of the update.
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

/// Template of an operator of the update.
pub(super) fn update_template(kind: OpKind, input: (u64, DType), output: (u64, DType)) -> Template {
    let operand = |(len, dtype): (u64, DType), access| Operand { dims: [1, len], dtype, access };
    Template {
        name: format!("U.{}", kind.name()),
        pass: ComputePass::Update,
        operands: vec![operand(input, Access::Read), operand(output, Access::Write)],
        ops: vec![LocalOp {
            kind,
            pass: OpPass::Forward,
            inputs: vec![0],
            params: Vec::new(),
            outputs: vec![1],
        }],
    }
}
