//! Ranks started by agents, and jobs for engines of clusters.

use super::processes::{foreign, unused_address};
use super::support::Folder;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

const TRAIN: &str =
    "train --model mini --seq 16 --global-batch 8 --leaves 4 --dp 4 --threads-per-rank 1 --json";

/// A remote shell that reaches every host but one: all are this machine.
const SHELL: &str = "host=$1; shift\n\
                     [ \"$host\" != nowhere ] || { echo \"$host: no route to host\" >&2; exit 255; }\n\
                     exec \"$@\"\n";

fn last_bits(out: &str) -> String {
    let done: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let done = done.last().unwrap();
    assert_eq!(done["event"], "done", "{done}");
    done["loss_bits"].as_str().unwrap().to_owned()
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// `paceline launch` on two hosts with two slots each.
fn launch(here: &Folder, hosts: &str, train: &str) -> Command {
    here.file("shell", SHELL);
    let mut command = here.command();
    command.args(["launch", "--on", "ssh", "--ssh", "sh shell", "--hosts", hosts, "--"]);
    command.args(words(train)).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Reads lines until one contains `wanted`.
fn read_until(lines: &mut BufReader<ChildStdout>, wanted: &str) -> String {
    let mut line = String::new();
    while !line.contains(wanted) {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the output ended before '{wanted}'");
    }
    line
}

/// Processes with a variable in their environment.
fn processes_with(variable: &str, directory: &Folder) -> Vec<i32> {
    let below = directory.path().to_str().unwrap().to_owned();
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let text = String::from_utf8_lossy(&environment).into_owned();
        text.contains(&below) && text.split('\0').any(|found| found == variable)
    })
    .collect()
}

fn signal(pid: i32, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), signal).unwrap();
}

#[test]
fn ranks_of_several_hosts_give_the_bits_of_one() {
    let here = Folder::new();
    let line = format!("{TRAIN} --iterations 3");
    let expected = last_bits(&here.run(&format!("{line} --out local")).done().out);
    let run = format!("{line} --out spread");
    let Output { status, stdout, stderr } = launch(&here, "a:2,b:2", &run).output().unwrap();
    let said = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{said}");
    assert_eq!(last_bits(&String::from_utf8(stdout).unwrap()), expected);
    assert!(here.path().join("spread/logs/rank-0.log").is_file());
    assert!(!said.contains("SECRET"), "{said}");
}

#[test]
fn hosts_that_cannot_take_part_are_named() {
    let here = Folder::new();
    let run = format!("{TRAIN} --iterations 3 --out run");
    let refused = |hosts: &str, parts: &[&str]| {
        let Output { status, stderr, .. } = launch(&here, hosts, &run).output().unwrap();
        let said = String::from_utf8_lossy(&stderr);
        assert_eq!(status.code(), Some(2), "{said}");
        parts.iter().for_each(|part| assert!(said.contains(part), "lacks {part}: {said}"));
    };
    refused("a:2,nowhere:2", &["--hosts", "nowhere", "no route to host"]);
    refused("a:2,b:1", &["4 ranks need 4 slots", "a takes 2", "b takes 1"]);
    refused("a:2,b:zero", &["'zero' slots"]);
    here.run("launch --on pigeon --hosts a -- train --model mini").refused(&["--on", "pigeon"]);
    here.run("launch --on ssh -- train --model mini").refused(&["--hosts"]);
    here.run("launch --on ssh --hosts a -- plan --model mini").refused(&["-- train"]);
}

