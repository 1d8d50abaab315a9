//! Matching of ops across ranks: the two sides of a message, the members of a collective.

use super::calls::Calls;
use super::classes::{Class, Classes};
use super::time_varying::{NetworkEpochs, SimDuration};
use super::{Costs, describe_op};
use crate::error::SimError;
use crate::network::{Network, NoPath};
use paceline_plan::ids::{CallId, OpId, Rank, RoleId};
use paceline_plan::mesh::Axis;
use paceline_plan::program::{Op, Peer, Plan};
use paceline_plan::units::Bytes;
use std::collections::BTreeMap;

/// Ops that start together, and the duration of their exchange.
#[derive(Clone, Debug)]
pub(super) struct OpMatch {
    pub(super) duration: SimDuration,
    /// Duration for the first op if it ends before the others: inside a host the sender copies the
    /// message and need not wait until the receiver has been scheduled.
    pub(super) handed: Option<SimDuration>,
    /// True for a message, which copy engines move; false for a collective.
    pub(super) message: bool,
    /// Number of ops that must be posted; larger than `len` if some have no counterpart.
    pub(super) expected: u32,
    /// Offset of its ops in [`MatchedOps::ops`].
    start: u32,
    len: u32,
}

/// All op matches of the bodies of all roles.
#[derive(Clone, Debug, Default)]
pub(crate) struct MatchedOps {
    pub(super) all: Vec<OpMatch>,
    /// Op numbers, one op match after another.
    ops: Vec<u32>,
    /// Offset of each op's matches in `joined`, plus the total length as last entry.
    first: Vec<u32>,
    /// Op matches, one op after another.
    joined: Vec<u32>,
}

impl MatchedOps {
    /// Ops of an op match.
    pub(crate) fn ops(&self, op_match: u32) -> &[u32] {
        let &OpMatch { start, len, .. } = &self.all[op_match as usize];
        &self.ops[start as usize..][..len as usize]
    }

    /// Matches that an op takes part in: one for most messages, one per rank of the peer role for
    /// messages with a server, none for local ops.
    pub(crate) fn of(&self, op: u32) -> &[u32] {
        &self.joined[self.first[op as usize] as usize..self.first[op as usize + 1] as usize]
    }

    /// Total number of ops over all op matches.
    pub(crate) fn joins(&self) -> usize {
        self.joined.len()
    }

    /// Returns the same matches with durations of zero.
    pub(super) fn instant(&self) -> Self {
        let mut instant = self.clone();
        for op_match in &mut instant.all {
            (op_match.duration, op_match.handed) = (SimDuration::ZERO, None);
        }
        instant
    }

    fn push(&mut self, ops: &[u32], expected: u32, message: bool, duration: SimDuration) {
        let start = self.ops.len() as u32;
        self.ops.extend_from_slice(ops);
        let (len, handed) = (ops.len() as u32, None);
        self.all.push(OpMatch { duration, handed, message, expected, start, len });
    }

    /// Adds an op whose counterpart does not exist, so that it never completes.
    fn push_unmatched(&mut self, op: u32) {
        self.push(&[op], 2, true, SimDuration::ZERO);
    }

    /// Builds the list of each op's matches once all are known.
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
        for (index, op_match) in self.all.iter().enumerate().rev() {
            for &op in &self.ops[op_match.start as usize..][..op_match.len as usize] {
                let first = &mut self.first[op as usize];
                *first -= 1;
                self.joined[*first as usize] = index as u32;
            }
        }
    }
}

/// Finds all op matches and their durations.
pub(super) fn find(
    plan: &Plan,
    classes: &Classes,
    costs: &Costs<'_>,
    calls: &Calls,
    eras: &NetworkEpochs<'_>,
) -> Result<MatchedOps, SimError> {
    let mut finder = Matcher { plan, classes, costs, calls, eras, found: MatchedOps::default() };
    let (sends, recvs) = finder.sides()?;
    finder.messages(&sends, &recvs)?;
    finder.collectives();
    finder.services()?;
    finder.found.index(classes.ops as usize);
    Ok(finder.found)
}

struct Matcher<'a> {
    plan: &'a Plan,
    classes: &'a Classes,
    costs: &'a Costs<'a>,
    calls: &'a Calls,
    eras: &'a NetworkEpochs<'a>,
    found: MatchedOps,
}

/// Axis and distance of a message along an axis whose ranks all have the same role.
type AxisDirection = Option<(Axis, u32)>;

/// Message key: classes of sender and receiver, direction, channel and microbatch.
type Key = (u32, u32, AxisDirection, u16, u32);

/// One side of a message.
struct Side {
    key: Key,
    /// On a server's side, the rank of the other class that it addresses; the other class's ops
    /// represent all of its ranks.
    rank: Option<Rank>,
    op: u32,
    peer: Peer,
    bytes: Bytes,
}

