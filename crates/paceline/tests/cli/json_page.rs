//! `docs/json.md` against the answers: every command of the page is run, every object must have the
//! fields of one of its tables and no others.

use super::support::Folder;
use serde_json::Value;

const PAGE: &str = include_str!("../../../../docs/json.md");

/// A table of the page: its fields, and which of them are always there.
#[derive(Debug, Default)]
struct Table {
    fields: Vec<(String, Presence)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Presence {
    Always,
    MayBeNull,
    MayBeAbsent,
}

/// A section with a command and its tables.
struct Section {
    title: String,
    command: Option<String>,
    tables: Vec<Table>,
}

fn sections() -> Vec<Section> {
    let mut all: Vec<Section> = Vec::new();
    for part in PAGE.split("\n## ").skip(1) {
        let title = part.lines().next().unwrap_or_default().to_owned();
        let command = part.lines().find(|line| line.starts_with("paceline "));
        let mut tables: Vec<Table> = Vec::new();
        for line in part.lines().filter(|line| line.starts_with('|')) {
            match line {
                "| field | meaning |" => tables.push(Table::default()),
                "|---|---|" => {}
                row => tables.last_mut().unwrap().read(row, &all),
            }
        }
        all.push(Section { title, command: command.map(str::to_owned), tables });
    }
    all
}

impl Table {
    fn read(&mut self, row: &str, earlier: &[Section]) {
        let cells: Vec<&str> = row.trim_matches('|').splitn(2, " | ").collect();
        if cells[0].contains("[subject]") {
            let subject = earlier.iter().find(|section| section.title == "Subject").unwrap();
            return self.fields.extend(subject.tables[0].fields.clone());
        }
        let presence = match cells[1] {
            meaning if meaning.contains("may be absent") => Presence::MayBeAbsent,
            meaning if meaning.contains("absent without") => Presence::MayBeAbsent,
            meaning if meaning.contains("may be null") => Presence::MayBeNull,
            "null" => Presence::MayBeNull,
            meaning if meaning.starts_with("null;") => Presence::MayBeNull,
            _ => Presence::Always,
        };
        let names = cells[0].split('`').skip(1).step_by(2);
        self.fields.extend(names.map(|name| (name.to_owned(), presence)));
    }

    /// The first difference between the table and an object.
    fn differs(&self, object: &Value) -> Option<String> {
        let object = object.as_object().unwrap();
        for (name, presence) in &self.fields {
            match (object.get(name), presence) {
                (None, Presence::MayBeAbsent) => {}
                (None, _) => return Some(format!("{name} is absent")),
                (Some(Value::Null), Presence::Always) => return Some(format!("{name} is null")),
                (Some(_), _) => {}
            }
        }
        let documented = |name: &&String| self.fields.iter().any(|(known, _)| known == *name);
        object.keys().find(|name| !documented(name)).map(|name| format!("{name} is in no table"))
    }
}

#[test]
fn the_page_of_json_fields_describes_every_answer() {
    let here = Folder::new();
    here.file(
        "table.csv",
        "gpu,gpus,op,size_bytes,time_us_out_of_place\nA100,8,all_reduce,67108864,580\n",
    );
    let mut run = 0;
    for Section { title, command, tables } in sections() {
        let Some(line) = command else { continue };
        let arguments: Vec<&str> = line.split_whitespace().skip(1).collect();
        let ran = here.run_with(&arguments);
        let expected = if title == "Errors" { Some(2) } else { Some(0) };
        assert_eq!(ran.code, expected, "{line}\n{}", ran.err);
        let objects = ran.objects();
        assert!(!objects.is_empty(), "{line}");
        let mut used = vec![false; tables.len()];
        for object in &objects {
            let differences: Vec<_> = tables.iter().map(|table| table.differs(object)).collect();
            let Some(at) = differences.iter().position(Option::is_none) else {
                panic!("docs/json.md, {title}: {differences:?} for\n{object}");
            };
            used[at] = true;
        }
        assert!(used.iter().all(|used| *used), "docs/json.md, {title}: a table without an object");
        run += 1;
    }
    assert!(run >= 15, "{run} commands");
}

/// A strategy of an answer is a run file.
#[test]
fn the_strategy_of_an_answer_can_be_given_again() {
    let here = Folder::new();
    let line = "plan --model mini --tp 2 --pp 2 --global-batch 8 --zero 0 --json";
    let plan = here.run(line).done().objects().remove(0);
    let strategy = plan["strategy"].as_object().unwrap();
    let file: String = strategy.iter().map(|(name, value)| format!("{name} = {value}\n")).collect();
    here.file("again.toml", file);
    let again = here.run("plan --model mini --config again.toml --json").done().objects().remove(0);
    assert_eq!(again, plan);
}

#[test]
fn errors_are_objects_too() {
    let here = Folder::new();
    here.file("bad.toml", "model = \"mini\"\njson = true\ntp = 5\n");
    let ran = here.run("plan --config bad.toml --pp 9");
    assert_eq!(ran.code, Some(2));
    let error = &ran.objects()[0];
    let problems = error["problems"].as_array().unwrap();
    assert_eq!((error["exit_status"].as_u64(), problems.len()), (Some(2), 2), "{error}");
    let tp = problems.iter().find(|problem| problem["flag"] == "--tp").unwrap();
    assert_eq!(tp["location"], "bad.toml:3");
    for line in ["simulate --modle mini --json", "plan --format csv --json", "nothing --json"] {
        let ran = here.run(line);
        assert_eq!((ran.code, ran.objects().len()), (Some(2), 1), "{line}");
        assert!(ran.objects()[0]["error"].as_str().unwrap().len() > 10, "{line}");
    }
    let help = here.run("plan --json --help").done();
    assert!(help.out.contains("--model"), "help stays text");
}
