//! Cross entropy over a vocabulary that may be sharded over ranks.
//!
//! The loss of a row is `ln(sum of exp(l - max)) - (l[target] - max)`. It is computed in the parts
//! that the vocabulary-parallel loss of Megatron-LM needs (Shoeybi et al., 2019, section 3): the
//! largest logit of each row, then two sums, with a reduction over the shards after each. The
//! logits themselves are never gathered. A shard holds the logits of some [`Columns`] of the
//! vocabulary. Without shards the same functions are called one after the other.

use crate::embedding::local;
use crate::instruction_set::vectorised;
use crate::math::{exp, exp_f64, ln_f64, sigmoid};
use crate::ordered_sum;
use crate::shape::expect_len;
use crate::{Element, Rows};

/// Mapping of a shard's logit columns to the vocabulary: column `c` is token `first + c` if `c <
/// valid`. A vocabulary that does not divide equally is padded; padding columns are ignored, and
/// their gradient is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns {
    /// Token of the first column.
    pub first: u32,
    /// Number of columns that are not padding, at most the width of a row.
    pub valid: usize,
}

impl Columns {
    /// Column of a token, if it is held here.
    #[inline(always)]
    fn of(self, word: u32) -> Option<usize> {
        local(word, self.first, self.valid)
    }

    #[track_caller]
    fn expect_within(self, shape: Rows) {
        assert!(
            self.valid <= shape.width,
            "{} columns stand for words, but a row has {}",
            self.valid,
            shape.width,
        );
    }
}

/// `max[row]` = the largest logit of the row in this shard; to be reduced by maximum over shards.
pub fn row_max<T: Element>(shape: Rows, columns: Columns, logits: &[T], max: &mut [f32]) {
    expect_len("logits", logits.len(), &[shape.rows, shape.width]);
    expect_len("max", max.len(), &[shape.rows]);
    columns.expect_within(shape);
    vectorised(
        #[inline(always)]
        || {
            for (row, max) in max.iter_mut().enumerate() {
                *max = ordered_sum::max(&logits[shape.range(row)][..columns.valid]);
            }
        },
    );
}

/// `stats[row] = [sum of exp(l - max), l[target] - max]`; to be reduced by sum over shards. The
/// second is zero where another shard holds the target.
pub fn softmax_stats<T: Element>(
    shape: Rows,
    columns: Columns,
    logits: &[T],
    max: &[f32],
    targets: &[u32],
    stats: &mut [f32],
) {
    expect_len("logits", logits.len(), &[shape.rows, shape.width]);
    expect_len("max", max.len(), &[shape.rows]);
    expect_len("targets", targets.len(), &[shape.rows]);
    expect_len("stats", stats.len(), &[shape.rows, 2]);
    columns.expect_within(shape);
    vectorised(
        #[inline(always)]
        || {
            let rows = max.iter().zip(targets).zip(stats.as_chunks_mut::<2>().0).enumerate();
            for (row, ((&max, &target), stats)) in rows {
                let logits = &logits[shape.range(row)][..columns.valid];
                let sum = ordered_sum::sum([logits], |[l]| exp(l - max));
                let target = columns.of(target).map_or(0.0, |t| logits[t].widen() - max);
                *stats = [sum, target];
            }
        },
    );
}

/// `loss[row] = ln(sum) - target`, from the statistics reduced over all shards.
pub fn cross_entropy(stats: &[f32], loss: &mut [f32]) {
    expect_len("stats", stats.len(), &[loss.len(), 2]);
    for (loss, &[sum, target]) in loss.iter_mut().zip(stats.as_chunks::<2>().0) {
        *loss = (ln_f64(f64::from(sum)) - f64::from(target)) as f32;
    }
}

/// `loss[row]` of a binary target (1 or 0) with the given logit: `ln(1 + e^l) - target * l`.
pub fn binary_cross_entropy<T: Element>(logits: &[T], targets: &[u32], loss: &mut [f32]) {
    expect_len("logits", logits.len(), &[loss.len()]);
    expect_len("targets", targets.len(), &[loss.len()]);
    for ((loss, logit), &target) in loss.iter_mut().zip(logits).zip(targets) {
        let logit = f64::from(logit.widen());
        // Factors out the larger of the two exponentials, so that none overflows.
        let tail = ln_f64(1.0 + exp_f64(-logit.abs()));
        *loss = (logit.max(0.0) + tail - f64::from(target) * logit) as f32;
    }
}

