//! Located TOML: the values of a file with their lines, and a record of all its problems.
//!
//! Model, cluster and run files are read through this module. A problem never ends the reading: it
//! is recorded with its line and a remedy, and all problems of a file are reported at once.

use crate::suggest::suggest;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use thiserror::Error;
use toml::de::{DeTable, DeValue};

/// All problems of one description, so that it can be fixed in one pass.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct Errors {
    /// The file as the caller named it, or the name of a description that is in no file.
    pub file: String,
    /// The problems; sorted by line once reading has ended.
    pub problems: Vec<Problem>,
}

/// One problem of a description.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Line number, counted from 1, if there is a file.
    pub line: Option<usize>,
    /// Description of the problem.
    pub what: String,
    /// A change that would fix it.
    pub remedy: String,
}

/// One table of a file.
#[derive(Clone, Debug)]
pub struct Table {
    /// Line on which it begins.
    pub line: usize,
    /// Its keys and values.
    pub entries: BTreeMap<String, Entry>,
}

/// A value and the line of its key, or its own line in a list.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Line number, counted from 1.
    pub line: usize,
    /// The value.
    pub value: Value,
}

/// A value, with the distinctions that readers need.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names are TOML's")]
pub enum Value {
    Flag(bool),
    Whole(i128),
    Real(f64),
    Text(String),
    List(Vec<Entry>),
    Table(Table),
    /// Anything else, as a description: "a date".
    Other(&'static str),
}

/// A table and its name in messages.
#[derive(Debug)]
pub struct Section<'a> {
    /// The table.
    pub table: &'a Table,
    /// Its name: "[device]".
    pub label: String,
}

/// Parses a file, with its name for messages.
pub fn parse(text: &str, file: &str) -> Result<Table, Errors> {
    let line_ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
    let line_at = |offset: usize| 1 + line_ends.partition_point(|end| *end < offset);
    let (table, syntax) = DeTable::parse_recoverable(text);
    // After a syntax error half the file may be missing; reporting missing keys would not help.
    if syntax.is_empty() {
        return Ok(table_of(table.get_ref(), 1, &line_at));
    }
    let mut errors = Errors::new(file);
    for error in &syntax {
        let line = line_at(error.span().map_or(0, |span| span.start));
        let message = error.message().replace('\n', ", ");
        errors.add(line, format!("not TOML: {message}"), "write `key = value`, one a line");
    }
    Err(errors.sorted())
}

fn table_of(table: &DeTable<'_>, line: usize, line_at: &impl Fn(usize) -> usize) -> Table {
    let entry = |(key, value): (&toml::Spanned<_>, &toml::Spanned<DeValue<'_>>)| {
        let name: &std::borrow::Cow<'_, str> = key.get_ref();
        (
            name.to_string(),
            Entry { line: line_at(key.span().start), value: value_of(value, line_at) },
        )
    };
    Table { line, entries: table.iter().map(entry).collect() }
}

fn value_of(value: &toml::Spanned<DeValue<'_>>, line_at: &impl Fn(usize) -> usize) -> Value {
    let line = |value: &toml::Spanned<DeValue<'_>>| line_at(value.span().start);
    match value.get_ref() {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(whole) => match i128::from_str_radix(whole.as_str(), whole.radix()) {
            Ok(whole) => Value::Whole(whole),
            Err(_) => Value::Other("a number too large to hold"),
        },
        DeValue::Float(real) => Value::Real(real.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(flag) => Value::Flag(*flag),
        DeValue::Datetime(_) => Value::Other("a date"),
        DeValue::Array(list) => {
            let entry = |item| Entry { line: line(item), value: value_of(item, line_at) };
            Value::List(list.iter().map(entry).collect())
        }
        DeValue::Table(table) => Value::Table(table_of(table, line(value), line_at)),
    }
}

impl Value {
    /// The number, if it is one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Real(real) => Some(*real),
            Self::Whole(whole) => Some(*whole as f64),
            _ => None,
        }
    }

    /// The whole number, if it is one in the range.
    pub fn whole(&self, range: RangeInclusive<u64>) -> Option<u64> {
        let Self::Whole(whole) = self else { return None };
        u64::try_from(*whole).ok().filter(|size| range.contains(size))
    }

    /// The flag, if it is one.
    pub fn flag(&self) -> Option<bool> {
        if let Self::Flag(flag) = self { Some(*flag) } else { None }
    }

    /// The text, if it is one.
    pub fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// The list, if it is one.
    pub fn list(&self) -> Option<&[Entry]> {
        if let Self::List(list) = self { Some(list) } else { None }
    }

    /// The table, if it is one.
    pub fn table(&self) -> Option<&Table> {
        if let Self::Table(table) = self { Some(table) } else { None }
    }
}

impl<'a> Section<'a> {
    /// Value of a key.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.table.entries.get(key).map(|entry| &entry.value)
    }

    /// Line of a key, or of the section if it lacks the key.
    pub fn line_of(&self, key: &str) -> usize {
        self.table.entries.get(key).map_or(self.table.line, |entry| entry.line)
    }
}

impl Errors {
    /// Creates an empty record.
    pub fn new(file: impl Into<String>) -> Self {
        Self { file: file.into(), problems: Vec::new() }
    }

    /// Creates a record of one problem.
    pub fn one(
        file: impl Into<String>,
        line: impl Into<Option<usize>>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let mut errors = Self::new(file);
        errors.add(line, what, remedy);
        errors
    }

    /// Records a problem.
    pub fn add(
        &mut self,
        line: impl Into<Option<usize>>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let (line, what, remedy) = (line.into(), what.into(), remedy.into());
        self.problems.push(Problem { line, what, remedy });
    }

