//! What every rank carries from one iteration to the next beside weights and moments that all agree on: what
//! compression has not sent yet, factors of its last gradients, the velocity of comparisons, and moments where
//! replicas train apart.
//!
//! Such state belongs to the rank that made it, so it stands by rank and by buffer in a file of its own. Under the
//! layout that wrote it, a run goes on to the bit. Under any other it begins anew, as zero: what was not yet sent of a few
//! gradients is lost, and velocities build up again; weights and moments are as in any checkpoint.

use super::error::CheckpointError;
use super::pieces::{In, Piece};
use super::state::Checkpoint;
use crate::error::ExecError;
use crate::memory::Memory;
use crate::safetensors::Contents;
use paceline_plan::ids::{BufferId, Rank};
use paceline_plan::program::{MemoryKind, Op, Plan, Program};
use std::collections::{BTreeMap, BTreeSet};

/// What a checkpoint has of what ranks of a plan carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carries {
    /// They carry nothing.
    Nothing,
    /// All of it.
    All,
    /// It is another layout's, or not there: they begin anew.
    Anew,
}

impl Checkpoint {
    /// What it has of what the ranks of a plan carry.
    pub fn carries(&self, plan: &Plan) -> Result<Carries, CheckpointError> {
        let wanted = shapes(plan);
        if wanted.is_empty() {
            return Ok(Carries::Nothing);
        }
        let Some(reader) = self.carried()? else { return Ok(Carries::Anew) };
        let found = reader.tensors().iter().map(|(name, tensor)| (name, &tensor.shape));
        Ok(if found.eq(&wanted) { Carries::All } else { Carries::Anew })
    }
}

/// Brings what a rank carries from a checkpoint that has it.
pub(crate) fn restore_carried(
    memory: &Memory<'_>,
    plan: &Plan,
    rank: Rank,
    checkpoint: &Checkpoint,
) -> Result<(), ExecError> {
    if checkpoint.carries(plan)? != Carries::All {
        return Ok(());
    }
    let Some(reader) = checkpoint.carried()? else { return Ok(()) };
    let program = plan.program(rank);
    for buffer in carried(plan, program) {
        let (name, span) = (name(rank, program, buffer), memory.whole(buffer, 0));
        let read = memory.edit_anywhere(span, |values| reader.read(&name, 0, values));
        read.map_err(|source| ExecError::Memory { rank, source })?
            .map_err(CheckpointError::from)?;
    }
    Ok(())
}

/// The file's tensors; none if no rank carries anything.
pub(super) fn contents(plan: &Plan) -> Result<Option<Contents>, serde_json::Error> {
    let shapes = shapes(plan);
    let metadata = BTreeMap::from([("format".to_owned(), "paceline".to_owned())]);
    (!shapes.is_empty()).then(|| Contents::new(shapes, &metadata)).transpose()
}

/// What a rank writes.
pub(super) fn pieces(
    plan: &Plan,
    rank: Rank,
    memory: &Memory<'_>,
    contents: &Contents,
) -> Vec<Piece> {
    let program = plan.program(rank);
    let piece = |buffer| {
        let at = contents.tensor(&name(rank, program, buffer))?.at;
        Some(Piece { file: In::Carried, at, span: memory.whole(buffer, 0) })
    };
    carried(plan, program).into_iter().filter_map(piece).collect()
}

fn shapes(plan: &Plan) -> BTreeMap<String, Vec<u64>> {
    let ranks = (0..plan.mesh.world()).map(Rank);
    let of_rank = |rank: Rank| {
        let program = plan.program(rank);
        let shape = move |id| (name(rank, program, id), vec![program.buffer(id).elements]);
        carried(plan, program).into_iter().map(shape)
    };
    ranks.flat_map(of_rank).collect()
}

fn name(rank: Rank, program: &Program, buffer: BufferId) -> String {
    format!("rank {rank} {}", program.buffer(buffer).name)
}

/// A program's state that is no bucket's, or a bucket's that every replica has of its own; less what is copied from
/// the weights when a run begins.
fn carried(plan: &Plan, program: &Program) -> Vec<BufferId> {
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
