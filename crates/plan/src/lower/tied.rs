//! Table shared by the embedding and the head: location of its uses, and summation of their
//! gradients.
//!
//! The uses of a tied table are summed per leaf, before the tree over leaves, wherever they are, so
//! that the sum is bitwise identical in every layout.

use super::bucket::BucketShape;
use super::bucket_plan::BucketPlan;
use super::role::RoleIr;
use super::slots::Point;
use crate::collective::{CollectiveKind, Reduction};
use crate::graph::BLOCK;
use crate::ids::{CallId, Microbatch, OpId, Stage};
use crate::mesh::GroupKind;
use crate::program::{AccumulateMode, MemoryKind, Op, View};
use std::ops::Range;

/// Location of the uses of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Uses {
    /// On one stage, or there is only one use.
    OneStage,
    /// On two virtual stages of one rank. Both run ahead of each other, so their gradients are kept
    /// by leaf and summed at the end of the iteration.
    Stages,
    /// On two ranks. Their gradients are summed at the end of the iteration, when neither rank
    /// delays the other.
    Ranks,
}

/// Gradients of the uses of a table.
pub(super) struct TiedTable {
    pub(super) uses: Uses,
    /// Gradients by leaf, if the uses are separate and there are several leaves. Each has the call
    /// that adds the other use's gradients, if that use is on another rank.
    leaves: Vec<(View, Option<CallId>)>,
    /// Gradients over microbatches, if the uses are separate and the table therefore cannot be
    /// reduced per microbatch.
    pub(super) total: Option<View>,
    /// Call that adds the gradients of the other use, if it is on another rank.
    pub(super) sum: Option<CallId>,
    /// The second use, if it is on the same rank.
    pub(super) second: Option<SecondUse>,
}

/// Gradients of the second use of a table on the same rank.
pub(super) struct SecondUse {
    pub(super) grads: View,
    leaves: Vec<View>,
    total: Option<View>,
}

/// Sums the uses of a tied table.
pub(super) fn pass(ir: &mut RoleIr<'_>, point: Point<'_>) {
    match point {
        Point::GradientsDone(turn) => ir.tied_done(&turn.layers(), turn.k()),
        Point::Reduce => {
            for bucket in 0..ir.buckets.len() {
                if ir.buckets[bucket].uses() != Uses::OneStage {
                    ir.finish_separate_uses(bucket);
                }
            }
        }
        _ => {}
    }
}

