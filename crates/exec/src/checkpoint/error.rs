//! Errors of checkpoints.

use crate::safetensors::SafetensorsError;
use paceline_plan::ids::Rank;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// Reason why a checkpoint cannot be written or read. Earlier checkpoints are unchanged.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The system reports an error while a checkpoint is written.
    #[error(
        "{}: cannot be written: {source}; earlier checkpoints are untouched", .path.display()
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The system reports an error while a checkpoint is read.
    #[error("{}: {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A tensor file is invalid.
    #[error(transparent)]
    Tensors(#[from] SafetensorsError),
    /// The training state is invalid.
    #[error("{}: {problem}", .path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// There is no checkpoint to resume from.
    #[error(
        "{}: no complete checkpoint here; give a run's directory, its checkpoints, or one of them",
        .path.display()
    )]
    None {
        /// Directory that was searched.
        path: PathBuf,
    },
    /// No checkpoint of a directory is whole.
    #[error("{}: none of {count} checkpoints is whole; the newest: {newest}", .path.display())]
    AllDamaged {
        /// Directory that was searched.
        path: PathBuf,
        /// Number of checkpoints there.
        count: usize,
        /// Damage of the newest.
        newest: Box<CheckpointError>,
    },
    /// Another rank could not write its part; it reports the cause itself.
    #[error("{}: rank {rank} could not write its part", .path.display())]
    Elsewhere {
        /// Directory of the pending checkpoint.
        path: PathBuf,
        /// The rank that failed.
        rank: Rank,
    },
    /// Another rank has not reported that its part is written.
    #[error(
        "{}: nothing was heard of rank {rank}'s part for {:.0} s; do all hosts share this file system?",
        .path.display(), .waited.as_secs_f64()
    )]
    Silent {
        /// Directory of the pending checkpoint.
        path: PathBuf,
        /// The first rank that is missing.
        rank: Rank,
        /// Time waited.
        waited: Duration,
    },
    /// The run ended while a checkpoint was pending.
    #[error("the run ended before a checkpoint was complete")]
    Abandoned,
}

impl CheckpointError {
    /// Returns true if another rank, or the end of the run, is the cause.
    pub(crate) fn is_echo(&self) -> bool {
        matches!(self, Self::Elsewhere { .. } | Self::Abandoned)
    }

    pub(super) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Write { path, source }
    }
}
