//! Ranks as processes: the same bits over every transport, and failures that name their cause.

use super::support::Folder;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

pub(super) const TRAIN: &str = "train --model mini --seq 16 --global-batch 4 --leaves 2 --json";
/// A run that lasts longer than any test.
pub(super) const LONG: &str = "--iterations 1000000 --heartbeat-timeout 1 --out run";

fn bits(out: &str) -> Vec<String> {
    let objects = out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let losses = objects.filter(|object| object["event"] == "iteration");
    losses.map(|object| object["loss_bits"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn every_transport_gives_the_same_bits() {
    let here = Folder::new();
    for layout in ["--dp 2", "--dp 2 --pp 2 --zero 1", "--tp 2 --sp", "--dp 2 --sync ps:1"] {
        let run = |transport: &str| {
            let line = format!("{TRAIN} --iterations 4 {layout} --transport {transport}");
            let ran = here.run(&line).done();
            let objects = ran.objects();
            let done = objects.last().unwrap();
            let ranks = done["peak_bytes"].as_array().map_or(0, Vec::len);
            assert_eq!(ranks, done["planned_peak_bytes"].as_array().unwrap().len(), "{line}");
            bits(&ran.out)
        };
        let expected = run("thread");
        assert_eq!(expected.len(), 4);
        for transport in ["shm", "tcp", "auto"] {
            assert_eq!(run(transport), expected, "{layout} over {transport}");
        }
    }
}

/// The resident and shared memory of a rank process matches its plan, within a tenth and the size
/// of the program itself.
#[test]
fn memory_is_what_was_planned() {
    hold_memory_to_the_plan(&[
        "--dp 2 --transport shm",
        "--dp 2 --transport tcp",
        "--dp 2 --zero 3",
        "--pp 2",
        "--tp 2 --sp",
    ]);
}

/// The same with a server, whose messages are as large as the model.
#[test]
fn memory_with_servers_is_what_was_planned() {
    hold_memory_to_the_plan(&["--dp 2 --sync ps:1"]);
}

/// Trains a model with a large vocabulary under each layout; compares memory with the plan.
fn hold_memory_to_the_plan(layouts: &[&str]) {
    let here = Folder::new();
    let model = "kind = \"llama\"\nlayers = 2\nd_model = 512\nheads = 8\nkv_heads = 8\nffn = 1024\n\
                 seq = 16\nvocab = 24000\ntied = false\n";
    fs::write(here.path().join("wordy.toml"), model).unwrap();
    let train = "train --model wordy.toml --global-batch 4 --leaves 2 --iterations 2 --json";
    for layout in layouts {
        let objects = here.run(&format!("{train} {layout}")).done().objects();
        let done = objects.last().unwrap();
        let ranks = |field: &str| -> Vec<u64> {
            done[field].as_array().unwrap().iter().map(|bytes| bytes.as_u64().unwrap()).collect()
        };
        for (measured, planned) in ranks("peak_bytes").into_iter().zip(ranks("planned_peak_bytes"))
        {
            assert!(planned > 100 << 20, "{layout}: {planned} is too little to tell");
            let off = measured.abs_diff(planned);
            assert!(off <= planned / 10 + (64 << 20), "{layout}: {measured} of {planned} planned");
        }
    }
}

/// Ring attention's scaling, measured: each of eight ranks with an eight times longer sequence
/// needs as much memory as a single rank with the original one.
#[test]
fn a_sequence_eight_times_as_long_takes_eight_ranks_no_more_memory_each() {
    let here = Folder::new();
    let shape = "--model mini-llama --global-batch 1 --micro-batch 1 --dtype f32 --json";
    let peaks = |flags: &str| -> Vec<u64> {
        let train = format!("train {shape} --iterations 2 --save-every 0 --threads-per-rank 1");
        let objects = here.run(&format!("{train} {flags}")).done().objects();
        let peaks = objects.last().unwrap()["peak_bytes"].as_array().unwrap();
        peaks.iter().map(|bytes| bytes.as_u64().unwrap()).collect()
    };
    let one = peaks("--seq 512")[0];
    let whole = here.run(&format!("plan {shape} --seq 4096")).done().objects();
    let whole = whole[0]["peak_bytes"].as_u64().unwrap();
    assert!(whole > 3 * one, "{whole} on one rank are too little to tell from {one}");
    let eight = peaks("--cp 8 --seq 4096");
    assert_eq!(eight.len(), 8);
    for peak in eight {
        assert!(peak < one + one / 10 + (8 << 20), "{peak} against {one}");
    }
}

#[test]
fn a_plan_over_the_limit_does_not_start() {
    let here = Folder::new();
    let line = format!("{TRAIN} --dp 2 --iterations 2 --memory-limit");
    here.run(&format!("{line} 100kB")).refused(&[
        "--memory-limit: a rank may have",
        "and mini needs",
        "`paceline plan` shows what for",
    ]);
    here.run(&format!("{line} much")).refused(&["--memory-limit: 'much' is not a size"]);
    here.run(&format!("{line} 1GiB")).done();
}

#[test]
fn a_plan_over_the_limit_offloads_what_it_must() {
    let here = Folder::new();
    let model = "kind = \"llama\"\nlayers = 12\nd_model = 32\nheads = 4\nkv_heads = 4\nffn = 64\n\
                 seq = 64\nvocab = 256\ntied = false\n";
    fs::write(here.path().join("deep.toml"), model).unwrap();
    let shape = "--model deep.toml --dp 2 --global-batch 8 --micro-batch 4 --leaves 2 --json";
    let peak = |offload: &str| -> u64 {
        let plan = here.run(&format!("plan {shape} --dtype f32 --offload {offload}")).done();
        plan.objects()[0]["peak_bytes"].as_u64().unwrap()
    };
    let (kept, moved) = (peak("none"), peak("activations"));
    assert!(moved < kept * 7 / 10, "{moved} of {kept}");
    let train = |flags: &str| {
        let run = format!("train {shape} --iterations 4 --save-every 0 {flags}");
        let objects = here.run(&run).done().objects();
        let losses = objects.iter().filter(|object| object["event"] == "iteration");
        let bits: Vec<String> = losses.map(|line| line["loss_bits"].to_string()).collect();
        (bits, objects.last().unwrap()["planned_peak_bytes"][0].as_u64().unwrap())
    };
    let limit = format!("--offload auto --memory-limit {}B", (kept + moved) / 2);
    let (bits, planned) = train(&limit);
    assert_eq!((bits, planned), (train("").0, moved));
    assert_eq!(train(&format!("{limit} --offload-to host")).1, moved);
    let auto = format!("train {shape} --iterations 4 --offload auto");
    here.run(&auto).refused(&["--offload: auto needs the memory of a rank", "--memory-limit"]);
    here.run(&format!("train {shape} --offload some")).refused(&["--offload", "activations"]);
}

#[test]
fn shared_memory_reads_arenas_in_place() {
    let here = Folder::new();
    let run = |how: &str| {
        let line = format!("{TRAIN} --iterations 4 --dp 2 {how}");
        bits(&here.run(&line).done().out)
    };
    let expected = run("--collective direct --transport thread");
    assert_eq!(run("--collective shared-memory --transport shm"), expected);
    assert_eq!(run("--transport shm"), expected);
    let line = format!("{TRAIN} --iterations 4 --dp 2 --collective shared-memory --transport tcp");
    here.run(&line).refused(&["--collective", "share memory"]);
}

/// A run in the background, whose ranks can be found and killed.
pub(super) struct Running {
    child: Option<Child>,
    pub(super) ranks: Vec<u32>,
}

impl Running {
    /// Starts a run, and waits until the first iterations are done.
    pub(super) fn start(here: &Folder, line: &str) -> Self {
        let mut child = here
            .command()
            .args(line.split_whitespace())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        for _ in 0..2 {
            let line = lines.next().expect("the run has begun").unwrap();
            assert!(line.contains("iteration"), "{line}");
        }
        let mut ranks = children(child.id());
        // In rank order: they were started in this order.
        ranks.sort_unstable();
        Self { child: Some(child), ranks }
    }

    pub(super) fn signal(&self, pid: u32, signal: &str) {
        let done = Command::new("kill").args([signal, &pid.to_string()]).status().unwrap();
        assert!(done.success());
    }

    pub(super) fn launcher(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Waits for the end of the run, and checks that every process has ended.
    pub(super) fn end(mut self) -> (Option<i32>, String, String) {
        let mut child = self.child.take().unwrap();
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let read = |mut from: Box<dyn std::io::Read + Send>| {
            std::thread::spawn(move || {
                let mut text = String::new();
                from.read_to_string(&mut text).unwrap();
                text
            })
        };
        let (out, err) = (read(Box::new(stdout.unwrap())), read(Box::new(stderr.unwrap())));
        let deadline = Instant::now() + Duration::from_secs(60);
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > deadline => {
                    let _ = child.kill();
                    panic!("the launcher hangs: {}", err.join().unwrap());
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        for rank in &self.ranks {
            assert!(!fs::exists(format!("/proc/{rank}")).unwrap(), "process {rank} is left");
        }
        (status.code(), out.join().unwrap(), err.join().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
        }
    }
}

pub(crate) fn children(of: u32) -> Vec<u32> {
    let parent = |pid: u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may contain any character, including spaces.
        text[text.rfind(')')? + 1..].split_whitespace().nth(1)?.parse::<u32>().ok()
    };
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| parent(*pid) == Some(of)).collect()
}

#[test]
fn a_killed_rank_is_named_by_launcher_and_survivors() {
    for (transport, victim) in [("shm", 1), ("tcp", 2), ("auto", 0)] {
        let here = Folder::new();
        let running =
            Running::start(&here, &format!("{TRAIN} {LONG} --dp 2 --pp 2 --transport {transport}"));
        assert_eq!(running.ranks.len(), 4);
        running.signal(running.ranks[victim], "-KILL");
        let (code, _, err) = running.end();
        assert_eq!(code, Some(1), "{err}");
        let causes: Vec<_> = err.lines().filter(|line| line.starts_with("error:")).collect();
        assert_eq!(causes.len(), 1, "one cause, no avalanche: {err}");
        assert!(causes[0].contains(&format!("rank {victim} on ")), "{err}");
        assert!(causes[0].contains("ended by signal 9"), "{err}");
        for survivor in (0..4).filter(|rank| *rank != victim) {
            let path = here.path().join(format!("run/flight-{survivor}.txt"));
            let record = fs::read_to_string(&path).unwrap();
            let first = record.lines().next().unwrap();
            assert!(first.contains(&format!("rank {victim} on ")), "{transport}: {first}");
            assert!(record.contains("messages, the last"), "{record}");
        }
    }
}

#[test]
fn a_stopped_rank_is_given_up_within_the_bound() {
    let here = Folder::new();
    let running = Running::start(&here, &format!("{TRAIN} {LONG} --dp 2 --transport shm"));
    running.signal(running.ranks[1], "-STOP");
    let (code, _, err) = running.end();
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("rank 1 on ") && err.contains("stopped answering"), "{err}");
}

#[test]
fn an_interrupt_ends_the_run_after_an_iteration_with_its_files() {
    let here = Folder::new();
    let running = Running::start(&here, &format!("{TRAIN} {LONG} --dp 2 --transport tcp"));
    running.signal(running.launcher(), "-INT");
    let (code, out, err) = running.end();
    assert_eq!(code, Some(0), "{err}");
    let done: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert_eq!((&done["event"], &done["stopped"]), (&"done".into(), &true.into()));
    assert!(here.path().join("run/report.html").is_file());
}

#[test]
fn ranks_do_not_outlive_their_launcher() {
    let here = Folder::new();
    let mut running = Running::start(&here, &format!("{TRAIN} {LONG} --dp 2 --transport shm"));
    running.signal(running.launcher(), "-KILL");
    running.child.take().unwrap().wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while running.ranks.iter().any(|rank| fs::exists(format!("/proc/{rank}/exe")).unwrap_or(false))
    {
        assert!(Instant::now() < deadline, "ranks are left");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Starts one rank as an external launcher would.
pub(super) fn foreign(here: &Folder, line: &str, rank: u32, at: SocketAddr) -> Child {
    here.command()
        .args(line.split_whitespace())
        .args(["--launch", "env"])
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", "2")
        .env("MASTER_ADDR", at.ip().to_string())
        .env("MASTER_PORT", at.port().to_string())
        .env("PACELINE_SECRET", "known to these two ranks alone")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// An unused address for a server that another process starts, on a loopback address of its own:
/// the kernel gives clients ports of 127.0.0.1, so none can take this one before the server does.
pub(super) fn unused_address() -> SocketAddr {
    static CALLS: AtomicU8 = AtomicU8::new(2);
    let [high, low] = (std::process::id() as u16).to_be_bytes();
    let own = Ipv4Addr::new(127, 1 + high % 250, low, CALLS.fetch_add(1, Ordering::Relaxed));
    std::net::TcpListener::bind((own, 0)).unwrap().local_addr().unwrap()
}

#[test]
fn ranks_of_another_launcher_find_each_other() {
    let here = Folder::new();
    let expected = bits(&here.run(&format!("{TRAIN} --iterations 3 --dp 2")).done().out);
    let at = unused_address();
    let line = format!("{TRAIN} --iterations 3 --dp 2 --out run");
    let ranks = [0, 1].map(|rank| foreign(&here, &line, rank, at));
    let [first, second] = ranks.map(|rank| rank.wait_with_output().unwrap());
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    assert!(second.status.success(), "{}", String::from_utf8_lossy(&second.stderr));
    assert_eq!(bits(&String::from_utf8(first.stdout).unwrap()), expected);
    assert!(second.stdout.is_empty(), "rank 0 speaks for both");
}

/// Variables of Slurm are enough: the port follows from the job's number, the secret from a file of the
/// user.
#[test]
fn tasks_of_slurm_need_no_flag() {
    let here = Folder::new();
    let expected = bits(&here.run(&format!("{TRAIN} --iterations 3 --dp 2")).done().out);
    let line = format!("{TRAIN} --iterations 3 --dp 2 --out run");
    let task = |rank: u32, job: u32| {
        here.command()
            .args(line.split_whitespace())
            .env("SLURM_PROCID", rank.to_string())
            .env("SLURM_STEP_NUM_TASKS", "2")
            .env("SLURM_STEP_TASKS_PER_NODE", "2")
            .env("SLURM_STEP_NODELIST", "localhost")
            .env("SLURM_JOB_ID", job.to_string())
            .env("SLURM_STEP_ID", "0")
            .env("XDG_CONFIG_HOME", here.path().join(".config"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let job = std::process::id();
    let [first, second] = [0, 1].map(|rank| task(rank, job)).map(|t| t.wait_with_output().unwrap());
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    assert!(second.status.success(), "{}", String::from_utf8_lossy(&second.stderr));
    assert_eq!(bits(&String::from_utf8(first.stdout).unwrap()), expected);
}

/// A process that a launcher has started never becomes a job of its own.
#[test]
fn a_rank_of_a_launcher_is_never_a_job_of_its_own() {
    let here = Folder::new();
    let line: Vec<&str> = TRAIN.split_whitespace().chain(["--dp", "2", "--out", "run"]).collect();
    let mut rank = here.command();
    rank.args(&line).env("RANK", "1").env("WORLD_SIZE", "2");
    let Output { status, stderr, .. } = rank.output().unwrap();
    let said = String::from_utf8_lossy(&stderr);
    assert_eq!(status.code(), Some(2), "{said}");
    assert!(said.contains("MASTER_ADDR and MASTER_PORT"), "{said}");
    let mut rank = here.command();
    let Output { status, stderr, .. } = rank.args(&line).env("PMIX_RANK", "0").output().unwrap();
    let said = String::from_utf8_lossy(&stderr);
    assert_eq!(status.code(), Some(2), "{said}");
    assert!(said.contains("WORLD_SIZE"), "{said}");
    assert!(!here.path().join("run").exists(), "nothing was begun");
    here.run(&format!("{TRAIN} --dp 2 --transport mpi")).refused(&["--transport", "mpirun -n"]);
    here.run(&format!("{TRAIN} --dp 2 --library mpi")).refused(&["--library", "mpirun -n"]);
}

/// Open MPI itself starts the ranks, if it is installed; its library carries where they meet, and with
/// `--transport mpi` everything.
#[test]
fn ranks_of_mpirun_find_each_other() {
    let here = Folder::new();
    for more in ["", " --transport mpi"] {
        ranks_of_mpirun(&here, more);
    }
}

fn ranks_of_mpirun(here: &Folder, more: &str) {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--oversubscribe", "--allow-run-as-root", "-np", "2"]);
    let train = format!("{TRAIN} --iterations 3 --dp 2 --out run --overwrite{more}");
    let output = mpirun
        .arg(env!("CARGO_BIN_EXE_paceline"))
        .args(train.split_whitespace())
        .current_dir(here.path())
        .output();
    let Output { status, stdout, stderr } = match output {
        Ok(output) => output,
        Err(error) => {
            println!("NOT RUN: mpirun cannot be started: {error}");
            return;
        }
    };
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    let expected = bits(&here.run(&format!("{TRAIN} --iterations 3 --dp 2")).done().out);
    assert_eq!(bits(&String::from_utf8(stdout).unwrap()), expected);
}

#[test]
fn ranks_with_different_plans_do_not_start() {
    let here = Folder::new();
    let at = unused_address();
    let line = format!("{TRAIN} --iterations 3 --dp 2 --out run");
    let ranks = [("--micro-batch 1", 0), ("--micro-batch 2", 1)]
        .map(|(other, rank)| foreign(&here, &format!("{line} {other}"), rank, at));
    for Output { status, stderr, .. } in ranks.map(|rank| rank.wait_with_output().unwrap()) {
        let err = String::from_utf8(stderr).unwrap();
        assert_eq!(status.code(), Some(1), "{err}");
        assert!(err.contains("ranks disagree about the strategy's micro_batch"), "{err}");
    }
}
