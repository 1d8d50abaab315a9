//! Larger buffers for experts, which a rank asks its launcher for when they have overflowed.
//!
//! Ranks of a launcher are processes that end with the attempt; a file in the run's directory outlives
//! them.

use crate::output::{Output, write};
use anyhow::Context;
use paceline_exec::regular;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Buffers that replace overflowed ones, in equal shares of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LargerBuffers {
    /// Size that was needed.
    pub needed: f64,
    /// Size before.
    pub before: f64,
    /// New size.
    pub factor: f64,
}

/// Name of the file.
const NAME: &str = "expert-buffers.json";

/// Maximum size of the file.
const LARGEST: u64 = 4096;

impl LargerBuffers {
    /// Asks the launcher for these buffers.
    pub(crate) fn ask(&self, directory: &Path) -> anyhow::Result<()> {
        let path = directory.join(NAME);
        write(&path, serde_json::to_string(self)?.as_bytes())
            .with_context(|| format!("{} cannot be written", path.display()))
    }

    /// Takes what a rank has asked for, if one has.
    pub(super) fn take(directory: &Path) -> Option<Self> {
        let path = directory.join(NAME);
        let asked = regular::read(&path, LARGEST).ok()?;
        let _ = std::fs::remove_file(path);
        serde_json::from_slice(&asked).ok()
    }

    /// Why the run goes on after iteration `from` once more.
    pub(crate) fn cause(&self) -> String {
        let Self { needed, before, factor } = self;
        format!(
            "the experts of one rank get {needed:.2} times an equal share of the tokens; their buffers \
             grow from {before} to {factor}"
        )
    }

    /// Tells that the run goes on with these buffers after iteration `from`.
    pub(crate) fn report(&self, from: u32, output: &Output) {
        output.note(&format!("{}, after iteration {from}", self.cause()));
        let Self { needed, factor, .. } = *self;
        let event = Event { event: "expert_buffers", iteration: from, needed, factor };
        // Rank 0 notices closed output, and ends the run in good order.
        let _ = output.print_json(&event);
    }
}

/// JSON event of larger buffers.
#[derive(Serialize)]
struct Event {
    event: &'static str,
    /// Number of iterations already done.
    iteration: u32,
    /// Size that was needed, and the new one.
    needed: f64,
    factor: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_taken_once() {
        let directory =
            std::env::temp_dir().join(format!("paceline-larger-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let larger = LargerBuffers { needed: 1.5, before: 1.0, factor: 1.88 };
        assert_eq!(LargerBuffers::take(&directory), None);
        larger.ask(&directory).unwrap();
        assert_eq!(LargerBuffers::take(&directory), Some(larger));
        assert_eq!(LargerBuffers::take(&directory), None);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
