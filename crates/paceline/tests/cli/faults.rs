//! Random faults: whatever is killed, stopped or terminated, the resumed run ends with the bits of an
//! undisturbed one, and nothing is left behind. `PACELINE_FAULTS` sets their number.

use super::processes::children;
use super::support::Folder;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const TRAIN: &str = "train --model mini --seq 16 --global-batch 4 --leaves 2 --iterations 40 --save-every 7 \
                     --heartbeat-timeout 1 --json";
const RANKS: usize = 2;

/// Random numbers (splitmix64; Steele et al. 2014), with a seed that is printed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }
}

fn signal(name: &str, process: u32) {
    // The process may have ended by itself.
    let _ = Command::new("kill").args([name, &process.to_string()]).stderr(Stdio::null()).status();
}

/// Notes the losses of some lines; a repeated iteration must give the same.
fn note(line: &str, losses: &mut BTreeMap<u64, String>) -> Option<u64> {
    let object: Value = serde_json::from_str(line).ok()?;
    let iteration = object["iteration"].as_u64().filter(|_| object["event"] == "iteration")?;
    let bits = object["loss_bits"].as_str().unwrap().to_owned();
    let before = losses.insert(iteration, bits.clone());
    assert!(before.is_none_or(|before| before == bits), "iteration {iteration}");
    Some(iteration)
}

/// Waits for a child, at most half a minute.
fn end(child: &mut Child) -> bool {
    let deadline = Instant::now() + Duration::from_secs(30);
    while Instant::now() < deadline {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// Waits until processes have ended; those that have not are returned. A zombie has.
fn left(processes: &[u32]) -> Vec<u32> {
    let lives = |process: &u32| {
        let status = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let state = status.rsplit(") ").next().unwrap_or_default().chars().next();
        state.is_some_and(|state| !"ZX".contains(state))
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let living: Vec<u32> = processes.iter().copied().filter(lives).collect();
        if living.is_empty() || Instant::now() > deadline {
            return living;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Files in shared memory, and sockets with a name in the run's directory.
fn leftovers(run: &Path) -> Vec<String> {
    let shared = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let names = shared.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut found: Vec<String> = names.filter(|name| name.contains("paceline")).collect();
    let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let here = run.display().to_string();
    found.extend(sockets.lines().filter(|line| line.contains(&here)).map(str::to_owned));
    found
}

/// Runs with one fault, and resumes until the end. Returns all losses.
fn disturbed(
    here: &Folder,
    dice: &mut Dice,
    line: &str,
    run: &str,
) -> (BTreeMap<u64, String>, String) {
    let mut child = here
        .command()
        .args(line.split_whitespace())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (at, target) = (1 + dice.roll(38), dice.roll(1 + RANKS as u64) as usize);
    let name = ["-KILL", "-STOP", "-TERM"][dice.roll(3) as usize];
    let told = format!("{name} to {target} of launcher and ranks after iteration {at}: {line}");
    let mut losses = BTreeMap::new();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for line in lines.by_ref() {
        if note(&line.unwrap(), &mut losses) >= Some(at) {
            break;
        }
    }
    let mut processes = children(child.id());
    processes.sort_unstable();
    processes.insert(0, child.id());
    signal(name, processes.get(target).copied().unwrap_or(child.id()));
    // A pipe whose writers are stopped never ends.
    let rest = std::thread::spawn(move || lines.map_while(Result::ok).collect::<Vec<String>>());
    if name == "-STOP" {
        // The others notice the silence; what stopped is ended by hand, as by whoever stopped it.
        let others: Vec<u32> =
            processes.iter().copied().filter(|p| *p != processes[target]).collect();
        if target == 0 {
            assert!(left(&others).is_empty(), "{told}: ranks outlive their launcher");
        } else {
            let _ = end(&mut child);
        }
        signal("-KILL", processes[target]);
    }
    assert!(end(&mut child), "{told}: the launcher does not end");
    assert!(left(&processes[1..]).is_empty(), "{told}: ranks are left");
    for line in rest.join().unwrap() {
        note(&line, &mut losses);
    }
    if losses.len() < 40 {
        let resumed = here.run(&format!("train --json --resume {run}"));
        assert_eq!(resumed.code, Some(0), "{told}\n{}", resumed.err);
        for line in resumed.out.lines() {
            note(line, &mut losses);
        }
    }
    let found = leftovers(&here.path().join(run));
    assert!(found.is_empty(), "{told}: {found:?}");
    (losses, told)
}

#[test]
fn resumed_runs_end_with_the_bits_of_undisturbed_ones() {
    let count = std::env::var("PACELINE_FAULTS").map_or(2, |text| text.parse().expect("a number"));
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let mut dice = Dice(u64::from(since.subsec_nanos()));
    eprintln!("seed {}", dice.0);
    let here = Folder::new();
    let mut expected = BTreeMap::new();
    let whole = here.run(&format!("{TRAIN} --dp 2 --out whole")).done();
    for line in whole.out.lines() {
        note(line, &mut expected);
    }
    assert_eq!(expected.len(), 40);
    for number in 0..count {
        let transport = ["shm", "tcp"][dice.roll(2) as usize];
        let layout = ["--dp 2", "--pp 2", "--dp 2 --zero 1"][dice.roll(3) as usize];
        let run = format!("run-{number}");
        let line = format!("{TRAIN} {layout} --transport {transport} --out {run}");
        let (losses, told) = disturbed(&here, &mut dice, &line, &run);
        assert_eq!(losses, expected, "{told}");
        fs::remove_dir_all(here.path().join(run)).unwrap();
    }
}
