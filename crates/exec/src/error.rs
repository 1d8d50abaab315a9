//! What can go wrong in a run.

use crate::checkpoint::CheckpointError;
use crate::data::DataError;
use crate::memory::MemoryError;
use crate::store::StoreError;
use paceline_comm::CommError;
use paceline_kernels::arena::ArenaError;
use paceline_kernels::experts::dispatch::Full;
use paceline_plan::ids::Rank;
use std::time::Duration;
use thiserror::Error;

/// Why a run ended early: the first cause, whatever it made the other ranks do. Iterations count
/// from 1, as in reports.
#[derive(Debug, Error)]
pub enum ExecError {
    /// The plan asks for something that only the simulator can do so far.
    #[error("{what} cannot be run yet; {works}")]
    Unsupported {
        /// What it asks for, and where.
        what: String,
        /// What can be run instead.
        works: &'static str,
    },
    /// An option is out of its range.
    #[error("{option} is {value}; use {works}")]
    Option {
        /// The option's flag.
        option: &'static str,
        /// What was given.
        value: String,
        /// What would work.
        works: &'static str,
    },
    /// A warm-up is asked for that is behind the run already, and was another one.
    #[error(
        "the run that is resumed has had a warm-up of {settled} iterations, not of {said}; use {settled}, or leave \
         out --compress-warmup"
    )]
    Settled {
        /// Iterations that were asked for.
        said: u32,
        /// Iterations that they were.
        settled: u32,
    },
    /// There is no data for this model.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The run cannot be saved, or not go on from where it was.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A rank's arena cannot be had.
    #[error("rank {rank}: {source}")]
    Memory {
        /// The rank.
        rank: Rank,
        /// What the allocator, or the disk, said.
        source: MemoryError,
    },
    /// An op failed.
    #[error("rank {rank}, iteration {iteration}, {op}: {source}")]
    Op {
        /// The rank that ran it.
        rank: Rank,
        /// The iteration.
        iteration: u32,
        /// The op, in words.
        op: String,
        /// What happened.
        source: Fault,
    },
    /// A rank owes a message for too long.
    #[error(
        "rank {rank}, iteration {iteration}, {op}: nothing came from rank {peer} for {:.1} s",
        .waited.as_secs_f64()
    )]
    Silent {
        /// The rank that waited.
        rank: Rank,
        /// The iteration.
        iteration: u32,
        /// The op that waited.
        op: String,
        /// The rank that it waited for.
        peer: Rank,
        /// How long it waited.
        waited: Duration,
    },
    /// Nothing is under way and nothing may start.
    #[error(
        "rank {rank}, iteration {iteration}, {op}: waits for ops that never run; validate the plan"
    )]
    Stuck {
        /// The rank.
        rank: Rank,
        /// The iteration.
        iteration: u32,
        /// An op that waits.
        op: String,
    },
    /// The ranks could not talk about the run itself.
    #[error("rank {rank}, {doing}: {source}")]
    Control {
        /// The rank that noticed.
        rank: Rank,
        /// What it was about.
        doing: &'static str,
        /// What happened.
        source: CommError,
    },
    /// The loss is not a number any more.
    #[error(
        "iteration {iteration}: the loss is {loss}; a lower learning rate or --clip 1 may keep it finite"
    )]
    Diverged {
        /// The iteration.
        iteration: u32,
        /// What the loss is.
        loss: f32,
    },
    /// A rank met an error in this program.
    #[error("rank {rank}, iteration {iteration}, {op}: {message}")]
    Panicked {
        /// The rank.
        rank: Rank,
        /// The iteration.
        iteration: u32,
        /// The op that it was at.
        op: String,
        /// What the panic said.
        message: String,
    },
    /// A rank's thread cannot be started.
    #[error("rank {rank}: no thread can be started for it ({source}); use fewer ranks")]
    Thread {
        /// The rank.
        rank: Rank,
        /// What the system said.
        source: std::io::Error,
    },
    /// Two ranks that should hold the same weights do not.
    #[error(
        "{name} differs between ranks that hold the same part of it; rank {rank} is the first to differ"
    )]
    Disagreement {
        /// The tensor.
        name: String,
        /// The rank that differs from those before it.
        rank: Rank,
    },
}

impl ExecError {
    /// Whether this rank only ended because another one failed before it.
    pub(crate) fn is_echo(&self) -> bool {
        if let Self::Checkpoint(error) = self {
            return error.is_echo();
        }
        let (Self::Op { source: Fault::Comm(source), .. } | Self::Control { source, .. }) = self
        else {
            return false;
        };
        // The hub, if there is one, has told all ranks the same.
        matches!(source, CommError::Failed { .. } | CommError::Lost { .. } | CommError::Job { .. })
    }
}

/// Why an op failed.
#[derive(Debug, Error)]
pub enum Fault {
    /// Between ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// In the rank's memory.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// In what is offloaded.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// In the data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// On the GPU.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Gpu(#[from] paceline_kernels::cuda::CudaError),
    /// A number that is none, where it first came up.
    #[error(
        "{operator} makes {value} of {from}; a lower learning rate, a longer warmup or --clip 1 may \
         keep numbers finite, and no weight has been changed by this iteration"
    )]
    NotFinite {
        /// The operator, and which of its gradients.
        operator: String,
        /// What it made.
        value: f32,
        /// What it was made of.
        from: &'static str,
    },
    /// Experts have no room for all that come.
    #[error(
        "{0}; raise --expert-room, or give the model a `capacity`, which drops what is beyond it"
    )]
    Full(Full),
    /// The op names a rank that does not exist.
    #[error("there is no such peer; validate the plan")]
    NoPeer,
}

impl From<MemoryError> for Fault {
    fn from(error: MemoryError) -> Self {
        match error {
            MemoryError::Arena(error) => error.into(),
            MemoryError::Store(error) => error.into(),
        }
    }
}
