//! Training state of a checkpoint, and the search for checkpoints.

use super::checksum::Checksums;
use super::commit;
use super::error::CheckpointError;
use super::{CHECKSUMS, LARGEST, MOMENTS, RANK_STATE, STATE, WEIGHTS};
use crate::regular;
use crate::run::loss_scale::LossScale;
use crate::safetensors::Reader;
use paceline_plan::strategy::{OptimizerKind, Strategy};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// State, apart from the tensors, that a run needs to continue as if it had never stopped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingState {
    /// Format of this file; later formats have higher numbers.
    pub format: u32,
    /// Number of iterations done.
    pub iteration: u32,
    /// Seed of the initial weights and of the data order.
    pub seed: u64,
    /// Position in the data.
    pub data: DataPosition,
    /// Optimizer that the moments belong to.
    pub optimizer: OptimizerKind,
    /// Loss scale, in runs whose gradients need one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    /// Number of iterations of the compression warm-up, if it is over. If ranks exchange first
    /// moments since then, second moments are an average over that many gradients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compress_warmup_done: Option<u32>,
    /// Strategy of the run when it was saved. For information only: a checkpoint has no layout.
    pub strategy: Strategy,
}

/// Position in the data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPosition {
    /// Name of the data source; other data starts from its own first sample.
    pub source: String,
    /// Number of samples drawn so far, over all replicas.
    pub samples: u64,
    /// Path of the files, if the data was files.
    #[serde(default)]
    pub path: Option<PathBuf>,
}

impl TrainingState {
    /// Current format.
    pub const FORMAT: u32 = 2;
}

/// Extent of a checkpoint that is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Number of tensors, in all files.
    pub tensors: usize,
    /// Bytes of their elements.
    pub bytes: u64,
}

/// A checkpoint that is not whole, and was left out in favour of an older one.
#[derive(Debug)]
pub struct Skipped {
    /// Its path.
    pub path: PathBuf,
    /// Its damage.
    pub problem: CheckpointError,
}

/// A complete checkpoint on disk.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    state: TrainingState,
    weights: Reader,
}

impl Checkpoint {
    /// Opens a checkpoint by its path, or the latest one in a checkpoint or run directory.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let path = Self::find(path)?;
        let file = path.join(STATE);
        let wrong = |problem| CheckpointError::State { path: file.clone(), problem };
        let text = regular::read_text(&file, LARGEST)
            .map_err(|source| CheckpointError::Read { path: file.clone(), source })?;
        let format = serde_json::from_str::<serde_json::Value>(&text)
            .map_err(|error| wrong(format!("is not a training state: {error}")))?;
        match format.get("format").and_then(serde_json::Value::as_u64) {
            Some(format) if format != u64::from(TrainingState::FORMAT) => {
                return Err(wrong(format!(
                    "written in layout {format}, this version reads layout {}; use the paceline that \
                     wrote it",
                    TrainingState::FORMAT
                )));
            }
            Some(_) | None => {}
        }
        let state = serde_json::from_str(&text)
            .map_err(|error| wrong(format!("is not a training state: {error}")))?;
        let weights = Reader::open(&path.join(WEIGHTS))?;
        Ok(Self { path, state, weights })
    }

    /// Compares every tensor and file with its checksum; the error names what is damaged.
    pub fn verify(&self) -> Result<Verified, CheckpointError> {
        self.verify_part(false)
    }

    /// Compares the weights and the other files, but not the optimizer's state.
    pub fn verify_weights(&self) -> Result<Verified, CheckpointError> {
        self.verify_part(true)
    }

    fn verify_part(&self, weights_only: bool) -> Result<Verified, CheckpointError> {
        let path = self.path.join(CHECKSUMS);
        let text = regular::read(&path, LARGEST)
            .map_err(|source| CheckpointError::Read { path: path.clone(), source })?;
        let sums: Checksums = serde_json::from_slice(&text).map_err(|error| {
            CheckpointError::State { path, problem: format!("is not a list of checksums: {error}") }
        })?;
        let (tensors, bytes) = sums.verify(&self.path, weights_only)?;
        Ok(Verified { tensors, bytes })
    }

    /// Opens and verifies a checkpoint by its path, or the newest whole one of a checkpoint or run
    /// directory that is before an iteration. Also returns newer ones that are not whole.
    pub fn newest_whole(path: &Path, before: u32) -> Result<(Self, Vec<Skipped>), CheckpointError> {
        let open = |path: &Path| -> Result<Self, CheckpointError> {
            let found = Self::open(path)?;
            found.verify()?;
            Ok(found)
        };
        if Self::is_one(path) {
            return Ok((open(path)?, Vec::new()));
        }
        let mut all = commit::complete(path);
        if all.is_empty() {
            all = commit::complete(&path.join(super::FOLDER));
        }
        let mut skipped = Vec::new();
        for (_, path) in all.into_iter().rev().filter(|(iteration, _)| *iteration < before) {
            match open(&path) {
                Ok(found) => return Ok((found, skipped)),
                Err(problem) => skipped.push(Skipped { path, problem }),
            }
        }
        let (path, count) = (path.to_owned(), skipped.len());
        Err(match skipped.into_iter().next() {
            Some(Skipped { problem, .. }) => {
                CheckpointError::AllDamaged { path, count, newest: Box::new(problem) }
            }
            None => CheckpointError::None { path },
        })
    }

    /// Complete checkpoints of a directory, by iteration.
    pub fn all(directory: &Path) -> Vec<(u32, PathBuf)> {
        commit::complete(directory)
    }

    /// Returns true if a directory is a checkpoint, contains some, or is the run that wrote them.
    pub fn is_near(path: &Path) -> bool {
        Self::find(path).is_ok()
    }

    /// Returns true if a directory is itself a checkpoint.
    pub fn is_one(path: &Path) -> bool {
        path.join(STATE).is_file()
    }

    fn find(path: &Path) -> Result<PathBuf, CheckpointError> {
        if path.join(STATE).is_file() {
            return Ok(path.to_owned());
        }
        let latest = |folder: &Path| commit::complete(folder).pop().map(|(_, path)| path);
        let found = latest(path).or_else(|| latest(&path.join(super::FOLDER)));
        found.ok_or_else(|| CheckpointError::None { path: path.to_owned() })
    }

    /// Path of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Training state of the checkpoint.
    pub fn state(&self) -> &TrainingState {
        &self.state
    }

    /// Weights by logical name.
    pub fn weights(&self) -> &Reader {
        &self.weights
    }

    /// Optimizer state.
    pub(crate) fn moments(&self) -> Result<Reader, CheckpointError> {
        Ok(Reader::open(&self.path.join(MOMENTS))?)
    }

    /// Rank state, if there is any.
    pub(super) fn rank_state_file(&self) -> Result<Option<Reader>, CheckpointError> {
        let path = self.path.join(RANK_STATE);
        Ok(if path.is_file() { Some(Reader::open(&path)?) } else { None })
    }
}
