//! Around the optimizer: the norm of the gradient, and the step.
//!
//! Every sum here runs over fixed blocks of a tensor in a fixed order, and every element is updated
//! by itself, so that the bits do not depend on who holds what.

use crate::memory::{Memory, within};
use crate::options::TrainOptions;
use crate::place::{Part, Place};
use paceline_kernels::arena::{Access, ArenaError, Span};
use paceline_kernels::pool::{Pool, strips};
use paceline_kernels::{optimizer, reduce};
use paceline_plan::graph::BLOCK;
use paceline_plan::program::{Bucket, Program, View};
use paceline_plan::spec::Placement;
use paceline_plan::strategy::OptimizerKind;
use std::ops::Range;

/// Sums of squares of a bucket's blocks, of which this rank may hold a part; those of others are zero.
pub(crate) fn block_squares(place: Place, parts: u32, grads: &[f32], sums: &mut [f32]) {
    let part = if parts > 1 { place.update } else { Part::WHOLE };
    let blocks = part.range(sums.len() as u64);
    let blocks = blocks.start as usize..blocks.end as usize;
    let block = BLOCK as usize;
    let own = if grads.len() == sums.len() * block {
        &grads[blocks.start * block..blocks.end * block]
    } else {
        grads
    };
    sums.fill(0.0);
    reduce::block_squares(own, block, &mut sums[blocks]);
}

/// Sums the blocks of each tensor into its slot. A tensor that all tensor-parallel ranks hold whole
/// counts on the first of them, and the second use of a tied table nowhere.
pub(crate) fn tensor_squares(place: Place, program: &Program, blocks: &[f32], sums: &mut [f32]) {
    sums.fill(0.0);
    let mut before = 0;
    for bucket in &program.buckets {
        for entry in &bucket.entries {
            let whole = match entry.tp {
                Placement::Replicate => true,
                Placement::Shard { .. } | Placement::Partial(_) | Placement::FlatShard => false,
            };
            if entry.counted && (!whole || place.tensor.index == 0) {
                let first = before + entry.offset / BLOCK;
                let count = entry.elements().div_ceil(BLOCK);
                let of_tensor = &blocks[first as usize..(first + count) as usize];
                sums[entry.norm_entry as usize] = of_tensor.iter().sum();
            }
        }
        before += bucket.elements / BLOCK;
    }
}

/// The norm whose square the tensors' sums of squares add up to.
pub(crate) fn norm(sums: &[f32]) -> f32 {
    sums.iter().sum::<f32>().sqrt()
}

/// How many parameters a thread updates at a time.
const STRETCH: usize = 1 << 16;

/// The optimizer's rule in one iteration.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    Sgd(optimizer::Sgd),
    Momentum(optimizer::Momentum),
    AdamW(optimizer::AdamW),
}

impl Rule {
    /// The rule of an iteration, counted from 0, whose gradient has this norm.
    ///
    /// Adam's decay rates are those that language models are trained with (Brown et al., arXiv
    /// 2005.14165, appendix B): 0.9 and 0.95, with 1e-8 beside the root. Momentum keeps 0.9.
    pub(crate) fn new(
        kind: OptimizerKind,
        options: &TrainOptions,
        iteration: u32,
        norm: Option<f32>,
    ) -> Self {
        let (lr, weight_decay) = (options.lr_at(iteration), options.weight_decay);
        let grad_scale = match (options.clip, norm) {
            (Some(clip), Some(norm)) => (clip / (f64::from(norm) + 1e-6)).min(1.0) as f32,
            (None, _) | (_, None) => 1.0,
        };
        match kind {
            OptimizerKind::Sgd => Self::Sgd(optimizer::Sgd { lr, weight_decay, grad_scale }),
            OptimizerKind::Momentum => Self::Momentum(optimizer::Momentum {
                lr,
                momentum: 0.9,
                nesterov: false,
                weight_decay,
                grad_scale,
            }),
            OptimizerKind::AdamW => Self::AdamW(optimizer::AdamW {
                lr,
                beta1: 0.9,
                beta2: 0.95,
                epsilon: 1e-8,
                weight_decay,
                grad_scale,
                step: u64::from(iteration) + 1,
            }),
        }
    }