/// Connections that do not know the secret, to rank 0's rendezvous while it waits for the others.
#[test]
fn strangers_change_nothing_and_are_logged_once() {
    let here = Folder::new();
    let line = "train --model mini --seq 16 --global-batch 4 --dp 2 --iterations 2 --json";
    let expected = last_bits(&here.run(&format!("{line} --out local")).done().out);
    let at = unused_address();
    let first = foreign(&here, &format!("{line} --out run"), 0, at);
    let mut sent = 0;
    while sent < 20 {
        match std::net::TcpStream::connect(at) {
            Ok(mut stranger) => {
                stranger.write_all(&[b'x'; 200]).unwrap();
                sent += 1;
            }
            // Rank 0 does not listen yet.
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(5)),
        }
    }
    let second = foreign(&here, &format!("{line} --out run"), 1, at);
    let [first, second] = [first, second].map(|rank| rank.wait_with_output().unwrap());
    let said = String::from_utf8_lossy(&first.stderr);
    assert!(first.status.success() && second.status.success(), "{said}");
    assert_eq!(last_bits(&String::from_utf8(first.stdout).unwrap()), expected);
    assert_eq!(said.matches("refused a connection").count(), 1, "{said}");
    assert!(said.contains(&format!("from={}", at.ip())) || said.contains("from=127."), "{said}");
}

/// A rank and then an agent are lost: each is named, and training goes on with the same bits.
#[test]
fn a_lost_rank_and_a_lost_agent_change_no_bits() {
    let here = Folder::new();
    let line = format!("{TRAIN} --iterations 150");
    let expected = last_bits(&here.run(&format!("{line} --out local")).done().out);
    let run = format!("{line} --out run --save-every 10 --max-restarts 2");
    let mut job: Child = launch(&here, "a:2,b:2", &run).spawn().unwrap();
    let mut out = BufReader::new(job.stdout.take().unwrap());
    read_until(&mut out, "\"iteration\":30,");
    let [rank] = processes_with("PACELINE_RANK=3", &here)[..] else { panic!("one rank 3") };
    signal(rank, rustix::process::Signal::KILL);
    let first = read_until(&mut out, "\"restart\"");
    assert!(first.contains("rank 3 on"), "{first}");
    read_until(&mut out, "\"event\":\"iteration\"");
    let [rank] = processes_with("PACELINE_RANK=2", &here)[..] else { panic!("one rank 2") };
    let status = std::fs::read_to_string(format!("/proc/{rank}/status")).unwrap();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap();
    signal(parent.trim().parse().unwrap(), rustix::process::Signal::KILL);
    let second = read_until(&mut out, "\"restart\"");
    assert!(second.contains("rank 2 on") || second.contains("rank 3 on"), "{second}");
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert!(job.wait().unwrap().success());
    assert_eq!(last_bits(&rest), expected);
    assert!(processes_with("PACELINE_WORLD=4", &here).is_empty(), "ranks are left");
}

/// Two agents without a leader, with the variables of Kubeflow Trainer; afterwards the run that is there
/// is continued.
#[test]
fn agents_of_pods_find_each_other_and_continue() {
    let here = Folder::new();
    let expected = last_bits(&here.run(&format!("{TRAIN} --iterations 3 --out local")).done().out);
    for (iterations, port) in [(3, 0), (6, 1)] {
        let line = format!("agent -- {TRAIN} --iterations {iterations} --out run");
        let pod = |index: u32| {
            let mut command = here.command();
            command.args(words(&line)).stdout(Stdio::piped()).stderr(Stdio::piped());
            let port = (20_000 + std::process::id() % 10_000 * 2 + port).to_string();
            command
                .env("PET_NNODES", "2")
                .env("PET_NODE_RANK", index.to_string())
                .env("PET_NPROC_PER_NODE", "2")
                .env("PET_MASTER_ADDR", "127.0.0.1")
                .env("PET_MASTER_PORT", port)
                .env("PACELINE_SECRET", "known to these two pods alone");
            command.spawn().unwrap()
        };
        let [first, second] = [0, 1].map(pod).map(|pod| pod.wait_with_output().unwrap());
        assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
        assert!(second.status.success(), "{}", String::from_utf8_lossy(&second.stderr));
        let out = String::from_utf8(first.stdout).unwrap();
        if iterations == 3 {
            assert_eq!(last_bits(&out), expected);
        } else {
            assert!(out.contains("\"iteration\":6,"), "{out}");
            assert!(!out.contains("\"iteration\":3,"), "the first three were done: {out}");
        }
    }
}

