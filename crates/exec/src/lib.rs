//! Executor: runs a plan on real ranks.
//!
//! Each rank interprets its role's program op by op: the code has no branch on the strategy, and
//! makes no decision that the plan has made. [`train()`] starts every rank as a thread of this
//! process; [`run_process_rank`] runs one rank of a world of processes, over an existing transport.
//!
//! ```text
//! train, process_rank ─► rank ─► op_scheduler, ready_queue   next op: lanes and `after` edges
//!                             ─► compute   segments on kernels
//!                             ─► progress_thread ─► progress_engine ─► exchange   messages and
//!                                collectives, as state machines that a second thread advances
//!                             ─► offload_thread ─► offload_store   offloaded state (third thread)
//!                             ─► update    the gradient norm and the optimizer step;
//!                                hogwild: the same on memory that ranks share, in shared_weights
//!                             ─► parameters, data   sources of numbers, by logical index
//!                             ─► checkpoint   saved state, by logical name
//! ```
//!
//! In addition, [`probe`] times single ops with the same code.
//!
//! Not in this crate: gradient rules (the plan has them as operators), address assignment (done by
//! the plan), and any clock but the one that timestamps spans.

#![warn(clippy::wildcard_enum_match_arm)]

mod cgroup;
mod check;
pub mod checkpoint;
mod compressed_adam;
mod compute;
mod control;
#[cfg(feature = "cuda")]
mod cuda;
pub mod data;
mod error;
mod exchange;
mod fuse;
mod hogwild;
pub mod hugging_face;
pub mod inference;
mod kernel;
mod learning_rate;
mod logical;
mod loss_scale;
mod memory;
mod offload_store;
mod offload_thread;
mod op_scheduler;
mod options;
mod outcome;
mod parameters;
pub mod probe;
mod process_rank;
mod progress_engine;
mod progress_thread;
mod rank;
mod rank_coords;
mod ready_queue;
mod recorder;
mod report_channel;
mod reports;
pub mod resident;
mod run;
pub mod safetensors;
mod serve;
mod shard;
mod shared_weights;
mod staleness;
mod stop_consensus;
mod train;
mod types;
mod update;
mod warm_up;

pub use check::can_run;
pub use error::{ExecError, Fault};
pub use learning_rate::{BatchScaling, LrSchedule, ScalingRule};
pub use loss_scale::LossScale;
pub use options::{Device, Start, Straggler, TrainOptions};
pub use outcome::{IterationReport, Outcome, Parameters};
pub use paceline_kernels::prefer_huge_pages;
pub use process_rank::run_process_rank;
pub use staleness::Staleness;
pub use train::train;
pub use warm_up::warm_up;
