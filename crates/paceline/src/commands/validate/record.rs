//! A table row with its prediction, and the totals over all rows.

use paceline_sim::table::{astra::AstraRow, collectives, training};
use paceline_sim::{ErrorBand, quantile};
use serde::Serialize;
use std::collections::BTreeMap;

/// One row.
#[derive(Debug, Default, Serialize)]
pub(super) struct Record {
    pub(super) id: String,
    pub(super) measured_s: Option<f64>,
    pub(super) predicted_s: Option<f64>,
    pub(super) error: Option<f64>,
    pub(super) measured_bytes: Option<u64>,
    pub(super) predicted_bytes: Option<u64>,
    /// The software profile of a training run.
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) skipped: Option<String>,
}

impl Record {
    pub(super) fn of_training(row: &training::Row) -> Self {
        let base = Self {
            measured_bytes: row.measured_bytes().map(|bytes| bytes.0),
            profile: row.request().ok().map(|request| request.profile.name),
            ..Self::default()
        };
        match row.simulate() {
            Ok(prediction) => {
                let predicted_bytes = Some(prediction.predicted_bytes.0);
                let base = Self { predicted_bytes, ..base };
                base.compared(row.id(), row.measured_s(), prediction.predicted_s)
            }
            Err(why) => base.skipped(row.id(), row.measured_s(), &why),
        }
    }

    pub(super) fn of_collective(row: &collectives::Row) -> Self {
        let base = Self::default();
        match row.simulate() {
            Ok(prediction) => base.compared(row.id(), row.measured_s(), prediction.predicted_s),
            Err(why) => base.skipped(row.id(), row.measured_s(), &why),
        }
    }

    /// Simulates an ASTRA-sim row; ASTRA-sim's cycle is one nanosecond.
    pub(super) fn of_astra(row: &AstraRow) -> Self {
        let seconds = |nanoseconds: u64| nanoseconds as f64 * 1e-9;
        let (base, measured) = (Self::default(), row.measured_ns_max.map(seconds));
        match row.case.as_ref().map(paceline_sim::astra::simulate) {
            Ok(Ok(outcome)) => base.compared(&row.id, measured, seconds(outcome.time_ns_max)),
            Ok(Err(why)) => base.skipped(&row.id, measured, &why),
            Err(why) => base.skipped(&row.id, measured, why),
        }
    }

    /// Simulates the same case with Paceline's own network model.
    pub(super) fn of_astra_by_own(row: &AstraRow) -> Self {
        let (base, measured) = (Self::default(), row.measured_ns_max.map(|ns| ns as f64 * 1e-9));
        match row.case.as_ref().map(paceline_sim::astra::own_time) {
            Ok(Ok(time)) => base.compared(&row.id, measured, time.0),
            Ok(Err(why)) => base.skipped(&row.id, measured, &why),
            Err(why) => base.skipped(&row.id, measured, why),
        }
    }

    fn compared(self, id: &str, measured_s: Option<f64>, predicted_s: f64) -> Self {
        let error = measured_s.map(|measured| (predicted_s - measured) / measured);
        let (id, predicted_s) = (id.to_owned(), Some(predicted_s));
        Self { id, measured_s, predicted_s, error: error.filter(|e| e.is_finite()), ..self }
    }

    fn skipped(self, id: &str, measured_s: Option<f64>, why: &dyn ToString) -> Self {
        Self { id: id.to_owned(), measured_s, skipped: Some(why.to_string()), ..self }
    }
}

/// Totals over all rows.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Total {
    pub(super) rows: usize,
    pub(super) compared: usize,
    pub(super) skipped: usize,
    pub(super) median_abs_error: Option<f64>,
    pub(super) p90_abs_error: Option<f64>,
    /// Factors on a prediction between which four of five measurements are expected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) band: Option<[f64; 2]>,
    /// The same per profile with enough training runs.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) bands: BTreeMap<&'static str, [f64; 2]>,
}

impl Total {
    pub(super) fn of(records: &[Record]) -> Self {
        let mut errors: Vec<f64> =
            records.iter().filter_map(|record| record.error.map(f64::abs)).collect();
        errors.sort_by(f64::total_cmp);
        let mut profiles: BTreeMap<&'static str, [f64; 2]> = BTreeMap::new();
        for profile in records.iter().filter_map(|record| record.profile) {
            if let Some(band) = band(records.iter().filter(|r| r.profile == Some(profile))) {
                profiles.insert(profile, band);
            }
        }
        Self {
            rows: records.len(),
            compared: errors.len(),
            skipped: records.iter().filter(|record| record.skipped.is_some()).count(),
            median_abs_error: quantile(&errors, 0.5),
            p90_abs_error: quantile(&errors, 0.9),
            band: band(records.iter()),
            bands: profiles,
        }
    }
}

fn band<'a>(records: impl Iterator<Item = &'a Record>) -> Option<[f64; 2]> {
    let runs = records.filter_map(|record| record.measured_s.zip(record.predicted_s));
    ErrorBand::of_runs(runs).map(|band| [band.low, band.high])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(profile: &'static str, measured: f64, predicted: f64) -> Record {
        Record { profile: Some(profile), ..Record::default() }.compared(
            "x",
            Some(measured),
            predicted,
        )
    }

    #[test]
    fn errors_and_bands_are_those_of_what_can_be_compared() {
        let mut records = vec![
            record("few", 2.0, 1.0),
            Record::default().skipped("y", Some(1.0), &"why"),
            Record::default().compared("z", None, 1.0),
        ];
        // Ten runs predicted at 10 s that took 10, 11, … 19 s.
        records.extend((10..20).map(|seconds| record("many", f64::from(seconds), 10.0)));
        let total = Total::of(&records);
        assert_eq!((total.rows, total.compared, total.skipped), (13, 11, 1));
        assert!(!total.bands.contains_key("few"));
        let own = ErrorBand::of_runs((10..20).map(|seconds| (f64::from(seconds), 10.0))).unwrap();
        assert_eq!(total.bands["many"], [own.low, own.high]);
        let many = (10..20).map(|seconds| (f64::from(seconds), 10.0));
        let all = ErrorBand::of_runs(many.chain([(2.0, 1.0)])).unwrap();
        assert_eq!(total.band, Some([all.low, all.high]));
        assert!((total.median_abs_error.unwrap() - 5.0 / 15.0).abs() < 1e-12);
    }

    #[test]
    fn nothing_comes_to_nothing() {
        let total = Total::of(&[]);
        assert_eq!((total.band, total.median_abs_error), (None, None));
        assert!(total.bands.is_empty());
    }
}
