//! `--config` and `--resume`: flags from a TOML file.
//!
//! ```toml
//! model = "mini"
//! dp = 2
//! global-batch = 32
//!
//! [train]              # for `paceline train` only
//! iterations = 200
//! ```
//!
//! The file is converted to arguments, parsed as if they had been typed, except that typed ones
//! override them. Each flag's line is recorded, so that later error messages can name it. A resumed
//! run's settings are such a file too: what is typed, or stands in a run file, overrides them.

use super::file::read_text;
use super::{Origins, Problems, ResumedRun, suggest};
use clap::{ArgAction, ArgMatches, Command};
use paceline_plan::located::{self, Entry, Table, Value};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Merges the run file's arguments into `arguments`; also returns their lines in the file.
///
/// `matches` is the result of parsing `arguments` with `command`. Without a run file, the arguments
/// are returned unchanged.
pub(crate) fn merge(
    arguments: Vec<OsString>,
    matches: &ArgMatches,
    command: &Command,
) -> Result<(Vec<OsString>, Origins), Problems> {
    let Innermost { name, own, typed, depth } = innermost(matches, command);
    let file = typed.try_get_one::<String>("config").ok().flatten();
    let (Some(file), Some(own)) = (file, own) else {
        return Ok((arguments, Origins::default()));
    };
    let reader = Reader {
        flag: "--config",
        root: command,
        own,
        name,
        file,
        typed,
        base: None,
        left_out: Vec::new(),
        origins: Origins::default(),
        problems: Problems::default(),
        extra: Vec::new(),
    };
    reader.merged(arguments, depth)
}

/// Variable by which an agent asks for the continuation of a run that `--out` already has.
pub(crate) const CONTINUE: &str = "PACELINE_CONTINUE";

/// Adds `--resume` to a training run that its scheduler has started again, so that it continues where it
/// was: Slurm counts restarts, and an agent asks for it.
pub(crate) fn resume_requeued(mut arguments: Vec<OsString>, matches: &ArgMatches) -> Vec<OsString> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    let again = [CONTINUE, "SLURM_RESTART_COUNT"].iter().any(|name| number(name) > Some(0));
    let rank = std::env::var_os(crate::launch::RANK).is_some();
    let Some(("train", train)) = matches.subcommand().filter(|_| again && !rank) else {
        return arguments;
    };
    let given = |id: &str| train.try_get_one::<PathBuf>(id).ok().flatten();
    if let (None, Some(out)) = (given("resume"), given("out"))
        && ResumedRun::find(out).settings.is_some()
    {
        arguments.extend(["--resume".into(), out.into()]);
    }
    arguments
}

/// Merges the settings of the run that `--resume` names into `arguments`, which include those of a
/// run file. A run without settings changes nothing.
pub(crate) fn resume(
    arguments: Vec<OsString>,
    matches: &ArgMatches,
    command: &Command,
    origins: Origins,
) -> Result<(Vec<OsString>, Origins), Problems> {
    let Innermost { name, own, typed, depth } = innermost(matches, command);
    let resumed = typed.try_get_one::<PathBuf>("resume").ok().flatten();
    let run = resumed.map(|path| ResumedRun::find(path)).unwrap_or_default();
    let file = run.settings.as_ref().map(|file| file.display().to_string());
    let (Some(file), Some(own)) = (file, own) else { return Ok((arguments, origins)) };
    let given = |id: &str| typed.try_get_one::<String>(id).ok().flatten();
    let mut left_out = Vec::new();
    if run.has_checkpoint {
        left_out.push("init-from");
    }
    if given("tp").is_some_and(|tp| tp == "1") {
        left_out.push("sp");
    }
    if given("ranks").is_some() {
        left_out.push("dp");
    }
    let reader = Reader {
        flag: "--resume",
        root: command,
        own,
        name,
        file: &file,
        typed,
        base: run.settings.as_deref().and_then(Path::parent),
        left_out,
        origins,
        problems: Problems::default(),
        extra: Vec::new(),
    };
    reader.merged(arguments, depth)
}

