//! Summation of gradients within a replica, and their reduction among replicas.
//!
//! **Order of summation.** The microbatches of an iteration form leaves. Within a leaf, gradients
//! are accumulated in place, in data order. The leaves of a replica are joined like the bits of a
//! binary counter, which is the balanced tree; the reduction among replicas continues that tree.

use super::bucket_plan::{BucketPlan, GradientSync, Gradients, ReducedInto};
use super::role::RoleIr;
use super::slots::Point;
use super::tied::Uses;
use crate::ids::{Microbatch, OpId};
use crate::program::{AccumulateMode, IterationFilter, Op, Peer, View};

/// Sums and reduces buckets as they are completed.
pub(super) fn pass(ir: &mut RoleIr<'_>, point: Point<'_>) {
    match point {
        Point::Reserve(turn, layer) if turn.makes_gradients() => ir.reserve_gradients(layer),
        Point::LeafDone(turn, layer) => ir.layer_done(layer, turn.k()),
        Point::Reduce => ir.reduce_remaining(),
        Point::Collect => ir.add_staged(),
        _ => {}
    }
}

impl RoleIr<'_> {
    /// Before a layer's gradients are written to a double buffer: waits until its previous contents
    /// are reduced.
    fn reserve_gradients(&mut self, layer: usize) {
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
            let used = used.max();
            self.walk.after.extend(used);
        }
    }

    /// After a layer's backward pass: sums and reduces the buckets that are complete.
    fn layer_done(&mut self, layer: usize, k: usize) {
        for bucket in 0..self.buckets.len() {
            let shape = &self.buckets[bucket].shape;
            // A tied table waits for the end of the action; see `tied`.
            if shape.layers.start == layer && !shape.tied {
                self.leaf_done(bucket, k);
                self.reduce_if_due(bucket, k);
            }
        }
    }

    /// Reduces the buckets that were not reduced when their last gradients were computed.
    fn reduce_remaining(&mut self) {
        if self.context.strategy.overlap || self.transient_gradients() {
            return;
        }
        // Tied tables last, as when reductions overlap.
        let mut all: Vec<usize> = (0..self.buckets.len()).collect();
        all.retain(|&b| self.buckets[b].uses() == Uses::OneStage);
        all.sort_by_key(|&b| self.buckets[b].shape.tied);
        for bucket in all {
            self.reduce(bucket, self.last_microbatch());
        }
    }

    /// Reduces a bucket after a microbatch, if it is the last one or gradients are transient.
    pub(super) fn reduce_if_due(&mut self, bucket: usize, k: usize) {
        let last = k == self.last_microbatch();
        if last && self.context.strategy.overlap || self.transient_gradients() {
            self.reduce(bucket, k);
        }
    }

    /// Index of an iteration's last microbatch.
    pub(super) fn last_microbatch(&self) -> usize {
        self.context.strategy.microbatches() as usize - 1
    }

    /// Index of the leaf that ends with this microbatch, if one does.
    pub(super) fn leaf(&self, k: usize) -> Option<u32> {
        let s = &self.context.strategy;
        let whole = (s.microbatches() / s.local_leaves()).max(1) as usize;
        let size = self.local_sgd_steps().unwrap_or(whole);
        (k % size == size - 1).then_some((k / size) as u32)
    }

    /// Joins the leaf that just ended with its siblings, if one did.
    pub(super) fn leaf_done(&mut self, bucket: usize, k: usize) {
        let Some(leaf) = self.leaf(k).filter(|_| !self.transient_gradients()) else { return };
        let BucketPlan { grads, gradients, ready, .. } = &self.buckets[bucket];
        let Gradients::Resident { tree } = gradients else { return };
        let (grads, tree, waits) = (*grads, tree.clone(), *ready);
        self.join(leaf, grads, &tree, waits.as_slice());
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
            self.walk.last_compute.into_iter().chain(self.buckets[bucket].ready).collect();
        // With local SGD, every local step has summed them.
        let mut reduced = false;
        if self.buckets[bucket].outer_step().is_none()
            && let Some(summed) = self.sum_partial(bucket, k, &after)
        {
            after = vec![summed];
            reduced = true;
        }
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

    /// Sums the gradients along the tensor-parallel axis of which a rank has computed its own part,
    /// if the bucket has any.
    pub(super) fn sum_partial(&mut self, bucket: usize, k: usize, after: &[OpId]) -> Option<OpId> {
        let call = self.buckets[bucket].tensor_sum?;
        let lane = self.lane("tensor");
        let op = Op::Collective { call, microbatch: Microbatch::from(k) };
        Some(self.body.push(lane, op, after))
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
}
