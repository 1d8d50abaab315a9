//! Op matches between rank classes: the two sides of a message, the members of a collective, the
//! requests to asynchronous servers.
//!
//! The rule is that of [`paceline_plan::matching`]. It is applied to one rank of every class, and
//! to all ranks of a class that sends to a synchronous server or receives from one: the server's
//! ops address ranks one by one, and the one op of the class stands for all of them.

use super::classes::Class;
use super::workload::Workload;
use crate::error::SimError;
use paceline_plan::ids::{OpId, Rank, RoleId};
use paceline_plan::matching::{Message, Side, calls, meet, sides};
use paceline_plan::mesh::GroupKind;
use paceline_plan::program::{Op, Peer, Plan};
use std::collections::BTreeMap;

/// Ops that start together.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpMatch {
    kind: MatchKind,
    /// Number of ops that must be posted; larger than `len` if some have no counterpart.
    pub(super) expected: u32,
    /// Offset of its ops in [`MatchedOps::ops`].
    start: u32,
    len: u32,
}

/// Kind of an op match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MatchKind {
    /// Message between ranks.
    Message,
    /// Message with an asynchronous server, whose side is no op.
    Request,
    Collective,
}

impl MatchKind {
    /// Returns true for messages, which copy engines move.
    pub(super) fn moves(self) -> bool {
        match self {
            Self::Message | Self::Request => true,
            Self::Collective => false,
        }
    }
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
    /// Messages with asynchronous servers, by op match.
    requests: BTreeMap<u32, Request>,
}

impl MatchedOps {
    /// Kind of an op match.
    pub(super) fn kind(&self, op_match: u32) -> MatchKind {
        self.all[op_match as usize].kind
    }

    /// Message with an asynchronous server, by its op match.
    pub(super) fn request(&self, op_match: u32) -> Option<&Request> {
        self.requests.get(&op_match)
    }

    /// All messages with asynchronous servers.
    pub(super) fn requests(&self) -> impl Iterator<Item = &Request> {
        self.requests.values()
    }

    /// Ops of an op match.
    pub(crate) fn ops(&self, op_match: u32) -> &[u32] {
        let &OpMatch { start, len, .. } = &self.all[op_match as usize];
        &self.ops[start as usize..][..len as usize]
    }

    /// Matches that an op takes part in: one for most exchanges, one per rank of the peer role for
    /// messages with a server, none for local ops.
    pub(crate) fn of(&self, op: u32) -> &[u32] {
        &self.joined[self.first[op as usize] as usize..self.first[op as usize + 1] as usize]
    }

    /// Total number of ops over all op matches.
    pub(crate) fn joins(&self) -> usize {
        self.joined.len()
    }

