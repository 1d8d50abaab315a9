//! Runs a plan on real ranks.
//!
//! [`train()`] starts every rank of a plan, and each interprets its role's program op by op: no branch
//! here knows of a strategy, and nothing is decided that the plan has decided. Today ranks are
//! threads of one process that talk through `paceline_comm`'s thread transport.
//!
//! ```text
//! train ─► rank (one thread each) ─► queue     which op may start: lanes and `after` edges
//!                                 ─► compute   segments on kernels
//!                                 ─► exchange  messages and collectives, as state machines
//!                                 ─► update    the gradient's norm and the optimizer's step
//!                                 ─► parameters, data: where numbers come from, by logical place
//! ```
//!
//! What is absent: gradients (the plan holds them as operators), addresses (the plan assigns them),
//! and any clock but the one that dates spans.

#![warn(clippy::wildcard_enum_match_arm)]

mod check;
mod compute;
pub mod data;
mod error;
mod exchange;
mod horizon;
mod kernel;
mod memory;
mod options;
mod outcome;
mod parameters;
mod place;
mod queue;
mod rank;
mod recorder;
mod shard;
mod train;
mod update;

pub use error::{ExecError, Fault};
pub use options::TrainOptions;
pub use outcome::{IterationReport, Outcome, Parameters};
pub use train::train;
