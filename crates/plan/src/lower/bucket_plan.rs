//! A bucket's buffers and calls: where its weights and gradients are, and how replicas combine
//! them.

use super::bucket::BucketShape;
use super::compress::CompressedReduce;
use super::local_sgd::OuterStep;
use super::role::RoleIr;
use super::tables::{TableUpdate, table_update};
use super::tied::{TiedTable, Uses};
use crate::collective::{CollectiveKind, Reduction};
use crate::dtype::DType;
use crate::graph::BLOCK;
use crate::ids::{CallId, GroupId, LayerId, OpId, ParamId};
use crate::mesh::GroupKind;
use crate::program::{Bucket, MemoryKind, TensorNorms, View};
use crate::strategy::{Strategy, Zero};
use std::collections::BTreeMap;
use std::ops::Range;

/// A bucket with its buffers and calls, while the program is built.
pub(super) struct BucketPlan {
    pub(super) shape: BucketShape,
    pub(super) weights: Weights,
    pub(super) gradients: Gradients,
    /// Full gradients, as the layers write them.
    pub(super) grads: View,
    /// Gradients at the step.
    pub(super) step_grads: View,
    /// Separate uses of a tied table, and their gradients.
    pub(super) tied: Option<TiedTable>,
    /// Call that sums gradients of parameters that tensor-parallel ranks replicate.
    pub(super) tensor_sum: Option<CallId>,
    pub(super) sync: GradientSync,
    pub(super) optimizer: OptimizerState,
    /// Op after which gradients are final.
    pub(super) ready: Option<OpId>,
    /// The same during the warm-up.
    pub(super) ready_warming_up: Option<OpId>,
}

/// Location of a bucket's weights.
#[derive(Clone, Copy, Debug)]
pub(super) enum Weights {
    /// Whole on every rank. Under ZeRO-1 and 2, `gather` completes them after each rank's step.
    Whole { params: View, gather: Option<CallId> },
    /// A shard on every rank, gathered before use (ZeRO-3). `present` is true while the gathered
    /// weights are in their double buffer, `used` the last op that read them.
    Gathered { shard: View, whole: View, gather: CallId, present: bool, used: Option<OpId> },
    /// Shared by the ranks of a process, which compute on a copy (Hogwild).
    Shared { shared: View, copy: View, copied: bool },
    /// The latest, and versions for the microbatches in flight (PipeDream).
    Stashed { latest: View, versions: View },
}

impl Weights {
    /// Weights between iterations: whole, or this rank's shard.
    pub(super) const fn stored(&self) -> View {
        match *self {
            Self::Whole { params, .. } => params,
            Self::Gathered { shard, .. } => shard,
            Self::Shared { shared, .. } => shared,
            Self::Stashed { latest, .. } => latest,
        }
    }

    /// The latest weights as layers read them: whole.
    pub(super) const fn read(&self) -> View {
        match *self {
            Self::Whole { params, .. } => params,
            Self::Gathered { whole, .. } => whole,
            Self::Shared { copy, .. } => copy,
            Self::Stashed { latest, .. } => latest,
        }
    }

    /// Stashed versions, if there are any.
    pub(super) const fn versions(&self) -> Option<View> {
        match *self {
            Self::Stashed { versions, .. } => Some(versions),
            Self::Whole { .. } | Self::Gathered { .. } | Self::Shared { .. } => None,
        }
    }
}

/// Lifetime of a bucket's full gradients.
#[derive(Clone, Debug)]
pub(super) enum Gradients {
    /// Until the step. `tree` holds sums of leaves that wait for their sibling.
    Resident { tree: Vec<View> },
    /// Until they are reduced, in a double buffer. `used` is the last op that read them.
    Transient { into: ReducedInto, used: Option<OpId> },
}

