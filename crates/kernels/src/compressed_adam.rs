//! AdamW after the compress warm-up: ranks exchange the first moment instead of the gradient, and
//! it can be compressed (1-bit Adam; Tang et al., arXiv 2102.02888, algorithm 1).
//!
//! The second moment of compressed gradients would be that of the compression errors, so it is no
//! longer an average of squares. It is not frozen either: if gradients grew after the warm-up,
//! steps would grow with them. The mean of squares is never below the square of the mean. So where
//! the first moment proves the second too small, it is raised to the square of the first. It only
//! grows, as in AMSGrad (Reddi et al., arXiv 1904.09237, algorithm 2), with which compressed
//! gradients are known to converge (Li et al., arXiv 2205.05632).

use crate::Element;
use crate::instruction_set::vectorised;
use crate::math::powi;
use crate::optimizer::{AdamW, Weights};
use crate::shape::expect_len;

/// Rule of an update with exchanged first moments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompressedAdam {
    /// Rule of the warm-up; its gradient scale applies to first moments here.
    pub rule: AdamW,
    /// Number of gradients that the second moment averages over.
    pub seen: u64,
    /// Number of ranks that the first moment is summed over.
    pub ranks: u32,
}

/// Converts a rank's part of a gradient sum to its part of the next first moment: all ranks' parts
/// add up to `beta1 * m + (1 - beta1) * g`.
pub fn local_momentum<G: Element>(rule: &CompressedAdam, grads: &mut [G], first: &[f32]) {
    let len = grads.len();
    expect_len("first", first.len(), &[len]);
    let beta1 = rule.rule.beta1;
    let (stays, towards) = ((beta1 / f64::from(rule.ranks.max(1))) as f32, (1.0 - beta1) as f32);
    vectorised(
        #[inline(always)]
        || {
            for (grad, m) in grads.iter_mut().zip(&first[..len]) {
                *grad = G::narrow(stays * m + towards * grad.widen());
            }
        },
    );
}

/// Makes a step with the exchanged first moment, which is saved in `first`; `decay` enables weight
/// decay for this tensor.
///
/// Panics if `rule.rule.step` or `rule.seen` is zero: there is no bias correction for them.
pub fn apply_momentum<T: Element, G: Element>(
    rule: &CompressedAdam,
    decay: bool,
    weights: Weights<'_, T>,
    moments: &[G],
    first: &mut [f32],
    second: &mut [f32],
) {
    let len = weights.expect(moments.len());
    expect_len("first", first.len(), &[len]);
    expect_len("second", second.len(), &[len]);
    assert!(rule.seen > 0, "`seen` is zero, but a second moment is of one gradient at least");
    let constants = rule.rule.constants(decay);
    let (keep, rate, scale) = (constants.keep, constants.rate, constants.scale);
    let unbiased = 1.0 - powi(rule.rule.beta2, rule.seen);
    let (correction, unbiased) = (unbiased.sqrt() as f32, unbiased as f32);
    let epsilon = constants.epsilon;
    vectorised(
        #[inline(always)]
        || {
            let (moments, first, second) = (&moments[..len], &mut first[..len], &mut second[..len]);
            weights.update(|i, p| {
                let m = moments[i].widen() * scale;
                let v = second[i].max(unbiased * m * m);
                (first[i], second[i]) = (m, v);
                p * keep - rate * m / (v.sqrt() / correction + epsilon)
            });
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;

    const RULE: AdamW = AdamW {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        grad_scale: 1.0,
        step: 8,
    };

    /// With an unchanged second moment and uncompressed parts, the step equals Adam's.
    #[test]
    fn shares_that_arrive_whole_make_adams_step() {
        const LEN: usize = 37;
        let (grads, m, v): (Vec<[f32; 2]>, _, _) = (
            random("1", LEN).into_iter().zip(random("2", LEN)).map(|(a, b)| [a, b]).collect(),
            random("3", LEN),
            vec![4.0; LEN],
        );
        let settled = CompressedAdam { rule: RULE, seen: 8, ranks: 2 };
        let mut parts = [0, 1].map(|rank| grads.iter().map(|g| g[rank]).collect::<Vec<f32>>());
        parts.iter_mut().for_each(|part| local_momentum(&settled, part, &m));
        let agreed: Vec<f32> = parts[0].iter().zip(&parts[1]).map(|(a, b)| a + b).collect();

        let mut found = (random("4", LEN), m.clone(), v.clone());
        let weights = Weights::<f32> { master: &mut found.0, rounded: None };
        apply_momentum(&settled, true, weights, &agreed, &mut found.1, &mut found.2);
        assert_eq!(found.2, v, "nothing proves it too small");

        let bias = |beta: f64, count| 1.0 - powi(beta, count);
        for (i, p) in random("4", LEN).into_iter().enumerate() {
            let wanted_m = 0.9 * f64::from(m[i]) + 0.1 * f64::from(grads[i][0] + grads[i][1]);
            let root = (4.0 / bias(RULE.beta2, 8)).sqrt() + RULE.epsilon;
            let step = RULE.lr * wanted_m / bias(RULE.beta1, RULE.step) / root;
            let wanted = f64::from(p) * (1.0 - RULE.lr * RULE.weight_decay) - step;
            assert!((f64::from(found.1[i]) - wanted_m).abs() < 1e-6, "{} {wanted_m}", found.1[i]);
            assert!((f64::from(found.0[i]) - wanted).abs() < 1e-6, "{} {wanted}", found.0[i]);
        }
    }

    #[test]
    fn no_step_is_longer_than_the_rate() {
        let settled =
            CompressedAdam { rule: AdamW { weight_decay: 0.0, ..RULE }, seen: 3, ranks: 4 };
        let (mut p, mut m, mut v) = ([0.0f32; 3], [0.0; 3], [0.0, 1e-12, 1.0]);
        let weights = Weights::<f32> { master: &mut p, rounded: None };
        apply_momentum(&settled, false, weights, &[5.0, -5.0, 0.5], &mut m, &mut v);
        let rate = (RULE.lr / (1.0 - powi(RULE.beta1, RULE.step))) as f32;
        assert!(p.iter().all(|p| p.abs() <= rate * 1.0001), "{p:?} at a rate of {rate}");
        assert_eq!(m, [5.0, -5.0, 0.5]);
        assert!(v[0] > 1.0 && v[1] > 1.0, "{v:?}");
        assert_eq!(v[2], 1.0);
    }
}
