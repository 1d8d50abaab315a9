//! Executor: runs a plan on real ranks.
//!
//! Each rank interprets its role's program op by op: the code has no branch on the strategy, and
//! makes no decision that the plan has made. [`train()`] starts every rank as a thread of this
//! process; [`run_process_rank`] runs one rank of a world of processes, over an existing transport.
//!
//! ```text
//! run          set-up of a run on threads or processes, stop consensus, reports
//!  └► interpreter   next op: lanes and `after` edges; the only match on ops
//!      ├► device      segments, accumulation and steps: operators bound to kernels
//!      ├► progress    messages and collectives, as state machines that a second thread advances
//!      └► memory      arena, offload store (moved by a third thread), shared weights
//! parameters, data    sources of numbers, by logical index
//! checkpoint          saved state, by logical name
//! ```
//!
//! In addition, [`probe`] times single ops with the same code.
//!
//! Not in this crate: gradient rules (the plan has them as operators), address assignment (done by
//! the plan), and any clock but the one that timestamps spans.

#![warn(clippy::wildcard_enum_match_arm)]

pub mod checkpoint;
pub mod data;
mod device;
mod error;
pub mod hugging_face;
pub mod inference;
mod interpreter;
mod logical;
mod memory;
mod parameters;
pub mod private;
pub mod probe;
mod progress;
mod rank_coords;
pub mod regular;
mod run;
pub mod safetensors;
mod shard;
mod types;

pub use error::{ExecError, Fault};
pub use paceline_plan::staleness::Staleness;
pub use run::check::can_run;
pub use run::learning_rate::{BatchScaling, LrSchedule, ScalingRule};
pub use run::loss_scale::LossScale;
pub use run::member::run_process_rank;
pub use run::options::{Device, Gpu, Start, Straggler, TrainOptions, gpus};
pub use run::outcome::{IterationReport, Outcome, Parameters};
pub use run::resident;
pub use run::threads::train;
pub use run::warm_up::warm_up;