    /// Number of op matches.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Adds an op match for which `expected` ops must be posted.
    fn push(&mut self, ops: &[u32], expected: u32, kind: MatchKind) {
        let start = self.ops.len() as u32;
        self.ops.extend_from_slice(ops);
        self.all.push(OpMatch { kind, expected, start, len: ops.len() as u32 });
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

/// Network's side of matching: records the exchange of every op match, in the order of matches.
pub(super) trait Wires {
    /// Records a message. If other ranks' messages are part of the same exchange, the first of them
    /// records it for all; returns the ops that it matches, or none.
    fn message(&mut self, pair: &Pair<'_>, ops: &mut Vec<u32>) -> Result<(), SimError>;

    /// Records a collective of these classes, each with its op, by the first rank of its group.
    fn collective(&mut self, first: Rank, members: &[(u32, OpId)]) -> Result<(), SimError>;

    /// Records a message with an asynchronous server, by the replica's op.
    fn request(&mut self, op: OpId, request: &Request) -> Result<(), SimError>;

    /// Records an op without counterpart, whose exchange never starts.
    fn never(&mut self);
}

/// Matching send and receive.
pub(super) struct Pair<'a> {
    /// Class, rank and message of the sender.
    pub(super) send: (u32, Rank, &'a Message),
    /// Class, rank and message of the receiver.
    pub(super) recv: (u32, Rank, &'a Message),
}

/// Message with an asynchronous server.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) job: usize,
    /// Class of the replica.
    pub(super) class: u32,
    /// Index of the server.
    pub(super) server: u32,
    /// Channel, which is the index of the bucket.
    pub(super) channel: u16,
    /// True if the replica sends.
    pub(super) pushes: bool,
    /// Bytes of the message, as its rank's view.
    pub(super) view: paceline_plan::program::View,
}

/// Finds all op matches.
pub(super) fn find<W: Wires>(load: &Workload<'_>, wires: &mut W) -> Result<MatchedOps, SimError> {
    let mut finder = Finder {
        load,
        wires,
        found: MatchedOps::default(),
        met: vec![false; load.classes.ops as usize],
    };
    for job in 0..load.jobs.len() {
        finder.job(job)?;
    }
    finder.push_unmatched();
    finder.found.index(load.classes.ops as usize);
    Ok(finder.found)
}

struct Finder<'a, 'w, W> {
    load: &'a Workload<'a>,
    wires: &'w mut W,
    found: MatchedOps,
    /// By op, true if it has a match.
    met: Vec<bool>,
}

/// Collectives of a role, by group and lane.
type RoleCalls<'p> = BTreeMap<(GroupKind, &'p str), Vec<OpId>>;

impl<W: Wires> Finder<'_, '_, W> {
    fn job(&mut self, job: usize) -> Result<(), SimError> {
        let (load, plan) = (self.load, self.load.jobs[job].plan);
        let programs = || plan.programs.iter();
        let of_role: Vec<RoleCalls<'_>> =
            programs().map(|program| calls(plan, program, &program.body)).collect();
        let (sends, recvs): (Vec<Side>, Vec<Side>) =
            programs().map(|p| sides(&p.body, |peer| answering(plan, peer).is_some())).unzip();
        for class in load.classes.of_job(job) {
            let role = load.classes.get(class).role;
            self.messages(plan, class, &sends[role.index()], &recvs)?;
            self.collectives(plan, class, &of_role)?;
            self.requests(plan, class)?;
        }
        Ok(())
    }

    fn push(&mut self, ops: &[u32], kind: MatchKind) {
        ops.iter().for_each(|&op| self.met[op as usize] = true);
        self.found.push(ops, ops.len() as u32, kind);
    }

    /// Pairs the sends of a class with the receives of their addressees.
    fn messages(
        &mut self,
        plan: &Plan,
        class: u32,
        sends: &Side,
        recvs: &[Side],
    ) -> Result<(), SimError> {
        let classes = self.load.classes;
        let Class { rank: first, job, .. } = classes.get(class);
        let (mut out, mut back, mut ops) = (Vec::new(), Vec::new(), Vec::new());
        let served = sends.peers().any(|(peer, _)| matches!(peer, Peer::Server(_)));
        for rank in classes.ranks_of(plan, class, served) {
            for receiver in sends.destinations(plan, rank) {
                // Ranks of a class differ only in what a server does for each of them.
                if rank != first && receiver.0 < plan.mesh.size() {
                    continue;
                }
                let other = classes.of_rank(plan, job, receiver);
                sends.between(plan, rank, receiver, &mut out);
                let theirs = &recvs[plan.role(receiver).index()];
                theirs.between(plan, receiver, rank, &mut back);
                for (send, recv) in meet(&out, &back) {
                    let Some(recv) = recv else { continue };
                    let pair = Pair { send: (class, rank, send), recv: (other, receiver, recv) };
                    ops.clear();
                    self.wires.message(&pair, &mut ops)?;
                    if !ops.is_empty() {
                        self.push(&ops, MatchKind::Message);
                    }
                }
            }
        }
        Ok(())
    }

    /// Matches the collectives of the groups whose first class this is.
    fn collectives(
        &mut self,
        plan: &Plan,
        class: u32,
        of_role: &[RoleCalls<'_>],
    ) -> Result<(), SimError> {
        let classes = self.load.classes;
        let Class { rank, role, job, .. } = classes.get(class);
        let mut members: Vec<(u32, OpId)> = Vec::new();
        let mut ops = Vec::new();
        for (key, mine) in &of_role[role.index()] {
            let group = plan.mesh.members(key.0, rank);
            let met = match classes.mix(&plan.mesh, key.0) {
                true => classes.among(plan, job, &group),
                false => vec![class],
            };
            let Some(&first) = group.first().filter(|_| met.first() == Some(&class)) else {
                continue;
            };
            let calls: Vec<&[OpId]> = (met.iter())
                .map(|&class| of_role[classes.get(class).role.index()].get(key))
                .map(|calls| calls.map_or(&[][..], Vec::as_slice))
                .collect();
            for k in 0..mine.len() {
                let kth =
                    met.iter().zip(&calls).map(|(&class, calls)| Some((class, *calls.get(k)?)));
                members.clear();
                members.extend(kth.flatten());
                if members.len() == met.len() {
                    self.wires.collective(first, &members)?;
                    ops.clear();
                    ops.extend(members.iter().map(|&(class, op)| classes.number(class, op)));
                    self.push(&ops, MatchKind::Collective);
                }
            }
        }
        Ok(())
    }

    /// Adds the messages of a class with asynchronous servers, which wait for no counterpart op.
    fn requests(&mut self, plan: &Plan, class: u32) -> Result<(), SimError> {
        let Class { role, job, .. } = self.load.classes.get(class);
        for (index, node) in plan.programs[role.index()].body.nodes.iter().enumerate() {
            let op = OpId::from(index);
            let (peer, channel, view, pushes) = match node.op {
                Op::Send { to, channel, view, .. } => (to, channel, view, true),
                Op::Recv { from, channel, view, .. } => (from, channel, view, false),
                Op::Serve { .. }
                | Op::Load { .. }
                | Op::Compute { .. }
                | Op::Collective { .. }
                | Op::Accumulate { .. }
                | Op::Step { .. }
                | Op::Stash { .. }
                | Op::Restore { .. }
                | Op::Free { .. } => continue,
            };
            let Some(server) = answering(plan, peer) else { continue };
            let request = Request { job, class, server, channel, pushes, view };
            self.wires.request(op, &request)?;
            self.found.requests.insert(self.found.all.len() as u32, request);
            self.push(&[self.load.classes.number(class, op)], MatchKind::Request);
        }
        Ok(())
    }

    /// Adds op matches for ops whose counterparts do not exist, so that they never complete.
    fn push_unmatched(&mut self) {
        let mut number = 0;
        for class in 0..self.load.classes.len() as u32 {
            for node in &self.load.program(class).body.nodes {
                let kind = match node.op {
                    Op::Send { .. } | Op::Recv { .. } => Some(MatchKind::Message),
                    Op::Collective { .. } => Some(MatchKind::Collective),
                    Op::Load { .. }
                    | Op::Compute { .. }
                    | Op::Accumulate { .. }
                    | Op::Step { .. }
                    | Op::Stash { .. }
                    | Op::Restore { .. }
                    | Op::Free { .. }
                    | Op::Serve { .. } => None,
                };
                if let Some(kind) = kind.filter(|_| !self.met[number as usize]) {
                    self.found.push(&[number], 2, kind);
                    self.wires.never();
                }
                number += 1;
            }
        }
    }
}

/// Index of the server that a peer is, if it answers requests as they arrive.
pub(super) fn answering(plan: &Plan, peer: Peer) -> Option<u32> {
    let Peer::Server(server) = peer else { return None };
    let role = RoleId(plan.mesh.pp + server);
    let program = plan.programs.get(role.index())?;
    (!program.services.is_empty()).then_some(server)
}
