//! Why a plan could not be timed.

use crate::network::NoPath;
use crate::network::flow::FlowError;
use paceline_plan::collective::CollectiveError;
use paceline_plan::ids::{OpId, Rank};
use paceline_plan::strategy::Store;
use thiserror::Error;

/// Why a plan could not be timed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SimError {
    /// There are more ranks than devices.
    #[error(
        "the plan has {ranks} ranks and cluster {cluster} has {devices} devices; use a cluster \
         with {ranks} or more, such as --cluster NAME:HOSTS with more hosts"
    )]
    TooFewDevices {
        /// Ranks of the plan, servers included.
        ranks: u64,
        /// Devices of the cluster.
        devices: u64,
        /// The cluster's name.
        cluster: String,
    },
    /// Something is offloaded, and nothing is known of the way there.
    #[error(
        "the plan offloads to its store '{store}', and device {device} does not say how fast that \
         is; say --set device.{store}_bandwidth=25GB/s, or write it into the cluster's file"
    )]
    NoStore {
        /// Where to.
        store: Store,
        /// The device's name.
        device: String,
    },
    /// Ranks share memory, and stand where there is none to share.
    #[error(
        "the plan's {ranks} ranks share their weights as threads of one process, and on cluster {cluster} \
         {why}; use the cores of one host, as in --cluster laptop, or --sync async-ps:1"
    )]
    NoSharedMemory {
        /// Ranks of the plan.
        ranks: u64,
        /// The cluster's name.
        cluster: String,
        /// What stands in the way.
        why: &'static str,
    },
    /// Two ranks that must talk cannot.
    #[error("rank {rank} ({role}), op {op} '{what}': {source}")]
    NoPath {
        /// The role's first rank.
        rank: Rank,
        /// The role's name.
        role: String,
        /// The op in the role's body.
        op: OpId,
        /// The op in words.
        what: String,
        /// Between whom there is no way.
        source: NoPath,
    },
    /// The network cannot follow what is under way.
    #[error(transparent)]
    Traffic(#[from] FlowError),
    /// A collective that its algorithm cannot do; validation would have told.
    #[error("rank {rank} ({role}), '{what}': {source}")]
    Collective {
        /// The role's first rank.
        rank: Rank,
        /// The role's name.
        role: String,
        /// The call's name.
        what: String,
        /// What is wrong with it.
        source: CollectiveError,
    },
    /// The ranks wait for each other; validation would have told.
    #[error(
        "rank {rank} ({role}) waits for ever at op {op} '{what}': the ranks that it waits for \
         never get there; `paceline plan` says which"
    )]
    Stuck {
        /// The role's first rank.
        rank: Rank,
        /// The role's name.
        role: String,
        /// The op in the role's body.
        op: OpId,
        /// The op in words.
        what: String,
    },
}
