//! Loads a rank's part of named tensors into its arena, from checkpoints of any layout.

use super::error::CheckpointError;
use super::moment_name;
use super::pieces::{each_run, held};
use super::state::Checkpoint;
use crate::error::ExecError;
use crate::memory::{Memory, within};
use crate::rank_coords::RankCoords;
use crate::safetensors::{Reader, SafetensorsError};
use crate::types::Float;
use paceline_kernels::element::narrow;
use paceline_kernels::{Bf16, Element, F16};
use paceline_plan::program::{Bucket, Program, View};

/// Whole tensors by logical name.
pub(crate) trait Source {
    /// Reads elements of a tensor from `first` on, row by row. `dims` are the plan's.
    fn read(
        &mut self,
        name: &str,
        dims: [u64; 2],
        first: u64,
        into: &mut [f32],
    ) -> Result<(), SafetensorsError>;

    /// Reads a whole tensor. Its shape is compared before memory is taken for it: `dims` may be
    /// those of a file that claims more than there is.
    fn whole(&mut self, name: &str, dims: [u64; 2]) -> Result<Vec<f32>, SafetensorsError>;
}

impl Source for &Reader {
    fn read(
        &mut self,
        name: &str,
        dims: [u64; 2],
        first: u64,
        into: &mut [f32],
    ) -> Result<(), SafetensorsError> {
        self.expect(name, &dims)?;
        Reader::read(self, name, first, into)
    }

    fn whole(&mut self, name: &str, dims: [u64; 2]) -> Result<Vec<f32>, SafetensorsError> {
        self.expect(name, &dims)?;
        Reader::whole(self, name)
    }
}

/// Restores the weights that this rank holds.
pub(crate) fn restore_weights(
    memory: &Memory<'_>,
    place: RankCoords,
    program: &Program,
    source: &mut dyn Source,
) -> Result<(), ExecError> {
    for bucket in &program.buckets {
        for view in [Some(bucket.params), bucket.resting_master()].into_iter().flatten() {
            fill(memory, place, bucket, view, source, &|name| name.to_owned())?;
        }
    }
    Ok(())
}

/// Restores the optimizer state that this rank holds.
pub(crate) fn restore_moments(
    memory: &Memory<'_>,
    place: RankCoords,
    program: &Program,
    checkpoint: &Checkpoint,
) -> Result<(), ExecError> {
    if program.buckets.iter().all(|bucket| bucket.moments.is_empty()) {
        return Ok(());
    }
    let reader = checkpoint.moments()?;
    for bucket in &program.buckets {
        for (moment, &view) in bucket.resting_moments().iter().enumerate() {
            let named = move |name: &str| moment_name(name, moment);
            fill(memory, place, bucket, view, &mut &reader, &named)?;
        }
    }
    Ok(())
}

fn fill(
    memory: &Memory<'_>,
    place: RankCoords,
    bucket: &Bucket,
    view: View,
    source: &mut dyn Source,
    named: &dyn Fn(&str) -> String,
) -> Result<(), ExecError> {
    let held = held(place, bucket, view);
    let (span, dtype) = (memory.span(view, 0), memory.dtype(view.buffer));
    let mut result = Ok(());
    for entry in &bucket.entries {
        let name = named(&entry.name);
        each_run(entry, place, &held, |local, logical, len| {
            if result.is_err() {
                return;
            }
            let start = entry.offset + local - held.start;
            let at = within(span, dtype, start..start + len);
            let mut read = |values: &mut [f32]| source.read(&name, entry.dims, logical, values);
            let read = match Float::of(dtype).unwrap_or(Float::F32) {
                Float::F32 => memory.edit_anywhere(at, read),
                Float::Bf16 => {
                    memory.edit_anywhere(at, |rounded: &mut [Bf16]| through(rounded, &mut read))
                }
                Float::F16 => {
                    memory.edit_anywhere(at, |rounded: &mut [F16]| through(rounded, &mut read))
                }
            };
            result = match read {
                Ok(read) => read.map_err(|error| CheckpointError::from(error).into()),
                Err(source) => Err(ExecError::Memory { rank: place.rank, source }),
            };
        });
    }
    result
}

/// Reads in single precision and rounds.
fn through<T: Element, E>(
    rounded: &mut [T],
    read: &mut dyn FnMut(&mut [f32]) -> Result<(), E>,
) -> Result<(), E> {
    let mut values = vec![0.0; rounded.len()];
    read(&mut values)?;
    narrow(&values, rounded);
    Ok(())
}
