//! What a checkpoint says beside its tensors, and how one is found.

use super::commit;
use super::error::CheckpointError;
use super::{CARRIED, MOMENTS, STATE, WEIGHTS};
use crate::loss_scale::LossScale;
use crate::safetensors::Reader;
use paceline_plan::strategy::{OptimizerKind, Strategy};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// Everything that a run needs to go on as if it had never stopped, but for the tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingState {
    /// The layout of this file; a later layout has a higher number.
    pub format: u32,
    /// Iterations done.
    pub iteration: u32,
    /// Decides the first weights and the order of the data.
    pub seed: u64,
    /// Where the data stands.
    pub data: DataPosition,
    /// The optimizer that the moments belong to.
    pub optimizer: OptimizerKind,
    /// The factor of the loss, in runs whose gradients need one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    /// How many iterations the warm-up of compression was, if it is over. Where ranks exchange first moments since,
    /// second moments are an average over so many gradients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settled: Option<u32>,
    /// How the run was cut when it was saved. For people: a checkpoint has no layout.
    pub strategy: Strategy,
}

/// A place in the data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPosition {
    /// What the samples are drawn from; other data starts from its own first sample.
    pub source: String,
    /// Samples drawn so far, over all replicas.
    pub samples: u64,
    /// Where the files were, if the data was files.
    #[serde(default)]
    pub path: Option<PathBuf>,
}

impl TrainingState {
    /// The layout written today.
    pub const FORMAT: u32 = 1;
}

/// A complete checkpoint on disk.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    state: TrainingState,
    weights: Reader,
}

impl Checkpoint {
    /// Opens a checkpoint: one by name, or the latest of a directory of them or of a run's directory.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let path = Self::find(path)?;
        let file = path.join(STATE);
        let wrong = |problem| CheckpointError::State { path: file.clone(), problem };
        let text = fs::read_to_string(&file)
            .map_err(|source| CheckpointError::Read { path: file.clone(), source })?;
        let format = serde_json::from_str::<serde_json::Value>(&text)
            .map_err(|error| wrong(format!("is no training state: {error}")))?;
        match format.get("format").and_then(serde_json::Value::as_u64) {
            Some(format) if format > u64::from(TrainingState::FORMAT) => {
                return Err(wrong(format!(
                    "written in layout {format}, this version reads up to {}; use a newer paceline",
                    TrainingState::FORMAT
                )));
            }
            Some(_) | None => {}
        }
        let state = serde_json::from_str(&text)
            .map_err(|error| wrong(format!("is no training state: {error}")))?;
        let weights = Reader::open(&path.join(WEIGHTS))?;
        Ok(Self { path, state, weights })
    }

    /// The complete checkpoints of a directory of them, by iteration.
    pub fn all(directory: &Path) -> Vec<(u32, PathBuf)> {
        commit::complete(directory)
    }

    /// Whether a directory is a checkpoint, holds some, or is the run that wrote them.
    pub fn is_near(path: &Path) -> bool {
        Self::find(path).is_ok()
    }

    fn find(path: &Path) -> Result<PathBuf, CheckpointError> {
        if path.join(STATE).is_file() {
            return Ok(path.to_owned());
        }
        let latest = |folder: &Path| commit::complete(folder).pop().map(|(_, path)| path);
        let found = latest(path).or_else(|| latest(&path.join(super::FOLDER)));
        found.ok_or_else(|| CheckpointError::None { path: path.to_owned() })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it says beside its tensors.
    pub fn state(&self) -> &TrainingState {
        &self.state
    }

    /// Its weights, by logical name.
    pub fn weights(&self) -> &Reader {
        &self.weights
    }

    /// The optimizer's state.
    pub(crate) fn moments(&self) -> Result<Reader, CheckpointError> {
        Ok(Reader::open(&self.path.join(MOMENTS))?)
    }

    /// What ranks carried, if they did.
    pub(super) fn carried(&self) -> Result<Option<Reader>, CheckpointError> {
        let path = self.path.join(CARRIED);
        Ok(if path.is_file() { Some(Reader::open(&path)?) } else { None })
    }
}