impl Matcher<'_> {
    /// Returns all sends and all receives, sorted by key.
    fn sides(&mut self) -> Result<(Vec<Side>, Vec<Side>), SimError> {
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        for class in 0..self.classes.len() as u32 {
            let role = self.classes.get(class).role;
            let program = &self.plan.programs[role.index()];
            // There are few peers and many messages, so each peer is resolved once.
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
                    self.found.push_unmatched(number);
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

    /// Returns the peer's class, the direction of the message, and the rank if a server addresses
    /// one; `None` if there is no such peer.
    ///
    /// Along an axis, a send to the next rank matches a receive from the previous one. Both are
    /// expressed as the distance the message travels, so on an axis of two the next rank equals the
    /// previous one.
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

    /// Returns true if a server answers requests as they arrive, without a matching op of its own.
    fn serves(&self, server: u32) -> bool {
        let role = (self.plan.mesh.pp + server) as usize;
        self.plan.programs.get(role).is_some_and(|program| !program.services.is_empty())
    }

    /// Adds a message to or from an asynchronous server, which is always ready.
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
        // Adjacent keys differ only in the microbatch, so this avoids nearly all lookups.
        let mut known: Option<((Rank, Rank, Bytes), SimDuration)> = None;
        for sends in sends.chunk_by(|a, b| a.key == b.key) {
            let key = sends[0].key;
            while let Some(lonely) = recvs.next_if(|recvs| recvs[0].key < key) {
                lonely.iter().for_each(|side| self.found.push_unmatched(side.op));
            }
            let recvs = recvs.next_if(|recvs| recvs[0].key == key).unwrap_or(&[]);
            for (send, recv) in pairs(sends, recvs) {
                let (Some(send), Some(recv)) = (send, recv) else {
                    send.or(recv).into_iter().for_each(|side| self.found.push_unmatched(side.op));
                    continue;
                };
                // A server's side names the rank of the other class.
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
        recvs.flatten().for_each(|side| self.found.push_unmatched(side.op));
        Ok(())
    }

    /// Pairs the two sides of a message that takes `time` without contention.
    fn message(&mut self, send: u32, recv: u32, time: &SimDuration) {
        let (class, op) = self.classes.op(recv);
        let Some(moving) = self.costs.exchange_cost(self.classes.get(class).role, op) else {
            self.found.push(&[send, recv], 2, true, time.clone());
            return;
        };
        let stretch = self.costs.slowdown(class, op);
        self.found.push(&[send, recv], 2, true, time.map(|time| time * stretch));
        if let Some(op_match) = self.found.all.last_mut() {
            op_match.handed = Some(time.map(|time| time * moving.cold_factor.min(stretch)));
        }
    }

    /// Time of a message; an error names op `number` if there is no path.
    fn time(
        &self,
        number: u32,
        (from, to, bytes): (Rank, Rank, Bytes),
    ) -> Result<SimDuration, SimError> {
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

    /// Matches the k-th call of a group by one class with the k-th call by the others.
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
                    self.match_collective(&met, &calls);
                }
            }
        }
    }

    /// Matches all calls of a group whose members belong to the classes `met`.
    fn match_collective(&mut self, met: &[u32], calls: &[Vec<(OpId, CallId)>]) {
        let of = |class: u32| &calls[self.classes.get(class).role.index()];
        let most = met.iter().map(|&class| of(class).len()).max().unwrap_or(0);
        let mut together = Vec::with_capacity(met.len());
        for k in 0..most {
            together.clear();
            let mut duration = SimDuration::ZERO;
            for &class in met {
                let Some(&(op, call)) = of(class).get(k) else { continue };
                let stretch = self.costs.slowdown(class, op);
                let time = self.calls.get(class, call).map(|time| time * stretch);
                duration = duration.max(time);
                together.push(self.classes.number(class, op));
            }
            self.found.push(&together, met.len() as u32, false, duration);
        }
    }

    /// Adds services: each waits for no counterpart and takes the time of all requests it declares.
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
                    .duration(|network| self.costs.service(network, role, service))
                    .map_err(|source| self.no_path(number, source))?;
                self.found.push(&[number], 1, false, time);
            }
        }
        Ok(())
    }
}

/// Other end of a message: class, direction and addressed rank.
type Partner = (u32, AxisDirection, Option<Rank>);

/// Matches the sides of one key. If one side is a server's, each of its ops addresses one rank, and
/// the other role's k-th op represents the k-th op of every rank.
fn pairs<'s>(
    sends: &'s [Side],
    recvs: &'s [Side],
) -> impl Iterator<Item = (Option<&'s Side>, Option<&'s Side>)> {
    let from_server = sends.first().is_some_and(|side| side.rank.is_some());
    let (one, many) = if from_server { (recvs, sends) } else { (sends, recvs) };
    // Without a counterpart there is a single empty run.
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

/// Collective ops of a role in a group.
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
