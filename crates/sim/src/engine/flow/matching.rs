//! Matching of ops across classes: the two sides of a message, the members of a collective, a
//! server and its clients.

use super::exchanges::{Exchanges, OpComm};
use crate::engine::Costs;
use crate::engine::classes::{Class, Classes};
use crate::network::Vector;
use crate::network::flow::{Folded, Party};
use paceline_plan::ids::{GroupId, OpId, Rank, RoleId};
use paceline_plan::program::Plan;
use std::collections::BTreeMap;

/// All op matches of the bodies of all classes.
pub(super) struct MatchedOps {
    pub(super) all: Vec<OpMatch>,
    /// Message bytes by size, per combination of exchange and vector that occurs.
    pub(super) tables: Vec<Vec<f64>>,
    /// Op match of each op, or [`NONE`].
    pub(super) of: Vec<u32>,
    /// Op of each party, one op match after another; [`NONE`] for an asynchronous server.
    ops: Vec<u32>,
    /// Ops of each asynchronous server, and the number of requests they wait for.
    pub(super) servers: BTreeMap<u32, Service>,
}

/// Ops that start together, and their exchange.
#[derive(Clone, Copy)]
pub(super) struct OpMatch {
    /// Exchange class.
    pub(super) exchange: u32,
    /// Index into `tables`.
    pub(super) table: u32,
    /// Number of ops that must be posted; larger than `len` if some have no counterpart.
    pub(super) expected: u32,
    /// Server that receives or answers the request, if any.
    pub(super) server: Option<u32>,
    /// True for a message, which copy engines move; false for a collective.
    pub(super) message: bool,
    /// Unexposed rest that follows the exchange, as an index into `tables`.
    pub(super) rest: Option<u32>,
    first: u32,
    len: u32,
}

/// Asynchronous server.
#[derive(Clone, Default)]
pub(super) struct Service {
    pub(super) ops: Vec<u32>,
    pub(super) requests: u32,
}

/// No op or no op match.
pub(super) const NONE: u32 = u32::MAX;

impl MatchedOps {
    /// Op of each party of an op match.
    pub(super) fn ops(&self, op_match: u32) -> &[u32] {
        let OpMatch { first, len, .. } = self.all[op_match as usize];
        &self.ops[first as usize..][..len as usize]
    }
}

/// Finds all op matches.
pub(super) fn find(
    plan: &Plan,
    costs: &Costs<'_>,
    exchanges: &Exchanges<'_>,
    folded: &Folded,
    classes: &Classes,
) -> MatchedOps {
    let found = MatchedOps {
        all: Vec::new(),
        tables: Vec::new(),
        of: vec![NONE; classes.ops as usize],
        ops: Vec::new(),
        servers: BTreeMap::new(),
    };
    let mut finder =
        Matcher { plan, costs, exchanges, folded, classes, tables: BTreeMap::new(), found };
    let roles: Vec<Role> =
        (0..plan.programs.len()).map(|role| finder.role(RoleId::from(role))).collect();
    for class in 0..classes.all.len() as u32 {
        finder.collectives(class, &roles);
        finder.messages(class, &roles);
        finder.requests(class);
    }
    finder.push_unmatched();
    finder.found
}

struct Matcher<'a> {
    plan: &'a Plan,
    costs: &'a Costs<'a>,
    exchanges: &'a Exchanges<'a>,
    folded: &'a Folded,
    classes: &'a Classes,
    /// Tables by script, vector and fraction of it.
    tables: BTreeMap<(u32, Vector, u64), u32>,
    found: MatchedOps,
}

/// Communication of a role, sorted.
struct Role {
    /// By group, the ops that call it, in program order.
    calls: BTreeMap<GroupId, Vec<OpId>>,
    /// Sorted by channel, microbatch and program order.
    sends: Vec<(Key, OpId)>,
    recvs: Vec<(Key, OpId)>,
}

/// Message key between two ranks: channel and microbatch.
type Key = (u16, u32);

