//! Flags that every command has.

use crate::output::Output;
use clap::Args;

/// Flags that every command has.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct CommonFlags {
    /// Print one JSON object per line on standard output and nothing else there
    #[arg(long, help_heading = "General")]
    pub json: bool,
    /// Take flags from a TOML file; flags on the command line win over it
    ///
    /// Every flag can stand in the file by its long name: `global-batch = 64`, `sp = true`, and one
    /// that can be repeated with a list: `set = ["hosts=2"]`. What stands under `[train]`, `[plan]`
    /// or another command's name is for that command only, so one file can serve them all.
    #[arg(long, value_name = "FILE", help_heading = "General")]
    pub config: Option<String>,
}

impl CommonFlags {
    /// Where the command writes.
    pub(crate) fn output(&self) -> Output {
        Output::new(self.json)
    }
}
