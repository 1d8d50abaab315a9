//! NCCL model: its choice of algorithm and protocol for a collective, and the resulting time.
//!
//! A plan decides which collectives the library carries out. NCCL builds rings and trees over the links it finds ([`topology`], [`rings`]), predicts the time of
//! each algorithm and protocol from a table of constants ([`tuning`]), and takes the fastest. This
//! module makes the same choice from the same constants. The time of the chosen candidate then
//! follows from its implementation ([`timing`]), because NCCL's own prediction is for ranking only
//! and omits what all candidates share.
//!
//! The cluster description gives links, bandwidths and memory. Everything else is a property of
//! NCCL or of a GPU generation: nothing here is specific to a number of GPUs or a message size. Two
//! cluster descriptions take their NVLink efficiency from the table of measurements that the model
//! is compared with (`docs/validation.md`).
//!
//! **Left to exact steps.** [`Analytic`] times the collectives that the plan gives steps, and
//! groups inside hosts that are neither a switch nor a graph of direct links. A ring that the plan
//! forces on the library is NCCL's ring, as with `NCCL_ALGO=Ring`.

mod rings;
mod timing;
mod topology;
mod tuning;

use super::{Analytic, CostModel, NoPath, Vector};
use crate::cluster::Cluster;
use paceline_plan::collective::{Algorithm, CollectiveKind, Library, Pattern};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use timing::Job;

pub(super) use rings::walks;
use topology::Topology;
use tuning::{Protocol, START};

/// Network model based on the topology and NCCL's use of it.
#[derive(Clone, Copy, Debug)]
pub struct Nccl<'c> {
    cluster: &'c Cluster,
    steps: Analytic<'c>,
}

impl<'c> Nccl<'c> {
    /// Creates the NCCL model of a cluster; `None` if its devices are not GPUs.
    ///
    /// GPUs are recognised by their f16 matrix units, which neither CPUs nor TPUs have, and which are
    /// not systolic arrays.
    pub fn new(cluster: &'c Cluster) -> Option<Self> {
        cluster.device.peak.f16?;
        if cluster.device.systolic_width.is_some() {
            return None;
        }
        Some(Self { cluster, steps: Analytic::new(cluster) })
    }

    /// Time of a collective that NCCL implements as sends and receives: one launch for all.
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

impl CostModel for Nccl<'_> {
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
        self.steps.collective(pattern, members, vector)
    }

    fn native(
        &self,
        (library, forced): (Library, Option<Algorithm>),
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<Seconds, NoPath> {
        match library {
            Library::Nccl if has_rings(pattern.kind()) => {
                self.timed(pattern, members, vector, forced == Some(Algorithm::Ring))
            }
            Library::Nccl => self.messages(pattern, members, vector),
            Library::Mpi => self.steps.collective(pattern, members, vector),
        }
    }
}

/// Returns true if NCCL has a kernel for a kind; the others are sends and receives.
const fn has_rings(kind: CollectiveKind) -> bool {
    match kind {
        CollectiveKind::AllReduce
        | CollectiveKind::ReduceScatter
        | CollectiveKind::AllGather
        | CollectiveKind::Broadcast
        | CollectiveKind::Reduce => true,
        CollectiveKind::Gather
        | CollectiveKind::AllToAll
        | CollectiveKind::Scatter
        | CollectiveKind::SendRecv
        | CollectiveKind::Barrier => false,
    }
}

#[cfg(test)]
mod tests;
