//! Runs a plan on real ranks.
//!
//! Each rank interprets its role's program op by op: no branch here knows of a strategy, and nothing
//! is decided that the plan has decided. [`train()`] starts every rank as a thread of this process;
//! [`take_part`] is one rank of a world of processes, over wires that are already there.
//!
//! ```text
//! train, part ─► rank             ─► lanes, queue     which op may start: lanes and `after` edges
//!                                 ─► compute   segments on kernels
//!                                 ─► relay ─► courier ─► exchange     messages and collectives, as
//!                                              state machines that a second thread moves meanwhile
//!                                 ─► storage ─► store     what is offloaded, moved by a third one
//!                                 ─► update    the gradient's norm and the optimizer's step;
//!                                    unlocked: the same on memory that ranks share, in commons
//!                                 ─► parameters, data: where numbers come from, by logical place
//!                                 ─► checkpoint     where they are kept, by logical name
//! ```
//!
//! Beside it, [`probe`] times single ops with the same code.
//!
//! What is absent: gradients (the plan holds them as operators), addresses (the plan assigns them),
//! and any clock but the one that dates spans.

#![warn(clippy::wildcard_enum_match_arm)]

mod cgroup;
mod check;
pub mod checkpoint;
mod commons;
mod compute;
mod control;
mod courier;
#[cfg(feature = "cuda")]
mod cuda;
pub mod data;
mod error;
mod exchange;
mod fuse;
mod hearing;
mod horizon;
pub mod hugging_face;
pub mod inference;
mod kernel;
mod lanes;
mod learning_rate;
mod logical;
mod loss_scale;
mod memory;
mod options;
mod outcome;
mod parameters;
mod part;
mod place;
pub mod probe;
mod queue;
mod rank;
mod recorder;
mod relay;
mod reports;
pub mod resident;
mod run;
pub mod safetensors;
mod serve;
mod settled;
mod shard;
mod staleness;
mod storage;
mod store;
mod train;
mod types;
mod unlocked;
mod update;
mod warm_up;

pub use check::can_run;
pub use error::{ExecError, Fault};
pub use learning_rate::{BatchScaling, LrSchedule, ScalingRule};
pub use loss_scale::LossScale;
pub use options::{Device, Start, Straggler, TrainOptions};
pub use outcome::{IterationReport, Outcome, Parameters};
pub use paceline_kernels::prefer_large_pages;
pub use part::take_part;
pub use staleness::Staleness;
pub use train::train;
pub use warm_up::warm_up;
