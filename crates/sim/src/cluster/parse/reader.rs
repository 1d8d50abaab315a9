//! Reader of values that collects problems.

use super::ClusterProblem;
use crate::cluster::Cluster;
use crate::cluster::quantity::{self, Quantity};
use paceline_plan::suggest::suggest;
use paceline_plan::units::Bytes;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

/// A table of the file, with its name for messages.
pub(super) struct Section<'a> {
    pub(super) table: &'a DeTable<'a>,
    pub(super) label: String,
    pub(super) span: Range<usize>,
}

impl<'a> Section<'a> {
    pub(super) fn get(&self, key: &str) -> Option<&'a Spanned<DeValue<'a>>> {
        self.table.get(key)
    }

    /// Span of the key, or of the section if it lacks the key.
    pub(super) fn span_of(&self, key: &str) -> Range<usize> {
        self.table.get_key_value(key).map_or(self.span.clone(), |(key, _)| key.span())
    }
}

/// Collects problems while reading: a field that cannot be read is `None`, and reading continues.
pub(super) struct Reader<'t> {
    pub(super) text: &'t str,
    pub(super) problems: Vec<ClusterProblem>,
}

impl Reader<'_> {
    pub(super) fn quantity(
        &mut self,
        section: &Section<'_>,
        key: &str,
        kind: &Quantity,
    ) -> Option<f64> {
        self.required(section, key, kind.example, |value| measured(value, kind))
    }

    pub(super) fn required<T>(
        &mut self,
        section: &Section<'_>,
        key: &str,
        example: &str,
        read: impl Fn(&DeValue<'_>) -> Result<T, String>,
    ) -> Option<T> {
        if section.get(key).is_none() {
            let what = format!("{} has no {key}", section.label);
            self.problem(section.span.clone(), what, format!("add for example {key} = {example}"));
        }
        self.optional(section, key, example, |value| read(value).map(Some), None).flatten()
    }

    pub(super) fn optional<T>(
        &mut self,
        section: &Section<'_>,
        key: &str,
        example: &str,
        read: impl Fn(&DeValue<'_>) -> Result<T, String>,
        absent: T,
    ) -> Option<T> {
        let Some(value) = section.get(key) else { return Some(absent) };
        match read(value.get_ref()) {
            Ok(value) => Some(value),
            Err(why) => {
                let what =
                    format!("{} has {key} = {}: {why}", section.label, shown(value.get_ref()));
                self.problem(value.span(), what, format!("write for example {key} = {example}"));
                None
            }
        }
    }

    pub(super) fn table<'a>(
        &mut self,
        parent: &Section<'a>,
        key: &str,
        label: &str,
    ) -> Option<Section<'a>> {
        match parent.get(key) {
            Some(value) => self.as_table(value, label.into()),
            None => {
                let what = format!("{} has no {label}", parent.label);
                self.problem(parent.span.clone(), what, format!("add a {label} table"));
                None
            }
        }
    }

    pub(super) fn as_table<'a>(
        &mut self,
        value: &'a Spanned<DeValue<'a>>,
        label: String,
    ) -> Option<Section<'a>> {
        let span = value.span();
        match value.get_ref().as_table() {
            Some(table) => Some(Section { table, label, span }),
            None => {
                let what = format!("{label} is {}", shown(value.get_ref()));
                self.problem(span, what, "make it a table of keys and values".into());
                None
            }
        }
    }

    pub(super) fn known_keys(&mut self, section: &Section<'_>, known: &[&str]) {
        for (key, _) in section.table.iter() {
            let name = key.get_ref().as_ref();
            if !known.contains(&name) {
                let what = format!("{} has an unknown key '{}'", section.label, short(name));
                let remedy = match suggest(name, known.iter().copied()) {
                    Some(meant) => format!("did you mean {meant}?"),
                    None => format!("known here: {}", known.join(", ")),
                };
                self.problem(key.span(), what, remedy);
            }
        }
    }

    pub(super) fn problem(&mut self, at: Range<usize>, what: String, remedy: String) {
        let before = self.text.as_bytes().iter().take(at.start);
        let line = 1 + before.filter(|&&byte| byte == b'\n').count();
        self.problems.push(ClusterProblem { line, what, remedy });
    }
}

pub(super) fn text(value: &DeValue<'_>) -> Result<String, String> {
    match value.as_str() {
        Some(text) if !text.trim().is_empty() => Ok(text.into()),
        Some(_) => Err("it is empty".into()),
        None => Err("it is no text".into()),
    }
}

pub(super) fn boolean(value: &DeValue<'_>) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| "it is neither true nor false".into())
}

pub(super) fn count(value: &DeValue<'_>) -> Result<u32, String> {
    whole(value, 1, Cluster::MAX_DEVICES)
}

pub(super) fn whole(value: &DeValue<'_>, least: u64, most: u64) -> Result<u32, String> {
    let number = value.as_integer().and_then(integer);
    number
        .filter(|&number| (u128::from(least)..=u128::from(most)).contains(&number))
        .and_then(|number| u32::try_from(number).ok())
        .ok_or_else(|| format!("it is no whole number from {least} to {most}"))
}

/// Parses a fraction above 0 and at most 1.
pub(super) fn share(value: &DeValue<'_>) -> Result<f64, String> {
    let number = number(value).filter(|share| *share > 0.0 && *share <= 1.0);
    number.ok_or_else(|| "it is no number above 0 and at most 1".into())
}

/// Parses a ratio or factor of at least 1.
pub(super) fn ratio(value: &DeValue<'_>) -> Result<f64, String> {
    let number = number(value).filter(|ratio| (1.0..=1e6).contains(ratio));
    number.ok_or_else(|| "it is no number from 1 to 1000000".into())
}

pub(super) fn memory(value: &DeValue<'_>) -> Result<Bytes, String> {
    match (value.as_str(), value.as_integer().and_then(integer)) {
        (Some(text), _) => quantity::read_bytes(text),
        (None, Some(bytes)) => quantity::check_bytes(bytes),
        (None, None) => Err("it is no number of bytes".into()),
    }
}

pub(super) fn measured(value: &DeValue<'_>, kind: &Quantity) -> Result<f64, String> {
    match (value.as_str(), number(value)) {
        (Some(text), _) => kind.read(text),
        (None, Some(number)) => kind.check(number),
        (None, None) => Err(format!("it is not {}", kind.noun)),
    }
}

pub(super) fn number(value: &DeValue<'_>) -> Option<f64> {
    match (value.as_float(), value.as_integer()) {
        (Some(float), _) => float.as_str().parse().ok(),
        (None, Some(whole)) => integer(whole).map(|whole| whole as f64),
        (None, None) => None,
    }
}

pub(super) fn integer(value: &DeInteger<'_>) -> Option<u128> {
    u128::from_str_radix(value.as_str(), value.radix()).ok()
}

/// Formats a value for messages.
pub(super) fn shown(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("\"{}\"", short(text)),
        DeValue::Integer(number) => short(&number.to_string()),
        DeValue::Float(number) => short(&number.to_string()),
        DeValue::Boolean(value) => value.to_string(),
        DeValue::Datetime(_) => "a date".into(),
        DeValue::Array(array) if array.is_empty() => "an empty list".into(),
        DeValue::Array(_) => "a list".into(),
        DeValue::Table(_) => "a table".into(),
    }
}

fn short(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into(),
    }
}
