//! Optimizer updates: one pass over a flat slice of parameters.
//!
//! Every element is updated independently, so a tensor may be split anywhere without changing a
//! bit. The arithmetic follows PyTorch's single-tensor implementations: constants are computed in
//! double precision, elements in single precision.
//!
//! Weights are updated in single precision. Where layers read them in a 16-bit type, the updated
//! ones are rounded into a copy in the same pass ([`Weights`]).

use crate::Element;
use crate::instruction_set::vectorised;
use crate::math::{powi, sin_cos_cycles};
use crate::shape::expect_len;

/// Stochastic gradient descent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate of this iteration.
    pub lr: f64,
    /// Factor of the parameters that is added to their gradient.
    pub weight_decay: f64,
    /// Factor of every gradient, below one when their norm is clipped.
    pub grad_scale: f32,
}

/// Stochastic gradient descent with momentum (Sutskever et al., 2013).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Momentum {
    /// Learning rate of this iteration.
    pub lr: f64,
    /// Factor of the velocity from one iteration to the next.
    pub momentum: f64,
    /// True for Nesterov momentum, which steps from the point that the velocity leads to.
    pub nesterov: bool,
    /// Factor of the parameters that is added to their gradient.
    pub weight_decay: f64,
    /// Factor of every gradient, below one when their norm is clipped.
    pub grad_scale: f32,
}

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019, algorithm 2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this iteration.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Term added to the root of the second moment, after bias correction.
    pub epsilon: f64,
    /// Factor of the learning rate by which parameters shrink.
    pub weight_decay: f64,
    /// Factor of every gradient, below one when their norm is clipped.
    pub grad_scale: f32,
    /// Number of this update, counted from one.
    pub step: u64,
}

/// `(1 + cos(pi x)) / 2`: cosine decay of a learning rate, with the same bits on every platform.
pub fn half_cosine(x: f64) -> f64 {
    0.5 + 0.5 * sin_cos_cycles(0.5 * x).1
}

/// Weights that an update changes.
#[derive(Debug)]
pub struct Weights<'a, T> {
    /// Weights in single precision.
    pub master: &'a mut [f32],
    /// Separate copy that layers read, if any: the master's values, rounded.
    pub rounded: Option<&'a mut [T]>,
}

impl<T: Element> Weights<'_, T> {
    /// Updates every weight by a function of its index and its value.
    #[inline(always)]
    pub(crate) fn update(self, mut rule: impl FnMut(usize, f32) -> f32) {
        match self.rounded {
            None => {
                for (i, p) in self.master.iter_mut().enumerate() {
                    *p = rule(i, *p);
                }
            }
            Some(rounded) => {
                for (i, (p, rounded)) in self.master.iter_mut().zip(rounded).enumerate() {
                    *p = rule(i, *p);
                    *rounded = T::narrow(*p);
                }
            }
        }
    }

    #[track_caller]
    pub(crate) fn expect(&self, grads: usize) -> usize {
        let len = self.master.len();
        expect_len("grads", grads, &[len]);
        if let Some(rounded) = &self.rounded {
            expect_len("rounded", rounded.len(), &[len]);
        }
        len
    }
}

/// Constants of an AdamW update, the same for every element of a tensor. They are passed to a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConstants {
    /// Factor of a parameter after its decay.
    pub keep: f32,
    /// Learning rate divided by the first moment's bias.
    pub rate: f32,
    /// Root of the second moment's bias.
    pub correction: f32,
    /// Factor by which the first moment moves towards the gradient.
    pub towards: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Factor of the squared gradient in the second moment.
    pub fresh: f32,
    /// Term added to the root of the second moment.
    pub epsilon: f32,
    /// Factor of every gradient.
    pub scale: f32,
}

impl AdamW {
    /// Constants of this update for a tensor; `decay` enables its weight decay.
    ///
    /// Panics if `step` is zero: there is no bias correction for it.
    pub fn constants(&self, decay: bool) -> AdamWConstants {
        assert!(self.step > 0, "`step` is zero, but updates are counted from one");
        AdamWConstants {
            keep: if decay { (1.0 - self.lr * self.weight_decay) as f32 } else { 1.0 },
            rate: (self.lr / (1.0 - powi(self.beta1, self.step))) as f32,
            correction: (1.0 - powi(self.beta2, self.step)).sqrt() as f32,
            towards: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            fresh: (1.0 - self.beta2) as f32,
            epsilon: self.epsilon as f32,
            scale: self.grad_scale,
        }
    }
}

