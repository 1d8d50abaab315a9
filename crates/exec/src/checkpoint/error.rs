//! What can go wrong with a checkpoint.

use crate::safetensors::SafetensorsError;
use paceline_plan::ids::Rank;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// Why a checkpoint cannot be written or read. The ones before it are as they were.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The system refuses while a checkpoint is written.
    #[error(
        "{}: cannot be written: {source}; earlier checkpoints are untouched", .path.display()
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system refuses while a checkpoint is read.
    #[error("{}: {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file of tensors is not what it should be.
    #[error(transparent)]
    Tensors(#[from] SafetensorsError),
    /// The training state is not what it should be.
    #[error("{}: {problem}", .path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// There is nothing to resume.
    #[error(
        "{}: no complete checkpoint here; give a run's directory, its checkpoints, or one of them",
        .path.display()
    )]
    None {
        /// Where was looked.
        path: PathBuf,
    },
    /// Another rank could not write its part; it says why itself.
    #[error("{}: rank {rank} could not write its part", .path.display())]
    Elsewhere {
        /// The checkpoint under way.
        path: PathBuf,
        /// That rank.
        rank: Rank,
    },
    /// Another rank does not say that its part is written.
    #[error(
        "{}: nothing was heard of rank {rank}'s part for {:.0} s; do all hosts share this file system?",
        .path.display(), .waited.as_secs_f64()
    )]
    Silent {
        /// The checkpoint under way.
        path: PathBuf,
        /// The first rank that is missing.
        rank: Rank,
        /// How long was waited.
        waited: Duration,
    },
    /// The run ended while a checkpoint was under way.
    #[error("the run ended before a checkpoint was complete")]
    Abandoned,
}

impl CheckpointError {
    /// Whether another rank, or whoever ended the run, has the cause.
    pub(crate) fn is_echo(&self) -> bool {
        matches!(self, Self::Elsewhere { .. } | Self::Abandoned)
    }

    pub(super) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Write { path, source }
    }
}
