//! The command line of Paceline: plans, simulates and runs distributed deep-learning training.
//!
//! ```text
//! calibrate  this machine, measured into a cluster
//! commands   one enum of commands, one file each: what each does, step by step
//! estimate   a whole training run, from one predicted iteration
//! flags      what a person typed → what a library takes; all problems at once
//! launch     one command, many processes: starting ranks and watching them
//! output     lines for people, lines of JSON, files that are whole or absent
//! overview   a plan and a simulation in words a person reads in one screen
//! plot       charts as SVG
//! report     the HTML page of a run, and its table for the terminal
//! sweep      a command for many values of its flags: table, JSON and picture
//! ```
//!
//! Nothing here decides how a plan is made, timed or run: the library crates do.

mod calibrate;
mod commands;
mod estimate;
mod failure;
mod flags;
mod launch;
mod output;
mod overview;
mod plot;
mod report;
mod sweep;

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    match commands::run(std::env::args_os().collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if let Some(message) = failure.message() {
                // Nobody is left to tell if standard error is closed.
                let _ = writeln!(std::io::stderr(), "{message}");
            }
            failure.exit_code()
        }
    }
}
