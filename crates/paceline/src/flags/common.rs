//! Flags common to all commands.

use crate::output::Output;
use clap::Args;
use std::ffi::OsString;

/// Flags common to all commands.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct CommonFlags {
    /// Print only JSON on standard output, one object per line
    #[arg(long, help_heading = "General")]
    pub json: bool,
    /// Read flags from a TOML file; flags on the command line override it
    ///
    /// Every flag can be set in the file by its long name: `global-batch = 64`, `sp = true`, and a
    /// repeatable one with a list: `set = ["hosts=2"]`. Keys under `[train]`, `[plan]` or another
    /// command's name apply to that command only, so one file can serve all commands.
    #[arg(long, value_name = "FILE", help_heading = "General")]
    pub config: Option<String>,
}

/// Returns true if the arguments ask for JSON, also where they cannot be parsed. Those of a training run
/// that a launcher starts stand behind `--`.
pub(crate) fn wants_json(arguments: &[OsString]) -> bool {
    let starts_a_run =
        arguments.get(1).is_some_and(|command| command == "launch" || command == "agent");
    let own = arguments.iter().take_while(|argument| *argument != "--" || starts_a_run);
    own.into_iter().any(|argument| argument == "--json")
}

impl CommonFlags {
    /// The command's output.
    pub(crate) fn output(&self) -> Output {
        Output::new(self.json)
    }
}
