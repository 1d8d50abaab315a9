//! The world of ranks as a mesh, and the groups along its axes.
//!
//! Dense operators use the mesh `pp × dp × cp × tp`, with `tp` innermost: rank = ((p·dp + d)·cp +
//! c)·tp + t. Expert operators use the *same* ranks as `pp × edp × ep × etp` with edp·ep·etp =
//! dp·cp·tp, so `ep` and `etp` never multiply the world. Parameter servers come after all of these.

use crate::ids::Rank;
use serde::{Deserialize, Serialize};
use std::fmt;

/// An axis of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Pipeline stages.
    Pp,
    /// Data-parallel replicas.
    Dp,
    /// Shards of the sequence.
    Cp,
    /// Shards of every matrix.
    Tp,
    /// Replicas of an expert.
    Edp,
    /// Different experts.
    Ep,
    /// Shards of an expert's matrices.
    Etp,
}

impl Axis {
    /// Name used in flags, reports and the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pp => "pp",
            Self::Dp => "dp",
            Self::Cp => "cp",
            Self::Tp => "tp",
            Self::Edp => "edp",
            Self::Ep => "ep",
            Self::Etp => "etp",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Sizes of the axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mesh {
    /// Number of pipeline ranks.
    pub pp: u32,
    /// Number of data-parallel replicas.
    pub dp: u32,
    /// Number of context-parallel shards.
    pub cp: u32,
    /// Number of tensor-parallel shards.
    pub tp: u32,
    /// Number of expert-parallel shards.
    pub ep: u32,
    /// Number of tensor-parallel shards of an expert.
    pub etp: u32,
    /// Number of parameter servers, which come after the mesh.
    pub servers: u32,
}

/// Coordinates of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinates {
    /// Index along the pipeline.
    pub pp: u32,
    /// Index of the replica.
    pub dp: u32,
    /// Index of the sequence shard.
    pub cp: u32,
    /// Index of the matrix shard.
    pub tp: u32,
}

/// A kind of group: maps every rank to a set of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupKind {
    /// The ranks that differ from this one along one axis only.
    Axis(Axis),
    /// The ranks that hold the same parameters: along `dp` and `cp`.
    Replicas,
    /// The first and the last pipeline rank with otherwise equal coordinates.
    Ends,
    /// All ranks of the mesh, in order, then server `k` (whose index is the group's size − 1).
    Served(u32),
    /// All parameter servers.
    Servers,
}

impl Mesh {
    /// Number of ranks of the mesh, servers excluded.
    pub const fn size(&self) -> u32 {
        self.pp * self.dp * self.cp * self.tp
    }

    /// Number of all ranks, servers included.
    pub const fn world(&self) -> u32 {
        self.size() + self.servers
    }

    /// Number of ranks that hold the same parameters.
    pub const fn replicas(&self) -> u32 {
        self.dp * self.cp
    }

    /// Number of replicas of each expert: dp·cp·tp / (ep·etp).
    pub const fn edp(&self) -> u32 {
        self.dp * self.cp * self.tp / (self.ep * self.etp)
    }

    /// The size of an axis.
    pub const fn axis(&self, axis: Axis) -> u32 {
        match axis {
            Axis::Pp => self.pp,
            Axis::Dp => self.dp,
            Axis::Cp => self.cp,
            Axis::Tp => self.tp,
            Axis::Edp => self.edp(),
            Axis::Ep => self.ep,
            Axis::Etp => self.etp,
        }
    }

    /// Distance in ranks between neighbours along an axis.
    pub const fn stride(&self, axis: Axis) -> u32 {
        match axis {
            Axis::Tp | Axis::Etp => 1,
            Axis::Cp => self.tp,
            Axis::Dp => self.tp * self.cp,
            Axis::Pp => self.tp * self.cp * self.dp,
            Axis::Ep => self.etp,
            Axis::Edp => self.etp * self.ep,
        }
    }

