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
    /// How many ops must come; more than there are if some have no counterpart.
    pub(super) expected: u32,
    /// Where its ops stand in [`Meetings::ops`].
    start: u32,
    len: u32,
}

/// Every meeting of the bodies of all roles.
#[derive(Debug, Default)]
pub(crate) struct Meetings {
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
    pub(crate) fn ops(&self, meeting: u32) -> &[u32] {
        let Meeting { start, len, .. } = self.all[meeting as usize];
        &self.ops[start as usize..][..len as usize]
    }

    /// The meetings that an op takes part in: one for most messages, one per rank of the role on
    /// the other side for those with a server, none for what a role does by itself.
    pub(crate) fn of(&self, op: u32) -> &[u32] {
        &self.joined[self.first[op as usize] as usize..self.first[op as usize + 1] as usize]
    }

    /// How often any op joins a meeting.
    pub(crate) fn joins(&self) -> usize {
        self.joined.len()
    }

    fn push(&mut self, ops: &[u32], expected: u32, duration: Seconds) {
        let start = self.ops.len() as u32;
        self.ops.extend_from_slice(ops);
        self.all.push(Meeting { duration, expected, start, len: ops.len() as u32 });
    }

    /// An op that waits for another which does not exist.
    fn push_lonely(&mut self, op: u32) {
        self.push(&[op], 2, Seconds::ZERO);
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
    let mut finder = Finder { plan, ops, costs, network, found: Meetings::default() };
    let (sends, recvs) = finder.sides()?;
    finder.messages(&sends, &recvs)?;
    finder.collectives();
    finder.services()?;
    finder.found.index(ops.len());
    Ok(finder.found)
}

struct Finder<'a> {
    plan: &'a Plan,
    ops: &'a Numbering,
    costs: &'a Costs<'a>,
    network: &'a dyn Network,
    found: Meetings,
}

/// How far a message goes along an axis whose ranks all play one role.
type Way = Option<(Axis, u32)>;

/// What tells messages apart: roles of sender and receiver, the way, channel and microbatch.
type Key = (u32, u32, Way, u16, u32);

/// One side of a message.
struct Side {
    key: Key,
    /// For a server's side, which rank of the other role it is for; the other role's ops stand for
    /// all of its ranks.
    rank: Option<Rank>,
    op: u32,
    bytes: Bytes,
}

