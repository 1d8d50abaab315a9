//! `paceline checkpoint`: checks saved checkpoints.

use crate::failure::Failure;
use crate::flags::{CheckpointOptions, CommonFlags};
use clap::{Args, Subcommand};
use paceline_exec::checkpoint::{Checkpoint, CheckpointError, Verified};
use paceline_plan::units::Bytes;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Check saved checkpoints
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Verify(Flags),
}

/// Compare every tensor and file of checkpoints with their checksums
///
/// Of a run's directory, all checkpoints are checked. Exit status 1 if one is damaged.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  paceline checkpoint verify runs/mini-001\n  \
                  paceline checkpoint verify runs/mini-001/checkpoints/iteration-00000100 --json")]
pub(crate) struct Flags {
    /// Run directory, its checkpoints, or one of them
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    #[command(flatten)]
    common: CommonFlags,
}

/// Result for one checkpoint, as JSON.
#[derive(Serialize)]
struct Record {
    checkpoint: String,
    whole: bool,
    /// Number of iterations done.
    #[serde(skip_serializing_if = "Option::is_none")]
    iteration: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    /// Location and kind of the damage.
    #[serde(skip_serializing_if = "Option::is_none")]
    damage: Option<String>,
}

/// Runs a command about checkpoints.
pub(crate) fn run(command: &Command) -> Result<(), Failure> {
    let Command::Verify(flags) = command;
    let output = flags.common.output();
    let all = checkpoints(&flags.directory);
    if all.is_empty() {
        let none = CheckpointError::None { path: flags.directory.clone() };
        return Err(Failure::flag("DIR", none.to_string()));
    }
    let mut damaged = 0;
    for path in &all {
        let shown = path.display();
        let verified =
            Checkpoint::open(path).and_then(|found| Ok((found.state().iteration, found.verify()?)));
        let record = match verified {
            Ok((iteration, Verified { tensors, bytes })) => {
                output.print(&format!("{shown}: whole, {tensors} tensors, {}", Bytes(bytes)))?;
                Record {
                    checkpoint: shown.to_string(),
                    whole: true,
                    iteration: Some(iteration),
                    tensors: Some(tensors),
                    bytes: Some(bytes),
                    damage: None,
                }
            }
            Err(error) => {
                damaged += 1;
                output.print(&format!("{shown}: damaged: {error}"))?;
                Record {
                    checkpoint: shown.to_string(),
                    whole: false,
                    iteration: None,
                    tensors: None,
                    bytes: None,
                    damage: Some(error.to_string()),
                }
            }
        };
        output.print_json(&record)?;
    }
    match damaged {
        0 => Ok(()),
        count => {
            let all = all.len();
            Err(Failure::Run(anyhow::anyhow!("{count} of {all} checkpoints are damaged")))
        }
    }
}

/// The checkpoints of a run's directory or of its folder, or the one that the path names.
fn checkpoints(path: &Path) -> Vec<PathBuf> {
    if Checkpoint::is_one(path) {
        return vec![path.to_owned()];
    }
    let mut all = Checkpoint::all(path);
    if all.is_empty() {
        all = Checkpoint::all(&CheckpointOptions::folder(path));
    }
    all.into_iter().map(|(_, path)| path).collect()
}
