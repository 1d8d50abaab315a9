//! How far predictions are off, as seen where measurements exist.
//!
//! A prediction is one number; what it is worth shows in the runs that were both predicted and
//! measured. Of the ratios measured/predicted, the 10 % and the 90 % quantile bound the band in
//! which four of five measurements lie: those of the profile's own runs where there are enough of
//! them, otherwise those of all runs. `paceline validate` prints the bands of the table it reads, so
//! that the figures here can be brought up to date when the model or the evidence changes. They are
//! those of runs that were looked at while the model was made; others may lie further off.

use crate::profile::Profile;
use serde::Serialize;

/// Factors on a predicted time between which the measured one is expected, four times out of five.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ErrorBand {
    /// At the lower end, measured over predicted.
    pub low: f64,
    /// At the upper end.
    pub high: f64,
}

/// The share of measurements below the band, and above it.
const TAIL: f64 = 0.1;

/// The band of all training runs that this version was validated on.
const ALL_RUNS: ErrorBand = ErrorBand { low: 0.95, high: 1.15 };

/// The bands of profiles with enough runs of their own.
const OF_PROFILES: [(Profile, ErrorBand); 1] =
    [(Profile::MEGATRON_2021, ErrorBand { low: 0.95, high: 1.03 })];

/// The band of predictions under a profile.
pub fn error_band(profile: &Profile) -> ErrorBand {
    let own = OF_PROFILES.iter().find(|(known, _)| known.name == profile.name);
    own.map_or(ALL_RUNS, |&(_, band)| band)
}

impl ErrorBand {
    /// How many runs a band of their own takes; the quantiles of fewer are mere chance.
    pub const RUNS: usize = 8;

    /// The band of runs given as (measured, predicted); none without a run that can be compared.
    pub fn of_runs(runs: impl IntoIterator<Item = (f64, f64)>) -> Option<Self> {
        let ratios = runs.into_iter().map(|(measured, predicted)| measured / predicted);
        let mut ratios: Vec<f64> = ratios.filter(|r| r.is_finite() && *r > 0.0).collect();
        ratios.sort_by(f64::total_cmp);
        Some(Self { low: quantile(&ratios, TAIL)?, high: quantile(&ratios, 1.0 - TAIL)? })
    }
}

/// The value below which a share of the sorted values lies, interpolated between neighbours.
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

    /// Eleven runs predicted at 10 s that took 10, 11, … 20 s: one of them lies below 11 s and one
    /// above 19 s.
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