impl Finder<'_> {
    /// All sends and all receives, by key.
    fn sides(&mut self) -> Result<(Vec<Side>, Vec<Side>), SimError> {
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        for (role, program) in self.plan.programs.iter().enumerate() {
            let role = RoleId::from(role);
            for (index, node) in program.body.nodes.iter().enumerate() {
                let (peer, channel, view, microbatch, outgoing) = match node.op {
                    Op::Send { to, channel, view, microbatch } => {
                        (to, channel, view, microbatch, true)
                    }
                    Op::Recv { from, channel, view, microbatch } => {
                        (from, channel, view, microbatch, false)
                    }
                    Op::Load { .. }
                    | Op::Compute { .. }
                    | Op::Collective { .. }
                    | Op::Accumulate { .. }
                    | Op::Step { .. }
                    | Op::Stash { .. }
                    | Op::Restore { .. }
                    | Op::Free { .. }
                    | Op::Serve { .. } => continue,
                };
                let op = OpId::from(index);
                let bytes = bytes(program, &view);
                if let Peer::Server(server) = peer
                    && self.serves(server)
                {
                    self.request(role, op, server, bytes)?;
                    continue;
                }
                let (other, way, rank) = self.partner(role, peer, outgoing);
                let (from, to) = if outgoing { (role, other) } else { (other, role) };
                let key = (from.0, to.0, way, channel, microbatch.0);
                let side = Side { key, rank, op: self.ops.number(role, op), bytes };
                if outgoing { sends.push(side) } else { recvs.push(side) }
            }
        }
        let order = |side: &Side| (side.key, side.rank, side.op);
        sends.sort_unstable_by_key(order);
        recvs.sort_unstable_by_key(order);
        Ok((sends, recvs))
    }

    /// The role that a peer plays, the way that the message takes, and the rank, if a server names
    /// one.
    ///
    /// Along an axis, a send to the next rank meets a receive from the previous one. Both are
    /// written as how far the message goes, so that on an axis of two the next rank is the previous
    /// one.
    fn partner(&self, role: RoleId, peer: Peer, outgoing: bool) -> (RoleId, Way, Option<Rank>) {
        let mesh = &self.plan.mesh;
        let along = |axis: Axis, ahead: bool| {
            let size = mesh.axis(axis).max(1);
            if axis == Axis::Pp {
                let step = if ahead { 1 } else { size - 1 };
                return (RoleId((role.0 + step) % size), None, None);
            }
            let distance = if ahead == outgoing { 1 % size } else { size - 1 };
            (role, Some((axis, distance)), None)
        };
        match peer {
            Peer::Stage(stage) => (RoleId(stage.0.into()), None, None),
            Peer::Next(axis) => along(axis, true),
            Peer::Previous(axis) => along(axis, false),
            Peer::Server(server) => (RoleId(mesh.pp + server), None, None),
            Peer::Replica(rank) => (self.plan.role(Rank(rank)), None, Some(Rank(rank))),
        }
    }

    /// Whether a server answers requests as they come, so that no op of its own meets them.
    fn serves(&self, server: u32) -> bool {
        let role = (self.plan.mesh.pp + server) as usize;
        self.plan.programs.get(role).is_some_and(|program| !program.services.is_empty())
    }

    /// A message to or from an asynchronous server, which is always ready.
    fn request(
        &mut self,
        role: RoleId,
        op: OpId,
        server: u32,
        bytes: Bytes,
    ) -> Result<(), SimError> {
        let me = self.plan.representative(role);
        let server = Rank(self.plan.mesh.size() + server);
        let time = self.time(role, op, (me, server, bytes))?;
        self.found.push(&[self.ops.number(role, op)], 1, time);
        Ok(())
    }

    /// Pairs the k-th send of a key with the k-th receive of that key, rank by rank.
    fn messages(&mut self, sends: &[Side], recvs: &[Side]) -> Result<(), SimError> {
        let mut recvs = recvs.chunk_by(|a, b| a.key == b.key).peekable();
        // Neighbouring keys differ in the microbatch only, so that this spares nearly all look-ups.
        let mut known: Option<((Rank, Rank, Bytes), Seconds)> = None;
        for sends in sends.chunk_by(|a, b| a.key == b.key) {
            let key = sends[0].key;
            while let Some(lonely) = recvs.next_if(|recvs| recvs[0].key < key) {
                lonely.iter().for_each(|side| self.found.push_lonely(side.op));
            }
            let recvs = recvs.next_if(|recvs| recvs[0].key == key).unwrap_or(&[]);
            for (send, recv) in pairs(sends, recvs) {
                let (Some(send), Some(recv)) = (send, recv) else {
                    send.or(recv).into_iter().for_each(|side| self.found.push_lonely(side.op));
                    continue;
                };
                let (from, to) = self.ends(send, recv);
                let message = (from, to, send.bytes);
                let time = match known {
                    Some((same, time)) if same == message => time,
                    Some(_) | None => {
                        let (role, op) = self.ops.op(send.op);
                        self.time(role, op, message)?
                    }
                };
                known = Some((message, time));
                self.found.push(&[send.op, recv.op], 2, time);
            }
        }
        recvs.flatten().for_each(|side| self.found.push_lonely(side.op));
        Ok(())
    }

    /// The time of a message, told of one op if there is no way.
    fn time(
        &self,
        role: RoleId,
        op: OpId,
        (from, to, bytes): (Rank, Rank, Bytes),
    ) -> Result<Seconds, SimError> {
        self.costs.message(self.network, from, to, bytes).map_err(|source| {
            let rank = self.plan.representative(role);
            let what = describe_op(self.plan, role, op);
            let role = self.plan.programs[role.index()].name.clone();
            SimError::NoPath { rank, role, op, what, source }
        })
    }

    /// The two ranks that a message goes between.
    fn ends(&self, send: &Side, recv: &Side) -> (Rank, Rank) {
        let (from, to, way, _, _) = send.key;
        let first = |role: u32| self.plan.representative(RoleId(role));
        // A server's side says which rank of the other role is meant.
        let sender = recv.rank.unwrap_or(first(from));
        let receiver = send.rank.unwrap_or(first(to));
        let ahead = way.and_then(|(axis, distance)| {
            let members = self.plan.mesh.members(GroupKind::Axis(axis), sender);
            let me = members.iter().position(|&rank| rank == sender)?;
            members.get((me + distance as usize) % members.len()).copied()
        });
        (sender, ahead.unwrap_or(receiver))
    }

    /// The k-th call of a group on one role meets the k-th call of that group on the others.
    fn collectives(&mut self) {
        for (group, &kind) in self.plan.groups.iter().enumerate() {
            let roles = roles(&self.plan.mesh, kind);
            if roles.len() < 2 {
                continue;
            }
            let calls: Vec<Vec<OpId>> =
                roles.iter().map(|&role| calls_in(self.plan, role, group)).collect();
            let most = calls.iter().map(Vec::len).max().unwrap_or(0);
            let mut together = Vec::with_capacity(roles.len());
            for k in 0..most {
                together.clear();
                let mut duration = Seconds::ZERO;
                for (&role, calls) in roles.iter().zip(&calls) {
                    let Some(&op) = calls.get(k) else { continue };
                    let node = &self.plan.programs[role.index()].body.nodes[op.index()];
                    duration = duration.max(self.costs.op(role, op, &node.op));
                    together.push(self.ops.number(role, op));
                }
                self.found.push(&together, roles.len() as u32, duration);
            }
        }
    }

    /// A service waits for nobody; it takes the time of all that it declares.
    fn services(&mut self) -> Result<(), SimError> {
        for (role, program) in self.plan.programs.iter().enumerate() {
            if program.services.is_empty() {
                continue;
            }
            let role = RoleId::from(role);
            for (index, node) in program.body.nodes.iter().enumerate() {
                let Op::Serve { service } = node.op else { continue };
                let op = OpId::from(index);
                let time = self.costs.service(self.network, role, service).map_err(|source| {
                    let rank = self.plan.representative(role);
                    let what = describe_op(self.plan, role, op);
                    SimError::NoPath { rank, role: program.name.clone(), op, what, source }
                })?;
                self.found.push(&[self.ops.number(role, op)], 1, time);
            }
        }
        Ok(())
    }
}

