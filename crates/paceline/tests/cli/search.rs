//! `paceline search` and strategies from it.

use super::support::Folder;

const MINI: &str = "search --model mini --cluster dgx-a100 --ranks 4 --global-batch 8";

#[test]
fn a_search_prints_commands_that_simulate_what_it_found() {
    let here = Folder::new();
    let found = here.run(&format!("{MINI} --top 3 --explain --tokens 1B --price 2")).done().out;
    let command = found.lines().find(|line| line.contains("paceline simulate")).unwrap();
    let command = command.split_once("paceline ").unwrap().1;
    let simulated = here.run(&format!("{command} --json")).done().out;
    let answer: serde_json::Value =
        serde_json::from_str(simulated.lines().next().unwrap()).unwrap();
    let listed = here.run(&format!("{MINI} --top 1 --json")).done().out;
    let listed: serde_json::Value = serde_json::from_str(listed.lines().next().unwrap()).unwrap();
    assert_eq!(answer["iteration_s"], listed["iteration_s"]);
    assert!(found.contains("Against the best") && found.contains("cost"), "{found}");
}

#[test]
fn pins_hold_and_impossible_ones_are_named() {
    let here = Folder::new();
    let found = here.run(&format!("{MINI} --top 5 --pp 2 --schedule ^gpipe,^1f1b --json")).done();
    for line in found.out.lines().filter(|line| line.contains("\"strategy\"")) {
        let answer: serde_json::Value = serde_json::from_str(line).unwrap();
        let strategy = &answer["strategy"];
        assert_eq!(strategy["pp"], 2);
        assert!(strategy["schedule"] != "gpipe" && strategy["schedule"] != "1f1b");
    }
    here.run(&format!("{MINI} --tp 3")).refused(&["--tp: ", "without --tp there are"]);
    here.run(&format!("{MINI} --zero 7")).refused(&["--zero"]);
    here.run(&format!("{MINI} --deadline 3")).refused(&["--deadline: needs --objective cost"]);
    let tiny = format!("{MINI} --tp 1 --cp 1 --pp 1 --recompute none --set device.memory=1MiB");
    here.run(&tiny).refused(&["fits"]);
}

#[test]
fn the_cheapest_of_several_clusters_is_listed_first() {
    let here = Folder::new();
    let line = "search --model mini --cluster dgx-h100 --or-cluster dgx-a100 --ranks 2,4 \
                --global-batch 8 --objective cost --price 3,1 --tokens 1B --top 4 --json";
    let out = here.run(line).done().out;
    let costs: Vec<f64> = out
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()?["cost"].as_f64())
        .collect();
    assert_eq!(costs.len(), 4);
    assert!(costs.windows(2).all(|pair| pair[0] <= pair[1]), "{costs:?}");
}

#[test]
fn a_strategy_comes_from_a_search_or_from_its_answer() {
    let here = Folder::new();
    let listed = here.run(&format!("{MINI} --top 1 --json")).done().out;
    let first = listed.lines().next().unwrap();
    let best: serde_json::Value = serde_json::from_str(first).unwrap();
    here.file("found.json", first);
    let on = "simulate --model mini --cluster dgx-a100 --json";
    let read = here.run(&format!("{on} --strategy found.json")).done().out;
    let auto = here.run(&format!("{on} --ranks 4 --global-batch 8 --strategy auto")).done().out;
    for out in [read, auto] {
        let answer: serde_json::Value = serde_json::from_str(out.lines().next().unwrap()).unwrap();
        assert_eq!(answer["iteration_s"], best["iteration_s"], "{out}");
    }
    here.run("simulate --model mini --strategy auto").refused(&["--cluster"]);
    here.run("plan --model mini --strategy auto").refused(&["--strategy: auto needs a cluster"]);
}

#[test]
fn ranks_take_the_strategy_that_their_launcher_found() {
    let here = Folder::new();
    let mut command = here.command();
    let line = "train --model mini --seq 16 --global-batch 4 --cluster laptop --ranks 2 \
                --strategy auto --transport tcp --iterations 1 --out run";
    command.args(line.split_whitespace()).env("PACELINE_LOG", "search=debug,comm=debug");
    let output = command.output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{err}");
    assert!(err.contains("joined rank=1"), "{err}");
    assert_eq!(err.matches("DEBUG search: searched").count(), 1, "{err}");
}
