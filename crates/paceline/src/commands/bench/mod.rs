//! `paceline bench`: measure this machine.

mod collectives;
mod cores;
mod kernels;
mod train;

use crate::failure::Failure;
use crate::flags::Origins;
use clap::{Args, Subcommand};

/// Measure this machine
#[derive(Args, Debug)]
pub(crate) struct Flags {
    #[command(subcommand)]
    what: What,
}

/// Each is explained where its flags are.
#[derive(Debug, Subcommand)]
enum What {
    Collectives(Box<collectives::Flags>),
    Cores(Box<cores::Flags>),
    Kernels(Box<kernels::Flags>),
    Train(Box<train::Flags>),
}

/// Measures what was asked for.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    match &flags.what {
        What::Collectives(flags) => collectives::run(flags, origins),
        What::Cores(flags) => cores::run(flags, origins),
        What::Kernels(flags) => kernels::run(flags, origins),
        What::Train(flags) => train::run(flags, origins),
    }
}