/// Destination of transient gradients.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReducedInto {
    /// The gradients at the step: there is one reduction per iteration.
    Step,
    /// A staging buffer, from which each microbatch's result is added.
    Staging(View),
    /// The gradients at the step, by accumulation: no other rank holds the same parameters.
    Sum,
}

/// Combination of the replicas' gradients.
#[derive(Clone, Copy, Debug)]
pub(super) enum GradientSync {
    /// None: no other rank holds the same parameters.
    None,
    /// Every replica gets the sum.
    AllReduce(CallId),
    /// Every replica gets its shard of the sum (ZeRO).
    ReduceScatter(CallId),
    /// Encoded gradients are exchanged; during the warm-up, all of them.
    Compressed { reduce: CompressedReduce, warm_up: Option<CallId> },
    /// Parameter servers.
    Servers,
    /// Pseudo-gradients, in an outer step (local SGD).
    LocalSgd { outer: OuterStep, compressed: Option<CompressedReduce> },
    /// Every replica updates the shared weights.
    Hogwild,
}

/// Optimizer state of a bucket.
#[derive(Clone, Debug)]
pub(super) struct OptimizerState {
    pub(super) master: Option<View>,
    pub(super) moments: Vec<View>,
    /// Locations in the offload store, if the state is offloaded.
    pub(super) stored: Vec<View>,
    /// Buffers of the tensor norms, once the update is built.
    pub(super) tensor_norms: Option<TensorNorms>,
    pub(super) shard: Option<GroupId>,
    pub(super) updated: bool,
}

impl BucketPlan {
    /// Bucket as declared in the plan.
    pub(super) fn finish(&self) -> Bucket {
        let OptimizerState { master, moments, stored, tensor_norms, shard, updated } =
            self.optimizer.clone();
        Bucket {
            name: self.shape.name.clone(),
            elements: self.shape.elements,
            entries: self.shape.entries.clone(),
            params: self.weights.stored(),
            grads: self.step_grads,
            master,
            moments,
            offloaded: stored,
            tensor_norms,
            shard,
            updated,
        }
    }

    /// Location of the uses of a tied table.
    pub(super) fn uses(&self) -> Uses {
        self.tied.as_ref().map_or(Uses::OneStage, |tied| tied.uses)
    }

    /// The outer step of local SGD, if that is how replicas are synchronised.
    pub(super) const fn outer_step(&self) -> Option<OuterStep> {
        match self.sync {
            GradientSync::LocalSgd { outer, .. } => Some(outer),
            GradientSync::None
            | GradientSync::AllReduce(_)
            | GradientSync::ReduceScatter(_)
            | GradientSync::Compressed { .. }
            | GradientSync::Servers
            | GradientSync::Hogwild => None,
        }
    }

    /// The compressed reduction, if gradients or pseudo-gradients are compressed.
    pub(super) const fn compressed(&self) -> Option<CompressedReduce> {
        match self.sync {
            GradientSync::Compressed { reduce, .. } => Some(reduce),
            GradientSync::LocalSgd { compressed, .. } => compressed,
            GradientSync::None
            | GradientSync::AllReduce(_)
            | GradientSync::ReduceScatter(_)
            | GradientSync::Servers
            | GradientSync::Hogwild => None,
        }
    }
}

/// Returns true if full gradients exist only until they are reduced: ZeRO-2 and 3, unless the
/// canonical order requires summing the microbatches of a replica first.
pub(super) fn transient_gradients(s: &Strategy) -> bool {
    s.zero >= Zero::Gradients && s.mesh().replicas() > 1 && !s.keeps_whole_gradients()
}

/// Views of a bucket's weights, before the gather is declared.
struct WeightViews {
    stored: View,
    read: View,
    versions: Option<View>,
}

/// Buckets of a role by their contents.
#[derive(Default)]
pub(super) struct BucketIndex {
    /// Bucket and entry of each parameter.
    pub(super) owners: BTreeMap<(LayerId, ParamId), (usize, usize)>,
    /// Buckets of each layer, without those of tied tables.
    by_layer: BTreeMap<usize, Vec<usize>>,
    /// Buckets of tied tables.
    pub(super) tied: Vec<usize>,
}

