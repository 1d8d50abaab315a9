//! Networks described operator by operator, through the commands.

use super::support::Folder;

const GRAPH: &str = r#"kind = "graph"
[input]
data = "digits"
[[layer]]
name = "hidden"
operators = [
    { op = "linear", reads = ["pixels"], makes = "up", width = 24 },
    { op = "relu", reads = ["up"], makes = "h" },
]
[[layer]]
name = "head"
operators = [
    { op = "linear", reads = ["h"], makes = "logits", width = 10 },
    { op = "cross_entropy", reads = ["logits"] },
]
"#;

#[test]
fn a_graph_is_planned_simulated_trained_and_evaluated() {
    let here = Folder::new();
    here.file("g.toml", GRAPH);
    here.run("plan --model g.toml --pp 2 --dp 2 --global-batch 16 --json").done();
    let simulated =
        here.run("simulate --model g.toml --tp 2 --global-batch 16 --cluster dgx-a100 --json");
    assert!(simulated.done().objects()[0]["iteration_s"].as_f64().unwrap() > 0.0);
    here.run("search --model g.toml --cluster dgx-a100 --ranks 4 --global-batch 16 --json").done();
    let train =
        "train --model g.toml --dp 2 --leaves 2 --global-batch 64 --iterations 60 --lr 0.01";
    here.run(&format!("{train} --out run --json")).done();
    let evaluated = here.run("eval run --json").done().objects().remove(0);
    let accuracy = evaluated["accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.5, "{accuracy}");
    here.run("generate run --prompt x").refused(&["a network on images writes no text"]);
    let line = "train --model encoder-decoder --global-batch 4 --iterations 2 --out text --json";
    here.run(line).done();
    for command in ["eval text", "generate text --prompt x"] {
        here.run(command).refused(&["encoder-decoder: a graph on tokens is trained only"]);
    }
}

#[test]
fn bad_graphs_are_refused_with_file_and_line() {
    let here = Folder::new();
    let cycle = GRAPH.replace("reads = [\"pixels\"]", "reads = [\"h\"]");
    let unknown = GRAPH.replace("\"relu\"", "\"relo\"");
    let shapes = GRAPH.replace("width = 10", "width = 11");
    let lost = GRAPH.replace("    { op = \"cross_entropy\", reads = [\"logits\"] },\n", "");
    for (text, said) in [
        (cycle, "bad.toml:7: 'up' and 'h' need each other: a cycle"),
        (unknown, "bad.toml:8: layer 1, operator 2: there is no operator \"relo\""),
        (shapes, "bad.toml:14: the loss: logits of width 11 for 10 classes"),
        (lost, "bad.toml:10: the graph has no loss"),
    ] {
        here.file("bad.toml", text);
        for command in ["plan", "train --out run --overwrite", "simulate --cluster dgx-a100"] {
            here.run(&format!("{command} --model bad.toml --global-batch 8")).refused(&[said]);
        }
    }
}

#[test]
fn strategies_that_graphs_do_not_know_are_refused() {
    let here = Folder::new();
    here.file("g.toml", GRAPH);
    for (flags, said) in [
        ("--cp 2", "--cp"),
        ("--tp 2 --sp --micro-batch 2", "--sp: some operators of g know no shards of tokens"),
        ("--seq 4", "--seq"),
    ] {
        here.run(&format!("plan --model g.toml --global-batch 8 {flags}")).refused(&[said]);
    }
    let wide = GRAPH.replace("{ op = \"relu\", reads = [\"up\"], makes = \"h\" },", "{ op = \"relu\", reads = [\"up\"], makes = \"a\" },\n    { op = \"linear\", reads = [\"a\"], makes = \"h\", width = 6 },");
    here.file("w.toml", wide);
    let told = "--tp: 5 does not divide the width of 'up' in layer 'hidden', 24; these do: 1, 2, 3";
    here.run("plan --model w.toml --global-batch 8 --tp 5").refused(&[told]);
}
