//! Replicas that train apart: each makes several updates of its own in an iteration, and then all compare how
//! far they have moved since the last time (see [`crate::outer`]). Where that is compressed, what compression loses
//! is added to the next comparison: with one update in an iteration, each replica's own step of Adam goes over
//! the wires instead of its gradient, as in Chen et al. (arXiv 2004.14180), and second moments
//! see gradients as they were.

use super::bucket::BucketShape;
use super::role::Role;
use crate::collective::{CollectiveKind, Reduction};
use crate::dtype::DType;
use crate::graph::{BLOCK, OpKind, Part};
use crate::ids::{CallId, LaneId, Microbatch, OpId, SegmentId};
use crate::mesh::GroupKind;
use crate::outer::{Outer, OuterOp};
use crate::program::{
    Access, AccumulateMode, LocalOp, MemoryKind, Op, Operand, Segment, SegmentPass, StepPhase,
    Template, View,
};

/// What the comparison of a bucket's weights needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Comparison {
    /// Among how many.
    replicas: u32,
    /// The weights at the last one.
    anchor: View,
    velocity: Option<View>,
    /// The rate of the step that all take, and how much of the velocity it keeps.
    rule: (f64, f64),
    /// How far the weights have moved, and then the sum of that.
    pub(super) moved: View,
    /// How that is summed, unless it is compressed.
    sum: Option<CallId>,
}

impl Role<'_> {
    /// Declares the comparison of a bucket, if replicas train apart.
    pub(super) fn declare_comparison(
        &mut self,
        shape: &BucketShape,
        holders: GroupKind,
        compressed: bool,
    ) -> Option<Comparison> {
        let outer = self.context.strategy.local?.outer;
        let (name, elements) = (&shape.name, shape.elements);
        // Running averages stay averages; with momentum, a variance could end below zero.
        let rule = if shape.averages { Outer::Average } else { outer }.rule();
        let mut state = |what: &str, kind| {
            let buffer = self.buffer(format!("{name}.{what}"), DType::F32, elements, 1, kind);
            self.whole(buffer)
        };
        let anchor = state("anchor", MemoryKind::Optimizer);
        let velocity = (rule.1 > 0.0).then(|| state("velocity", MemoryKind::Optimizer));
        let moved = state("moved", MemoryKind::Communication);
        let (kind, sum) = (CollectiveKind::AllReduce, Reduction::Sum);
        let name = format!("{name}.moved");
        let sum = (!compressed).then(|| self.call(&name, kind, sum, holders, moved, moved, BLOCK));
        let replicas = self.context.mesh.group_size(holders);
        Some(Comparison { replicas, anchor, velocity, rule, moved, sum })
    }

    /// Writes what must have happened before the first iteration: replicas set out from the first weights.
    pub(super) fn set_out(&mut self) {
        for bucket in 0..self.buckets.len() {
            if let Some(comparison) = self.buckets[bucket].comparison {
                let (from, into) = (self.buckets[bucket].params, comparison.anchor);
                let op = Op::Accumulate { from, into, mode: AccumulateMode::Move };
                self.prologue.push(LaneId(0), op, &[]);
            }
        }
    }

    /// Microbatches of one update of a replica's own.
    pub(super) fn apart(&self) -> Option<usize> {
        let strategy = &self.context.strategy;
        let steps = strategy.local?.steps.max(1);
        Some((strategy.microbatches() / steps).max(1) as usize)
    }

    /// Updates this replica's weights by its own gradients, if this microbatch is the last of an update.
    pub(super) fn update_apart(&mut self, k: usize) {
        if self.apart().is_none_or(|size| k % size != size - 1) {
            return;
        }
        let known = self.norm();
        for bucket in 0..self.buckets.len() {
            let op = Op::Step { bucket: bucket as u32, phase: StepPhase::Apply };
            self.compute(op, &known);
        }
    }

    /// Compares how far replicas have moved, and moves all to the same weights.
    pub(super) fn compare(&mut self) {
        let mut summed = Vec::new();
        for bucket in 0..self.buckets.len() {
            let Some(comparison) = self.buckets[bucket].comparison else { continue };
            let Comparison { anchor, moved, sum, .. } = comparison;
            let params = self.buckets[bucket].params;
            let op = self.outer_op(OuterOp::Difference, &[params, anchor], &[moved]);
            let done = self.compute(op, &[]);
            let sum = sum.map(|call| {
                let lane = self.lane("reduce");
                let op = Op::Collective { call, microbatch: Microbatch(0) };
                self.body.push(lane, op, &[done])
            });
            if let Some(compressed) = self.buckets[bucket].compressed {
                self.decompress();
                self.compress(bucket, compressed, &[done]);
            }
            summed.push((bucket, params, comparison, sum));
        }
        self.decompress_all();
        for (bucket, params, comparison, sum) in summed {
            let sum: Vec<OpId> = sum.into_iter().chain(self.buckets[bucket].ready).collect();
            let Comparison { replicas, anchor, velocity, rule: (rate, momentum), moved, .. } =
                comparison;
            let inputs: Vec<View> = [moved, anchor].into_iter().chain(velocity).collect();
            let outputs: Vec<View> = [params, anchor].into_iter().chain(velocity).collect();
            let op = self.outer_op(OuterOp::Step { replicas, rate, momentum }, &inputs, &outputs);
            self.compute(op, &sum);
        }
    }

    /// A segment of one operator of a comparison.
    fn outer_op(&mut self, op: OuterOp, inputs: &[View], outputs: &[View]) -> Op {
        let segment = self.update_segment(OpKind::Outer(op), inputs, outputs);
        Op::Compute { segment, microbatch: Microbatch(0), fresh: true }
    }

    /// A segment of one operator around the step, with any number of operands.
    pub(super) fn update_segment(
        &mut self,
        kind: OpKind,
        inputs: &[View],
        outputs: &[View],
    ) -> SegmentId {
        let operand = |view: &View, access| Operand {
            dims: [1, view.len],
            dtype: self.buffers[view.buffer.index()].dtype,
            access,
        };
        let read = inputs.iter().map(|view| operand(view, Access::Read));
        let written = outputs.iter().map(|view| operand(view, Access::Write));
        let (first, end) = (inputs.len() as u16, (inputs.len() + outputs.len()) as u16);
        let template = Template {
            name: format!("U.{}", kind.name()),
            pass: SegmentPass::Update,
            operands: read.chain(written).collect(),
            ops: vec![LocalOp {
                kind,
                part: Part::Forward,
                inputs: (0..first).collect(),
                params: Vec::new(),
                outputs: (first..end).collect(),
            }],
        };
        let template = self.context.template(template);
        let operands = inputs.iter().chain(outputs).copied().collect();
        self.segments.push(Segment { template, layer: None, operands });
        SegmentId::from(self.segments.len() - 1)
    }
}
