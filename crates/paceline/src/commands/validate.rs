//! `paceline validate`: the simulator beside a table of measured runs.

use crate::failure::Failure;
use crate::flags::{CommonFlags, Origins, Problems};
use clap::Args;
use std::path::PathBuf;

/// Simulate every row of a table of measured runs
#[derive(Args, Debug)]
pub(crate) struct Flags {
    /// The table
    #[arg(long, value_name = "FILE.csv")]
    table: Option<PathBuf>,
    #[command(flatten)]
    common: CommonFlags,
}

/// Simulates every row.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let _ = (&flags.table, &flags.common, Problems::new(origins));
    Err(Failure::flag("--table", "todo"))
}
