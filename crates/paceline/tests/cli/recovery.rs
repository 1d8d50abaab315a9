//! Lost ranks: all restart, or the remaining ones continue, with bitwise identical results.

use super::processes::children;
use super::support::Folder;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines, Read};
use std::process::{Child, ChildStdout, Command, Stdio};

const TRAIN: &str = "train --model mini --seq 16 --global-batch 8 --leaves 4 --iterations 150 --save-every 10 --json";

/// A run whose ranks can be killed, read line by line.
struct Victim {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    objects: Vec<Value>,
    kills: usize,
}

impl Victim {
    fn start(here: &Folder, line: &str) -> Self {
        let mut child = here
            .command()
            .args(line.split_whitespace())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines, objects: Vec::new(), kills: 0 }
    }

    /// Reads until iteration `at` is done, after a restart if there was an earlier kill, and kills
    /// a rank.
    fn kill(&mut self, rank: usize, at: u64) {
        loop {
            let started = restarts(&self.objects).len() == self.kills;
            let line = self.lines.next().expect("the run goes on").unwrap();
            self.objects.push(serde_json::from_str(&line).unwrap());
            let last = self.objects.last().unwrap();
            let iterated = last["event"] == "iteration" && last["iteration"].as_u64() >= Some(at);
            if started && iterated {
                break;
            }
        }
        self.kills += 1;
        let mut ranks = children(self.child.id());
        ranks.sort_unstable();
        let pid = ranks[rank].to_string();
        assert!(Command::new("kill").args(["-KILL", &pid]).status().unwrap().success());
    }

    /// Reads to the end; returns the exit status, all objects, and the text on standard error.
    fn end(mut self) -> (Option<i32>, Vec<Value>, String) {
        let mut stderr = self.child.stderr.take().unwrap();
        let told = std::thread::spawn(move || {
            let mut text = String::new();
            stderr.read_to_string(&mut text).unwrap();
            text
        });
        for line in self.lines.by_ref() {
            self.objects.push(serde_json::from_str(&line.unwrap()).unwrap());
        }
        let status = self.child.wait().unwrap();
        (status.code(), self.objects, told.join().unwrap())
    }
}

/// The losses by iteration; a repeated iteration must give the same loss.
fn losses(objects: &[Value]) -> BTreeMap<u64, String> {
    let mut losses = BTreeMap::new();
    for object in objects.iter().filter(|object| object["event"] == "iteration") {
        let bits = object["loss_bits"].as_str().unwrap().to_owned();
        let before = losses.insert(object["iteration"].as_u64().unwrap(), bits.clone());
        assert!(before.is_none_or(|before| before == bits), "{object}");
    }
    losses
}

fn undisturbed(here: &Folder) -> BTreeMap<u64, String> {
    let losses = losses(&here.run(&format!("{TRAIN} --dp 2 --out undisturbed")).done().objects());
    assert_eq!(losses.len(), 150);
    losses
}

fn restarts(objects: &[Value]) -> Vec<&Value> {
    objects.iter().filter(|object| object["event"] == "restart").collect()
}

/// A number that differs between runs of the tests, so that all moments are tried over time.
fn any(below: u64) -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::from(since.subsec_micros()) % below
}

#[test]
fn restarted_runs_end_with_the_bits_of_undisturbed_ones() {
    let here = Folder::new();
    let expected = undisturbed(&here);
    for (layout, ranks) in [("--dp 2 --transport shm", 2), ("--pp 2 --dp 2 --zero 1", 4)] {
        let (rank, at) = (any(ranks) as usize, 1 + any(60));
        let line = format!("{TRAIN} {layout} --max-restarts 3 --out run-{ranks}");
        let mut victim = Victim::start(&here, &line);
        victim.kill(rank, at);
        victim.kill(0, at + 20);
        let (code, objects, told) = victim.end();
        let context = format!("{layout}: rank {rank} after {at}\n{told}");
        assert_eq!(code, Some(0), "{context}");
        assert_eq!(losses(&objects), expected, "{context}");
        let restarts = restarts(&objects);
        assert_eq!(restarts.len(), 2, "{context}");
        // The directory holds the whole run, not only the part since the last restart.
        let run = here.path().join(format!("run-{ranks}"));
        let read = |name: &str| std::fs::read_to_string(run.join(name)).unwrap();
        let record: Value = serde_json::from_str(&read("run.json")).unwrap();
        assert_eq!(record["iterations"].as_array().unwrap().len(), 150, "{context}");
        assert_eq!(record["iterations_before"], 0, "{context}");
        assert_eq!(record["restarts"][1]["after"], restarts[1]["iteration"], "{context}");
        let page = read("report.html");
        assert!(page.contains("in 150 iterations") && page.contains("restarted"), "{context}");
        assert!(!run.join("iterations.jsonl").exists(), "{context}");
        for restart in restarts {
            assert!(restart["iteration"].as_u64().unwrap() % 10 == 0, "{restart}");
            assert!(restart["cause"].as_str().unwrap().contains("ended by signal 9"), "{restart}");
        }
    }
}

#[test]
fn elastic_runs_go_on_with_those_that_are_left() {
    let here = Folder::new();
    let expected = undisturbed(&here);
    let mut victim = Victim::start(&here, &format!("{TRAIN} --dp 4 --elastic --out run"));
    victim.kill(any(4) as usize, 1 + any(40));
    // Eight samples cannot be divided among three replicas: two continue, then one.
    victim.kill(1, 70);
    victim.kill(1, 90);
    let (code, objects, told) = victim.end();
    assert_eq!(code, Some(0), "{told}");
    // The number of leaves is unchanged, so the sums are the same.
    assert_eq!(losses(&objects), expected, "{told}");
    let ranks: Vec<u64> =
        restarts(&objects).iter().map(|restart| restart["ranks"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [2, 2, 1], "{told}");
    assert!(told.contains("3 ranks are left, 2 of them go on as pp 1 × dp 2 × tp 1"), "{told}");
}

#[test]
fn what_cannot_be_restarted_says_why_it_ended() {
    let here = Folder::new();
    let mut victim = Victim::start(&here, &format!("{TRAIN} --dp 2 --max-restarts 1 --out run"));
    victim.kill(1, 5);
    victim.kill(1, 15);
    let (code, objects, told) = victim.end();
    assert_eq!((code, restarts(&objects).len()), (Some(1), 1), "{told}");
    assert!(told.contains("error: rank 1 on ") && told.contains("after 1 restarts"), "{told}");

    // A loss that is NaN would be NaN again.
    let diverging = format!("{TRAIN} --dp 2 --lr 1e3 --clip 0 --optimizer sgd --max-restarts 5");
    let (code, objects, told) = Victim::start(&here, &diverging).end();
    assert_eq!((code, restarts(&objects).len()), (Some(1), 1), "{told}");
    assert!(told.contains("another would not help"), "{told}");
}

/// A directory may have held checkpoints of a replaced run; a restart must not resume from them.
#[test]
fn a_restart_never_takes_another_runs_checkpoint() {
    let here = Folder::new();
    let line = format!("{TRAIN} --dp 2 --max-restarts 2 --out run");
    here.run(&line).done();
    let never = line.replace("--save-every 10", "--save-every 1000 --seed 2 --overwrite");
    let mut victim = Victim::start(&here, &never);
    victim.kill(1, 20);
    let (code, objects, told) = victim.end();
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(restarts(&objects)[0]["iteration"], 0, "{told}");
    assert!(told.contains("from where it began"), "{told}");
}
