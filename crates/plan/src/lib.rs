//! Lowers a model and a strategy to validated programs, one per role.
//!
//! This crate does no I/O, reads no clock and starts no thread: the same input always gives the
//! same plan. `paceline-sim` times plans and `paceline-exec` runs them; neither revises a decision
//! of the plan.

pub mod collective;
pub mod compress;
mod compress_warmup;
pub mod dtype;
pub mod graph;
pub mod ids;
pub mod located;
pub mod lower;
pub mod matching;
pub mod mesh;
pub mod model;
pub mod outer_optimizer;
pub mod program;
pub mod samples;
pub mod schedule;
pub mod spec;
pub mod staleness;
pub mod strategy;
pub mod suggest;
pub mod summary;
pub mod text;
pub mod trace;
pub mod units;
pub mod validate;

pub use dtype::DType;