impl Matcher<'_> {
    fn role(&self, role: RoleId) -> Role {
        let mut sorted = Role { calls: BTreeMap::new(), sends: Vec::new(), recvs: Vec::new() };
        for (op, part) in self.exchanges.parts(role) {
            match part {
                OpComm::Member { group, .. } => sorted.calls.entry(group).or_default().push(op),
                OpComm::Send { channel, microbatch, .. } => {
                    sorted.sends.push(((channel, microbatch), op));
                }
                OpComm::Recv { channel, microbatch, .. } => {
                    sorted.recvs.push(((channel, microbatch), op));
                }
                OpComm::Alone | OpComm::Request { .. } | OpComm::Serve => {}
            }
        }
        sorted.sends.sort_unstable();
        sorted.recvs.sort_unstable();
        sorted
    }

    /// Matches the k-th call of a group on one member with the k-th call of that group on the
    /// others. The first class of a group does so for all.
    fn collectives(&mut self, class: u32, roles: &[Role]) {
        let Class { rank, role, .. } = self.classes.all[class as usize];
        for (&group, mine) in &roles[role.index()].calls {
            let members = self.plan.mesh.members(self.plan.group(group), rank);
            let Some(&first) = members.first() else { continue };
            let others = self.classes_of(&members);
            if others.first() != Some(&class) {
                continue;
            }
            for (k, &op) in mine.iter().enumerate() {
                let OpComm::Member { mark, vector, .. } = self.exchanges.part(role, op) else {
                    continue;
                };
                let Some(exchange) = self.exchanges.find(mark, first) else { continue };
                let kth = |class: u32, _: Party| {
                    let role = self.classes.all[class as usize].role;
                    roles[role.index()].calls.get(&group)?.get(k).copied()
                };
                let ops = self.parties(exchange, kth);
                let share = self.exposed(class, op);
                self.push_match(exchange, &vector, share, &ops, false);
            }
        }
    }

    /// Pairs the k-th send of a key to a rank with that rank's k-th receive of it from this one.
    fn messages(&mut self, class: u32, roles: &[Role]) {
        let Class { rank, role, .. } = self.classes.all[class as usize];
        let mut taken: BTreeMap<(Rank, Key), usize> = BTreeMap::new();
        let mut sources = Sources::default();
        for &(key, op) in &roles[role.index()].sends {
            let OpComm::Send { mark, to, bytes, sliced, .. } = self.exchanges.part(role, op) else {
                continue;
            };
            let Some(receiver) = self.plan.peer(rank, to) else { continue };
            let k = taken.entry((receiver, key)).or_insert(0);
            let theirs = sources.of(self, receiver, rank, roles);
            let start = theirs.partition_point(|&(other, _)| other < key);
            let recv = theirs.get(start + *k).filter(|(other, _)| *other == key);
            *k += 1;
            let Some(&(_, recv)) = recv else { continue };
            let first = if sliced {
                let senders = self.exchanges.slices(rank);
                if self.classes_of(&senders).first() != Some(&class) {
                    continue;
                }
                senders[0]
            } else {
                rank
            };
            let Some(exchange) = self.exchanges.find(mark, first) else { continue };
            let side = |_, party: Party| match party {
                Party::Sender => Some(op),
                Party::Receiver => Some(recv),
                Party::Member | Party::Server => None,
            };
            let ops = self.parties(exchange, side);
            self.push_match(exchange, &Vector::of_bytes(bytes), 1.0, &ops, true);
        }
    }

    /// Matches requests to asynchronous servers; the requester waits for no counterpart op.
    fn requests(&mut self, class: u32) {
        let Class { rank, role, .. } = self.classes.all[class as usize];
        for (op, part) in self.exchanges.parts(role) {
            match part {
                OpComm::Request { mark, server, bytes } => {
                    let Some(exchange) = self.exchanges.find(mark, rank) else { continue };
                    let asks = |_, party: Party| (party != Party::Server).then_some(op);
                    let ops = self.parties(exchange, asks);
                    self.push_match(exchange, &Vector::of_bytes(bytes), 1.0, &ops, true);
                    if let Some(op_match) = self.found.all.last_mut() {
                        op_match.server = Some(server);
                    }
                    self.found.servers.entry(server).or_default().requests += 1;
                }
                OpComm::Serve => {
                    let server = role.0 - self.plan.mesh.pp;
                    let number = self.classes.number(class, op);
                    self.found.servers.entry(server).or_default().ops.push(number);
                }
                OpComm::Alone
                | OpComm::Member { .. }
                | OpComm::Send { .. }
                | OpComm::Recv { .. } => {}
            }
        }
    }

    /// Adds op matches for ops whose counterparts do not exist, so that they never complete.
    fn push_unmatched(&mut self) {
        for class in 0..self.classes.all.len() as u32 {
            for (op, part) in self.exchanges.parts(self.classes.all[class as usize].role) {
                let number = self.classes.number(class, op);
                let meets = match part {
                    OpComm::Alone | OpComm::Serve => true,
                    OpComm::Member { .. }
                    | OpComm::Send { .. }
                    | OpComm::Recv { .. }
                    | OpComm::Request { .. } => self.found.of[number as usize] != NONE,
                };
                if !meets {
                    self.push(0, 0, &[number], 2);
                }
            }
        }
    }

    /// Op of each party of an exchange, by class.
    fn parties(&self, exchange: u32, op: impl Fn(u32, Party) -> Option<OpId>) -> Vec<Option<u32>> {
        let class = self.folded.classes[exchange as usize];
        let parties = &self.folded.exchanges[class as usize].parties;
        let number = |&(class, party): &(u32, Party)| match party {
            Party::Server => Some(NONE),
            Party::Member | Party::Sender | Party::Receiver => {
                op(class, party).map(|op| self.classes.number(class, op))
            }
        };
        parties.iter().map(number).collect()
    }

    /// Records an op match if all parties have ops; otherwise the existing ops stay unmatched.
    fn push_match(
        &mut self,
        exchange: u32,
        vector: &Vector,
        share: f64,
        ops: &[Option<u32>],
        message: bool,
    ) {
        let Some(ops) = ops.iter().copied().collect::<Option<Vec<u32>>>() else { return };
        let table = self.table(exchange, vector, share);
        let rest = (share < 1.0).then(|| self.table(exchange, vector, 1.0 - share));
        let expected = ops.iter().filter(|&&op| op != NONE).count() as u32;
        self.push(self.folded.classes[exchange as usize], table, &ops, expected);
        if let Some(op_match) = self.found.all.last_mut() {
            (op_match.rest, op_match.message) = (rest, message);
        }
    }

    /// Index of the table with the bytes of a fraction of an exchange's messages.
    fn table(&mut self, exchange: u32, vector: &Vector, share: f64) -> u32 {
        let traffic = &self.exchanges.traffic;
        let tables = &mut self.found.tables;
        let key = (traffic.script_of(exchange), *vector, share.to_bits());
        *self.tables.entry(key).or_insert_with(|| {
            let bytes = traffic.bytes(exchange, vector);
            tables.push(bytes.into_iter().map(|bytes| bytes * share).collect());
            tables.len() as u32 - 1
        })
    }

    /// Fraction of a collective that its members wait for.
    fn exposed(&self, class: u32, op: OpId) -> f64 {
        let class = self.classes.get(class);
        let program = &self.plan.programs[class.role.index()];
        let call = program.body.nodes[op.index()].op.call();
        call.map_or(1.0, |call| self.costs.exposure(&class, program.call(call)).share)
    }

    fn push(&mut self, exchange: u32, table: u32, ops: &[u32], expected: u32) {
        let op_match = self.found.all.len() as u32;
        for &op in ops.iter().filter(|&&op| op != NONE) {
            self.found.of[op as usize] = op_match;
        }
        let (first, len) = (self.found.ops.len() as u32, ops.len() as u32);
        self.found.ops.extend_from_slice(ops);
        let (server, message, rest) = (None, false, None);
        let op_match = OpMatch { exchange, table, expected, server, message, rest, first, len };
        self.found.all.push(op_match);
    }

    /// Distinct classes of `ranks`, in ascending order.
    fn classes_of(&self, ranks: &[Rank]) -> Vec<u32> {
        self.classes.among(self.plan, ranks)
    }
}

/// Receives of each rank from the rank whose sends are being matched.
#[derive(Default)]
struct Sources {
    known: BTreeMap<Rank, Vec<(Key, OpId)>>,
}

impl Sources {
    fn of(&mut self, finder: &Matcher<'_>, at: Rank, from: Rank, roles: &[Role]) -> &[(Key, OpId)] {
        self.known.entry(at).or_insert_with(|| {
            let role = finder.plan.role(at);
            let mine = |&&(_, op): &&(Key, OpId)| {
                let OpComm::Recv { from: peer, .. } = finder.exchanges.part(role, op) else {
                    return false;
                };
                finder.plan.peer(at, peer) == Some(from)
            };
            roles[role.index()].recvs.iter().filter(mine).copied().collect()
        })
    }
}
