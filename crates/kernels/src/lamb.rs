//! LAMB: Adam's direction, scaled for each tensor to the norm of the tensor itself (You et al.,
//! arXiv 1904.00962, algorithm 2, with the identity for its function φ).
//!
//! The step of a tensor depends on all of its elements, and a rank may hold a shard of them. So an
//! update has two halves with a sum in between, which is up to the caller: [`moments_and_norms`]
//! updates the moments and sums squares by block, [`lamb`] takes the step. The direction is not
//! saved but recomputed from the moments: an optimizer is memory-bound.

use crate::Element;
use crate::instruction_set::vectorised;
use crate::math::powi;
use crate::optimizer::Weights;
use crate::shape::expect_len;

/// Constants of LAMB in one iteration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lamb {
    /// Learning rate of this iteration.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Term added to the root of the second moment, after bias correction.
    pub epsilon: f64,
    /// Factor of the parameters that is added to their direction.
    pub weight_decay: f64,
    /// Factor of every gradient, below one when their norm is clipped.
    pub grad_scale: f32,
    /// Number of this update, counted from one.
    pub step: u64,
}

/// Output of [`moments_and_norms`]: one sum of squares for each block.
#[derive(Debug)]
pub struct BlockNorms<'a> {
    /// Sums of the weights.
    pub weights: &'a mut [f32],
    /// Sums of the directions.
    pub directions: &'a mut [f32],
}

/// Moves the moments towards the gradient and sums the squares of each block of `block` elements
/// (the last one may be shorter): of the weights, and of the direction of their step. Sums are in
/// double precision, rounded once, so that they do not depend on sharding.
///
/// `decay` enables weight decay for this tensor. Panics if `rule.step` is zero: there is no bias
/// correction for it.
#[allow(clippy::too_many_arguments)]
pub fn moments_and_norms<G: Element>(
    rule: &Lamb,
    decay: bool,
    block: usize,
    weights: &[f32],
    grads: &[G],
    first: &mut [f32],
    second: &mut [f32],
    squares: BlockNorms<'_>,
) {
    assert!(block > 0, "`block` is zero, but a block has at least one element");
    let len = weights.len();
    expect_len("grads", grads.len(), &[len]);
    expect_len("first", first.len(), &[len]);
    expect_len("second", second.len(), &[len]);
    expect_len("squares.weights", squares.weights.len(), &[len.div_ceil(block)]);
    expect_len("squares.directions", squares.directions.len(), &[len.div_ceil(block)]);
    let with = rule.constants(decay);
    vectorised(
        #[inline(always)]
        || {
            let sums = squares.weights.iter_mut().zip(squares.directions.iter_mut());
            let moments = first.chunks_mut(block).zip(second.chunks_mut(block));
            let operands = weights.chunks(block).zip(grads.chunks(block));
            for ((sums, moments), operands) in sums.zip(moments).zip(operands) {
                let (weights, directions) = with.block_moments_and_norms(operands, moments);
                (*sums.0, *sums.1) = (weights as f32, directions as f32);
            }
        },
    );
}

/// `p -= lr * trust * direction`, where `trust` is the [`trust_ratio`] of the whole tensor's sums.
pub fn lamb<T: Element>(
    rule: &Lamb,
    decay: bool,
    trust: f32,
    weights: Weights<'_, T>,
    first: &[f32],
    second: &[f32],
) {
    let len = weights.expect(first.len());
    expect_len("second", second.len(), &[len]);
    let with = rule.constants(decay);
    let rate = (rule.lr * f64::from(trust)) as f32;
    vectorised(
        #[inline(always)]
        || {
            let (first, second) = (&first[..len], &second[..len]);
            weights.update(|i, p| p - rate * with.direction(p, first[i], second[i]));
        },
    );
}

/// Ratio of a tensor's norm to that of its direction, from the sums of their squares. It is 1 if
/// either is zero, since a tensor of zeros could never move otherwise.
pub fn trust_ratio(weights: f32, directions: f32) -> f32 {
    let ratio = (f64::from(weights) / f64::from(directions)).sqrt();
    if weights > 0.0 && directions > 0.0 && ratio.is_finite() { ratio as f32 } else { 1.0 }
}

/// Factors of an update, the same for every element of a tensor.
#[derive(Clone, Copy)]
struct Constants {
    /// Bias correction of the first moment: a factor.
    unbias: f32,
    /// Root of the second moment's bias: a divisor.
    correction: f32,
    /// Factor by which the first moment moves towards the gradient.
    towards: f32,
    beta2: f32,
    /// Factor of the squared gradient in the second moment.
    fresh: f32,
    epsilon: f32,
    decay: f32,
    scale: f32,
}

