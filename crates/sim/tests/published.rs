//! Published runs of `validation/training.csv`, each simulated from its own columns.
//!
//! Every device, fabric and software stack has one description for all rows. The bounds asserted
//! here are those that the project promises; `docs/validation.md` has the errors themselves.

use paceline_sim::table::training::{Row, rows};
use paceline_sim::{ErrorBand, Profile, error_band, quantile};

const TABLE: &str = include_str!("../../../validation/training.csv");

/// Rows whose source states everything.
fn complete() -> impl Iterator<Item = Row> {
    let rows = rows(TABLE, "validation/training.csv").unwrap();
    rows.into_iter().filter(|row| row.tier() == Some("A"))
}

fn sorted(mut errors: Vec<f64>) -> Vec<f64> {
    errors.sort_by(f64::total_cmp);
    errors
}

#[test]
fn times_come_out_as_promised() {
    let mut errors = Vec::new();
    for row in complete() {
        if let (Ok(prediction), Some(measured)) = (row.simulate(), row.measured_s()) {
            errors.push((prediction.predicted_s / measured - 1.0).abs());
        }
    }
    assert!(errors.len() >= 25, "only {} rows were compared", errors.len());
    let errors = sorted(errors);
    let (median, most) = (quantile(&errors, 0.5).unwrap(), quantile(&errors, 0.9).unwrap());
    assert!(median < 0.07, "median {median}");
    assert!(most < 0.15, "90th percentile {most}");
}

/// The stated error bands match the current table.
#[test]
fn bands_are_those_of_the_measured_runs() {
    let rows = rows(TABLE, "validation/training.csv").unwrap();
    let runs = rows.iter().filter_map(|row| {
        let predicted = row.simulate().ok()?.predicted_s;
        Some((row.request().ok()?.profile, (row.measured_s()?, predicted)))
    });
    let runs: Vec<(Profile, (f64, f64))> = runs.collect();
    let hold = |profile: &Profile, found: ErrorBand| {
        let told = error_band(profile);
        let off = (told.low - found.low).abs().max((told.high - found.high).abs());
        assert!(off < 0.02, "{profile}: {found:?}, and {told:?} is told");
    };
    let all = ErrorBand::of_runs(runs.iter().map(|&(_, run)| run)).unwrap();
    hold(&Profile::MODERN, all);
    let own = runs.iter().filter(|(profile, _)| profile.name == Profile::MEGATRON_2021.name);
    hold(&Profile::MEGATRON_2021, ErrorBand::of_runs(own.map(|&(_, run)| run)).unwrap());
}

#[test]
fn memory_comes_out_as_promised() {
    let mut compared = 0;
    for row in complete() {
        let (Ok(prediction), Some(measured)) = (row.simulate(), row.measured_bytes()) else {
            continue;
        };
        let error = prediction.predicted_bytes.as_f64() / measured.as_f64() - 1.0;
        assert!(error.abs() < 0.12, "{}: {:+.1} %", row.id(), 100.0 * error);
        compared += 1;
    }
    assert!(compared >= 6, "only {compared} rows were compared");
}

#[test]
fn what_is_not_represented_is_named() {
    let reasons: Vec<String> =
        complete().filter_map(|row| row.simulate().err()).map(|why| why.to_string()).collect();
    assert!(reasons.is_empty(), "{reasons:?}");
}