impl BucketIndex {
    fn insert(&mut self, bucket: usize, shape: &BucketShape) {
        for (entry, owner) in shape.owners.iter().enumerate() {
            self.owners.entry(*owner).or_insert((bucket, entry));
        }
        if shape.tied {
            self.tied.push(bucket);
            return;
        }
        for layer in shape.layers.clone() {
            self.by_layer.entry(layer).or_default().push(bucket);
        }
    }
}

/// Ranks among which a bucket is distributed.
struct Holders {
    /// Ranks that hold the same parameters; none if tables are sharded.
    group: Option<GroupKind>,
    /// Their number.
    replicas: u32,
    /// Ranks that share the update, if it is sharded.
    update: Option<GroupKind>,
    /// True if ranks update a shard each (ZeRO).
    sharded: bool,
    /// Elements of one share of the update.
    part: u64,
}

impl RoleIr<'_> {
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

    fn holders(&self, shape: &BucketShape) -> Holders {
        let s = &self.context.strategy;
        let sharded_tables = shape.tables && table_update(s) == TableUpdate::Sharded;
        let group = match (shape.experts, sharded_tables) {
            (true, _) => Some(super::EXPERT_REPLICAS),
            (false, true) => None,
            (false, false) => Some(GroupKind::Replicas),
        };
        let size = |group| self.context.mesh.group_size(group);
        let update = group.and_then(|holders| self.context.update_group(holders));
        let parts = update.map_or(1, |group| u64::from(size(group)));
        Holders {
            group,
            replicas: group.map_or(1, size),
            update,
            sharded: parts > 1 && s.sync.servers() == 0,
            part: shape.elements / parts,
        }
    }

    fn declare_bucket(&mut self, shape: BucketShape) {
        let holders = self.holders(&shape);
        let views = self.declare_weights(&shape, &holders);
        let transient = self.transient_gradients();
        let (grads, step_grads) = self.declare_grads(&shape, &holders);
        let s = &self.context.strategy;
        let (served, shared) = (s.sync.servers() > 0, self.shares_weights());
        let per_microbatch = transient && s.microbatches() > 1;
        let mut tied = shape.tied.then(|| self.declare_tied(&shape, per_microbatch));
        let separate = tied.as_ref().is_some_and(|tied| tied.uses != Uses::OneStage);
        let into = match (holders.replicas > 1, per_microbatch) {
            (true, true) if !separate => {
                let dtype = self.context.strategy.grad_dtype;
                let (name, kind) =
                    (format!("{}.grad.staged", shape.name), MemoryKind::Communication);
                Some(ReducedInto::Staging(self.view(name, dtype, holders.part, kind)))
            }
            (true, _) => Some(ReducedInto::Step),
            (false, true) => Some(ReducedInto::Sum),
            (false, false) => None,
        };
        let mut optimizer = self.declare_optimizer(&shape, &holders);
        let gradients = match into.filter(|_| transient) {
            Some(into) => Gradients::Transient { into, used: None },
            None => Gradients::Resident { tree: self.declare_leaf_tree(&shape, separate) },
        };
        if let Some(tied) = &mut tied {
            self.declare_tied_leaves(&shape, tied);
        }
        let tensor_sum = (shape.partial > 0).then(|| {
            let view = View { offset: 0, len: shape.partial, ..grads };
            let (kind, sum) = (CollectiveKind::AllReduce, Reduction::Sum);
            self.call(&format!("{}.grad", shape.name), kind, sum, super::TENSOR, view, view, 1)
        });
        let summed = tied.as_ref().and_then(|tied| tied.total).unwrap_or(grads);
        if let Some(tied) = tied.as_mut().filter(|tied| tied.uses == Uses::Ranks) {
            tied.sum = Some(self.tied_call(&shape.name, summed));
        }
        let reduced = match into.filter(|_| transient) {
            Some(ReducedInto::Staging(staging)) => staging,
            _ => step_grads,
        };
        let sync = match (served, shared) {
            (true, _) => GradientSync::Servers,
            (false, true) => GradientSync::Hogwild,
            (false, false) => self.declare_sync(&shape, &holders, summed, reduced),
        };
        let weights = self.finish_weights(&shape, &holders, &views);
        if holders.sharded {
            optimizer.shard = holders.update.map(|group| self.context.group(group));
        }
        self.index.insert(self.buckets.len(), &shape);
        self.buckets.push(BucketPlan {
            shape,
            weights,
            gradients,
            grads,
            step_grads,
            tied,
            tensor_sum,
            sync,
            optimizer,
            ready: None,
            ready_warming_up: None,
        });
    }

    /// Declares the buffers of a bucket's weights.
    fn declare_weights(&mut self, shape: &BucketShape, holders: &Holders) -> WeightViews {
        let act = shape.dtype(&self.context.strategy);
        let (name, shared) = (&shape.name, self.shares_weights());
        let zero3 = holders.sharded && self.context.strategy.zero == Zero::Parameters;
        let elements = if zero3 { holders.part } else { shape.elements };
        let kind = if shared { MemoryKind::Shared } else { MemoryKind::Parameters };
        let stored = self.view(format!("{name}.param"), act, elements, kind);
        let read = match (zero3, shared) {
            (true, _) => self.double_buffered("gathered", shape, act),
            (false, true) => self.own_copy(name, elements, act),
            (false, false) => stored,
        };
        let versions = self.version_copies().map(|copies| {
            let kind = MemoryKind::Parameters;
            let id = self.buffer(format!("{name}.versions"), act, elements, copies, kind);
            self.whole(id)
        });
        WeightViews { stored, read, versions }
    }

    /// Declares the gradients that layers write, and those at the step.
    fn declare_grads(&mut self, shape: &BucketShape, holders: &Holders) -> (View, View) {
        let s = &self.context.strategy;
        let (dtype, kind) = (s.grad_dtype, MemoryKind::Gradients);
        let sharded = holders.sharded && s.zero >= Zero::Gradients;
        let transient = self.transient_gradients();
        // Experts and rows that no other rank holds need no reduction.
        let alone = transient && holders.replicas == 1 && s.microbatches() > 1;
        let (name, elements) = (&shape.name, shape.elements);
        let grads = if transient && (holders.replicas > 1 || alone) {
            self.double_buffered("grads", shape, dtype)
        } else {
            self.view(format!("{name}.grad"), dtype, elements, kind)
        };
        let at_step = match (sharded, alone) {
            (true, _) => self.view(format!("{name}.grad.part"), dtype, holders.part, kind),
            (false, true) => self.view(format!("{name}.grad.sum"), dtype, elements, kind),
            (false, false) => grads,
        };
        (grads, at_step)
    }

    fn declare_optimizer(&mut self, shape: &BucketShape, holders: &Holders) -> OptimizerState {
        let s = self.context.strategy.clone();
        let elements = if holders.sharded { holders.part } else { shape.elements };
        let updated = s.sync.servers() == 0;
        let mut stored = Vec::new();
        let mut state = |what: &str| {
            let [works, rests] = self.state_views(&shape.name, what, elements);
            stored.extend(Some(rests).filter(|&rests| rests != works));
            works
        };
        let master = (updated && shape.dtype(&s) != DType::F32).then(|| state("master"));
        let moments = if updated { s.optimizer.moments() } else { 0 };
        let moments = ["moment1", "moment2"][..moments].iter().map(|m| state(m)).collect();
        OptimizerState { master, moments, stored, tensor_norms: None, shard: None, updated }
    }

    /// Declares the sums of leaves that wait for their sibling; leaves of a table with separate
    /// uses are kept one by one.
    fn declare_leaf_tree(&mut self, shape: &BucketShape, separate: bool) -> Vec<View> {
        let leaves = if separate { 1 } else { self.kept_leaves() };
        (0..leaves.trailing_zeros()).map(|level| self.leaf_view(shape, level)).collect()
    }

    /// Number of leaves whose gradients outlive them.
    pub(super) fn kept_leaves(&self) -> u32 {
        if self.transient_gradients() { 1 } else { self.context.strategy.local_leaves() }
    }

    pub(super) fn leaf_view(&mut self, shape: &BucketShape, level: u32) -> View {
        let (dtype, kind) = (self.context.strategy.grad_dtype, MemoryKind::Gradients);
        self.view(format!("{}.leaf{level}", shape.name), dtype, shape.elements, kind)
    }

    /// Declares the combination of `summed` among replicas, with its result in `reduced` if each
    /// keeps a shard.
    fn declare_sync(
        &mut self,
        shape: &BucketShape,
        holders: &Holders,
        summed: View,
        reduced: View,
    ) -> GradientSync {
        let Some(group) = holders.group else { return GradientSync::None };
        let compressed = if shape.averages {
            None
        } else {
            self.declare_compressed(&shape.name, &shape.entries, shape.elements, group)
        };
        if let Some(outer) = self.declare_outer_step(shape, group, compressed.is_some()) {
            return GradientSync::LocalSgd { outer, compressed };
        }
        let dense = compressed.is_none() || self.context.strategy.has_compress_warmup();
        let name = format!("{}.grad", shape.name);
        let mut call =
            |kind, output| self.call(&name, kind, Reduction::Sum, group, summed, output, BLOCK);
        match (compressed, holders.sharded) {
            (Some(reduce), _) => {
                let warm_up = dense.then(|| call(CollectiveKind::AllReduce, summed));
                GradientSync::Compressed { reduce, warm_up }
            }
            (None, _) if holders.replicas == 1 => GradientSync::None,
            (None, true) => {
                GradientSync::ReduceScatter(call(CollectiveKind::ReduceScatter, reduced))
            }
            (None, false) => GradientSync::AllReduce(call(CollectiveKind::AllReduce, summed)),
        }
    }

    /// Declares the gather of sharded weights: before use, or after the step.
    fn finish_weights(
        &mut self,
        shape: &BucketShape,
        holders: &Holders,
        views: &WeightViews,
    ) -> Weights {
        let WeightViews { stored, read, versions } = *views;
        let gather = holders.group.filter(|_| holders.sharded).map(|group| {
            let (name, kind) = (format!("{}.param", shape.name), CollectiveKind::AllGather);
            self.call(&name, kind, Reduction::Sum, group, stored, read, BLOCK)
        });
        match (versions, gather) {
            (Some(versions), _) => Weights::Stashed { latest: stored, versions },
            (None, Some(gather)) if read != stored => {
                Weights::Gathered { shard: stored, whole: read, gather, present: false, used: None }
            }
            (None, None) if read != stored => {
                Weights::Shared { shared: stored, copy: read, copied: false }
            }
            (None, gather) => Weights::Whole { params: stored, gather },
        }
    }

    /// Buckets from which a layer reads weights, in ascending order.
    pub(super) fn buckets_of(&self, layer: usize) -> Vec<usize> {
        let params = &self.context.graph.layer(layer.into()).params;
        let of = |layer| self.index.by_layer.get(&layer).map_or(&[][..], Vec::as_slice);
        let mut found = of(layer).to_vec();
        if params.iter().any(|p| p.tied) {
            found.extend(&self.index.tied);
        }
        if params.iter().any(|p| p.borrowed) {
            let head = of(self.context.graph.head()).iter().copied();
            found.extend(head.filter(|&bucket| !self.buckets[bucket].shape.experts));
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}
