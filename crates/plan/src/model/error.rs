//! Errors in a model description: problem, location and remedy.

use std::fmt;
use thiserror::Error;

/// All problems of one description, so that the file can be fixed in one pass.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct ModelErrors {
    problems: Vec<ModelError>,
}

/// One problem of a model description.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Error)]
#[error("{file}{}: {problem}; {remedy}", Suffix(*.line))]
pub struct ModelError {
    /// The file as the caller named it, or the model's name if there is no file.
    pub file: String,
    /// Line number, counted from 1, if there is a file.
    pub line: Option<usize>,
    /// Description of the problem.
    pub problem: String,
    /// Change that would fix it.
    pub remedy: String,
}

impl ModelErrors {
    /// Sorts by line and removes duplicates: one wrong number can violate two rules.
    pub(super) fn new(mut problems: Vec<ModelError>) -> Self {
        problems.sort();
        problems.dedup();
        Self { problems }
    }

    /// Problems in line order; there is at least one.
    pub fn problems(&self) -> &[ModelError] {
        &self.problems
    }
}

impl fmt::Display for ModelErrors {
    /// One problem per line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            problem.fmt(f)?;
        }
        Ok(())
    }
}

/// `:12` after a file's name, as editors and compilers write it.
struct Suffix(Option<usize>);

impl fmt::Display for Suffix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(line) => write!(f, ":{line}"),
            None => Ok(()),
        }
    }
}
