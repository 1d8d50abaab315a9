//! Network models: one trait with several backends that time communication.
//!
//! The engine decides when a message or a collective starts; a [`CostModel`] returns its duration.
//! [`Analytic`] derives it from the topology alone, without other traffic. [`Nccl`] models that
//! library where a plan calls it. [`Measured`] uses times measured on this
//! machine. [`mod@flow`] simulates concurrent traffic that shares links.

mod analytic;
mod fabric;
pub mod flow;
mod kind;
mod measured;
mod nccl;

pub(crate) use analytic::all_links;
pub use analytic::{Analytic, CollectiveProfile, DimensionLoad, PhaseLatency};
pub(crate) use fabric::check_switches;
pub use flow::Flow;
pub use kind::{NetworkKind, UnknownNetwork};
pub use measured::Measured;
pub use nccl::Nccl;

use crate::cluster::Cluster;
use crate::cluster::measured::TransportTable;
use crate::profile::Library;
use paceline_plan::collective::{self as native, Algorithm, Chunking, Pattern};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use thiserror::Error;

/// Interface between engine and network backend.
pub trait CostModel {
    /// Time of one message, from when both sides are ready to its last byte.
    fn message(&self, from: Rank, to: Rank, bytes: Bytes) -> Result<Seconds, NoPath>;

    /// Time of a collective, from the arrival of its last member to the end of the last one.
    ///
    /// `members` are the group's ranks in group order, as many as the pattern has.
    fn collective(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<Seconds, NoPath>;

    /// Time of a collective that a library carries out, by a forced algorithm or of its own choice.
    /// A backend without a model of the library times the pattern, which stands for the call.
    fn native(
        &self,
        _by: (native::Library, Option<Algorithm>),
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<Seconds, NoPath> {
        self.collective(pattern, members, vector)
    }
}

/// Network of a cluster as a communication library uses it: measured if the cluster is one
/// calibrated host, otherwise modelled by latency and bandwidth.
pub fn of_library(library: Library, cluster: &Cluster) -> Box<dyn CostModel + '_> {
    match measured_transport(cluster) {
        Some(wire) => Box::new(Measured::new(wire, modelled(library, cluster))),
        None => modelled(library, cluster),
    }
}

/// Measured transport of a cluster that is one calibrated host.
pub(crate) fn measured_transport(cluster: &Cluster) -> Option<&TransportTable> {
    let measured = cluster.measured.as_ref().filter(|_| cluster.hosts == 1)?;
    measured.transports.first()
}

fn modelled(library: Library, cluster: &Cluster) -> Box<dyn CostModel + '_> {
    match library {
        Library::Steps => Box::new(Analytic::new(cluster)),
        Library::Nccl => match Nccl::new(cluster) {
            Some(nccl) => Box::new(nccl),
            None => Box::new(Analytic::new(cluster)),
        },
    }
}

/// Full vector of a collective, even if a rank holds only a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Vector {
    /// Number of elements.
    pub elements: u64,
    /// Bytes of one element as transmitted.
    pub element: Bytes,
    /// Granularity of chunk boundaries, in elements.
    pub block: u64,
}

impl Vector {
    /// Creates a vector of bytes that may be split anywhere.
    pub const fn of_bytes(bytes: Bytes) -> Self {
        Self { elements: bytes.0, element: Bytes(1), block: 1 }
    }

    /// Total bytes as transmitted.
    pub(crate) const fn bytes(&self) -> Bytes {
        Bytes(self.elements.saturating_mul(self.element.0))
    }

    /// Chunking of the vector by a pattern.
    fn cut(&self, pattern: &Pattern) -> Chunking {
        Chunking { elements: self.elements, chunks: pattern.chunks(), block: self.block }
    }
}

/// Error for two ranks without a connecting path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("rank {from} has no route to rank {to} on this cluster")]
pub struct NoPath {
    /// The sender.
    pub from: Rank,
    /// The receiver.
    pub to: Rank,
}
