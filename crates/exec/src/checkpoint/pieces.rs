//! Mapping between elements of a rank's arena and offsets in a checkpoint's files.

use super::{moment_name, rank_state};
use crate::memory::{Memory, within};
use crate::parameters::{overlap, resting};
use crate::rank_coords::RankCoords;
use crate::safetensors::Contents;
use crate::shard::runs_of;
use paceline_kernels::arena::Span;
use paceline_plan::DType;
use paceline_plan::program::{Bucket, Entry, Plan, Program, View};
use paceline_plan::spec::Placement;
use std::collections::BTreeMap;
use std::ops::Range;

/// Files of a checkpoint, in the layout that all ranks of a plan use.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    pub(super) weights: Contents,
    /// `None` if the optimizer has no state.
    pub(super) moments: Option<Contents>,
    /// `None` if there is no rank state.
    pub(super) rank_state: Option<Contents>,
}

impl Files {
    pub(crate) fn of(plan: &Plan) -> Result<Self, serde_json::Error> {
        let mut weights = BTreeMap::new();
        let mut moments = BTreeMap::new();
        for bucket in plan.programs.iter().flat_map(|program| &program.buckets) {
            for entry in &bucket.entries {
                let shape = entry.dims.to_vec();
                for moment in 0..bucket.moments.len() {
                    moments.insert(moment_name(&entry.name, moment), shape.clone());
                }
                weights.insert(entry.name.clone(), shape);
            }
        }
        let metadata = BTreeMap::from([("format".to_owned(), "paceline".to_owned())]);
        let moments =
            if moments.is_empty() { None } else { Some(Contents::new(moments, &metadata)?) };
        let carried = rank_state::contents(plan)?;
        Ok(Self { weights: Contents::new(weights, &metadata)?, moments, rank_state: carried })
    }
}

/// File of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum In {
    Weights,
    Moments,
    RankState,
}

/// Elements that are contiguous in the arena and in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) file: In,
    /// Offset of the first byte in the file.
    pub(super) at: u64,
    /// Span of the bytes in the arena.
    pub(super) span: Span,
}

/// Pieces that a rank writes. Over all ranks of the plan, every element of every tensor is written
/// once.
///
/// The rank that updates an element writes it. Elements that all replicas hold are divided among
/// them, so that they share the work. Elements that all tensor-parallel ranks hold are written by
/// the first, and a tied table by the rank of its first use.
pub(super) fn pieces(
    plan: &Plan,
    program: &Program,
    place: RankCoords,
    memory: &Memory<'_>,
    files: &Files,
) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for bucket in program.buckets.iter().filter(|bucket| bucket.updated) {
        let share = share(plan, place, bucket);
        for entry in bucket.entries.iter().filter(|entry| writes(place, entry)) {
            let mut add = |view: View, file, at: Option<u64>| {
                let Some(at) = at else { return };
                let held = held(place, bucket, view);
                let span = memory.span(view, 0);
                each_run(entry, place, &share, |local, logical, len| {
                    let start = entry.offset + local - held.start;
                    let span = within(span, DType::F32, start..start + len);
                    push(&mut pieces, Piece { file, at: at + logical * 4, span });
                });
            };
            let place_of = |contents: &Contents, name: &str| Some(contents.tensor(name)?.at);
            let weights = bucket.resting_master().unwrap_or(bucket.params);
            add(weights, In::Weights, place_of(&files.weights, &entry.name));
            for (moment, &view) in bucket.resting_moments().iter().enumerate() {
                let name = moment_name(&entry.name, moment);
                let at = files.moments.as_ref().and_then(|file| place_of(file, &name));
                add(view, In::Moments, at);
            }
        }
    }
    let own = files.rank_state.iter();
    pieces.extend(own.flat_map(|file| rank_state::pieces(plan, place.rank, memory, file)));
    pieces
}

/// Elements of a bucket that a view of it covers: all, or the part that this rank updates.
pub(super) fn held(place: RankCoords, bucket: &Bucket, view: View) -> Range<u64> {
    if view == bucket.params {
        resting(place, bucket)
    } else if view.len == bucket.elements {
        0..bucket.elements
    } else {
        place.owned(bucket)
    }
}

/// Calls `each` with the local start, logical start and length of every run of an entry within the
/// given elements of its bucket. Padding has no logical index and is skipped.
pub(super) fn each_run(
    entry: &Entry,
    place: RankCoords,
    elements: &Range<u64>,
    mut each: impl FnMut(u64, u64, u64),
) {
    let held = overlap(entry, elements);
    for run in runs_of(entry, &place).into_iter().filter_map(|run| run.within(&held)) {
        if let Some(logical) = run.logical {
            each(run.local, logical, run.len);
        }
    }
}

/// Elements of a bucket that this rank writes.
fn share(plan: &Plan, place: RankCoords, bucket: &Bucket) -> Range<u64> {
    if bucket.shard.is_some() {
        return place.owned(bucket);
    }
    let cut = |entry: &Entry| entry.sparse && entry.tp != Placement::Replicate;
    if bucket.entries.iter().any(cut) {
        // No other replica holds any of it.
        return 0..bucket.elements;
    }
    let replicas = plan.mesh.members(plan.holders(bucket), place.rank);
    let index = replicas.iter().position(|&rank| rank == place.rank).unwrap_or(0) as u64;
    let cut = |index: u64| {
        let cut = u128::from(bucket.elements) * u128::from(index) / replicas.len().max(1) as u128;
        cut as u64
    };
    cut(index)..cut(index + 1)
}

fn writes(place: RankCoords, entry: &Entry) -> bool {
    let whole = match entry.tp {
        Placement::Replicate => true,
        Placement::Shard { .. } | Placement::Partial(_) | Placement::FlatShard => false,
    };
    let tensor = if entry.experts > 0 { place.expert_tensor } else { place.tensor };
    let first = tensor.index == 0;
    // The second use of a tied table is written with the first.
    let kept = entry.counted || entry.running || entry.sparse;
    kept && (!whole || first)
}

fn push(pieces: &mut Vec<Piece>, next: Piece) {
    match pieces.last_mut() {
        Some(last)
            if last.file == next.file
                && last.at + last.span.len == next.at
                && last.span.offset + last.span.len == next.span.offset =>
        {
            last.span.len += next.span.len;
        }
        Some(_) | None => pieces.push(next),
    }
}
