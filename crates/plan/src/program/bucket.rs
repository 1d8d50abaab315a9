//! Parameters with their gradients and optimizer state, in the units in which they are reduced and updated.

use super::View;
use crate::graph::Init;
use crate::ids::GroupId;
use crate::spec::Placement;

/// A tensor's place in a bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Logical name: `blocks.3.qkv.weight`.
    pub name: String,
    /// Logical dimensions, without padding.
    pub dims: [u64; 2],
    /// Sizes of the blocks along the cut dimension; empty for one.
    pub blocks: Vec<u64>,
    /// How many experts' matrices stand below each other, none for what is no expert's. They are dealt
    /// out along `ep`, and each of them is then placed along `etp`; `blocks` are those of one.
    pub experts: u64,
    /// What a tensor-parallel rank holds of it.
    pub tp: Placement,
    /// Local dimensions, padding of an uneven vocabulary included.
    pub local: [u64; 2],
    /// First element in the bucket; a multiple of the block size.
    pub offset: u64,
    /// Starting values.
    pub init: Init,
    /// Whether weight decay applies.
    pub decay: bool,
    /// Whether it is an average over past iterations, which a step moves towards its gradient.
    pub running: bool,
    /// Whether its rows are looked up: tables of a recommendation model. Its placement is then along the
    /// data-parallel axis.
    pub sparse: bool,
    /// Whether it enters the gradient's norm (the second use of a tied table does not, nor what is not
    /// learnt).
    pub counted: bool,
    /// Its position among the norm's entries.
    pub norm_entry: u32,
}

impl Entry {
    /// Local elements.
    pub fn elements(&self) -> u64 {
        self.local[0] * self.local[1]
    }
}

/// Parameters that are reduced, updated and gathered together.
#[derive(Clone, Debug, PartialEq)]
pub struct Bucket {
    /// A name for people.
    pub name: String,
    /// Elements, padding included.
    pub elements: u64,
    /// Its tensors.
    pub entries: Vec<Entry>,
    /// Weights in the compute type: whole, or this rank's part with ZeRO-3.
    pub params: View,
    /// Gradients at the time of the step: whole, or this rank's part with ZeRO-1 and above.
    pub grads: View,
    /// Master weights (when the compute type is not f32), in f32, for the part this rank updates.
    pub master: Option<View>,
    /// First and second moments, as far as the optimizer has them.
    pub moments: Vec<View>,
    /// Where master weights and moments rest, in this order, if that is not where a step changes them:
    /// several buckets then share the views above.
    pub stored: Vec<View>,
    /// Where lengths of whole tensors stand, if the optimizer's step depends on them.
    pub gauge: Option<Gauge>,
    /// The group among which the update is dealt out (ZeRO-1 and above, or servers); each rank
    /// updates its own of equal parts.
    pub shard: Option<GroupId>,
    /// Whether this role updates it (roles served by a parameter server do not).
    pub updated: bool,
}

impl Bucket {
    /// Whether its gradients are clipped by the norm of all: tables' rows, which do not enter it, are not.
    pub fn is_clipped(&self) -> bool {
        self.entries.iter().all(|entry| !entry.sparse)
    }

    /// Master weights, where they rest.
    pub fn resting_master(&self) -> Option<View> {
        let master = self.master?;
        Some(self.stored.first().copied().unwrap_or(master))
    }

    /// Moments, where they rest.
    pub fn resting_moments(&self) -> &[View] {
        let masters = usize::from(self.master.is_some());
        self.stored.get(masters..).filter(|s| !s.is_empty()).unwrap_or(&self.moments)
    }
}

/// Where the squares stand that tell how long tensors and their directions are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gauge {
    /// Sums of squares of weights, by block of the bucket; zero for blocks that other ranks update.
    pub weights: View,
    /// The same of the directions that the weights are about to move in.
    pub directions: View,
    /// Both sums by tensor of the whole model: first those of weights, then those of directions.
    pub tensors: View,
}
