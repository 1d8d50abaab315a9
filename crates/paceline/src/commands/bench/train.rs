//! `paceline bench train`: training throughput of this machine.

use crate::commands::train::{self, Purpose};
use crate::failure::Failure;
use crate::flags::Origins;
use clap::Args;

/// Measure training on this machine
///
/// Trains for a few iterations, as `paceline train` would. Reports the median iteration time, its
/// spread, tokens per second, and memory compared with the plan. The first tenth of the iterations,
/// at least one, is left out. Nothing is saved: no checkpoint without --save-every, and no
/// directory without --out.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
#[group(skip)]
pub(crate) struct Flags {
    #[command(flatten)]
    run: train::JobFlags,
}

const EXAMPLES: &str = "\
Examples:
  paceline bench train --config examples/single-device.toml
  paceline bench train --model gpt2-124m --seq 256 --micro-batch 2 --dp 2 --iterations 10 --json";

/// Measures and prints the training throughput.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    train::start(&flags.run, Purpose::Measure, origins)
}