impl Lamb {
    fn constants(&self, decay: bool) -> Constants {
        assert!(self.step > 0, "`step` is zero, but updates are counted from one");
        Constants {
            unbias: (1.0 / (1.0 - powi(self.beta1, self.step))) as f32,
            correction: (1.0 - powi(self.beta2, self.step)).sqrt() as f32,
            towards: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            fresh: (1.0 - self.beta2) as f32,
            epsilon: self.epsilon as f32,
            decay: if decay { self.weight_decay as f32 } else { 0.0 },
            scale: self.grad_scale,
        }
    }
}

/// Number of elements whose squares are summed in parallel.
const LANES: usize = 8;

impl Constants {
    #[inline(always)]
    fn direction(self, p: f32, m: f32, v: f32) -> f32 {
        self.unbias * m / (v.sqrt() / self.correction + self.epsilon) + self.decay * p
    }

    /// Updates the moments of one element. Returns its weight and its direction.
    #[inline(always)]
    fn direction_and_moments<G: Element>(self, p: f32, g: G, m: &mut f32, v: &mut f32) -> [f64; 2] {
        let g = g.widen() * self.scale;
        *m += self.towards * (g - *m);
        *v = self.beta2 * *v + self.fresh * (g * g);
        [f64::from(p), f64::from(self.direction(p, *m, *v))]
    }

    /// Sums of squares of a block, in lanes joined as a balanced tree.
    #[inline(always)]
    fn block_moments_and_norms<G: Element>(
        self,
        (weights, grads): (&[f32], &[G]),
        (first, second): (&mut [f32], &mut [f32]),
    ) -> (f64, f64) {
        let mut sums = [[0.0f64; LANES]; 2];
        let (p, p_tail) = weights.as_chunks::<LANES>();
        let (g, g_tail) = grads.as_chunks::<LANES>();
        let (m, m_tail) = first.as_chunks_mut::<LANES>();
        let (v, v_tail) = second.as_chunks_mut::<LANES>();
        for (((p, g), m), v) in p.iter().zip(g).zip(m).zip(v) {
            for lane in 0..LANES {
                let [p, u] =
                    self.direction_and_moments(p[lane], g[lane], &mut m[lane], &mut v[lane]);
                sums[0][lane] += p * p;
                sums[1][lane] += u * u;
            }
        }
        let tail = p_tail.iter().zip(g_tail).zip(m_tail).zip(v_tail);
        for (lane, (((p, g), m), v)) in tail.enumerate() {
            let [p, u] = self.direction_and_moments(*p, *g, m, v);
            sums[0][lane] += p * p;
            sums[1][lane] += u * u;
        }
        let [weights, directions] =
            sums.map(|[a, b, c, d, e, f, g, h]| ((a + e) + (c + g)) + ((b + f) + (d + h)));
        (weights, directions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_within, bits, random, widen};
    use crate::{Bf16, F16};
    use proptest::prelude::*;

    const RULE: Lamb = Lamb {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.999,
        epsilon: 1e-6,
        weight_decay: 0.1,
        grad_scale: 0.5,
        step: 1,
    };

    fn plain(master: &mut [f32]) -> Weights<'_, f32> {
        Weights { master, rounded: None }
    }

    /// Whole update of one tensor with blocks of 16 elements.
    fn update(rule: &Lamb, decay: bool, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
        let blocks = p.len().div_ceil(16);
        let (mut weights, mut directions) = (vec![0.0; blocks], vec![0.0; blocks]);
        let squares = BlockNorms { weights: &mut weights, directions: &mut directions };
        moments_and_norms(rule, decay, 16, p, g, m, v, squares);
        let trust = trust_ratio(weights.iter().sum(), directions.iter().sum());
        lamb(rule, decay, trust, plain(p), m, v);
    }

