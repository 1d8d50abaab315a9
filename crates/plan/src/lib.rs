//! Turns a model and a strategy into validated programs, one per role.
//!
//! This crate does no I/O, reads no clock and starts no thread: the same input gives the same plan,
//! everywhere. `paceline-sim` times plans, `paceline-exec` runs them; neither decides anything that
//! the plan has decided.

pub mod dtype;
pub mod ids;
pub mod units;

pub use dtype::DType;
