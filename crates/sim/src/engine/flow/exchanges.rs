//! Exchanges of a plan's ranks: every communicating group and pair, once.

use crate::cluster::Cluster;
use crate::engine::async_servers::has_servers;
use crate::engine::classes::{Classes, names_ranks, ranks_of_role};
use crate::engine::copy_engines::sends_within_roles;
use crate::engine::matching::answering;
use crate::engine::workload::Load;
use crate::engine::{Costs, vector};
use crate::network::flow::{FlowError, Folded, Folding, Party, Traffic};
use crate::network::{Analytic, Vector};
use crate::symmetry;
use paceline_plan::collective::{CollectiveKind, Method, SummationOrder};
use paceline_plan::ids::{GroupId, OpId, Rank, RoleId};
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::program::{Call, Op, Peer, Plan, Program};
use paceline_plan::units::Bytes;
use std::collections::{BTreeMap, BTreeSet};

/// All exchanges of the plans of a workload and the ops that take part in them.
pub(in crate::engine) struct Exchanges<'a> {
    jobs: &'a [Load<'a>],
    analytic: Analytic<'a>,
    pub(super) traffic: Traffic<'a>,
    /// Number of each mark; exchanges with the same mark take place at the same times.
    marks: BTreeMap<(usize, Mark), u32>,
    /// Exchange by mark and first rank of its job.
    known: BTreeMap<(u32, Rank), u32>,
    /// Roles and marks for which the exchanges of all ranks are known.
    laid: BTreeSet<(RoleId, u32)>,
    /// True if a role's messages are split among the tensor-parallel ranks.
    sliced: BTreeMap<(usize, RoleId, Peer, Bytes), bool>,
    /// Indexed by job, role and op.
    parts: Vec<Vec<Vec<OpComm>>>,
}

/// Communication of an op with other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpComm {
    /// None: the op is local, or the other side records the exchange.
    Alone,
    /// Takes part in a collective.
    Member { mark: u32, vector: Vector },
    /// Sends a message that another rank receives. If sliced, the whole tensor-parallel group sends
    /// it.
    Send { mark: u32, bytes: Bytes, sliced: bool },
    /// Sends to or receives from a server that answers requests asynchronously.
    Request { mark: u32, bytes: Bytes },
}

/// Key that separates exchanges that may take place at different times.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mark {
    Call(CollectiveKind, Method, SummationOrder, GroupId, u32),
    Message { role: u32, to: Peer, sliced: bool },
    Request { role: u32, server: u32, sends: bool },
}

