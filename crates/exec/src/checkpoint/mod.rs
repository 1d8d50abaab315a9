//! Checkpoints: a run's state by logical names, free of any layout.
//!
//! ```text
//! DIR/iteration-00000010/   complete, or it is not there under this name
//!     model.safetensors     weights, whole tensors, by the plan's logical names
//!     optimizer.safetensors NAME.moment1, NAME.moment2
//!     carried.safetensors   what ranks carry by themselves, if they do: the one part that has a layout
//!     training.json         iteration, position in the data, seed, optimizer: TrainingState
//!     …                     what the caller put beside them (the model's file, a tokenizer)
//! DIR/.iteration-00000020.ATTEMPT.partial/   under way, or left by a run that died
//! ```
//!
//! Every rank knows from the plan alone where each element that it owns lies in the files, and writes
//! it there; no rank ever holds a whole tensor of another, and no tensor crosses a wire. Ranks meet
//! in the file system only, so that threads, processes and hosts that share one are the same to
//! this module (`docs/adr/0010-checkpoints-meet-in-the-file-system.md`).

mod carried;
mod commit;
mod error;
mod load;
mod pieces;
mod save;
mod state;

pub use carried::Carries;
pub use error::CheckpointError;
pub use state::{Checkpoint, DataPosition, TrainingState};

pub(crate) use carried::restore_carried;
pub(crate) use load::{Source, restore_moments, restore_weights};
pub(crate) use save::{Saver, Shared};

use std::path::PathBuf;

/// Where and how often a run is saved.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// The directory that holds the checkpoints.
    pub directory: PathBuf,
    /// Saves after every so many iterations, counted from the very first; none saves at the end only.
    pub every: Option<u32>,
    /// How many checkpoints are kept; the oldest go first. At least one is.
    pub keep: usize,
    /// Tells this run's unfinished files from those of one that died in the same place. All ranks of a
    /// run must have the same number, and two runs must not.
    pub attempt: u64,
    /// Files that are put beside the tensors, by name.
    pub beside: Vec<(String, Vec<u8>)>,
}

/// The directory of a run's checkpoints within the run's own.
pub const FOLDER: &str = "checkpoints";

/// The weights' file within a checkpoint.
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// The optimizer's file within a checkpoint.
pub(crate) const MOMENTS: &str = "optimizer.safetensors";
/// The file of what ranks carry within a checkpoint.
pub(crate) const CARRIED: &str = "carried.safetensors";
/// The training state's file within a checkpoint.
pub(crate) const STATE: &str = "training.json";

/// What the optimizer's state of a tensor is called.
pub(crate) fn moment_name(tensor: &str, moment: usize) -> String {
    format!("{tensor}.moment{}", moment + 1)
}