/// `dlogits = (probability - target) * scale`.
pub fn binary_input_gradient<T: Element>(
    scale: f32,
    logits: &[T],
    targets: &[u32],
    dlogits: &mut [T],
) {
    expect_len("logits", logits.len(), &[dlogits.len()]);
    expect_len("targets", targets.len(), &[dlogits.len()]);
    for ((gradient, logit), &target) in dlogits.iter_mut().zip(logits).zip(targets) {
        *gradient = T::narrow((sigmoid(logit.widen()) - target as f32) * scale);
    }
}

/// Sum of the losses of all rows, in an order that depends on their number alone.
pub fn sum(loss: &[f32]) -> f32 {
    vectorised(
        #[inline(always)]
        || ordered_sum::sum([loss], |[l]| l),
    )
}

/// `dlogits = (softmax(logits) - onehot(target)) * scale`, where `max` and `stats` have been
/// reduced over all shards and `scale` is the gradient of each row's loss.
#[expect(clippy::too_many_arguments, reason = "one name per tensor of the operator")]
pub fn input_gradient<T: Element>(
    shape: Rows,
    columns: Columns,
    scale: f32,
    logits: &[T],
    max: &[f32],
    stats: &[f32],
    targets: &[u32],
    dlogits: &mut [T],
) {
    expect_len("dlogits", dlogits.len(), &[logits.len()]);
    dlogits.copy_from_slice(logits);
    input_gradient_in_place(shape, columns, scale, max, stats, targets, dlogits);
}

