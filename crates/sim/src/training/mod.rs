//! Extrapolation from one iteration to a whole training run: time, cost and failures.

mod cost;
mod failures;

pub use cost::{TrainingCost, TrainingRun};
pub use failures::{Checkpointing, Failures};
