//! `paceline bench train`: how fast this machine trains.

use crate::commands::train::{self, Purpose};
use crate::failure::Failure;
use crate::flags::Origins;
use clap::Args;

/// Measure training on this machine
///
/// Trains as `paceline train` would, a few iterations, and tells the median iteration, its spread,
/// tokens a second, and memory against the plan. The first tenth of the iterations, at least one, is
/// left out. Nothing is kept: no checkpoint unless --save-every asks for some, no directory unless
/// --out does.
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

/// Measures and prints.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    train::start(&flags.run, Purpose::Measure, origins)
}
