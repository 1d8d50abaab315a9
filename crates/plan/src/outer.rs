//! Replicas that train apart and compare notes now and then: local SGD, and DiLoCo with an optimizer of its own
//! for what they compare (Stich, arXiv 1805.09767; Douillard et al., arXiv 2311.08105, algorithm 1).

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How replicas train apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Local {
    /// Updates of its own that a replica makes in an iteration.
    pub steps: u32,
    /// What is done with how far replicas have moved.
    pub outer: Outer,
}

/// What becomes of the mean of how far replicas have moved in an iteration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outer {
    /// All go there.
    Average,
    /// It is the gradient of Nesterov's method.
    #[default]
    Nesterov,
}

impl Outer {
    /// The rate and the momentum: those of Douillard et al. (section 3.1), 0.7 and 0.9, or those with which all
    /// go to the mean.
    pub const fn rule(self) -> (f64, f64) {
        match self {
            Self::Average => (1.0, 0.0),
            Self::Nesterov => (0.7, 0.9),
        }
    }
}

/// The operators of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OuterOp {
    /// weights, weights at the last comparison → how far they have moved, the wrong way round.
    Difference,
    /// sum of differences, weights at the last comparison[, velocity] → new weights, the same for the next
    /// comparison[, velocity].
    Step {
        /// How many replicas the sum is of.
        replicas: u32,
        /// The rate.
        rate: f64,
        /// What is kept of the velocity.
        momentum: f64,
    },
}

impl OuterOp {
    /// A short name for traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Difference => "outer_difference",
            Self::Step { .. } => "outer_step",
        }
    }
}

impl fmt::Display for Outer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Average => "average",
            Self::Nesterov => "nesterov",
        })
    }
}

impl FromStr for Outer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "average" => Ok(Self::Average),
            "nesterov" => Ok(Self::Nesterov),
            _ => Err(format!("'{text}' is none of average, nesterov")),
        }
    }
}

impl fmt::Display for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.steps, self.outer)
    }
}

impl FromStr for Local {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not written as in 8:nesterov");
        let (steps, outer) = text.split_once(':').ok_or_else(wrong)?;
        Ok(Self { steps: steps.parse().map_err(|_| wrong())?, outer: outer.parse()? })
    }
}
