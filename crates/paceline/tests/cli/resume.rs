//! `--resume`: a run goes on as it was, wherever it is resumed; runs never mix in a directory.

use super::support::{Folder, Ran};
use serde_json::Value;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

fn losses(ran: &Ran) -> Vec<String> {
    let objects = ran.objects();
    let iterations = objects.iter().filter(|object| object["event"] == "iteration");
    iterations.map(|object| object["loss_bits"].as_str().unwrap().to_owned()).collect()
}

fn record(here: &Folder, run: &str) -> Value {
    let text = fs::read_to_string(here.path().join(run).join("run.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The newest complete checkpoint of a run.
fn newest(here: &Folder, run: &str) -> Option<usize> {
    let entries = fs::read_dir(here.path().join(run).join("checkpoints"));
    let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.to_str()?.strip_prefix("iteration-")?.parse().ok()).max()
}

fn start(here: &Folder, line: &str) -> Child {
    let mut command = here.command();
    command.args(line.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status();
    assert!(sent.unwrap().success());
}

/// Starts a run, and kills its launcher once it has a checkpoint.
fn killed(here: &Folder, line: &str, run: &str) {
    let mut child = start(here, line);
    while newest(here, run).is_none() {
        assert!(child.try_wait().unwrap().is_none(), "the run ended by itself");
        std::thread::sleep(Duration::from_millis(3));
    }
    signal(&child, "-KILL");
    child.wait().unwrap();
}

/// Everything that decides the result differs from its default; only the run's directory is named
/// when it is resumed, from another working directory.
#[test]
fn a_killed_run_resumes_with_all_that_it_had() {
    let here = Folder::new();
    here.file("text/a.txt", "to be or not to be, that is the question. ".repeat(60));
    let train = "train --model mini --seq 24 --pp 4 --global-batch 8 --micro-batch 2 --leaves 2 --data text \
                 --optimizer lamb --lr 0.01 --lr-schedule cosine --warmup 3 --weight-decay 0.1 --clip 0.7 \
                 --seed 7 --iterations 30 --save-every 4 --json";
    let whole = here.run(&format!("{train} --out whole")).done();
    let expected = losses(&whole);
    killed(&here, &format!("{train} --out cut"), "cut");
    let elsewhere = Folder::new();
    let cut = here.path().join("cut");
    let rest = elsewhere.run(&format!("train --json --resume {}", cut.display())).done();
    let resumed = losses(&rest);
    assert!(!resumed.is_empty() && resumed.len() < 30, "{}", resumed.len());
    assert_eq!(resumed, expected[30 - resumed.len()..]);
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0, "it goes on where it was");
    let bits = |run| -> Vec<Value> {
        let all = record(&here, run)["iterations"].as_array().unwrap().clone();
        all.into_iter().map(|iteration| iteration["loss"].clone()).collect()
    };
    assert_eq!(bits("cut"), bits("whole"), "run.json has the whole run");
    assert_eq!(record(&here, "cut")["checkpoint"], "checkpoints/iteration-00000030");
    let weights = |run: &str| {
        let file = "checkpoints/iteration-00000030/model.safetensors";
        fs::read(here.path().join(run).join(file)).unwrap()
    };
    assert_eq!(weights("cut"), weights("whole"));
    let told = elsewhere.run(&format!("train --resume {}", cut.display()));
    told.refused(&["--iterations: 30 counts from the run's start, and the checkpoint is at 30"]);
}

/// A run that was killed before its first checkpoint starts again, with its own settings.
#[test]
fn a_run_without_a_checkpoint_starts_again() {
    let here = Folder::new();
    let train = "train --model mini --seq 16 --dp 2 --global-batch 4 --seed 3 --json";
    let expected = losses(&here.run(&format!("{train} --iterations 4 --out whole")).done());
    let mut child = start(&here, &format!("{train} --iterations 1000000 --out cut"));
    while !here.path().join("cut/iterations.jsonl").exists() {
        std::thread::sleep(Duration::from_millis(3));
    }
    signal(&child, "-KILL");
    child.wait().unwrap();
    let rest = here.run("train --resume cut --iterations 4 --json").done();
    assert_eq!(losses(&rest), expected);
}

#[test]
fn changes_that_alter_the_result_are_told_in_one_line() {
    let here = Folder::new();
    let train = "train --model mini --seq 16 --global-batch 4 --leaves 2 --iterations 2 --out run";
    here.run(train).done();
    let told = here.run("train --resume run --iterations 3 --dp 2 --save-every 1").done().out;
    assert!(!told.contains("changed:"), "another layout, the same bits: {told}");
    let told = here.run("train --resume run --iterations 4 --global-batch 8 --lr 0.1").done().out;
    assert!(told.contains("changed: --global-batch 4 → 8, --lr 0.003 → 0.1; so it"), "{told}");
    // A part of the directory's run is not silently lost.
    let ran = here.run("train --resume run/checkpoints/iteration-00000003 --iterations 5");
    ran.refused(&["--resume: run also has a checkpoint of iteration 4", "--out", "--overwrite"]);
    let branch = "train --resume run/checkpoints/iteration-00000003 --iterations 5";
    here.run(&format!("{branch} --out branch")).done();
    assert_eq!(record(&here, "branch")["iterations_before"], 3);
    here.run(&format!("{branch} --overwrite")).done();
    assert_eq!(record(&here, "run")["iterations"].as_array().unwrap().len(), 5);
}

/// Two models in turn: the second is refused, or replaces the first with all its checkpoints.
#[test]
fn a_directory_with_a_run_is_refused() {
    let here = Folder::new();
    let train = "train --seq 16 --global-batch 2 --out run";
    here.run(&format!("{train} --model mini --iterations 4 --save-every 2")).done();
    let before = fs::read(here.path().join("run/run.json")).unwrap();
    let ran = here.run(&format!("{train} --model mini-llama --iterations 2"));
    ran.refused(&["--out: run holds a run", "--resume run", "--overwrite"]);
    assert_eq!(fs::read(here.path().join("run/run.json")).unwrap(), before);
    assert_eq!(newest(&here, "run"), Some(4));
    here.run("--iterations 2 --out run").refused(&["--out: run holds a run"]);
    let second = "train --model mini-llama --seq 16 --iterations 2 --out run --overwrite";
    here.run(second).done();
    assert_eq!(newest(&here, "run"), Some(2), "the first model's are gone");
    let told = here.run("eval run --seq 16 --samples 2 --json").done().objects();
    assert_eq!(told[0]["model"], "mini-llama");
}

/// Two jobs at once: the second is refused while any rank of the first is there.
#[test]
fn a_directory_in_use_is_refused() {
    let here = Folder::new();
    for transport in ["thread", "shm"] {
        let train =
            format!("train --model mini --seq 16 --dp 2 --transport {transport} --out {transport}");
        let mut child = start(&here, &format!("{train} --iterations 1000000 --save-every 1"));
        while newest(&here, transport).is_none() {
            std::thread::sleep(Duration::from_millis(3));
        }
        let owner = format!("in use by another job (process {})", child.id());
        here.run(&format!("{train} --overwrite")).refused(&[&owner]);
        here.run(&train).refused(&["in use by another job"]);
        here.run(&format!("train --resume {transport}")).refused(&["in use by another job"]);
        signal(&child, "-INT");
        assert!(child.wait().unwrap().success());
        let until = newest(&here, transport).unwrap() + 1;
        here.run(&format!("train --resume {transport} --iterations {until}")).done();
    }
}

#[test]
fn an_interrupted_run_says_how_to_resume_it() {
    let here = Folder::new();
    let line = "train --model mini --seq 16 --iterations 1000000 --save-every 1 --json";
    let mut command = here.command();
    command.args(line.split_whitespace()).args(["--out", "a run"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while newest(&here, "a run").is_none() {
        std::thread::sleep(Duration::from_millis(3));
    }
    signal(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("resume with paceline train --resume 'a run'"), "{told}");
    let last: Value =
        serde_json::from_str(String::from_utf8(output.stdout).unwrap().lines().last().unwrap())
            .unwrap();
    assert_eq!(last["resume"], "paceline train --resume 'a run'");
    let done = last["iterations"].as_u64().unwrap() + 2;
    here.run_with(&["train", "--resume", "a run", "--iterations", &done.to_string()]).done();
}

#[test]
fn a_damaged_checkpoint_is_named_and_an_older_one_is_resumed() {
    let here = Folder::new();
    let train = "train --model mini --seq 16 --dp 2 --global-batch 4 --iterations 6 --save-every 2";
    let whole = losses(&here.run(&format!("{train} --out run --json")).done());
    let weights = here.path().join("run/checkpoints/iteration-00000006/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let verified = here.run("checkpoint verify run --json");
    assert_eq!(verified.code, Some(1), "{}", verified.err);
    let told = verified.out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let told: Vec<Value> = told.collect();
    assert_eq!([&told[0]["whole"], &told[1]["whole"], &told[2]["whole"]], [true, true, false]);
    let damage = told[2]["damage"].as_str().unwrap();
    assert!(
        damage.contains("model.safetensors: tensor '") && damage.contains("is damaged"),
        "{damage}"
    );
    let ran = here.run("eval run --seq 16 --samples 2").refused(&["is damaged"]);
    assert!(ran.err.contains("model.safetensors: tensor '"), "{}", ran.err);
    let rest = here.run("train --resume run --json").done();
    assert_eq!(losses(&rest), whole[4..]);
    assert!(
        rest.err.contains("is left out") && rest.err.contains("going on after iteration 4"),
        "{}",
        rest.err
    );
    here.run("checkpoint verify run").done();
    here.run("checkpoint verify nowhere").refused(&["nowhere: no complete checkpoint"]);
}
