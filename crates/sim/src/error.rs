//! Simulation errors.

use crate::network::NoPath;
use crate::network::flow::FlowError;
use paceline_plan::collective::CollectiveError;
use paceline_plan::ids::{OpId, Rank};
use paceline_plan::strategy::Store;
use thiserror::Error;

/// Reason that a plan could not be simulated.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SimError {
    /// The plan has more ranks than the cluster has devices.
    #[error(
        "the plan has {ranks} ranks and cluster {cluster} has {devices} devices; use a cluster \
         with {ranks} or more, such as --cluster NAME:HOSTS with more hosts"
    )]
    NotEnoughDevices {
        /// Ranks of the plan, servers included.
        ranks: u64,
        /// Devices of the cluster.
        devices: u64,
        /// The cluster's name.
        cluster: String,
    },
    /// The plan offloads to a store of unknown bandwidth.
    #[error(
        "the plan offloads to its store '{store}', and device {device} has no bandwidth for it; use --set device.{store}_bandwidth=25GB/s, or add it to the cluster file"
    )]
    NoStore {
        /// Target store.
        store: Store,
        /// The device's name.
        device: String,
    },
    /// Ranks share weights but have no shared memory.
    #[error(
        "the plan's {ranks} ranks share their weights as threads of one process, and on cluster {cluster} \
         {why}; use the cores of one host, as in --cluster laptop, or --sync async-ps:1"
    )]
    NoSharedMemory {
        /// Ranks of the plan.
        ranks: u64,
        /// The cluster's name.
        cluster: String,
        /// Reason that memory cannot be shared.
        why: &'static str,
    },
    /// Two ranks that must communicate have no path.
    #[error("rank {rank} ({role}), op {op} '{what}': {source}")]
    NoPath {
        /// The role's first rank.
        rank: Rank,
        /// The role's name.
        role: String,
        /// The op in the role's body.
        op: OpId,
        /// Description of the op.
        what: String,
        /// Ranks without a path.
        source: NoPath,
    },
    /// A rank of a job has no device of its own.
    #[error("job {job}, rank {rank}: it cannot run on device {device}: {why}")]
    Placement {
        /// Index of the job.
        job: usize,
        /// The rank.
        rank: Rank,
        /// Its device, as a rank of the cluster.
        device: Rank,
        /// Reason that it cannot run there.
        why: String,
    },
    /// The cluster's numbers give an iteration no time.
    #[error(
        "an iteration on cluster {cluster} takes {seconds} s, which is no time: some rate, efficiency or \
         factor of it is too small or too large"
    )]
    NotFinite {
        /// The cluster's name.
        cluster: String,
        /// The time.
        seconds: String,
    },
    /// A job's start time is negative or not finite.
    #[error("job {job}: give a start time in seconds that is not negative")]
    JobStart {
        /// Index of the job.
        job: usize,
    },
    /// The flow network cannot represent the traffic.
    #[error(transparent)]
    Traffic(#[from] FlowError),
    /// A collective is impossible with its algorithm; validation would have reported it.
    #[error("rank {rank} ({role}), '{what}': {source}")]
    Collective {
        /// The role's first rank.
        rank: Rank,
        /// The role's name.
        role: String,
        /// The call's name.
        what: String,
        /// Reason that it is impossible.
        source: CollectiveError,
    },
    /// The ranks deadlock; validation would have reported it.
    #[error(
        "rank {rank} ({role}) is deadlocked at op {op} '{what}': its peers never reach it; `paceline plan` names them"
    )]
    Stuck {
        /// The role's first rank.
        rank: Rank,
        /// The role's name.
        role: String,
        /// The op in the role's body.
        op: OpId,
        /// Description of the op.
        what: String,
    },
}
