//! Directory of a run that keeps no files.

use crate::failure::Failure;
use std::path::{Path, PathBuf};

/// A directory that is removed when the run ends.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new() -> Result<Self, Failure> {
        let path = std::env::temp_dir().join(format!("paceline-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
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
