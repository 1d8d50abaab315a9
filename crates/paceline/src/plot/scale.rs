//! Mapping of values to positions, and ticks.

use super::Unit;

/// Maps values to positions between two ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// The values at the two ends.
    pub low: f64,
    /// See `low`.
    pub high: f64,
    /// True if the scale is logarithmic.
    pub log: bool,
    places: [f64; 2],
}

impl Scale {
    /// Creates a scale that contains `values`; a linear one includes zero if `zero` is set. Values
    /// that are not positive make it linear.
    pub(super) fn of(values: &[f64], log: bool, zero: bool, places: [f64; 2]) -> Self {
        // Differences of larger values could overflow.
        let sane = values.iter().copied().filter(|value| value.abs() < 1e300);
        let (mut low, mut high) =
            sane.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        if low > high {
            (low, high) = (0.0, 1.0);
        }
        let log = log && low > 0.0;
        if log {
            // A margin, so that no line coincides with the frame.
            let air = if high == low { 2.0 } else { (high / low).powf(0.04) };
            if zero {
                (low, high) = (low / air, high * air);
            }
        } else if zero {
            low = low.min(0.0);
            high = high.max(0.0) + 0.06 * (high.max(0.0) - low);
        }
        if high == low {
            high = low + low.abs().max(1.0);
        }
        Self { low, high, log, places }
    }

    /// The position of a value.
    pub(super) fn at(&self, value: f64) -> f64 {
        let [from, to] = self.places;
        let share = if self.log {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        from + (to - from) * share.clamp(-1.0, 2.0)
    }

    /// A few round values of a unit within the scale.
    pub(super) fn ticks(&self, unit: Unit) -> Vec<f64> {
        const MOST: usize = 7;
        let (_, part) = unit.part(self.high);
        if !self.log {
            return even(self.low / part, self.high / part, 6).iter().map(|t| t * part).collect();
        }
        let base: f64 = if unit == Unit::Size { 2.0 } else { 10.0 };
        let origin = if unit.is_calendar(self.high) { part } else { 1.0 };
        let from = (self.low / origin).log(base).ceil() as i32;
        let to = (self.high / origin).log(base).floor() as i32;
        let powers = |every: i32| {
            let aligned = (from..=to).filter(move |power| power.rem_euclid(every) == 0);
            aligned.map(|power| origin * base.powi(power)).collect::<Vec<_>>()
        };
        let coarse = (1..).map(powers).find(|ticks| ticks.len() <= MOST).unwrap_or_default();
        if base == 10.0 && coarse.len() < 3 {
            let fine = (from - 1..=to).flat_map(|power| [1.0, 2.0, 5.0].map(|m| (m, power)));
            let fine = fine.map(|(m, power)| m * origin * base.powi(power));
            return fine.filter(|tick| (self.low..=self.high).contains(tick)).collect();
        }
        coarse
    }
}

/// Round values between two bounds, at most about `count`.
fn even(from: f64, to: f64, count: usize) -> Vec<f64> {
    let range = to - from;
    if !(range.is_finite() && range > 0.0) {
        return Vec::new();
    }
    let raw = range / count as f64;
    let magnitude = 10f64.powf(raw.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0].map(|m| m * magnitude);
    let step = steps.into_iter().find(|&step| step >= raw * 0.999).unwrap_or(raw);
    let first = (from / step).ceil();
    // Counted rather than accumulated, so that rounding neither adds a tick nor drops the last.
    let ticks = (0..=count + 2).map(|i| (first + i as f64) * step);
    ticks.take_while(|tick| *tick <= to + range * 1e-9).collect()
}

/// Returns true if all values are positive and span more than a factor of `factor`.
pub(super) fn spans(values: &[f64], factor: f64) -> bool {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(0.0, f64::max);
    low > 0.0 && high / low > factor
}

/// Returns true if values are spaced by factors rather than by differences.
pub(super) fn looks_geometric(values: &[f64]) -> bool {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let uneven = |places: &[f64]| {
        let gaps = places.windows(2).map(|pair| pair[1] - pair[0]);
        let (least, most) = gaps.fold((f64::INFINITY, 0.0_f64), |(l, m), g| (l.min(g), m.max(g)));
        most / least
    };
    let logs: Vec<f64> = sorted.iter().map(|value| value.ln()).collect();
    spans(&sorted, 3.0) && sorted.len() > 2 && uneven(&logs) < uneven(&sorted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doublings_are_geometric_and_counting_is_not() {
        assert!(looks_geometric(&[1.0, 2.0, 4.0, 8.0]));
        assert!(looks_geometric(&[8.0, 16.0, 32.0, 64.0, 256.0]));
        assert!(!looks_geometric(&[1.0, 2.0, 3.0, 4.0, 5.0]));
        assert!(!looks_geometric(&[0.0, 1.0, 10.0, 100.0]));
        assert!(!looks_geometric(&[100.0, 200.0]));
    }

    #[test]
    fn ticks_are_round_in_the_unit_that_is_shown() {
        let scale = |low, high, log| Scale { low, high, log, places: [0.0, 100.0] };
        let gib = 1073741824.0;
        assert_eq!(
            scale(0.0, 44.0 * gib, false).ticks(Unit::Size),
            [0.0, 10.0, 20.0, 30.0, 40.0].map(|gibs| gibs * gib)
        );
        assert_eq!(scale(0.9e-6, 2e-2, true).ticks(Unit::Time).len(), 5, "1 µs to 10 ms");
        let years = scale(86_400.0, 3e9, true).ticks(Unit::Time);
        assert!((years[1] / years[0] - 10.0).abs() < 1e-9 && years.len() >= 4, "{years:?}");
        assert_eq!(scale(1.0, 9.0, true).ticks(Unit::Plain), [1.0, 2.0, 5.0]);
        assert!(scale(1.0, 1e300, true).ticks(Unit::Plain).len() <= 7);
    }

    #[test]
    fn any_values_have_places() {
        for values in [vec![], vec![0.0], vec![5.0], vec![-1.0, 1.0], vec![1e-300, 1e300]] {
            for log in [false, true] {
                let scale = Scale::of(&values, log, true, [400.0, 40.0]);
                for value in &values {
                    assert!((-400.0..=800.0).contains(&scale.at(*value)), "{values:?} {log}");
                }
                assert!(scale.ticks(Unit::Plain).iter().all(|tick| tick.is_finite()));
            }
        }
    }
}
