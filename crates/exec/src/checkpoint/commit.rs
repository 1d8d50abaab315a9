//! Completion of a checkpoint in the file system.
//!
//! All parts are written to a hidden directory. A rank that has its part on disk creates a file
//! `rank-K.done` there, with the checksums of its part. The committing rank waits for all of them, adds the training state,
//! and renames the directory. This one atomic step makes the checkpoint complete.

use super::checksum::Checksums;
use super::error::CheckpointError;
use super::{CHECKSUMS, STATE, SaveOptions, TrainingState};
use paceline_plan::ids::Rank;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PREFIX: &str = "iteration-";
const PARTIAL: &str = ".partial";

/// A checkpoint that is being written.
#[derive(Clone, Debug)]
pub(super) struct PendingCheckpoint<'a> {
    options: &'a SaveOptions,
    iteration: u32,
    /// Hidden directory of the checkpoint.
    pub(super) folder: PathBuf,
}

impl<'a> PendingCheckpoint<'a> {
    /// Begins the checkpoint of an iteration and creates its hidden directory.
    pub(super) fn begin(options: &'a SaveOptions, iteration: u32) -> Result<Self, CheckpointError> {
        let name = format!(".{}.{:016x}{PARTIAL}", name(iteration), options.attempt);
        let folder = options.directory.join(name);
        fs::create_dir_all(&folder).map_err(CheckpointError::write(&folder))?;
        tracing::debug!(target: "exec", iteration, folder = %folder.display(), "checkpoint begun");
        Ok(Self { options, iteration, folder })
    }

    /// Opens one of its files; all ranks write to it at separate offsets.
    pub(super) fn file(&self, name: &str, len: u64) -> Result<File, CheckpointError> {
        let path = self.folder.join(name);
        let refused = || CheckpointError::write(&path);
        let mut open = OpenOptions::new();
        let file = open.create(true).write(true).truncate(false).open(&path).map_err(refused())?;
        file.set_len(len).map_err(refused())?;
        Ok(file)
    }

    /// Marks a rank's part as written, with its checksums.
    pub(super) fn mark_done(&self, rank: Rank, sums: &Checksums) -> Result<(), CheckpointError> {
        let path = self.folder.join(mark(rank, true));
        let partial = path.with_extension("writing");
        // The mark appears whole.
        let written = fs::write(&partial, self.json(CHECKSUMS, sums)?);
        written.and_then(|()| fs::rename(&partial, &path)).map_err(CheckpointError::write(&path))
    }

    /// Marks a rank's part as failed.
    pub(super) fn mark_failed(&self, rank: Rank) -> Result<(), CheckpointError> {
        let path = self.folder.join(mark(rank, false));
        File::create(&path).map(drop).map_err(CheckpointError::write(&path))
    }

