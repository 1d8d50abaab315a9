//! Checkpoint flags: saving, resuming, initial weights and export.

use super::{Problems, ResumedRun, whole};
use clap::Args;
use paceline_exec::checkpoint::{Checkpoint, Skipped};
use paceline_exec::hugging_face::{Pretrained, foreign_file};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Checkpoint flags of a run.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Checkpoints")]
pub(crate) struct CheckpointFlags {
    /// Save after every N iterations and at the end of the run; 0 never saves [default: at the end]
    ///
    /// A checkpoint is written while training continues, and is either complete or absent. It is
    /// independent of the layout: it can be resumed with any --dp, --tp, --pp and --zero.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub save_every: Option<String>,
    /// Number of checkpoints to keep; the oldest are deleted first [default: 3]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub keep: Option<String>,
    /// Resume from a checkpoint, or from the last one of a run's directory
    ///
    /// Everything is as the run had it (model, data, batch, leaves, optimizer, learning rate, seed,
    /// layout, iterations), except what other flags say; a change that alters the result is
    /// reported. The run continues in its own directory, unless --out names another. The value of
    /// --iterations counts from the original start of the run: a run of 10 that is resumed with
    /// --iterations 20 has 10 left.
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// Start from the weights of a Hugging Face directory (GPT-2, Llama, Mistral, Mixtral, Qwen3-MoE or DeepSeek-V3; safetensors)
    #[arg(long, value_name = "HF_DIR")]
    pub init_from: Option<PathBuf>,
    /// At the end, write the model as a directory that Hugging Face transformers can load
    #[arg(long, value_name = "DIR")]
    pub export_hf: Option<PathBuf>,
}

/// Name of the model file next to a checkpoint.
pub(crate) const MODEL: &str = "model.toml";

/// Times at which a run is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SavePolicy {
    /// Never.
    Never,
    /// At the end.
    AtEnd,
    /// After every given number of iterations, and at the end.
    Every(u32),
}

/// Validated checkpoint flags of a run.
#[derive(Debug)]
pub(crate) struct CheckpointOptions {
    /// Times at which the run is saved.
    pub saving: SavePolicy,
    /// Number of checkpoints to keep.
    pub keep: usize,
    /// Checkpoint to resume from.
    pub resume: Option<Arc<Checkpoint>>,
    /// Newer checkpoints that are left out, because they are not whole.
    pub skipped: Vec<Skipped>,
    /// The run that is resumed, if any.
    pub run: Option<ResumedRun>,
    /// Pretrained weights to start from.
    pub init_from: Option<Arc<Pretrained>>,
    /// Directory to export the final model to.
    pub export_hf: Option<PathBuf>,
}

impl CheckpointFlags {
    /// Checks every flag, and opens the checkpoint and the pretrained weights. A launcher that
    /// started this rank has chosen the checkpoint, `carried`.
    pub(crate) fn check(
        &self,
        carried: Option<&Path>,
        problems: &mut Problems,
    ) -> CheckpointOptions {
        let most = u64::from(u32::MAX);
        let saving = match whole("--save-every", self.save_every.as_deref(), 0..=most, problems) {
            None => SavePolicy::AtEnd,
            Some(0) => SavePolicy::Never,
            Some(every) => SavePolicy::Every(u32::try_from(every).unwrap_or(u32::MAX)),
        };
        let keep = whole("--keep", self.keep.as_deref(), 1..=most, problems);
        let keep = keep.and_then(|keep| usize::try_from(keep).ok()).unwrap_or(3);
        let run = self.resume.as_deref().map(ResumedRun::find);
        let from_start = run.as_ref().is_some_and(|run| run.home.is_some() && !run.has_checkpoint);
        let named = self.resume.as_deref().filter(|_| !from_start);
        let opened = match (carried, named) {
            // The launcher has verified it.
            (Some(path), _) => Some(Checkpoint::open(path).map(|found| (found, Vec::new()))),
            (None, Some(path)) => Some(Checkpoint::newest_whole(path, u32::MAX)),
            (None, None) => None,
        };
        let opened = opened.and_then(|opened| {
            opened.map_err(|error| problems.add("--resume", error.to_string())).ok()
        });
        let (resume, skipped) = opened.unzip();
        let skipped = skipped.unwrap_or_default();
        let init_from = self.init_from.as_deref().filter(|_| carried.is_none());
        let init_from = init_from.and_then(|path| {
            Pretrained::open(path)
                .map_err(|error| problems.add("--init-from", error.to_string()))
                .ok()
        });
        if resume.is_some() && init_from.is_some() {
            problems
                .add("--init-from", "a run that is resumed has its weights already; leave it out");
        }
        let export_hf = self.export_hf.clone();
        if export_hf.as_ref().is_some_and(|path| path.exists() && !path.is_dir()) {
            problems.add("--export-hf", "exists and is not a directory");
        }
        if let Some(foreign) = export_hf.as_deref().and_then(foreign_file) {
            let text = format!(
                "{} is of another model and would be read with the new one; use another directory",
                foreign.display()
            );
            problems.add("--export-hf", text);
        }
        // The export needs the final checkpoint.
        let saving = match (saving, &export_hf) {
            (SavePolicy::Never, Some(_)) => SavePolicy::AtEnd,
            (saving, _) => saving,
        };
        let (resume, init_from) = (resume.map(Arc::new), init_from.map(Arc::new));
        CheckpointOptions { saving, keep, resume, skipped, run, init_from, export_hf }
    }
}

impl CheckpointOptions {
    /// A line per checkpoint that is left out, because it is not whole.
    pub(crate) fn left_out(&self) -> impl Iterator<Item = String> {
        let from = self.resume.as_ref().map_or(0, |resume| resume.state().iteration);
        self.skipped.iter().map(move |Skipped { path, problem }| {
            format!("{} is left out: {problem}; going on after iteration {from}", path.display())
        })
    }

    /// The default model: that of the pretrained weights.
    pub(crate) fn model(&self) -> Option<String> {
        self.init_from.as_ref().map(|from| from.path().display().to_string())
    }

    /// The checkpoint directory of a run.
    pub(crate) fn folder(run: &Path) -> PathBuf {
        run.join(paceline_exec::checkpoint::FOLDER)
    }
}
