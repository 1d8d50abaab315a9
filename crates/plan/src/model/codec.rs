//! Reading and writing of descriptions by one function per format.
//!
//! A format states its keys once, in the order of writing. [`Codec`] reads each from a file, with
//! the format's default for a missing one, or writes it.

use super::field::Field;
use super::fields::Fields;
use crate::located::{Entry, Value};
use serde_json::{Map, Value as Json};
use std::collections::BTreeSet;

/// One direction of a format.
pub(super) struct Codec<'f> {
    side: Side<'f>,
    /// True if values that equal their default are not written.
    terse: bool,
    /// Keys of the format that were met.
    known: BTreeSet<&'static str>,
}

enum Side<'f> {
    Read(&'f mut Fields),
    Write(Map<String, Json>),
}

impl<'f> Codec<'f> {
    /// Reads from a file.
    pub(super) fn reader(fields: &'f mut Fields) -> Self {
        Self { side: Side::Read(fields), terse: false, known: BTreeSet::new() }
    }

    /// Writes every key.
    pub(super) fn writer() -> Self {
        Self { side: Side::Write(Map::new()), terse: false, known: BTreeSet::new() }
    }

    /// Writes the keys whose values are not their defaults.
    pub(super) fn terse_writer() -> Self {
        Self { terse: true, ..Self::writer() }
    }

    /// Returns the written keys.
    pub(super) fn written(self) -> Map<String, Json> {
        match self.side {
            Side::Read(_) => Map::new(),
            Side::Write(map) => map,
        }
    }

