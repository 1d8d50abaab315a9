//! What NCCL makes of a collective: which algorithm and protocol it picks, and how long they take.
//!
//! A plan that leaves the algorithm open is run by the library that the software uses. NCCL lays
//! rings and trees over the links it finds ([`topology`], [`rings`]), predicts the time of each
//! algorithm in each protocol from a table of constants ([`tuning`]), and takes the quickest. Here
//! the same choice is made from the same constants; the time of what was chosen then follows from
//! how it works ([`timing`]), because NCCL's own prediction is made for ranking only and leaves out
//! what all candidates share.
//!
//! The cluster's description gives links, rates and memory. Everything else is a property of NCCL
//! or of a GPU generation: nothing here belongs to a number of GPUs, a message size or a table of
//! measurements.
//!
//! **What is left to exact steps.** Algorithms that NCCL does not have (halving-doubling, direct
//! all_reduce, parameter servers), sums in canonical order, and groups inside hosts that are
//! neither a switch nor a graph of direct links: [`Analytic`] times these. A ring that the plan asks
//! for by name is NCCL's ring, as `NCCL_ALGO=Ring` would have it.

mod rings;
mod timing;
mod topology;
mod tuning;

use super::{Analytic, Network, NoPath, Vector};
use crate::cluster::Cluster;
use paceline_plan::collective::{Algorithm, CollectiveKind, Order, Pattern};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use timing::Job;
use topology::Topology;
use tuning::{Protocol, START};

/// Times from the topology and from how NCCL uses it.
#[derive(Clone, Copy, Debug)]
pub struct Nccl<'c> {
    cluster: &'c Cluster,
    steps: Analytic<'c>,
}

impl<'c> Nccl<'c> {
    /// NCCL on a cluster, or `None` where it does not run: on devices that are no GPUs.
    ///
    /// GPUs are told by their units for f16 products, which neither CPUs nor TPUs have.
    pub fn new(cluster: &'c Cluster) -> Option<Self> {
        cluster.device.peak.f16?;
        Some(Self { cluster, steps: Analytic::new(cluster) })
    }

    /// Messages of a collective that NCCL writes as sends and receives: one launch for all.
    fn messages(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<Seconds, NoPath> {
        let steps = self.steps.collective(pattern, members, vector)?;
        if members.len() < 2 {
            return Ok(steps);
        }
        Ok(steps + Seconds(START + tuning::RING.base(Protocol::Simple)))
    }

    fn timed(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
        rings_only: bool,
    ) -> Result<Seconds, NoPath> {
        if members.len() < 2 {
            return Ok(Seconds::ZERO);
        }
        let Some(topology) = Topology::of(self.cluster, members)? else {
            return self.steps.collective(pattern, members, vector);
        };
        let bytes = vector.elements as f64 * vector.element.as_f64();
        let job = Job { kind: pattern.kind(), bytes, topology: &topology };
        Ok(Seconds(job.time(rings_only)))
    }
}

impl Network for Nccl<'_> {
    fn message(&self, from: Rank, to: Rank, bytes: Bytes) -> Result<Seconds, NoPath> {
        let path = self.cluster.link(from, to).ok_or(NoPath { from, to })?;
        let whole = self.steps.message(from, to, bytes)?;
        let hop = match path.dimension {
            0 => tuning::RING.hop(Protocol::Simple) * f64::from(path.hops),
            _ => tuning::RING.network(Protocol::Simple),
        };
        let latency = START + tuning::RING.base(Protocol::Simple) + hop;
        Ok(whole - path.latency + Seconds(latency))
    }

    fn collective(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<Seconds, NoPath> {
        let (kind, order) = (pattern.kind(), pattern.order());
        let is_ring = pattern.algorithm() == Algorithm::Ring && has_rings(kind);
        let in_any_order = order == Order::Free || !kind.reduces();
        if is_ring && in_any_order {
            self.timed(pattern, members, vector, true)
        } else {
            self.steps.collective(pattern, members, vector)
        }
    }

    fn delegated(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<Seconds, NoPath> {
        if has_rings(pattern.kind()) {
            self.timed(pattern, members, vector, false)
        } else {
            self.messages(pattern, members, vector)
        }
    }
}

/// Whether NCCL has a kernel of its own for a kind. The others are sends and receives to it.
const fn has_rings(kind: CollectiveKind) -> bool {
    match kind {
        CollectiveKind::AllReduce
        | CollectiveKind::ReduceScatter
        | CollectiveKind::AllGather
        | CollectiveKind::Broadcast
        | CollectiveKind::Reduce => true,
        CollectiveKind::Gather | CollectiveKind::AllToAll => false,
    }
}

#[cfg(test)]
mod tests;