/// A scheduler's signal ends a run with a checkpoint, and its next turn continues from there.
#[test]
fn an_announced_limit_saves_and_a_requeued_job_resumes() {
    let here = Folder::new();
    let line = format!("{TRAIN} --iterations 200");
    let expected = last_bits(&here.run(&format!("{line} --out local")).done().out);
    let mut first = here.command();
    first.args(words(&format!("{line} --out run"))).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut first = first.spawn().unwrap();
    let mut out = BufReader::new(first.stdout.take().unwrap());
    read_until(&mut out, "\"iteration\":5,");
    signal(first.id() as i32, rustix::process::Signal::USR1);
    signal(first.id() as i32, rustix::process::Signal::TERM);
    let done = read_until(&mut out, "\"event\":\"done\"");
    assert!(done.contains("\"stopped\":true"), "{done}");
    assert_eq!(first.wait().unwrap().code(), Some(138), "the announcement is why it stopped");
    let mut second = here.command();
    second.args(words(&format!("{line} --out run"))).env("SLURM_RESTART_COUNT", "1");
    let Output { status, stdout, stderr } = second.output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    let out = String::from_utf8(stdout).unwrap();
    assert_eq!(last_bits(&out), expected);
    assert!(!out.contains("\"iteration\":1,"), "{out}");
}

#[test]
fn jobs_are_written_for_slurm_and_kubernetes() {
    let here = Folder::new();
    let train = "train --model mini --dp 4 --global-batch 8 --out /checkpoints/run";
    let submit = |line: &str| here.run(&format!("submit {line} -- {train}"));
    let script = submit("--to slurm --nodes 2 --time 30:00 --dry-run").done().out;
    for part in [
        "--nodes=2",
        "--ntasks-per-node=2",
        "--time=30:00",
        "--signal=B:USR1@120",
        "srun",
        "requeue",
    ] {
        assert!(script.contains(part), "lacks {part}: {script}");
    }
    let pods = "--to kubernetes --nodes 2 --image an-image --volume checkpoints --dry-run";
    let set: Value = serde_json::from_str(&submit(pods).done().out).unwrap();
    let job = &set["spec"]["replicatedJobs"][0]["template"]["spec"];
    assert_eq!((&set["kind"], &job["completions"]), (&"JobSet".into(), &2.into()));
    let container = &job["template"]["spec"]["containers"][0];
    assert_eq!(container["volumeMounts"][0]["mountPath"], "/checkpoints");
    assert_eq!(container["env"][0]["value"], "paceline-ranks-0-0.paceline");
    let trainer: Value =
        serde_json::from_str(&submit(&format!("{pods} --kind trainjob")).done().out).unwrap();
    assert_eq!(trainer["spec"]["trainer"]["numProcPerNode"], 2);
    let answer = submit("--to slurm --dry-run --json").done().objects().remove(0);
    assert_eq!(answer["engine"], "slurm");
    assert!(answer["document"].as_str().unwrap().starts_with("#!/bin/bash\n#SBATCH"), "{answer}");
    let watched = here.run(&format!("submit --to slurm --dry-run -- {train} --elastic")).done().out;
    for part in ["launch --on slurm -- train", "--no-kill"] {
        assert!(watched.contains(part), "lacks {part}: {watched}");
    }
    submit("--to slurm --dry-run --time soon --memory 4Gi --partition=").refused(&[
        "--time: 'soon'",
        "--memory: '4Gi'",
        "--partition",
    ]);
    submit("--to kubernetes --dry-run --signal-before 9").refused(&["--signal-before: goes with"]);
    here.file("old/run.toml", "");
    here.run("submit --to slurm --dry-run -- train --model mini --dp 4 --global-batch 8 --out old")
        .refused(&["--out: old has a run already", "--resume old"]);
    here.run("submit --to slurm --dry-run -- train --model mini --dp 4 --global-batch 8 --out old --overwrite")
        .done();
    submit("--to slurm --nodes 3 --dry-run").refused(&["--nodes", "4 ranks"]);
    submit("--to kubernetes --dry-run").refused(&["--image", "--volume"]);
    submit("--to cloud").refused(&["--to", "cloud"]);
}