/// [`input_gradient`] in place, replacing the logits by their gradient: they are the largest
/// activation of a language model, and are not needed afterwards.
pub fn input_gradient_in_place<T: Element>(
    shape: Rows,
    columns: Columns,
    scale: f32,
    max: &[f32],
    stats: &[f32],
    targets: &[u32],
    logits: &mut [T],
) {
    expect_len("logits", logits.len(), &[shape.rows, shape.width]);
    expect_len("max", max.len(), &[shape.rows]);
    expect_len("targets", targets.len(), &[shape.rows]);
    expect_len("stats", stats.len(), &[shape.rows, 2]);
    columns.expect_within(shape);
    vectorised(
        #[inline(always)]
        || {
            let rows = max.iter().zip(targets).zip(stats.as_chunks::<2>().0).enumerate();
            for (row, ((&max, &target), &[sum, _])) in rows {
                let (logits, padding) = logits[shape.range(row)].split_at_mut(columns.valid);
                let share = scale / sum;
                // For the target, the subtraction comes before the rounding.
                let target = columns.of(target).map(|t| (t, exp(logits[t].widen() - max) * share));
                for l in logits.iter_mut() {
                    *l = T::narrow(exp(l.widen() - max) * share);
                }
                if let Some((target, value)) = target {
                    logits[target] = T::narrow(value - scale);
                }
                padding.fill(T::ZERO);
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, numeric_gradient, random, random_ids, widen};
    use proptest::prelude::*;

    fn reference(width: usize, targets: &[u32], logits: &[f64]) -> Vec<f64> {
        logits
            .chunks(width)
            .zip(targets)
            .map(|(l, &t)| l.iter().map(|v| v.exp()).sum::<f64>().ln() - l[t as usize])
            .collect()
    }

    /// Runs the loss on shards split at `cuts`, with the reductions in between. Every shard has a
    /// padding column, which must be ignored.
    fn sharded(
        shape: Rows,
        targets: &[u32],
        logits: &[f32],
        cuts: &[usize],
    ) -> (Vec<f32>, Vec<f32>) {
        let Rows { rows, width } = shape;
        let mut edges = vec![0];
        edges.extend(cuts.iter().map(|c| c.min(&width)));
        edges.push(width);
        edges.sort();
        let shards: Vec<(Columns, Rows, Vec<f32>)> = edges
            .windows(2)
            .map(|w| {
                let words = |r: usize| logits[r * width + w[0]..r * width + w[1]].iter().copied();
                let part = (0..rows).flat_map(|r| words(r).chain([f32::INFINITY])).collect();
                let valid = w[1] - w[0];
                (Columns { first: w[0] as u32, valid }, Rows { rows, width: valid + 1 }, part)
            })
            .collect();
        let mut max = vec![f32::NEG_INFINITY; rows];
        for (columns, shape, logits) in &shards {
            let mut part = vec![f32::NAN; rows];
            row_max(*shape, *columns, logits, &mut part);
            max.iter_mut().zip(part).for_each(|(m, p)| *m = m.max(p));
        }
        let mut stats = vec![0.0; 2 * rows];
        for (columns, shape, logits) in &shards {
            let mut part = vec![f32::NAN; 2 * rows];
            softmax_stats(*shape, *columns, logits, &max, targets, &mut part);
            stats.iter_mut().zip(part).for_each(|(s, p)| *s += p);
        }
        let mut loss = vec![f32::NAN; rows];
        cross_entropy(&stats, &mut loss);
        let mut dlogits = vec![f32::NAN; rows * width];
        for (columns, s, logits) in &shards {
            let mut part = vec![f32::NAN; logits.len()];
            input_gradient(*s, *columns, 0.25, logits, &max, &stats, targets, &mut part);
            for r in 0..rows {
                let start = r * width + columns.first as usize;
                let (words, padding) = part[s.range(r)].split_at(columns.valid);
                dlogits[start..start + columns.valid].copy_from_slice(words);
                assert_eq!(padding, [0.0]);
            }
        }
        (loss, dlogits)
    }

    #[test]
    fn a_yes_or_no_and_its_gradient() {
        let logits = [-200.0f32, -1.5, 0.0, 0.25, 90.0];
        for target in [0u32, 1] {
            let targets = [target; 5];
            let mut losses = [0.0; 5];
            binary_cross_entropy(&logits, &targets, &mut losses);
            let mut gradient = [0.0f32; 5];
            binary_input_gradient(2.0, &logits, &targets, &mut gradient);
            for ((&l, loss), g) in logits.iter().zip(losses).zip(gradient) {
                let (l, y) = (f64::from(l), f64::from(target));
                let expected = if y > 0.0 { (-l).exp().ln_1p() } else { l.exp().ln_1p() };
                let expected = if expected.is_finite() { expected } else { l.abs() };
                assert!((f64::from(loss) - expected).abs() < 1e-6 * (1.0 + expected), "{l}");
                let p = 1.0 / (1.0 + (-l).exp());
                assert!((f64::from(g) - 2.0 * (p - y)).abs() < 1e-6, "{l} {g}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn any_cut_agrees_with_the_reference(
            rows in 0usize..5, width in 1usize..40, cuts in prop::collection::vec(0usize..40, 0..4),
        ) {
            let shape = Rows { rows, width };
            let logits: Vec<f32> = random("l", rows * width).iter().map(|v| v * 4.0).collect();
            let targets = random_ids("t", rows, width as u32);
            let (loss, dlogits) = sharded(shape, &targets, &logits, &cuts);
            if width == 1 {
                // The only token of a vocabulary is predicted with certainty.
                assert!(loss.iter().chain(&dlogits).all(|&v| v == 0.0));
            } else {
                let wide = widen(&logits);
                assert_close(&loss, &reference(width, &targets, &wide));
                let f = |l: &[f64]| reference(width, &targets, l);
                assert_close(&dlogits, &numeric_gradient(&wide, &vec![0.25; rows], f));
            }
        }
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let shape = Rows { rows: 2, width: 3 };
        let logits = [1e4, 1e4, -1e4, -1e30, -1e30, -1e30];
        let (loss, dlogits) = sharded(shape, &[0, 2], &logits, &[]);
        assert_close(&loss, &[2f64.ln(), 3f64.ln()]);
        let third = 0.25 / 3.0;
        assert_close(&dlogits, &[-0.125, 0.125, 0.0, third, third, third - 0.25]);
    }

    #[test]
    fn nan_reaches_the_loss() {
        let (loss, _) = sharded(Rows { rows: 1, width: 3 }, &[0], &[1.0, f32::NAN, 2.0], &[]);
        assert!(loss[0].is_nan());
    }

    #[test]
    fn the_sum_of_losses_is_accurate() {
        let loss = random("loss", 5000);
        let exact: f64 = loss.iter().map(|&l| f64::from(l)).sum();
        assert!((f64::from(sum(&loss)) - exact).abs() < 1e-4);
        assert_eq!(sum(&[]), 0.0);
    }
}