    proptest! {
        /// Algorithm 2 in double precision.
        #[test]
        fn agrees_with_the_reference(len in 1usize..80, decay: bool) {
            let mut p = random("p", len);
            let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
            let (mut wide_p, mut wide_m, mut wide_v) = (widen(&p), vec![0.0; len], vec![0.0; len]);
            for step in 1..=6u64 {
                let g = random(&format!("g{step}"), len);
                update(&Lamb { step, ..RULE }, decay, &mut p, &g, &mut m, &mut v);
                let mut direction = vec![0.0f64; len];
                for i in 0..len {
                    let g = f64::from(g[i]) * 0.5;
                    wide_m[i] = 0.9 * wide_m[i] + 0.1 * g;
                    wide_v[i] = 0.999 * wide_v[i] + 0.001 * g * g;
                    let first = wide_m[i] / (1.0 - 0.9f64.powi(step as i32));
                    let second: f64 = wide_v[i] / (1.0 - 0.999f64.powi(step as i32));
                    let decayed = if decay { 0.1 * wide_p[i] } else { 0.0 };
                    direction[i] = first / (second.sqrt() + 1e-6) + decayed;
                }
                let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
                let trust = norm(&wide_p) / norm(&direction);
                for i in 0..len {
                    wide_p[i] -= 1e-2 * trust * direction[i];
                }
            }
            assert_within(&p, &wide_p, 1e-5);
            assert_within(&m, &wide_m, 1e-5);
            assert_within(&v, &wide_v, 1e-5);
        }

        /// Ranks that hold whole blocks sum, update and step with the same bits.
        #[test]
        fn blocks_may_be_anywhere(blocks in 2usize..6, cut in 1usize..5, tail in 1usize..17) {
            let (len, cut) = ((blocks - 1) * 16 + tail, cut.min(blocks - 1) * 16);
            let (p, g) = (random("p", len), random("g", len));
            let run = |ranges: &[std::ops::Range<usize>]| {
                let (mut m, mut v) = (random("m", len), vec![0.25; len]);
                let (mut weights, mut directions) = (Vec::new(), Vec::new());
                let rule = Lamb { step: 7, ..RULE };
                for range in ranges {
                    let count = range.len().div_ceil(16);
                    let mut sums = [vec![0.0; count], vec![0.0; count]];
                    let [w, d] = &mut sums;
                    let squares = BlockNorms { weights: w, directions: d };
                    let (m, v) = (&mut m[range.clone()], &mut v[range.clone()]);
                    moments_and_norms(&rule, true, 16, &p[range.clone()], &g[range.clone()], m, v, squares);
                    weights.append(w);
                    directions.append(d);
                }
                let mut stepped = p.clone();
                for range in ranges {
                    let part = plain(&mut stepped[range.clone()]);
                    lamb(&rule, true, 0.75, part, &m[range.clone()], &v[range.clone()]);
                }
                [weights, directions, m, v, stepped].map(|x| bits(&x))
            };
            prop_assert_eq!(run(&[0..cut, cut..len]), run(&[0..0, 0..len]));
        }
    }

    #[test]
    fn a_tensor_without_length_or_direction_is_trusted_as_it_is() {
        assert_eq!(trust_ratio(0.0, 4.0), 1.0);
        assert_eq!(trust_ratio(4.0, 0.0), 1.0);
        assert_eq!(trust_ratio(16.0, 4.0), 2.0);
        assert_eq!(trust_ratio(f32::INFINITY, 4.0), 1.0);
        assert_eq!(trust_ratio(f32::NAN, 4.0), 1.0);
    }

    /// The step's norm is the tensor's times the rate, whatever the gradient's magnitude.
    #[test]
    fn the_size_of_the_gradient_does_not_matter() {
        let lengths = [1e-3f32, 1.0, 1e3].map(|factor| {
            let mut p = random("p", 100);
            let before = p.clone();
            let g: Vec<f32> = random("g", 100).iter().map(|g| g * factor).collect();
            update(&RULE, false, &mut p, &g, &mut [0.0; 100], &mut [0.0; 100]);
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
            let moved = norm(&mut p.iter().zip(&before).map(|(a, b)| a - b));
            moved / norm(&mut before.iter().copied())
        });
        assert!(lengths.iter().all(|l| (l - 1e-2).abs() < 1e-5), "{lengths:?}");
    }

    #[test]
    fn the_copy_follows_the_master() {
        let grads: Vec<Bf16> = random("g", 40).iter().map(|&g| Bf16::narrow(g)).collect();
        let mut master = random("p", 40);
        let (mut m, mut v, mut rounded) = ([0.0; 40], [0.0; 40], [F16::ZERO; 40]);
        let squares = BlockNorms { weights: &mut [0.0], directions: &mut [0.0] };
        moments_and_norms(&RULE, true, 64, &master, &grads, &mut m, &mut v, squares);
        let weights = Weights { master: &mut master, rounded: Some(&mut rounded[..]) };
        lamb(&RULE, true, 0.5, weights, &m, &v);
        assert!(master.iter().zip(&rounded).all(|(&p, &r)| r == F16::narrow(p)));
    }
}
