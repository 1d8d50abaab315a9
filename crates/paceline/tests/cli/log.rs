//! `PACELINE_LOG`: silent by default, events of the asked targets otherwise.

use super::support::Folder;

const RUN: &str = "train --model mini --seq 16 --global-batch 4 --dp 2 --transport tcp \
                   --iterations 2 --save-every 2 --out run";

fn logged(log: Option<&str>) -> (Option<i32>, String) {
    let here = Folder::new();
    let mut command = here.command();
    command.args(RUN.split_whitespace()).env_remove("PACELINE_LOG");
    if let Some(log) = log {
        command.env("PACELINE_LOG", log);
    }
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn without_the_variable_nothing_is_logged() {
    let (code, err) = logged(None);
    assert_eq!(code, Some(0), "{err}");
    assert!(!err.contains("DEBUG") && !err.contains("INFO") && !err.contains("joined"), "{err}");
}

#[test]
fn targets_are_chosen_by_name() {
    let (code, err) = logged(Some("comm=debug,exec=info"));
    assert_eq!(code, Some(0), "{err}");
    for rank in [0, 1] {
        assert!(err.contains(&format!("DEBUG comm: joined rank={rank}")), "{err}");
    }
    assert!(err.contains("INFO exec: checkpoint committed iteration=2"), "{err}");
    assert!(!err.contains(" launch: "), "{err}");
    let (_, err) = logged(Some("launch=debug"));
    assert!(err.contains("DEBUG launch: started rank=0") && !err.contains(" comm: "), "{err}");
}

#[test]
fn a_wrong_value_is_refused() {
    let (code, err) = logged(Some("comm=loud"));
    assert_eq!(code, Some(2), "{err}");
    assert!(err.starts_with("error: PACELINE_LOG: 'comm=loud': "), "{err}");
}
