//! Which ops wait for each other: the two sides of a message, the members of a collective.

use super::calls::Calls;
use super::classes::{Class, Classes};
use super::lasting::{Eras, Lasting};
use super::{Costs, describe_op};
use crate::error::SimError;
use crate::network::{Network, NoPath};
use paceline_plan::ids::{CallId, OpId, Rank, RoleId};
use paceline_plan::mesh::Axis;
use paceline_plan::program::{Op, Peer, Plan};
use paceline_plan::units::Bytes;
use std::collections::BTreeMap;

/// Ops that start together and how long what they do together takes.
#[derive(Clone, Debug)]
pub(super) struct Meeting {
    pub(super) duration: Lasting,
    /// When its first op is through, if before the others: a message inside a host is copied by its
    /// sender, who need not wait until the receiver has had its turn.
    pub(super) handed: Option<Lasting>,
    /// Whether it is a message, which copy engines move, and no collective.
    pub(super) message: bool,
    /// How many ops must come; more than there are if some have no counterpart.
    pub(super) expected: u32,
    /// Where its ops stand in [`Meetings::ops`].
    start: u32,
    len: u32,
}

/// Every meeting of the bodies of all roles.
#[derive(Clone, Debug, Default)]
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
        let &Meeting { start, len, .. } = &self.all[meeting as usize];
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

    /// The same ones, which take no time.
    pub(super) fn instant(&self) -> Self {
        let mut instant = self.clone();
        for meeting in &mut instant.all {
            (meeting.duration, meeting.handed) = (Lasting::ZERO, None);
        }
        instant
    }

    fn push(&mut self, ops: &[u32], expected: u32, message: bool, duration: Lasting) {
        let start = self.ops.len() as u32;
        self.ops.extend_from_slice(ops);
        let (len, handed) = (ops.len() as u32, None);
        self.all.push(Meeting { duration, handed, message, expected, start, len });
    }

    /// An op that waits for another which does not exist.
    fn push_lonely(&mut self, op: u32) {
        self.push(&[op], 2, true, Lasting::ZERO);
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
    classes: &Classes,
    costs: &Costs<'_>,
    calls: &Calls,
    eras: &Eras<'_>,
) -> Result<Meetings, SimError> {
    let mut finder = Finder { plan, classes, costs, calls, eras, found: Meetings::default() };
    let (sends, recvs) = finder.sides()?;
    finder.messages(&sends, &recvs)?;
    finder.collectives();
    finder.services()?;
    finder.found.index(classes.ops as usize);
    Ok(finder.found)
}

struct Finder<'a> {
    plan: &'a Plan,
    classes: &'a Classes,
    costs: &'a Costs<'a>,
    calls: &'a Calls,
    eras: &'a Eras<'a>,
    found: Meetings,
}

/// How far a message goes along an axis whose ranks all play one role.
type Way = Option<(Axis, u32)>;

/// What tells messages apart: classes of sender and receiver, the way, channel and microbatch.
type Key = (u32, u32, Way, u16, u32);

/// One side of a message.
struct Side {
    key: Key,
    /// For a server's side, which rank of the other class it is for; the other class's ops stand
    /// for all of its ranks.
    rank: Option<Rank>,
    op: u32,
    peer: Peer,
    bytes: Bytes,
}

