//! Signals, closed output, secrets and encryption, from the command line.

use super::processes::{LONG, Running, TRAIN, foreign, unused_address};
use super::support::Folder;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

/// Losses of a run's iterations.
fn losses(out: &str) -> Vec<String> {
    let events = out.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.filter(|e| e["event"] == "iteration").map(|e| e["loss_bits"].to_string()).collect()
}

#[test]
fn a_closed_log_consumer_does_not_end_a_run() {
    for transport in ["thread", "shm"] {
        let here = Folder::new();
        let mut child = here
            .command()
            .args(
                format!("{TRAIN} --iterations 40 --out run --dp 2 --transport {transport}")
                    .split(' '),
            )
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut reader = BufReader::new(child.stdout.take().unwrap());
        reader.read_line(&mut String::new()).unwrap();
        drop(reader);
        let ended = child.wait_with_output().unwrap();
        let err = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(0), "{transport}: {err}");
        assert!(err.contains("standard output is closed"), "{transport}: {err}");
        let record = std::fs::read(here.path().join("run/run.json")).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        assert_eq!(record["iterations"].as_array().unwrap().len(), 40, "{transport}");
        assert_eq!(record["checkpoint"], "checkpoints/iteration-00000040", "{transport}");
    }
}

/// Returns true if this process, and so its children, ignore SIGHUP.
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(ignored.trim(), 16).unwrap() & 1 == 1
}

#[test]
fn termination_and_hangup_have_a_status_of_their_own_after_a_checkpoint() {
    for (signal, status, transport) in
        [("-TERM", 143, "shm"), ("-HUP", 129, "tcp"), ("-TERM", 143, "thread")]
    {
        if signal == "-HUP" && ignores_hangup() {
            eprintln!(
                "skipped: the tests were started with SIGHUP ignored (nohup), as is what they start"
            );
            continue;
        }
        let here = Folder::new();
        let running =
            Running::start(&here, &format!("{TRAIN} {LONG} --dp 2 --transport {transport}"));
        running.signal(running.launcher(), signal);
        let (code, out, err) = running.end();
        assert_eq!(code, Some(status), "{transport}: {err}");
        let done: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
        assert_eq!((&done["event"], &done["stopped"]), (&"done".into(), &true.into()));
        let record = std::fs::read(here.path().join("run/run.json")).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        let checkpoint = record["checkpoint"].as_str().unwrap();
        here.run(&format!("checkpoint verify run/{checkpoint}")).done();
    }
}

#[test]
fn a_signal_to_every_rank_ends_the_run_as_one_to_the_launcher_does() {
    let here = Folder::new();
    let running = Running::start(&here, &format!("{TRAIN} {LONG} --dp 2 --transport shm"));
    for rank in &running.ranks {
        running.signal(*rank, "-TERM");
    }
    running.signal(running.launcher(), "-TERM");
    let (code, out, err) = running.end();
    assert_eq!(code, Some(143), "{err}");
    let done: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert_eq!(done["event"], "done");
}

#[test]
fn encryption_changes_no_bit_of_a_run() {
    let here = Folder::new();
    let line = format!("{TRAIN} --iterations 3 --dp 2 --transport tcp --out run --overwrite");
    let plain = here.run(&line).done();
    let encrypted = here.run(&format!("{line} --encrypt")).done();
    assert_eq!(losses(&plain.out), losses(&encrypted.out));
    assert_eq!(losses(&plain.out).len(), 3);
    let settings = std::fs::read_to_string(here.path().join("run/run.toml")).unwrap();
    assert!(settings.contains("encrypt = true"), "a resumed run is encrypted too: {settings}");
    here.run(&format!("{TRAIN} --dp 2 --transport shm --encrypt"))
        .refused(&["--encrypt: is about TCP"]);
}

#[test]
fn plain_payloads_beyond_this_host_are_warned_of() {
    let here = Folder::new();
    let line = format!("{TRAIN} --iterations 1 --dp 2 --bind 0.0.0.0 --out run --overwrite");
    let told = here.run(&line).done();
    let warned = told.err.matches("warning: --bind 0.0.0.0").count();
    assert_eq!(warned, 1, "once per job: {}", told.err);
    let told = here.run(&format!("{line} --encrypt")).done();
    assert!(!told.err.contains("--bind"), "{}", told.err);
}

#[test]
fn ranks_that_disagree_about_their_connections_name_the_difference() {
    for (change, name) in [("--encrypt", "encryption of messages"), ("", "transport")] {
        let here = Folder::new();
        let at = unused_address();
        let line = format!("{TRAIN} --iterations 2 --dp 2 --out run");
        let ranks = [
            (0, format!("{line} --transport tcp")),
            (
                1,
                match change {
                    "" => format!("{line} --transport auto"),
                    change => format!("{line} --transport tcp {change}"),
                },
            ),
        ];
        let ranks = ranks.map(|(rank, line)| foreign(&here, &line, rank, at));
        for ended in ranks.map(|rank| rank.wait_with_output().unwrap()) {
            let err = String::from_utf8(ended.stderr).unwrap();
            assert_eq!(ended.status.code(), Some(1), "{err}");
            assert!(err.contains(&format!("ranks disagree about the {name}")), "{err}");
        }
    }
}

#[test]
fn a_secret_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let here = Folder::new();
    here.file("secret", "a secret of good length");
    let open = |mode| {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(here.path().join("secret"), mode).unwrap();
        here.run(
            "train --model mini --global-batch 2 --iterations 1 --overwrite --secret-file secret",
        )
    };
    open(0o666).refused(&["--secret-file: secret can be written by other users: chmod 600"]);
    open(0o600).done();
}

#[test]
fn a_run_under_nohup_does_not_end_with_its_terminal() {
    let here = Folder::new();
    let program = env!("CARGO_BIN_EXE_paceline");
    let line = format!("trap '' HUP; exec {program} {TRAIN} --iterations 60 --out run");
    let folder = here.command();
    let child = std::process::Command::new("sh")
        .args(["-c", &line])
        .current_dir(here.path())
        .envs(folder.get_envs().filter_map(|(name, value)| Some((name, value?))))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut running = child.unwrap();
    let mut reader = BufReader::new(running.stdout.take().unwrap());
    reader.read_line(&mut String::new()).unwrap();
    let told =
        std::process::Command::new("kill").args(["-HUP", &running.id().to_string()]).status();
    assert!(told.unwrap().success());
    let last = reader.lines().last().unwrap().unwrap();
    assert!(last.contains("\"stopped\":false"), "{last}");
    assert_eq!(running.wait().unwrap().code(), Some(0));
}
