//! Gradient norm and optimizer step.
//!
//! Every sum here runs over fixed blocks of a tensor in a fixed order, and every element is updated
//! independently. So results are bitwise independent of sharding.

use super::Operands;
use crate::memory::{Memory, within};
use crate::rank_coords::{RankCoords, ShardIndex};
use crate::run::loss_scale::LossScale;
use crate::run::options::TrainOptions;
use crate::types::{Types, typed};
use paceline_kernels::arena::{Access, ArenaError, Span};
use paceline_kernels::compressed_adam::CompressedAdam;
use paceline_kernels::lamb::{self, BlockNorms, Lamb};
use paceline_kernels::lars::{self, Lars};
use paceline_kernels::optimizer::{self, Weights};
use paceline_kernels::outer_optimizer::{self, OuterStep};
use paceline_kernels::pool::{Pool, strips};
use paceline_kernels::{Element, reduce};
use paceline_plan::DType;
use paceline_plan::graph::BLOCK;
use paceline_plan::outer_optimizer::OuterOp;
use paceline_plan::program::{Bucket, Entry, Program, StepPhase, TensorNorms, View};
use paceline_plan::spec::Placement;
use paceline_plan::strategy::{OptimizerKind, Strategy};
use std::ops::Range;

/// Sums of squares of a bucket's blocks, of which this rank may hold a shard; the others are zero.
pub(crate) fn block_squares<G: Element>(
    pool: &Pool,
    part: ShardIndex,
    grads: &[G],
    sums: &mut [f32],
) {
    let blocks = part.range(sums.len() as u64);
    let blocks = blocks.start as usize..blocks.end as usize;
    let block = BLOCK as usize;
    let own = if grads.len() == sums.len() * block {
        &grads[blocks.start * block..blocks.end * block]
    } else {
        grads
    };
    sums.fill(0.0);
    let sums = &mut sums[blocks];
    pool.for_each_block(sums.len(), STRETCH / block, strips(sums, 1), |at, sums| {
        let own = &own[at.start * block..own.len().min(at.end * block)];
        reduce::block_squares(own, block, sums);
    });
}

/// Sums the blocks of each tensor into its slot. A tensor that is replicated over tensor-parallel
/// ranks counts only on the first of them. The second use of a tied table does not count.
pub(crate) fn tensor_squares(
    place: RankCoords,
    program: &Program,
    blocks: &[f32],
    sums: &mut [f32],
) {
    sums.fill(0.0);
    let mut before = 0;
    for bucket in &program.buckets {
        for entry in &bucket.entries {
            if counts(entry, place) {
                let first = before + entry.offset / BLOCK;
                let count = entry.elements().div_ceil(BLOCK);
                let of_tensor = &blocks[first as usize..(first + count) as usize];
                sums[entry.norm_entry as usize] = of_tensor.iter().sum();
            }
        }
        before += bucket.elements / BLOCK;
    }
}

/// Returns true if a tensor's squares count on a rank.
pub(crate) fn counts(entry: &Entry, place: RankCoords) -> bool {
    let whole = match entry.tp {
        Placement::Replicate => true,
        Placement::Shard { .. } | Placement::Partial(_) | Placement::FlatShard => false,
    };
    let tensor = if entry.experts > 0 { place.expert_tensor } else { place.tensor };
    let first = tensor.index == 0;
    entry.counted && (!whole || first)
}

/// Norm from the tensors' sums of squares.
pub(crate) fn norm(sums: &[f32]) -> f32 {
    sums.iter().sum::<f32>().sqrt()
}

/// Computes an op of the outer step (local SGD); `share` is the factor of this replica in the mean.
pub(crate) fn outer(pool: &Pool, op: OuterOp, share: f32, on: &Operands<'_>) {
    match op {
        OuterOp::PseudoGradient => {
            let (weights, anchor) = (on.input::<f32>(0), on.input::<f32>(1));
            let moved = on.output::<f32>(0);
            pool.for_each_block(moved.len(), STRETCH, strips(moved, 1), |at, moved| {
                outer_optimizer::pseudo_gradient(&weights[at.clone()], &anchor[at], share, moved);
            });
        }
        OuterOp::Step { replicas, rate, momentum } => {
            let rule = OuterStep {
                share: 1.0 / replicas.max(1) as f32,
                rate: rate as f32,
                momentum: momentum as f32,
            };
            let moved = on.input::<f32>(0);
            let (weights, anchor) = (on.output::<f32>(0), on.output::<f32>(1));
            let count = moved.len();
            if on.outputs() > 2 {
                let both = (strips(weights, 1), strips(anchor, 1));
                let outputs = (both, strips(on.output::<f32>(2), 1));
                pool.for_each_block(
                    count,
                    STRETCH,
                    outputs,
                    |at, ((weights, anchor), velocity)| {
                        outer_optimizer::step(rule, &moved[at], anchor, Some(velocity), weights);
                    },
                );
            } else {
                let outputs = (strips(weights, 1), strips(anchor, 1));
                pool.for_each_block(count, STRETCH, outputs, |at, (weights, anchor)| {
                    outer_optimizer::step(rule, &moved[at], anchor, None, weights);
                });
            }
        }
    }
}

