//! `paceline bench`: measure this machine.

mod collectives;
mod core_to_core;
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

/// Subcommands; each is documented at its flags.
#[derive(Debug, Subcommand)]
enum What {
    Collectives(Box<collectives::Flags>),
    CoreToCore(Box<core_to_core::Flags>),
    Kernels(Box<kernels::Flags>),
    Train(Box<train::Flags>),
}

/// Runs the requested benchmark.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    match &flags.what {
        What::Collectives(flags) => collectives::run(flags, origins),
        What::CoreToCore(flags) => core_to_core::run(flags, origins),
        What::Kernels(flags) => kernels::run(flags, origins),
        What::Train(flags) => train::run(flags, origins),
    }
}