impl Finder<'_> {
    /// All sends and all receives, by key.
    fn sides(&mut self) -> Result<(Vec<Side>, Vec<Side>), SimError> {
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        for class in 0..self.classes.len() as u32 {
            let role = self.classes.get(class).role;
            let program = &self.plan.programs[role.index()];
            // Few peers and many messages: whom they mean is looked up once.
            let mut partners: BTreeMap<(Peer, bool), Option<Partner>> = BTreeMap::new();
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
                let bytes = self.costs.bytes(role, &view);
                if let Peer::Server(server) = peer
                    && self.serves(server)
                {
                    self.request(class, op, server, bytes)?;
                    continue;
                }
                let number = self.classes.number(class, op);
                let known = partners.entry((peer, outgoing));
                let Some((other, way, rank)) =
                    *known.or_insert_with(|| self.partner(class, peer, outgoing))
                else {
                    self.found.push_lonely(number);
                    continue;
                };
                let (from, to) = if outgoing { (class, other) } else { (other, class) };
                let key = (from, to, way, channel, microbatch.0);
                let side = Side { key, rank, op: number, peer, bytes };
                if outgoing { sends.push(side) } else { recvs.push(side) }
            }
        }
        let order = |side: &Side| (side.key, side.rank, side.op);
        sends.sort_unstable_by_key(order);
        recvs.sort_unstable_by_key(order);
        Ok((sends, recvs))
    }

    /// The class that a peer is of, the way that the message takes, and the rank, if a server names
    /// one; none if there is no such peer.
    ///
    /// Along an axis, a send to the next rank meets a receive from the previous one. Both are
    /// written as how far the message goes, so that on an axis of two the next rank is the previous
    /// one.
    fn partner(&self, class: u32, peer: Peer, outgoing: bool) -> Option<Partner> {
        let rank = self.plan.peer(self.classes.get(class).rank, peer)?;
        let other = self.classes.of_rank(self.plan, rank);
        let along = |axis: Axis, ahead: bool| {
            let size = self.plan.mesh.axis(axis).max(1);
            let distance = if ahead == outgoing { 1 % size } else { size - 1 };
            (axis != Axis::Pp).then_some((axis, distance))
        };
        Some(match peer {
            Peer::Stage(_) | Peer::Server(_) => (other, None, None),
            Peer::Next(axis) => (other, along(axis, true), None),
            Peer::Previous(axis) => (other, along(axis, false), None),
            Peer::Replica(_) => (other, None, Some(rank)),
        })
    }

    /// Whether a server answers requests as they come, so that no op of its own meets them.
    fn serves(&self, server: u32) -> bool {
        let role = (self.plan.mesh.pp + server) as usize;
        self.plan.programs.get(role).is_some_and(|program| !program.services.is_empty())
    }

    /// A message to or from an asynchronous server, which is always ready.
    fn request(&mut self, class: u32, op: OpId, server: u32, bytes: Bytes) -> Result<(), SimError> {
        let me = self.classes.get(class).rank;
        let server = Rank(self.plan.mesh.size() + server);
        let number = self.classes.number(class, op);
        let time = self.time(number, (me, server, bytes))?;
        self.found.push(&[number], 1, true, time);
        Ok(())
    }

    /// Pairs the k-th send of a key with the k-th receive of that key, rank by rank.
    fn messages(&mut self, sends: &[Side], recvs: &[Side]) -> Result<(), SimError> {
        let mut recvs = recvs.chunk_by(|a, b| a.key == b.key).peekable();
        // Neighbouring keys differ in the microbatch only, so that this spares nearly all look-ups.
        let mut known: Option<((Rank, Rank, Bytes), Lasting)> = None;
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
                // A server's side says which rank of the other class is meant.
                let from = recv.rank.unwrap_or_else(|| self.classes.get(key.0).rank);
                let to = self.plan.peer(from, send.peer);
                let message =
                    (from, to.unwrap_or_else(|| self.classes.get(key.1).rank), send.bytes);
                let time = match known.take() {
                    Some((same, time)) if same == message => time,
                    Some(_) | None => self.time(send.op, message)?,
                };
                self.message(send.op, recv.op, &time);
                known = Some((message, time));
            }
        }
        recvs.flatten().for_each(|side| self.found.push_lonely(side.op));
        Ok(())
    }

    /// Pairs the two sides of a message that takes so long where nothing runs beside it.
    fn message(&mut self, send: u32, recv: u32, time: &Lasting) {
        let (class, op) = self.classes.op(recv);
        let Some(moving) = self.costs.moving(self.classes.get(class).role, op) else {
            self.found.push(&[send, recv], 2, true, time.clone());
            return;
        };
        let stretch = self.costs.stretched(class, op);
        self.found.push(&[send, recv], 2, true, time.map(|time| time * stretch));
        if let Some(meeting) = self.found.all.last_mut() {
            meeting.handed = Some(time.map(|time| time * moving.slower.min(stretch)));
        }
    }

    /// The time of a message, told of one op if there is no way.
    fn time(
        &self,
        number: u32,
        (from, to, bytes): (Rank, Rank, Bytes),
    ) -> Result<Lasting, SimError> {
        let time = |network: &dyn Network| self.costs.message(network, from, to, bytes);
        self.eras.message(from, to, time).map_err(|source| self.no_path(number, source))
    }

    fn no_path(&self, number: u32, source: NoPath) -> SimError {
        let (class, op) = self.classes.op(number);
        let Class { rank, role, .. } = self.classes.get(class);
        let what = describe_op(self.plan, role, op);
        let role = self.plan.programs[role.index()].name.clone();
        SimError::NoPath { rank, role, op, what, source }
    }

    /// The k-th call of a group by one class meets the k-th call of that group by the others.
    fn collectives(&mut self) {
        for (group, &kind) in self.plan.groups.iter().enumerate() {
            if !self.classes.mix(&self.plan.mesh, kind) {
                continue;
            }
            let calls: Vec<Vec<(OpId, CallId)>> = (0..self.plan.programs.len())
                .map(|role| calls_in(self.plan, RoleId::from(role), group))
                .collect();
            for class in 0..self.classes.len() as u32 {
                let members = self.plan.mesh.members(kind, self.classes.get(class).rank);
                let met = self.classes.among(self.plan, &members);
                if met.first() == Some(&class) && met.len() > 1 {
                    self.together(&met, &calls);
                }
            }
        }
    }

    /// All calls of a group whose members are of these classes.
    fn together(&mut self, met: &[u32], calls: &[Vec<(OpId, CallId)>]) {
        let of = |class: u32| &calls[self.classes.get(class).role.index()];
        let most = met.iter().map(|&class| of(class).len()).max().unwrap_or(0);
        let mut together = Vec::with_capacity(met.len());
        for k in 0..most {
            together.clear();
            let mut duration = Lasting::ZERO;
            for &class in met {
                let Some(&(op, call)) = of(class).get(k) else { continue };
                let stretch = self.costs.stretched(class, op);
                let time = self.calls.get(class, call).map(|time| time * stretch);
                duration = duration.max(time);
                together.push(self.classes.number(class, op));
            }
            self.found.push(&together, met.len() as u32, false, duration);
        }
    }

    /// A service waits for nobody; it takes the time of all that it declares.
    fn services(&mut self) -> Result<(), SimError> {
        for class in 0..self.classes.len() as u32 {
            let role = self.classes.get(class).role;
            let program = &self.plan.programs[role.index()];
            if program.services.is_empty() {
                continue;
            }
            for (index, node) in program.body.nodes.iter().enumerate() {
                let Op::Serve { service } = node.op else { continue };
                let number = self.classes.number(class, OpId::from(index));
                let time = self
                    .eras
                    .lasting(|network| self.costs.service(network, role, service))
                    .map_err(|source| self.no_path(number, source))?;
                self.found.push(&[number], 1, false, time);
            }
        }
        Ok(())
    }
}

/// The other end of a message.
type Partner = (u32, Way, Option<Rank>);

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

/// The ops with which a role takes part in a group.
fn calls_in(plan: &Plan, role: RoleId, group: usize) -> Vec<(OpId, CallId)> {
    let program = &plan.programs[role.index()];
    let nodes = program.body.nodes.iter().enumerate();
    let mine = nodes.filter_map(|(index, node)| match node.op {
        Op::Collective { call, .. } if program.call(call).group.index() == group => {
            Some((OpId::from(index), call))
        }
        Op::Collective { .. }
        | Op::Load { .. }
        | Op::Compute { .. }
        | Op::Send { .. }
        | Op::Recv { .. }
        | Op::Accumulate { .. }
        | Op::Step { .. }
        | Op::Stash { .. }
        | Op::Restore { .. }
        | Op::Free { .. }
        | Op::Serve { .. } => None,
    });
    mine.collect()
}