    /// Waits until all `ranks` ranks have their part on disk.
    ///
    /// Uses no messages between ranks, so that it can run concurrently with training. `timeout` is
    /// the longest time without a further part.
    pub(super) fn gather(
        &self,
        ranks: u32,
        timeout: Duration,
        abandoned: &AtomicBool,
    ) -> Result<(), CheckpointError> {
        let there = |rank: u32, done| self.folder.join(mark(Rank(rank), done)).exists();
        let mut waiting_since = Instant::now();
        let mut pause = Duration::from_millis(1);
        let mut next = 0;
        while next < ranks {
            if there(next, true) {
                next += 1;
                (waiting_since, pause) = (Instant::now(), Duration::from_millis(1));
                continue;
            }
            if abandoned.load(Ordering::Relaxed) {
                return Err(CheckpointError::Abandoned);
            }
            if let Some(rank) = (next..ranks).find(|&rank| there(rank, false)) {
                let path = self.folder.clone();
                return Err(CheckpointError::Elsewhere { path, rank: Rank(rank) });
            }
            let waited = waiting_since.elapsed();
            if waited > timeout {
                let (path, rank) = (self.folder.clone(), Rank(next));
                return Err(CheckpointError::Silent { path, rank, waited });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Adds the extra files and the training state, renames the checkpoint, removes the oldest.
    pub(super) fn commit(&self, state: &TrainingState, ranks: u32) -> Result<(), CheckpointError> {
        let mut sums = Checksums::default();
        for rank in 0..ranks {
            let path = self.folder.join(mark(Rank(rank), true));
            let read = fs::read(&path)
                .map_err(|source| CheckpointError::Read { path: path.clone(), source })?;
            sums.add(serde_json::from_slice(&read).map_err(|error| CheckpointError::State {
                path: path.clone(),
                problem: error.to_string(),
            })?);
            fs::remove_file(&path).map_err(CheckpointError::write(&path))?;
        }
        let state = self.json(STATE, state)?;
        let extra =
            self.options.extra_files.iter().map(|(name, contents)| (name.as_str(), contents));
        for (name, contents) in extra.chain([(STATE, &state)]) {
            sums.add_file(name, contents);
            self.add(name, contents)?;
        }
        self.add(CHECKSUMS, &self.json(CHECKSUMS, &sums)?)?;
        sync_directory(&self.folder)?;
        let directory = &self.options.directory;
        let path = directory.join(name(self.iteration));
        if path.exists() {
            // A resumed run reaches this iteration again.
            remove(directory, &path);
        }
        fs::rename(&self.folder, &path).map_err(CheckpointError::write(&path))?;
        sync_directory(directory)?;
        let iteration = self.iteration;
        tracing::info!(target: "exec", iteration, path = %path.display(), "checkpoint committed");
        let complete = complete(directory);
        let too_many = complete.len().saturating_sub(self.options.keep.max(1));
        // Checkpoints of later iterations belong to a run before its resumption; they count as old.
        let (older, later): (Vec<_>, Vec<_>) =
            complete.into_iter().partition(|(iteration, _)| *iteration <= self.iteration);
        for (_, path) in later.iter().chain(&older).take(too_many) {
            remove(directory, path);
        }
        Ok(())
    }

    /// Removes the written files.
    pub(super) fn discard(&self) {
        // Files that cannot be removed now are removed when the next run starts here.
        let _ = fs::remove_dir_all(&self.folder);
    }

    fn json(&self, name: &str, value: &impl serde::Serialize) -> Result<Vec<u8>, CheckpointError> {
        serde_json::to_vec_pretty(value).map_err(|error| CheckpointError::State {
            path: self.folder.join(name),
            problem: error.to_string(),
        })
    }

    fn add(&self, name: &str, contents: &[u8]) -> Result<(), CheckpointError> {
        let path = self.folder.join(name);
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&path)?;
            file.write_all(contents)?;
            file.sync_all()
        };
        write().map_err(CheckpointError::write(&path))
    }
}

/// Complete checkpoints of a directory, by iteration.
pub(super) fn complete(directory: &Path) -> Vec<(u32, PathBuf)> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut found: Vec<(u32, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let iteration = entry.file_name().to_str()?.strip_prefix(PREFIX)?.parse().ok()?;
            let path = entry.path();
            path.join(STATE).is_file().then_some((iteration, path))
        })
        .collect();
    found.sort();
    found
}

/// Removes unfinished checkpoints of dead runs.
pub(super) fn sweep_others(options: &SaveOptions) {
    sweep(options, |own| !own);
}

/// Removes unfinished checkpoints of this run.
pub(super) fn sweep_own(options: &SaveOptions) {
    sweep(options, |own| own);
}

/// Removes unfinished checkpoints, this attempt's own or those of others.
fn sweep(options: &SaveOptions, goes: fn(bool) -> bool) {
    let own = format!(".{:016x}{PARTIAL}", options.attempt);
    for entry in fs::read_dir(&options.directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let unfinished = name.starts_with('.') && name[1..].starts_with(PREFIX);
        if unfinished && name.ends_with(PARTIAL) && goes(name.ends_with(&own)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Removes a checkpoint so that no reader sees half of it: it is renamed first.
fn remove(directory: &Path, path: &Path) {
    let Some(name) = path.file_name() else { return };
    let hidden = directory.join(format!(".{}.old{PARTIAL}", name.to_string_lossy()));
    let _ = fs::remove_dir_all(&hidden);
    if fs::rename(path, &hidden).is_ok() {
        let _ = fs::remove_dir_all(&hidden);
    }
}

fn name(iteration: u32) -> String {
    format!("{PREFIX}{iteration:08}")
}

fn mark(rank: Rank, done: bool) -> String {
    format!("rank-{}.{}", rank.0, if done { "done" } else { "failed" })
}

/// Syncs a directory: a new name is on disk only when its directory is.
fn sync_directory(path: &Path) -> Result<(), CheckpointError> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(CheckpointError::write(path))
}