/// `p -= lr * (g + weight_decay * p)`; `decay` enables weight decay for this tensor.
pub fn sgd<T: Element, G: Element>(rule: &Sgd, decay: bool, weights: Weights<'_, T>, grads: &[G]) {
    let len = weights.expect(grads.len());
    let (lr, scale) = (rule.lr as f32, rule.grad_scale);
    let weight_decay = if decay { rule.weight_decay as f32 } else { 0.0 };
    vectorised(
        #[inline(always)]
        || {
            let grads = &grads[..len];
            weights.update(|i, p| p - lr * (grads[i].widen() * scale + weight_decay * p));
        },
    );
}

/// Moves running averages by `share` towards an iteration's own, stored as gradients.
pub fn average<T: Element, G: Element>(share: f32, weights: Weights<'_, T>, averages: &[G]) {
    let len = weights.expect(averages.len());
    let averages = &averages[..len];
    weights.update(|i, p| p + share * (averages[i].widen() - p));
}

/// `v = momentum * v + g`, then `p -= lr * v`, or with Nesterov `p -= lr * (g + momentum * v)`. The
/// velocity starts as zeros.
pub fn momentum<T: Element, G: Element>(
    rule: &Momentum,
    decay: bool,
    weights: Weights<'_, T>,
    grads: &[G],
    velocity: &mut [f32],
) {
    let len = weights.expect(grads.len());
    expect_len("velocity", velocity.len(), &[len]);
    let (lr, momentum, scale) = (rule.lr as f32, rule.momentum as f32, rule.grad_scale);
    let weight_decay = if decay { rule.weight_decay as f32 } else { 0.0 };
    vectorised(
        #[inline(always)]
        || {
            let (grads, velocity) = (&grads[..len], &mut velocity[..len]);
            weights.update(|i, p| {
                let g = grads[i].widen() * scale + weight_decay * p;
                let v = momentum * velocity[i] + g;
                velocity[i] = v;
                p - lr * if rule.nesterov { g + momentum * v } else { v }
            });
        },
    );
}

