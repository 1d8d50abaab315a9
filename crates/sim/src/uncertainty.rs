//! Uncertainty of predictions, from runs with measurements.
//!
//! The 10 % and 90 % quantiles of the ratios measured/predicted bound the band that contains four
//! of five measurements. They are those of the profile's own runs if there are enough of them,
//! otherwise those of all runs. `paceline validate` prints the bands of the table it reads, so the
//! values here can be updated when the model or the data changes. They come from runs that were
//! used while the model was developed; others may deviate more.

use crate::profile::Profile;
use serde::Serialize;

/// Factors on a predicted time that bound the measured one in four of five cases.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ErrorBand {
    /// Lower bound of measured over predicted.
    pub low: f64,
    /// Upper bound of measured over predicted.
    pub high: f64,
}

/// Fraction of measurements below the band, and above it.
const TAIL: f64 = 0.1;

/// Band of all training runs that this version was validated on.
const ALL_RUNS: ErrorBand = ErrorBand { low: 0.95, high: 1.15 };

/// Bands of profiles with enough runs of their own.
const OF_PROFILES: [(Profile, ErrorBand); 1] =
    [(Profile::MEGATRON_2021, ErrorBand { low: 0.95, high: 1.03 })];

/// Error band of predictions under a profile.
pub fn error_band(profile: &Profile) -> ErrorBand {
    let own = OF_PROFILES.iter().find(|(known, _)| known.name == profile.name);
    own.map_or(ALL_RUNS, |&(_, band)| band)
}

impl ErrorBand {
    /// Minimum number of runs for a separate band; quantiles of fewer are not meaningful.
    pub const RUNS: usize = 8;

    /// Band of runs given as (measured, predicted); `None` without a comparable run.
    pub fn of_runs(runs: impl IntoIterator<Item = (f64, f64)>) -> Option<Self> {
        let ratios = runs.into_iter().map(|(measured, predicted)| measured / predicted);
        let mut ratios: Vec<f64> = ratios.filter(|r| r.is_finite() && *r > 0.0).collect();
        ratios.sort_by(f64::total_cmp);
        Some(Self { low: quantile(&ratios, TAIL)?, high: quantile(&ratios, 1.0 - TAIL)? })
    }
}

/// Quantile `share` of the sorted values, interpolated between neighbours.
pub fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = share.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    Some(below + (above - below) * at.fract())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_interpolated() {
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&[3.0], 0.9), Some(3.0));
        assert_eq!(quantile(&[1.0, 2.0, 3.0, 4.0], 0.5), Some(2.5));
        assert_eq!(quantile(&[0.0, 10.0], 0.9), Some(9.0));
    }

    /// Eleven runs predicted at 10 s that took 10, 11, … 20 s: one is below 11 s and one above 19
    /// s.
    #[test]
    fn the_band_leaves_out_a_tenth_on_either_side() {
        let runs = (0..=10).rev().map(|extra| (10.0 + f64::from(extra), 10.0));
        let band = ErrorBand::of_runs(runs).unwrap();
        assert!((band.low - 1.1).abs() < 1e-12 && (band.high - 1.9).abs() < 1e-12, "{band:?}");
    }

    #[test]
    fn runs_that_cannot_be_compared_do_not_count() {
        let bad = [(0.0, 1.0), (1.0, 0.0), (f64::NAN, 1.0), (-1.0, 1.0)];
        assert_eq!(ErrorBand::of_runs(bad), None);
        let one = ErrorBand::of_runs(bad.into_iter().chain([(3.0, 2.0)]));
        assert_eq!(one, Some(ErrorBand { low: 1.5, high: 1.5 }));
    }

    #[test]
    fn every_profile_has_a_band() {
        for profile in Profile::ALL {
            let ErrorBand { low, high } = error_band(&profile);
            assert!(0.5 < low && low < high && high < 2.0, "{profile}: {low} {high}");
        }
        let new = error_band(&Profile { name: "new", ..Profile::MEGATRON_2021 });
        assert_eq!(new, ALL_RUNS);
        assert_ne!(error_band(&Profile::MEGATRON_2021), ALL_RUNS);
    }
}
