//! Runs every command of `docs/studies.md` and of the pages of `docs/parallelism/`. Compares every
//! number in their text and every picture with the command's current output.
//!
//! ```text
//! **1.75×**<!-- = a[x=1] / a[x=2] -->     the number before it has this value, to its last digit
//! <!-- holds: a[x=1] < b < 2 * c -->      this is so
//! ```
//!
//! A name is a JSON field; its brackets select the point. After an improvement of the simulator,
//! `UPDATE_GOLDEN=1 cargo test -p paceline --test studies` rewrites the page's numbers and
//! pictures; a person must then review the text.

#[path = "studies/claim.rs"]
mod claim;
// The page uses the arithmetic of `--y`.
#[allow(dead_code)]
#[path = "../src/sweep/expression.rs"]
mod expression;
#[path = "studies/page.rs"]
mod page;
#[path = "studies/picture.rs"]
mod picture;
#[path = "cli/support.rs"]
#[allow(dead_code)]
mod support;

use page::{Page, Study};
use serde_json::Value;
use std::path::{Path, PathBuf};
use support::Folder;

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

/// The files of a docs folder with the given extension.
fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(docs().join(folder)).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|found| found == extension)).collect();
    found.sort();
    found
}

/// Current output of a study's command, and its picture.
struct Outcome {
    points: Vec<Value>,
    picture: String,
}

fn carry_out(study: &Study) -> Outcome {
    let here = Folder::new();
    for folder in ["studies", "parallelism"] {
        for path in files(folder, "toml") {
            let name = path.file_name().unwrap().to_str().unwrap();
            here.file(&format!("docs/{folder}/{name}"), std::fs::read(&path).unwrap());
        }
    }
    std::fs::create_dir_all(here.path().join("docs/parallelism")).unwrap();
    let mut arguments: Vec<&str> = study.arguments.iter().map(String::as_str).collect();
    arguments.push("--json");
    let ran = here.run_with(&arguments).done();
    let drawn = here.path().join("docs").join(&study.picture);
    let picture = std::fs::read_to_string(&drawn)
        .unwrap_or_else(|error| panic!("line {}: {}: {error}", study.line, study.picture));
    Outcome { points: ran.objects(), picture }
}

#[test]
fn the_studies_say_and_show_what_their_commands_do() {
    let page = holds(&docs().join("studies.md"), "");
    assert!(page.studies.len() >= 11, "{} studies", page.studies.len());
    for study in &page.studies {
        assert!(!study.claims.is_empty(), "line {}: nothing is claimed", study.line);
    }
}

#[test]
fn the_pages_of_parallelism_say_and_show_what_their_commands_do() {
    let pages = files("parallelism", "md");
    assert!(pages.len() >= 5, "{pages:?}");
    let index = std::fs::read_to_string(docs().join("parallelism.md")).unwrap();
    for file in &pages {
        let page = holds(file, "parallelism/");
        assert!(!page.studies.is_empty(), "{}: no command", file.display());
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(index.contains(&format!("(parallelism/{name})")), "{name} is not in the index");
    }
}

/// Runs a page's commands, and compares its claims and pictures with their results.
fn holds(file: &Path, folder: &str) -> Page {
    let page = Page::parse(&std::fs::read_to_string(file).unwrap(), folder);
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let all: Vec<_> =
            page.studies.iter().map(|study| scope.spawn(|| carry_out(study))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    let mut wrong = Vec::new();
    let mut text = page.text.clone();
    for (study, outcome) in page.studies.iter().zip(&outcomes) {
        for claim in &study.claims {
            match claim.check(&outcome.points) {
                Ok(()) => {}
                Err(claim::Wrong::Number { written, is }) if update => {
                    let (old, new) = (
                        format!("**{written}**{}", claim.source),
                        format!("**{is}**{}", claim.source),
                    );
                    text = text.replacen(&old, &new, 1);
                }
                Err(found) => wrong.push(format!("line {}: {found}", claim.line)),
            }
        }
        let path = docs().join(&study.picture);
        if update {
            std::fs::write(&path, &outcome.picture).unwrap();
            continue;
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        if let Some(what) = picture::difference(&committed, &outcome.picture) {
            wrong.push(format!("line {}: {} is old: {what}", study.line, study.picture));
        }
    }
    if update {
        std::fs::write(file, text).unwrap();
    }
    assert!(
        wrong.is_empty(),
        "{} does not hold (UPDATE_GOLDEN=1 writes numbers and pictures anew):\n{}",
        file.display(),
        wrong.join("\n")
    );
    page
}
