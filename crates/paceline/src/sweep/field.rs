//! `--y`: the shown fields of a result.

use super::expression::{Expression, Operator};
use crate::flags::{Problems, suggest};
use crate::plot::Unit;
use serde_json::Value;

/// A value shown for every point.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Field {
    /// Displayed name.
    pub name: String,
    /// Its unit.
    pub unit: Unit,
    expression: Expression,
}

impl Field {
    /// A JSON field under its own name.
    pub(super) fn named(path: &str) -> Self {
        let expression = Expression::Name(path.to_owned());
        Self { name: readable(path), unit: Unit::of_field(path), expression }
    }

    /// Parses fields separated by commas, and reports problems.
    pub(super) fn parse_all(text: &str, problems: &mut Problems) -> Vec<Self> {
        let read = |part: &str| {
            let (name, rest) = match part.split_once('=') {
                Some((name, rest)) => (Some(name.trim()), rest),
                None => (None, part),
            };
            let expression = Expression::parse(rest)?;
            let name = name.map_or_else(|| readable(rest.trim()), str::to_owned);
            Ok(Self { name, unit: unit(&expression), expression })
        };
        let found = text.split(',').map(read);
        found
            .filter_map(|field: Result<Self, String>| {
                field.map_err(|what| problems.add("--y", what)).ok()
            })
            .collect()
    }

    /// Its value in a result; the error is the name that the result does not have.
    pub(super) fn value(&self, result: &Value) -> Result<f64, &str> {
        self.expression.value(&|path| number(result, path))
    }
}

/// A field's name without its unit, with spaces between words.
fn readable(path: &str) -> String {
    let path = path.trim_end_matches("_s").trim_end_matches("_bytes");
    path.replace('_', " ").replace('.', " · ")
}

fn unit(expression: &Expression) -> Unit {
    match expression {
        Expression::Number(_) => Unit::Plain,
        Expression::Name(path) => Unit::of_field(path),
        Expression::Of(left, operator, right) => match (unit(left), operator, unit(right)) {
            (left, Operator::Over, right) if left == right => Unit::Plain,
            (left, Operator::Over, Unit::Plain) => left,
            (Unit::Plain, Operator::Times, right) => right,
            (left, Operator::Times, Unit::Plain) => left,
            (left, Operator::Plus | Operator::Minus, right) if left == right => left,
            (Unit::Plain, Operator::Minus, Unit::Share) => Unit::Share,
            _ => Unit::Plain,
        },
    }
}

/// The number at a path of keys; a list entry is selected by its name.
fn number(result: &Value, path: &str) -> Option<f64> {
    let mut place = result;
    for key in path.split('.') {
        place = match place {
            Value::Object(fields) => fields.get(key)?,
            Value::Array(list) => list.iter().find(|entry| name_of(entry) == Some(key))?,
            _ => return None,
        };
    }
    match place {
        Value::Bool(yes) => Some(f64::from(u8::from(*yes))),
        other => other.as_f64(),
    }
}

fn name_of(entry: &Value) -> Option<&str> {
    let name = |key| entry.get(key).and_then(Value::as_str);
    name("name").or_else(|| name("dimension")).or_else(|| name("role"))
}

/// Error message for a path without a number; suggests existing paths.
pub(super) fn missing(result: &Value, path: &str) -> String {
    let paths = paths(result);
    if let Some(meant) = suggest(path, paths.iter().map(String::as_str)) {
        return format!("there is no number '{path}' (did you mean {meant}?)");
    }
    // A full list would be long: the valid part of the path narrows it down.
    let parent = path.rsplit_once('.').map_or("", |(parent, _)| parent);
    let siblings: Vec<&str> =
        paths.iter().filter(|known| known.starts_with(parent)).map(String::as_str).collect();
    let shown =
        if siblings.is_empty() { paths.iter().map(String::as_str).collect() } else { siblings };
    format!("there is no number '{path}'; there are: {}", shown.join(", "))
}

/// Paths of all numbers of a result.
fn paths(result: &Value) -> Vec<String> {
    let below = |prefix: &str, entries: Vec<(&str, &Value)>| -> Vec<String> {
        let deeper = entries.into_iter().flat_map(|(key, value)| {
            paths(value).into_iter().map(move |rest| match rest.as_str() {
                "" => key.to_owned(),
                rest => format!("{key}.{rest}"),
            })
        });
        deeper.map(|path| format!("{prefix}{path}")).collect()
    };
    match result {
        Value::Object(fields) => {
            below("", fields.iter().map(|(key, value)| (key.as_str(), value)).collect())
        }
        Value::Array(list) => {
            let named = list.iter().filter_map(|entry| Some((name_of(entry)?, entry)));
            below("", named.collect())
        }
        Value::Number(_) | Value::Bool(_) => vec![String::new()],
        Value::Null | Value::String(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn result() -> Value {
        json!({
            "iteration_s": 2.0,
            "fits": true,
            "memory": {"parameters": 8},
            "ops": [{"name": "send pp", "count": 4, "time_s": 1.0}],
            "bandwidth": [{"dimension": "nvlink", "utilisation": 0.5}],
        })
    }

    fn fields(text: &str) -> Vec<Field> {
        let mut problems = Problems::default();
        let fields = Field::parse_all(text, &mut problems);
        assert!(problems.is_empty(), "{problems}");
        fields
    }

    #[test]
    fn fields_are_found_by_path_and_by_name() {
        for (text, value, unit) in [
            ("iteration_s", 2.0, Unit::Time),
            ("memory.parameters", 8.0, Unit::Size),
            ("ops.send pp.time_s / ops.send pp.count", 0.25, Unit::Time),
            ("ops.send pp.time_s/iteration_s", 0.5, Unit::Plain),
            ("bandwidth.nvlink.utilisation", 0.5, Unit::Share),
            ("1 - bandwidth.nvlink.utilisation", 0.5, Unit::Share),
            ("fits", 1.0, Unit::Plain),
        ] {
            let field = &fields(text)[0];
            assert_eq!((field.value(&result()), field.unit), (Ok(value), unit), "{text}");
        }
    }

    #[test]
    fn names_are_given_or_made() {
        let all = fields("exposed=iteration_s - 1, iteration_s,ops.send pp.time_s");
        let names: Vec<&str> = all.iter().map(|field| field.name.as_str()).collect();
        assert_eq!(names, ["exposed", "iteration", "ops · send pp · time"]);
    }

    #[test]
    fn what_is_missing_is_told_with_what_is_there() {
        let field = &fields("iteration")[0];
        assert_eq!(field.value(&result()), Err("iteration"));
        assert!(missing(&result(), "iteration").contains("did you mean iteration_s?"));
        assert!(missing(&result(), "ops.recv").contains("there are: ops.send pp.count"));
        assert!(missing(&result(), "zzz").contains("memory.parameters"));
    }
}
