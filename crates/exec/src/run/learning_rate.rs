//! Learning rate over the course of a run.

use paceline_kernels::optimizer::half_cosine;
use std::fmt;
use std::str::FromStr;

/// Learning rate schedule after the warmup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LrSchedule {
    /// Constant learning rate.
    #[default]
    Constant,
    /// Linear decay to the minimum at the last iteration.
    Linear,
    /// Half-cosine decay (Loshchilov and Hutter, arXiv 1608.03983, equation 5, without restarts) to
    /// the minimum at the last iteration.
    Cosine,
}

/// Scaling of the learning rate with the global batch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchScaling {
    /// Batch size, in samples, that the learning rate was chosen for.
    pub base: u64,
    /// Scaling rule.
    pub rule: ScalingRule,
}

/// Power of the batch growth by which the learning rate grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScalingRule {
    /// Linear: for plain gradient descent (Goyal et al., arXiv 1706.02677, section 2.1).
    #[default]
    Linear,
    /// No scaling.
    None,
    /// Square root: for Adam and LAMB (You et al., arXiv 1904.00962, section 4.2).
    Sqrt,
}

impl LrSchedule {
    /// Fraction of the range between minimum and maximum learning rate that remains at `progress`,
    /// 0 to 1, of the decay.
    pub(crate) fn left(self, progress: f64) -> f64 {
        match self {
            Self::Constant => 1.0,
            Self::Linear => 1.0 - progress,
            Self::Cosine => half_cosine(progress),
        }
    }
}

impl BatchScaling {
    /// Factor of the learning rate for a batch of `batch` samples.
    pub(crate) fn factor(self, batch: u64) -> f64 {
        let growth = batch as f64 / self.base.max(1) as f64;
        match self.rule {
            ScalingRule::Linear => growth,
            ScalingRule::Sqrt => growth.sqrt(),
            ScalingRule::None => 1.0,
        }
    }
}

macro_rules! words {
    ($type:ty { $($value:path = $word:literal),+ }) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($value => $word),+ })
            }
        }

        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok($value),)+
                    _ => Err(format!("'{text}' is none of {}", [$($word),+].join(", "))),
                }
            }
        }
    };
}

words!(LrSchedule {
    LrSchedule::Constant = "constant",
    LrSchedule::Linear = "linear",
    LrSchedule::Cosine = "cosine"
});
words!(ScalingRule {
    ScalingRule::Linear = "linear",
    ScalingRule::Sqrt = "sqrt",
    ScalingRule::None = "none"
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_falls_falls_from_one_to_zero() {
        for schedule in [LrSchedule::Linear, LrSchedule::Cosine] {
            assert_eq!(schedule.left(0.0), 1.0);
            assert!((schedule.left(0.5) - 0.5).abs() < 1e-15);
            assert_eq!(schedule.left(1.0), 0.0);
            let path: Vec<f64> = (0..=100).map(|i| schedule.left(f64::from(i) / 100.0)).collect();
            assert!(path.windows(2).all(|pair| pair[1] < pair[0]), "{path:?}");
        }
        assert_eq!(LrSchedule::Constant.left(0.7), 1.0);
    }

    #[test]
    fn larger_batches_learn_faster() {
        let factor = |rule, batch| BatchScaling { base: 256, rule }.factor(batch);
        assert_eq!(factor(ScalingRule::Linear, 1024), 4.0);
        assert_eq!(factor(ScalingRule::Sqrt, 1024), 2.0);
        assert_eq!(factor(ScalingRule::Sqrt, 64), 0.5);
        assert_eq!(factor(ScalingRule::None, 1024), 1.0);
        assert!(BatchScaling { base: 0, rule: ScalingRule::Linear }.factor(u64::MAX).is_finite());
    }

    #[test]
    fn names_are_read_and_refused() {
        assert_eq!("cosine".parse(), Ok(LrSchedule::Cosine));
        assert_eq!("sqrt".parse(), Ok(ScalingRule::Sqrt));
        let told = "step".parse::<LrSchedule>().unwrap_err();
        assert!(told.contains("constant, linear, cosine"), "{told}");
    }
}
