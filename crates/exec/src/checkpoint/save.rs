//! One rank's side of saving: a quick copy, and a thread that writes it while training goes on.

use super::commit::{self, UnderWay};
use super::error::CheckpointError;
use super::pieces::{Files, In, Piece, pieces};
use super::{CARRIED, MOMENTS, SaveOptions, TrainingState, WEIGHTS};
use crate::error::ExecError;
use crate::memory::Memory;
use crate::place::Place;
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

/// What is the same for every rank of a run.
#[derive(Debug)]
pub(crate) struct Shared {
    options: SaveOptions,
    files: Files,
    /// Ranks that write, of which rank 0 commits.
    ranks: u32,
    /// How long the committing rank waits for the others.
    patience: Duration,
}

impl Shared {
    /// Prepares a run's checkpoints; what dead runs left unfinished goes.
    pub(crate) fn new(
        options: &SaveOptions,
        plan: &Plan,
        patience: Duration,
    ) -> Result<Self, CheckpointError> {
        let directory = &options.directory;
        std::fs::create_dir_all(directory).map_err(CheckpointError::write(directory))?;
        commit::sweep_others(options);
        let files = Files::of(plan).map_err(|error| CheckpointError::State {
            path: directory.clone(),
            problem: error.to_string(),
        })?;
        Ok(Self { options: options.clone(), files, ranks: plan.mesh.world(), patience })
    }

    /// Takes away what a run that failed leaves unfinished: ranks may have been at different checkpoints.
    pub(crate) fn clear(&self) {
        commit::sweep_own(&self.options);
    }
}

/// The copy, handed back, and how writing it went.
type Written = (Vec<f32>, Result<(), CheckpointError>);

/// Saves what one rank owns.
#[derive(Debug)]
pub(crate) struct Saver {
    shared: Arc<Shared>,
    rank: Rank,
    pieces: Arc<[Piece]>,
    /// Holds a copy of all pieces, end to end, while it is written. Empty if the run is saved at its end
    /// only, when nothing changes any more and nothing needs to be copied.
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
        place: Place,
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

    /// Bytes that are held beside the arena.
    pub(crate) fn bytes(&self) -> u64 {
        4 * self.copy.len() as u64
    }

    /// Whether a checkpoint is due after so many iterations.
    pub(crate) fn is_due(&self, iteration: u32) -> bool {
        self.shared.options.every.is_some_and(|every| iteration.is_multiple_of(every.max(1)))
    }

    /// Learns whether a checkpoint that was begun has failed, without waiting for it.
    pub(crate) fn poll(&mut self) -> Result<(), ExecError> {
        match &self.writing {
            Some(writing) if writing.is_finished() => self.settle(),
            Some(_) | None => Ok(()),
        }
    }

    /// Copies this rank's part of the state and has it written while training goes on. If the checkpoint
    /// before is still being written, that one is waited for: there is one copy.
    pub(crate) fn begin(
        &mut self,
        memory: &Memory<'_>,
        state: TrainingState,
    ) -> Result<(), ExecError> {
        self.settle()?;
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

    /// Ends saving: what was begun is waited for, and the final state is saved if it is not yet.
    pub(crate) fn finish(
        &mut self,
        memory: &Memory<'_>,
        state: TrainingState,
    ) -> Result<(), ExecError> {
        self.settle()?;
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

    /// Waits for the checkpoint under way, if there is one, and takes the copy's memory back.
    fn settle(&mut self) -> Result<(), ExecError> {
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
    /// A run that fails does not wait for checkpoints, but leaves no thread behind.
    fn drop(&mut self) {
        self.abandoned.store(true, Ordering::Relaxed);
        if let Some(writing) = self.writing.take() {
            let _ = writing.join();
        }
    }
}

/// Writes a piece's values where it belongs.
type Write<'a> = dyn FnMut(&Piece, &[f32]) -> Result<(), CheckpointError> + 'a;

impl Shared {
    /// Writes a rank's part, and commits the checkpoint if this rank does that.
    fn save(
        &self,
        rank: Rank,
        state: &TrainingState,
        abandoned: &AtomicBool,
        put: impl FnOnce(&mut Write<'_>) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let under_way = UnderWay::begin(&self.options, state.iteration)?;
        let part = self.part(&under_way, rank, put);
        let done = match part {
            Ok(()) => under_way.mark(rank, true),
            Err(error) => {
                // If even this cannot be written, the committing rank's patience ends.
                let _ = under_way.mark(rank, false);
                Err(error)
            }
        };
        if rank != COMMITTING {
            return done;
        }
        let committed = done
            .and_then(|()| under_way.gather(self.ranks, self.patience, abandoned))
            .and_then(|()| under_way.commit(state, self.ranks));
        if committed.is_err() {
            under_way.discard();
        }
        committed
    }

    fn part(
        &self,
        under_way: &UnderWay<'_>,
        rank: Rank,
        put: impl FnOnce(&mut Write<'_>) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let weights = Some(open(under_way, rank, WEIGHTS, &self.files.weights)?);
        let moments = self.files.moments.as_ref();
        let moments = moments.map(|file| open(under_way, rank, MOMENTS, file)).transpose()?;
        let carried = self.files.carried.as_ref();
        let carried = carried.map(|file| open(under_way, rank, CARRIED, file)).transpose()?;
        put(&mut |piece, values| {
            let file = match piece.file {
                In::Weights => &weights,
                In::Moments => &moments,
                In::Carried => &carried,
            };
            let Some((file, path)) = file else { return Ok(()) };
            file.write_all_at(bytemuck::cast_slice(values), piece.at)
                .map_err(CheckpointError::write(path))
        })?;
        for (file, path) in [&weights, &moments, &carried].into_iter().flatten() {
            File::sync_all(file).map_err(CheckpointError::write(path))?;
        }
        Ok(())
    }
}

/// Opens a file of tensors; the committing rank also writes its table of contents.
fn open(
    under_way: &UnderWay<'_>,
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

/// The rank that completes checkpoints.
const COMMITTING: Rank = Rank(0);
