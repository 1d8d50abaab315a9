//! The enum of commands; each command has its own file.

mod agent;
mod bench;
mod calibrate;
mod checkpoint;
mod clusters;
mod collective;
mod demo;
mod eval;
mod gemm;
mod generate;
mod import;
mod launch;
mod loaded_model;
mod models;
mod plan;
mod point;
mod report;
mod search;
mod simulate;
mod submit;
mod train;
mod validate;

use crate::failure::Failure;
use crate::flags::{Origins, Problems, config, suggest, wants_json};
use crate::output::escaped;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::borrow::Cow;
use std::ffi::OsString;
use std::io::Write;

/// Plans, simulates and runs distributed deep-learning training
///
/// Without a command, runs the demo: trains a small model on this machine's cores and shows the
/// prediction next to the measurement.
#[derive(Debug, Parser)]
#[command(
    name = "paceline",
    version,
    args_conflicts_with_subcommands = true,
    after_help = EXAMPLES,
    max_term_width = 100
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    demo: demo::Flags,
}

const EXAMPLES: &str = "\
Examples:
  paceline                                            the demo; Ctrl-C ends it cleanly
  paceline train --model mini --dp 2 --iterations 50  train for real, two ranks
  paceline plan --model gpt2-124m --tp 4 --pp 2       what each rank would do and need
  paceline simulate --model llama3-8b --tp 8 --dp 2 --cluster dgx-a100:2
                                                      how long it would take on 16 GPUs

`paceline COMMAND --help` explains a command. Exit status: 0 done, 1 the run failed, 2 the input is
wrong.";

/// Commands; each is documented at its flags.
#[derive(Debug, Subcommand)]
enum Command {
    Train(Box<train::Flags>),
    Launch(launch::Flags),
    Submit(submit::Flags),
    Agent(agent::Flags),
    Plan(Box<plan::Flags>),
    Simulate(Box<simulate::Flags>),
    Search(Box<search::Flags>),
    Validate(validate::Flags),
    Collective(Box<collective::Flags>),
    Gemm(Box<gemm::Flags>),
    Bench(Box<bench::Flags>),
    Calibrate(calibrate::Flags),
    Report(report::Flags),
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    Eval(eval::Flags),
    Generate(generate::Flags),
    Models(models::Flags),
    Clusters(clusters::Flags),
    Import(import::Flags),
    #[command(external_subcommand)]
    Other(Vec<String>),
}

/// Searches on all cores, without progress.
pub(crate) fn find_strategies(
    request: &paceline_search::Request<'_>,
) -> paceline_search::SearchResult {
    let result = search::pool::search(request, |_| true);
    let paceline_search::Counts { considered, simulated, .. } = result.counts;
    tracing::debug!(target: "search", considered, simulated, "searched");
    result
}

/// Commands that are specified but not available in this version.
const LATER: [&str; 1] = ["serve"];

/// Parses the arguments and runs the command. Sets `json` if a run file asks for JSON.
pub(crate) fn run(arguments: Vec<OsString>, json: &mut bool) -> Result<(), Failure> {
    let definition = Cli::command();
    let parse = |arguments: &[OsString], json| {
        Cli::command().try_get_matches_from(arguments).or_else(|error| refused(error, json))
    };
    let matches = parse(&arguments, *json)?;
    let (arguments, origins) = config::merge(arguments, &matches, &definition)?;
    *json |= wants_json(&arguments);
    let matches = parse(&arguments, *json)?;
    let (arguments, origins) = config::strategy(arguments, &matches, &definition, origins)?;
    let matches = parse(&arguments, *json)?;
    let arguments = config::resume_requeued(arguments, &matches);
    let matches = parse(&arguments, *json)?;
    let (arguments, origins) = config::resume(arguments, &matches, &definition, origins)?;
    let matches = parse(&arguments, *json)?;
    let cli = Cli::from_arg_matches(&matches).or_else(|error| refused(error, *json))?;
    match cli.command.as_ref().and_then(point::study) {
        Some(study) if study.flags.is_asked_for() => point::run(&study, &arguments, origins),
        Some(study) => {
            let mut problems = Problems::new(origins.clone());
            study.flags.absent(study.has_picture, &mut problems);
            if problems.is_empty() { dispatch(cli, origins) } else { Err(problems.into()) }
        }
        None => dispatch(cli, origins),
    }
}

/// Arguments of a training run, with `--json` if its launcher was asked for it.
fn with_json(words: &[String], json: bool) -> Vec<String> {
    let mut words = words.to_vec();
    if json && !words.iter().any(|word| word == "--json") {
        words.push("--json".to_owned());
    }
    words
}