    /// Sorts by line and removes duplicates: one wrong number can violate two rules.
    pub fn sorted(mut self) -> Self {
        self.problems.sort();
        self.problems.dedup();
        self
    }

    /// Reads a required key; a key that is absent or unfit is recorded.
    pub fn required<T>(
        &mut self,
        section: &Section<'_>,
        key: &str,
        example: &str,
        read: impl Fn(&Value) -> Result<T, String>,
    ) -> Option<T> {
        if section.get(key).is_none() {
            let what = format!("{} has no {key}", section.label);
            self.add(section.table.line, what, format!("add for example {key} = {example}"));
        }
        self.given(section, key, example, read).flatten()
    }

    /// Reads a key that may be absent; an unfit value is recorded.
    pub fn given<T>(
        &mut self,
        section: &Section<'_>,
        key: &str,
        example: &str,
        read: impl Fn(&Value) -> Result<T, String>,
    ) -> Option<Option<T>> {
        self.optional(section, key, example, |value| read(value).map(Some), None)
    }

    /// Reads a key with a default; an unfit value is recorded.
    pub fn optional<T>(
        &mut self,
        section: &Section<'_>,
        key: &str,
        example: &str,
        read: impl Fn(&Value) -> Result<T, String>,
        absent: T,
    ) -> Option<T> {
        let Some(value) = section.get(key) else { return Some(absent) };
        let why = match read(value) {
            Ok(value) => return Some(value),
            Err(why) => why,
        };
        let what = format!("{} has {key} = {value}: {why}", section.label);
        self.add(section.line_of(key), what, format!("write for example {key} = {example}"));
        None
    }

    /// Reads a required table.
    pub fn table<'a>(
        &mut self,
        parent: &Section<'a>,
        key: &str,
        label: &str,
    ) -> Option<Section<'a>> {
        let Some(entry) = parent.table.entries.get(key) else {
            let what = format!("{} has no {label}", parent.label);
            self.add(parent.table.line, what, format!("add a {label} table"));
            return None;
        };
        self.as_table(entry, label.to_owned())
    }

    /// Reads a value that must be a table.
    pub fn as_table<'a>(&mut self, entry: &'a Entry, label: String) -> Option<Section<'a>> {
        if let Value::Table(table) = &entry.value {
            return Some(Section { table, label });
        }
        let what = format!("{label} is {}", entry.value);
        self.add(entry.line, what, "make it a table of keys and values");
        None
    }

    /// Records every key of a section that is not among the known ones.
    pub fn known_keys(&mut self, section: &Section<'_>, known: &[&str]) {
        for (key, entry) in &section.table.entries {
            if !known.contains(&key.as_str()) {
                let what = format!("{} has an unknown key '{}'", section.label, short(key));
                self.add(entry.line, what, meant(key, known));
            }
        }
    }
}

/// Remedy for an unknown key: the nearest known one, or all of them.
pub fn meant(key: &str, known: &[&str]) -> String {
    match suggest(key, known.iter().copied()) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => format!("use one of {}", known.join(", ")),
    }
}

/// User text, truncated if too long.
pub fn short(text: &str) -> String {
    const LONGEST: usize = 40;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", text[..end].escape_debug()),
        None => text.escape_debug().to_string(),
    }
}

/// User text in quotes, truncated if too long.
pub fn quoted(text: &str) -> String {
    format!("\"{}\"", short(text))
}

impl fmt::Display for Value {
    /// Formats the value as written, truncated if too long.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(whole) => whole.fmt(f),
            Self::Real(real) => write!(f, "{real:?}"),
            Self::Flag(flag) => flag.fmt(f),
            Self::Text(text) => f.write_str(&quoted(text)),
            Self::List(list) if list.is_empty() => f.write_str("an empty list"),
            Self::List(_) => f.write_str("a list"),
            Self::Table(_) => f.write_str("a table"),
            Self::Other(what) => f.write_str(what),
        }
    }
}

impl fmt::Display for Errors {
    /// One problem per line: `file:12: what; remedy`, as editors and compilers write it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Problem { line, what, remedy }) in self.problems.iter().enumerate() {
            write!(f, "{}{}", if index == 0 { "" } else { "\n" }, self.file)?;
            if let Some(line) = line {
                write!(f, ":{line}")?;
            }
            write!(f, ": {what}; {remedy}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_lines_of_their_keys() {
        let table =
            parse("a = 1\n\n[b]\nc = [\n  2,\n  'x',\n]\n[[d]]\n[[d]]\ne = 1\n", "f.toml").unwrap();
        let entry = |table: &Table, key: &str| table.entries[key].line;
        assert_eq!((table.line, entry(&table, "a"), entry(&table, "b")), (1, 1, 3));
        let section = table.entries["b"].value.table().unwrap();
        assert_eq!((section.line, entry(section, "c")), (3, 4));
        let list = section.entries["c"].value.list().unwrap();
        assert_eq!(list.iter().map(|item| item.line).collect::<Vec<_>>(), [5, 6]);
        let tables = table.entries["d"].value.list().unwrap();
        let lines: Vec<_> = tables.iter().map(|item| item.value.table().unwrap().line).collect();
        assert_eq!(lines, [8, 9]);
    }

    #[test]
    fn all_syntax_errors_are_told_with_their_lines() {
        let told = parse("a = = 1\nb = 2\nb = 3\n", "f.toml").unwrap_err().to_string();
        let lines: Vec<_> = told.lines().collect();
        assert!(lines[0].starts_with("f.toml:1: not TOML: "), "{told}");
        assert!(told.contains("\nf.toml:3: not TOML: "), "the repeated key is told too: {told}");
        assert!(lines.iter().all(|line| line.ends_with("; write `key = value`, one a line")));
    }
}