impl<'a> Exchanges<'a> {
    /// Finds all communicating groups and pairs.
    pub(in crate::engine) fn of(
        jobs: &'a [Load<'a>],
        cluster: &'a Cluster,
    ) -> Result<Self, FlowError> {
        let devices = jobs.iter().flat_map(|job| {
            let ranks = (0..job.plan.mesh.world()).map(Rank);
            ranks.map(|rank| job.costs.device(rank)).collect::<Vec<_>>()
        });
        let mut exchanges = Self {
            jobs,
            analytic: Analytic::new(cluster),
            traffic: Traffic::new(cluster, devices.collect()),
            marks: BTreeMap::new(),
            known: BTreeMap::new(),
            laid: BTreeSet::new(),
            sliced: BTreeMap::new(),
            parts: Vec::new(),
        };
        for (job, load) in jobs.iter().enumerate() {
            exchanges.laid.clear();
            let roles = load.plan.programs.iter().enumerate();
            let parts = roles.map(|(role, program)| exchanges.role(job, role.into(), program));
            let parts = parts.collect::<Result<_, FlowError>>()?;
            exchanges.parts.push(parts);
        }
        Ok(exchanges)
    }

    /// Communication of an op.
    pub(super) fn part(&self, job: usize, role: RoleId, op: OpId) -> OpComm {
        self.parts[job][role.index()][op.index()]
    }

    /// Exchange of a mark whose first rank is `first`.
    pub(super) fn find(&self, mark: u32, first: Rank) -> Option<u32> {
        self.known.get(&(mark, first)).copied()
    }

    /// Folds the traffic. Ranks of different roles are never alike, nor are ranks with different
    /// cluster overrides or ranks that a server addresses individually.
    pub(in crate::engine) fn fold(&self, folding: Folding) -> Result<Folded, FlowError> {
        let cluster = self.traffic.cluster();
        let counted = cluster.kinds().any(|device| device.copy_engines.is_some());
        let named = |job: &Load<'_>| {
            let plan = job.plan;
            names_ranks(plan) || has_servers(plan) || counted && sends_within_roles(plan)
        };
        let folding = if self.jobs.iter().any(named) { Folding::Off } else { folding };
        let mut ranks: Vec<(Rank, usize, RoleId)> = Vec::new();
        for (job, load) in self.jobs.iter().enumerate() {
            let of_job = (0..load.plan.mesh.world()).map(Rank);
            ranks.extend(of_job.map(|rank| (load.costs.device(rank), job, load.plan.role(rank))));
        }
        ranks.sort_unstable();
        let colours = symmetry::numbered(
            ranks.into_iter().map(|(device, job, role)| (job, role, cluster.overrides(device))),
        );
        Folded::new(&self.traffic, &colours, folding)
    }

    /// Classes of the ranks of all jobs, as the traffic is folded.
    pub(in crate::engine) fn classes(&self, folded: &Folded) -> Result<Classes, FlowError> {
        let class = |device| folded.ranks[self.traffic.place(device) as usize];
        let cluster = self.traffic.cluster();
        Classes::of_jobs(self.jobs, cluster, |job, rank| class(job.costs.device(rank)))
    }

    fn role(
        &mut self,
        job: usize,
        role: RoleId,
        program: &Program,
    ) -> Result<Vec<OpComm>, FlowError> {
        program.body.nodes.iter().map(|node| self.op((job, role), program, &node.op)).collect()
    }

    fn op(&mut self, at: (usize, RoleId), program: &Program, op: &Op) -> Result<OpComm, FlowError> {
        let (plan, costs) = self.load(at.0);
        match *op {
            Op::Collective { call, .. } => self.call(at, program.call(call)),
            Op::Send { to, view, .. } => {
                let bytes = costs.bytes(at.1, &view);
                match answering(plan, to) {
                    Some(server) => self.request(at, server, true, bytes),
                    None => self.send(at, to, bytes),
                }
            }
            Op::Recv { from, view, .. } => match answering(plan, from) {
                Some(server) => self.request(at, server, false, costs.bytes(at.1, &view)),
                None => Ok(OpComm::Alone),
            },
            Op::Serve { .. }
            | Op::Load { .. }
            | Op::Compute { .. }
            | Op::Accumulate { .. }
            | Op::Step { .. }
            | Op::Stash { .. }
            | Op::Restore { .. }
            | Op::Free { .. } => Ok(OpComm::Alone),
        }
    }

    fn load(&self, job: usize) -> (&'a Plan, &'a Costs<'a>) {
        (self.jobs[job].plan, self.jobs[job].costs)
    }

    fn call(&mut self, (job, role): (usize, RoleId), call: &Call) -> Result<OpComm, FlowError> {
        let (plan, costs) = self.load(job);
        let kind = plan.group(call.group);
        let source = Mark::Call(call.kind, call.method, call.order, call.group, call.root);
        let mark = self.mark(job, source);
        // Costing has rejected impossible patterns; a group without the rank has no exchange.
        let size = plan.mesh.group_size(kind);
        if let Ok(pattern) = call.pattern(size)
            && self.laid.insert((role, mark))
        {
            for rank in ranks_of_role(plan, role) {
                let mut members = plan.mesh.members(kind, rank);
                let Some(&first) = members.first() else { continue };
                if !self.known.contains_key(&(mark, first)) {
                    members.iter_mut().for_each(|member| *member = costs.device(*member));
                    let exchange = self.traffic.collective(mark, &pattern, &members)?;
                    self.known.insert((mark, first), exchange);
                }
            }
        }
        Ok(OpComm::Member { mark, vector: vector(plan, call) })
    }

    fn send(
        &mut self,
        (job, role): (usize, RoleId),
        to: Peer,
        bytes: Bytes,
    ) -> Result<OpComm, FlowError> {
        let (plan, costs) = self.load(job);
        // Slicing is decided once per role, because a role has one program.
        let sliced = self.pays((job, role), to, bytes);
        let mark = self.mark(job, Mark::Message { role: role.0, to, sliced });
        let new = self.laid.insert((role, mark));
        for rank in ranks_of_role(plan, role).filter(|_| new) {
            let Some(receiver) = plan.peer(rank, to) else { continue };
            let first = if sliced { self.slices(job, rank)[0] } else { rank };
            if self.known.contains_key(&(mark, first)) {
                continue;
            }
            let exchange = if sliced {
                let slices = |rank| -> Vec<Rank> {
                    self.slices(job, rank).into_iter().map(|rank| costs.device(rank)).collect()
                };
                let ends = (slices(rank), slices(receiver));
                self.traffic.sliced_message(mark, &ends.0, &ends.1)?
            } else {
                let (from, to) = (costs.device(rank), costs.device(receiver));
                self.traffic.message(mark, (from, Party::Sender), (to, Party::Receiver))?
            };
            self.known.insert((mark, first), exchange);
        }
        Ok(OpComm::Send { mark, bytes, sliced })
    }

    fn request(
        &mut self,
        (job, role): (usize, RoleId),
        server: u32,
        sends: bool,
        bytes: Bytes,
    ) -> Result<OpComm, FlowError> {
        let (plan, costs) = self.load(job);
        let mark = self.mark(job, Mark::Request { role: role.0, server, sends });
        let answers = costs.device(Rank(plan.mesh.size() + server));
        let new = self.laid.insert((role, mark));
        for rank in ranks_of_role(plan, role).filter(|_| new) {
            let asks = costs.device(rank);
            let exchange = if sends {
                self.traffic.message(mark, (asks, Party::Sender), (answers, Party::Server))?
            } else {
                self.traffic.message(mark, (answers, Party::Server), (asks, Party::Receiver))?
            };
            self.known.insert((mark, rank), exchange);
        }
        Ok(OpComm::Request { mark, bytes })
    }

    /// Returns true if a message is split among the tensor-parallel ranks.
    fn pays(&mut self, (job, role): (usize, RoleId), to: Peer, bytes: Bytes) -> bool {
        let (plan, costs) = self.load(job);
        *self.sliced.entry((job, role, to, bytes)).or_insert_with(|| {
            let from = plan.representative(role);
            let to = plan.peer(from, to);
            to.is_some_and(|to| costs.parts(&self.analytic, from, to, bytes) > 1)
        })
    }

    /// Ranks of a job that hold the same message as `rank`.
    pub(super) fn slices(&self, job: usize, rank: Rank) -> Vec<Rank> {
        self.jobs[job].plan.mesh.members(GroupKind::Axis(Axis::Tp), rank)
    }

    fn mark(&mut self, job: usize, mark: Mark) -> u32 {
        let all = self.marks.len() as u32;
        *self.marks.entry((job, mark)).or_insert(all)
    }
}
