//! `--config`: reads flags from a TOML file.
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
//! override them. Each flag's line is recorded, so that later error messages can name it.

use super::file::read_text;
use super::{Origins, Problems, suggest};
use clap::{ArgAction, ArgMatches, Command};
use std::ffi::OsString;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Merges the run file's arguments into `arguments`; also returns their lines in the file.
///
/// `matches` is the result of parsing `arguments` with `command`. Without a run file, the arguments
/// are returned unchanged.
pub(crate) fn merge(
    arguments: Vec<OsString>,
    matches: &ArgMatches,
    command: &Command,
) -> Result<(Vec<OsString>, Origins), Problems> {
    let (mut name, mut own, mut typed, mut depth) = ("", Some(command), matches, 0);
    // `bench train` is a nested command, and reads the section [train].
    while let Some((inner, inner_typed)) = typed.subcommand() {
        own = own.and_then(|command| command.find_subcommand(inner));
        (name, typed, depth) = (inner, inner_typed, depth + 1);
    }
    let file = typed.try_get_one::<String>("config").ok().flatten();
    let (Some(file), Some(own)) = (file, own) else {
        return Ok((arguments, Origins::default()));
    };
    let mut reader = Reader {
        root: command,
        own,
        name,
        file,
        typed,
        origins: Origins::default(),
        problems: Problems::default(),
        extra: Vec::new(),
    };
    reader.read();
    if !reader.problems.is_empty() {
        return Err(reader.problems);
    }
    // The command comes first; its arguments from the file follow it.
    let at = arguments.len().min(1 + depth);
    let mut merged = arguments;
    merged.splice(at..at, reader.extra);
    Ok((merged, reader.origins))
}

struct Reader<'a> {
    root: &'a Command,
    /// The command to run.
    own: &'a Command,
    /// Its name; empty for the demo.
    name: &'a str,
    file: &'a str,
    typed: &'a ArgMatches,
    origins: Origins,
    problems: Problems,
    extra: Vec<OsString>,
}

impl Reader<'_> {
    fn read(&mut self) {
        let text = match read_text(Path::new(self.file)) {
            Ok(text) => text,
            Err(what) => {
                return self.problems.add("--config", format!("{} {what}", self.file));
            }
        };
        let (document, syntax) = DeTable::parse_recoverable(&text);
        for error in &syntax {
            let line = line(&text, error.span().map_or(0, |span| span.start));
            let message = error.message().replace('\n', ", ");
            self.problems.located(format!("{}:{line}: not TOML: {message}", self.file));
        }
        if !syntax.is_empty() {
            return;
        }
        // Keys of the command's own section override the keys shared by all commands.
        let (mut shared, mut sections) = (Vec::new(), Vec::new());
        for (key, value) in document.get_ref() {
            match value.get_ref() {
                DeValue::Table(section) => sections.push((key, section)),
                _ => shared.push((key, value)),
            }
        }
        let own_keys: Vec<String> = sections
            .iter()
            .filter(|(name, _)| *name.get_ref() == self.name)
            .flat_map(|(_, section)| section.keys().map(|key| flag_name(key.get_ref())))
            .collect();
        for (key, value) in shared {
            let place = KeyOrigin { line: line(&text, key.span().start), section: None };
            let overridden = own_keys.contains(&flag_name(key.get_ref()));
            self.entry(self.own, key.get_ref(), value, &place, !overridden);
        }
        for (name, section) in sections {
            self.section(&text, name, section);
        }
    }

    /// Reads the section of one command; another command's section is only checked.
    fn section(&mut self, text: &str, name: &Spanned<std::borrow::Cow<'_, str>>, table: &DeTable) {
        let word = name.get_ref().as_ref();
        let Some(command) = self.root.find_subcommand(word) else {
            let line = line(text, name.span().start);
            let known = self.root.get_subcommands().map(Command::get_name);
            let meant = did_you_mean(word, known);
            return self.problems.located(format!(
                "{}:{line}: [{word}] is not a command of paceline{meant}",
                self.file
            ));
        };
        let runs = word == self.name;
        for (key, value) in table {
            let place = KeyOrigin { line: line(text, key.span().start), section: Some(word) };
            self.entry(command, key.get_ref(), value, &place, runs);
        }
    }

    /// Reads one key, which must be a flag of `command`; uses it if `runs`.
    fn entry(
        &mut self,
        command: &Command,
        key: &str,
        value: &Spanned<DeValue<'_>>,
        place: &KeyOrigin<'_>,
        runs: bool,
    ) {
        let name = flag_name(key);
        let at = format!("{}:{}", self.file, place.line);
        let flags = || command.get_arguments().filter(|a| a.get_long().is_some());
        let known = flags().find(|a| a.get_long() == Some(&name));
        let Some(flag) = known.filter(|_| name != "config" && name != "help") else {
            let why = self.unknown(command, &name, place);
            return self.problems.located(format!("{at}: `{key}` {why}"));
        };
        let switch = matches!(flag.get_action(), ArgAction::SetTrue);
        let repeats = matches!(flag.get_action(), ArgAction::Append);
        if let (DeValue::Array(values), true) = (value.get_ref(), repeats) {
            return values.iter().for_each(|value| self.entry(command, key, value, place, runs));
        }
        let argument = match (argument(value.get_ref()), switch) {
            (Argument::Switch(true), true) => format!("--{name}"),
            (Argument::Switch(false), true) => return,
            (Argument::Text(text), false) => format!("--{name}={text}"),
            (Argument::Text(_), true) => {
                return self.problems.located(format!("{at}: `{key}` takes true or false"));
            }
            (Argument::Switch(_), false) => {
                let text = format!("{at}: `{key}` takes a value, not true or false");
                return self.problems.located(text);
            }
            (Argument::Neither(what), _) => {
                let text = format!("{at}: `{key}` is {what}; a flag takes a number or a text");
                return self.problems.located(text);
            }
        };
        let id = flag.get_id().as_str();
        let typed = self.typed.try_contains_id(id).unwrap_or(false)
            && self.typed.value_source(id) == Some(clap::parser::ValueSource::CommandLine);
        if runs && !typed {
            self.origins.note(format!("--{name}"), at);
            self.extra.push(argument.into());
        }
    }

    /// Explains that a key is not a flag of a command, and suggests another.
    fn unknown(&self, command: &Command, name: &str, place: &KeyOrigin<'_>) -> String {
        let label = match (place.section, self.name) {
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
        match (other, place.section) {
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

/// Location of an entry in the run file.
struct KeyOrigin<'a> {
    line: usize,
    /// The table that contains it.
    section: Option<&'a str>,
}

/// A TOML value as a command-line argument.
enum Argument {
    Switch(bool),
    Text(String),
    Neither(&'static str),
}

fn argument(value: &DeValue<'_>) -> Argument {
    match value {
        DeValue::Boolean(on) => Argument::Switch(*on),
        DeValue::String(text) => Argument::Text(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => Argument::Text(number.to_string()),
        DeValue::Integer(number) => match u128::from_str_radix(number.as_str(), number.radix()) {
            Ok(value) => Argument::Text(value.to_string()),
            Err(_) => Argument::Text(number.to_string()),
        },
        DeValue::Float(number) => Argument::Text(number.to_string()),
        DeValue::Datetime(_) => Argument::Neither("a date"),
        DeValue::Array(_) => Argument::Neither("an array"),
        DeValue::Table(_) => Argument::Neither("a table"),
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

/// Line number of a byte offset, counted from 1.
fn line(text: &str, at: usize) -> usize {
    1 + text.bytes().take(at).filter(|byte| *byte == b'\n').count()
}
