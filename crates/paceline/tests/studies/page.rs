//! The page: its commands, their pictures, and what is claimed of them.

use crate::claim::Claim;

/// What stands before a command of the page.
const PROMPT: &str = "$ cargo run --release -- ";

/// The page, taken apart.
pub(crate) struct Page {
    pub(crate) text: String,
    pub(crate) studies: Vec<Study>,
}

/// One command with what belongs to it: everything up to the next command.
pub(crate) struct Study {
    /// The line of its command.
    pub(crate) line: usize,
    /// The arguments, as a shell would hand them over.
    pub(crate) arguments: Vec<String>,
    /// Its picture, from the folder of all pages.
    pub(crate) picture: String,
    /// What the text says of it.
    pub(crate) claims: Vec<Claim>,
}

impl Page {
    /// Takes apart a page whose pictures' links start in a folder under that of all pages (`""`, or
    /// `"parallelism/"`); panics with the line of what is wrong with it.
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

/// A command line's words: quotes keep spaces.
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
