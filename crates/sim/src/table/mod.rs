//! Tables of measured runs, and what the simulator says of the same runs.
//!
//! A table is a CSV text whose first line names its columns. Rows are read as they are; what a row
//! means for a simulation is decided when it is simulated, so that a row that cannot be represented
//! is reported with its reason and never dropped.

pub mod astra;
pub mod collectives;
mod csv;
mod platform;
pub mod training;

use thiserror::Error;

/// Why a text is no table.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{file}:{line}: {problem}; {remedy}")]
pub struct TableError {
    /// The file as the caller named it.
    pub file: String,
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong.
    pub problem: String,
    /// What would work.
    pub remedy: String,
}

/// Why a row was not simulated.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Skipped(pub String);
