//! One rank's side of saving: a fast copy, and a thread that writes it while training continues.

use super::checksum::{Checksums, Summing};
use super::commit::{self, PendingCheckpoint};
use super::error::CheckpointError;
use super::pieces::{Files, In, Piece, pieces};
use super::{MOMENTS, RANK_STATE, SaveOptions, TrainingState, WEIGHTS};
use crate::error::ExecError;
use crate::memory::Memory;
use crate::rank_coords::RankCoords;
use crate::safetensors::Contents;
use paceline_plan::ids::Rank;
use paceline_plan::program::{Plan, Program};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Data common to all ranks of a run.
#[derive(Debug)]
pub(crate) struct Shared {
    options: SaveOptions,
    files: Files,
    /// Number of ranks that write; rank 0 commits.
    ranks: u32,
    /// Time that the committing rank waits for the others.
    timeout: Duration,
}

impl Shared {
    /// Prepares a run's checkpoints and removes unfinished ones of dead runs.
    pub(crate) fn new(
        options: &SaveOptions,
        plan: &Plan,
        timeout: Duration,
    ) -> Result<Self, CheckpointError> {
        let directory = &options.directory;
        std::fs::create_dir_all(directory).map_err(CheckpointError::write(directory))?;
        commit::sweep_others(options);
        let files = Files::of(plan).map_err(|error| CheckpointError::State {
            path: directory.clone(),
            problem: error.to_string(),
        })?;
        Ok(Self { options: options.clone(), files, ranks: plan.mesh.world(), timeout })
    }

    /// Removes unfinished files of a failed run: ranks may have been at different checkpoints.
    pub(crate) fn clear(&self) {
        commit::sweep_own(&self.options);
    }
}

/// The copy, returned for reuse, and the result of writing it.
type Written = (Vec<f32>, Result<(), CheckpointError>);

/// Saves the state that one rank owns.
#[derive(Debug)]
pub(crate) struct Saver {
    shared: Arc<Shared>,
    rank: Rank,
    pieces: Arc<[Piece]>,
    /// Contiguous copy of all pieces while it is written. Empty if the run is saved at its end
    /// only, when nothing changes any more and no copy is needed.
    copy: Vec<f32>,
    writing: Option<JoinHandle<Written>>,
    abandoned: Arc<AtomicBool>,
    saved: Option<u32>,
}

