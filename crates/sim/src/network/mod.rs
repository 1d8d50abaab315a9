//! How long communication takes: one seam, behind which the backends stand.
//!
//! The engine decides when a message or a collective starts; a [`Network`] says how long it takes
//! from there. [`Analytic`] answers from the topology alone, as if nothing else were under way.
//! [`Nccl`] answers as that library would where a plan leaves the algorithm open, [`Measured`] from
//! what exchanges took on this machine. [`mod@flow`]
//! follows what is under way at once as it shares links.

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
use crate::profile::Library;
use paceline_plan::collective::{Cut, Pattern};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use thiserror::Error;

/// What the engine asks of a network.
pub trait Network {
    /// The time of one message, from the moment both sides stand ready to its last byte.
    fn message(&self, from: Rank, to: Rank, bytes: Bytes) -> Result<Seconds, NoPath>;

    /// The time of a collective, from the moment its last member joins to the end of the last one.
    ///
    /// `members` are the group's ranks in the group's order, as many as the pattern has.
    fn collective(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<Seconds, NoPath>;

    /// The time of a collective whose algorithm the plan leaves to the library that moves the
    /// bytes. A backend that knows no library does what the pattern says.
    fn delegated(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<Seconds, NoPath> {
        self.collective(pattern, members, vector)
    }
}

/// The network of a cluster as a library uses it, by what was measured where all stand on one host,
/// and by latency and bandwidth alone elsewhere.
pub fn of_library(library: Library, cluster: &Cluster) -> Box<dyn Network + '_> {
    let wire = cluster.measured.as_ref().and_then(|measured| measured.wires.first());
    match wire.filter(|_| cluster.hosts == 1) {
        Some(wire) => Box::new(Measured::new(wire, modelled(library, cluster))),
        None => modelled(library, cluster),
    }
}

fn modelled(library: Library, cluster: &Cluster) -> Box<dyn Network + '_> {
    match library {
        Library::Steps => Box::new(Analytic::new(cluster)),
        Library::Nccl => match Nccl::new(cluster) {
            Some(nccl) => Box::new(nccl),
            None => Box::new(Analytic::new(cluster)),
        },
    }
}

/// The vector that a collective is about: the whole of it, also where a rank holds a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Vector {
    /// Elements.
    pub elements: u64,
    /// Bytes of one element on the wire.
    pub element: Bytes,
    /// Parts are cut at multiples of this many elements.
    pub block: u64,
}

impl Vector {
    /// A vector of bytes that may be cut anywhere.
    pub const fn of_bytes(bytes: Bytes) -> Self {
        Self { elements: bytes.0, element: Bytes(1), block: 1 }
    }

    /// What all of it takes on the wire.
    pub(crate) const fn bytes(&self) -> Bytes {
        Bytes(self.elements.saturating_mul(self.element.0))
    }

    /// How a pattern cuts it.
    fn cut(&self, pattern: &Pattern) -> Cut {
        Cut { elements: self.elements, chunks: pattern.chunks(), block: self.block }
    }
}

/// Two ranks that nothing joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("rank {from} has no way to rank {to} on this cluster")]
pub struct NoPath {
    /// The sender.
    pub from: Rank,
    /// The receiver.
    pub to: Rank,
}
