//! Coordinates of a rank, as far as its arithmetic depends on them.

use paceline_kernels::ring_attention::Other;
use paceline_plan::ids::{GroupId, Rank};
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::program::{Bucket, Entry, Plan};
use std::ops::Range;

/// Index of one of several equal shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardIndex {
    /// Index of the shard.
    pub(crate) index: u32,
    /// Number of shards.
    pub(crate) count: u32,
}

impl ShardIndex {
    /// The only shard, which covers everything.
    pub(crate) const WHOLE: Self = Self { index: 0, count: 1 };

    /// Range of this shard within `elements` elements that are split equally.
    pub(crate) fn range(self, elements: u64) -> Range<u64> {
        let len = elements / u64::from(self.count);
        let start = u64::from(self.index) * len;
        start..start + len
    }
}

/// Coordinates of a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankCoords {
    /// Global rank.
    pub(crate) rank: Rank,
    /// Replica whose samples the rank reads.
    pub(crate) replica: u32,
    /// Same as a shard index among all replicas.
    pub(crate) replicas: ShardIndex,
    /// Shard of every tensor-parallel tensor; a server holds whole tensors.
    pub(crate) tensor: ShardIndex,
    /// Shard of every sequence, in zigzag layout.
    pub(crate) context: ShardIndex,
    /// Shard of the experts.
    pub(crate) experts: ShardIndex,
    /// Shard of every expert's matrices.
    pub(crate) expert_tensor: ShardIndex,
    /// Shard of the update.
    pub(crate) update: ShardIndex,
    /// Shard of the update of experts, if other ranks hold them than hold the rest.
    pub(crate) expert_update: ShardIndex,
}

impl RankCoords {
    /// Coordinates of a rank of the plan.
    pub(crate) fn of(plan: &Plan, rank: Rank) -> Self {
        let at = plan.mesh.coordinates(rank);
        let tensor = at.map_or(ShardIndex::WHOLE, |at| ShardIndex {
            index: at.tp,
            count: plan.mesh.tp.max(1),
        });
        let context = at.map_or(ShardIndex::WHOLE, |at| ShardIndex {
            index: at.cp,
            count: plan.mesh.cp.max(1),
        });
        let along = |axis: Axis| {
            let (index, count) = (plan.mesh.index(axis, rank), plan.mesh.axis(axis));
            at.map_or(ShardIndex::WHOLE, |_| ShardIndex { index, count })
        };
        let mut shards = plan.program(rank).buckets.iter().filter_map(|bucket| bucket.shard);
        let is_expert = |group: &GroupId| plan.group(*group) == GroupKind::Axis(Axis::Edp);
        let dense = shards.clone().find(|group| !is_expert(group));
        let experts = shards.find(is_expert);
        let update = |shard: Option<GroupId>| {
            shard.map_or(ShardIndex::WHOLE, |group| part(plan, rank, group))
        };
        Self {
            rank,
            replica: at.map_or(0, |at| at.dp),
            replicas: at.map_or(ShardIndex::WHOLE, |at| ShardIndex {
                index: at.dp,
                count: plan.mesh.dp.max(1),
            }),
            tensor,
            context,
            experts: along(Axis::Ep),
            expert_tensor: along(Axis::Etp),
            update: update(dense),
            expert_update: update(experts),
        }
    }

    /// Shard of this rank among `parts`, over the replicas of experts or of the rest.
    pub(crate) fn part_of(&self, parts: u32, experts: bool) -> ShardIndex {
        match (parts > 1, experts) {
            (false, _) => ShardIndex::WHOLE,
            (true, true) => self.expert_update,
            (true, false) => self.update,
        }
    }

    /// Tokens of a sequence of `seq` tokens that this rank holds. Either all of them, or one run
    /// from the front and its mirror image from the end (see
    /// [`Layout::Zigzag`](paceline_plan::spec::Layout)).
    pub(crate) fn runs(&self, seq: u64) -> [Range<u64>; 2] {
        let ShardIndex { index, count } = self.context;
        if count == 1 {
            return [0..seq, seq..seq];
        }
        let (index, runs) = (u64::from(index), 2 * u64::from(count));
        [index, runs - 1 - index].map(|run| run * seq / runs..(run + 1) * seq / runs)
    }

    /// Origin of the keys and values that have arrived by a step of ring attention.
    pub(crate) fn other(&self, step: u32) -> Other {
        // After `step` steps, those of the rank `step` places before this one.
        match step <= self.context.index {
            true => Other::Earlier,
            false => Other::Later,
        }
    }

    /// Shard of this rank under an entry's placement.
    pub(crate) fn part(&self, entry: &Entry) -> ShardIndex {
        if entry.sparse { self.replicas } else { self.tensor }
    }

    /// Elements of a bucket that this rank updates.
    pub(crate) fn owned(&self, bucket: &Bucket) -> Range<u64> {
        let experts = bucket.entries.first().is_some_and(|entry| entry.experts > 0);
        match (bucket.shard.is_some(), experts && self.expert_update.count > 1) {
            (false, _) => 0..bucket.elements,
            (true, true) => self.expert_update.range(bucket.elements),
            (true, false) => self.update.range(bucket.elements),
        }
    }
}

/// Position of a rank in a group.
fn part(plan: &Plan, rank: Rank, group: GroupId) -> ShardIndex {
    let members = plan.mesh.members(plan.group(group), rank);
    let index = members.iter().position(|&member| member == rank).unwrap_or(0);
    ShardIndex { index: index as u32, count: members.len().max(1) as u32 }
}