impl Saver {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        plan: &Plan,
        program: &Program,
        place: RankCoords,
        memory: &Memory<'_>,
    ) -> Self {
        let pieces = pieces(plan, program, place, memory, &shared.files);
        let elements: u64 = pieces.iter().map(|piece| piece.span.len / 4).sum();
        let copied = if shared.options.every.is_some() { elements } else { 0 };
        Self {
            shared: Arc::clone(shared),
            rank: place.rank,
            pieces: pieces.into(),
            copy: vec![0.0; copied as usize],
            writing: None,
            abandoned: Arc::default(),
            saved: None,
        }
    }

    /// Bytes held outside the arena.
    pub(crate) fn bytes(&self) -> u64 {
        4 * self.copy.len() as u64
    }

    /// Returns true if a checkpoint is due after `iteration` iterations.
    pub(crate) fn is_due(&self, iteration: u32) -> bool {
        self.shared.options.every.is_some_and(|every| iteration.is_multiple_of(every.max(1)))
    }

    /// Returns the error of a pending checkpoint, if it has failed, without waiting for it.
    pub(crate) fn poll(&mut self) -> Result<(), ExecError> {
        match &self.writing {
            Some(writing) if writing.is_finished() => self.join_writer(),
            Some(_) | None => Ok(()),
        }
    }

    /// Copies this rank's part of the state and writes it while training continues. Waits for the
    /// previous checkpoint if it is still being written, since there is only one copy.
    pub(crate) fn begin(
        &mut self,
        memory: &Memory<'_>,
        state: TrainingState,
    ) -> Result<(), ExecError> {
        self.join_writer()?;
        self.saved = Some(state.iteration);
        let mut copy = std::mem::take(&mut self.copy);
        let mut at = 0;
        for piece in self.pieces.iter() {
            let len = (piece.span.len / 4) as usize;
            let into = &mut copy[at..at + len];
            memory
                .read_anywhere(piece.span, |values| into.copy_from_slice(values))
                .map_err(|source| ExecError::Memory { rank: self.rank, source })?;
            at += len;
        }
        let (shared, pieces) = (Arc::clone(&self.shared), Arc::clone(&self.pieces));
        let (rank, abandoned) = (self.rank, Arc::clone(&self.abandoned));
        let write = move || {
            let mut at = 0;
            let written = shared.save(rank, &state, &abandoned, |write| {
                for piece in pieces.iter() {
                    let len = (piece.span.len / 4) as usize;
                    write(piece, &copy[at..at + len])?;
                    at += len;
                }
                Ok(())
            });
            (copy, written)
        };
        let name = format!("saver {rank}");
        let writing = thread::Builder::new().name(name).spawn(write);
        self.writing = Some(writing.map_err(|source| ExecError::Thread { rank, source })?);
        Ok(())
    }

    /// Ends saving: waits for a pending checkpoint, and saves the final state if not yet saved.
    pub(crate) fn finish(
        &mut self,
        memory: &Memory<'_>,
        state: TrainingState,
    ) -> Result<(), ExecError> {
        self.join_writer()?;
        if self.saved == Some(state.iteration) {
            return Ok(());
        }
        let mut fault = None;
        let written = self.shared.save(self.rank, &state, &self.abandoned, |write| {
            for piece in self.pieces.iter() {
                match memory.read_anywhere(piece.span, |values| write(piece, values)) {
                    Ok(written) => written?,
                    Err(source) => {
                        fault = Some(ExecError::Memory { rank: self.rank, source });
                        return Err(CheckpointError::Abandoned);
                    }
                }
            }
            Ok(())
        });
        match fault {
            Some(fault) => Err(fault),
            None => Ok(written?),
        }
    }

    /// Waits for the pending checkpoint, if any, and takes back the copy's memory.
    fn join_writer(&mut self) -> Result<(), ExecError> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        match writing.join() {
            Ok((copy, written)) => {
                self.copy = copy;
                Ok(written?)
            }
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for Saver {
    /// A failed run does not wait for checkpoints, but leaves no thread behind.
    fn drop(&mut self) {
        self.abandoned.store(true, Ordering::Relaxed);
        if let Some(writing) = self.writing.take() {
            let _ = writing.join();
        }
    }
}

/// Writes a piece's values to its file.
type Write<'a> = dyn FnMut(&Piece, &[f32]) -> Result<(), CheckpointError> + 'a;

impl Shared {
    /// Writes a rank's part, and commits the checkpoint on the committing rank.
    fn save(
        &self,
        rank: Rank,
        state: &TrainingState,
        abandoned: &AtomicBool,
        put: impl FnOnce(&mut Write<'_>) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let under_way = PendingCheckpoint::begin(&self.options, state.iteration)?;
        let part = self.part(&under_way, rank, put);
        let done = match part {
            Ok(sums) => under_way.mark_done(rank, &sums),
            Err(error) => {
                // If even this cannot be written, the committing rank times out.
                let _ = under_way.mark_failed(rank);
                Err(error)
            }
        };
        if rank != COMMITTING {
            return done;
        }
        let committed = done
            .and_then(|()| under_way.gather(self.ranks, self.timeout, abandoned))
            .and_then(|()| under_way.commit(state, self.ranks));
        if committed.is_err() {
            under_way.discard();
        }
        committed
    }

    fn part(
        &self,
        under_way: &PendingCheckpoint<'_>,
        rank: Rank,
        put: impl FnOnce(&mut Write<'_>) -> Result<(), CheckpointError>,
    ) -> Result<Checksums, CheckpointError> {
        let mut sums = Summing::new(&self.files);
        let weights = Some(open(under_way, rank, WEIGHTS, &self.files.weights)?);
        let moments = self.files.moments.as_ref();
        let moments = moments.map(|file| open(under_way, rank, MOMENTS, file)).transpose()?;
        let carried = self.files.rank_state.as_ref();
        let carried = carried.map(|file| open(under_way, rank, RANK_STATE, file)).transpose()?;
        put(&mut |piece, values| {
            let file = match piece.file {
                In::Weights => &weights,
                In::Moments => &moments,
                In::RankState => &carried,
            };
            let Some((file, path)) = file else { return Ok(()) };
            sums.add(piece, values);
            file.write_all_at(bytemuck::cast_slice(values), piece.at)
                .map_err(CheckpointError::write(path))
        })?;
        for (file, path) in [&weights, &moments, &carried].into_iter().flatten() {
            File::sync_all(file).map_err(CheckpointError::write(path))?;
        }
        Ok(sums.finish())
    }
}

/// Opens a tensor file; the committing rank also writes its header.
fn open(
    under_way: &PendingCheckpoint<'_>,
    rank: Rank,
    name: &str,
    contents: &Contents,
) -> Result<(File, PathBuf), CheckpointError> {
    let (file, path) = (under_way.file(name, contents.file_len())?, under_way.folder.join(name));
    if rank == COMMITTING {
        let written = file.write_all_at(contents.header(), 0);
        written.map_err(CheckpointError::write(&path))?;
    }
    Ok((file, path))
}

/// Rank that completes checkpoints.
const COMMITTING: Rank = Rank(0);