impl RoleIr<'_> {
    /// Location of the uses of a tied table: the embedding on the first stage, the head on the
    /// last.
    pub(super) fn uses(&self) -> Uses {
        let stages = self.context.stages.len();
        let rank = |stage: usize| {
            let (schedule, pp) = (self.context.strategy.schedule, self.context.strategy.pp as u16);
            schedule.rank_of(Stage::from(stage), pp)
        };
        match rank(0) == rank(stages - 1) {
            true if stages == 1 => Uses::OneStage,
            true => Uses::Stages,
            false => Uses::Ranks,
        }
    }

    /// Declares the sum over microbatches of a table with separate uses, if its gradients are
    /// otherwise reduced per microbatch.
    pub(super) fn declare_tied(&mut self, shape: &BucketShape, per_microbatch: bool) -> TiedTable {
        let uses = self.uses();
        let total = (uses != Uses::OneStage && per_microbatch).then(|| {
            let (dtype, kind) = (self.context.strategy.grad_dtype, MemoryKind::Gradients);
            self.view(format!("{}.grad.total", shape.name), dtype, shape.elements, kind)
        });
        TiedTable { uses, leaves: Vec::new(), total, sum: None, second: None }
    }

    /// Declares the gradients by leaf of a table with separate uses.
    pub(super) fn declare_tied_leaves(&mut self, shape: &BucketShape, tied: &mut TiedTable) {
        let leaves = self.kept_leaves();
        if tied.uses == Uses::OneStage || leaves == 1 {
            return;
        }
        let views: Vec<View> = (0..leaves).map(|leaf| self.leaf_view(shape, leaf)).collect();
        for view in views {
            let call = (tied.uses == Uses::Ranks).then(|| self.tied_call(&shape.name, view));
            tied.leaves.push((view, call));
        }
    }

    /// Declares the head's use of a table that this rank also holds for the embedding. The bucket
    /// stays with the embedding, whose backward pass comes last.
    pub(super) fn declare_second_use(&mut self, at: usize, shape: &BucketShape) {
        let dtype = self.context.strategy.grad_dtype;
        let known = self.buckets[at].tied.as_ref();
        let leaves = known.map_or(0, |tied| tied.leaves.len());
        let total = known.is_some_and(|tied| tied.total.is_some());
        let mut view = |what: &str| {
            let name = format!("{}.second_use.{what}", shape.name);
            self.view(name, dtype, shape.elements, MemoryKind::Gradients)
        };
        let second = SecondUse {
            grads: view("grad"),
            leaves: (0..leaves).map(|leaf| view(&format!("leaf{leaf}"))).collect(),
            total: total.then(|| view("grad.total")),
        };
        let state = &mut self.buckets[at];
        if let Some(tied) = &mut state.tied {
            tied.second = Some(second);
        }
        if shape.layers.start < state.shape.layers.start {
            state.shape = shape.clone();
        }
    }

    /// Declares the sum of a tied table's gradients on the first and the last stage.
    pub(super) fn tied_call(&mut self, name: &str, view: View) -> CallId {
        let (kind, sum) = (CollectiveKind::AllReduce, Reduction::Sum);
        self.call(&format!("{name}.grad"), kind, sum, GroupKind::Ends, view, view, BLOCK)
    }

    /// After a microbatch's gradients of a virtual stage are computed.
    fn tied_done(&mut self, layers: &Range<usize>, k: usize) {
        for bucket in 0..self.buckets.len() {
            let state = &self.buckets[bucket];
            let first = layers.contains(&state.shape.layers.start);
            if !state.shape.tied {
                continue;
            }
            if state.uses() != Uses::OneStage {
                self.keep_leaf(bucket, k, first, layers);
            } else if first {
                self.sum_uses(bucket, k);
                self.leaf_done(bucket, k);
                self.reduce_if_due(bucket, k);
            }
        }
    }

    /// Saves a stage's gradients of a table with separate uses until the end of the iteration.
    fn keep_leaf(&mut self, bucket: usize, k: usize, first: bool, layers: &Range<usize>) {
        let head = self.context.graph.layers.len() - 1;
        let BucketPlan { tied: Some(tied), grads, .. } = &self.buckets[bucket] else { return };
        let second = tied.second.as_ref().filter(|_| !first && layers.contains(&head));
        let (from, total, leaves) = match second {
            Some(second) => (second.grads, second.total, second.leaves.clone()),
            None if first => {
                (*grads, tied.total, tied.leaves.iter().map(|&(view, _)| view).collect())
            }
            None => return,
        };
        if let Some(into) = total {
            let mode = if k == 0 { AccumulateMode::Move } else { AccumulateMode::Add };
            self.compute(Op::Accumulate { from, into, mode }, &[]);
        } else if let Some(leaf) = self.leaf(k)
            && let Some(&into) = leaves.get(leaf as usize)
        {
            let mode = AccumulateMode::Move;
            self.compute(Op::Accumulate { from, into, mode }, &[]);
        }
    }

    /// Adds the other use's gradients leaf by leaf, joins the leaves in the balanced tree, and reduces.
    fn finish_separate_uses(&mut self, bucket: usize) {
        let Some(tied) = &self.buckets[bucket].tied else { return };
        let leaves: Vec<View> = tied.leaves.iter().map(|&(view, _)| view).collect();
        let mut summed = match tied.uses {
            Uses::Ranks => self.add_from_other_rank(bucket),
            Uses::Stages | Uses::OneStage => {
                self.add_from_other_stage(bucket);
                Vec::new()
            }
        };
        self.buckets[bucket].ready = summed.first().copied();
        let mut step = 1;
        while step < leaves.len() {
            for left in (0..leaves.len()).step_by(2 * step) {
                let (into, from) = (leaves[left], leaves[left + step]);
                let mode = AccumulateMode::Add;
                self.compute(Op::Accumulate { from, into, mode }, &summed);
                summed.clear();
            }
            step *= 2;
        }
        if let Some(&from) = leaves.first() {
            let into = self.buckets[bucket].grads;
            self.compute(Op::Accumulate { from, into, mode: AccumulateMode::Move }, &[]);
        }
        self.reduce(bucket, self.last_microbatch());
    }

    fn add_from_other_rank(&mut self, bucket: usize) -> Vec<OpId> {
        let Some(tied) = &self.buckets[bucket].tied else { return Vec::new() };
        let mut calls: Vec<CallId> = tied.leaves.iter().filter_map(|&(_, call)| call).collect();
        if calls.is_empty() {
            calls.extend(tied.sum);
        }
        let lane = self.lane("tied");
        let mut summed = Vec::new();
        for call in calls {
            let after: Vec<OpId> = self.walk.last_compute.into_iter().collect();
            let op = Op::Collective { call, microbatch: Microbatch(0) };
            summed = vec![self.body.push(lane, op, &after)];
        }
        summed
    }

    fn add_from_other_stage(&mut self, bucket: usize) {
        let BucketPlan { tied: Some(tied), grads, .. } = &self.buckets[bucket] else { return };
        let Some(second) = &tied.second else { return };
        let mut pairs: Vec<(View, View)> = second
            .leaves
            .iter()
            .zip(&tied.leaves)
            .map(|(&from, &(into, _))| (from, into))
            .collect();
        if pairs.is_empty() {
            pairs.push((second.total.unwrap_or(second.grads), tied.total.unwrap_or(*grads)));
        }
        for (from, into) in pairs {
            self.compute(Op::Accumulate { from, into, mode: AccumulateMode::Add }, &[]);
        }
    }

    /// Adds the gradients of both uses of a tied table on one stage, leaf by leaf.
    fn sum_uses(&mut self, bucket: usize, k: usize) {
        if self.leaf(k).is_none() && !self.transient_gradients() {
            return;
        }
        let BucketPlan { tied: Some(tied), grads: into, .. } = &self.buckets[bucket] else {
            return;
        };
        if let Some(SecondUse { grads: from, .. }) = &tied.second {
            let (from, into) = (*from, *into);
            self.compute(Op::Accumulate { from, into, mode: AccumulateMode::Add }, &[]);
        }
    }
}
