//! From gradients to the next weights: summation within a replica, reduction among replicas, the
//! gradient norm, the optimizer step, and ZeRO's gathers.
//!
//! **Order of summation.** The microbatches of an iteration form leaves. Within a leaf, gradients
//! are accumulated in place, in data order. The leaves of a replica are joined like the bits of a
//! binary counter, which is the balanced tree; the reduction among replicas continues that tree.

use super::bucket::BucketShape;
use super::compress::CompressedReduce;
use super::local_sgd::OuterStep;
use super::role::RoleBuilder;
use super::tables::{TableUpdate, table_update};
use super::tied::Uses;
use crate::collective::{CollectiveKind, Reduction, SummationOrder};
use crate::dtype::DType;
use crate::graph::BLOCK;
use crate::ids::{BufferId, CallId, GroupId, Microbatch, OpId};
use crate::mesh::GroupKind;
use crate::program::{
    AccumulateMode, Bucket, IterationFilter, MemoryKind, Op, Peer, StepPhase, TensorNorms, View,
};
use crate::strategy::{Strategy, Sync, Zero};
use std::ops::Range;

/// A bucket with its buffers, while the program is built.
pub(super) struct BucketState {
    pub(super) shape: BucketShape,
    /// Full weights, as the layers read them.
    pub(super) compute_params: View,
    /// Stashed weights, if iterations overlap.
    pub(super) versions: Option<View>,
    /// Weights as stored: full, or this rank's shard.
    pub(super) params: View,
    /// Full gradients, as the layers write them.
    pub(super) grads: View,
    /// Gradients of the second use of a tied table on the same rank.
    pub(super) second_use: Option<View>,
    /// Location of the uses of a tied table.
    pub(super) uses: Uses,
    /// Gradients at the step.
    pub(super) step_grads: View,
    master: Option<View>,
    moments: Vec<View>,
    stored: Vec<View>,
    /// Buffers of the tensor norms, once the update is built.
    pub(super) tensor_norms: Option<TensorNorms>,
    pub(super) shard: Option<GroupId>,
    updated: bool,
    /// Sums of leaves that wait for their sibling in the tree.
    tree: Vec<BufferId>,
    /// Gradients by leaf of a table with separate uses, if there are several leaves. Each has the
    /// call that adds the other use's gradients, if that use is on another rank.
    pub(super) leaves: Vec<(View, Option<CallId>)>,
    /// A tied table's gradients over microbatches, if its uses are separate and it therefore cannot
    /// be reduced per microbatch.
    pub(super) total: Option<View>,
    /// The same two for a second use on another stage of the same rank.
    pub(super) second_leaves: Vec<View>,
    pub(super) second_total: Option<View>,
    /// Call that adds the gradients of the other use, if it is on another rank.
    pub(super) tied_sum: Option<CallId>,
    /// Staging buffer for the reduction's result, if it is accumulated per microbatch.
    staged: Option<View>,
    /// True if no other rank holds the same parameters: gradients are accumulated locally while
    /// those of other buckets are reduced per microbatch.
    alone: bool,
    reduce: Option<CallId>,
    /// Reduction that replaces `reduce` if gradients are compressed, after the warm-up.
    pub(super) compressed: Option<CompressedReduce>,
    /// Outer step of local SGD.
    pub(super) comparison: Option<OuterStep>,
    tensor_sum: Option<CallId>,
    gather: Option<CallId>,
    /// Op after which gradients are final.
    pub(super) ready: Option<OpId>,
    /// The same during the warm-up.
    pub(super) ready_warming_up: Option<OpId>,
    /// Last op that used the buffer for full weights (ZeRO-3), or for full gradients (ZeRO-2, 3).
    params_used: Option<OpId>,
    grads_used: Option<OpId>,
    /// True if the weights that layers read are available: gathered (ZeRO-3), or copied from the
    /// shared weights.
    pub(super) gathered: bool,
}

impl BucketState {
    /// Bucket as declared in the plan.
    pub(super) fn finish(&self) -> Bucket {
        Bucket {
            name: self.shape.name.clone(),
            elements: self.shape.elements,
            entries: self.shape.entries.clone(),
            params: self.params,
            grads: self.step_grads,
            master: self.master,
            moments: self.moments.clone(),
            offloaded: self.stored.clone(),
            tensor_norms: self.tensor_norms,
            shard: self.shard,
            updated: self.updated,
        }
    }
}