/// Matches the sides of one key. Where one side is a server's, each of its ops is for one rank, and
/// the other role's k-th op stands for the k-th of every rank.
fn pairs<'s>(
    sends: &'s [Side],
    recvs: &'s [Side],
) -> impl Iterator<Item = (Option<&'s Side>, Option<&'s Side>)> {
    let from_server = sends.first().is_some_and(|side| side.rank.is_some());
    let (one, many) = if from_server { (recvs, sends) } else { (sends, recvs) };
    // Without any counterpart there is one run, of nothing.
    let runs = many.chunk_by(|a, b| a.rank == b.rank);
    let none: &[Side] = &[];
    let runs = runs.chain(many.is_empty().then_some(none));
    runs.flat_map(move |run| {
        (0..one.len().max(run.len())).map(move |k| {
            let (a, b) = (one.get(k), run.get(k));
            if from_server { (b, a) } else { (a, b) }
        })
    })
}

fn bytes(program: &Program, view: &View) -> Bytes {
    Bytes(view.len.saturating_mul(program.buffer(view.buffer).dtype.size()))
}

/// The ops with which a role takes part in a group.
fn calls_in(plan: &Plan, role: RoleId, group: usize) -> Vec<OpId> {
    let program = &plan.programs[role.index()];
    let nodes = program.body.nodes.iter().enumerate();
    let mine = nodes.filter(|(_, node)| {
        matches!(node.op, Op::Collective { call, .. } if program.call(call).group.index() == group)
    });
    mine.map(|(index, _)| OpId::from(index)).collect()
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
