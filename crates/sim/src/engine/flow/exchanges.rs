//! Exchanges of a plan's ranks: every communicating group and pair, once.

use crate::cluster::Cluster;
use crate::engine::classes::names_ranks;
use crate::engine::copy_engines::sends_within_roles;
use crate::engine::{Costs, symmetry, vector};
use crate::network::flow::{FlowError, Folded, Folding, Party, Traffic};
use crate::network::{Analytic, Vector};
use paceline_plan::collective::{CollectiveKind, Method, SummationOrder};
use paceline_plan::ids::{GroupId, OpId, Rank, RoleId};
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::program::{Call, Op, Peer, Plan, Program};
use paceline_plan::units::Bytes;
use std::collections::{BTreeMap, BTreeSet};

/// All exchanges of a plan and the ops that take part in them.
pub(super) struct Exchanges<'a> {
    plan: &'a Plan,
    costs: &'a Costs<'a>,
    analytic: Analytic<'a>,
    pub(super) traffic: Traffic<'a>,
    /// Number of each mark; exchanges with the same mark take place at the same times.
    marks: BTreeMap<Mark, u32>,
    /// Exchange by mark and first rank.
    known: BTreeMap<(u32, Rank), u32>,
    /// Roles and marks for which the exchanges of all ranks are known.
    laid: BTreeSet<(RoleId, u32)>,
    /// True if a role's messages are split among the tensor-parallel ranks.
    sliced: BTreeMap<(RoleId, Peer, Bytes), bool>,
    /// Indexed by role and op.
    parts: Vec<Vec<OpComm>>,
}

