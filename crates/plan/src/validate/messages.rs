//! Checks that every send matches one receive, on the rank it names, with the same channel and
//! microbatch.
//!
//! Ranks of one role send the same messages to peers in the same direction, so checking each role's
//! first rank is sufficient. Servers break this symmetry: they name every rank of the mesh by
//! number, so messages to and from them are checked on all ranks of the role.

use super::matching::Numbering;
use super::{Report, SectionKind, ViolationKind};
use crate::dtype::DType;
use crate::ids::{OpId, Rank, RoleId};
use crate::program::{Op, Peer, Plan, Program, View};

/// Checks one section of all roles; appends the matching pairs of ops.
pub(super) fn check(report: &mut Report<'_>, ops: &Numbering, pairs: &mut Vec<(u32, u32)>) {
    let plan = report.plan;
    let section = ops.section;
    let served: Vec<Option<Totals>> = (plan.mesh.pp..plan.mesh.pp + plan.mesh.servers)
        .map(|role| served(&plan.programs[role as usize], section))
        .collect();
    let (sends, recvs): (Vec<Side>, Vec<Side>) =
        plan.programs.iter().map(|program| sides(program, section, &served)).unzip();
    let (mut out, mut back) = (Vec::new(), Vec::new());
    for role in (0..plan.programs.len()).map(RoleId::from) {
        check_services(report, section, role, &served);
        for sender in ranks(plan, role, &sends[role.index()]) {
            let side = &sends[role.index()];
            for receiver in destinations(report, section, role, sender, side) {
                let other = plan.role(receiver);
                side.between(plan, sender, receiver, &mut out);
                recvs[other.index()].between(plan, receiver, sender, &mut back);
                let mut pairing = Pairing { report, ops, sender, receiver, role, other };
                pairing.sends(&out, &back, pairs);
            }
        }
        for receiver in ranks(plan, role, &recvs[role.index()]) {
            let side = &recvs[role.index()];
            for sender in destinations(report, section, role, receiver, side) {
                let other = plan.role(sender);
                side.between(plan, receiver, sender, &mut out);
                sends[other.index()].between(plan, sender, receiver, &mut back);
                let kind = ViolationKind::UnmatchedRecv { from: sender };
                for (message, counterpart) in meet(&out, &back) {
                    if counterpart.is_none() {
                        report.op_on(receiver, role, section, message.op, kind.clone());
                    }
                }
            }
        }
    }
}

/// One end of a message.
struct Message {
    peer: Peer,
    channel: u16,
    microbatch: u32,
    op: OpId,
    elements: u64,
    dtype: DType,
}

impl Message {
    /// Key that distinguishes messages between two ranks.
    fn key(&self) -> (u16, u32) {
        (self.channel, self.microbatch)
    }
}

/// All sends, or all receives, of a role: sorted by peer, channel and microbatch.
struct Side {
    messages: Vec<Message>,
    /// End index of each peer's messages.
    peers: Vec<(Peer, usize)>,
}

impl Side {
    fn new(mut messages: Vec<Message>) -> Self {
        messages.sort_unstable_by_key(|m| (m.peer, m.channel, m.microbatch, m.op));
        let mut peers: Vec<(Peer, usize)> = Vec::new();
        for (at, message) in messages.iter().enumerate() {
            match peers.last_mut() {
                Some((peer, end)) if *peer == message.peer => *end = at + 1,
                _ => peers.push((message.peer, at + 1)),
            }
        }
        Self { messages, peers }
    }

    /// Collects the messages that `rank`, of this role, exchanges with `other`, sorted by key. Two
    /// peers can be the same rank: on an axis of two, next and previous coincide.
    fn between<'m>(&'m self, plan: &Plan, rank: Rank, other: Rank, found: &mut Vec<&'m Message>) {
        found.clear();
        let (mut start, mut parts) = (0, 0);
        for &(peer, end) in &self.peers {
            if plan.peer(rank, peer) == Some(other) {
                found.extend(&self.messages[start..end]);
                parts += 1;
            }
            start = end;
        }
        if parts > 1 {
            found.sort_unstable_by_key(|message| (message.key(), message.op));
        }
    }
}

fn sides(program: &Program, section: SectionKind, served: &[Option<Totals>]) -> (Side, Side) {
    let (mut sends, mut recvs) = (Vec::new(), Vec::new());
    for (index, node) in section.of(program).nodes.iter().enumerate() {
        let (list, peer, channel, view, microbatch) = match node.op {
            Op::Send { to, channel, view, microbatch } => {
                (&mut sends, to, channel, view, microbatch)
            }
            Op::Recv { from, channel, view, microbatch } => {
                (&mut recvs, from, channel, view, microbatch)
            }
            _ => continue,
        };
        if !is_served(peer, served) {
            let View { buffer, len, .. } = view;
            let dtype = program.buffer(buffer).dtype;
            let (op, microbatch) = (OpId(index as u32), microbatch.0);
            list.push(Message { peer, channel, microbatch, op, elements: len, dtype });
        }
    }
    (Side::new(sends), Side::new(recvs))
}

