//! Problems of a request, and their locations in the run file.

use paceline_plan::lower;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// Locations in the run file of the flags that were read from it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Origins(BTreeMap<String, String>);

impl Origins {
    /// Records that a flag (`--tp`) was read at a location (`run.toml:3`).
    pub(crate) fn note(&mut self, flag: String, place: String) {
        self.0.insert(flag, place);
    }
}

/// All problems of a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Problems {
    origins: Origins,
    lines: Vec<Line>,
}

#[derive(Clone, Debug)]
struct Line {
    /// The flag to change; `None` if the text itself names the location.
    flag: Option<String>,
    text: String,
}

/// One problem, as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Problem<'a> {
    /// The flag to change.
    #[serde(skip_serializing_if = "Option::is_none")]
    flag: Option<&'a str>,
    /// Its location in the run file.
    #[serde(skip_serializing_if = "Option::is_none")]
    location: Option<&'a str>,
    message: &'a str,
}

impl Problems {
    /// Creates an empty list.
    pub(crate) fn new(origins: Origins) -> Self {
        Self { origins, lines: Vec::new() }
    }

    /// Adds a problem of a flag.
    pub(crate) fn add(&mut self, flag: &str, text: impl Into<String>) {
        self.lines.push(Line { flag: Some(flag.to_owned()), text: text.into() });
    }

    /// Adds problems whose text names the location, one per line.
    pub(crate) fn located(&mut self, text: impl fmt::Display) {
        let text = text.to_string();
        self.lines.extend(text.lines().map(|line| Line { flag: None, text: line.to_owned() }));
    }

    /// Adds the planner's problems, except those of flags that were already reported.
    pub(crate) fn planner(&mut self, found: lower::Problems) {
        for lower::Problem { flag, message } in found.0 {
            if !self.about(flag) {
                self.add(flag, message);
            }
        }
    }

    /// Returns true if this flag already has a problem.
    pub(crate) fn about(&self, flag: &str) -> bool {
        self.lines.iter().any(|line| line.flag.as_deref() == Some(flag))
    }

    /// All problems on one line, without their locations in a file.
    pub(crate) fn brief(&self) -> String {
        let line = |Line { flag, text }: &Line| match flag {
            Some(flag) => format!("{flag}: {text}"),
            None => text.clone(),
        };
        self.lines.iter().map(line).collect::<Vec<_>>().join("; ")
    }

    /// All problems, in the order in which they were found.
    pub(crate) fn all(&self) -> Vec<Problem<'_>> {
        let lines = self.lines.iter();
        lines
            .map(|Line { flag, text }| {
                let location = flag.as_ref().and_then(|flag| self.origins.0.get(flag));
                let location = location.map(String::as_str);
                Problem { flag: flag.as_deref(), location, message: text }
            })
            .collect()
    }

    /// Number of problems.
    pub(crate) fn count(&self) -> usize {
        self.lines.len()
    }

    /// Returns true if there is no problem.
    pub(crate) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lines.len() {
            1 => f.write_str("error: ")?,
            count => writeln!(f, "error: {count} problems")?,
        }
        for (index, Line { flag, text }) in self.lines.iter().enumerate() {
            if self.lines.len() > 1 {
                write!(f, "{}  ", if index == 0 { "" } else { "\n" })?;
            }
            match flag.as_deref().map(|flag| (flag, self.origins.0.get(flag))) {
                Some((flag, Some(place))) => write!(f, "{place}: {flag}: {text}")?,
                Some((flag, None)) => write!(f, "{flag}: {text}")?,
                None => f.write_str(text)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_problems_are_told_with_their_places() {
        let mut origins = Origins::default();
        origins.note("--tp".to_owned(), "run.toml:3".to_owned());
        let mut problems = Problems::new(origins);
        problems.add("--pp", "too deep");
        assert_eq!(problems.to_string(), "error: --pp: too deep");
        problems.add("--tp", "too wide");
        problems.located("m.toml:1: no kind\nm.toml:2: no layers");
        assert_eq!(
            problems.to_string(),
            "error: 4 problems\n  --pp: too deep\n  run.toml:3: --tp: too wide\n  \
             m.toml:1: no kind\n  m.toml:2: no layers"
        );
    }

    #[test]
    fn the_planner_is_silent_about_what_could_not_be_read() {
        let mut problems = Problems::default();
        problems.add("--tp", "'x' is not a whole number");
        problems.planner(lower::Problems::one("--tp", "must be at least 1"));
        problems.planner(lower::Problems::one("--pp", "must be at least 1"));
        assert_eq!(problems.to_string().lines().count(), 3);
    }
}