/// One AdamW update. `first` and `second` are the moments of the gradient and start as zeros.
///
/// Panics if `rule.step` is zero: there is no bias correction for it.
pub fn adamw<T: Element, G: Element>(
    rule: &AdamW,
    decay: bool,
    weights: Weights<'_, T>,
    grads: &[G],
    first: &mut [f32],
    second: &mut [f32],
) {
    let len = weights.expect(grads.len());
    expect_len("first", first.len(), &[len]);
    expect_len("second", second.len(), &[len]);
    let AdamWConstants { keep, rate, correction, towards, beta2, fresh, epsilon, scale } =
        rule.constants(decay);
    vectorised(
        #[inline(always)]
        || {
            let (grads, first, second) = (&grads[..len], &mut first[..len], &mut second[..len]);
            weights.update(|i, p| {
                let g = grads[i].widen() * scale;
                let m = first[i] + towards * (g - first[i]);
                let v = beta2 * second[i] + fresh * (g * g);
                (first[i], second[i]) = (m, v);
                p * keep - rate * m / (v.sqrt() / correction + epsilon)
            });
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_within, random, widen};
    use crate::{Bf16, F16};

    /// Weights without a rounded copy.
    fn plain(master: &mut [f32]) -> Weights<'_, f32> {
        Weights { master, rounded: None }
    }

    const LEN: usize = 37;
    const ADAMW: AdamW = AdamW {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        grad_scale: 0.5,
        step: 1,
    };

    #[test]
    fn sgd_and_momentum_agree_with_the_reference() {
        for decay in [true, false] {
            for nesterov in [true, false] {
                let rule = Momentum {
                    lr: 0.1,
                    momentum: 0.9,
                    nesterov,
                    weight_decay: 0.01,
                    grad_scale: 0.5,
                };
                let simple = Sgd { lr: 0.1, weight_decay: 0.01, grad_scale: 0.5 };
                let wd = if decay { 0.01 } else { 0.0 };
                let mut p = random("p", LEN);
                let mut q = p.clone();
                let mut v = vec![0.0; LEN];
                let (mut wide_p, mut wide_q, mut wide_v) = (widen(&p), widen(&q), vec![0.0; LEN]);
                for step in 0..5 {
                    let g = random(&format!("g{step}"), LEN);
                    momentum(&rule, decay, plain(&mut p), &g, &mut v);
                    sgd(&simple, decay, plain(&mut q), &g);
                    for i in 0..LEN {
                        let g = f64::from(g[i]) * 0.5;
                        wide_q[i] -= 0.1 * (g + wd * wide_q[i]);
                        let g = g + wd * wide_p[i];
                        wide_v[i] = 0.9 * wide_v[i] + g;
                        wide_p[i] -= 0.1 * if nesterov { g + 0.9 * wide_v[i] } else { wide_v[i] };
                    }
                }
                assert_within(&p, &wide_p, 1e-6);
                assert_within(&v, &wide_v, 1e-6);
                assert_within(&q, &wide_q, 1e-6);
            }
        }
    }

    #[test]
    fn adamw_agrees_with_the_reference() {
        for decay in [true, false] {
            let mut p = random("p", LEN);
            let (mut m, mut v) = (vec![0.0; LEN], vec![0.0; LEN]);
            let (mut wide_p, mut wide_m, mut wide_v) = (widen(&p), vec![0.0; LEN], vec![0.0; LEN]);
            for step in 1..=6 {
                let g = random(&format!("g{step}"), LEN);
                adamw(&AdamW { step, ..ADAMW }, decay, plain(&mut p), &g, &mut m, &mut v);
                for i in 0..LEN {
                    let g = f64::from(g[i]) * 0.5;
                    if decay {
                        wide_p[i] *= 1.0 - 1e-2 * 0.1;
                    }
                    wide_m[i] = 0.9 * wide_m[i] + 0.1 * g;
                    wide_v[i] = 0.95 * wide_v[i] + 0.05 * g * g;
                    let first = wide_m[i] / (1.0 - 0.9f64.powi(step as i32));
                    let second: f64 = wide_v[i] / (1.0 - 0.95f64.powi(step as i32));
                    wide_p[i] -= 1e-2 * first / (second.sqrt() + 1e-8);
                }
            }
            assert_within(&p, &wide_p, 1e-6);
            assert_within(&m, &wide_m, 1e-6);
            assert_within(&v, &wide_v, 1e-6);
        }
    }

    #[test]
    fn a_tensor_may_be_cut_anywhere() {
        let g = random("g", LEN);
        let run = |cut: usize| {
            let mut p = random("p", LEN);
            let (mut m, mut v) = (random("m", LEN), vec![0.25; LEN]);
            for range in [0..cut, cut..LEN] {
                let rule = AdamW { step: 7, ..ADAMW };
                let (p, g) = (plain(&mut p[range.clone()]), &g[range.clone()]);
                adamw(&rule, true, p, g, &mut m[range.clone()], &mut v[range]);
            }
            p
        };
        for cut in 0..=LEN {
            assert_eq!(run(cut), run(0));
        }
    }

    /// The copy that layers read is the rounded master, and rounding never affects the master.
    #[test]
    fn the_copy_follows_the_master_and_does_not_change_it() {
        let grads: Vec<Bf16> = random("g", LEN).iter().map(|&g| Bf16::narrow(g)).collect();
        let wide: Vec<f32> = grads.iter().map(|g| g.widen()).collect();
        let (mut master, mut alone) = (random("p", LEN), random("p", LEN));
        let mut rounded = vec![F16::ZERO; LEN];
        let (mut m, mut v) = ([vec![0.0; LEN], vec![0.0; LEN]], [vec![0.0; LEN], vec![0.0; LEN]]);
        for step in 1..4 {
            let rule = AdamW { step, ..ADAMW };
            let weights = Weights { master: &mut master, rounded: Some(&mut rounded[..]) };
            adamw(&rule, true, weights, &grads, &mut m[0], &mut v[0]);
            adamw(&rule, true, plain(&mut alone), &wide, &mut m[1], &mut v[1]);
            assert_eq!(master, alone);
            assert!(master.iter().zip(&rounded).all(|(&p, &r)| r == F16::narrow(p)));
        }
    }

    #[test]
    fn a_zero_gradient_only_decays() {
        let mut p = [2.0];
        adamw(&ADAMW, true, plain(&mut p), &[0.0f32], &mut [0.0], &mut [0.0]);
        assert_eq!(p, [2.0 * 0.999]);
        let late = AdamW { step: u64::MAX, ..ADAMW };
        adamw(&late, false, plain(&mut p), &[0.0f32], &mut [0.0], &mut [0.0]);
        assert_eq!(p, [2.0 * 0.999]);
    }

    #[test]
    #[should_panic(expected = "`step` is zero")]
    fn updates_are_counted_from_one() {
        let rule = AdamW { step: 0, ..ADAMW };
        adamw::<f32, f32>(&rule, true, plain(&mut []), &[], &mut [], &mut []);
    }
}
