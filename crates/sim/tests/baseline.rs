//! Simulated times as bits: a change of structure leaves them as they are.
//!
//! After a deliberate change, run `UPDATE_GOLDEN=1 cargo test -p paceline-sim --test baseline`, and
//! list the change with its cause in the changelog.

#[path = "../../plan/tests/seeded/mod.rs"]
mod seeded;

use paceline_plan::program::Plan;
use paceline_plan::text;
use paceline_sim::cluster::{Cluster, preset};
use paceline_sim::table::training;
use paceline_sim::{NetworkKind, Options, simulate};
use std::fmt::Write;

const TABLE: &str = include_str!("../../../validation/training.csv");
const STRAGGLER: &str = include_str!("../../../docs/studies/straggler.toml");

fn add(found: &mut String, name: &str, plan: &Plan, cluster: &Cluster, network: NetworkKind) {
    let options = Options { network, ..Options::default() };
    let mut plan = plan.clone();
    cluster.fabric_with(&options.profile).decide(&mut plan);
    let name = format!("{name} {} {network}", cluster.name);
    match simulate(&plan, cluster, &options) {
        Ok(outcome) => {
            let times = [outcome.iteration, outcome.compute, outcome.exposed_communication];
            let [iteration, compute, exposed] = times.map(|time| time.0.to_bits());
            writeln!(found, "{name} {iteration:016x} {compute:016x} {exposed:016x}").unwrap();
        }
        Err(error) => {
            writeln!(found, "{name} refused {:016x}", seeded::hash(&error.to_string())).unwrap();
        }
    }
}

#[allow(clippy::disallowed_methods)]
fn compare(file: &str, found: &str) {
    let path = format!("{}/tests/golden/{file}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, found).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap();
    let changed: Vec<_> = golden.lines().zip(found.lines()).filter(|(a, b)| a != b).collect();
    assert!(golden == found, "{} lines differ, first {:?}", changed.len(), changed.first());
}

#[test]
#[allow(clippy::disallowed_methods)]
fn golden_plans_take_the_times_they_took() {
    let clusters = ["dgx-a100:2", "dgx1-v100:2", "tpu-v4:4", "laptop:2"];
    let clusters = clusters.map(|name| preset::get(name).unwrap());
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../plans");
    let mut files: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut found = String::new();
    for file in files {
        let plan = text::parse(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let name = file.file_stem().unwrap().to_str().unwrap();
        for cluster in &clusters {
            for network in [NetworkKind::Analytic, NetworkKind::Flow] {
                add(&mut found, name, &plan, cluster, network);
            }
        }
    }
    compare("plans.txt", &found);
}

#[test]
fn seeded_strategies_take_the_times_they_took() {
    let clusters =
        [preset::get("dgx-h100:16").unwrap(), Cluster::parse(STRAGGLER, "straggler.toml").unwrap()];
    let mut found = String::new();
    seeded::plans(200, |seed, plan| {
        for cluster in &clusters {
            add(&mut found, &seed.to_string(), plan, cluster, NetworkKind::Analytic);
        }
        if seed % 4 == 0 {
            add(&mut found, &seed.to_string(), plan, &clusters[0], NetworkKind::Flow);
        }
    });
    compare("strategies.txt", &found);
}

#[test]
fn published_runs_take_the_times_they_took() {
    let mut found = String::new();
    for row in training::rows(TABLE, "validation/training.csv").unwrap() {
        match row.simulate() {
            Ok(prediction) => {
                let (time, bytes) =
                    (prediction.predicted_s.to_bits(), prediction.predicted_bytes.0);
                writeln!(found, "{} {time:016x} {bytes}", row.id()).unwrap();
            }
            Err(_) => writeln!(found, "{} skipped", row.id()).unwrap(),
        }
    }
    compare("published.txt", &found);
}
