//! Exchanges of all op matches, as the flow network posts them.

use super::exchanges::{Exchanges, OpComm};
use crate::engine::classes::Class;
use crate::engine::matching::{MatchedOps, Pair, Request, Wires, find};
use crate::engine::workload::Workload;
use crate::error::SimError;
use crate::network::Vector;
use crate::network::flow::{Folded, Party as Role};
use paceline_plan::ids::{OpId, Rank};
use std::collections::BTreeMap;

/// Exchanges by op match.
#[derive(Default)]
pub(in crate::engine) struct Postings {
    pub(super) all: Vec<Kind>,
    /// Message bytes by size, per combination of exchange and vector that occurs.
    pub(super) tables: Vec<Vec<f64>>,
    /// Parties of the exchanges, one exchange after another.
    pub(super) parties: Vec<Party>,
}

/// Network traffic of an op match.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// Messages on links.
    Exchange {
        /// Exchange class.
        exchange: u32,
        /// Index into `tables`.
        table: u32,
        /// Unexposed rest that follows the exchange, as an index into `tables`.
        rest: Option<u32>,
        /// Offset of its parties.
        first: u32,
    },
    /// Exchange without counterpart.
    Never,
}

/// Party of an exchange.
#[derive(Clone, Copy)]
pub(super) struct Party {
    /// Op that ends with it, or [`super::NONE`] for an asynchronous server.
    pub(super) op: u32,
    /// Time of the copies before and after a collective.
    pub(super) copies: f64,
}

impl Postings {
    /// Finds all op matches of a workload and their exchanges.
    pub(in crate::engine) fn of(
        load: &Workload<'_>,
        exchanges: &Exchanges<'_>,
        folded: &Folded,
    ) -> Result<(Self, MatchedOps), SimError> {
        let (tables, found) = (BTreeMap::new(), Self::default());
        let mut recorder = Recorder { load, exchanges, folded, tables, found };
        let matches = find(load, &mut recorder)?;
        Ok((recorder.found, matches))
    }
}

struct Recorder<'a> {
    load: &'a Workload<'a>,
    exchanges: &'a Exchanges<'a>,
    folded: &'a Folded,
    /// Tables by script, vector and fraction of it.
    tables: BTreeMap<(u32, Vector, u64), u32>,
    found: Postings,
}

impl Recorder<'_> {
    /// Records an exchange with the op of each party; returns false, without a trace of it, if a
    /// party has none.
    fn push(
        &mut self,
        exchange: u32,
        vector: &Vector,
        share: f64,
        op: impl Fn(u32, Role) -> Option<Party>,
    ) -> bool {
        let first = self.found.parties.len();
        let class = self.folded.classes[exchange as usize];
        for &(folded, role) in &self.folded.exchanges[class as usize].parties {
            let party = match role {
                Role::Server => Some(Party { op: super::NONE, copies: 0.0 }),
                Role::Member | Role::Sender | Role::Receiver => {
                    op(self.load.classes.of_traffic(folded), role)
                }
            };
            let Some(party) = party else {
                self.found.parties.truncate(first);
                return false;
            };
            self.found.parties.push(party);
        }
        let table = self.table(exchange, vector, share);
        let rest = (share < 1.0).then(|| self.table(exchange, vector, 1.0 - share));
        self.found.all.push(Kind::Exchange { exchange: class, table, rest, first: first as u32 });
        true
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

    fn party(&self, class: u32, op: OpId) -> Party {
        Party { op: self.load.classes.number(class, op), copies: 0.0 }
    }

    /// Copies before and after a collective, and the fraction of it that its members wait for.
    fn exposure(&self, class: u32, op: OpId) -> (f64, f64) {
        let program = self.load.program(class);
        let Some(call) = program.body.nodes[op.index()].op.call() else { return (0.0, 1.0) };
        let of = self.load.classes.get(class);
        let exposure = self.load.job(class).costs.exposure(&of, program.call(call));
        (exposure.copies.0, exposure.share)
    }
}

impl Wires for Recorder<'_> {
    fn message(&mut self, pair: &Pair<'_>, ops: &mut Vec<u32>) -> Result<(), SimError> {
        let ((class, from, send), (_, _, recv)) = (pair.send, pair.recv);
        let Class { job, role, .. } = self.load.classes.get(class);
        let OpComm::Send { mark, bytes, sliced } = self.exchanges.part(job, role, send.op) else {
            return Ok(());
        };
        let mut first = from;
        if sliced {
            let plan = self.load.job(class).plan;
            let senders = self.exchanges.slices(job, from);
            if self.load.classes.among(plan, job, &senders).first() != Some(&class) {
                return Ok(());
            }
            first = senders[0];
        }
        let Some(exchange) = self.exchanges.find(mark, first) else { return Ok(()) };
        let vector = Vector::of_bytes(bytes);
        let (load, start) = (self.load, self.found.parties.len());
        let side = |class, role| {
            match role {
                Role::Sender => Some(send.op),
                Role::Receiver => Some(recv.op),
                Role::Member | Role::Server => None,
            }
            .map(|op| Party { op: load.classes.number(class, op), copies: 0.0 })
        };
        if self.push(exchange, &vector, 1.0, side) {
            ops.extend(self.found.parties[start..].iter().map(|party| party.op));
        }
        Ok(())
    }

    fn collective(&mut self, first: Rank, members: &[(u32, OpId)]) -> Result<(), SimError> {
        let (class, op) = members[0];
        let Class { job, role, .. } = self.load.classes.get(class);
        let found = match self.exchanges.part(job, role, op) {
            OpComm::Member { mark, vector } => {
                self.exchanges.find(mark, first).map(|exchange| (exchange, vector))
            }
            OpComm::Alone | OpComm::Send { .. } | OpComm::Request { .. } => None,
        };
        let exposure: Vec<(f64, f64)> =
            members.iter().map(|&(class, op)| self.exposure(class, op)).collect();
        let (_, share) = exposure[0];
        let load = self.load;
        let kth = |class: u32, _: Role| {
            let at = members.binary_search_by_key(&class, |&(class, _)| class).ok()?;
            let op = load.classes.number(class, members[at].1);
            Some(Party { op, copies: exposure[at].0 })
        };
        let pushed =
            found.is_some_and(|(exchange, vector)| self.push(exchange, &vector, share, kth));
        if !pushed {
            self.never();
        }
        Ok(())
    }

    fn request(&mut self, op: OpId, request: &Request) -> Result<(), SimError> {
        let class = request.class;
        let Class { job, role, rank, .. } = self.load.classes.get(class);
        let found = match self.exchanges.part(job, role, op) {
            OpComm::Request { mark, bytes } => {
                self.exchanges.find(mark, rank).map(|exchange| (exchange, bytes))
            }
            OpComm::Alone | OpComm::Send { .. } | OpComm::Member { .. } => None,
        };
        let asks = self.party(class, op);
        let pushed = found.is_some_and(|(exchange, bytes)| {
            self.push(exchange, &Vector::of_bytes(bytes), 1.0, |_, _| Some(asks))
        });
        if !pushed {
            self.never();
        }
        Ok(())
    }

    fn never(&mut self) {
        self.found.all.push(Kind::Never);
    }
}
