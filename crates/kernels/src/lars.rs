//! LARS: SGD with momentum, for each tensor at a rate proportional to its norm (You, Gitman and
//! Ginsburg, "Large batch training of convolutional networks", arXiv 1708.03888, algorithm 1).
//!
//! The caller sums the norms of a tensor and its gradient, since a rank may hold a shard of them:
//! [`crate::reduce::block_squares`] of both before, [`lars`] after.

use crate::Element;
use crate::instruction_set::vectorised;
use crate::optimizer::Weights;
use crate::shape::expect_len;

/// Constants of LARS in one iteration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lars {
    /// Learning rate of this iteration.
    pub lr: f64,
    /// Factor of the velocity from one iteration to the next.
    pub momentum: f64,
    /// Trust coefficient: the step's norm as a share of the tensor's, η of the paper.
    pub trust_coefficient: f64,
    /// Factor of the parameters that is added to their gradient: β of the paper.
    pub weight_decay: f64,
    /// Factor of every gradient, below one when their norm is clipped.
    pub grad_scale: f32,
}

impl Lars {
    /// Local rate of the tensor, from the sums of squares of its weights and of its stored gradient
    /// (equation 6 of the paper): 1 if either is zero.
    pub fn trust_ratio(&self, weights: f32, gradient: f32) -> f32 {
        let (weights, gradient) = (f64::from(weights).sqrt(), f64::from(gradient).sqrt());
        let pull = gradient * f64::from(self.grad_scale) + self.weight_decay * weights;
        let rate = self.trust_coefficient * weights / pull;
        if weights > 0.0 && gradient > 0.0 && rate.is_finite() { rate as f32 } else { 1.0 }
    }
}

/// `v = momentum * v + lr * rate * (g + decay * p)`, then `p -= v`. The velocity starts as zeros.
/// `decay` enables weight decay for this tensor.
pub fn lars<T: Element, G: Element>(
    rule: &Lars,
    decay: bool,
    rate: f32,
    weights: Weights<'_, T>,
    grads: &[G],
    velocity: &mut [f32],
) {
    let len = weights.expect(grads.len());
    expect_len("velocity", velocity.len(), &[len]);
    let (lr, momentum, scale) =
        ((rule.lr * f64::from(rate)) as f32, rule.momentum as f32, rule.grad_scale);
    let weight_decay = if decay { rule.weight_decay as f32 } else { 0.0 };
    vectorised(
        #[inline(always)]
        || {
            let (grads, velocity) = (&grads[..len], &mut velocity[..len]);
            weights.update(|i, p| {
                let pull = grads[i].widen() * scale + weight_decay * p;
                velocity[i] = momentum * velocity[i] + lr * pull;
                p - velocity[i]
            });
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, random};

    const RULE: Lars = Lars {
        lr: 2.0,
        momentum: 0.9,
        trust_coefficient: 0.01,
        weight_decay: 0.1,
        grad_scale: 0.5,
    };

    #[test]
    fn steps_are_what_the_algorithm_says() {
        let (mut p, g) = (random("p", 37), random("g", 37));
        let mut v = vec![0.0; 37];
        let (mut wide, mut velocity) =
            (p.iter().map(|&p| f64::from(p)).collect::<Vec<_>>(), [0.0; 37]);
        for _ in 0..3 {
            let squares = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            let rate = RULE.trust_ratio(squares(&p) as f32, squares(&g) as f32);
            let norm = wide.iter().map(|p| p * p).sum::<f64>().sqrt();
            let expected = 0.01 * norm / (0.5 * squares(&g).sqrt() + 0.1 * norm);
            assert!((f64::from(rate) / expected - 1.0).abs() < 1e-5, "{rate} {expected}");
            let weights = Weights::<f32> { master: &mut p, rounded: None };
            lars(&RULE, true, rate, weights, &g, &mut v);
            for ((p, v), g) in wide.iter_mut().zip(&mut velocity).zip(&g) {
                *v = 0.9 * *v + 2.0 * expected * (0.5 * f64::from(*g) + 0.1 * *p);
                *p -= *v;
            }
        }
        assert_close(&p, &wide);
    }

    #[test]
    fn a_tensor_of_zeros_or_without_a_gradient_moves_as_it_would_without() {
        assert_eq!(RULE.trust_ratio(0.0, 4.0), 1.0);
        assert_eq!(RULE.trust_ratio(4.0, 0.0), 1.0);
        assert_eq!(RULE.trust_ratio(f32::MAX, f32::MIN_POSITIVE), (0.01f64 / 0.1) as f32);
        assert_eq!(RULE.trust_ratio(4.0, f32::INFINITY), 0.0);
    }
}