/// Returns true if full gradients exist only until they are reduced: ZeRO-2 and 3, unless the
/// canonical order requires summing the microbatches of a replica first.
pub(super) fn transient_gradients(s: &Strategy) -> bool {
    let dealt = s.zero >= Zero::Gradients && s.mesh().replicas() > 1;
    dealt && (s.order == SummationOrder::Free || s.microbatches() == 1)
}

impl RoleBuilder<'_> {
    pub(super) fn transient_gradients(&self) -> bool {
        transient_gradients(&self.context.strategy)
    }

    /// Declares the buckets of a virtual stage, with their buffers and calls.
    pub(super) fn declare_buckets(&mut self, layers: Range<usize>) {
        let shapes = self.context.deal().buckets(layers);
        for shape in shapes {
            let known = self.buckets.iter().position(|b| b.shape.tied && shape.tied);
            match known {
                // The second use on the same rank shares the table, not its gradient.
                Some(at) => self.declare_second_use(at, &shape),
                None => self.declare_bucket(shape),
            }
        }
    }

    fn declare_bucket(&mut self, shape: BucketShape) {
        let s = self.context.strategy.clone();
        // Ranks that hold the same parameters; none if tables are sharded.
        let holders =
            match (shape.experts, shape.tables && table_update(&s) == TableUpdate::Sharded) {
                (true, _) => Some(super::EXPERT_REPLICAS),
                (false, true) => None,
                (false, false) => Some(GroupKind::Replicas),
            };
        let group = holders.and_then(|holders| self.context.update_group(holders));
        let parts = group.map_or(1, |g| u64::from(self.context.mesh.group_size(g)));
        let (served, shared) = (s.sync.servers() > 0, self.shares_weights());
        let (name, elements) = (shape.name.clone(), shape.elements);
        let part = elements / parts;
        let sharded = parts > 1 && !served;
        let act = shape.dtype(&s);

        let zero3 = sharded && s.zero == Zero::Parameters;
        let rest = if zero3 { part } else { elements };
        let kind = if shared { MemoryKind::Shared } else { MemoryKind::Parameters };
        let params = self.buffer(name.clone() + ".param", act, rest, 1, kind);
        let params = self.whole(params);
        let compute_params = if zero3 {
            self.double_buffered("gathered", &shape, act)
        } else if shared {
            self.own_copy(&name, elements, act)
        } else {
            params
        };

        let versions = self.version_copies().map(|copies| {
            let name = name.clone() + ".versions";
            let id = self.buffer(name, act, elements, copies, MemoryKind::Parameters);
            self.whole(id)
        });

        let replicas = holders.map_or(1, |holders| self.context.mesh.group_size(holders));
        let transient = self.transient_gradients();
        // Experts and rows that no other rank holds need no reduction.
        let alone = transient && replicas == 1 && s.microbatches() > 1;
        let grads = if transient && (replicas > 1 || alone) {
            self.double_buffered("grads", &shape, s.grad_dtype)
        } else {
            let id = self.buffer(
                name.clone() + ".grad",
                s.grad_dtype,
                elements,
                1,
                MemoryKind::Gradients,
            );
            self.whole(id)
        };
        let separate_from_grads = match (sharded && s.zero >= Zero::Gradients, alone) {
            (true, _) => Some((".grad.part", part)),
            (false, true) => Some((".grad.sum", elements)),
            (false, false) => None,
        };
        let step_grads = match separate_from_grads {
            Some((what, len)) => {
                let name = name.clone() + what;
                let id = self.buffer(name, s.grad_dtype, len, 1, MemoryKind::Gradients);
                self.whole(id)
            }
            None => grads,
        };
        let uses = if shape.tied { self.uses() } else { Uses::OneStage };
        let separate = uses != Uses::OneStage;
        let total = (transient && separate && s.microbatches() > 1).then(|| {
            let name = name.clone() + ".grad.total";
            let id = self.buffer(name, s.grad_dtype, elements, 1, MemoryKind::Gradients);
            self.whole(id)
        });
        let per_microbatch = transient && replicas > 1 && s.microbatches() > 1 && total.is_none();
        let staged = per_microbatch.then(|| {
            let id = self.buffer(
                name.clone() + ".grad.staged",
                s.grad_dtype,
                part,
                1,
                MemoryKind::Communication,
            );
            self.whole(id)
        });
        let state_elements = if sharded { part } else { elements };
        let updated = !served;
        let mut stored = Vec::new();
        let mut state = |what: &str| {
            let [works, rests] = self.state_views(&name, what, state_elements);
            stored.extend(Some(rests).filter(|&rests| rests != works));
            works
        };
        let master = (updated && act != DType::F32).then(|| state("master"));
        let moments = if updated { s.optimizer.moments() } else { 0 };
        let moments = ["moment1", "moment2"][..moments].iter().map(|m| state(m)).collect();
        let local_leaves = if transient { 1 } else { s.local_leaves() };
        let levels = if separate { 0 } else { local_leaves.trailing_zeros() };
        let mut leaf_buffer = |level: u32| {
            let name = format!("{name}.leaf{level}");
            self.buffer(name, s.grad_dtype, elements, 1, MemoryKind::Gradients)
        };
        let tree = (0..levels).map(&mut leaf_buffer).collect();
        let copies: Vec<BufferId> = if separate && local_leaves > 1 {
            (0..local_leaves).map(&mut leaf_buffer).collect()
        } else {
            Vec::new()
        };
        let leaves = copies
            .into_iter()
            .map(|copy| {
                let view = self.whole(copy);
                let call = (uses == Uses::Ranks).then(|| self.tied_call(&name, view));
                (view, call)
            })
            .collect();

        let tensor_sum = (shape.partial > 0).then(|| {
            let view = View { offset: 0, len: shape.partial, ..grads };
            self.call(
                &format!("{name}.grad"),
                CollectiveKind::AllReduce,
                Reduction::Sum,
                super::TENSOR,
                view,
                view,
                1,
            )
        });
        let summed = total.unwrap_or(grads);
        let tied_sum = (uses == Uses::Ranks).then(|| self.tied_call(&name, summed));
        let compressed = holders
            .filter(|_| !shape.averages)
            .and_then(|h| self.declare_compressed(&name, &shape.entries, elements, h));
        let comparison =
            holders.and_then(|h| self.declare_outer_step(&shape, h, compressed.is_some()));
        let separate = served || shared || comparison.is_some();
        let dense = compressed.is_none() || s.has_compress_warmup();
        let reduce = holders.filter(|_| replicas > 1 && !separate && dense).map(|holders| {
            let (kind, output) = match (s.zero, staged) {
                (Zero::None, _) => (CollectiveKind::AllReduce, summed),
                (_, Some(staged)) => (CollectiveKind::ReduceScatter, staged),
                (_, None) => (CollectiveKind::ReduceScatter, step_grads),
            };
            self.call(&format!("{name}.grad"), kind, Reduction::Sum, holders, summed, output, BLOCK)
        });
        let gather = holders.filter(|_| sharded).map(|holders| {
            let input = params;
            let output = compute_params;
            self.call(
                &format!("{name}.param"),
                CollectiveKind::AllGather,
                Reduction::Sum,
                holders,
                input,
                output,
                BLOCK,
            )
        });
        let shard = if sharded { group.map(|g| self.context.group(g)) } else { None };
        self.buckets.push(BucketState {
            shape,
            compute_params,
            versions,
            params,
            grads,
            second_use: None,
            step_grads,
            master,
            moments,
            stored,
            tensor_norms: None,
            shard,
            updated,
            tree,
            uses,
            leaves,
            second_leaves: Vec::new(),
            second_total: None,
            staged,
            alone,
            total,
            reduce,
            compressed,
            comparison,
            tensor_sum,
            tied_sum,
            gather,
            ready: None,
            ready_warming_up: None,
            params_used: None,
            grads_used: None,
            gathered: false,
        });
    }

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
            let state = &self.buckets[bucket];
            let (Some(call), false) = (state.gather, state.gathered) else { continue };
            let home = state.compute_params.buffer;
            // The buffer is free after the last compute op that read its contents.
            let mut free = Vec::new();
            for other in self.buckets.iter_mut().filter(|b| b.compute_params.buffer == home) {
                other.gathered = false;
                free.extend(other.params_used);
            }
            free.sort();
            let free: Vec<OpId> = free.pop().into_iter().collect();
            let lane = self.lane("gather");
            let op = Op::Collective { call, microbatch: Microbatch(0) };
            after.push(self.body.push(lane, op, &free));
            self.buckets[bucket].gathered = true;
        }
    }

    /// Records that a layer's weights were just used.
    pub(super) fn used(&mut self, layer: usize) {
        if self.context.strategy.zero == Zero::Parameters {
            for bucket in self.buckets_of(layer) {
                self.buckets[bucket].params_used = self.last_compute;
            }
        }
    }

    /// Buckets from which a layer reads weights.
    pub(super) fn buckets_of(&self, layer: usize) -> Vec<usize> {
        let params = &self.context.graph.layer(layer.into()).params;
        let (reads_table, borrows) =
            (params.iter().any(|p| p.tied), params.iter().any(|p| p.borrowed));
        let head = self.context.graph.head();
        let holds = |b: &BucketState| match b.shape.tied {
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
            after.extend(mine.filter_map(|b| b.grads_used).max());
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
            if state.uses != Uses::OneStage {
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
        let state = &self.buckets[bucket];
        let grads = state.grads;
        let tree: Vec<View> = state.tree.iter().map(|&level| self.whole(level)).collect();
        let waits: Vec<OpId> = self.buckets[bucket].ready.into_iter().collect();
        self.join(leaf, grads, &tree, &waits);
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
        if let Some(call) = self.buckets[bucket].reduce {
            let lane = self.lane("reduce");
            if let (Some(_), Some(last)) = (self.buckets[bucket].staged, self.buckets[bucket].ready)
            {
                // The staging buffer must be added up before it is overwritten.
                after.push(last);
            }
            let op = Op::Collective { call, microbatch };
            if self.buckets[bucket].compressed.is_some() {
                let reduced = self.body.push_filtered(IterationFilter::Warmup, lane, op, &after);
                self.buckets[bucket].ready_warming_up = Some(reduced);
            } else {
                after = vec![self.body.push(lane, op, &after)];
            }
        }
        if let (Some(compressed), None) =
            (self.buckets[bucket].compressed, self.buckets[bucket].comparison)
        {
            return self.compress(bucket, compressed, &after);
        }
        if let servers @ 1.. = self.context.strategy.sync.servers() {
            after = self.push_to_servers(bucket, servers, &after);
        }
        if self.buckets[bucket].alone {
            let BucketState { grads: from, step_grads: into, .. } = self.buckets[bucket];
            let mode = if k == 0 { AccumulateMode::Move } else { AccumulateMode::Add };
            let added = self.compute(Op::Accumulate { from, into, mode }, &after);
            self.buckets[bucket].grads_used = Some(added);
            self.buckets[bucket].ready = Some(added);
            return;
        }
        let state = &self.buckets[bucket];
        if state.tensor_sum.is_some() || state.reduce.is_some() {
            let reduced = after.first().copied();
            self.buckets[bucket].grads_used = reduced;
            self.buckets[bucket].ready = reduced;
        }
        if self.buckets[bucket].staged.is_some() {
            self.staged.push((bucket, k));
        }
    }

    /// Adds the results of earlier reductions from their staging buffers. It is called when the
    /// next reduction starts, a layer's backward pass later, so that compute does not wait.
    fn add_staged(&mut self) {
        for (bucket, k) in std::mem::take(&mut self.staged) {
            let state = &self.buckets[bucket];
            let (Some(from), into) = (state.staged, state.step_grads) else { continue };
            let mode = if k == 0 { AccumulateMode::Move } else { AccumulateMode::Add };
            let after: Vec<OpId> = state.ready.into_iter().collect();
            let id = self.compute(Op::Accumulate { from, into, mode }, &after);
            self.buckets[bucket].ready = Some(id);
        }
    }

    /// Sends each server its shard of the gradients; the returned weights end the exchange.
    fn push_to_servers(&mut self, bucket: usize, servers: u32, after: &[OpId]) -> Vec<OpId> {
        let state = &self.buckets[bucket];
        let (grads, params) = (state.grads, state.params);
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
            all.retain(|&b| self.buckets[b].uses == Uses::OneStage);
            all.sort_by_key(|&b| self.buckets[b].shape.tied);
            for bucket in all {
                self.reduce(bucket, last);
            }
        }
        for bucket in 0..self.buckets.len() {
            if self.buckets[bucket].uses != Uses::OneStage {
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
                    && self.buckets[bucket].compressed.is_some()
                {
                    self.body.nodes[step.index()].filter = IterationFilter::Warmup;
                    let follow = self.step(bucket, StepPhase::ApplyMomentum, &[]);
                    self.after_warmup(follow);
                }
                let rests_whole = self.context.strategy.zero < Zero::Parameters;
                if let (Some(call), true) = (self.buckets[bucket].gather, rests_whole) {
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
