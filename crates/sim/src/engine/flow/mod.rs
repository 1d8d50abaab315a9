//! Flow network of a workload: communication time depends on all concurrent traffic.
//!
//! An exchange is a set of flows that share links with all others in flight and end accordingly. A
//! rank continues when its own messages have finished.
//!
//! The part of a tensor-parallel exchange that software hides behind GEMMs (`interference`) follows
//! the exposed part. No rank waits for it, but it takes its share of the links.
//!
//! **Folding.** Ranks of a role run one program, but they are alike only if links treat them alike.
//! All exchanges are therefore mapped to the cluster's links and folded ([`crate::network::flow`]),
//! and one rank of each class is run. If all replicas are placed alike on devices of their own,
//! this is one rank per role for any world size. If a server handles ranks one after the other, it
//! is every rank. Either way the same engine runs and computes the same times.

mod exchanges;
mod wires;

use super::classes::Classes;
use super::lanes;
use super::matching::MatchedOps;
use super::network::{Completion, Network, Posting};
use super::workload::{Load, Workload};
use crate::cluster::Cluster;
use crate::error::SimError;
use crate::network::flow::{Ended, Folded, Folding, MaxMin, Stepped};
use exchanges::Exchanges;
use std::collections::VecDeque;
use wires::{Kind, Party, Postings};

/// Jobs whose traffic has been folded.
pub(super) struct Prepared<'a> {
    exchanges: Exchanges<'a>,
    folded: Folded,
}

impl<'a> Prepared<'a> {
    /// Maps the exchanges of all jobs to the cluster's links.
    pub(super) fn new(
        jobs: &'a [Load<'a>],
        cluster: &'a Cluster,
        folding: Folding,
    ) -> Result<Self, SimError> {
        let exchanges = Exchanges::of(jobs, cluster)?;
        let folded = exchanges.fold(folding)?;
        Ok(Self { exchanges, folded })
    }

    /// Classes of the ranks of all jobs.
    pub(super) fn classes(&self) -> Result<Classes, SimError> {
        Ok(self.exchanges.classes(&self.folded)?)
    }

    /// Runs the bodies of all jobs against each other.
    pub(super) fn run(
        &self,
        jobs: &[Load<'_>],
        classes: &Classes,
    ) -> Result<(lanes::Times, MatchedOps), SimError> {
        let load = Workload { jobs, classes };
        let (postings, matches) = Postings::of(&load, &self.exchanges, &self.folded)?;
        let mut net = FlowNetwork::new(&self.folded, &postings);
        Ok((lanes::run(&load, &matches, &mut net)?, matches))
    }
}

/// Exchanges of a workload in flight.
pub(super) struct FlowNetwork<'a> {
    steps: Stepped<'a, MaxMin<'a>>,
    postings: &'a Postings,
    /// By op match: the unexposed rest that follows it, until it is in flight.
    rests: Vec<Option<u32>>,
    /// Ends to be reported, in time order.
    ended: VecDeque<Completion>,
}

/// Tag of an exchange that no op waits for.
const NONE: u32 = u32::MAX;

impl<'a> FlowNetwork<'a> {
    /// Creates an idle network.
    pub(super) fn new(folded: &'a Folded, postings: &'a Postings) -> Self {
        let mut steps = Stepped::new(folded, MaxMin::new(folded));
        postings.tables.iter().for_each(|table| {
            steps.table(table.clone());
        });
        let rest = |kind: &Kind| match kind {
            Kind::Exchange { rest, .. } => *rest,
            Kind::Never => None,
        };
        Self {
            steps,
            postings,
            rests: postings.all.iter().map(rest).collect(),
            ended: VecDeque::new(),
        }
    }

    /// Handles the end of one party of an exchange.
    fn end(&mut self, Ended { tag, party, at }: Ended) {
        let Some(&Kind::Exchange { exchange, first, .. }) = self.postings.all.get(tag as usize)
        else {
            return;
        };
        if let Some(rest) = self.rests[tag as usize].take() {
            self.steps.post(exchange, rest, NONE, at);
        }
        let Party { op, copies } = self.postings.parties[(first + party) as usize];
        if op == NONE {
            return;
        }
        self.ended.push_back(Completion { op_match: tag, op, at: at + copies });
    }
}

impl Network for FlowNetwork<'_> {
    const SHARES_LINKS: bool = true;

    fn post(&mut self, posting: Posting<'_>, at: f64, _: &mut Vec<Completion>) {
        let op_match = posting.op_match;
        match self.postings.all[op_match as usize] {
            Kind::Exchange { exchange, table, .. } => {
                self.steps.post(exchange, table, op_match, at);
            }
            Kind::Never => {}
        }
    }

    fn next(&mut self, until: f64) -> Option<Completion> {
        loop {
            if let Some(end) = self.ended.pop_front() {
                return Some(end);
            }
            let ended = self.steps.next_until(until)?;
            self.end(ended);
        }
    }
}

#[cfg(test)]
mod tests;
