//! Rank classes: ranks that behave identically, with one representative each.

use super::async_servers::has_servers;
use super::copy_engines::sends_within_roles;
use super::workload::Load;
use crate::cluster::{Cluster, SpeedProfile};
use crate::jobs::Placement;
use crate::network::flow::FlowError;
use crate::symmetry;
use paceline_plan::ids::{OpId, Rank, RoleId};
use paceline_plan::mesh::{Axis, GroupKind, Mesh};
use paceline_plan::program::{Op, Peer, Plan};
use std::ops::Range;

/// Rank classes of a plan. The ops of all classes are numbered consecutively, class after class.
#[derive(Clone, Debug, Default)]
pub(crate) struct Classes {
    pub(super) all: Vec<Class>,
    /// Class of each rank, job after job; `None` if each role of one job is one class.
    of_rank: Option<Vec<u32>>,
    /// Number of the ranks before those of each job.
    first_rank: Vec<u32>,
    /// Class of each class of folded traffic.
    of_traffic: Vec<u32>,
    /// Total number of ops of all classes.
    pub(super) ops: u32,
    /// Compute speed of each class over time.
    paces: Vec<SpeedProfile>,
}

/// Rank class, represented by one of its ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Class {
    /// Index of its job.
    pub(crate) job: usize,
    /// Representative rank of the job.
    pub(crate) rank: Rank,
    /// Device of that rank, as a rank of the cluster.
    pub(crate) device: Rank,
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
    /// are also separated, and so are replicas that an asynchronous server serves one by one.
    pub(crate) fn of(
        plan: &Plan,
        cluster: &Cluster,
        placement: &Placement,
    ) -> Result<Self, FlowError> {
        let limited = cluster.kinds().any(|device| device.copy_engines.is_some());
        if has_servers(plan) || limited && (names_ranks(plan) || sends_within_roles(plan)) {
            return Self::per_rank(plan, cluster, placement);
        }
        if cluster.is_homogeneous() {
            return Ok(Self::by_role(plan, cluster, placement));
        }
        if names_ranks(plan) {
            return Self::per_rank(plan, cluster, placement);
        }
        match symmetry::of_ranks(plan, |rank| cluster.overrides(placement.device(rank))) {
            None => Ok(Self::by_role(plan, cluster, placement)),
            Some(classes) => {
                let mut all = Self::default();
                all.add_ranks(plan, cluster, placement, &classes)?;
                Ok(all)
            }
        }
    }

    /// Makes every rank its own class.
    pub(crate) fn per_rank(
        plan: &Plan,
        cluster: &Cluster,
        placement: &Placement,
    ) -> Result<Self, FlowError> {
        let mut all = Self::default();
        let ranks: Vec<u32> = (0..plan.mesh.world()).collect();
        all.add_ranks(plan, cluster, placement, &ranks)?;
        Ok(all)
    }

    /// Returns the classes of folded traffic, given the traffic's class of each rank.
    pub(super) fn of_jobs(
        jobs: &[Load<'_>],
        cluster: &Cluster,
        class: impl Fn(&Load<'_>, Rank) -> u32,
    ) -> Result<Self, FlowError> {
        let mut all = Self::default();
        for job in jobs {
            let first = all.len() as u32;
            let ranks = (0..job.plan.mesh.world()).map(|rank| class(job, Rank(rank)));
            let ranks: Vec<u32> = ranks.collect();
            let classes = symmetry::numbered(ranks.iter().copied());
            for (&folded, &class) in ranks.iter().zip(&classes) {
                let folded = folded as usize;
                if all.of_traffic.len() <= folded {
                    all.of_traffic.resize(folded + 1, 0);
                }
                all.of_traffic[folded] = first + class;
            }
            all.add_ranks(job.plan, cluster, job.costs.placement(), &classes)?;
        }
        Ok(all)
    }

    /// Class of a class of folded traffic.
    pub(super) fn of_traffic(&self, folded: u32) -> u32 {
        self.of_traffic[folded as usize]
    }

    fn by_role(plan: &Plan, cluster: &Cluster, placement: &Placement) -> Self {
        let mut classes = Self { first_rank: vec![0], ..Self::default() };
        for role in (0..plan.programs.len()).map(RoleId::from) {
            classes.push(plan, cluster, placement, plan.representative(role));
            if let Some(class) = classes.all.last_mut() {
                class.ranks = super::ranks(plan, role);
            }
        }
        classes
    }

    /// Adds the ranks of another job, given the class of each, numbered in order of first
    /// appearance.
    fn add_ranks(
        &mut self,
        plan: &Plan,
        cluster: &Cluster,
        placement: &Placement,
        classes: &[u32],
    ) -> Result<(), FlowError> {
        let (first, mut ops) = (self.len(), u64::from(self.ops));
        let of_rank = self.of_rank.get_or_insert_default();
        self.first_rank.push(of_rank.len() as u32);
        of_rank.extend(classes.iter().map(|&class| first as u32 + class));
        for (rank, &class) in classes.iter().enumerate() {
            let class = first + class as usize;
            if class == self.all.len() {
                let rank = Rank::from(rank);
                ops += plan.program(rank).body.nodes.len() as u64;
                if ops > MAX_OPS {
                    return Err(FlowError::TooManyMessages);
                }
                self.push(plan, cluster, placement, rank);
            }
            self.all[class].ranks += 1;
        }
        Ok(())
    }

    fn push(&mut self, plan: &Plan, cluster: &Cluster, placement: &Placement, rank: Rank) {
        let (role, device) = (plan.role(rank), placement.device(rank));
        let (first, kind) = (self.ops, cluster.kind_of(device));
        let engines = cluster.device_of(device).copy_engines;
        let job = self.first_rank.len() - 1;
        self.all.push(Class { job, rank, device, role, ranks: 0, first, kind, engines });
        self.ops = first.saturating_add(plan.programs[role.index()].body.nodes.len() as u32);
        self.paces.push(cluster.speed_profile(device));
    }

    /// Classes of a job.
    pub(super) fn of_job(&self, job: usize) -> Range<u32> {
        let end = |job| self.all.partition_point(|class| class.job < job) as u32;
        end(job)..end(job + 1)
    }

    /// The same classes of one job's ranks, running the bodies of `plan`.
    pub(super) fn with_plan(&self, job: usize, plan: &Plan) -> Self {
        let (range, mut ops) = (self.of_job(job), 0);
        let numbers = range.start as usize..range.end as usize;
        let all = self.all[numbers.clone()].iter().map(|class| {
            let first = ops;
            ops += plan.programs[class.role.index()].body.nodes.len() as u32;
            Class { job: 0, first, ..*class }
        });
        let all = all.collect();
        let of_rank = self.of_rank.as_ref().map(|classes| {
            let ranks = &classes[self.first_rank[job] as usize..][..plan.mesh.world() as usize];
            ranks.iter().map(|class| class - range.start).collect()
        });
        let paces = self.paces[numbers].to_vec();
        Self { all, of_rank, first_rank: vec![0], of_traffic: Vec::new(), ops, paces }
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

    /// Class of a job's rank.
    pub(super) fn of_rank(&self, plan: &Plan, job: usize, rank: Rank) -> u32 {
        match &self.of_rank {
            Some(classes) => classes[self.first_rank[job] as usize + rank.index()],
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

    /// Ranks whose messages must be matched one by one: all of a class if servers address them, or
    /// else its representative.
    pub(super) fn ranks_of(&self, plan: &Plan, class: u32, served: bool) -> Vec<Rank> {
        let Class { rank, role, .. } = self.get(class);
        match self.of_rank {
            None if served => ranks_of_role(plan, role).collect(),
            Some(_) | None => vec![rank],
        }
    }

    /// Returns the distinct classes of a job's `ranks` in ascending order.
    pub(super) fn among(&self, plan: &Plan, job: usize, ranks: &[Rank]) -> Vec<u32> {
        let of_rank = |&rank: &Rank| self.of_rank(plan, job, rank);
        let mut classes: Vec<u32> = ranks.iter().map(of_rank).collect();
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

/// Ranks of a role, in order.
pub(super) fn ranks_of_role(plan: &Plan, role: RoleId) -> impl Iterator<Item = Rank> + use<> {
    let mesh = &plan.mesh;
    let server = role.0.checked_sub(mesh.pp).map(|server| Rank(mesh.size() + server));
    let stage = (server.is_none()).then(|| mesh.stage(role.0));
    stage.into_iter().flatten().chain(server)
}
