//! Local SGD: each replica makes several updates of its own per iteration, then an outer step
//! synchronises all replicas by their pseudo-gradients (see [`crate::outer_optimizer`]). If
//! pseudo-gradients are compressed, error feedback adds the loss to the next outer step. With one
//! update per iteration, each replica's own Adam step is sent instead of its gradient, as in Chen
//! et al. (arXiv 2004.14180), and second moments use uncompressed gradients.

use super::bucket::BucketShape;
use super::bucket_plan::GradientSync;
use super::role::RoleIr;
use super::slots::Point;
use crate::collective::{CollectiveKind, Reduction};
use crate::dtype::DType;
use crate::graph::{BLOCK, OpKind, OpPass};
use crate::ids::{CallId, LaneId, Microbatch, OpId, SegmentId};
use crate::mesh::GroupKind;
use crate::outer_optimizer::{OuterOp, OuterOptimizer};
use crate::program::{
    Access, AccumulateMode, ComputePass, LocalOp, MemoryKind, Op, Operand, Segment, StepPhase,
    Template, View,
};

/// Outer step of a bucket's weights.
#[derive(Clone, Copy, Debug)]
pub(super) struct OuterStep {
    /// Number of replicas.
    replicas: u32,
    /// Weights after the last outer step.
    anchor: View,
    velocity: Option<View>,
    /// Learning rate and momentum of the outer step.
    rule: (f64, f64),
    /// Pseudo-gradient of this replica, later the sum over replicas.
    pub(super) pseudo_gradient: View,
    /// Call that sums the pseudo-gradients, unless they are compressed.
    sum: Option<CallId>,
}

/// Updates each replica on its own, then all of them together.
pub(super) fn pass(ir: &mut RoleIr<'_>, point: Point<'_>) {
    match point {
        Point::Start => ir.init_anchor(),
        Point::GradientsDone(turn) => ir.local_step(turn.k()),
        Point::Update => ir.outer_step(),
        _ => {}
    }
}

impl RoleIr<'_> {
    /// Declares the outer step of a bucket, if the strategy uses local SGD.
    pub(super) fn declare_outer_step(
        &mut self,
        shape: &BucketShape,
        holders: GroupKind,
        compressed: bool,
    ) -> Option<OuterStep> {
        let outer = self.context.strategy.local?.outer;
        let (name, elements) = (&shape.name, shape.elements);
        // Running averages must stay averages; with momentum, a variance could become negative.
        let rule = if shape.averages { OuterOptimizer::Average } else { outer }.rule();
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
        Some(OuterStep { replicas, anchor, velocity, rule, pseudo_gradient: moved, sum })
    }

    /// Adds the initialisation before the first iteration: the anchors are the initial weights.
    fn init_anchor(&mut self) {
        for bucket in 0..self.buckets.len() {
            if let Some(outer) = self.buckets[bucket].outer_step() {
                let (from, into) = (self.buckets[bucket].weights.stored(), outer.anchor);
                let op = Op::Accumulate { from, into, mode: AccumulateMode::Move };
                self.prologue.push(LaneId(0), op, &[]);
            }
        }
    }

    /// Number of microbatches per local step.
    pub(super) fn local_sgd_steps(&self) -> Option<usize> {
        let strategy = &self.context.strategy;
        let steps = strategy.local?.steps.max(1);
        Some((strategy.microbatches() / steps).max(1) as usize)
    }

    /// Updates this replica's weights with its own gradients, if microbatch `k` ends a local step.
    fn local_step(&mut self, k: usize) {
        if self.local_sgd_steps().is_none_or(|size| k % size != size - 1) {
            return;
        }
        for bucket in 0..self.buckets.len() {
            let after: Vec<OpId> = self.walk.last_compute.into_iter().collect();
            if let Some(summed) = self.sum_partial(bucket, k, &after) {
                self.buckets[bucket].ready = Some(summed);
            }
        }
        let known = self.norm();
        for bucket in 0..self.buckets.len() {
            let op = Op::Step { bucket: bucket as u32, phase: StepPhase::Apply };
            self.compute(op, &known);
        }
    }

    /// Sums the replicas' pseudo-gradients and moves all replicas to the same weights.
    fn outer_step(&mut self) {
        let mut summed = Vec::new();
        for bucket in 0..self.buckets.len() {
            let GradientSync::LocalSgd { outer, compressed } = self.buckets[bucket].sync else {
                continue;
            };
            let OuterStep { anchor, pseudo_gradient: moved, sum, .. } = outer;
            let params = self.buckets[bucket].weights.stored();
            let op = self.outer_op(OuterOp::PseudoGradient, &[params, anchor], &[moved]);
            let done = self.compute(op, &[]);
            let sum = sum.map(|call| {
                let lane = self.lane("reduce");
                let op = Op::Collective { call, microbatch: Microbatch(0) };
                self.body.push(lane, op, &[done])
            });
            if let Some(compressed) = compressed {
                self.decompress();
                self.compress(bucket, compressed, &[done]);
            }
            summed.push((bucket, params, outer, sum));
        }
        self.decompress_all();
        for (bucket, params, outer, sum) in summed {
            let sum: Vec<OpId> = sum.into_iter().chain(self.buckets[bucket].ready).collect();
            let OuterStep {
                replicas,
                anchor,
                velocity,
                rule: (rate, momentum),
                pseudo_gradient: moved,
                ..
            } = outer;
            let inputs: Vec<View> = [moved, anchor].into_iter().chain(velocity).collect();
            let outputs: Vec<View> = [params, anchor].into_iter().chain(velocity).collect();
            let op = self.outer_op(OuterOp::Step { replicas, rate, momentum }, &inputs, &outputs);
            self.compute(op, &sum);
        }
    }

    /// Builds a segment of one operator of the outer step.
    fn outer_op(&mut self, op: OuterOp, inputs: &[View], outputs: &[View]) -> Op {
        let segment = self.update_segment(OpKind::Outer(op), inputs, outputs);
        Op::Compute { segment, microbatch: Microbatch(0), fresh: true }
    }

    /// Adds a segment of one operator of the update, with any number of operands.
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
            pass: ComputePass::Update,
            operands: read.chain(written).collect(),
            ops: vec![LocalOp {
                kind,
                pass: OpPass::Forward,
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
