//! Reader for the keys of model kinds with their own fields; records all problems.

use super::ModelKind;
use super::check::not_for;
use super::field::Field;
use super::fields::{Fields, Value, quoted};
use crate::suggest::suggest;
use std::ops::RangeInclusive;

/// Entries of a file, and the keys that have been read.
pub(super) struct Keys<'f> {
    fields: &'f mut Fields,
    kind: ModelKind,
    known: Vec<&'static str>,
}

impl<'f> Keys<'f> {
    pub(super) fn new(fields: &'f mut Fields, kind: ModelKind) -> Self {
        Self { fields, kind, known: vec!["name", "kind"] }
    }

    /// Reads a size within a range; required unless there is a default.
    pub(super) fn whole(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
        example: &str,
        default: Option<u64>,
    ) -> u64 {
        self.known.push(key);
        let given = self.fields.entries().get(key).map(|entry| match &entry.value {
            Value::Whole(whole) => match u64::try_from(*whole) {
                Ok(size) if range.contains(&size) => Ok(size),
                _ => Err((entry.line, whole.to_string())),
            },
            other => Err((entry.line, other.to_string())),
        });
        match (given, default) {
            (Some(Ok(size)), _) | (None, Some(size)) => return size,
            (Some(Err((line, shown))), _) => {
                let (first, last) = (range.start(), range.end());
                let remedy = format!("use a whole number from {first} to {last}");
                self.fields.note(line, format!("`{key}` is {shown}"), remedy);
            }
            (None, None) => self.missing(key, example),
        }
        *range.start()
    }

    /// Reads a list of `count` sizes within a range.
    pub(super) fn list(
        &mut self,
        key: &'static str,
        count: RangeInclusive<usize>,
        range: RangeInclusive<u64>,
        example: &str,
    ) -> Vec<u64> {
        self.known.push(key);
        let given = self.fields.entries().get(key).map(|entry| {
            let sizes = match &entry.value {
                Value::List(list) => {
                    let sizes: Option<Vec<u64>> =
                        list.iter().map(|size| u64::try_from((*size)?).ok()).collect();
                    sizes.filter(|sizes| {
                        count.contains(&sizes.len()) && sizes.iter().all(|s| range.contains(s))
                    })
                }
                _ => None,
            };
            sizes.ok_or_else(|| (entry.line, entry.value.to_string()))
        });
        match given {
            Some(Ok(sizes)) => return sizes,
            Some(Err((line, shown))) => {
                let remedy = format!(
                    "use {} to {} whole numbers from {} to {} such as {example}",
                    count.start(),
                    count.end(),
                    range.start(),
                    range.end()
                );
                self.fields.note(line, format!("`{key}` is {shown}"), remedy);
            }
            None => self.missing(key, example),
        }
        vec![*range.start(); *count.start()]
    }

    /// Reads a flag, or returns its default.
    pub(super) fn flag(&mut self, key: &'static str, default: bool) -> bool {
        self.known.push(key);
        let Some(entry) = self.fields.entries().get(key) else { return default };
        if let Value::Flag(flag) = entry.value {
            return flag;
        }
        let (line, problem) = (entry.line, format!("`{key}` is {}", entry.value));
        self.fields.note(line, problem, "use true or false");
        default
    }

    /// Reads one of several names, if it is given.
    pub(super) fn word(
        &mut self,
        key: &'static str,
        words: &[&'static str],
    ) -> Option<&'static str> {
        self.known.push(key);
        let entry = self.fields.entries().get(key)?;
        let found = match &entry.value {
            Value::Text(text) => words.iter().find(|word| *word == text),
            _ => None,
        };
        if let Some(word) = found {
            return Some(word);
        }
        let (line, problem) = (entry.line, format!("`{key}` is {}", entry.value));
        let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
        self.fields.note(line, problem, format!("use {}", quoted.join(" or ")));
        None
    }

    /// Records every entry that has not been read.
    pub(super) fn refuse_others(&mut self) {
        let mut notes = Vec::new();
        for (key, entry) in self.fields.entries() {
            if self.known.contains(&key.as_str()) {
                continue;
            }
            let other = Field::ALL.into_iter().any(|field| field.word() == key);
            let (problem, remedy) = if other {
                not_for(key, self.kind)
            } else {
                let remedy = match suggest(key, self.known.iter().copied()) {
                    Some(meant) => format!("did you mean `{meant}`?"),
                    None => format!("use one of {}", self.known.join(", ")),
                };
                (format!("{} is not a key of a model file", quoted(key)), remedy)
            };
            notes.push((entry.line, problem, remedy));
        }
        for (line, problem, remedy) in notes {
            self.fields.note(line, problem, remedy);
        }
    }

    fn missing(&mut self, key: &str, example: &str) {
        let line = self.fields.anchor();
        let remedy = format!("add a line such as `{key} = {example}`");
        self.fields.note(line, format!("`{key}` is missing"), remedy);
    }
}
