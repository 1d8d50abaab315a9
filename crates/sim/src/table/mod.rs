//! Tables of measured runs, and simulations of the same runs.
//!
//! A table is a CSV text whose first line names its columns. Rows are read unchanged and
//! interpreted only when simulated, so a row that cannot be represented is reported with its reason
//! and never dropped.

pub mod astra;
pub mod collectives;
mod csv;
mod platform;
pub mod training;

use thiserror::Error;

/// Reason that a text is not a valid table.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{file}:{line}: {problem}; {remedy}")]
pub struct TableError {
    /// File name as given by the caller.
    pub file: String,
    /// Line, counted from 1.
    pub line: usize,
    /// Description of the problem.
    pub problem: String,
    /// Suggested fix.
    pub remedy: String,
}

/// Reason that a row was not simulated.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Skipped(pub String);
