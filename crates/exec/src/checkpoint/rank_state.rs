//! Rank state: data that a rank carries from one iteration to the next, besides weights and moments
//! that all ranks agree on. It consists of error feedback, PowerSGD factors of the last gradients,
//! the velocity of outer steps, and the moments of replicas under local SGD.
//!
//! Such state belongs to the rank that produced it, so it is stored by rank and by buffer in a
//! separate file. Under the layout that wrote it, a resumed run is bitwise identical. Under any
//! other layout it is reset to zero: the unsent part of a few gradients is lost, and velocities
//! build up again. Weights and moments are restored as from any checkpoint.

use super::error::CheckpointError;
use super::pieces::{In, Piece};
use super::state::Checkpoint;
use crate::error::ExecError;
use crate::memory::Memory;
use crate::safetensors::Contents;
use paceline_plan::ids::{BufferId, Rank};
use paceline_plan::program::{MemoryKind, Op, Plan, Program};
use std::collections::{BTreeMap, BTreeSet};

/// Availability of a plan's rank state in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankState {
    /// The plan has no rank state.
    None,
    /// All of it is available.
    Restored,
    /// It is missing or has another layout: it starts from zero.
    Reset,
}

impl Checkpoint {
    /// Availability of the plan's rank state in this checkpoint.
    pub fn rank_state(&self, plan: &Plan) -> Result<RankState, CheckpointError> {
        let wanted = shapes(plan);
        if wanted.is_empty() {
            return Ok(RankState::None);
        }
        let Some(reader) = self.rank_state_file()? else { return Ok(RankState::Reset) };
        let found = reader.tensors().iter().map(|(name, tensor)| (name, &tensor.shape));
        Ok(if found.eq(&wanted) { RankState::Restored } else { RankState::Reset })
    }
}

/// Restores a rank's state from a checkpoint, if it is available.
pub(crate) fn restore_rank_state(
    memory: &Memory<'_>,
    plan: &Plan,
    rank: Rank,
    checkpoint: &Checkpoint,
) -> Result<(), ExecError> {
    if checkpoint.rank_state(plan)? != RankState::Restored {
        return Ok(());
    }
    let Some(reader) = checkpoint.rank_state_file()? else { return Ok(()) };
    let program = plan.program(rank);
    for buffer in rank_state_buffers(plan, program) {
        let (name, span) = (name(rank, program, buffer), memory.whole(buffer, 0));
        let read = memory.edit_anywhere(span, |values| reader.read(&name, 0, values));
        read.map_err(|source| ExecError::Memory { rank, source })?
            .map_err(CheckpointError::from)?;
    }
    Ok(())
}

/// Tensors of the file; `None` if no rank has such state.
pub(super) fn contents(plan: &Plan) -> Result<Option<Contents>, serde_json::Error> {
    let shapes = shapes(plan);
    let metadata = BTreeMap::from([("format".to_owned(), "paceline".to_owned())]);
    (!shapes.is_empty()).then(|| Contents::new(shapes, &metadata)).transpose()
}

/// Pieces that a rank writes.
pub(super) fn pieces(
    plan: &Plan,
    rank: Rank,
    memory: &Memory<'_>,
    contents: &Contents,
) -> Vec<Piece> {
    let program = plan.program(rank);
    let piece = |buffer| {
        let at = contents.tensor(&name(rank, program, buffer))?.at;
        Some(Piece { file: In::RankState, at, span: memory.whole(buffer, 0) })
    };
    rank_state_buffers(plan, program).into_iter().filter_map(piece).collect()
}

fn shapes(plan: &Plan) -> BTreeMap<String, Vec<u64>> {
    let ranks = (0..plan.mesh.world()).map(Rank);
    let of_rank = |rank: Rank| {
        let program = plan.program(rank);
        let shape = move |id| (name(rank, program, id), vec![program.buffer(id).elements]);
        rank_state_buffers(plan, program).into_iter().map(shape)
    };
    ranks.flat_map(of_rank).collect()
}

fn name(rank: Rank, program: &Program, buffer: BufferId) -> String {
    format!("rank {rank} {}", program.buffer(buffer).name)
}

/// State buffers of a program that belong to no bucket, or to a bucket whose state differs between
/// replicas. Buffers copied from the weights when a run begins are excluded.
fn rank_state_buffers(plan: &Plan, program: &Program) -> Vec<BufferId> {
    let copied: BTreeSet<BufferId> = program
        .prologue
        .nodes
        .iter()
        .filter_map(|node| match node.op {
            Op::Accumulate { into, .. } => Some(into.buffer),
            Op::Load { .. }
            | Op::Compute { .. }
            | Op::Send { .. }
            | Op::Recv { .. }
            | Op::Collective { .. }
            | Op::Step { .. }
            | Op::Stash { .. }
            | Op::Restore { .. }
            | Op::Free { .. }
            | Op::Serve { .. } => None,
        })
        .collect();
    let states = program.buckets.iter().flat_map(|b| b.master.iter().chain(&b.moments));
    let common: BTreeSet<BufferId> = if plan.states_differ() {
        BTreeSet::new()
    } else {
        states.map(|view| view.buffer).collect()
    };
    let state = |id: &BufferId| {
        let buffer = program.buffer(*id);
        buffer.kind == MemoryKind::Optimizer && !copied.contains(id) && !common.contains(id)
    };
    (0..program.buffers.len()).map(BufferId::from).filter(state).collect()
}