/// Ranks of a role whose messages must be checked.
fn ranks(plan: &Plan, role: RoleId, side: &Side) -> Vec<Rank> {
    let first = plan.representative(role);
    let ranks = if role.0 < plan.mesh.pp { plan.mesh.size() / plan.mesh.pp } else { 1 };
    let with_servers = side.peers.iter().any(|(peer, _)| matches!(peer, Peer::Server(_)));
    (first.0..first.0 + if with_servers { ranks } else { 1 }).map(Rank).collect()
}

/// Ranks that a side's peers resolve to, each once; peers that resolve to none are reported.
fn destinations(
    report: &mut Report<'_>,
    section: SectionKind,
    role: RoleId,
    rank: Rank,
    side: &Side,
) -> Vec<Rank> {
    let mut ranks = Vec::with_capacity(side.peers.len());
    let mut start = 0;
    for &(peer, end) in &side.peers {
        match report.plan.peer(rank, peer) {
            Some(other) => ranks.push(other),
            None => {
                for message in &side.messages[start..end] {
                    report.op_on(rank, role, section, message.op, ViolationKind::NoPeer);
                }
            }
        }
        start = end;
    }
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// Matches the messages of one end with those of the other; among equal keys, in order.
fn meet<'m>(
    these: &'m [&'m Message],
    those: &'m [&'m Message],
) -> impl Iterator<Item = (&'m Message, Option<&'m Message>)> {
    let mut rest = those.iter().peekable();
    these.iter().map(move |message| {
        while rest.next_if(|other| other.key() < message.key()).is_some() {}
        (*message, rest.next_if(|other| other.key() == message.key()).copied())
    })
}

struct Pairing<'p, 'a> {
    report: &'p mut Report<'a>,
    ops: &'p Numbering,
    sender: Rank,
    receiver: Rank,
    role: RoleId,
    other: RoleId,
}

impl Pairing<'_, '_> {
    fn sends(&mut self, sends: &[&Message], recvs: &[&Message], pairs: &mut Vec<(u32, u32)>) {
        let section = self.ops.section;
        for (send, recv) in meet(sends, recvs) {
            let Some(recv) = recv else {
                let kind = ViolationKind::UnmatchedSend { to: self.receiver };
                self.report.op_on(self.sender, self.role, section, send.op, kind);
                continue;
            };
            if (send.elements, send.dtype) != (recv.elements, recv.dtype) {
                let kind = ViolationKind::MessageShape {
                    elements: send.elements,
                    dtype: send.dtype,
                    to: self.receiver,
                    recv: self.report.site(self.other, section, recv.op),
                    recv_elements: recv.elements,
                    recv_dtype: recv.dtype,
                };
                self.report.op_on(self.sender, self.role, section, send.op, kind);
            }
            let send = self.ops.number(self.role, send.op);
            pairs.push((send, self.ops.number(self.other, recv.op)));
        }
    }
}

/// Elements that an asynchronous server exchanges with each peer in one run of a section.
#[derive(Clone, Copy, Default)]
struct Totals {
    received: u64,
    sent: u64,
}

/// Totals that a server's `serve` ops declare; `None` if it has no such op.
fn served(program: &Program, section: SectionKind) -> Option<Totals> {
    let mut all = None;
    for node in &section.of(program).nodes {
        if let Op::Serve { service } = node.op {
            let service = &program.services[service as usize];
            let totals: &mut Totals = all.get_or_insert_default();
            let requests = u64::from(service.requests);
            let add = |sum: u64, len: u64| sum.saturating_add(requests.saturating_mul(len));
            totals.received = add(totals.received, service.receives.len);
            totals.sent = add(totals.sent, service.sends.len);
        }
    }
    all
}

fn is_served(peer: Peer, served: &[Option<Totals>]) -> bool {
    match peer {
        Peer::Server(server) => served.get(server as usize).is_some_and(Option::is_some),
        Peer::Stage(_) | Peer::Next(_) | Peer::Previous(_) | Peer::Replica(_) => false,
    }
}

/// Compares a role's traffic with asynchronous servers with the totals that those declare.
fn check_services(
    report: &mut Report<'_>,
    section: SectionKind,
    role: RoleId,
    served: &[Option<Totals>],
) {
    let mesh = report.plan.mesh;
    if role.0 >= mesh.pp || served.iter().all(Option::is_none) {
        return;
    }
    let mut found = vec![Totals::default(); served.len()];
    for node in &section.of(report.program(role)).nodes {
        match node.op {
            Op::Send { to: peer @ Peer::Server(k), view, .. } if is_served(peer, served) => {
                let sum = &mut found[k as usize].received;
                *sum = sum.saturating_add(view.len);
            }
            Op::Recv { from: peer @ Peer::Server(k), view, .. } if is_served(peer, served) => {
                let sum = &mut found[k as usize].sent;
                *sum = sum.saturating_add(view.len);
            }
            _ => {}
        }
    }
    for (server, (found, served)) in found.iter().zip(served).enumerate() {
        let Some(served) = served else { continue };
        let server = Rank(mesh.size() + server as u32);
        for (verb, found, expected) in
            [("sends", found.received, served.received), ("receives", found.sent, served.sent)]
        {
            if found != expected {
                report.role(role, ViolationKind::ServiceTotal { verb, server, expected, found });
            }
        }
    }
}
