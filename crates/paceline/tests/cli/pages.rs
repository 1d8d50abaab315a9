//! Pages for users against the binary: the commands of the guides work, the output that the README
//! shows is what is printed, and every page can be reached from the README.

use super::support::Folder;
use std::path::{Path, PathBuf};

const README: &str = include_str!("../../../../README.md");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Fenced blocks of a page with this language.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let mut found = Vec::new();
    let mut rest = page;
    while let Some((_, after)) = rest.split_once("```") {
        let Some((block, next)) = after.split_once("```") else { break };
        let (first, body) = block.split_once('\n').unwrap_or((block, ""));
        if first.trim() == language {
            found.push(body);
        }
        rest = next;
    }
    found
}

/// Commands of a console block, each with the output that follows it. A backslash continues a line.
fn commands(block: &str) -> Vec<(String, Vec<String>)> {
    let mut all: Vec<(String, Vec<String>)> = Vec::new();
    for line in block.replace("\\\n", " ").lines() {
        match line.strip_prefix("$ ") {
            Some(command) => {
                // Comments are set off by two spaces.
                let command = command.split("  #").next().unwrap_or_default();
                all.push((command.trim().to_owned(), Vec::new()));
            }
            None => all.last_mut().expect("a command comes first").1.push(line.to_owned()),
        }
    }
    all
}

/// Arguments of a command line, without the program's name; quotes hold words together.
fn arguments(command: &str) -> Option<Vec<String>> {
    let rest = command.strip_prefix("paceline ")?;
    let mut words = Vec::new();
    for (index, part) in rest.split('"').enumerate() {
        match index % 2 {
            0 => words.extend(part.split_whitespace().map(str::to_owned)),
            _ => words.push(part.to_owned()),
        }
    }
    Some(words)
}

/// The same arguments with few iterations: pages train for longer than tests may.
fn shortened(mut arguments: Vec<String>, iterations: &str) -> Vec<String> {
    if let Some(at) = arguments.iter().position(|word| word == "--iterations") {
        arguments[at + 1] = iterations.to_owned();
    }
    arguments
}

#[test]
fn the_commands_of_the_guides_work() {
    for page in ["text.md", "models.md", "your-cluster.md"] {
        let text = std::fs::read_to_string(root().join("docs").join(page)).unwrap();
        let here = Folder::new();
        here.file("book.txt", README.repeat(4));
        here.file(
            "wrong.toml",
            "kind = \"llama\"\nlayers = 2\nd_model = 192\nheads = 7\nseq = 8\n",
        );
        for block in blocks(&text, "toml") {
            let name = block.lines().next().and_then(|line| line.strip_prefix("# FILE: "));
            here.file(name.expect("a file to write"), block);
        }
        let mut iterations = 2;
        let mut ran = 0;
        for (command, output) in blocks(&text, "console").into_iter().flat_map(commands) {
            let arguments = shortened(arguments(&command).unwrap(), &iterations.to_string());
            iterations += 2;
            let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let done = here.run_with(&words);
            match output.is_empty() {
                true => drop(done.done()),
                false => {
                    assert_eq!(done.code, Some(2), "{page}: {command}\n{}", done.err);
                    shows(&format!("{page}: {command}"), &output, &done.err);
                }
            }
            ran += 1;
        }
        assert!(ran >= 4, "{page} has {ran} commands");
    }
}

/// Every row of the map names a command that works.
#[test]
fn the_commands_of_the_map_work() {
    let text = std::fs::read_to_string(root().join("docs/map.md")).unwrap();
    let here = Folder::new();
    let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("|---"));
    let rows: Vec<&str> = rows.filter(|line| !line.ends_with("| here |")).collect();
    assert!(rows.len() >= 45, "{} rows", rows.len());
    for row in rows {
        let command = row.split('`').find(|span| span.starts_with("paceline "));
        let command = command.unwrap_or_else(|| panic!("no command in {row}"));
        let arguments = arguments(command).unwrap();
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        drop(here.run_with(&words).done());
    }
}

/// A line without the digits of its numbers, and with one space for several: times and rates differ
/// from run to run, and columns with them.
fn shape(line: &str) -> String {
    let mut shape = String::new();
    for c in line.trim_end().chars() {
        match c {
            '0'..='9' | '.' | ',' if shape.ends_with('#') => {}
            '0'..='9' => shape.push('#'),
            ' ' | '─' if shape.ends_with(c) => {}
            c => shape.push(c),
        }
    }
    shape
}

/// Checks that a page's lines are lines of the output, in order. A `…` stands for the rest of a line
/// or for lines.
#[track_caller]
fn shows(what: &str, page: &[String], output: &str) {
    let mut lines = output.lines();
    for wanted in page.iter().filter(|line| !line.trim().is_empty() && line.trim() != "…") {
        let (start, whole) = match wanted.split_once('…') {
            Some((start, _)) => (shape(start), false),
            None => (shape(wanted), true),
        };
        let is_it = |line: &str| {
            let line = shape(line);
            if whole { line == start } else { line.starts_with(&start) }
        };
        assert!(lines.any(is_it), "{what} shows\n{wanted}\nbut the output is\n{output}");
    }
}

#[test]
fn the_readme_shows_what_is_printed() {
    let here = Folder::new();
    let demo = here.run("--iterations 3").done();
    let text = blocks(README, "text");
    let lines: Vec<String> = text[0].lines().map(str::to_owned).collect();
    shows("the README's demo", &lines, &demo.out);
    // What does not depend on time is the same to the digit.
    for line in lines.iter().filter(|line| line.starts_with("model ") || line.starts_with("batch "))
    {
        assert!(demo.out.contains(line.as_str()), "{line}\n{}", demo.out);
    }
    let mut compared = 0;
    for (command, output) in blocks(README, "console").into_iter().flat_map(commands) {
        if output.iter().all(|line| line.trim().is_empty()) {
            continue;
        }
        let arguments = arguments(&command).unwrap();
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let ran = here.run_with(&words);
        shows(&command, &output, &format!("{}{}", ran.out, ran.err));
        compared += 1;
    }
    assert!(compared >= 3, "{compared}");
}

#[test]
fn the_readme_leads_to_every_page() {
    for entry in std::fs::read_dir(root().join("docs")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.ends_with(".md") {
            assert!(README.contains(&format!("(docs/{name})")), "docs/{name} is not linked");
        }
    }
    let links = README.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    for link in links.filter(|link| !link.starts_with("http") && !link.starts_with('#')) {
        let file = link.split('#').next().unwrap();
        assert!(root().join(file).exists(), "{link} leads nowhere");
    }
    let parallelism = std::fs::read_to_string(root().join("docs/parallelism.md")).unwrap();
    for entry in std::fs::read_dir(root().join("docs/parallelism")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let linked = parallelism.contains(&format!("parallelism/{name}"));
        assert!(!name.ends_with(".md") || linked, "docs/parallelism/{name} is not linked");
    }
}

/// The installed program has no debug information: 16 MB, not 92.
#[test]
fn releases_are_stripped() {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let manifest: toml::Value = toml::from_str(&manifest).unwrap();
    let release = &manifest["profile"]["release"];
    assert_eq!(release["strip"].as_bool(), Some(true));
    assert!(release.get("debug").is_none());
}
