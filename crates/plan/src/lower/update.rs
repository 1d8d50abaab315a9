//! From gradients to the next weights: summation within a replica, reduction among replicas, the
//! gradient norm, the optimizer step, and ZeRO's gathers.
//!
//! **Order of summation.** The microbatches of an iteration form leaves. Within a leaf, gradients
//! are accumulated in place, in data order. The leaves of a replica are joined like the bits of a
//! binary counter, which is the balanced tree; the reduction among replicas continues that tree.

use super::bucket_plan::{BucketPlan, GradientSync, Gradients, ReducedInto, Weights};
use super::role::RoleBuilder;
use super::tied::Uses;
use crate::collective::{CollectiveKind, Reduction};
use crate::dtype::DType;
use crate::ids::{Microbatch, OpId};
use crate::mesh::GroupKind;
use crate::program::{AccumulateMode, IterationFilter, MemoryKind, Op, Peer, StepPhase, View};
use crate::strategy::{Sync, Zero};
use std::ops::Range;

impl RoleBuilder<'_> {
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

    /// ZeRO-3: gathers a layer's weights, unless they are available.
    pub(super) fn gather(&mut self, layer: usize, after: &mut Vec<OpId>) {
        if self.context.strategy.zero != Zero::Parameters {
            return;
        }
        for bucket in self.buckets_of(layer) {
            let Weights::Gathered { whole, gather: call, present: false, .. } =
                self.buckets[bucket].weights
            else {
                continue;
            };
            // The buffer is free after the last compute op that read its contents.
            let mut free = None;
            for other in &mut self.buckets {
                if let Weights::Gathered { whole: home, present, used, .. } = &mut other.weights
                    && home.buffer == whole.buffer
                {
                    *present = false;
                    free = free.max(*used);
                }
            }
            let lane = self.lane("gather");
            let op = Op::Collective { call, microbatch: Microbatch(0) };
            after.push(self.body.push(lane, op, free.as_slice()));
            if let Weights::Gathered { present, .. } = &mut self.buckets[bucket].weights {
                *present = true;
            }
        }
    }

    /// Records that a layer's weights were just used.
    pub(super) fn used(&mut self, layer: usize) {
        if self.context.strategy.zero == Zero::Parameters {
            for bucket in self.buckets_of(layer) {
                if let Weights::Gathered { used, .. } = &mut self.buckets[bucket].weights {
                    *used = self.last_compute;
                }
            }
        }
    }

    /// Buckets from which a layer reads weights.
    pub(super) fn buckets_of(&self, layer: usize) -> Vec<usize> {
        let params = &self.context.graph.layer(layer.into()).params;
        let (reads_table, borrows) =
            (params.iter().any(|p| p.tied), params.iter().any(|p| p.borrowed));
        let head = self.context.graph.head();
        let holds = |b: &BucketPlan| match b.shape.tied {
            true => reads_table,
            false => {
                let layers = &b.shape.layers;
                layers.contains(&layer) || borrows && layers.contains(&head) && !b.shape.experts
            }
        };
        (0..self.buckets.len()).filter(|&b| holds(&self.buckets[b])).collect()
    }

    /// Before a layer's gradients are written to a double buffer: waits until its previous contents
    /// are reduced.
    pub(super) fn reserve_gradients(&mut self, layer: usize, after: &mut Vec<OpId>) {
        if !self.transient_gradients() {
            return;
        }
        for bucket in self.buckets_of(layer) {
            let home = self.buckets[bucket].grads.buffer;
            let mine = self.buckets.iter().filter(|b| b.grads.buffer == home);
            let used = mine.filter_map(|bucket| match bucket.gradients {
                Gradients::Transient { used, .. } => used,
                Gradients::Resident { .. } => None,
            });
            after.extend(used.max());
        }
    }

    /// After a layer's backward pass: sums and reduces the buckets that are complete.
    pub(super) fn layer_done(&mut self, layer: usize, k: usize) {
        for bucket in 0..self.buckets.len() {
            let shape = &self.buckets[bucket].shape;
            // A tied table waits for the end of the action; see `action_done`.
            if shape.layers.start == layer && !shape.tied {
                self.leaf_done(bucket, k);
                if self.is_last(k) && self.context.strategy.overlap || self.transient_gradients() {
                    self.reduce(bucket, k);
                }
            }
        }
    }

    /// After a microbatch's gradients of a virtual stage are computed: handles tied tables.
    pub(super) fn action_done(&mut self, layers: Range<usize>, k: usize) {
        for bucket in 0..self.buckets.len() {
            let state = &self.buckets[bucket];
            let first = layers.contains(&state.shape.layers.start);
            if !state.shape.tied {
                continue;
            }
            if state.uses() != Uses::OneStage {
                self.keep_leaf(bucket, k, first, &layers);
            } else if first {
                self.sum_uses(bucket, k);
                self.leaf_done(bucket, k);
                if self.is_last(k) && self.context.strategy.overlap || self.transient_gradients() {
                    self.reduce(bucket, k);
                }
            }
        }
    }

    fn is_last(&self, k: usize) -> bool {
        k + 1 == self.context.strategy.microbatches() as usize
    }

    /// Index of the leaf that ends with this microbatch, if one does.
    pub(super) fn leaf(&self, k: usize) -> Option<u32> {
        let s = &self.context.strategy;
        let whole = (s.microbatches() / s.local_leaves()).max(1) as usize;
        let size = self.local_sgd_steps().unwrap_or(whole);
        (k % size == size - 1).then_some((k / size) as u32)
    }

    /// Joins the leaf that just ended with its siblings, if one did.
    fn leaf_done(&mut self, bucket: usize, k: usize) {
        let Some(leaf) = self.leaf(k).filter(|_| !self.transient_gradients()) else { return };
        let BucketPlan { grads, gradients, ready, .. } = &self.buckets[bucket];
        let Gradients::Resident { tree } = gradients else { return };
        let (grads, tree, waits) = (*grads, tree.clone(), *ready);
        self.join(leaf, grads, &tree, waits.as_slice());
    }

    /// Joins the losses of the leaf that just ended in the forward pass, if one did. The next
    /// leaf's forward passes may come before this one's backward passes.
    pub(super) fn loss_leaf_done(&mut self, k: usize) {
        let (Some(leaf), Some(loss)) = (self.leaf(k), self.outputs.loss) else { return };
        let tree: Vec<View> = self.loss_tree.iter().map(|&level| self.whole(level)).collect();
        let view = self.whole(loss);
        self.join(leaf, view, &tree, &[]);
    }

    /// A binary counter: leaf j adds the sums at its trailing one bits and is stored at the next
    /// bit.
    pub(super) fn join(&mut self, leaf: u32, value: View, tree: &[View], waits: &[OpId]) {
        let mut waits = waits;
        for &from in tree.iter().take(leaf.trailing_ones() as usize) {
            self.compute(Op::Accumulate { from, into: value, mode: AccumulateMode::Add }, waits);
            waits = &[];
        }
        if let Some(&into) = tree.get(leaf.trailing_ones() as usize) {
            self.compute(Op::Accumulate { from: value, into, mode: AccumulateMode::Move }, waits);
        }
    }

    /// Starts the reduction of a bucket among replicas.
    pub(super) fn reduce(&mut self, bucket: usize, k: usize) {
        let microbatch = Microbatch::from(k);
        self.add_staged();
        self.decompress();
        let mut after: Vec<OpId> =
            self.last_compute.into_iter().chain(self.buckets[bucket].ready).collect();
        if let Some(call) = self.buckets[bucket].tensor_sum {
            let lane = self.lane("tensor");
            after = vec![self.body.push(lane, Op::Collective { call, microbatch }, &after)];
        }
        let mut reduced = self.buckets[bucket].tensor_sum.is_some();
        let into = match self.buckets[bucket].gradients {
            Gradients::Transient { into, .. } => Some(into),
            Gradients::Resident { .. } => None,
        };
        match self.buckets[bucket].sync {
            GradientSync::AllReduce(call) | GradientSync::ReduceScatter(call) => {
                let lane = self.lane("reduce");
                if let Some(ReducedInto::Staging(_)) = into {
                    // The staging buffer must be added up before it is overwritten.
                    after.extend(self.buckets[bucket].ready);
                }
                after = vec![self.body.push(lane, Op::Collective { call, microbatch }, &after)];
                reduced = true;
            }
            GradientSync::Compressed { reduce, warm_up } => {
                if let Some(call) = warm_up {
                    let (lane, op) = (self.lane("reduce"), Op::Collective { call, microbatch });
                    let filter = IterationFilter::Warmup;
                    let reduced = self.body.push_filtered(filter, lane, op, &after);
                    self.buckets[bucket].ready_warming_up = Some(reduced);
                }
                return self.compress(bucket, reduce, &after);
            }
            GradientSync::Servers => {
                let servers = self.context.strategy.sync.servers();
                after = self.push_to_servers(bucket, servers, &after);
            }
            GradientSync::None | GradientSync::LocalSgd { .. } | GradientSync::Hogwild => {}
        }
        if let Some(ReducedInto::Sum) = into {
            let BucketPlan { grads: from, step_grads: into, .. } = self.buckets[bucket];
            let mode = if k == 0 { AccumulateMode::Move } else { AccumulateMode::Add };
            after = vec![self.compute(Op::Accumulate { from, into, mode }, &after)];
            reduced = true;
        }
        if reduced {
            let state = &mut self.buckets[bucket];
            state.ready = after.first().copied();
            if let Gradients::Transient { used, .. } = &mut state.gradients {
                *used = state.ready;
            }
        }
        if let Some(ReducedInto::Staging(_)) = into {
            self.staged.push((bucket, k));
        }
    }

    /// Adds the results of earlier reductions from their staging buffers. It is called when the
    /// next reduction starts, a layer's backward pass later, so that compute does not wait.
    fn add_staged(&mut self) {
        for (bucket, k) in std::mem::take(&mut self.staged) {
            let BucketPlan { step_grads: into, ready, .. } = self.buckets[bucket];
            let Gradients::Transient { into: ReducedInto::Staging(from), .. } =
                self.buckets[bucket].gradients
            else {
                continue;
            };
            let mode = if k == 0 { AccumulateMode::Move } else { AccumulateMode::Add };
            let id = self.compute(Op::Accumulate { from, into, mode }, ready.as_slice());
            self.buckets[bucket].ready = Some(id);
        }
    }

    /// Sends each server its shard of the gradients; the returned weights end the exchange.
    fn push_to_servers(&mut self, bucket: usize, servers: u32, after: &[OpId]) -> Vec<OpId> {
        let state = &self.buckets[bucket];
        let (grads, params) = (state.grads, state.weights.stored());
        let len = state.shape.elements / u64::from(servers);
        let channel = u16::try_from(bucket).expect("few buckets");
        let microbatch = Microbatch(0);
        let (send, recv) = (self.lane("server-send"), self.lane("server-recv"));
        let mut last = Vec::new();
        for server in 0..servers {
            let offset = u64::from(server) * len;
            let to = Peer::Server(server);
            let view = View { offset, len, ..grads };
            let sent = self.body.push(send, Op::Send { to, channel, view, microbatch }, after);
            let view = View { offset, len, ..params };
            let op = Op::Recv { from: to, channel, view, microbatch };
            // Weights may change only after every compute op that reads them.
            let done: Vec<OpId> = after.iter().copied().chain([sent]).collect();
            last.push(self.body.push(recv, op, &done));
        }
        last
    }

    /// Builds the end of the iteration: remaining reductions, loss, norm, step and gathers.
    pub(super) fn update(&mut self) {
        let last = self.context.strategy.microbatches() as usize - 1;
        if !self.context.strategy.overlap && !self.transient_gradients() {
            // Tied tables last, as when reductions overlap.
            let mut all: Vec<usize> = (0..self.buckets.len()).collect();
            all.retain(|&b| self.buckets[b].uses() == Uses::OneStage);
            all.sort_by_key(|&b| self.buckets[b].shape.tied);
            for bucket in all {
                self.reduce(bucket, last);
            }
        }
        for bucket in 0..self.buckets.len() {
            if self.buckets[bucket].uses() != Uses::OneStage {
                self.finish_separate_uses(bucket, last);
            }
        }
        self.add_staged();
        self.decompress_all();
        if self.context.strategy.sync.is_async() {
            // A replica reports only its own samples and does not wait for the others'.
            let known = self.norm();
            if self.shares_weights() {
                self.push(&known);
            }
            return;
        }
        self.reduce_loss();
        self.reduce_dropped();
        if self.context.strategy.local.is_some() {
            return self.outer_step();
        }
        if self.context.strategy.sync == Sync::AllReduce {
            let mut known = self.norm();
            if self.context.strategy.optimizer.needs_tensor_norms() {
                known = self.tensor_norms(&known);
            }
            for bucket in 0..self.buckets.len() {
                self.stash_weights(bucket);
                let step = self.step(bucket, StepPhase::Apply, &known);
                if self.context.strategy.exchanges_moments()
                    && self.buckets[bucket].compressed().is_some()
                {
                    self.body.nodes[step.index()].filter = IterationFilter::Warmup;
                    let follow = self.step(bucket, StepPhase::ApplyMomentum, &[]);
                    self.after_warmup(follow);
                }
                if let Weights::Whole { gather: Some(call), .. } = self.buckets[bucket].weights {
                    let lane = self.lane("gather");
                    let op = Op::Collective { call, microbatch: Microbatch(0) };
                    self.body.push(lane, op, &[step]);
                }
            }
        }
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
        let after: Vec<OpId> = self.last_compute.into_iter().collect();
        let lane = self.lane("control");
        self.body.push(lane, Op::Collective { call, microbatch: Microbatch(0) }, &after);
    }
}
