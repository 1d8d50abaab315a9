//! Everything that is wrong with a request, and where each thing was written.

use paceline_plan::lower;
use std::collections::BTreeMap;
use std::fmt;

/// Where the flags that came from a run file stand in it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Origins(BTreeMap<String, String>);

impl Origins {
    /// Notes that a flag (`--tp`) was read at a place (`run.toml:3`).
    pub(crate) fn note(&mut self, flag: String, place: String) {
        self.0.insert(flag, place);
    }
}

/// Everything that is wrong with a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Problems {
    origins: Origins,
    lines: Vec<Line>,
}

#[derive(Clone, Debug)]
struct Line {
    /// The flag to change; absent where the text says itself where it is wrong.
    flag: Option<String>,
    text: String,
}

impl Problems {
    /// None yet.
    pub(crate) fn new(origins: Origins) -> Self {
        Self { origins, lines: Vec::new() }
    }

    /// Something is wrong with a flag.
    pub(crate) fn say(&mut self, flag: &str, text: impl Into<String>) {
        self.lines.push(Line { flag: Some(flag.to_owned()), text: text.into() });
    }

    /// Something is wrong at a place that the text itself names, one problem a line.
    pub(crate) fn located(&mut self, text: impl fmt::Display) {
        let text = text.to_string();
        self.lines.extend(text.lines().map(|line| Line { flag: None, text: line.to_owned() }));
    }

    /// What the planner refuses, except about flags that could not be read anyway.
    pub(crate) fn planner(&mut self, found: lower::Problems) {
        for lower::Problem { flag, message } in found.0 {
            if !self.about(flag) {
                self.say(flag, message);
            }
        }
    }

    /// Whether a problem with this flag is already known.
    pub(crate) fn about(&self, flag: &str) -> bool {
        self.lines.iter().any(|line| line.flag.as_deref() == Some(flag))
    }

    /// All of them on one line, without their places in a file.
    pub(crate) fn brief(&self) -> String {
        let line = |Line { flag, text }: &Line| match flag {
            Some(flag) => format!("{flag}: {text}"),
            None => text.clone(),
        };
        self.lines.iter().map(line).collect::<Vec<_>>().join("; ")
    }

    /// How many are known.
    pub(crate) fn count(&self) -> usize {
        self.lines.len()
    }

    /// Whether there is none.
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
        problems.say("--pp", "too deep");
        assert_eq!(problems.to_string(), "error: --pp: too deep");
        problems.say("--tp", "too wide");
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
        problems.say("--tp", "'x' is not a whole number");
        problems.planner(lower::Problems::one("--tp", "must be at least 1"));
        problems.planner(lower::Problems::one("--pp", "must be at least 1"));
        assert_eq!(problems.to_string().lines().count(), 3);
    }
}