/// Merges the strategy that `--strategy FILE` names into `arguments`: a run file, or the answer of
/// `paceline search --json`, whose first strategy counts. What is typed overrides it.
pub(crate) fn strategy(
    arguments: Vec<OsString>,
    matches: &ArgMatches,
    command: &Command,
    origins: Origins,
) -> Result<(Vec<OsString>, Origins), Problems> {
    let Innermost { name, own, typed, depth } = innermost(matches, command);
    let file = typed.try_get_one::<String>("strategy").ok().flatten();
    let (Some(file), Some(own)) = (file.filter(|file| *file != AUTO), own) else {
        return Ok((arguments, origins));
    };
    let reader = Reader {
        flag: "--strategy",
        root: command,
        own,
        name,
        file,
        typed,
        base: None,
        left_out: vec!["strategy"],
        origins,
        problems: Problems::default(),
        extra: Vec::new(),
    };
    reader.merged(arguments, depth)
}

/// Value of `--strategy` for a search.
pub(crate) const AUTO: &str = "auto";

/// The strategy of an answer in JSON as the text of a run file; other text unchanged.
fn as_run_file(text: String) -> String {
    let first = text.lines().next().unwrap_or_default();
    let Ok(serde_json::Value::Object(answer)) = serde_json::from_str(first) else { return text };
    let strategy = match answer.get("strategy") {
        Some(serde_json::Value::Object(strategy)) => strategy,
        _ => &answer,
    };
    let lines = strategy.iter().filter(|(_, value)| !value.is_object() && !value.is_array());
    lines.map(|(key, value)| format!("{key} = {value}\n")).collect()
}

/// The command to run: the innermost of nested ones.
struct Innermost<'a> {
    name: &'a str,
    own: Option<&'a Command>,
    typed: &'a ArgMatches,
    depth: usize,
}

fn innermost<'a>(matches: &'a ArgMatches, command: &'a Command) -> Innermost<'a> {
    let mut found = Innermost { name: "", own: Some(command), typed: matches, depth: 0 };
    // `bench train` is a nested command, and reads the section [train].
    while let Some((name, typed)) = found.typed.subcommand() {
        let own = found.own.and_then(|command| command.find_subcommand(name));
        found = Innermost { name, own, typed, depth: found.depth + 1 };
    }
    found
}

/// Flags whose relative path lies beside the settings of a resumed run.
const BESIDE: [&str; 2] = ["model", "tokenizer"];

struct Reader<'a> {
    /// The flag that names the file.
    flag: &'static str,
    root: &'a Command,
    /// The command to run.
    own: &'a Command,
    /// Its name; empty for the demo.
    name: &'a str,
    file: &'a str,
    typed: &'a ArgMatches,
    /// Directory of a resumed run's settings.
    base: Option<&'a Path>,
    /// Flags that are not taken over.
    left_out: Vec<&'static str>,
    origins: Origins,
    problems: Problems,
    extra: Vec<OsString>,
}