    /// Keys of the format.
    pub(super) fn known(&self) -> &BTreeSet<&'static str> {
        &self.known
    }

    /// Returns true when writing.
    pub(super) const fn writes(&self) -> bool {
        matches!(self.side, Side::Write(_))
    }

    /// Declares keys that have no effect on the computation.
    pub(super) fn ignore(&mut self, keys: &[&'static str]) {
        self.known.extend(keys);
    }

    /// Entry of a key that is not null, when reading.
    pub(super) fn entry(&mut self, key: &'static str) -> Option<&Entry> {
        self.known.insert(key);
        match &self.side {
            Side::Read(fields) => fields.entries().get(key).filter(|entry| !is_null(&entry.value)),
            Side::Write(_) => None,
        }
    }

    /// Returns true if a key is null, when reading.
    pub(super) fn is_null(&self, key: &str) -> bool {
        match &self.side {
            Side::Read(fields) => {
                fields.entries().get(key).is_some_and(|entry| is_null(&entry.value))
            }
            Side::Write(_) => false,
        }
    }

    /// Value of a key, when reading.
    pub(super) fn value(&mut self, key: &'static str) -> Option<Value> {
        self.entry(key).map(|entry| entry.value.clone())
    }

    /// Writes a key, when writing.
    pub(super) fn put(&mut self, key: &'static str, value: impl Into<Json>) {
        self.known.insert(key);
        if let Side::Write(map) = &mut self.side {
            map.insert(key.to_owned(), value.into());
        }
    }

    /// Records a problem with a key, when reading.
    pub(super) fn refuse(&mut self, key: &str, problem: String, remedy: impl Into<String>) {
        if let Side::Read(fields) = &mut self.side {
            let line = fields.entries().get(key).map_or(fields.anchor(), |entry| entry.line);
            fields.note(line, problem, remedy);
        }
    }

    fn any<T: Clone + PartialEq>(
        &mut self,
        key: &'static str,
        at: &mut T,
        default: T,
        fit: impl FnOnce(&Value) -> Option<T>,
        write: impl FnOnce(&T) -> Json,
        remedy: impl FnOnce() -> String,
    ) {
        self.known.insert(key);
        let null = self.is_null(key);
        match &mut self.side {
            Side::Read(_) if null => *at = default,
            Side::Read(fields) => {
                let found = fields.read(key, fit, remedy);
                *at = found.unwrap_or_else(|| Some(default.clone())).unwrap_or(default);
            }
            Side::Write(map) => {
                if !self.terse || *at != default {
                    map.insert(key.to_owned(), write(at));
                }
            }
        }
    }

    /// A required size.
    pub(super) fn size(&mut self, field: Field, key: &'static str, at: &mut u64) {
        self.known.insert(key);
        match &mut self.side {
            Side::Read(fields) => {
                fields.words.declare(field, key);
                *at = fields.size(field);
            }
            Side::Write(map) => {
                map.insert(key.to_owned(), (*at).into());
            }
        }
    }

    /// A size with a default.
    pub(super) fn size_or(&mut self, field: Field, key: &'static str, at: &mut u64, default: u64) {
        self.known.insert(key);
        match &mut self.side {
            Side::Read(fields) => {
                fields.words.declare(field, key);
                *at = fields.size_if_given(field).unwrap_or(default);
            }
            Side::Write(map) => {
                map.insert(key.to_owned(), (*at).into());
            }
        }
    }

    /// The width of a head, an equal share of the model's width by default.
    pub(super) fn head_dim(&mut self, key: Option<&'static str>, sizes: (u64, u64), at: &mut u64) {
        self.known.extend(key);
        let (d_model, heads) = sizes;
        match &mut self.side {
            Side::Read(fields) => {
                if let Some(key) = key {
                    fields.words.declare(Field::HeadDim, key);
                }
                *at = fields.head_dim(d_model, heads);
            }
            Side::Write(map) => {
                if let Some(key) = key {
                    map.insert(key.to_owned(), (*at).into());
                }
            }
        }
    }

    /// A number that is a field of every model.
    pub(super) fn real(&mut self, field: Field, key: &'static str, at: &mut f64, default: f64) {
        if let Side::Read(fields) = &mut self.side {
            fields.words.declare(field, key);
        }
        self.number(key, at, default);
    }

    /// A number with a default.
    pub(super) fn number(&mut self, key: &'static str, at: &mut f64, default: f64) {
        let fit = |value: &Value| value.number().filter(|number| number.is_finite());
        self.any(
            key,
            at,
            default,
            fit,
            |&n| n.into(),
            || format!("use a number such as {default:?}"),
        );
    }

    /// A whole number with a default.
    pub(super) fn whole(&mut self, key: &'static str, at: &mut u64, default: u64) {
        let fit = |value: &Value| value.whole(0..=1 << 48);
        self.any(key, at, default, fit, |&n| n.into(), || "use a whole number".to_owned());
    }

    /// A flag with a default.
    pub(super) fn flag(&mut self, key: &'static str, at: &mut bool, default: bool) {
        self.any(
            key,
            at,
            default,
            Value::flag,
            |&flag| flag.into(),
            || "use true or false".to_owned(),
        );
    }

    /// A text with a default.
    pub(super) fn text(&mut self, key: &'static str, at: &mut String, default: &str) {
        let fit = |value: &Value| value.text().map(str::to_owned);
        let write = |text: &String| text.as_str().into();
        self.any(key, at, default.to_owned(), fit, write, || "use a text in quotes".to_owned());
    }

    /// A list of numbers, empty by default.
    pub(super) fn numbers(&mut self, key: &'static str, at: &mut Vec<f64>) {
        let fit = |value: &Value| {
            value.list()?.iter().map(|entry| entry.value.number()).collect::<Option<Vec<f64>>>()
        };
        let write = |list: &Vec<f64>| list.clone().into();
        self.any(key, at, Vec::new(), fit, write, || "use a list of numbers".to_owned());
    }

    /// One of several words.
    pub(super) fn word<T: Clone + PartialEq>(
        &mut self,
        key: &'static str,
        at: &mut T,
        words: &[(&'static str, T)],
        default: T,
    ) {
        let fit = |value: &Value| {
            let text = value.text()?;
            words.iter().find(|(word, _)| *word == text).map(|(_, value)| value.clone())
        };
        let write = |value: &T| {
            let found = words.iter().find(|(_, known)| known == value);
            found.map_or(Json::Null, |(word, _)| (*word).into())
        };
        self.any(key, at, default, fit, write, || {
            let quoted: Vec<String> = words.iter().map(|(word, _)| format!("\"{word}\"")).collect();
            format!("use {}", quoted.join(" or "))
        });
    }

    /// A key of which only one value can be represented, which is the default.
    pub(super) fn only(&mut self, key: &'static str, value: impl Into<Json>) {
        let value = value.into();
        match self.value(key) {
            Some(found) if !same(&found, &value) => {
                let problem = format!("`{key}` is {found}: it cannot be represented");
                self.refuse(key, problem, format!("only {value} can; use a model that has it so"));
            }
            Some(_) | None => self.put(key, value),
        }
    }
}

/// Representation of an explicit null.
pub(super) const NULL: &str = "null";

/// Returns true for an explicit null, which mostly means the same as a missing entry.
pub(super) fn is_null(value: &Value) -> bool {
    matches!(value, Value::Other(NULL))
}

fn same(found: &Value, value: &Json) -> bool {
    match (found, value) {
        (Value::Flag(found), Json::Bool(value)) => found == value,
        (Value::Text(found), Json::String(value)) => found == value,
        (_, Json::Number(value)) => found.number() == value.as_f64(),
        (Value::List(found), Json::Array(value)) => found.is_empty() && value.is_empty(),
        _ => false,
    }
}