/// Norm of one gradient alone.
pub(crate) fn norm_of<G: Element>(grads: &[G]) -> f32 {
    let mut total = 0.0f64;
    for block in grads.chunks(BLOCK as usize) {
        let mut sum = [0.0];
        reduce::block_squares(block, block.len(), &mut sum);
        total += f64::from(sum[0]);
    }
    total.sqrt() as f32
}

/// Number of parameters that a thread updates at a time.
pub(crate) const STRETCH: usize = 1 << 16;

/// Optimizer update rule of one iteration.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    Sgd(optimizer::Sgd),
    Momentum(optimizer::Momentum),
    AdamW(optimizer::AdamW),
    Lamb(Lamb),
    Lars(Lars),
}

impl Rule {
    /// Rule of an iteration, counted from 0, with the norm of its still scaled gradient.
    ///
    /// Adam's decay rates are those that language models are trained with (Brown et al., arXiv
    /// 2005.14165, appendix B): 0.9 and 0.95, with an epsilon of 1e-8 added to the root. Momentum
    /// is 0.9. LAMB's values are its authors': 0.9 and 0.999, with 1e-6 (You et al., arXiv
    /// 1904.00962, section 4). So are LARS's: momentum 0.9 and a trust coefficient of 0.001 (arXiv
    /// 1708.03888, section 5).
    pub(crate) fn new(
        strategy: &Strategy,
        options: &TrainOptions,
        iteration: u32,
        norm: Option<f32>,
        scale: &LossScale,
    ) -> Self {
        // Skipped iterations left the moments unchanged, too.
        let update = u64::from(iteration.saturating_sub(scale.skipped()));
        Self::of_update(strategy, options, (iteration, update, 1.0), norm, scale)
    }

