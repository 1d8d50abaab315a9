//! `config.json` as entries with lines.

use super::super::codec::NULL;
use crate::located::{Entry, Errors, Table, Value};
use serde_json::Value as Json;
use std::collections::BTreeMap;

pub(super) fn entries(text: &str, file_name: &str) -> Result<BTreeMap<String, Entry>, Errors> {
    let json: Json = serde_json::from_str(text).map_err(|error| {
        let problem = format!("this is not JSON: {error}");
        Errors::one(file_name, error.line().max(1), problem, "give a model's config.json")
    })?;
    let Json::Object(object) = json else {
        let problem = "this is JSON, but not an object".to_owned();
        return Err(Errors::one(file_name, 1, problem, "give a model's config.json"));
    };
    let lines = key_lines(text);
    let entry = |(key, value): (&String, &Json)| {
        let line = lines.get(key.as_str()).copied().unwrap_or(1);
        (key.clone(), Entry { line, value: value_of(value, line) })
    };
    Ok(object.iter().map(entry).collect())
}

fn value_of(value: &Json, line: usize) -> Value {
    let entry = |value: &Json| Entry { line, value: value_of(value, line) };
    match value {
        Json::Null => Value::Other(NULL),
        Json::Bool(flag) => Value::Flag(*flag),
        Json::Number(number) => match number.to_string().parse() {
            Ok(whole) => Value::Whole(whole),
            Err(_) => Value::Real(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::Text(text.clone()),
        Json::Array(list) => Value::List(list.iter().map(entry).collect()),
        Json::Object(object) => {
            let known = object.iter().filter(|(_, value)| !value.is_null());
            let entries = known.map(|(key, value)| (key.clone(), entry(value))).collect();
            Value::Table(Table { line, entries })
        }
    }
}

/// Line numbers of the outermost object's keys. The text is known to be valid JSON, so only strings
/// and brackets matter.
pub(super) fn key_lines(text: &str) -> BTreeMap<&str, usize> {
    let (mut lines, mut line, mut depth) = (BTreeMap::new(), 1, 0);
    let mut last_text = ("", 1);
    let mut bytes = text.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'\n' => line += 1,
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            b':' if depth == 1 => {
                lines.insert(last_text.0, last_text.1);
            }
            b'"' => {
                let mut escaped = false;
                let end = bytes.find(|(_, byte)| {
                    let closes = *byte == b'"' && !escaped;
                    escaped = *byte == b'\\' && !escaped;
                    closes
                });
                last_text = (&text[at + 1..end.map_or(at + 1, |(end, _)| end)], line);
            }
            _ => {}
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_keys_are_found_past_strings_and_brackets() {
        let text = "{\"a\": \"}{\\\"b\\\": \",\n\"b\": {\n\"a\": 1}, \"c\"\n:2}";
        let lines = key_lines(text);
        assert_eq!(lines.into_iter().collect::<Vec<_>>(), [("a", 1), ("b", 2), ("c", 3)]);
    }
}
