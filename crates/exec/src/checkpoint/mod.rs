//! Checkpoints: a run's state by logical names, free of any layout.
//!
//! ```text
//! DIR/iteration-00000010/   complete, or it is not there under this name
//!     model.safetensors     weights, whole tensors, by the plan's logical names
//!     optimizer.safetensors NAME.moment1, NAME.moment2
//!     rank_state.safetensors   rank state, if there is any: the one part that has a layout
//!     training.json         iteration, position in the data, seed, optimizer: TrainingState
//!     checksums.json        a checksum per tensor, and one per other file
//!     …                     files added by the caller (the model's file, a tokenizer)
//! DIR/.iteration-00000020.ATTEMPT.partial/   being written, or left by a run that died
//! ```
//!
//! Every rank knows from the plan alone the file offset of each element it owns, and writes it
//! there. No rank ever holds a whole tensor of another, and no tensor is sent between ranks. Ranks
//! synchronise in the file system only, so that threads, processes and hosts that share one are the
//! same to this module (`docs/adr/0010-checkpoint-commit.md`).

mod checksum;
mod commit;
mod error;
mod load;
mod pieces;
mod rank_state;
mod save;
mod state;

pub use error::CheckpointError;
pub use rank_state::RankState;
pub use state::{Checkpoint, DataPosition, Skipped, TrainingState, Verified};

pub(crate) use load::{Source, restore_moments, restore_weights};
pub(crate) use rank_state::restore_rank_state;
pub(crate) use save::{Saver, Shared};

use std::path::PathBuf;

/// Location and frequency of a run's checkpoints.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// Directory that holds the checkpoints.
    pub directory: PathBuf,
    /// Iterations between checkpoints, counted from the very first; `None` saves at the end only.
    pub every: Option<u32>,
    /// Number of checkpoints retained, at least one; the oldest are removed first.
    pub keep: usize,
    /// Distinguishes this run's unfinished files from those of a dead run in the same directory.
    /// All ranks of a run must use the same number, and two runs must not.
    pub attempt: u64,
    /// Extra files stored beside the tensors, by name.
    pub extra_files: Vec<(String, Vec<u8>)>,
}

/// Name of the checkpoint directory within a run's directory.
pub const FOLDER: &str = "checkpoints";

/// Weight file within a checkpoint.
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// Optimizer state file within a checkpoint.
pub(crate) const MOMENTS: &str = "optimizer.safetensors";
/// Rank state file within a checkpoint.
pub(crate) const RANK_STATE: &str = "rank_state.safetensors";
/// Training state file within a checkpoint.
pub(crate) const STATE: &str = "training.json";

/// Checksum file within a checkpoint.
pub(crate) const CHECKSUMS: &str = "checksums.json";

/// Maximum size of a file that is not made of tensors; the largest holds a tokenizer.
const LARGEST: u64 = 256 << 20;

/// Name of a tensor's optimizer state.
pub(crate) fn moment_name(tensor: &str, moment: usize) -> String {
    format!("{tensor}.moment{}", moment + 1)
}
