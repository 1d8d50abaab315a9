//! Table shared by the embedding and the head: location of its uses, and summation of their
//! gradients.
//!
//! The uses of a tied table are summed per leaf, before the tree over leaves, wherever they are, so
//! that the sum is bitwise identical in every layout.

use super::bucket::BucketShape;
use super::role::RoleBuilder;
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

impl RoleBuilder<'_> {
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

    /// Declares the head's use of a table that this rank also holds for the embedding. The bucket
    /// stays with the embedding, whose backward pass comes last.
    pub(super) fn declare_second_use(&mut self, at: usize, shape: &BucketShape) {
        let dtype = self.context.strategy.grad_dtype;
        let name = format!("{}.second_use", shape.name);
        let leaves = self.buckets[at].leaves.len();
        let total = self.buckets[at].total.is_some();
        let mut view = |what: &str| {
            let name = format!("{name}.{what}");
            let id = self.buffer(name, dtype, shape.elements, 1, MemoryKind::Gradients);
            self.whole(id)
        };
        let second_use = view("grad");
        let second_leaves = (0..leaves).map(|leaf| view(&format!("leaf{leaf}"))).collect();
        let second_total = total.then(|| view("grad.total"));
        let state = &mut self.buckets[at];
        state.second_use = Some(second_use);
        (state.second_leaves, state.second_total) = (second_leaves, second_total);
        if shape.layers.start < state.shape.layers.start {
            state.shape = shape.clone();
        }
    }

    /// Declares the sum of a tied table's gradients on the first and the last stage.
    pub(super) fn tied_call(&mut self, name: &str, view: View) -> CallId {
        let (kind, sum) = (CollectiveKind::AllReduce, Reduction::Sum);
        self.call(&format!("{name}.grad"), kind, sum, GroupKind::Ends, view, view, BLOCK)
    }

    /// Saves a stage's gradients of a table with separate uses until the end of the iteration.
    pub(super) fn keep_leaf(
        &mut self,
        bucket: usize,
        k: usize,
        first: bool,
        layers: &Range<usize>,
    ) {
        let state = &self.buckets[bucket];
        let head = self.context.graph.layers.len() - 1;
        let second = state.second_use.filter(|_| !first && layers.contains(&head));
        let (from, total, leaves) = match second {
            Some(from) => (from, state.second_total, state.second_leaves.clone()),
            None if first => {
                let leaves = state.leaves.iter().map(|&(view, _)| view).collect();
                (state.grads, state.total, leaves)
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
    pub(super) fn finish_separate_uses(&mut self, bucket: usize, last: usize) {
        let leaves = self.buckets[bucket].leaves.clone();
        let mut summed = match self.buckets[bucket].uses {
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
                let (into, from) = (leaves[left].0, leaves[left + step].0);
                let mode = AccumulateMode::Add;
                self.compute(Op::Accumulate { from, into, mode }, &summed);
                summed.clear();
            }
            step *= 2;
        }
        if let Some(&(from, _)) = leaves.first() {
            let into = self.buckets[bucket].grads;
            self.compute(Op::Accumulate { from, into, mode: AccumulateMode::Move }, &[]);
        }
        self.reduce(bucket, last);
    }

    fn add_from_other_rank(&mut self, bucket: usize) -> Vec<OpId> {
        let state = &self.buckets[bucket];
        let mut calls: Vec<CallId> = state.leaves.iter().filter_map(|&(_, call)| call).collect();
        if calls.is_empty() {
            calls.extend(state.tied_sum);
        }
        let lane = self.lane("tied");
        let mut summed = Vec::new();
        for call in calls {
            let after: Vec<OpId> = self.last_compute.into_iter().collect();
            let op = Op::Collective { call, microbatch: Microbatch(0) };
            summed = vec![self.body.push(lane, op, &after)];
        }
        summed
    }

    fn add_from_other_stage(&mut self, bucket: usize) {
        let state = &self.buckets[bucket];
        let mut pairs: Vec<(View, View)> = state
            .second_leaves
            .iter()
            .zip(&state.leaves)
            .map(|(&from, into)| (from, into.0))
            .collect();
        if pairs.is_empty() {
            let from = state.second_total.or(state.second_use);
            let into = state.total.unwrap_or(state.grads);
            pairs.extend(from.map(|from| (from, into)));
        }
        for (from, into) in pairs {
            self.compute(Op::Accumulate { from, into, mode: AccumulateMode::Add }, &[]);
        }
    }

    /// Adds the gradients of both uses of a tied table on one stage, leaf by leaf.
    pub(super) fn sum_uses(&mut self, bucket: usize, k: usize) {
        if self.leaf(k).is_none() && !self.transient_gradients() {
            return;
        }
        let state = &self.buckets[bucket];
        let into = state.grads;
        if let Some(from) = state.second_use {
            self.compute(Op::Accumulate { from, into, mode: AccumulateMode::Add }, &[]);
        }
    }
}
