//! What a run keeps of itself, and what it starts from.

use super::{Problems, whole};
use clap::Args;
use paceline_exec::checkpoint::Checkpoint;
use paceline_exec::hugging_face::Pretrained;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A run's checkpoints, as they were written.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Checkpoints")]
pub(crate) struct CheckpointFlags {
    /// Save after every N iterations, beside the end of the run; 0 saves never [default: at the end]
    ///
    /// A checkpoint is written while training goes on, and is complete or not there at all. It has no
    /// layout: it can be resumed with any --dp, --tp, --pp and --zero.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub save_every: Option<String>,
    /// Checkpoints to keep; the oldest go first [default: 3]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub keep: Option<String>,
    /// Go on from a checkpoint, or from the last one of a run's directory
    ///
    /// --iterations counts from the run's very start: a run of 10 that is resumed with --iterations 20
    /// has 10 left. The model, the optimizer and the seed are the checkpoint's unless given.
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// Start from the weights of a Hugging Face directory (GPT-2, Llama, Mistral, Mixtral, Qwen3-MoE or DeepSeek-V3; safetensors)
    #[arg(long, value_name = "HF_DIR")]
    pub init_from: Option<PathBuf>,
    /// When done, write the model as a directory that Hugging Face's transformers load
    #[arg(long, value_name = "DIR")]
    pub export_hf: Option<PathBuf>,
}

/// The model's file beside a checkpoint.
pub(crate) const MODEL: &str = "model.toml";

/// When a run is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Saving {
    /// Not at all.
    Never,
    /// When it ends.
    AtEnd,
    /// After every so many iterations, and when it ends.
    Every(u32),
}

/// What a run keeps of itself, and what it starts from.
#[derive(Debug)]
pub(crate) struct Keeping {
    /// When it is saved.
    pub saving: Saving,
    /// How many checkpoints stay.
    pub keep: usize,
    /// What it goes on from.
    pub resume: Option<Arc<Checkpoint>>,
    /// Weights that it starts from.
    pub init_from: Option<Arc<Pretrained>>,
    /// Where the model goes when it is done.
    pub export_hf: Option<PathBuf>,
}

impl CheckpointFlags {
    /// Checks every flag, and opens what there is to open.
    pub(crate) fn check(&self, problems: &mut Problems) -> Keeping {
        let most = u64::from(u32::MAX);
        let saving = match whole("--save-every", self.save_every.as_deref(), 0..=most, problems) {
            None => Saving::AtEnd,
            Some(0) => Saving::Never,
            Some(every) => Saving::Every(u32::try_from(every).unwrap_or(u32::MAX)),
        };
        let keep = whole("--keep", self.keep.as_deref(), 1..=most, problems);
        let keep = keep.and_then(|keep| usize::try_from(keep).ok()).unwrap_or(3);
        let resume = self.resume.as_deref().and_then(|path| {
            Checkpoint::open(path).map_err(|error| problems.say("--resume", error.to_string())).ok()
        });
        let init_from = self.init_from.as_deref().and_then(|path| {
            Pretrained::open(path)
                .map_err(|error| problems.say("--init-from", error.to_string()))
                .ok()
        });
        if self.resume.is_some() && self.init_from.is_some() {
            problems
                .say("--init-from", "a run that is resumed has its weights already; leave it out");
        }
        let export_hf = self.export_hf.clone();
        if export_hf.as_ref().is_some_and(|path| path.exists() && !path.is_dir()) {
            problems.say("--export-hf", "exists and is not a directory");
        }
        // What is exported is the final checkpoint.
        let saving = match (saving, &export_hf) {
            (Saving::Never, Some(_)) => Saving::AtEnd,
            (saving, _) => saving,
        };
        let (resume, init_from) = (resume.map(Arc::new), init_from.map(Arc::new));
        Keeping { saving, keep, resume, init_from, export_hf }
    }
}

impl Keeping {
    /// Goes on from a checkpoint of this same run, whatever it first began from.
    pub(crate) fn go_on_from(&mut self, path: &Path, problems: &mut Problems) {
        let opened = Checkpoint::open(path);
        self.resume =
            opened.map_err(|error| problems.say("--resume", error.to_string())).ok().map(Arc::new);
        self.init_from = None;
    }

    /// A file that the run put beside a checkpoint that is resumed.
    pub(crate) fn beside(&self, name: &str) -> Option<PathBuf> {
        self.resume.as_ref().map(|resume| resume.path().join(name)).filter(|path| path.is_file())
    }

    /// What the model is unless a flag says: that of the weights it starts from.
    pub(crate) fn model(&self) -> Option<String> {
        let pretrained = self.init_from.as_ref().map(|from| from.path().to_owned());
        self.beside(MODEL).or(pretrained).map(|path| path.display().to_string())
    }

    /// The directory of a run's checkpoints.
    pub(crate) fn folder(run: &Path) -> PathBuf {
        run.join(paceline_exec::checkpoint::FOLDER)
    }
}
