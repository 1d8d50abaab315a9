//! Published runs of `validation/training.csv`, each simulated from its own columns.
//!
//! Every device, fabric and software stack has one description for all rows. The bounds asserted
//! here are those that the project promises; `docs/validation.md` has the errors themselves.

use paceline_plan::lower::lower_on;
use paceline_sim::cluster::preset;
use paceline_sim::table::Skipped;
use paceline_sim::table::training::{Prediction, Request, Row, rows};
use paceline_sim::{ErrorBand, Family, Profile, error_band, quantile};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

const TABLE: &str = include_str!("../../../validation/training.csv");
const MORE: &str = include_str!("../../../validation/training_more.csv");

/// Runs that are predicted to need more memory than their devices have: `docs/validation.md`.
const KNOWN_TOO_LARGE: [&str; 5] = [
    "bridge-deepseek-v3-b200-256g-mxfp8-gbs4096-26.02",
    "bridge-qwen3-235b-a22b-h100-256g-fp8-cs-gbs2048-25.11",
    "bridge-llama-3-70b-gb200-64g-fp8-gbs256-26.04",
    "bridge-llama-3-70b-gb200-64g-fp8-gbs256-26.02",
    "mpt-13b-a100-40-8g-s512",
];

/// A row with its prediction or the reason that there is none.
struct Compared {
    row: Row,
    prediction: Result<Prediction, Skipped>,
    /// True if it is in the first table; the second has kinds that are predicted badly.
    first: bool,
}

/// All rows, each simulated once.
fn all() -> &'static [Compared] {
    static ALL: LazyLock<Vec<Compared>> = LazyLock::new(|| {
        let tables = [(TABLE, "training.csv", true), (MORE, "training_more.csv", false)];
        let rows = tables.into_iter().flat_map(|(text, name, first)| {
            rows(text, name).unwrap().into_iter().map(move |row| (row, first))
        });
        rows.map(|(row, first)| Compared { prediction: row.simulate(), row, first }).collect()
    });
    &ALL
}

/// Rows of the first table whose source states everything.
fn complete() -> impl Iterator<Item = &'static Compared> {
    all().iter().filter(|found| found.first && found.row.tier() == Some("A"))
}

fn sorted(mut errors: Vec<f64>) -> Vec<f64> {
    errors.sort_by(f64::total_cmp);
    errors
}

#[test]
fn times_come_out_as_promised() {
    let mut errors = Vec::new();
    for Compared { row, prediction, .. } in complete() {
        if let (Ok(prediction), Some(measured)) = (prediction, row.measured_s()) {
            errors.push((prediction.predicted_s / measured - 1.0).abs());
        }
    }
    assert!(errors.len() >= 25, "only {} rows were compared", errors.len());
    let errors = sorted(errors);
    let (median, most) = (quantile(&errors, 0.5).unwrap(), quantile(&errors, 0.9).unwrap());
    assert!(median < 0.07, "median {median}");
    assert!(most < 0.15, "90th percentile {most}");
}

/// The stated error bands are those of the tables, and no kind with enough runs lacks one.
#[test]
fn bands_are_those_of_the_measured_runs() {
    type Kind = (&'static str, Family);
    let mut runs: BTreeMap<Kind, Vec<(f64, f64)>> = BTreeMap::new();
    let mut plans = BTreeMap::new();
    let mut clusters: BTreeMap<Kind, BTreeSet<String>> = BTreeMap::new();
    for Compared { row, prediction, .. } in all() {
        let (Ok(prediction), Some(measured)) = (prediction, row.measured_s()) else { continue };
        let Request { model, strategy, cluster, profile } = row.request().unwrap();
        let plan = lower_on(&model, &strategy, &cluster.fabric_with(&profile)).unwrap();
        let kind = (profile.name, Family::of(&plan));
        let name = cluster.name.split([':', ' ']).next().unwrap().to_owned();
        clusters.entry(kind).or_default().insert(name);
        runs.entry(kind).or_default().push((measured, prediction.predicted_s));
        plans.insert(kind, (profile, plan));
    }
    let mut wrong = Vec::new();
    let mut near = |kind: String, told: ErrorBand, found: ErrorBand| {
        let off = (told.low / found.low).ln().abs().max((told.high / found.high).ln().abs());
        if off > 0.01 || told.runs != found.runs {
            wrong.push(format!("{kind}: {found:?}, and {told:?} is told"));
        }
    };
    let others = ErrorBand::of_other_kinds(runs.values().flatten().copied()).unwrap();
    for (kind, runs) in &runs {
        let (profile, plan) = &plans[kind];
        let found = ErrorBand::of_runs(runs.iter().copied()).unwrap_or(others);
        for cluster in &clusters[kind] {
            let described = preset::holding(cluster, plan.mesh.world().into()).unwrap();
            let told = error_band(profile, plan, &described);
            near(format!("{kind:?}, {} runs, on {cluster}", runs.len()), told, found);
        }
    }
    let (_, plan) = &plans[&("megatron-2021", Family::Dense)];
    let unmeasured = error_band(&Profile::MODERN, plan, &preset::get("dgx-a100").unwrap());
    near("others".to_owned(), unmeasured, others);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Runs that were done did fit.
#[test]
fn what_ran_is_predicted_to_fit() {
    let simulated = all().iter().filter_map(|found| Some((found, found.prediction.as_ref().ok()?)));
    let wrong: Vec<String> = simulated
        .filter(|(found, prediction)| {
            prediction.fit.fits == KNOWN_TOO_LARGE.contains(&found.row.id())
        })
        .map(|(found, prediction)| format!("{}: {:?}", found.row.id(), prediction.fit))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let known = |id: &str| all().iter().any(|found| found.row.id() == id);
    assert!(known("bridge-llama-3.1-405b-gb200-256g-fp8-gbs1536-26.06"), "it fits");
}

#[test]
fn memory_comes_out_as_promised() {
    let mut compared = 0;
    for Compared { row, prediction, .. } in complete() {
        let (Ok(prediction), Some(measured)) = (prediction, row.measured_bytes()) else {
            continue;
        };
        let error = prediction.predicted_bytes.as_f64() / measured.as_f64() - 1.0;
        assert!(error.abs() < 0.12, "{}: {:+.1} %", row.id(), 100.0 * error);
        compared += 1;
    }
    assert!(compared >= 6, "only {compared} rows were compared");
}

#[test]
fn every_row_of_the_second_table_is_predicted() {
    let second = all().iter().filter(|found| !found.first);
    let mut errors = Vec::new();
    for Compared { row, prediction, .. } in second {
        let predicted = prediction.as_ref().unwrap_or_else(|why| panic!("{}: {why}", row.id()));
        errors.push((predicted.predicted_s / row.measured_s().unwrap() - 1.0).abs());
    }
    assert_eq!(errors.len(), 29);
    let errors = sorted(errors);
    let (median, most) = (quantile(&errors, 0.5).unwrap(), quantile(&errors, 0.9).unwrap());
    assert!(median < 0.12, "median {median}");
    assert!(most < 0.50, "90th percentile {most}");
}

#[test]
fn what_is_not_represented_is_named() {
    let reasons = complete().filter_map(|found| found.prediction.as_ref().err());
    let reasons: Vec<String> = reasons.map(|why| why.to_string()).collect();
    assert!(reasons.is_empty(), "{reasons:?}");
}
