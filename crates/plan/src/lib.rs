//! Turns a model and a strategy into validated programs, one per role.
//!
//! This crate does no I/O, reads no clock and starts no thread: the same input gives the same plan,
//! everywhere. `paceline-sim` times plans, `paceline-exec` runs them; neither decides anything that
//! the plan has decided.

pub mod collective;
pub mod compress;
pub mod dtype;
pub mod graph;
pub mod ids;
pub mod lower;
pub mod mesh;
pub mod model;
pub mod nearest;
pub mod outer;
pub mod program;
pub mod schedule;
pub mod spec;
pub mod strategy;
pub mod summary;
pub mod text;
pub mod trace;
pub mod units;
pub mod validate;
mod warm_up;

pub use dtype::DType;
