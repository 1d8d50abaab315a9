//! The world of ranks as a mesh, and the groups along its axes.
//!
//! Dense operators use the mesh `pp × dp × cp × tp`. Unless an [`AxisOrder`] says otherwise, `tp` is
//! innermost: rank = ((p·dp + d)·cp + c)·tp + t. Expert operators use the *same* ranks as `pp × edp ×
//! ep × etp` with edp·ep·etp = dp·cp·tp, so `ep` and `etp` never multiply the world; they count
//! through the ranks of a stage in rank order. Parameter servers come after all of these.

use crate::ids::Rank;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

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

/// Order of the dense axes, the innermost first: ranks that differ only along the first axis are
/// neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AxisOrder([Axis; 4]);

impl AxisOrder {
    /// The axes, the innermost first.
    pub const fn axes(self) -> [Axis; 4] {
        self.0
    }
}

impl Default for AxisOrder {
    fn default() -> Self {
        Self([Axis::Tp, Axis::Cp, Axis::Dp, Axis::Pp])
    }
}

impl fmt::Display for AxisOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0.map(Axis::name).join("-"))
    }
}

impl FromStr for AxisOrder {
    type Err = String;

    /// Parses axes separated by dashes or commas, the innermost first; those that are left out
    /// follow in their usual order.
    fn from_str(text: &str) -> Result<Self, String> {
        let usual = Self::default().0;
        let mut order = Vec::new();
        for word in text.split(['-', ',']) {
            let word = word.trim();
            let Some(axis) = usual.into_iter().find(|axis| axis.name() == word) else {
                return Err(format!("'{word}' is none of the axes tp, cp, dp and pp"));
            };
            if order.contains(&axis) {
                return Err(format!("{axis} stands twice in '{text}'"));
            }
            order.push(axis);
        }
        let rest = usual.into_iter().filter(|axis| !order.contains(axis));
        let all: Vec<Axis> = order.iter().copied().chain(rest).collect();
        all.try_into().map(Self).map_err(|_| format!("'{text}' is not an order of four axes"))
    }
}

