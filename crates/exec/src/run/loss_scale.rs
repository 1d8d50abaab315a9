//! Loss scaling: keeps small gradients in the range of f16.

use crate::run::options::{Start, TrainOptions};
use paceline_plan::DType;
use paceline_plan::strategy::Strategy;
use serde::{Deserialize, Serialize};

/// Loss scale of an f16 run: a factor that moves gradients into the range of f16 (Micikevicius et
/// al., "Mixed precision training", arXiv 1710.03740, section 3.2).
///
/// It doubles after 2000 iterations without overflow and halves with every overflow; such an
/// iteration changes no weight. The gradient norm detects overflows: it is finite exactly if the
/// whole gradient is. All ranks see the same bits of it, so they decide alike without
/// communication. The factor is a power of two: if nothing leaves the range of normal numbers, it
/// changes no digit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    #[serde(skip)]
    dynamic: bool,
    scale: f32,
    /// Number of iterations since the last change.
    good: u32,
    /// Number of iterations that changed no weight.
    skipped: u32,
}

/// Iterations without overflow after which the factor doubles; the same as PyTorch's `GradScaler`.
const WINDOW: u32 = 2000;
/// Largest factor: its product with any f16 is far below the maximum of f32.
const LARGEST: f32 = 16_777_216.0;

impl LossScale {
    /// Factor of the first iteration: the saved one, or that of the options. Always 1 if
    /// activations and gradients have the range of f32.
    pub(crate) fn new(strategy: &Strategy, options: &TrainOptions) -> Self {
        let dynamic = strategy.dtype == DType::F16 || strategy.grad_dtype == DType::F16;
        // Round the requested value down to a power of two.
        let first = f32::from_bits(options.loss_scale.clamp(1.0, LARGEST).to_bits() & 0x7f80_0000);
        let saved = match &options.start {
            Start::Checkpoint(checkpoint) => checkpoint.state().loss_scale,
            Start::Seed | Start::Pretrained(_) => None,
        };
        match saved.filter(|saved| dynamic && saved.scale.is_normal()) {
            Some(saved) => Self { dynamic, scale: saved.scale.clamp(1.0, LARGEST), ..saved },
            None => Self { dynamic, scale: if dynamic { first } else { 1.0 }, good: 0, skipped: 0 },
        }
    }

    /// Factor of the current iteration.
    pub(crate) fn factor(&self) -> f32 {
        self.scale
    }

    /// Factor, if it may change.
    pub(crate) fn reported(&self) -> Option<f32> {
        self.dynamic.then_some(self.scale)
    }

    /// Number of iterations so far that changed no weight.
    pub(crate) fn skipped(&self) -> u32 {
        self.skipped
    }

    /// Returns true if a gradient with this norm, still scaled, has overflowed.
    pub(crate) fn overflows(&self, norm: f32) -> bool {
        self.dynamic && !norm.is_finite()
    }

    /// Returns true if no smaller factor could make this norm finite.
    pub(crate) fn is_lost(&self, norm: f32) -> bool {
        !norm.is_finite() && (!self.dynamic || self.scale <= 1.0)
    }

    /// Ends an iteration with this gradient norm, still scaled, and adjusts the factor.
    pub(crate) fn conclude(&mut self, norm: f32) {
        if self.overflows(norm) {
            self.scale = (self.scale / 2.0).max(1.0);
            self.good = 0;
            self.skipped = self.skipped.saturating_add(1);
        } else if self.dynamic {
            self.good += 1;
            if self.good >= WINDOW {
                self.scale = (self.scale * 2.0).min(LARGEST);
                self.good = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn half() -> LossScale {
        let strategy = Strategy { dtype: DType::F16, ..Strategy::default() };
        LossScale::new(&strategy, &TrainOptions::default())
    }

    const FIRST: f32 = 65536.0;

    #[test]
    fn it_halves_with_every_overflow_and_doubles_after_a_while() {
        let mut scale = half();
        for norm in [f32::INFINITY, 1.0, f32::NAN] {
            assert_eq!(scale.overflows(norm), norm != 1.0);
            scale.conclude(norm);
        }
        assert_eq!((scale.factor(), scale.skipped()), (FIRST / 4.0, 2));
        (0..WINDOW - 1).for_each(|_| scale.conclude(1.0));
        assert_eq!(scale.factor(), FIRST / 4.0);
        scale.conclude(1.0);
        assert_eq!(scale.factor(), FIRST / 2.0);
    }

    #[test]
    fn it_stays_within_bounds() {
        let mut scale = half();
        (0..100).for_each(|_| scale.conclude(f32::NAN));
        assert_eq!(scale.factor(), 1.0);
        assert!(scale.is_lost(f32::INFINITY));
        (0..100 * WINDOW).for_each(|_| scale.conclude(0.0));
        assert_eq!(scale.factor(), LARGEST);
    }

    #[test]
    fn it_begins_with_the_power_of_two_below_what_is_asked_for() {
        let strategy = Strategy { dtype: DType::F16, ..Strategy::default() };
        for (asked, first) in [(1000.0, 512.0), (1.0, 1.0), (0.1, 1.0), (1e30, LARGEST)] {
            let options = TrainOptions { loss_scale: asked, ..TrainOptions::default() };
            assert_eq!(LossScale::new(&strategy, &options).factor(), first);
        }
    }

    #[test]
    fn wide_types_need_none() {
        for dtype in [DType::F32, DType::Bf16] {
            let mut scale = LossScale::new(
                &Strategy { dtype, ..Strategy::default() },
                &TrainOptions::default(),
            );
            assert!(!scale.overflows(f32::NAN) && scale.is_lost(f32::NAN) && !scale.is_lost(1.0));
            scale.conclude(f32::NAN);
            assert_eq!((scale.factor(), scale.reported(), scale.skipped()), (1.0, None, 0));
        }
    }
}