/// Communication of an op with other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpComm {
    /// None: the op is local.
    Alone,
    /// Takes part in a collective.
    Member { mark: u32, group: GroupId, vector: Vector },
    /// Sends a message that another rank receives. If sliced, the whole tensor-parallel group sends
    /// it.
    Send { mark: u32, to: Peer, channel: u16, microbatch: u32, bytes: Bytes, sliced: bool },
    /// Receives a message that another rank sends.
    Recv { from: Peer, channel: u16, microbatch: u32 },
    /// Sends to or receives from a server that answers requests asynchronously.
    Request { mark: u32, server: u32, bytes: Bytes },
    /// Answers requests.
    Serve,
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
    pub(super) fn of(
        plan: &'a Plan,
        cluster: &'a Cluster,
        costs: &'a Costs<'a>,
    ) -> Result<Self, FlowError> {
        let ranks = (0..plan.mesh.world()).map(Rank).collect();
        let mut exchanges = Self {
            plan,
            costs,
            analytic: Analytic::new(cluster),
            traffic: Traffic::new(cluster, ranks),
            marks: BTreeMap::new(),
            known: BTreeMap::new(),
            laid: BTreeSet::new(),
            sliced: BTreeMap::new(),
            parts: Vec::new(),
        };
        for role in (0..plan.programs.len()).map(RoleId::from) {
            let parts = exchanges.role(role)?;
            exchanges.parts.push(parts);
        }
        Ok(exchanges)
    }

    /// Communication of an op.
    pub(super) fn part(&self, role: RoleId, op: OpId) -> OpComm {
        self.parts[role.index()][op.index()]
    }

    /// Communication of a role's ops, in order.
    pub(super) fn parts(&self, role: RoleId) -> impl Iterator<Item = (OpId, OpComm)> {
        let parts = self.parts[role.index()].iter().enumerate();
        parts.map(|(index, &part)| (OpId::from(index), part))
    }

    /// Exchange of a mark whose first rank is `first`.
    pub(super) fn find(&self, mark: u32, first: Rank) -> Option<u32> {
        self.known.get(&(mark, first)).copied()
    }

    /// Folds the traffic. Ranks of different roles are never alike, nor are ranks with different
    /// cluster overrides or ranks that a server addresses individually.
    pub(super) fn fold(&self, folding: Folding) -> Result<Folded, FlowError> {
        let mut devices = self.traffic.cluster().kinds();
        let counted = devices.any(|device| device.copy_engines.is_some());
        let apart = names_ranks(self.plan) || counted && sends_within_roles(self.plan);
        let folding = if apart { Folding::Off } else { folding };
        let ranks = (0..self.plan.mesh.world()).map(Rank);
        let colours = symmetry::numbered(ranks.map(|rank| {
            let exceptions = self.traffic.cluster().overrides(rank);
            (self.plan.role(rank), exceptions)
        }));
        Folded::new(&self.traffic, &colours, folding)
    }

    fn role(&mut self, role: RoleId) -> Result<Vec<OpComm>, FlowError> {
        let program = &self.plan.programs[role.index()];
        program.body.nodes.iter().map(|node| self.op(role, program, &node.op)).collect()
    }

    fn op(&mut self, role: RoleId, program: &Program, op: &Op) -> Result<OpComm, FlowError> {
        match *op {
            Op::Collective { call, .. } => self.call(role, program.call(call)),
            Op::Send { to, channel, view, microbatch } => {
                let bytes = self.costs.bytes(role, &view);
                match self.serving(to) {
                    Some(server) => self.request(role, server, true, bytes),
                    None => self.send(role, to, (channel, microbatch.0), bytes),
                }
            }
            Op::Recv { from, channel, view, microbatch } => match self.serving(from) {
                Some(server) => self.request(role, server, false, self.costs.bytes(role, &view)),
                None => Ok(OpComm::Recv { from, channel, microbatch: microbatch.0 }),
            },
            Op::Serve { .. } => Ok(OpComm::Serve),
            Op::Load { .. }
            | Op::Compute { .. }
            | Op::Accumulate { .. }
            | Op::Step { .. }
            | Op::Stash { .. }
            | Op::Restore { .. }
            | Op::Free { .. } => Ok(OpComm::Alone),
        }
    }

    fn call(&mut self, role: RoleId, call: &Call) -> Result<OpComm, FlowError> {
        let kind = self.plan.group(call.group);
        let source = Mark::Call(call.kind, call.method, call.order, call.group, call.root);
        let mark = self.mark(source);
        // Costing has rejected impossible patterns; a group without the rank has no exchange.
        let size = self.plan.mesh.group_size(kind);
        if let Ok(pattern) = call.pattern(size)
            && self.laid.insert((role, mark))
        {
            for rank in self.ranks(role) {
                let members = self.plan.mesh.members(kind, rank);
                let Some(&first) = members.first() else { continue };
                if !self.known.contains_key(&(mark, first)) {
                    let exchange = self.traffic.collective(mark, &pattern, &members)?;
                    self.known.insert((mark, first), exchange);
                }
            }
        }
        Ok(OpComm::Member { mark, group: call.group, vector: vector(self.plan, call) })
    }

    fn send(
        &mut self,
        role: RoleId,
        to: Peer,
        (channel, microbatch): (u16, u32),
        bytes: Bytes,
    ) -> Result<OpComm, FlowError> {
        // Slicing is decided once per role, because a role has one program.
        let sliced = self.pays(role, to, bytes);
        let mark = self.mark(Mark::Message { role: role.0, to, sliced });
        let new = self.laid.insert((role, mark));
        for rank in self.ranks(role).filter(|_| new) {
            let Some(receiver) = self.plan.peer(rank, to) else { continue };
            let first = if sliced { self.slices(rank)[0] } else { rank };
            if self.known.contains_key(&(mark, first)) {
                continue;
            }
            let exchange = if sliced {
                let ends = (self.slices(rank), self.slices(receiver));
                self.traffic.sliced_message(mark, &ends.0, &ends.1)?
            } else {
                let ends = ((rank, Party::Sender), (receiver, Party::Receiver));
                self.traffic.message(mark, ends.0, ends.1)?
            };
            self.known.insert((mark, first), exchange);
        }
        Ok(OpComm::Send { mark, to, channel, microbatch, bytes, sliced })
    }

    fn request(
        &mut self,
        role: RoleId,
        server: u32,
        sends: bool,
        bytes: Bytes,
    ) -> Result<OpComm, FlowError> {
        let mark = self.mark(Mark::Request { role: role.0, server, sends });
        let answers = Rank(self.plan.mesh.size() + server);
        let new = self.laid.insert((role, mark));
        for rank in self.ranks(role).filter(|_| new) {
            let exchange = if sends {
                self.traffic.message(mark, (rank, Party::Sender), (answers, Party::Server))?
            } else {
                self.traffic.message(mark, (answers, Party::Server), (rank, Party::Receiver))?
            };
            self.known.insert((mark, rank), exchange);
        }
        Ok(OpComm::Request { mark, server, bytes })
    }

    /// Returns true if a message is split among the tensor-parallel ranks.
    fn pays(&mut self, role: RoleId, to: Peer, bytes: Bytes) -> bool {
        *self.sliced.entry((role, to, bytes)).or_insert_with(|| {
            let from = self.plan.representative(role);
            let to = self.plan.peer(from, to);
            to.is_some_and(|to| self.costs.parts(&self.analytic, from, to, bytes) > 1)
        })
    }

    /// Ranks that hold the same message as `rank`.
    pub(super) fn slices(&self, rank: Rank) -> Vec<Rank> {
        self.plan.mesh.members(GroupKind::Axis(Axis::Tp), rank)
    }

    /// Ranks of a role.
    fn ranks(&self, role: RoleId) -> impl Iterator<Item = Rank> + use<> {
        let mesh = &self.plan.mesh;
        let (first, count) = if role.0 < mesh.pp {
            (role.0 * mesh.stride(Axis::Pp), mesh.stride(Axis::Pp))
        } else {
            (mesh.size() + role.0 - mesh.pp, 1)
        };
        (first..first + count).map(Rank)
    }

    /// Index of the server that a peer is, if it answers requests as they arrive.
    fn serving(&self, peer: Peer) -> Option<u32> {
        let Peer::Server(server) = peer else { return None };
        let program = self.plan.programs.get((self.plan.mesh.pp + server) as usize)?;
        (!program.services.is_empty()).then_some(server)
    }

    fn mark(&mut self, mark: Mark) -> u32 {
        let all = self.marks.len() as u32;
        *self.marks.entry(mark).or_insert(all)
    }
}
