//! Tests of run files.

use super::support::Folder;

#[test]
fn a_flag_wins_over_the_commands_section_which_wins_over_the_file() {
    let here = Folder::new();
    here.file(
        "run.toml",
        "model = \"mini\"\ndp = 2\nglobal_batch = 8\nmicro-batch = 1\nno-overlap = true\nsp = false\n\
         [plan]\ndp = 4\n[train]\niterations = 3\nlr = 1e-3\n",
    );
    let ranks = |line: &str| here.run(line).done().objects()[0]["ranks"].as_u64();
    assert_eq!(ranks("plan --config run.toml --json"), Some(4));
    assert_eq!(ranks("plan --dp 8 --config run.toml --json"), Some(8));
    assert_eq!(here.run("train --config run.toml --json").done().objects().len(), 4);
}

#[test]
fn problems_in_a_file_are_told_with_file_and_line() {
    let here = Folder::new();
    here.file("run.toml", "model = \"gpt2-124m\"\n\ntp = 5\n[plan]\npp = 0\n");
    here.run("plan --config run.toml")
        .refused(&["run.toml:3: --tp: 5 does not divide", "run.toml:5: --pp: '0' is not"]);
    here.file("big.toml", "model = \"mini\"\ndp = 18446744073709551616\nseq = -1\n");
    here.run("plan --config big.toml").refused(&["big.toml:2: --dp", "big.toml:3: --seq: '-1'"]);
}

#[test]
fn unknown_keys_are_errors_with_a_suggestion() {
    let here = Folder::new();
    here.file(
        "run.toml",
        "modle = \"mini\"\niterations = 3\nconfig = \"other.toml\"\ntp = [2]\nsp = 1\ndp = true\n\
         [plam]\ntp = 2\n[train]\nitertions = 3\n",
    );
    let told = here.run("plan --config run.toml").refused(&[
        "run.toml:1: `modle` is not a flag of `paceline plan` (did you mean `model`?)",
        "run.toml:2: `iterations` is not a flag of `paceline plan`, but of `paceline train`; put it under [train]",
        "run.toml:3: `config` cannot stand in a run file",
        "run.toml:4: `tp` is a list",
        "run.toml:5: `sp` takes true or false",
        "run.toml:6: `dp` takes a value, not true or false",
        "run.toml:7: [plam] is not a command of paceline (did you mean `plan`?)",
        "run.toml:10: `itertions` is not a flag of `paceline train` (did you mean `iterations`?)",
    ]);
    assert_eq!(told.err.lines().count(), 9, "{}", told.err);
    here.file("cut.toml", "model = \"mini\"\ntp = ");
    here.run("plan --config cut.toml").refused(&["cut.toml:2: not TOML"]);
}

#[test]
fn every_example_of_the_repository_works() {
    let here = Folder::new();
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples");
    let mut seen = 0;
    for entry in std::fs::read_dir(examples).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            here.run_with(&["plan", "--config", path.to_str().unwrap()]).done();
            seen += 1;
        }
    }
    assert!(seen >= 4, "{seen}");
}

#[test]
fn the_demo_reads_a_file_too() {
    let here = Folder::new();
    here.file("demo.toml", "iterations = 2\nout = \"here\"\njson = true\n");
    let objects = here.run("--config demo.toml").done().objects();
    assert_eq!(objects.len(), 3);
    assert!(here.path().join("here/report.html").is_file());
}
