//! The run's directory: claimed before the run, with the settings that resume it.

use super::settings::Settings;
use super::{Job, Purpose};
use crate::failure::Failure;
use crate::flags::{CheckpointOptions, MODEL, SETTINGS, TOKENIZER};
use crate::output::{self, Existing, Journal, RunDir};
use paceline_exec::checkpoint::Checkpoint;
use paceline_exec::data::Tokenizer;
use std::path::Path;

impl Job {
    /// Claims the run's directory. A run that continues there keeps its files and its journal.
    pub(super) fn directory(&self) -> Result<RunDir, Failure> {
        let named = self.training.out.as_deref();
        let home = self.keeping.run.as_ref().and_then(|run| run.home.as_deref());
        let real = |path: &Path| path.canonicalize().ok();
        let continues = match (named, home) {
            (Some(named), Some(home)) => real(named).is_some() && real(named) == real(home),
            (None, _) | (_, None) => false,
        };
        let existing = match (continues, self.training.overwrite) {
            (true, _) => Existing::Continue,
            (false, true) => Existing::Replace,
            (false, false) => Existing::Refuse,
        };
        let directory = RunDir::claim(named, self.model.name(), existing)
            .map_err(|problem| Failure::flag("--out", problem))?;
        if continues {
            let done = self.keeping.resume.as_ref().map_or(0, |resume| resume.state().iteration);
            self.discard_later(&directory, done)?;
            Journal::resume(&directory, done)?;
        } else if self.purpose == Purpose::Train {
            self.store_settings(&directory)?;
        }
        Ok(directory)
    }

    /// Discards checkpoints behind the one that the run continues from, with `--overwrite` only.
    fn discard_later(&self, directory: &RunDir, done: u32) -> Result<(), Failure> {
        let folder = CheckpointOptions::folder(directory.path());
        let damaged = |path: &Path| self.keeping.skipped.iter().any(|skipped| skipped.path == path);
        let later = Checkpoint::all(&folder).into_iter();
        let later: Vec<_> =
            later.filter(|(iteration, path)| *iteration > done && !damaged(path)).collect();
        if let (Some((iteration, _)), false) = (later.last(), self.training.overwrite) {
            let text = format!(
                "{} also has a checkpoint of iteration {iteration}; --out DIR goes on from {done} \
                 elsewhere, --overwrite discards what is later",
                directory.path().display()
            );
            return Err(Failure::flag("--resume", text));
        }
        let gone = later.iter().try_for_each(|(_, path)| std::fs::remove_dir_all(path));
        Ok(gone?)
    }

    /// The command that resumes the run, if it has a checkpoint.
    pub(super) fn resume_command(&self, directory: &RunDir) -> Option<String> {
        let saved = !Checkpoint::all(&CheckpointOptions::folder(directory.path())).is_empty();
        let path = directory.path().display().to_string();
        let plain = |c: char| c.is_alphanumeric() || "/._-+=:@%".contains(c);
        let path = if path.chars().all(plain) {
            path
        } else {
            format!("'{}'", path.replace('\'', "'\\''"))
        };
        (saved && self.purpose == Purpose::Train).then(|| format!("paceline train --resume {path}"))
    }

    /// Adds the command that resumes the run to the message of its failure.
    pub(super) fn with_remedy(&self, failure: Failure, directory: &RunDir) -> Failure {
        match (failure, self.resume_command(directory)) {
            (Failure::Run(error), Some(command)) => {
                Failure::Run(anyhow::anyhow!("{error:#}\nresume with: {command}"))
            }
            (failure, _) => failure,
        }
    }

    /// Changes of the settings since the resumed run was saved that alter the result, as one line.
    pub(super) fn changes(&self) -> Option<String> {
        let resumed = self.keeping.run.as_ref().and_then(|run| run.settings.as_deref());
        self.settings.changes_since(&Settings::read(resumed?)?)
    }

    /// Stores the run's settings for `--resume`.
    pub(super) fn store_settings(&self, directory: &RunDir) -> Result<(), Failure> {
        if let Tokenizer::HuggingFace { json, .. } = &self.data.tokenizer {
            output::write(&directory.file(TOKENIZER), json)?;
        }
        directory.write(MODEL, &self.model.to_toml())?;
        Ok(directory.write(SETTINGS, &self.settings.to_toml())?)
    }
}