    /// Rule of an update, counted from 0, where an iteration has several, each with a share of the
    /// learning rate.
    pub(crate) fn of_update(
        strategy: &Strategy,
        options: &TrainOptions,
        (iteration, update, share): (u32, u64, f64),
        norm: Option<f32>,
        scale: &LossScale,
    ) -> Self {
        let lr = share * options.lr_at(iteration, strategy.global_batch);
        let weight_decay = options.weight_decay;
        let clip = match (options.clip, norm) {
            (Some(clip), Some(norm)) => {
                let norm = f64::from(norm / scale.factor());
                (clip / (norm + 1e-6)).min(1.0) as f32
            }
            (None, _) | (_, None) => 1.0,
        };
        let grad_scale = clip / scale.factor();
        let step = update + 1;
        match strategy.optimizer {
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
                step,
            }),
            OptimizerKind::Lamb => Self::Lamb(Lamb {
                lr,
                beta1: 0.9,
                beta2: 0.999,
                epsilon: 1e-6,
                weight_decay,
                grad_scale,
                step,
            }),
            OptimizerKind::Lars => Self::Lars(Lars {
                lr,
                momentum: 0.9,
                trust_coefficient: 0.001,
                weight_decay,
                grad_scale,
            }),
        }
    }

    /// Rule of the momentum exchange among `ranks` ranks, once second moments are fixed after
    /// `seen` gradients; `None` for rules without two moments.
    pub(crate) fn compressed_adam(&self, seen: u32, ranks: u32) -> Option<CompressedAdam> {
        match *self {
            Self::AdamW(rule) => Some(CompressedAdam { rule, seen: u64::from(seen.max(1)), ranks }),
            Self::Sgd(_) | Self::Momentum(_) | Self::Lamb(_) | Self::Lars(_) => None,
        }
    }

    /// Runs a phase of the update on the shard of a bucket that this rank owns, tensor by tensor.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn step(
        &self,
        types: Types,
        memory: &Memory<'_>,
        pool: &Pool,
        place: RankCoords,
        bucket: &Bucket,
        phase: StepPhase,
        running: u64,
    ) -> Result<(), ArenaError> {
        if !bucket.updated {
            return Ok(());
        }
        if let (StepPhase::TensorNorms, Some(norms)) = (phase, bucket.tensor_norms) {
            for view in [norms.weights, norms.directions] {
                memory.edit(memory.span(view, running), |squares: &mut [f32]| squares.fill(0.0))?;
            }
        }
        let owned = place.owned(bucket);
        for entry in &bucket.entries {
            let start = owned.start.max(entry.offset);
            let end = owned.end.min(entry.offset + entry.elements());
            if start < end {
                let held = Held { memory, running, owned: &owned, elements: start..end };
                if let Some(shared_weights) = memory.shared_weights(bucket.params) {
                    typed!(types, <_T, G> {
                        self.hogwild_step::<G>(pool, shared_weights, bucket, entry, &held)
                    })?;
                    continue;
                }
                match (phase, self, bucket.tensor_norms) {
                    (StepPhase::TensorNorms, _, _) if entry.running => {}
                    (StepPhase::Apply, _, _) if entry.running => {
                        typed!(types, <T, G> average::<T, G>(bucket, &held))?;
                    }
                    (StepPhase::TensorNorms, Self::Lamb(rule), Some(norms)) => {
                        typed!(types, <_T, G> Self::moments_and_norms::<G>(rule, pool, bucket, norms, entry, &held))?;
                    }
                    (StepPhase::TensorNorms, Self::Lars(_), Some(norms)) => {
                        typed!(types, <_T, G> tensor_norms::<G>(pool, bucket, norms, &held))?;
                    }
                    (
                        StepPhase::TensorNorms
                        | StepPhase::LocalMomentum
                        | StepPhase::ApplyMomentum,
                        _,
                        _,
                    ) => {}
                    (StepPhase::Apply, _, _) => {
                        typed!(types, <T, G> self.update::<T, G>(pool, bucket, entry, &held))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Updates the moments and computes the tensor norms of the elements of an entry that this rank
    /// holds, in whole blocks: padding after the last element is zero everywhere.
    fn moments_and_norms<G: Element>(
        rule: &Lamb,
        pool: &Pool,
        bucket: &Bucket,
        norms: TensorNorms,
        entry: &Entry,
        held: &Held<'_>,
    ) -> Result<(), ArenaError> {
        let blocks = held.elements.start / BLOCK..held.elements.end.div_ceil(BLOCK);
        let held = Held { elements: blocks.start * BLOCK..blocks.end * BLOCK, ..*held };
        let squares =
            |view: View| within(held.memory.span(view, held.running), DType::F32, blocks.clone());
        let views = held.memory.views(&[
            (held.span(bucket.master.unwrap_or(bucket.params)), Access::Read),
            (held.span(bucket.grads), Access::Read),
            (held.span(bucket.moments[0]), Access::Write),
            (held.span(bucket.moments[1]), Access::Write),
            (squares(norms.weights), Access::Write),
            (squares(norms.directions), Access::Write),
        ])?;
        let (weights, grads, block) = (views.slice::<f32>(0), views.slice::<G>(1), BLOCK as usize);
        let moments = (strips(views.take::<f32>(2), block), strips(views.take::<f32>(3), block));
        let sums = (strips(views.take::<f32>(4), 1), strips(views.take::<f32>(5), 1));
        let count = (blocks.end - blocks.start) as usize;
        pool.for_each_block(count, STRETCH / block, (moments, sums), |at, ((m, v), sums)| {
            let at = at.start * block..at.end * block;
            let squares = BlockNorms { weights: sums.0, directions: sums.1 };
            let (weights, grads) = (&weights[at.clone()], &grads[at]);
            lamb::moments_and_norms(rule, entry.decay, block, weights, grads, m, v, squares);
        });
        Ok(())
    }

    /// Trust ratio of an entry, by a rule of the sums of squares of its weights and directions.
    /// Tensors that do not decay (biases, gains) have ratio 1, as in the LAMB authors'
    /// implementation.
    fn trust_ratio(
        bucket: &Bucket,
        entry: &Entry,
        held: &Held<'_>,
        rule: impl Fn(f32, f32) -> f32,
    ) -> Result<f32, ArenaError> {
        let Some(TensorNorms { tensors, .. }) = bucket.tensor_norms.filter(|_| entry.decay) else {
            return Ok(1.0);
        };
        held.memory.read(held.memory.span(tensors, held.running), |sums: &[f32]| {
            let (weights, directions) = sums.split_at(sums.len() / 2);
            let at = entry.norm_entry as usize;
            rule(weights[at], directions[at])
        })
    }

    /// Updates the elements of an entry that this rank holds.
    fn update<T: Element, G: Element>(
        &self,
        pool: &Pool,
        bucket: &Bucket,
        entry: &Entry,
        held: &Held<'_>,
    ) -> Result<(), ArenaError> {
        let master = bucket.master.unwrap_or(bucket.params);
        let mut spans = [(held.span(master), Access::Write); 5];
        spans[1] = (held.span(bucket.grads), Access::Read);
        let rounded = bucket.master.map(|_| bucket.params);
        // LAMB has updated its moments in an earlier phase; here they are only read.
        let moved = match self {
            Self::Lamb(_) => Access::Read,
            Self::Sgd(_) | Self::Momentum(_) | Self::AdamW(_) | Self::Lars(_) => Access::Write,
        };
        let moments = bucket.moments.iter().take(2).map(|&view| (view, moved));
        let mut count = 2;
        for (view, access) in moments.chain(rounded.map(|view| (view, Access::Write))) {
            spans[count] = (held.span(view), access);
            count += 1;
        }
        let views = held.memory.views(&spans[..count])?;
        let (grads, decay) = (views.slice::<G>(1), entry.decay);
        let rounded = rounded.map(|_| strips(views.take::<T>(count - 1), 1));
        let weights = (strips(views.take::<f32>(0), 1), rounded);
        match self {
            Self::Sgd(rule) => {
                pool.for_each_block(grads.len(), STRETCH, weights, |at, (master, rounded)| {
                    optimizer::sgd(rule, decay, Weights { master, rounded }, &grads[at]);
                });
            }
            Self::Momentum(rule) => {
                let outputs = (weights, strips(views.take::<f32>(2), 1));
                pool.for_each_block(grads.len(), STRETCH, outputs, |at, (weights, velocity)| {
                    let weights = Weights { master: weights.0, rounded: weights.1 };
                    optimizer::momentum(rule, decay, weights, &grads[at], velocity);
                });
            }
            Self::AdamW(rule) => {
                let moments = (strips(views.take::<f32>(2), 1), strips(views.take::<f32>(3), 1));
                let outputs = (weights, moments);
                pool.for_each_block(grads.len(), STRETCH, outputs, |at, (weights, (m, v))| {
                    let weights = Weights { master: weights.0, rounded: weights.1 };
                    optimizer::adamw(rule, decay, weights, &grads[at], m, v);
                });
            }
            Self::Lamb(rule) => {
                let trust = Self::trust_ratio(bucket, entry, held, lamb::trust_ratio)?;
                let (m, v) = (views.slice::<f32>(2), views.slice::<f32>(3));
                pool.for_each_block(grads.len(), STRETCH, weights, |at, (master, rounded)| {
                    let (weights, m, v) = (Weights { master, rounded }, &m[at.clone()], &v[at]);
                    lamb::lamb(rule, decay, trust, weights, m, v);
                });
            }
            Self::Lars(rule) => {
                // A tensor that does not decay moves as if its norm were equal to its gradient's.
                let rate = match entry.decay {
                    true => Self::trust_ratio(bucket, entry, held, |w, g| rule.trust_ratio(w, g))?,
                    false => rule.trust_coefficient as f32,
                };
                let outputs = (weights, strips(views.take::<f32>(2), 1));
                pool.for_each_block(grads.len(), STRETCH, outputs, |at, (weights, velocity)| {
                    let weights = Weights { master: weights.0, rounded: weights.1 };
                    lars::lars(rule, decay, rate, weights, &grads[at], velocity);
                });
            }
        }
        Ok(())
    }
}

/// Sums the squares of the weights and gradients of an entry that this rank holds, block by block.
/// Padding after the last element is zero everywhere.
fn tensor_norms<G: Element>(
    pool: &Pool,
    bucket: &Bucket,
    norms: TensorNorms,
    held: &Held<'_>,
) -> Result<(), ArenaError> {
    let blocks = held.elements.start / BLOCK..held.elements.end.div_ceil(BLOCK);
    let held = Held { elements: blocks.start * BLOCK..blocks.end * BLOCK, ..*held };
    let squares =
        |view: View| within(held.memory.span(view, held.running), DType::F32, blocks.clone());
    let views = held.memory.views(&[
        (held.span(bucket.master.unwrap_or(bucket.params)), Access::Read),
        (held.span(bucket.grads), Access::Read),
        (squares(norms.weights), Access::Write),
        (squares(norms.directions), Access::Write),
    ])?;
    let (weights, grads, block) = (views.slice::<f32>(0), views.slice::<G>(1), BLOCK as usize);
    let sums = (strips(views.take::<f32>(2), 1), strips(views.take::<f32>(3), 1));
    let count = (blocks.end - blocks.start) as usize;
    pool.for_each_block(count, STRETCH / block, sums, |at, (of_weights, of_grads)| {
        let at = at.start * block..at.end * block;
        reduce::block_squares(&weights[at.clone()], block, of_weights);
        reduce::block_squares(&grads[at], block, of_grads);
    });
    Ok(())
}

/// Update factor of running averages in one iteration, as in PyTorch.
pub(crate) const AVERAGED: f32 = 0.1;

/// Updates the elements of an entry that are running averages.
fn average<T: Element, G: Element>(bucket: &Bucket, held: &Held<'_>) -> Result<(), ArenaError> {
    let master = bucket.master.unwrap_or(bucket.params);
    let mut spans = vec![(held.span(master), Access::Write)];
    spans.push((held.span(bucket.grads), Access::Read));
    if bucket.master.is_some() {
        spans.push((held.span(bucket.params), Access::Write));
    }
    let views = held.memory.views(&spans)?;
    let rounded = bucket.master.map(|_| views.take::<T>(2));
    let weights = Weights { master: views.take::<f32>(0), rounded };
    optimizer::average(AVERAGED, weights, views.slice::<G>(1));
    Ok(())
}

/// Elements of a bucket; a view holds all of the bucket or the shard that this rank owns.
pub(crate) struct Held<'a> {
    pub(crate) memory: &'a Memory<'a>,
    pub(crate) running: u64,
    pub(crate) owned: &'a Range<u64>,
    pub(crate) elements: Range<u64>,
}

impl Held<'_> {
    pub(crate) fn span(&self, view: View) -> Span {
        let is_part = view.len == self.owned.end - self.owned.start;
        let before = if is_part { self.owned.start } else { 0 };
        let elements = self.elements.start - before..self.elements.end - before;
        let dtype = self.memory.dtype(view.buffer);
        within(self.memory.span(view, self.running), dtype, elements)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_fill_their_blocks_and_leave_the_others_zero() {
        let block = BLOCK as usize;
        let grads: Vec<f32> = (0..4 * block).map(|i| (i / block + 1) as f32).collect();
        let mut whole = [f32::NAN; 4];
        block_squares(&Pool::single(), ShardIndex::WHOLE, &grads, &mut whole);
        assert_eq!(whole, [1024.0, 4096.0, 9216.0, 16384.0]);
        for (of_whole, grads) in [(true, &grads[..]), (false, &grads[2 * block..])] {
            let mut part = [f32::NAN; 4];
            let second = ShardIndex { index: 1, count: 2 };
            block_squares(&Pool::single(), second, grads, &mut part);
            assert_eq!(part, [0.0, 0.0, 9216.0, 16384.0], "of the whole: {of_whole}");
        }
    }

    #[test]
    fn only_long_gradients_are_scaled() {
        let scale = LossScale::new(&Strategy::default(), &TrainOptions::default());
        let scale = |clip, norm| {
            let options = TrainOptions { clip, ..TrainOptions::default() };
            let strategy = Strategy { optimizer: OptimizerKind::Sgd, ..Strategy::default() };
            match Rule::new(&strategy, &options, 0, norm, &scale) {
                Rule::Sgd(rule) => rule.grad_scale,
                Rule::Momentum(_) | Rule::AdamW(_) | Rule::Lamb(_) | Rule::Lars(_) => f32::NAN,
            }
        };
        assert_eq!(scale(Some(1.0), Some(0.5)), 1.0);
        assert!((scale(Some(1.0), Some(4.0)) - 0.25).abs() < 1e-6);
        assert_eq!(scale(None, Some(4.0)), 1.0);
        assert_eq!(scale(Some(1.0), Some(0.0)), 1.0);
    }
}
