//! Which ops wait for each other: the two sides of a message, the members of a collective.

use super::{Costs, Numbering, describe_op};
use crate::error::SimError;
use crate::network::Network;
use paceline_plan::ids::{OpId, Rank, RoleId};
use paceline_plan::mesh::{Axis, GroupKind, Mesh};
use paceline_plan::program::{Op, Peer, Plan, Program, View};
use paceline_plan::units::{Bytes, Seconds};

/// Ops that start together and how long what they do together takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meeting {
    pub(super) duration: Seconds,
    /// Where its ops stand in [`Meetings::ops`].
    start: u32,
    len: u32,
}

/// Every meeting of the bodies of all roles.
#[derive(Debug, Default)]
pub(super) struct Meetings {
    pub(super) all: Vec<Meeting>,
    /// Numbers of ops, meeting after meeting.
    ops: Vec<u32>,
    /// For every op, where its meetings stand in `joined`; one more at the end.
    first: Vec<u32>,
    /// Meetings, op after op.
    joined: Vec<u32>,
}

impl Meetings {
    /// The ops that meet.
    pub(super) fn ops(&self, meeting: u32) -> &[u32] {
        let Meeting { start, len, .. } = self.all[meeting as usize];
        &self.ops[start as usize..][..len as usize]
    }

    /// The meetings that an op takes part in: one for most messages, one per rank of the role on the
    /// other side for those with a server, none for what a role does by itself.
    pub(super) fn of(&self, op: u32) -> &[u32] {
        &self.joined[self.first[op as usize] as usize..self.first[op as usize + 1] as usize]
    }

    fn push(&mut self, ops: &[u32], duration: Seconds) {
        let start = self.ops.len() as u32;
        self.ops.extend_from_slice(ops);
        self.all.push(Meeting { duration, start, len: ops.len() as u32 });
    }

    /// Lists each op's meetings, once all are known.
    fn index(&mut self, ops: usize) {
        self.first = vec![0; ops + 1];
        for &op in &self.ops {
            self.first[op as usize] += 1;
        }
        let mut end = 0;
        for first in &mut self.first {
            end += *first;
            *first = end;
        }
        self.joined = vec![0; self.ops.len()];
        for (index, meeting) in self.all.iter().enumerate().rev() {
            for &op in &self.ops[meeting.start as usize..][..meeting.len as usize] {
                let first = &mut self.first[op as usize];
                *first -= 1;
                self.joined[*first as usize] = index as u32;
            }
        }
    }
}

/// Finds who meets whom, and how long it takes.
pub(super) fn find(
    plan: &Plan,
    ops: &Numbering,
    costs: &Costs<'_>,
    network: &dyn Network,
) -> Result<Meetings, SimError> {
    let mut meetings = Meetings::default();
    let mut messages = Messages { plan, ops, sends: Vec::new(), recvs: Vec::new() };
    messages.collect();
    messages.pair(costs, network, &mut meetings)?;
    collectives(plan, ops, costs, &mut meetings);
    services(plan, ops, costs, network, &mut meetings)?;
    meetings.index(ops.len());
    Ok(meetings)
}

/// What tells messages apart: roles of sender and receiver, the way along an axis for neighbours of
/// one role, channel and microbatch.
type Key = (u32, u32, u32, u16, u32);

/// One side of a message.
struct Side {
    key: Key,
    /// For a server's side, which rank of the other role it is for; the other role's ops stand for
    /// all of its ranks.
    rank: Option<Rank>,
    op: u32,
    bytes: Bytes,
}

struct Messages<'a> {
    plan: &'a Plan,
    ops: &'a Numbering,
    sends: Vec<Side>,
    recvs: Vec<Side>,
}

