//! The README against the program: what it prints stands there, and its links lead to the pages.

use super::support::Folder;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn readme() -> String {
    fs::read_to_string(root().join("README.md")).unwrap()
}

/// Fenced blocks of a language.
fn blocks(text: &str, language: &str) -> Vec<Vec<String>> {
    let (mut all, mut open): (Vec<Vec<String>>, Option<bool>) = (Vec::new(), None);
    for line in text.lines() {
        match (open, line.strip_prefix("```")) {
            (None, Some(name)) => {
                open = Some(name == language);
                if name == language {
                    all.push(Vec::new());
                }
            }
            (Some(_), Some(_)) => open = None,
            (Some(true), None) => all.last_mut().unwrap().push(line.to_owned()),
            (Some(false) | None, None) => {}
        }
    }
    all
}

/// A line without what differs between machines: its numbers, units of time and padding.
fn shape(line: &str) -> String {
    let mut shape = String::new();
    for word in line.split_whitespace() {
        let number = word.trim_matches(|c: char| "(),+−-%".contains(c));
        let is_number = number.starts_with(|c: char| c.is_ascii_digit())
            && number.chars().all(|c| c.is_ascii_digit() || ".,–".contains(c));
        match word {
            _ if is_number => shape += "#",
            "s" | "ms" | "µs" | "us" => shape += "time",
            "KiB" | "MiB" | "GiB" => shape += "size",
            // Columns are as wide as their numbers.
            _ if word.contains('─') => shape += word.split('─').next().unwrap_or_default(),
            _ => shape += word,
        }
        shape.push(' ');
    }
    shape
}

/// Returns true if `printed` begins with the lines of the README. A line `…` stands for any number of
/// lines, and a line that ends with `…` for any end of it.
fn is_alike(expected: &[String], printed: &[String]) -> bool {
    match expected.split_first() {
        None => true,
        Some((line, rest)) if line.trim() == "…" => {
            (0..=printed.len()).any(|skipped| is_alike(rest, &printed[skipped..]))
        }
        Some((line, rest)) => printed.split_first().is_some_and(|(found, others)| {
            let same = match line.strip_suffix('…') {
                Some(start) => found.starts_with(start),
                None => found == line,
            };
            same && is_alike(rest, others)
        }),
    }
}

/// Commands with their output, where the README shows it, to the last digit.
#[test]
fn commands_of_the_readme_print_what_stands_there() {
    let mut compared = 0;
    for block in blocks(&readme(), "console") {
        let starts: Vec<usize> =
            (0..block.len()).filter(|&at| block[at].starts_with("$ paceline ")).collect();
        for (number, &start) in starts.iter().enumerate() {
            let end = starts.get(number + 1).copied().unwrap_or(block.len());
            let expected = &block[start + 1..end];
            if expected.is_empty() || block[start].ends_with('\\') {
                continue;
            }
            let here = Folder::new();
            let ran = here.run(block[start].trim_start_matches("$ paceline "));
            let printed: Vec<String> =
                format!("{}{}", ran.out, ran.err).lines().map(str::to_owned).collect();
            assert!(
                is_alike(expected, &printed),
                "{}\nREADME: {expected:#?}\nprinted: {printed:#?}",
                block[start]
            );
            compared += 1;
        }
    }
    assert!(compared >= 3, "{compared} commands");
}

/// The demo prints what the README shows, apart from what depends on the machine.
#[test]
fn the_demo_of_the_readme_prints_what_stands_there() {
    let shown = blocks(&readme(), "text").into_iter().find(|block| block[0].starts_with("model "));
    let shown: Vec<String> =
        shown.expect("the demo's output").iter().map(|line| shape(line)).collect();
    let here = Folder::new();
    let ran = here.run("--iterations 4").done();
    // Machines with other numbers of cores have other ranks, each a row of the table.
    let row = |line: &String| ["│ #", "mesh", "batch"].iter().any(|start| line.starts_with(start));
    let printed: Vec<String> = ran.out.lines().map(shape).collect();
    let expected: Vec<String> = shown.iter().filter(|line| !row(line)).cloned().collect();
    let rest: Vec<String> = printed.iter().filter(|line| !row(line)).cloned().collect();
    assert!(is_alike(&expected, &rest), "README: {expected:#?}\nprinted: {rest:#?}");
    let rows = |lines: &[String]| lines.iter().filter(|line| line.starts_with("│ #")).count();
    assert!(rows(&shown) > 0 && rows(&printed) > 0, "{printed:#?}");
}

/// Targets of the links of a page, without anchors.
fn links(page: &Path) -> Vec<String> {
    let text = fs::read_to_string(page).unwrap();
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let targets = targets.map(|target| target.split('#').next().unwrap_or_default().to_owned());
    targets.filter(|target| !target.is_empty() && !target.contains("://")).collect()
}

/// Pages of a folder.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

#[test]
fn every_page_is_linked_and_every_link_leads_somewhere() {
    let root = root();
    let docs = pages(&root.join("docs"));
    let mut all = docs.clone();
    all.extend([root.join("README.md"), root.join("CONTRIBUTING.md")]);
    all.extend(pages(&root.join("docs/parallelism")));
    for page in &all {
        for target in links(page) {
            let file = page.parent().unwrap().join(&target);
            assert!(file.exists(), "{}: {target}", page.display());
        }
    }
    let reached = |from: &Path| -> Vec<PathBuf> {
        let leads = links(from).into_iter().map(|target| from.parent().unwrap().join(target));
        leads.filter_map(|path| path.canonicalize().ok()).collect()
    };
    let readme = reached(&root.join("README.md"));
    for page in &docs {
        assert!(readme.contains(page), "README.md does not link {}", page.display());
    }
    let strategies = reached(&root.join("docs/parallelism.md"));
    for page in pages(&root.join("docs/parallelism")) {
        assert!(strategies.contains(&page), "docs/parallelism.md does not link {}", page.display());
    }
}
