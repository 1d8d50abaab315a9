//! What is wrong with a description of a model, where, and what would work.

use std::fmt;
use thiserror::Error;

/// Everything that is wrong with one description, so that one look at the file mends it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct ModelErrors {
    problems: Vec<ModelError>,
}

/// One thing that is wrong with a description of a model.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Error)]
#[error("{file}{}: {problem}; {remedy}", Suffix(*.line))]
pub struct ModelError {
    /// The file as the caller named it, or the model's name where there is no file.
    pub file: String,
    /// The line, counted from 1, where there is a file.
    pub line: Option<usize>,
    /// What is wrong.
    pub problem: String,
    /// What would work.
    pub remedy: String,
}

impl ModelErrors {
    /// In the order of the lines and without repetition: one wrong number can break two rules.
    pub(super) fn new(mut problems: Vec<ModelError>) -> Self {
        problems.sort();
        problems.dedup();
        Self { problems }
    }

    /// The problems in the order of their lines; there is at least one.
    pub fn problems(&self) -> &[ModelError] {
        &self.problems
    }
}

impl fmt::Display for ModelErrors {
    /// One problem a line.
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
