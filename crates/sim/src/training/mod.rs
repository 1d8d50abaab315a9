//! From one iteration to a whole training run: how long, how much, and what failures take.

mod cost;
mod failures;

pub use cost::{TrainingCost, TrainingRun};
pub use failures::{Checkpointing, Failures};
