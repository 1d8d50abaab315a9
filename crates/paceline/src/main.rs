//! The command line of Paceline: plans, simulates and runs distributed deep-learning training.
//!
//! ```text
//! calibrate  measures this machine into a cluster
//! commands   one enum of commands, one file each
//! estimate   estimates a whole training run from one predicted iteration
//! flags      converts command-line flags to library types; reports all problems at once
//! launch     starts one process per rank and supervises them
//! log        diagnostic events on standard error, if `PACELINE_LOG` asks for them
//! output     text, JSON lines, and files that are complete or absent
//! overview   summaries of a plan and of a simulation that fit one screen
//! plot       charts as SVG
//! report     the HTML page of a run, and its table for the terminal
//! sweep      runs a command for many values of its flags: table, JSON and chart
//! ```
//!
//! This crate does not decide how a plan is made, timed or run: the library crates do.

mod calibrate;
mod commands;
mod estimate;
mod failure;
mod flags;
mod launch;
mod log;
mod output;
mod overview;
mod plot;
mod report;
mod sweep;

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    quiet_guarded_panics();
    launch::end_with_agent();
    let arguments: Vec<_> = std::env::args_os().collect();
    let mut json = flags::wants_json(&arguments);
    let ran = log::start().and_then(|()| commands::run(arguments, &mut json));
    match ran {
        Ok(()) => {
            paceline_comm::mpi::leave();
            ExitCode::SUCCESS
        }
        Err(failure) => {
            // A message is lost if its stream is closed.
            if let Some(message) = failure.message() {
                let _ = writeln!(std::io::stderr(), "{}", output::escaped(&message));
            }
            if let Some(record) = failure.record().filter(|_| json) {
                let _ = writeln!(std::io::stdout(), "{record}");
            }
            failure.exit_code()
        }
    }
}

/// Keeps silent about panics that become errors: libraries panic on some hostile files.
fn quiet_guarded_panics() {
    let loud = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !paceline_exec::data::is_guarded() {
            loud(panic);
        }
    }));
}