impl Messages<'_> {
    fn collect(&mut self) {
        for (role, program) in self.plan.programs.iter().enumerate() {
            let role = RoleId::from(role);
            for (index, node) in program.body.nodes.iter().enumerate() {
                let op = self.ops.number(role, OpId::from(index));
                match node.op {
                    Op::Send { to, channel, view, microbatch } => {
                        let Some((other, way, rank)) = self.partner(role, to, true) else {
                            continue;
                        };
                        let key = (role.0, other.0, way, channel, microbatch.0);
                        let bytes = bytes(program, &view);
                        self.sends.push(Side { key, rank, op, bytes });
                    }
                    Op::Recv { from, channel, view, microbatch } => {
                        let Some((other, way, rank)) = self.partner(role, from, false) else {
                            continue;
                        };
                        let key = (other.0, role.0, way, channel, microbatch.0);
                        let bytes = bytes(program, &view);
                        self.recvs.push(Side { key, rank, op, bytes });
                    }
                    Op::Load { .. }
                    | Op::Compute { .. }
                    | Op::Collective { .. }
                    | Op::Accumulate { .. }
                    | Op::Step { .. }
                    | Op::Stash { .. }
                    | Op::Restore { .. }
                    | Op::Free { .. }
                    | Op::Serve { .. } => {}
                }
            }
        }
        let order = |side: &Side| (side.key, side.rank, side.op);
        self.sends.sort_unstable_by_key(order);
        self.recvs.sort_unstable_by_key(order);
    }

    /// The role that a peer plays, the way that the message takes along an axis of one role, and the
    /// rank, if a server names one.
    ///
    /// Along an axis, a send to the next rank meets a receive from the previous one. Both are written
    /// as how far the message goes, so that on an axis of two the next rank is the previous one.
    fn partner(&self, role: RoleId, peer: Peer, sends: bool) -> Option<(RoleId, u32, Option<Rank>)> {
        let mesh = &self.plan.mesh;
        let along = |axis: Axis, ahead: bool| {
            let size = mesh.axis(axis);
            let step = if ahead { 1 } else { size - 1 };
            if axis == Axis::Pp {
                return (RoleId((role.0 + step) % size), 0, None);
            }
            let distance = if ahead == sends { 1 % size } else { size - 1 };
            (role, 1 + (axis as u32) * size + distance, None)
        };
        Some(match peer {
            Peer::Stage(stage) => (RoleId(stage.0.into()), 0, None),
            Peer::Next(axis) => along(axis, true),
            Peer::Previous(axis) => along(axis, false),
            Peer::Server(server) => {
                let server = RoleId(mesh.pp + server);
                // What an asynchronous server takes in and gives out is timed by its own op.
                let serves = |program: &Program| !program.services.is_empty();
                if self.plan.programs.get(server.index()).is_some_and(serves) {
                    return None;
                }
                (server, 0, None)
            }
            Peer::Replica(rank) => (self.plan.role(Rank(rank)), 0, Some(Rank(rank))),
        })
    }

    /// Pairs the k-th send of a key with the k-th receive of that key, rank by rank.
    fn pair(
        &self,
        costs: &Costs<'_>,
        network: &dyn Network,
        meetings: &mut Meetings,
    ) -> Result<(), SimError> {
        let mut recvs = self.recvs.chunk_by(|a, b| a.key == b.key).peekable();
        let mut known: Option<((Rank, Rank, Bytes), Seconds)> = None;
        for sends in self.sends.chunk_by(|a, b| a.key == b.key) {
            let key = sends[0].key;
            while let Some(lonely) = recvs.next_if(|recvs| recvs[0].key < key) {
                lonely.iter().for_each(|side| meetings.push(&[side.op, side.op], Seconds::ZERO));
            }
            let recvs = recvs.next_if(|recvs| recvs[0].key == key).unwrap_or(&[]);
            for (send, recv) in pairs(sends, recvs) {
                let (Some(send), Some(recv)) = (send, recv) else {
                    // Nobody answers: a meeting that the same op would have to join twice.
                    let op = send.or(recv).map_or(0, |side| side.op);
                    meetings.push(&[op, op], Seconds::ZERO);
                    continue;
                };
                let (from, to) = self.ends(send, recv);
                let same = (from, to, send.bytes);
                let time = match known {
                    Some((message, time)) if message == same => time,
                    _ => costs.message(network, from, to, send.bytes).map_err(|source| {
                        let (role, op) = self.ops.op(send.op);
                        let name = self.plan.programs[role.index()].name.clone();
                        let what = describe_op(self.plan, role, op);
                        SimError::NoPath { rank: from, role: name, op, what, source }
                    })?,
                };
                known = Some((same, time));
                meetings.push(&[send.op, recv.op], time);
            }
        }
        for side in recvs.flatten() {
            meetings.push(&[side.op, side.op], Seconds::ZERO);
        }
        Ok(())
    }

    /// The two ranks that a message goes between.
    fn ends(&self, send: &Side, recv: &Side) -> (Rank, Rank) {
        let (from, to, way, _, _) = send.key;
        let first = |role: u32| self.plan.representative(RoleId(role));
        let (mut sender, mut receiver) = (first(from), first(to));
        // A server's side says which rank of the other role is meant.
        if let Some(rank) = recv.rank {
            sender = rank;
        }
        if let Some(rank) = send.rank {
            receiver = rank;
        }
        if way > 0 {
            receiver = neighbour(&self.plan.mesh, sender, way).unwrap_or(receiver);
        }
        (sender, receiver)
    }
}

