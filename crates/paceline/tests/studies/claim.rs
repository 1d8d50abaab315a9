//! Claims of a page, and their check.

use crate::expression::Expression;
use serde_json::Value;
use std::fmt;

/// A claim of the page about a study's points.
pub(crate) struct Claim {
    /// Its line.
    pub(crate) line: usize,
    /// The comment as written on the page.
    pub(crate) source: String,
    kind: Kind,
}

enum Kind {
    /// The bold text before the comment equals this value.
    Number { written: String, expression: String },
    /// Each of these is less than the next.
    Rising(Vec<String>),
}

/// Reason that a claim is wrong.
pub(crate) enum Wrong {
    /// A number has another value, given in the same unit with the same number of digits.
    Number { written: String, is: String },
    /// A comparison does not hold.
    Claim(String),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number { written, is } => write!(f, "it says {written}, it is {is}"),
            Self::Claim(what) => f.write_str(what),
        }
    }
}

impl Claim {
    /// All claims in a text whose first line has the number `first`.
    pub(crate) fn all(text: &str, first: usize) -> Vec<Self> {
        let mut claims = Vec::new();
        let mut at = 0;
        while let Some(start) = text[at..].find("<!--").map(|found| at + found) {
            let end = start + text[start..].find("-->").expect("an open comment") + 3;
            let line = first + text[..start].matches('\n').count();
            let source = text[start..end].to_owned();
            let inner = source[4..source.len() - 3].replace('\n', " ").trim().to_owned();
            if let Some(expression) = inner.strip_prefix('=') {
                let before = text[..start].strip_suffix("**");
                let written = before.and_then(|before| before.rsplit("**").next());
                let written = written.unwrap_or_else(|| panic!("line {line}: no bold number"));
                let (written, expression) = (written.to_owned(), expression.trim().to_owned());
                claims.push(Self { line, source, kind: Kind::Number { written, expression } });
            } else if let Some(chain) = inner.strip_prefix("holds:") {
                let parts = chain.split('<').map(|part| part.trim().to_owned()).collect();
                claims.push(Self { line, source, kind: Kind::Rising(parts) });
            }
            at = end;
        }
        claims
    }

    /// Checks that the claim holds.
    pub(crate) fn check(&self, points: &[Value]) -> Result<(), Wrong> {
        let value = |text: &str| {
            let expression = Expression::parse(text)
                .unwrap_or_else(|what| panic!("line {}: {text}: {what}", self.line));
            let found = expression.value(&|name| number(points, name));
            found.unwrap_or_else(|name| panic!("line {}: there is no {name}", self.line))
        };
        match &self.kind {
            Kind::Number { written, expression } => {
                let (digits, unit) = parted(written);
                let scale = scale(unit)
                    .unwrap_or_else(|| panic!("line {}: unknown unit '{unit}'", self.line));
                let is = value(expression) / scale;
                let decimals = digits.split_once('.').map_or(0, |(_, decimals)| decimals.len());
                let said: f64 = digits.parse().unwrap_or_else(|_| panic!("line {}", self.line));
                // The last digit may be off by one: it is rounded, and math libraries differ.
                if (said - is).abs() <= 1.01 * 0.1f64.powi(decimals as i32) {
                    return Ok(());
                }
                let is = format!("{is:.decimals$}{}", &written[digits.len()..]);
                Err(Wrong::Number { written: written.clone(), is })
            }
            Kind::Rising(parts) => {
                let values: Vec<f64> = parts.iter().map(|part| value(part)).collect();
                if values.windows(2).all(|pair| pair[0] < pair[1]) {
                    return Ok(());
                }
                Err(Wrong::Claim(format!("{} does not hold: {values:?}", self.source)))
            }
        }
    }
}

fn parted(written: &str) -> (&str, &str) {
    let end = written.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(written.len());
    (&written[..end], written[end..].trim())
}

/// Value of a unit in base units (seconds, bytes, bytes per second).
fn scale(unit: &str) -> Option<f64> {
    Some(match unit {
        "" | "×" | "s" => 1.0,
        "%" => 0.01,
        "µs" => 1e-6,
        "ms" => 1e-3,
        "days" => 86_400.0,
        "years" => 365.25 * 86_400.0,
        "GB" | "GB/s" => 1e9,
        "GiB" => 1073741824.0,
        "TiB" => 1099511627776.0,
        _ => return None,
    })
}

/// The value of `FIELD[name=value; …]`: brackets select the one point with these values.
fn number(points: &[Value], name: &str) -> Option<f64> {
    let (path, choice) = match name.split_once('[') {
        // Values may contain brackets themselves.
        Some((path, choice)) => (path.trim(), choice.strip_suffix(']').unwrap_or(choice)),
        None => (name, ""),
    };
    let wanted: Vec<(&str, &str)> = choice
        .split("; ")
        .filter(|part| !part.is_empty())
        .map(|part| part.split_once('=').expect("name=value"))
        .collect();
    let here = |point: &&Value| {
        wanted.iter().all(|(name, value)| match &point["vary"][name.replace('-', "_")] {
            Value::String(text) => text == value,
            Value::Number(number) => value.parse().ok() == number.as_f64(),
            _ => false,
        })
    };
    let mut place = points.iter().find(here)?;
    for key in path.split('.') {
        let named = |entry: &&Value| entry["name"] == key || entry["dimension"] == key;
        place = match place {
            Value::Array(list) => list.iter().find(named)?,
            other => other.get(key)?,
        };
    }
    place.as_bool().map(|yes| f64::from(u8::from(yes))).or(place.as_f64())
}
