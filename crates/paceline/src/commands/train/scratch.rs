//! Directory of a run that keeps no files.

use crate::failure::Failure;
use paceline_exec::private::temporary_directory;
use std::path::{Path, PathBuf};

/// A directory that is removed when the run ends.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new() -> Result<Self, Failure> {
        Ok(Self(temporary_directory("paceline-bench")?))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A leftover temporary directory does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
