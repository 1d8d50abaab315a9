//! Settings of other systems, with their lines.

use paceline_plan::located::{self, Entry, Table, Value};
use serde_json::Value as Json;
use std::collections::BTreeMap;

/// One setting. A flag without a value has the value `true`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) name: String,
    pub(super) value: String,
    pub(super) line: usize,
}

/// Arguments of a Megatron-LM launch: words of a shell script, or keys of a YAML file.
pub(super) fn launch(text: &str) -> Result<Vec<Setting>, String> {
    let yaml = |line: &str| {
        let (key, _) = line.split_once(':')?;
        let key = key.trim().trim_start_matches("- ");
        let word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        (!key.is_empty() && key.chars().all(word)).then_some(())
    };
    let lines = || text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
    let is_yaml = lines().count() > 0 && lines().all(|line| yaml(line).is_some());
    Ok(if is_yaml { keys(text) } else { arguments(text) })
}

/// Name of an argument, as Megatron-LM writes it on a command line.
fn name(word: &str) -> String {
    word.trim_start_matches('-').replace('_', "-")
}

/// Keys of a YAML file with scalar values, whatever the section.
fn keys(text: &str) -> Vec<Setting> {
    let mut found = Vec::new();
    for (line, content) in (1..).zip(text.lines()) {
        let content = content.split(" #").next().unwrap_or_default().trim();
        if content.starts_with('#') {
            continue;
        }
        let Some((key, value)) = content.split_once(':') else { continue };
        let value = value.trim().trim_matches(['"', '\'']);
        if !value.is_empty() {
            let key = key.trim().trim_start_matches("- ");
            found.push(Setting { name: name(key), value: value.to_owned(), line });
        }
    }
    found
}

/// Arguments of a shell script; variables that it sets are replaced.
fn arguments(text: &str) -> Vec<Setting> {
    let mut variables: BTreeMap<String, String> = BTreeMap::new();
    let mut words: Vec<(usize, String)> = Vec::new();
    for (line, content) in (1..).zip(text.lines()) {
        let content = content.trim();
        if content.starts_with('#') {
            continue;
        }
        let content = content.split(" #").next().unwrap_or_default();
        let content = content.trim_end_matches('\\');
        for word in content.split_whitespace() {
            let word = word.trim_matches(['"', '\'', '(', ')']);
            let assigned = word.split_once('=').filter(|(variable, _)| {
                let letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
                !variable.is_empty() && variable.chars().all(letter)
            });
            match assigned {
                Some((variable, value)) => {
                    let value = replaced(value.trim_matches(['"', '\'', '(', ')']), &variables);
                    if let Some(first) = value.strip_prefix("--") {
                        words.push((line, format!("--{first}")));
                    }
                    variables.insert(variable.to_owned(), value);
                }
                None => match word.strip_prefix("--").and_then(|word| word.split_once('=')) {
                    Some((key, value)) => words.extend([
                        (line, format!("--{key}")),
                        (line, replaced(value.trim_matches(['"', '\'']), &variables)),
                    ]),
                    None if !word.is_empty() => words.push((line, replaced(word, &variables))),
                    None => {}
                },
            }
        }
    }
    let mut found: Vec<Setting> = Vec::new();
    let mut words = words.into_iter().peekable();
    while let Some((line, word)) = words.next() {
        let Some(key) = word.strip_prefix("--") else { continue };
        // A script may take the first of several values only.
        let value = words.next_if(|(_, next)| !next.starts_with("--")).map(|(_, value)| value);
        // The word behind a flag of the launcher is the program.
        let value = value.filter(|value| !value.ends_with(".py"));
        let value = value.unwrap_or_else(|| "true".to_owned());
        found.push(Setting { name: name(key), value, line });
    }
    found
}

/// A word with `$NAME`, `${NAME}` and `${NAME:-default}` replaced.
fn replaced(word: &str, variables: &BTreeMap<String, String>) -> String {
    let Some(inner) = word.strip_prefix('$') else { return word.to_owned() };
    let inner = inner.trim_start_matches('{').trim_end_matches('}');
    let (variable, default) = inner.split_once(":-").unwrap_or((inner, word));
    variables.get(variable).map_or(default, String::as_str).to_owned()
}

/// Keys of a TOML file, with their sections: `training.steps`.
pub(super) fn toml(text: &str, file: &str) -> Result<Vec<Setting>, String> {
    let table = located::parse(text, file).map_err(|errors| errors.to_string())?;
    let mut found = Vec::new();
    flatten(&table, "", &mut found);
    found.sort_by_key(|setting: &Setting| setting.line);
    Ok(found)
}

fn flatten(table: &Table, prefix: &str, found: &mut Vec<Setting>) {
    for (key, Entry { line, value }) in &table.entries {
        let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            Value::Table(inner) => flatten(inner, &name, found),
            Value::Text(text) => found.push(Setting { name, value: text.clone(), line: *line }),
            other => found.push(Setting { name, value: other.to_string(), line: *line }),
        }
    }
}

/// Keys of a JSON object, with those of the objects around them.
pub(super) fn json(text: &str) -> Result<Vec<Setting>, String> {
    let json: Json = serde_json::from_str(text).map_err(|e| format!("this is not JSON: {e}"))?;
    let Json::Object(_) = json else { return Err("this is JSON, but not an object".to_owned()) };
    let mut found = Vec::new();
    nested(&json, "", text, &mut found);
    Ok(found)
}

fn nested(json: &Json, prefix: &str, text: &str, found: &mut Vec<Setting>) {
    let Json::Object(object) = json else { return };
    for (key, value) in object {
        let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        if value.is_object() {
            nested(value, &name, text, found);
            continue;
        }
        let at = text.find(&format!("\"{key}\"")).unwrap_or(0);
        let line = 1 + text[..at].matches('\n').count();
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        found.push(Setting { name, value, line });
    }
}
