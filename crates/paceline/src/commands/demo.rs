//! `paceline` without a command: the demo.

use super::train::{JobFlags, Purpose, start};
use crate::failure::Failure;
use crate::flags::{CommonFlags, Origins, StrategyFlags, TrainingFlags};
use clap::Args;

/// Flags of the demo.
#[derive(Args, Debug)]
pub(crate) struct Flags {
    /// Iterations of the demo [default: 300]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Demo")]
    iterations: Option<String>,
    /// Directory for the demo's files [default: runs/mini-NUMBER, the next free one]
    #[arg(long, value_name = "DIR", help_heading = "Demo")]
    out: Option<std::path::PathBuf>,
    /// Replace the run that --out names
    #[arg(long, help_heading = "Demo")]
    overwrite: bool,
    #[command(flatten)]
    common: CommonFlags,
}

/// Maximum number of ranks: more would add threads to watch, not insight.
const MOST_RANKS: usize = 4;
/// Takes half a minute on two slow cores; the loss falls most of the way to its floor.
const ITERATIONS: &str = "300";
const MICRO_BATCH: usize = 4;

/// Trains the embedded default model on this machine's cores.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // A power of two, with the same number of leaves everywhere: the losses match on all machines.
    let ranks = 1usize << cores.clamp(1, MOST_RANKS).ilog2();
    let strategy = StrategyFlags {
        model: Some("mini".to_owned()),
        dp: Some(ranks.to_string()),
        micro_batch: Some(MICRO_BATCH.to_string()),
        global_batch: Some((MOST_RANKS * MICRO_BATCH).to_string()),
        leaves: Some(MOST_RANKS.to_string()),
        ..StrategyFlags::default()
    };
    let training = TrainingFlags {
        iterations: flags.iterations.clone().or_else(|| Some(ITERATIONS.to_owned())),
        out: flags.out.clone(),
        overwrite: flags.overwrite,
        ..TrainingFlags::default()
    };
    let common = flags.common.clone();
    let job = JobFlags { strategy, training, common, ..JobFlags::default() };
    start(&job, Purpose::Train, origins)
}
