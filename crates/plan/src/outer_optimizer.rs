//! Local SGD, and DiLoCo with an outer optimizer for the pseudo-gradients (Stich, arXiv 1805.09767;
//! Douillard et al., arXiv 2311.08105, algorithm 1).

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Local SGD configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LocalSgd {
    /// Number of local steps of a replica per iteration.
    pub steps: u32,
    /// Optimizer of the outer step.
    pub outer: OuterOptimizer,
}

/// Outer optimizer: use of the replicas' mean pseudo-gradient in an iteration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OuterOptimizer {
    /// All replicas take the mean of the weights.
    Average,
    /// The mean pseudo-gradient is the gradient of Nesterov's method.
    #[default]
    Nesterov,
}

impl OuterOptimizer {
    /// Learning rate and momentum: 0.7 and 0.9 as in Douillard et al. (section 3.1), or 1 and 0 for
    /// the mean.
    pub const fn rule(self) -> (f64, f64) {
        match self {
            Self::Average => (1.0, 0.0),
            Self::Nesterov => (0.7, 0.9),
        }
    }
}

/// Operators of the outer step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OuterOp {
    /// weights, anchor → pseudo-gradient (anchor − weights).
    PseudoGradient,
    /// sum of pseudo-gradients, anchor[, velocity] → new weights, new anchor[, velocity].
    Step {
        /// Number of replicas in the sum.
        replicas: u32,
        /// Learning rate.
        rate: f64,
        /// Momentum factor of the velocity.
        momentum: f64,
    },
}

impl OuterOp {
    /// Short name for traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PseudoGradient => "pseudo_gradient",
            Self::Step { .. } => "outer_step",
        }
    }
}

impl fmt::Display for OuterOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Average => "average",
            Self::Nesterov => "nesterov",
        })
    }
}

impl FromStr for OuterOptimizer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "average" => Ok(Self::Average),
            "nesterov" => Ok(Self::Nesterov),
            _ => Err(format!("'{text}' is none of average, nesterov")),
        }
    }
}

impl fmt::Display for LocalSgd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.steps, self.outer)
    }
}

impl FromStr for LocalSgd {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not written as in 8:nesterov");
        let (steps, outer) = text.split_once(':').ok_or_else(wrong)?;
        Ok(Self { steps: steps.parse().map_err(|_| wrong())?, outer: outer.parse()? })
    }
}
