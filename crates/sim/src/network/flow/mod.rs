//! Flow backend: messages are fluid, and those that cross a link concurrently share it fairly.
//!
//! ```text
//! collectives, messages ──► scripts of rounds ──► traffic between ranks ──► folded ──► fluid
//!      (script, rails)         (traffic)    (links, traffic_graph, fold)  (fair, max_min, stepped)
//! ```
//!
//! The analytic backend times a collective alone; this one simulates several in flight: on rings
//! and tori, behind a shared NIC, through a narrow uplink, into one server. Rates are max–min fair
//! at every moment. A collective consists of its pattern's steps, rank by rank. A rank sends its
//! next round as soon as its own messages of the previous round have completed. A slow link thus
//! delays only the ranks behind it at first. If an algorithm sends chunks through the dimensions of a grid,
//! every dimension of a rank proceeds by itself, with one chunk after the other.
//!
//! Not modelled: queues, losses and convergence to a fair share (rates are fair immediately), and
//! sums and copies inside a device.

mod fair;
mod fold;
mod graph;
mod jobs;
mod links;
mod max_min;
mod rails;
mod script;
mod stepped;
mod traffic;
mod traffic_graph;

pub(crate) use fold::{Folded, Folding};
pub use jobs::{Job, Work, collective_time, simulate_flows};
pub(super) use links::Links;
pub(crate) use max_min::MaxMin;
pub(crate) use script::Party;
pub(crate) use stepped::{Ended, Stepped};
pub(crate) use traffic::Traffic;

use super::{Analytic, CostModel, NoPath, Vector};
use crate::cluster::Cluster;
use paceline_plan::collective::Pattern;
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use thiserror::Error;

/// Network of a cluster with one message or collective in flight at a time.
///
/// [`simulate_flows`] times concurrent ones, and [`crate::simulate`] runs whole plans.
#[derive(Clone, Copy, Debug)]
pub struct Flow<'c> {
    cluster: &'c Cluster,
}

impl<'c> Flow<'c> {
    /// Creates the network of a cluster.
    pub const fn new(cluster: &'c Cluster) -> Self {
        Self { cluster }
    }
}

impl CostModel for Flow<'_> {
    fn message(&self, from: Rank, to: Rank, bytes: Bytes) -> Result<Seconds, NoPath> {
        let mut links = links::Links::new(self.cluster);
        let mut way = Vec::new();
        let latency = links.route(from, to, &mut way)?;
        let narrowest = way.into_iter().map(|link| links.capacity(link).0);
        Ok(latency + Seconds(bytes.as_f64() / narrowest.fold(f64::INFINITY, f64::min)))
    }

    /// Falls back to [`Analytic`] for a collective with too many messages to follow.
    fn collective(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<Seconds, NoPath> {
        match collective_time(self.cluster, pattern, members, vector) {
            Ok(time) => Ok(time),
            Err(FlowError::NoPath(source)) => Err(source),
            Err(_) => Analytic::new(self.cluster).collective(pattern, members, vector),
        }
    }
}

/// Reason that traffic could not be simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FlowError {
    /// Two ranks that must communicate have no path.
    #[error(transparent)]
    NoPath(#[from] NoPath),
    /// The simulation would take hours or more memory than available.
    #[error(
        "the flow network would have to follow too many different messages; use a smaller group, \
         an algorithm with fewer messages than direct ones, or the analytic network"
    )]
    TooManyMessages,
    /// A collective's number of members differs from its pattern's.
    #[error("job {job}: the pattern is for {ranks} ranks, but {members} members are given")]
    Members {
        /// Index of the job.
        job: usize,
        /// Number of ranks of the pattern.
        ranks: u32,
        /// Number of members given.
        members: usize,
    },
    /// A job waits for one that does not exist, or indirectly for itself.
    #[error("job {job} waits for jobs that never end: name earlier positions of the list")]
    After {
        /// Index of the job.
        job: usize,
    },
    /// A job's start time is negative or not finite.
    #[error("job {job} starts at no time: give a number of seconds that is not negative")]
    Start {
        /// Index of the job.
        job: usize,
    },
}

#[cfg(test)]
mod tests;
