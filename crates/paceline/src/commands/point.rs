//! One point of a study: a command with changed flags, as if they had been typed.

use super::{Cli, Command, collective, gemm, plan, simulate, train};
use crate::failure::Failure;
use crate::flags::{CommonFlags, Origins, Problems, is_cluster_path};
use crate::sweep::{self, Change, Subject, SweepFlags};
use clap::{ArgAction, CommandFactory, FromArgMatches};
use serde_json::Value;
use std::ffi::OsString;

/// A command that supports studies, with its flags.
pub(super) struct Study<'a> {
    name: &'static str,
    usual: &'static [&'static str],
    common: &'a CommonFlags,
    /// Flags that vary.
    pub flags: &'a SweepFlags,
    /// True if the command draws a picture, which takes the title.
    pub has_picture: bool,
}

/// Returns the study of a command; `None` for one without numbers to compare.
pub(super) fn study(command: &Command) -> Option<Study<'_>> {
    let (name, usual, flags, common): (_, &[&str], _, _) = match command {
        Command::Simulate(own) => ("simulate", &simulate::USUAL, &own.sweep, &own.common),
        Command::Plan(own) => ("plan", &plan::USUAL, &own.sweep, &own.common),
        Command::Collective(own) => ("collective", &collective::USUAL, &own.sweep, &own.common),
        Command::Gemm(own) => ("gemm", &gemm::USUAL, &own.sweep, &own.common),
        Command::Train(own) => ("train", &train::USUAL, &own.sweep, &own.job.common),
        Command::Launch(_)
        | Command::Submit(_)
        | Command::Agent(_)
        | Command::Search(_)
        | Command::Validate(_)
        | Command::Bench(_)
        | Command::Calibrate(_)
        | Command::Report(_)
        | Command::Checkpoint(_)
        | Command::Eval(_)
        | Command::Generate(_)
        | Command::Models(_)
        | Command::Clusters(_)
        | Command::Import(_)
        | Command::Other(_) => return None,
    };
    let has_picture = matches!(command, Command::Simulate(own) if own.has_picture())
        || matches!(command, Command::Gemm(own) if own.has_picture());
    Some(Study { name, usual, common, flags, has_picture })
}

/// Runs the study that the arguments request.
pub(super) fn run(
    study: &Study<'_>,
    arguments: &[OsString],
    origins: Origins,
) -> Result<(), Failure> {
    let definition = Cli::command();
    let command = definition.find_subcommand(study.name).unwrap_or(&definition);
    let result = |changes: &[Change]| result(study.name, arguments, &origins, changes);
    let subject = Subject { command, usual: study.usual, result: &result };
    sweep::run(study.flags, &subject, origins.clone(), &study.common.output())
}

/// Returns the command's result with the flags of `changes` replaced.
fn result(
    name: &'static str,
    arguments: &[OsString],
    origins: &Origins,
    changes: &[Change],
) -> Result<Value, Failure> {
    let mut arguments = arguments.to_vec();
    let mut definition = Cli::command();
    for Change { name: changed, value } in changes {
        if is_cluster_path(changed) {
            arguments.push(format!("--set={changed}={value}").into());
            continue;
        }
        let argument = definition.find_subcommand(name).and_then(|command| {
            command.get_arguments().find(|argument| argument.get_long() == Some(changed))
        });
        let Some(argument) = argument else {
            return Err(Failure::flag("--vary", format!("there is no {changed}")));
        };
        // The varied value overrides a typed one.
        let id = argument.get_id().clone();
        match (argument.get_action(), value.as_str()) {
            (ArgAction::SetTrue, "true") => arguments.push(format!("--{changed}").into()),
            (ArgAction::SetTrue, _) => {
                let switch = OsString::from(format!("--{changed}"));
                arguments.retain(|argument| *argument != switch);
            }
            _ => arguments.push(format!("--{changed}={value}").into()),
        }
        definition = definition.mut_subcommand(name, |command| {
            command.mut_arg(&id, |argument| argument.overrides_with(&id))
        });
    }
    let wrong = |error: clap::Error| {
        let mut problems = Problems::default();
        problems.located(error.to_string().lines().next().unwrap_or_default());
        Failure::Input(problems)
    };
    let matches = definition.try_get_matches_from(arguments).map_err(wrong)?;
    match Cli::from_arg_matches(&matches).map_err(wrong)?.command {
        Some(Command::Simulate(flags)) => simulate::result(&flags, origins.clone()),
        Some(Command::Plan(flags)) => plan::result(&flags, origins.clone()),
        Some(Command::Train(flags)) => train::result(&flags.job, origins.clone()),
        Some(Command::Collective(flags)) => collective::result(&flags, origins.clone()),
        Some(Command::Gemm(flags)) => gemm::result(&flags, origins.clone()),
        _ => Err(Failure::flag("--vary", "this command has no numbers to compare")),
    }
}
