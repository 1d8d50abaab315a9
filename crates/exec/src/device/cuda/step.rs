//! Gradient norm and optimizer step.

use super::{Cuda, element};
use crate::device::cpu::step::{Held, Rule, counts};
use crate::device::{Step, Stream};
use crate::error::Fault;
use crate::memory::Memory;
use crate::rank_coords::RankCoords;
use crate::types::Float;
use paceline_kernels::arena::Span;
use paceline_kernels::cuda::{
    CudaError, Device as Gpu, ElementType, Squares, Table, TensorBlocks, Update, UpdateAt,
};
use paceline_plan::graph::BLOCK;
use paceline_plan::program::{Bucket, Program, StepPhase, View};
use std::ops::Range;

/// Table of the blocks of the tensors that count on a rank: replicated ones on the first of those that
/// share a tensor out. The second use of a tied table does not count.
pub(super) fn squares(
    gpu: &mut Gpu,
    program: &Program,
    place: RankCoords,
) -> Result<Squares, CudaError> {
    let mut tensors = Vec::new();
    let mut before = 0;
    for bucket in &program.buckets {
        for entry in bucket.entries.iter().filter(|entry| counts(entry, place)) {
            let first = (before + entry.offset / BLOCK) as u32;
            let blocks = entry.elements().div_ceil(BLOCK) as u32;
            tensors.push(TensorBlocks { first, blocks, slot: entry.norm_entry });
        }
        before += bucket.elements / BLOCK;
    }
    gpu.squares(&tensors)
}

/// Flags of the blocks of a bucket that a rank updates: whether their weights decay.
pub(super) fn decays(
    gpu: &mut Gpu,
    bucket: &Bucket,
    owned: Range<u64>,
) -> Result<Table, CudaError> {
    let mut flags = vec![0u8; bucket.elements.div_ceil(BLOCK) as usize];
    for entry in bucket.entries.iter().filter(|entry| entry.decay) {
        let first = entry.offset / BLOCK;
        let last = first + entry.elements().div_ceil(BLOCK);
        flags[first as usize..last as usize].fill(1);
    }
    gpu.table(&flags[(owned.start / BLOCK) as usize..owned.end.div_ceil(BLOCK) as usize])
}

impl Cuda {
    /// Updates the weights of a bucket that this rank owns.
    pub(super) fn update(
        &mut self,
        on: Stream,
        memory: &Memory<'_>,
        step: &Step<'_>,
    ) -> Result<(), Fault> {
        let Step { bucket, phase, rule, running, norm, .. } = *step;
        match phase {
            StepPhase::Apply if bucket.updated => {}
            // Rules with tensor norms and exchanges of momenta are refused.
            StepPhase::Apply
            | StepPhase::TensorNorms
            | StepPhase::LocalMomentum
            | StepPhase::ApplyMomentum => return Ok(()),
        }
        let buckets = &memory.program().buckets;
        let number = buckets.iter().position(|other| other.params == bucket.params);
        let Some(&decays) = number.and_then(|number| self.decays.get(number)) else {
            return Ok(());
        };
        let owned = self.place.owned(bucket);
        let held = Held { memory, running, owned: &owned, elements: owned.clone() };
        let span = |view: View| held.span(view);
        let moments: Vec<Span> = bucket.moments.iter().map(|&view| span(view)).collect();
        let at = UpdateAt {
            master: span(bucket.master.unwrap_or(bucket.params)),
            weights: bucket.master.map(|_| span(bucket.params)),
            gradients: span(bucket.grads),
            moments: &moments,
            decays,
            norm,
            clip: self.clip.filter(|_| bucket.is_clipped()),
        };
        let weights = Float::of(memory.dtype(bucket.params.buffer));
        let element = weights.map_or(ElementType::F32, element);
        Ok(self.gpu.update(on, element, &update(&rule), &at)?)
    }
}

/// Update with all constants computed, for weights that decay.
fn update(rule: &Rule) -> Update {
    match rule {
        Rule::Sgd(rule) => Update::Sgd {
            lr: rule.lr as f32,
            decay: rule.weight_decay as f32,
            scale: rule.grad_scale,
            momentum: 0.0,
        },
        Rule::Momentum(rule) => Update::Sgd {
            lr: rule.lr as f32,
            decay: rule.weight_decay as f32,
            scale: rule.grad_scale,
            momentum: rule.momentum as f32,
        },
        Rule::AdamW(rule) => Update::AdamW(rule.constants(true)),
        Rule::Lamb(_) | Rule::Lars(_) => unreachable!("refused before the start"),
    }
}
