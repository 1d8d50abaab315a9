//! A page: its commands, their pictures, and the claims about them.

use crate::claim::Claim;

/// Prefix of a command on the page.
const PROMPT: &str = "$ cargo run --release -- ";

/// A parsed page.
pub(crate) struct Page {
    pub(crate) text: String,
    pub(crate) studies: Vec<Study>,
}

/// One command and the text that belongs to it: everything up to the next command.
pub(crate) struct Study {
    /// Line number of its command.
    pub(crate) line: usize,
    /// The arguments, as a shell would pass them.
    pub(crate) arguments: Vec<String>,
    /// Path of its picture, relative to the docs folder.
    pub(crate) picture: String,
    /// Claims of the text about it.
    pub(crate) claims: Vec<Claim>,
}

impl Page {
    /// Parses a page whose picture links are relative to `folder` under the docs folder (`""`, or
    /// `"parallelism/"`); panics with the line number of an error.
    pub(crate) fn parse(text: &str, folder: &str) -> Self {
        let lines: Vec<&str> = text.lines().collect();
        let starts: Vec<usize> =
            (0..lines.len()).filter(|&line| lines[line].starts_with(PROMPT)).collect();
        let ends = starts.iter().skip(1).copied().chain([lines.len()]);
        let studies =
            starts.iter().zip(ends).map(|(&start, end)| study(&lines[..end], start, folder));
        Self { text: text.to_owned(), studies: studies.collect() }
    }
}

fn study(lines: &[&str], start: usize, folder: &str) -> Study {
    let mut command = String::new();
    let mut next = start;
    loop {
        let line = lines[next].trim();
        next += 1;
        match line.strip_suffix('\\') {
            Some(part) => command.push_str(part),
            None => break command.push_str(line),
        }
    }
    let arguments = words(&command[PROMPT.len()..]);
    let rest = lines[next..].join("\n");
    let shown = rest.split_once("](").and_then(|(_, rest)| rest.split_once(')'));
    let (link, _) = shown.unwrap_or_else(|| panic!("line {}: no picture", start + 1));
    let picture = format!("{folder}{link}");
    let drawn = arguments.iter().position(|word| word == "--plot" || word == "--picture");
    let drawn = drawn.map(|at| &arguments[at + 1]);
    assert_eq!(drawn, Some(&format!("docs/{picture}")), "line {}", start + 1);
    Study { line: start + 1, arguments, picture, claims: Claim::all(&rest, next + 1) }
}

/// Splits a command line into words; quotes preserve spaces.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quote = None;
    for c in line.trim().chars() {
        match (c, quote) {
            ('"' | '\'', None) => quote = Some(c),
            (c, Some(open)) if c == open => quote = None,
            (' ', None) => words.push(String::new()),
            (c, _) => words.last_mut().unwrap().push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}
