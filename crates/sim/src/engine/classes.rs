//! Rank classes: ranks that behave identically, with one representative each.

use super::copy_engines::sends_within_roles;
use super::symmetry;
use crate::cluster::{Cluster, SpeedProfile};
use crate::network::flow::{FlowError, Folded};
use paceline_plan::ids::{OpId, Rank, RoleId};
use paceline_plan::mesh::{Axis, GroupKind, Mesh};
use paceline_plan::program::{Op, Peer, Plan};

/// Rank classes of a plan. The ops of all classes are numbered consecutively, class after class.
#[derive(Clone, Debug)]
pub(crate) struct Classes {
    pub(super) all: Vec<Class>,
    /// Class of each rank; `None` if each role is one class.
    of_rank: Option<Vec<u32>>,
    /// Total number of ops of all classes.
    pub(super) ops: u32,
    /// Compute speed of each class over time.
    paces: Vec<SpeedProfile>,
}

/// Rank class, represented by one of its ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Class {
    pub(crate) rank: Rank,
    pub(crate) role: RoleId,
    /// Number of ranks in the class.
    pub(crate) ranks: u32,
    /// Number of its first op.
    pub(super) first: u32,
    /// Index of its device kind.
    pub(super) kind: usize,
    /// Number of copies that can run concurrently with compute, if limited.
    pub(super) engines: Option<u32>,
}

/// Upper limit on ops: more would not fit into memory with their state.
const MAX_OPS: u64 = 1 << 26;

impl Classes {
    /// Returns the classes of indistinguishable ranks, assuming that no links are shared.
    ///
    /// On a cluster without overrides, all ranks of a role are alike. If a server addresses ranks
    /// individually, none are, unless the cluster is homogeneous: then a role's times are those of
    /// its slowest rank. If copy engines are counted, ranks of one class at both ends of a message
    /// are also separated.
    pub(crate) fn of(plan: &Plan, cluster: &Cluster) -> Result<Self, FlowError> {
        let limited = cluster.kinds().any(|device| device.copy_engines.is_some());
        if limited && (names_ranks(plan) || sends_within_roles(plan)) {
            return Self::per_rank(plan, cluster);
        }
        if cluster.is_homogeneous() {
            return Ok(Self::by_role(plan, cluster));
        }
        if names_ranks(plan) {
            return Self::per_rank(plan, cluster);
        }
        match symmetry::refine(plan, cluster) {
            None => Ok(Self::by_role(plan, cluster)),
            Some(classes) => Self::of_ranks(plan, cluster, classes),
        }
    }

    /// Makes every rank its own class.
    pub(crate) fn per_rank(plan: &Plan, cluster: &Cluster) -> Result<Self, FlowError> {
        Self::of_ranks(plan, cluster, (0..plan.mesh.world()).collect())
    }

    /// Returns the classes of folded traffic.
    pub(super) fn of_traffic(
        plan: &Plan,
        cluster: &Cluster,
        folded: &Folded,
    ) -> Result<Self, FlowError> {
        Self::of_ranks(plan, cluster, folded.ranks.clone())
    }

    fn by_role(plan: &Plan, cluster: &Cluster) -> Self {
        let mut classes = Self { all: Vec::new(), of_rank: None, ops: 0, paces: Vec::new() };
        for role in (0..plan.programs.len()).map(RoleId::from) {
            classes.push(plan, cluster, plan.representative(role));
            if let Some(class) = classes.all.last_mut() {
                class.ranks = super::ranks(plan, role);
            }
        }
        classes
    }

    /// Builds classes that are numbered in order of first appearance.
    fn of_ranks(plan: &Plan, cluster: &Cluster, of_rank: Vec<u32>) -> Result<Self, FlowError> {
        let mut classes = Self { all: Vec::new(), of_rank: None, ops: 0, paces: Vec::new() };
        let mut ops = 0u64;
        for (rank, &class) in of_rank.iter().enumerate() {
            if class as usize == classes.all.len() {
                let rank = Rank::from(rank);
                ops += plan.program(rank).body.nodes.len() as u64;
                if ops > MAX_OPS {
                    return Err(FlowError::TooManyMessages);
                }
                classes.push(plan, cluster, rank);
            }
            classes.all[class as usize].ranks += 1;
        }
        Ok(Self { of_rank: Some(of_rank), ..classes })
    }

    fn push(&mut self, plan: &Plan, cluster: &Cluster, rank: Rank) {
        let role = plan.role(rank);
        let (first, kind) = (self.ops, cluster.kind_of(rank));
        let engines = cluster.device_of(rank).copy_engines;
        self.all.push(Class { rank, role, ranks: 0, first, kind, engines });
        self.ops = first.saturating_add(plan.programs[role.index()].body.nodes.len() as u32);
        self.paces.push(cluster.speed_profile(rank));
    }

    /// Number of classes.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns a class by index.
    pub(crate) fn get(&self, class: u32) -> Class {
        self.all[class as usize]
    }

    /// Compute speed of a class over time.
    pub(crate) fn pace(&self, class: u32) -> &SpeedProfile {
        &self.paces[class as usize]
    }

    /// Class of a rank.
    pub(super) fn of_rank(&self, plan: &Plan, rank: Rank) -> u32 {
        match &self.of_rank {
            Some(classes) => classes[rank.index()],
            None => plan.role(rank).0,
        }
    }

    /// Returns true if groups of a kind have members of several classes.
    ///
    /// If each role is one class, this holds only along the pipeline and with servers.
    pub(super) fn mix(&self, mesh: &Mesh, group: GroupKind) -> bool {
        self.of_rank.is_some()
            || match group {
                GroupKind::Axis(Axis::Pp) | GroupKind::Ends => mesh.pp > 1,
                GroupKind::Served(_) => true,
                GroupKind::Servers => mesh.servers > 1,
                GroupKind::Axis(_) | GroupKind::Replicas => false,
            }
    }

    /// Returns the distinct classes of `ranks` in ascending order.
    pub(super) fn among(&self, plan: &Plan, ranks: &[Rank]) -> Vec<u32> {
        let mut classes: Vec<u32> = ranks.iter().map(|&rank| self.of_rank(plan, rank)).collect();
        classes.sort_unstable();
        classes.dedup();
        classes
    }

    /// Global number of a class's op.
    pub(crate) fn number(&self, class: u32, op: OpId) -> u32 {
        self.all[class as usize].first + op.0
    }

    /// Class and op of a global number.
    pub(crate) fn op(&self, number: u32) -> (u32, OpId) {
        // A class without ops has the same `first` as the next one.
        let after = self.all.partition_point(|class| class.first <= number);
        (after as u32 - 1, OpId(number - self.all[after - 1].first))
    }
}

/// Returns true if any op addresses a rank by its number, as those of a synchronous server do.
pub(super) fn names_ranks(plan: &Plan) -> bool {
    let named = |op: &Op| {
        matches!(
            op,
            Op::Send { to: Peer::Replica(_), .. } | Op::Recv { from: Peer::Replica(_), .. }
        )
    };
    plan.programs.iter().flat_map(|program| &program.body.nodes).any(|node| named(&node.op))
}
