//! The flow backend: messages are fluid, and those that cross a link at once share it fairly.
//!
//! ```text
//! collectives, messages ──► scripts of rounds ──► traffic between ranks ──► folded ──► fluid
//!        (script, rails)          (traffic)        (links, world, refine, fold)   (fair, engine)
//! ```
//!
//! Where the analytic backend asks what a collective costs by itself, this one asks what happens
//! when several are under way: on rings and tori, behind a shared NIC, through a thin uplink, into
//! one server. Rates are max–min fair at every moment. A collective is its pattern's
//! steps, rank by rank: a rank sends what its next round has as soon as its own messages of the
//! round before are through, so that a slow link holds up those behind it and nobody else at once.
//!
//! What is left out: queues, losses and the way to a fair share (rates are fair at once), and
//! sums and copies inside a device.

mod engine;
mod fair;
mod fold;
mod graph;
mod jobs;
mod links;
mod rails;
mod refine;
mod script;
mod traffic;
mod world;

pub(crate) use engine::Fluid;
pub(crate) use fold::{Folded, Folding};
pub use jobs::{Job, Work, collective_time, simulate_flows};
pub(super) use links::Links;
pub(crate) use script::Party;
pub(crate) use traffic::Traffic;

use super::{Analytic, Network, NoPath, Vector};
use crate::cluster::Cluster;
use paceline_plan::collective::Pattern;
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use thiserror::Error;

/// The network of a cluster on which one thing at a time is under way.
///
/// What several at once take is what [`simulate_flows`] says, and whole plans are run by
/// [`crate::simulate`].
#[derive(Clone, Copy, Debug)]
pub struct Flow<'c> {
    cluster: &'c Cluster,
}

impl<'c> Flow<'c> {
    /// The network of a cluster.
    pub const fn new(cluster: &'c Cluster) -> Self {
        Self { cluster }
    }
}

impl Network for Flow<'_> {
    fn message(&self, from: Rank, to: Rank, bytes: Bytes) -> Result<Seconds, NoPath> {
        let mut links = links::Links::new(self.cluster);
        let mut way = Vec::new();
        let latency = links.route(from, to, &mut way)?;
        let narrowest = way.into_iter().map(|link| links.capacity(link).0);
        Ok(latency + Seconds(bytes.as_f64() / narrowest.fold(f64::INFINITY, f64::min)))
    }

    /// A collective with too many messages to follow takes what [`Analytic`] says.
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

/// Why traffic could not be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FlowError {
    /// Two ranks that must talk cannot.
    #[error(transparent)]
    NoPath(#[from] NoPath),
    /// It would take hours, or more memory than there is.
    #[error(
        "the flow network would have to follow too many different messages; use a smaller group, \
         an algorithm with fewer messages than direct ones, or the analytic network"
    )]
    TooManyMessages,
    /// A collective has another number of members than its pattern.
    #[error("job {job}: the pattern is for {ranks} ranks, but {members} members are given")]
    Members {
        /// Position of the job.
        job: usize,
        /// Ranks of the pattern.
        ranks: u32,
        /// Members that were given.
        members: usize,
    },
    /// A job waits for one that does not exist, or for itself by way of others.
    #[error("job {job} waits for jobs that never end: name earlier positions of the list")]
    After {
        /// Position of the job.
        job: usize,
    },
    /// A job starts at no time.
    #[error("job {job} starts at no time: give a number of seconds that is not negative")]
    Start {
        /// Position of the job.
        job: usize,
    },
}

#[cfg(test)]
mod tests;