impl Reader<'_> {
    /// Reads the file, and adds its arguments to those that were typed.
    fn merged(
        mut self,
        mut arguments: Vec<OsString>,
        depth: usize,
    ) -> Result<(Vec<OsString>, Origins), Problems> {
        self.read();
        if !self.problems.is_empty() {
            return Err(self.problems);
        }
        // The command comes first; its arguments from the file follow it.
        let at = arguments.len().min(1 + depth);
        arguments.splice(at..at, self.extra);
        Ok((arguments, self.origins))
    }

    fn read(&mut self) {
        let text = match read_text(Path::new(self.file)) {
            Ok(text) => as_run_file(text),
            Err(what) => {
                return self.problems.add(self.flag, format!("{} {what}", self.file));
            }
        };
        let table = match located::parse(&text, self.file) {
            Ok(table) => table,
            Err(errors) => return self.problems.located(errors),
        };
        // Keys of the command's own section override the keys shared by all commands.
        let (mut shared, mut sections) = (Vec::new(), Vec::new());
        for (key, entry) in &table.entries {
            match &entry.value {
                Value::Table(section) => sections.push((key, entry.line, section)),
                _ => shared.push((key, entry)),
            }
        }
        let own_keys: Vec<String> = sections
            .iter()
            .filter(|(name, ..)| *name == self.name)
            .flat_map(|(.., section)| section.entries.keys().map(|key| flag_name(key)))
            .collect();
        for (key, entry) in shared {
            let overridden = own_keys.contains(&flag_name(key));
            self.entry(self.own, key, entry, None, !overridden);
        }
        for (name, line, section) in sections {
            self.section(name, line, section);
        }
    }

    /// Reads the section of one command; another command's section is only checked.
    fn section(&mut self, word: &str, line: usize, table: &Table) {
        let Some(command) = self.root.find_subcommand(word) else {
            let known = self.root.get_subcommands().map(Command::get_name);
            let meant = did_you_mean(word, known);
            return self.problems.located(format!(
                "{}:{line}: [{word}] is not a command of paceline{meant}",
                self.file
            ));
        };
        let runs = word == self.name;
        for (key, entry) in &table.entries {
            self.entry(command, key, entry, Some(word), runs);
        }
    }

    /// Reads one key of a section, which must be a flag of `command`; uses it if `runs`.
    fn entry(
        &mut self,
        command: &Command,
        key: &str,
        entry: &Entry,
        section: Option<&str>,
        runs: bool,
    ) {
        let name = flag_name(key);
        let at = format!("{}:{}", self.file, entry.line);
        let flags = || command.get_arguments().filter(|a| a.get_long().is_some());
        let known = flags().find(|a| a.get_long() == Some(&name));
        let Some(flag) = known.filter(|_| name != "config" && name != "help") else {
            let why = self.unknown(command, &name, section);
            return self.problems.located(format!("{at}: `{key}` {why}"));
        };
        let switch = matches!(flag.get_action(), ArgAction::SetTrue);
        let repeats = matches!(flag.get_action(), ArgAction::Append);
        if let (Value::List(values), true) = (&entry.value, repeats) {
            return values.iter().for_each(|value| self.entry(command, key, value, section, runs));
        }
        let argument = match (&entry.value, switch) {
            (Value::Flag(true), true) => Ok(format!("--{name}")),
            (Value::Flag(false), true) => return,
            (Value::Text(text), false) => Ok(format!("--{name}={}", self.located(&name, text))),
            (number @ (Value::Whole(_) | Value::Real(_)), false) => {
                Ok(format!("--{name}={number}"))
            }
            (Value::Text(_) | Value::Whole(_) | Value::Real(_), true) => {
                Err("takes true or false".to_owned())
            }
            (Value::Flag(_), false) => Err("takes a value, not true or false".to_owned()),
            (value @ (Value::List(_) | Value::Table(_) | Value::Other(_)), _) => {
                Err(format!("is {value}; a flag takes a number or a text"))
            }
        };
        let argument = match argument {
            Ok(argument) => argument,
            Err(why) => return self.problems.located(format!("{at}: `{key}` {why}")),
        };
        let id = flag.get_id().as_str();
        let typed = self.typed.try_contains_id(id).unwrap_or(false)
            && self.typed.value_source(id) == Some(clap::parser::ValueSource::CommandLine);
        if runs && !typed && !self.left_out.contains(&name.as_str()) {
            self.origins.note(format!("--{name}"), at);
            self.extra.push(argument.into());
        }
    }

    /// The value of a flag; a file beside the settings of a resumed run is found from anywhere.
    fn located(&self, name: &str, text: &str) -> String {
        let beside = self.base.filter(|_| BESIDE.contains(&name)).map(|base| base.join(text));
        match beside.filter(|path| path.is_file()) {
            Some(path) => path.display().to_string(),
            None => text.to_owned(),
        }
    }

    /// Explains that a key is not a flag of a command, and suggests another.
    fn unknown(&self, command: &Command, name: &str, section: Option<&str>) -> String {
        let label = match (section, self.name) {
            (Some(section), _) => format!("`paceline {section}`"),
            (None, "") => "the demo".to_owned(),
            (None, name) => format!("`paceline {name}`"),
        };
        if name == "config" {
            return "cannot stand in a run file".to_owned();
        }
        let long = |command: &Command, name: &str| {
            command.get_arguments().any(|flag| flag.get_long() == Some(name))
        };
        let other = self.root.get_subcommands().find(|other| long(other, name));
        match (other, section) {
            (Some(other), None) => {
                let other = other.get_name();
                format!(
                    "is not a flag of {label}, but of `paceline {other}`; put it under [{other}]"
                )
            }
            _ => {
                let known = command.get_arguments().filter_map(|flag| flag.get_long());
                format!("is not a flag of {label}{}", did_you_mean(name, known))
            }
        }
    }
}

/// Converts a key to a flag name; `global_batch` is accepted in files.
fn flag_name(key: &str) -> String {
    key.replace('_', "-")
}

fn did_you_mean<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    match suggest(word, known) {
        Some(meant) => format!(" (did you mean `{meant}`?)"),
        None => String::new(),
    }
}
