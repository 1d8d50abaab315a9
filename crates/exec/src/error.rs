//! Errors of a run.

use crate::checkpoint::CheckpointError;
use crate::data::DataError;
use crate::memory::MemoryError;
use crate::memory::store::StoreError;
use paceline_comm::CommError;
use paceline_kernels::arena::ArenaError;
use paceline_kernels::experts::dispatch::Full;
use paceline_plan::collective::Library;
use paceline_plan::ids::Rank;
use std::time::Duration;
use thiserror::Error;

/// Reason why a run ended early: the first cause, not its effects on other ranks. Iterations count
/// from 1, as in reports.
#[derive(Debug, Error)]
pub enum ExecError {
    /// The plan needs a feature that only the simulator supports so far.
    #[error("{what} cannot be run yet; {works}")]
    Unsupported {
        /// The feature, and its location.
        what: String,
        /// Supported alternative.
        works: &'static str,
    },
    /// There is no usable GPU.
    #[error("{problem}")]
    NoGpu {
        /// Missing part.
        problem: String,
    },
    /// An option is out of its range.
    #[error("{option} is {value}; use {works}")]
    Option {
        /// The option's flag.
        option: &'static str,
        /// Value given.
        value: String,
        /// Valid values.
        works: &'static str,
    },
    /// The requested compression warm-up differs from the one the resumed run has completed.
    #[error(
        "the resumed run had a compression warm-up of {done} iterations, not {asked}; use {done}, or leave out --compress-warmup"
    )]
    WarmupMismatch {
        /// Number of iterations requested.
        asked: u32,
        /// Number of iterations completed.
        done: u32,
    },
    /// There is no data for this model.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The run cannot be saved or resumed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A rank's arena cannot be allocated.
    #[error("rank {rank}: {source}")]
    Memory {
        /// The rank.
        rank: Rank,
        /// Error of the allocator or the disk.
        source: MemoryError,
    },
    /// An op failed.
    #[error("rank {rank}, iteration {iteration}, {op}: {source}")]
    Op {
        /// The rank that ran it.
        rank: Rank,
        /// The iteration.
        iteration: u32,
        /// Description of the op.
        op: String,
        /// Cause of the failure.
        source: Fault,
    },
    /// An expected message did not arrive in time.
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
        /// Time waited.
        waited: Duration,
    },
    /// No op is running and none may start.
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
    /// A control message between ranks failed.
    #[error("rank {rank}, {doing}: {source}")]
    Control {
        /// The rank that noticed.
        rank: Rank,
        /// Activity of that rank.
        doing: &'static str,
        /// Cause of the failure.
        source: CommError,
    },
    /// The loss is no longer finite.
    #[error(
        "iteration {iteration}: the loss is {loss}; a lower learning rate or --clip 1 may keep it finite"
    )]
    Diverged {
        /// The iteration.
        iteration: u32,
        /// Value of the loss.
        loss: f32,
    },
    /// More tokens were sent to the experts of a rank than their buffers hold. No weight was changed,
    /// and the state before the iteration is saved if the run is.
    #[error(
        "iteration {iteration}: the experts of one rank get {needed:.2} times an equal share of the tokens, \
         and their buffers hold {factor}; raise --expert-buffer-factor, or give the model a `capacity`, \
         which drops tokens beyond it"
    )]
    ExpertOverflow {
        /// The iteration.
        iteration: u32,
        /// Size that is needed, in equal shares.
        needed: f64,
        /// Planned size.
        factor: f64,
    },
    /// A rank panicked because of a bug in this program.
    #[error("rank {rank}, iteration {iteration}, {op}: {message}")]
    Panicked {
        /// The rank.
        rank: Rank,
        /// The iteration.
        iteration: u32,
        /// The op it was executing.
        op: String,
        /// Panic message.
        message: String,
    },
    /// A rank's thread cannot be started.
    #[error("rank {rank}: no thread can be started for it ({source}); use fewer ranks")]
    Thread {
        /// The rank.
        rank: Rank,
        /// Error of the system.
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
    /// Returns true if this rank ended only because another one failed before it.
    pub(crate) fn is_echo(&self) -> bool {
        if let Self::Checkpoint(error) = self {
            return error.is_echo();
        }
        let (Self::Op { source: Fault::Comm(source), .. } | Self::Control { source, .. }) = self
        else {
            return false;
        };
        // The rendezvous server, if there is one, has reported the same to all ranks.
        matches!(
            source,
            CommError::Failed { .. } | CommError::PeerLost { .. } | CommError::Job { .. }
        )
    }
}

/// Reason why an op failed.
#[derive(Debug, Error)]
pub enum Fault {
    /// Communication between ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Access to the rank's arena.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// Access to offloaded state.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Access to the data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Start of the compute threads.
    #[error("cannot start its threads: {0}")]
    Threads(std::io::Error),
    /// Execution on the GPU.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Gpu(#[from] paceline_kernels::cuda::CudaError),
    /// A non-finite number, at its first occurrence.
    #[error(
        "{operator} makes {value} of {from}; a lower learning rate, a longer warmup or --clip 1 may \
         keep numbers finite, and no weight has been changed by this iteration"
    )]
    NotFinite {
        /// The operator and its pass.
        operator: String,
        /// Value it computed.
        value: f32,
        /// Description of its inputs.
        from: &'static str,
    },
    /// The expert buffers are too small for the tokens sent to them.
    #[error(
        "{0}; raise --expert-buffer-factor, or give the model a `capacity`, which drops tokens beyond it"
    )]
    Full(Full),
    /// The op names a rank that does not exist.
    #[error("the op names a peer that the mesh does not have; validate the plan")]
    NoPeer,
    /// A device does not get a task done.
    #[error("the device has not done it for {} s; other ranks do not take part in it", .waited.as_secs())]
    Stalled {
        /// Time since the task before it was done.
        waited: Duration,
    },
    /// A library is to carry out a collective, and there is none in this build.
    #[error("there is no {} communicator", .library.name().to_uppercase())]
    NoCommunicator {
        /// The library.
        library: Library,
    },
}

impl From<MemoryError> for Fault {
    fn from(error: MemoryError) -> Self {
        match error {
            MemoryError::Arena(error) => error.into(),
            MemoryError::Store(error) => error.into(),
        }
    }
}