/// The rank that a message along an axis reaches.
fn neighbour(mesh: &Mesh, from: Rank, way: u32) -> Option<Rank> {
    let axes = [Axis::Pp, Axis::Dp, Axis::Cp, Axis::Tp, Axis::Edp, Axis::Ep, Axis::Etp];
    let (axis, distance) = axes.into_iter().find_map(|axis| {
        let size = mesh.axis(axis);
        let distance = (way - 1).checked_sub(axis as u32 * size)?;
        (distance < size).then_some((axis, distance))
    })?;
    let members = mesh.members(GroupKind::Axis(axis), from);
    let me = members.iter().position(|&rank| rank == from)?;
    members.get((me + distance as usize) % members.len()).copied()
}

/// Matches the sides of one key. Where one side is a server's, each of its ops is for one rank, and the
/// other role's k-th op stands for the k-th of every rank.
fn pairs<'s>(
    sends: &'s [Side],
    recvs: &'s [Side],
) -> Vec<(Option<&'s Side>, Option<&'s Side>)> {
    let by_rank = |one: &'s [Side], many: &'s [Side]| {
        let runs = many.chunk_by(|a, b| a.rank == b.rank);
        let pairs = runs.flat_map(move |run| {
            (0..one.len().max(run.len())).map(move |k| (one.get(k), run.get(k)))
        });
        pairs.collect::<Vec<_>>()
    };
    let served = |sides: &[Side]| sides.first().is_some_and(|side| side.rank.is_some());
    if served(sends) {
        by_rank(recvs, sends).into_iter().map(|(recv, send)| (send, recv)).collect()
    } else if recvs.is_empty() {
        sends.iter().map(|send| (Some(send), None)).collect()
    } else {
        by_rank(sends, recvs)
    }
}

fn bytes(program: &Program, view: &View) -> Bytes {
    Bytes(view.len.saturating_mul(program.buffer(view.buffer).dtype.size()))
}

/// The k-th call of a group on one role meets the k-th call of that group on the others.
fn collectives(plan: &Plan, ops: &Numbering, costs: &Costs<'_>, meetings: &mut Meetings) {
    for (group, &kind) in plan.groups.iter().enumerate() {
        let roles = roles(&plan.mesh, kind);
        if roles.len() < 2 {
            continue;
        }
        let calls_of = |role: &RoleId| -> Vec<OpId> {
            let program = &plan.programs[role.index()];
            let nodes = program.body.nodes.iter().enumerate();
            let mine = nodes.filter(|(_, node)| match node.op {
                Op::Collective { call, .. } => program.call(call).group.index() == group,
                _ => false,
            });
            mine.map(|(index, _)| OpId::from(index)).collect()
        };
        let calls: Vec<Vec<OpId>> = roles.iter().map(calls_of).collect();
        let most = calls.iter().map(Vec::len).max().unwrap_or(0);
        let mut together = Vec::with_capacity(roles.len());
        for k in 0..most {
            together.clear();
            let mut duration = Seconds::ZERO;
            for (role, calls) in roles.iter().zip(&calls) {
                // Whoever is missing keeps the others waiting for ever.
                let Some(&op) = calls.get(k) else {
                    together.extend(together.last().copied());
                    continue;
                };
                let node = &plan.programs[role.index()].body.nodes[op.index()];
                duration = duration.max(costs.op(*role, &node.op));
                together.push(ops.number(*role, op));
            }
            meetings.push(&together, duration);
        }
    }
}

/// The roles whose ranks meet in groups of a kind; none where all members play one role.
fn roles(mesh: &Mesh, group: GroupKind) -> Vec<RoleId> {
    let stages = 0..mesh.pp;
    let roles: Vec<u32> = match group {
        GroupKind::Axis(Axis::Pp) => stages.collect(),
        GroupKind::Ends if mesh.pp > 1 => vec![0, mesh.pp - 1],
        GroupKind::Served(server) => stages.chain([mesh.pp + server]).collect(),
        GroupKind::Servers => (mesh.pp..mesh.pp + mesh.servers).collect(),
        GroupKind::Axis(_) | GroupKind::Replicas | GroupKind::Ends => Vec::new(),
    };
    roles.into_iter().map(RoleId).collect()
}

/// A service meets nobody; it takes the time of all that it declares.
fn services(
    plan: &Plan,
    ops: &Numbering,
    costs: &Costs<'_>,
    network: &dyn Network,
    meetings: &mut Meetings,
) -> Result<(), SimError> {
    for (role, program) in plan.programs.iter().enumerate().filter(|(_, p)| !p.services.is_empty()) {
        let role = RoleId::from(role);
        for (index, node) in program.body.nodes.iter().enumerate() {
            let Op::Serve { service } = node.op else { continue };
            let op = OpId::from(index);
            let time = costs.service(network, role, service).map_err(|source| {
                let (rank, what) = (plan.representative(role), describe_op(plan, role, op));
                SimError::NoPath { rank, role: program.name.clone(), op, what, source }
            })?;
            meetings.push(&[ops.number(role, op)], time);
        }
    }
    Ok(())
}