    /// Coordinates of a rank; `None` for a parameter server.
    pub fn coordinates(&self, rank: Rank) -> Option<Coordinates> {
        let at = |axis: Axis| rank.0 / self.stride(axis) % self.axis(axis);
        (rank.0 < self.size()).then(|| Coordinates {
            pp: at(Axis::Pp),
            dp: at(Axis::Dp),
            cp: at(Axis::Cp),
            tp: at(Axis::Tp),
        })
    }

    /// The rank at these coordinates.
    pub const fn rank(&self, at: Coordinates) -> Rank {
        Rank(((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp)
    }

    /// Number of ranks in a group of this kind.
    pub const fn group_size(&self, group: GroupKind) -> u32 {
        match group {
            GroupKind::Axis(axis) => self.axis(axis),
            GroupKind::Replicas => self.replicas(),
            GroupKind::Ends => {
                if self.pp > 1 {
                    2
                } else {
                    1
                }
            }
            GroupKind::Served(_) => self.size() + 1,
            GroupKind::Servers => self.servers,
        }
    }

    /// Ranks of the group that `rank` belongs to, in the group's order; empty if it belongs to
    /// none.
    pub fn members(&self, group: GroupKind, rank: Rank) -> Vec<Rank> {
        let along = |axis: Axis| {
            let stride = self.stride(axis);
            let size = self.axis(axis);
            let first = rank.0 - rank.0 / stride % size * stride;
            (0..size).map(|i| Rank(first + i * stride)).collect()
        };
        let servers = || (self.size()..self.world()).map(Rank);
        match (group, self.coordinates(rank)) {
            (GroupKind::Axis(axis), Some(_)) => along(axis),
            (GroupKind::Replicas, Some(at)) => (0..self.replicas())
                .map(|i| self.rank(Coordinates { dp: i / self.cp, cp: i % self.cp, ..at }))
                .collect(),
            (GroupKind::Ends, Some(at)) => {
                let mut ends = vec![self.rank(Coordinates { pp: 0, ..at })];
                if self.pp > 1 {
                    ends.push(self.rank(Coordinates { pp: self.pp - 1, ..at }));
                }
                ends
            }
            (GroupKind::Served(k), _) => {
                let mut all: Vec<Rank> = (0..self.size()).map(Rank).collect();
                all.push(Rank(self.size() + k));
                all
            }
            (GroupKind::Servers, None) => servers().collect(),
            (GroupKind::Servers, Some(_))
            | (GroupKind::Axis(_) | GroupKind::Replicas | GroupKind::Ends, None) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESH: Mesh = Mesh { pp: 2, dp: 3, cp: 2, tp: 4, ep: 8, etp: 1, servers: 0 };

    #[test]
    fn tensor_parallel_ranks_are_neighbours() {
        assert_eq!(
            MESH.members(GroupKind::Axis(Axis::Tp), Rank(5)),
            [Rank(4), Rank(5), Rank(6), Rank(7)]
        );
    }

    #[test]
    fn experts_refactor_the_same_ranks() {
        assert_eq!(MESH.edp(), 3);
        assert_eq!(
            MESH.members(GroupKind::Axis(Axis::Ep), Rank(3)),
            (0..8).map(Rank).collect::<Vec<_>>()
        );
        assert_eq!(
            MESH.members(GroupKind::Axis(Axis::Edp), Rank(3)),
            [Rank(3), Rank(11), Rank(19)]
        );
    }

    #[test]
    fn coordinates_and_ranks_are_inverse_and_groups_partition_the_world() {
        for r in 0..MESH.size() {
            let at = MESH.coordinates(Rank(r)).unwrap();
            assert_eq!(MESH.rank(at), Rank(r));
            for axis in [Axis::Pp, Axis::Dp, Axis::Cp, Axis::Tp, Axis::Ep, Axis::Edp, Axis::Etp] {
                let members = MESH.members(GroupKind::Axis(axis), Rank(r));
                assert_eq!(members.len() as u32, MESH.axis(axis));
                assert!(members.contains(&Rank(r)));
                for member in &members {
                    assert_eq!(MESH.members(GroupKind::Axis(axis), *member), members);
                }
            }
        }
    }
}
