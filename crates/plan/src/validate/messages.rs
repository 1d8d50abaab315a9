//! Checks that every send matches one receive, on the rank it names, with the same channel and
//! microbatch.
//!
//! Ranks of one role send the same messages to peers in the same direction, so checking each role's
//! first rank is sufficient. Servers break this symmetry: they name every rank of the mesh by
//! number, so messages to and from them are checked on all ranks of the role.

use super::links::Numbering;
use super::{Report, SectionKind, ViolationKind};
use crate::ids::{Rank, RoleId};
use crate::matching::{Message, Side, meet, sides};
use crate::program::{Op, Peer, Plan, Program};

/// Checks one section of all roles; appends the matching pairs of ops.
pub(super) fn check(report: &mut Report<'_>, ops: &Numbering, pairs: &mut Vec<(u32, u32)>) {
    let plan = report.plan;
    let section = ops.section;
    let served: Vec<Option<Totals>> = (plan.mesh.pp..plan.mesh.pp + plan.mesh.servers)
        .map(|role| served(&plan.programs[role as usize], section))
        .collect();
    let (sends, recvs): (Vec<Side>, Vec<Side>) = (plan.programs.iter())
        .map(|program| sides(section.of(program), |peer| is_served(peer, &served)))
        .unzip();
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

/// Ranks of a role whose messages must be checked.
fn ranks(plan: &Plan, role: RoleId, side: &Side) -> Vec<Rank> {
    let first = plan.representative(role);
    let ranks = if role.0 < plan.mesh.pp { plan.mesh.size() / plan.mesh.pp } else { 1 };
    let with_servers = side.peers().any(|(peer, _)| matches!(peer, Peer::Server(_)));
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
    for (peer, messages) in side.peers() {
        if report.plan.peer(rank, peer).is_none() {
            for message in messages {
                report.op_on(rank, role, section, message.op, ViolationKind::NoPeer);
            }
        }
    }
    side.destinations(report.plan, rank)
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
            let dtype = |role: RoleId, message: &Message| {
                self.report.program(role).buffer(message.view.buffer).dtype
            };
            let (dtype, recv_dtype) = (dtype(self.role, send), dtype(self.other, recv));
            let (elements, recv_elements) = (send.view.len, recv.view.len);
            if (elements, dtype) != (recv_elements, recv_dtype) {
                let (to, recv) = (self.receiver, self.report.site(self.other, section, recv.op));
                let kind = ViolationKind::MessageShape {
                    elements,
                    dtype,
                    to,
                    recv,
                    recv_elements,
                    recv_dtype,
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
