//! Buckets: parameters with gradients and optimizer state, reduced and updated as one unit.

use super::View;
use crate::graph::Init;
use crate::ids::GroupId;
use crate::spec::Placement;

/// A tensor's entry in a bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Logical name: `blocks.3.qkv.weight`.
    pub name: String,
    /// Logical dimensions, without padding.
    pub dims: [u64; 2],
    /// Sizes of the blocks along the sharded dimension; empty if there is only one block.
    pub blocks: Vec<u64>,
    /// Number of expert matrices stacked along the rows; 0 if the tensor belongs to no expert. The
    /// matrices are sharded along `ep`, then each is placed along `etp`; `blocks` describes one
    /// matrix.
    pub experts: u64,
    /// Placement along the tensor-parallel axis.
    pub tp: Placement,
    /// Local dimensions, including the padding of an uneven vocabulary.
    pub local: [u64; 2],
    /// First element in the bucket; a multiple of the block size.
    pub offset: u64,
    /// Initial values.
    pub init: Init,
    /// True if weight decay applies.
    pub decay: bool,
    /// True if it is a running average over iterations; a step moves it towards its gradient.
    pub running: bool,
    /// True if its rows are looked up (tables of a recommendation model). Its placement is then
    /// along the data-parallel axis.
    pub sparse: bool,
    /// True if it contributes to the gradient norm. The second use of a tied table and tensors that
    /// are not trained do not.
    pub counted: bool,
    /// Index among the entries of the gradient norm.
    pub norm_entry: u32,
}

impl Entry {
    /// Number of local elements.
    pub fn elements(&self) -> u64 {
        self.local[0] * self.local[1]
    }
}

/// Parameters that are reduced, updated and gathered together.
#[derive(Clone, Debug, PartialEq)]
pub struct Bucket {
    /// Human-readable name.
    pub name: String,
    /// Number of elements, including padding.
    pub elements: u64,
    /// Its tensors.
    pub entries: Vec<Entry>,
    /// Weights in the compute dtype: all of them, or this rank's shard with ZeRO-3.
    pub params: View,
    /// Gradients at the time of the step: all of them, or this rank's shard with ZeRO-1 and above.
    pub grads: View,
    /// Master weights in f32 for the shard this rank updates, if the compute dtype is not f32.
    pub master: Option<View>,
    /// First and second moments, if the optimizer uses them.
    pub moments: Vec<View>,
    /// Offloaded master weights and moments, in this order; empty if a step updates them in place.
    /// If set, several buckets share the views above.
    pub offloaded: Vec<View>,
    /// Norms of whole tensors, if the optimizer's step depends on them.
    pub tensor_norms: Option<TensorNorms>,
    /// Group across which the update is sharded (ZeRO-1 and above, or servers). Each rank updates
    /// its own equal shard.
    pub shard: Option<GroupId>,
    /// True if this role updates the bucket (roles served by a parameter server do not).
    pub updated: bool,
}

impl Bucket {
    /// Returns true if its gradients enter the global norm and are clipped by it; false for tables.
    pub fn is_clipped(&self) -> bool {
        self.entries.iter().all(|entry| !entry.sparse)
    }

    /// Master weights between steps: the offloaded view if there is one.
    pub fn resting_master(&self) -> Option<View> {
        let master = self.master?;
        Some(self.offloaded.first().copied().unwrap_or(master))
    }

    /// Moments between steps: the offloaded views if there are any.
    pub fn resting_moments(&self) -> &[View] {
        let masters = usize::from(self.master.is_some());
        self.offloaded.get(masters..).filter(|s| !s.is_empty()).unwrap_or(&self.moments)
    }
}

/// Views of the sums of squares that give the norms of tensors and of their update directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorNorms {
    /// Sums of squares of weights, by block of the bucket; zero for blocks that other ranks update.
    pub weights: View,
    /// The same for the update directions.
    pub directions: View,
    /// Both sums per tensor of the whole model: first the weights, then the directions.
    pub tensors: View,
}
