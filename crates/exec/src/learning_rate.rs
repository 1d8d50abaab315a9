//! How the learning rate moves over a run.

use paceline_kernels::optimizer::half_cosine;
use std::fmt;
use std::str::FromStr;

/// What the learning rate does once the warmup is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LrSchedule {
    /// It stays.
    #[default]
    Constant,
    /// It falls along a line, to its lowest at the last iteration.
    Linear,
    /// It falls along half a cosine (Loshchilov and Hutter, arXiv 1608.03983, equation 5, without
    /// restarts), to its lowest at the last iteration.
    Cosine,
}

/// How the learning rate follows the size of the global batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchScaling {
    /// Samples of the batch that the learning rate was chosen for.
    pub base: u64,
    /// How it follows.
    pub rule: ScalingRule,
}

/// By which power of the batch's growth the learning rate grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScalingRule {
    /// The first: what suits plain gradient descent (Goyal et al., arXiv 1706.02677, section 2.1).
    #[default]
    Linear,
    /// None: it stays as it is.
    None,
    /// The root: what suits Adam and LAMB (You et al., arXiv 1904.00962, section 4.2).
    Sqrt,
}

impl LrSchedule {
    /// The share of the way from the lowest learning rate to the highest that is left after this
    /// much of the fall, from 0 to 1.
    pub(crate) fn left(self, progress: f64) -> f64 {
        match self {
            Self::Constant => 1.0,
            Self::Linear => 1.0 - progress,
            Self::Cosine => half_cosine(progress),
        }
    }
}

impl BatchScaling {
    /// What the learning rate is multiplied with for a batch of so many samples.
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