impl TryFrom<String> for AxisOrder {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<AxisOrder> for String {
    fn from(order: AxisOrder) -> Self {
        order.to_string()
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
    /// Order of the dense axes.
    #[serde(default)]
    pub order: AxisOrder,
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

    /// Distance between neighbours along an axis: in ranks, or for the axes of experts in ranks of a
    /// stage.
    pub fn stride(&self, axis: Axis) -> u32 {
        match axis {
            Axis::Etp => 1,
            Axis::Ep => self.etp,
            Axis::Edp => self.etp * self.ep,
            Axis::Pp | Axis::Dp | Axis::Cp | Axis::Tp => {
                let inner = self.order.0.into_iter().take_while(|&inner| inner != axis);
                inner.map(|inner| self.axis(inner)).product()
            }
        }
    }

    /// Place of a rank among those of its stage, in rank order.
    fn in_stage(&self, rank: Rank) -> u32 {
        let stride = self.stride(Axis::Pp);
        rank.0 / (stride * self.pp) * stride + rank.0 % stride
    }

    /// Rank of a stage at this place among its ranks.
    fn of_stage(&self, stage: u32, place: u32) -> Rank {
        let stride = self.stride(Axis::Pp);
        Rank((place / stride * self.pp + stage) * stride + place % stride)
    }

    /// Ranks of a stage in ascending order.
    pub fn stage(&self, stage: u32) -> impl Iterator<Item = Rank> + use<> {
        let mesh = *self;
        (0..mesh.size() / mesh.pp.max(1)).map(move |place| mesh.of_stage(stage, place))
    }

    /// Index of a rank along an axis.
    pub fn index(&self, axis: Axis, rank: Rank) -> u32 {
        let place = match axis {
            Axis::Pp | Axis::Dp | Axis::Cp | Axis::Tp => rank.0,
            Axis::Edp | Axis::Ep | Axis::Etp => self.in_stage(rank),
        };
        place / self.stride(axis) % self.axis(axis)
    }

    /// Coordinates of a rank; `None` for a parameter server.
    pub fn coordinates(&self, rank: Rank) -> Option<Coordinates> {
        let at = |axis: Axis| self.index(axis, rank);
        (rank.0 < self.size()).then(|| Coordinates {
            pp: at(Axis::Pp),
            dp: at(Axis::Dp),
            cp: at(Axis::Cp),
            tp: at(Axis::Tp),
        })
    }

    /// The rank at these coordinates.
    pub fn rank(&self, at: Coordinates) -> Rank {
        let along = |axis: Axis, index: u32| index * self.stride(axis);
        Rank(
            along(Axis::Pp, at.pp)
                + along(Axis::Dp, at.dp)
                + along(Axis::Cp, at.cp)
                + along(Axis::Tp, at.tp),
        )
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

    /// The first rank of the group that `rank` belongs to, and the distance between its neighbours,
    /// if its ranks lie evenly. Those of all axes do in the usual order.
    pub fn spacing(&self, group: GroupKind, rank: Rank) -> Option<(Rank, u32)> {
        if self.order != AxisOrder::default() || rank.0 >= self.size() {
            return None;
        }
        let (stride, size) = match group {
            GroupKind::Axis(axis) => (self.stride(axis), self.axis(axis)),
            GroupKind::Replicas => (self.tp, self.replicas()),
            GroupKind::Ends | GroupKind::Served(_) | GroupKind::Servers => return None,
        };
        // The ranks of a stage are consecutive, and the axes of experts count from the first.
        let in_stage = rank.0 % (self.size() / self.pp);
        let place = if group == GroupKind::Axis(Axis::Pp) { rank.0 } else { in_stage };
        Some((Rank(rank.0 - place / stride % size * stride), stride))
    }

    /// Ranks of the group that `rank` belongs to, in the group's order; empty if it belongs to
    /// none.
    pub fn members(&self, group: GroupKind, rank: Rank) -> Vec<Rank> {
        let along = |axis: Axis| {
            let (stride, size) = (self.stride(axis), self.axis(axis));
            let is_dense = self.order.0.contains(&axis);
            let place = if is_dense { rank.0 } else { self.in_stage(rank) };
            let first = place - place / stride % size * stride;
            let stage = self.index(Axis::Pp, rank);
            let at = |place: u32| if is_dense { Rank(place) } else { self.of_stage(stage, place) };
            (0..size).map(|i| at(first + i * stride)).collect()
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

    const ORDER: AxisOrder = AxisOrder([Axis::Tp, Axis::Cp, Axis::Dp, Axis::Pp]);
    const MESH: Mesh = Mesh { pp: 2, dp: 3, cp: 2, tp: 4, ep: 8, etp: 1, servers: 0, order: ORDER };

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
        for order in ["tp-cp-dp-pp", "pp", "dp-tp", "cp-pp-tp-dp", "pp-dp-cp-tp", "tp-pp"] {
            let mesh = Mesh { order: order.parse().unwrap(), ..MESH };
            for r in 0..mesh.size() {
                let at = mesh.coordinates(Rank(r)).unwrap();
                assert_eq!(mesh.rank(at), Rank(r));
                let stage: Vec<Rank> = mesh.stage(at.pp).collect();
                assert!(stage.contains(&Rank(r)) && stage.is_sorted(), "{order}: {stage:?}");
                for axis in [Axis::Pp, Axis::Dp, Axis::Cp, Axis::Tp, Axis::Ep, Axis::Edp, Axis::Etp]
                {
                    let members = mesh.members(GroupKind::Axis(axis), Rank(r));
                    assert_eq!(members.len() as u32, mesh.axis(axis));
                    assert_eq!(members[mesh.index(axis, Rank(r)) as usize], Rank(r), "{order}");
                    for member in &members {
                        assert_eq!(mesh.members(GroupKind::Axis(axis), *member), members);
                        let same = mesh.coordinates(*member).unwrap().pp == at.pp;
                        assert!(axis == Axis::Pp || same, "{order}: {axis} leaves its stage");
                    }
                }
                let axes = [Axis::Pp, Axis::Dp, Axis::Cp, Axis::Tp, Axis::Ep, Axis::Edp, Axis::Etp];
                let groups = axes.map(GroupKind::Axis).into_iter().chain([GroupKind::Replicas]);
                for group in groups {
                    let Some((first, stride)) = mesh.spacing(group, Rank(r)) else {
                        assert_ne!(order, "tp-cp-dp-pp");
                        continue;
                    };
                    let even = (0..mesh.group_size(group)).map(|i| Rank(first.0 + i * stride));
                    assert!(even.eq(mesh.members(group, Rank(r))), "{order}: {group:?}");
                }
            }
        }
    }

    #[test]
    fn the_innermost_axis_has_neighbours() {
        let order: AxisOrder = "dp,pp".parse().unwrap();
        assert_eq!(order.to_string(), "dp-pp-tp-cp");
        let mesh = Mesh { order, ..MESH };
        assert_eq!(mesh.members(GroupKind::Axis(Axis::Dp), Rank(4)), [Rank(3), Rank(4), Rank(5)]);
        assert_eq!(mesh.members(GroupKind::Axis(Axis::Pp), Rank(0)), [Rank(0), Rank(3)]);
        for wrong in ["", "ep", "tp-tp", "tp-", "x", "tp-cp-dp-pp-tp"] {
            assert!(wrong.parse::<AxisOrder>().is_err(), "{wrong}");
        }
    }
}