/// Parses the arguments of a training run that another command starts.
fn parse_train(words: &[String]) -> Result<(Box<train::Flags>, Origins), Failure> {
    let wrong = |text: &str| Failure::flag("--", text);
    if words.first().map(String::as_str) != Some("train") {
        return Err(wrong("a training run follows: -- train --model NAME …"));
    }
    let arguments: Vec<OsString> = ["paceline"]
        .into_iter()
        .map(OsString::from)
        .chain(words.iter().map(OsString::from))
        .collect();
    let definition = Cli::command();
    let parse = |arguments: &[OsString]| {
        Cli::command().try_get_matches_from(arguments).or_else(|error| refused(error, false))
    };
    let matches = parse(&arguments)?;
    let (arguments, origins) = config::merge(arguments, &matches, &definition)?;
    let matches = parse(&arguments)?;
    let arguments = config::resume_requeued(arguments, &matches);
    let matches = parse(&arguments)?;
    let (arguments, origins) = config::resume(arguments, &matches, &definition, origins)?;
    let matches = parse(&arguments)?;
    let cli = Cli::from_arg_matches(&matches).or_else(|error| refused(error, false))?;
    match cli.command {
        Some(Command::Train(flags)) if !flags.sweep.is_asked_for() => Ok((flags, origins)),
        _ => Err(wrong("--vary runs on this machine alone; start one run")),
    }
}

/// Lets clap print help to standard output and exit with 0, or print its error and exit with 2.
/// With JSON, its error is an object like all others, without the usage.
fn refused<T>(error: clap::Error, json: bool) -> Result<T, Failure> {
    if !error.use_stderr() {
        error.exit();
    }
    if !json {
        let text = error.render().to_string();
        if let Cow::Owned(harmless) = escaped(&text) {
            // A message is lost if its stream is closed.
            let _ = write!(std::io::stderr(), "{harmless}");
            std::process::exit(2);
        }
        error.exit();
    }
    let text = error.to_string();
    let text = text.split("\n\nUsage:").next().unwrap_or_default();
    let lines = text.trim_start_matches("error: ").lines().map(str::trim);
    let mut problems = Problems::default();
    problems.located(lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; "));
    Err(Failure::Input(problems))
}

fn dispatch(cli: Cli, origins: Origins) -> Result<(), Failure> {
    match cli.command {
        None => demo::run(&cli.demo, origins),
        Some(Command::Train(flags)) => train::run(&flags, origins),
        Some(Command::Launch(flags)) => launch::run(&flags),
        Some(Command::Submit(flags)) => submit::run(&flags),
        Some(Command::Agent(flags)) => agent::run(&flags),
        Some(Command::Plan(flags)) => plan::run(&flags, origins),
        Some(Command::Simulate(flags)) => simulate::run(&flags, origins),
        Some(Command::Search(flags)) => search::run(&flags, origins),
        Some(Command::Validate(flags)) => validate::run(&flags, origins),
        Some(Command::Collective(flags)) => collective::run(&flags, origins),
        Some(Command::Gemm(flags)) => gemm::run(&flags, origins),
        Some(Command::Bench(flags)) => bench::run(&flags, origins),
        Some(Command::Calibrate(flags)) => calibrate::run(&flags, origins),
        Some(Command::Report(flags)) => report::run(&flags, origins),
        Some(Command::Checkpoint(command)) => checkpoint::run(&command),
        Some(Command::Eval(flags)) => eval::run(&flags, origins),
        Some(Command::Generate(flags)) => generate::run(&flags, origins),
        Some(Command::Models(flags)) => models::run(&flags),
        Some(Command::Clusters(flags)) => clusters::run(&flags),
        Some(Command::Import(flags)) => import::run(&flags),
        Some(Command::Other(words)) => Err(no_such_command(&words)),
    }
}

fn no_such_command(words: &[String]) -> Failure {
    let word = words.first().map_or("", String::as_str);
    let definition = Cli::command();
    let known: Vec<&str> = definition.get_subcommands().map(clap::Command::get_name).collect();
    let mut problems = Problems::default();
    if known.contains(&word) {
        // Flags before a command belong to the demo.
        problems.located(format!("flags stand after their command: `paceline {word} …`"));
    } else if LATER.contains(&word) {
        problems.located(format!(
            "`paceline {word}` is not available yet; available are: {}",
            known.join(", ")
        ));
    } else {
        let meant = match suggest(word, known.iter().copied()) {
            Some(meant) => format!(" (did you mean {meant}?)"),
            None => String::new(),
        };
        problems.located(format!(
            "paceline has no command '{word}'{meant}; it has: {}",
            known.join(", ")
        ));
    }
    Failure::Input(problems)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn commands_to_come_are_told_apart_from_mistyped_ones() {
        let told = |word: &str| no_such_command(&[word.to_owned()]).message().unwrap();
        assert!(told("serve").contains("not available yet"));
        assert!(told("simulat").contains("did you mean simulate?"));
    }
}
