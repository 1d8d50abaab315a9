//! Ranks that do the same at the same time, and one of each.

use super::alike;
use super::engines::sends_within_roles;
use crate::cluster::{Cluster, Pace};
use crate::network::flow::{FlowError, Folded};
use paceline_plan::ids::{OpId, Rank, RoleId};
use paceline_plan::mesh::{Axis, GroupKind, Mesh};
use paceline_plan::program::{Op, Peer, Plan};

/// The classes of a plan's ranks. The ops of all classes are numbered through, class after class.
#[derive(Clone, Debug)]
pub(crate) struct Classes {
    pub(super) all: Vec<Class>,
    /// By rank; none where a role is a class.
    of_rank: Option<Vec<u32>>,
    /// How many ops the classes have together.
    pub(super) ops: u32,
    /// How fast each class computes, over time.
    paces: Vec<Pace>,
}

/// One rank of a class, which stands for all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Class {
    pub(crate) rank: Rank,
    pub(crate) role: RoleId,
    /// How many ranks it stands for.
    pub(crate) ranks: u32,
    /// The number of its first op.
    pub(super) first: u32,
    /// The number of its kind of device.
    pub(super) kind: usize,
    /// How many copies it makes at once beside computing, if that is limited.
    pub(super) engines: Option<u32>,
}

/// More ops than fit into memory with all that is known about them.
const MAX_OPS: u64 = 1 << 26;

impl Classes {
    /// The classes of ranks that cannot be told apart where links are shared by nobody.
    ///
    /// On a cluster without exceptions, all ranks of a role are alike. Where a server names ranks
    /// one by one, none are, unless they are of one kind: then what is said of a role holds for
    /// the slowest of its ranks. Where copy engines are counted, ranks that one class would stand
    /// for at both ends of a message are told apart too.
    pub(crate) fn of(plan: &Plan, cluster: &Cluster) -> Result<Self, FlowError> {
        let limited = cluster.kinds().any(|device| device.copy_engines.is_some());
        if limited && (names_ranks(plan) || sends_within_roles(plan)) {
            return Self::apart(plan, cluster);
        }
        if cluster.is_even() {
            return Ok(Self::by_role(plan, cluster));
        }
        if names_ranks(plan) {
            return Self::apart(plan, cluster);
        }
        match alike::refine(plan, cluster) {
            None => Ok(Self::by_role(plan, cluster)),
            Some(classes) => Self::of_ranks(plan, cluster, classes),
        }
    }

    /// Every rank by itself.
    pub(crate) fn apart(plan: &Plan, cluster: &Cluster) -> Result<Self, FlowError> {
        Self::of_ranks(plan, cluster, (0..plan.mesh.world()).collect())
    }

    /// The classes that folded traffic has.
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

    /// Classes that are counted in the order in which they first appear.
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
        self.paces.push(cluster.pace(rank));
    }

    /// How many classes there are.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// A class.
    pub(crate) fn get(&self, class: u32) -> Class {
        self.all[class as usize]
    }

    /// How fast a class computes.
    pub(crate) fn pace(&self, class: u32) -> &Pace {
        &self.paces[class as usize]
    }

    /// The class of a rank.
    pub(super) fn of_rank(&self, plan: &Plan, rank: Rank) -> u32 {
        match &self.of_rank {
            Some(classes) => classes[rank.index()],
            None => plan.role(rank).0,
        }
    }

    /// Whether groups of a kind have members of several classes.
    ///
    /// Where a role is a class, that is so along the pipeline and with servers, and nowhere else.
    pub(super) fn mix(&self, mesh: &Mesh, group: GroupKind) -> bool {
        self.of_rank.is_some()
            || match group {
                GroupKind::Axis(Axis::Pp) | GroupKind::Ends => mesh.pp > 1,
                GroupKind::Served(_) => true,
                GroupKind::Servers => mesh.servers > 1,
                GroupKind::Axis(_) | GroupKind::Replicas => false,
            }
    }

    /// The classes of ranks in rising order, each once.
    pub(super) fn among(&self, plan: &Plan, ranks: &[Rank]) -> Vec<u32> {
        let mut classes: Vec<u32> = ranks.iter().map(|&rank| self.of_rank(plan, rank)).collect();
        classes.sort_unstable();
        classes.dedup();
        classes
    }

    /// The number of a class's op.
    pub(crate) fn number(&self, class: u32, op: OpId) -> u32 {
        self.all[class as usize].first + op.0
    }

    /// The class and op of a number.
    pub(crate) fn op(&self, number: u32) -> (u32, OpId) {
        // Classes without ops start where the next one does.
        let after = self.all.partition_point(|class| class.first <= number);
        (after as u32 - 1, OpId(number - self.all[after - 1].first))
    }
}

/// Whether any op is for a rank by its number, as a synchronous server's are.
pub(super) fn names_ranks(plan: &Plan) -> bool {
    let named = |op: &Op| {
        matches!(
            op,
            Op::Send { to: Peer::Replica(_), .. } | Op::Recv { from: Peer::Replica(_), .. }
        )
    };
    plan.programs.iter().flat_map(|program| &program.body.nodes).any(|node| named(&node.op))
}
