//! Where a rank stands, as far as its arithmetic depends on it.

use paceline_plan::ids::{GroupId, Rank};
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::program::{Bucket, Entry, Plan};
use std::ops::Range;

/// One of several equal parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Which one.
    pub(crate) index: u32,
    /// Of how many.
    pub(crate) count: u32,
}

impl Part {
    /// All of it.
    pub(crate) const WHOLE: Self = Self { index: 0, count: 1 };

    /// What the part covers of so many elements, which the parts share equally.
    pub(crate) fn range(self, elements: u64) -> Range<u64> {
        let len = elements / u64::from(self.count);
        let start = u64::from(self.index) * len;
        start..start + len
    }
}

/// A rank's coordinates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The rank.
    pub(crate) rank: Rank,
    /// Its replica, whose samples it reads.
    pub(crate) replica: u32,
    /// The same, as one of all replicas.
    pub(crate) replicas: Part,
    /// Its part of every tensor that is cut; a server holds whole tensors.
    pub(crate) tensor: Part,
    /// Its part of every sequence, in a zigzag.
    pub(crate) context: Part,
    /// Its part of the experts.
    pub(crate) experts: Part,
    /// Its part of every expert's matrices.
    pub(crate) expert_tensor: Part,
    /// Its part of what the update is dealt out in.
    pub(crate) update: Part,
    /// The same of experts that other ranks hold than the rest.
    pub(crate) expert_update: Part,
}

impl Place {
    /// The place of a rank of the plan.
    pub(crate) fn of(plan: &Plan, rank: Rank) -> Self {
        let at = plan.mesh.coordinates(rank);
        let tensor = at.map_or(Part::WHOLE, |at| Part { index: at.tp, count: plan.mesh.tp.max(1) });
        let context =
            at.map_or(Part::WHOLE, |at| Part { index: at.cp, count: plan.mesh.cp.max(1) });
        let along = |axis: Axis| {
            let index = rank.0 / plan.mesh.stride(axis) % plan.mesh.axis(axis);
            at.map_or(Part::WHOLE, |_| Part { index, count: plan.mesh.axis(axis) })
        };
        let mut shards = plan.program(rank).buckets.iter().filter_map(|bucket| bucket.shard);
        let is_expert = |group: &GroupId| plan.group(*group) == GroupKind::Axis(Axis::Edp);
        let dense = shards.clone().find(|group| !is_expert(group));
        let experts = shards.find(is_expert);
        let update =
            |shard: Option<GroupId>| shard.map_or(Part::WHOLE, |group| part(plan, rank, group));
        Self {
            rank,
            replica: at.map_or(0, |at| at.dp),
            replicas: at
                .map_or(Part::WHOLE, |at| Part { index: at.dp, count: plan.mesh.dp.max(1) }),
            tensor,
            context,
            experts: along(Axis::Ep),
            expert_tensor: along(Axis::Etp),
            update: update(dense),
            expert_update: update(experts),
        }
    }

    /// Its part of what is dealt out in so many, among the replicas of experts or of the rest.
    pub(crate) fn part_of(&self, parts: u32, experts: bool) -> Part {
        match (parts > 1, experts) {
            (false, _) => Part::WHOLE,
            (true, true) => self.expert_update,
            (true, false) => self.update,
        }
    }

    /// The tokens of a sequence of so many that this rank holds: all of them, or one run from the front
    /// and the one as far from the end (see [`Layout::Zigzag`](paceline_plan::spec::Layout)).
    pub(crate) fn runs(&self, seq: u64) -> [Range<u64>; 2] {
        let Part { index, count } = self.context;
        if count == 1 {
            return [0..seq, seq..seq];
        }
        let (index, runs) = (u64::from(index), 2 * u64::from(count));
        [index, runs - 1 - index].map(|run| run * seq / runs..(run + 1) * seq / runs)
    }

    /// Its part of what an entry's placement deals out.
    pub(crate) fn part(&self, entry: &Entry) -> Part {
        if entry.sparse { self.replicas } else { self.tensor }
    }

    /// The elements of a bucket that this rank updates.
    pub(crate) fn owned(&self, bucket: &Bucket) -> Range<u64> {
        let experts = bucket.entries.first().is_some_and(|entry| entry.experts > 0);
        match (bucket.shard.is_some(), experts && self.expert_update.count > 1) {
            (false, _) => 0..bucket.elements,
            (true, true) => self.expert_update.range(bucket.elements),
            (true, false) => self.update.range(bucket.elements),
        }
    }
}

/// A rank's position in a group.
fn part(plan: &Plan, rank: Rank, group: GroupId) -> Part {
    let members = plan.mesh.members(plan.group(group), rank);
    let index = members.iter().position(|&member| member == rank).unwrap_or(0);
    Part { index: index as u32, count: members.len().max(1) as u32 }
}
