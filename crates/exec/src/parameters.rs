//! Weights: initialisation, and assembly of whole tensors from shards.

use crate::error::ExecError;
use crate::memory::{Memory, MemoryError, within};
use crate::rank_coords::RankCoords;
use crate::run::outcome::Parameters;
use crate::shard::runs_of;
use crate::types::{Types, typed};
use paceline_kernels::element::narrow;
use paceline_kernels::philox::Stream;
use paceline_plan::DType;
use paceline_plan::graph::Init;
use paceline_plan::program::{Bucket, Entry, Program, View};
use std::collections::BTreeMap;
use std::ops::Range;

/// Initialises every weight that this rank holds. Values depend only on the seed, the tensor's name
/// and the element's logical position. Everything else in the arena starts as zero.
pub(crate) fn initialise(
    memory: &Memory<'_>,
    types: Types,
    place: RankCoords,
    program: &Program,
    seed: u64,
) -> Result<(), MemoryError> {
    for bucket in &program.buckets {
        let params = (bucket.params, resting(place, bucket));
        let master = bucket.resting_master().map(|master| (master, place.owned(bucket)));
        for (view, elements) in [params].into_iter().chain(master) {
            let dtype = memory.dtype(view.buffer);
            let span = memory.span(view, 0);
            for entry in &bucket.entries {
                let held = overlap(entry, &elements);
                if held.is_empty() {
                    continue;
                }
                let start = entry.offset + held.start - elements.start;
                let at = within(span, dtype, start..start + (held.end - held.start));
                if dtype == DType::F32 {
                    memory.edit_anywhere(at, |values| fill(entry, place, seed, &held, values))?;
                } else {
                    let mut values = vec![0.0; (held.end - held.start) as usize];
                    fill(entry, place, seed, &held, &mut values);
                    typed!(types, <T, _G> memory.edit_anywhere::<T, _>(at, |rounded| {
                        narrow(&values, rounded);
                    }))?;
                }
            }
        }
    }
    Ok(())
}

/// Elements of a bucket that this rank's resting weights cover: all of them, or its shard.
pub(crate) fn resting(place: RankCoords, bucket: &Bucket) -> Range<u64> {
    if bucket.params.len == bucket.elements { 0..bucket.elements } else { place.owned(bucket) }
}

/// View of a bucket's weights in single precision on this rank, and the bucket elements it covers;
/// `None` if only other ranks hold them.
fn exact(place: RankCoords, bucket: &Bucket, program: &Program) -> Option<(View, Range<u64>)> {
    if !bucket.updated {
        return None;
    }
    match bucket.resting_master() {
        Some(master) => Some((master, place.owned(bucket))),
        None => {
            let single = program.buffer(bucket.params.buffer).dtype == DType::F32;
            single.then(|| (bucket.params, resting(place, bucket)))
        }
    }
}

/// Elements of an entry within the range `elements` of its bucket, counted from the entry.
pub(crate) fn overlap(entry: &Entry, elements: &Range<u64>) -> Range<u64> {
    let within = |at: u64| at.clamp(entry.offset, entry.offset + entry.elements()) - entry.offset;
    within(elements.start)..within(elements.end)
}

/// Writes the initial values of the elements `held` of this rank's shard of an entry.
fn fill(entry: &Entry, place: RankCoords, seed: u64, held: &Range<u64>, values: &mut [f32]) {
    let stream = Stream::new(seed, &entry.name);
    for run in runs_of(entry, &place).into_iter().filter_map(|run| run.within(held)) {
        let start = (run.local - held.start) as usize;
        let values = &mut values[start..start + run.len as usize];
        match (run.logical, entry.init) {
            (None, _) | (Some(_), Init::Zero) => values.fill(0.0),
            (Some(_), Init::One) => values.fill(1.0),
            (Some(first), Init::Normal(deviation)) => {
                stream.fill_normal(first, 0.0, deviation as f32, values);
            }
        }
    }
}

/// Weights that one rank holds, laid out as in its arena.
#[derive(Debug)]
pub(crate) struct HeldWeights {
    place: RankCoords,
    /// Values per bucket.
    values: Vec<Vec<f32>>,
}

impl HeldWeights {
    /// Copies the weights that this rank is responsible for: the master copy where layers read
    /// rounded weights.
    pub(crate) fn read(
        memory: &Memory<'_>,
        place: RankCoords,
        program: &Program,
    ) -> Result<Self, MemoryError> {
        let copy = |bucket: &Bucket| match exact(place, bucket, program) {
            Some((view, _)) => memory.read_anywhere(memory.span(view, 0), <[f32]>::to_vec),
            None => Ok(Vec::new()),
        };
        let values = program.buckets.iter().map(copy).collect::<Result<_, _>>()?;
        Ok(Self { place, values })
    }

    /// Values per bucket, to be sent to another process.
    pub(crate) fn values(&self) -> &[Vec<f32>] {
        &self.values
    }

    /// Builds the weights that another process holds.
    pub(crate) fn of(place: RankCoords, values: Vec<Vec<f32>>) -> Self {
        Self { place, values }
    }

    /// Values of every element run that this rank holds, with its entry and logical offset.
    fn pieces<'a>(
        &'a self,
        program: &'a Program,
    ) -> impl Iterator<Item = (&'a Entry, u64, &'a [f32])> {
        program.buckets.iter().zip(&self.values).flat_map(move |(bucket, values)| {
            let resting = exact(self.place, bucket, program).map_or(0..0, |(_, elements)| elements);
            bucket.entries.iter().flat_map(move |entry| {
                let resting = resting.clone();
                let held = overlap(entry, &resting);
                let runs = runs_of(entry, &self.place).into_iter();
                runs.filter_map(move |run| run.within(&held)).filter_map(move |run| {
                    let start = (entry.offset + run.local - resting.start) as usize;
                    let values = &values[start..start + run.len as usize];
                    run.logical.map(|logical| (entry, logical, values))
                })
            })
        })
    }
}

/// Assembles whole tensors from the shards of all ranks. Fails if two ranks disagree about an
/// element that both hold.
pub(crate) fn assemble<'a>(
    holdings: impl IntoIterator<Item = (&'a HeldWeights, &'a Program)>,
) -> Result<Parameters, ExecError> {
    let mut whole: BTreeMap<String, Vec<Option<f32>>> = BTreeMap::new();
    for (holding, program) in holdings {
        for (entry, logical, values) in holding.pieces(program) {
            let elements = (entry.dims[0] * entry.dims[1]) as usize;
            let tensor = whole.entry(entry.name.clone()).or_insert_with(|| vec![None; elements]);
            let known = &mut tensor[logical as usize..logical as usize + values.len()];
            for (known, &value) in known.iter_mut().zip(values) {
                let before = *known.get_or_insert(value);
                if before.to_bits() != value.to_bits() {
                    let (name, rank) = (entry.name.clone(), holding.place.rank);
                    return Err(ExecError::Disagreement { name, rank });
                }
            }
        }
    }
    let fill = |values: Vec<Option<f32>>| values.into_iter().map(Option::unwrap_or_default);
    Ok(whole.into_iter().map(|(name, values)| (name, fill(values).collect())).collect())
}