    /// Updates the part of a bucket that this rank owns, tensor by tensor.
    pub(crate) fn step(
        &self,
        memory: &Memory<'_>,
        pool: &Pool,
        place: Place,
        bucket: &Bucket,
        running: u64,
    ) -> Result<(), ArenaError> {
        if !bucket.updated {
            return Ok(());
        }
        let owned = place.owned(bucket);
        for entry in &bucket.entries {
            let start = owned.start.max(entry.offset);
            let end = owned.end.min(entry.offset + entry.elements());
            if start < end {
                let span = |view: View| held(memory.span(view, running), view, &owned, start..end);
                let mut spans = [(span(bucket.params), Access::Write); 4];
                spans[1] = (span(bucket.grads), Access::Read);
                let moments = spans[2..].iter_mut().zip(&bucket.moments);
                moments.for_each(|(place, &view)| *place = (span(view), Access::Write));
                let views = memory.views(&spans[..2 + bucket.moments.len().min(2)])?;
                let (params, grads) = (views.take_f32(0), views.f32(1));
                let (len, decay, params) = (params.len(), entry.decay, strips(params, 1));
                match self {
                    Self::Sgd(rule) => pool.for_each_block(len, STRETCH, params, |at, params| {
                        optimizer::sgd(rule, decay, params, &grads[at]);
                    }),
                    Self::Momentum(rule) => {
                        let outputs = (params, strips(views.take_f32(2), 1));
                        pool.for_each_block(len, STRETCH, outputs, |at, (params, velocity)| {
                            optimizer::momentum(rule, decay, params, &grads[at], velocity);
                        });
                    }
                    Self::AdamW(rule) => {
                        let (first, second) = (views.take_f32(2), views.take_f32(3));
                        let outputs = (params, strips(first, 1), strips(second, 1));
                        pool.for_each_block(len, STRETCH, outputs, |at, (params, m, v)| {
                            optimizer::adamw(rule, decay, params, &grads[at], m, v);
                        });
                    }
                }
            }
        }
        Ok(())
    }
}

/// Some elements of a bucket in a view that holds all of it, or the part that this rank owns.
fn held(span: Span, view: View, owned: &Range<u64>, elements: Range<u64>) -> Span {
    let is_part = view.len == owned.end - owned.start;
    let before = if is_part { owned.start } else { 0 };
    within(span, elements.start - before..elements.end - before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::ids::Rank;

    fn place(index: u32, count: u32) -> Place {
        Place { rank: Rank(index), replica: 0, tensor: Part::WHOLE, update: Part { index, count } }
    }

    #[test]
    fn parts_fill_their_blocks_and_leave_the_others_zero() {
        let block = BLOCK as usize;
        let grads: Vec<f32> = (0..4 * block).map(|i| (i / block + 1) as f32).collect();
        let mut whole = [f32::NAN; 4];
        block_squares(place(0, 1), 1, &grads, &mut whole);
        assert_eq!(whole, [1024.0, 4096.0, 9216.0, 16384.0]);
        for (of_whole, grads) in [(true, &grads[..]), (false, &grads[2 * block..])] {
            let mut part = [f32::NAN; 4];
            block_squares(place(1, 2), 2, grads, &mut part);
            assert_eq!(part, [0.0, 0.0, 9216.0, 16384.0], "of the whole: {of_whole}");
        }
    }

    #[test]
    fn only_long_gradients_are_scaled() {
        let scale = |clip, norm| {
            let options = TrainOptions { clip, ..TrainOptions::default() };
            match Rule::new(OptimizerKind::Sgd, &options, 0, norm) {
                Rule::Sgd(rule) => rule.grad_scale,
                Rule::Momentum(_) | Rule::AdamW(_) => f32::NAN,
            }
        };
        assert_eq!(scale(Some(1.0), Some(0.5)), 1.0);
        assert!((scale(Some(1.0), Some(4.0)) - 0.25).abs() < 1e-6);
        assert_eq!(scale(None, Some(4.0)), 1.0);
        assert_eq!(scale(Some(1.0), Some(0.0)), 1.0);
    }
}
