//! Formatting of numbers in the report.

use paceline_plan::units::Seconds;

/// One unit and one number of digits for a whole table, so that columns are comparable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    per_second: f64,
    digits: usize,
    /// Symbol of the unit.
    pub unit: &'static str,
}

impl Scale {
    /// The unit in which the time `largest` has one to three digits before the point.
    pub(super) fn of(largest: Seconds) -> Self {
        let (per_second, unit) = match largest.0 {
            t if t >= 1.0 => (1.0, "s"),
            t if t >= 1e-3 => (1e3, "ms"),
            t if t >= 1e-6 => (1e6, "µs"),
            _ => (1e9, "ns"),
        };
        let digits = match largest.0 * per_second {
            v if v >= 100.0 => 1,
            v if v >= 10.0 => 2,
            _ => 3,
        };
        Self { per_second, digits, unit }
    }

    /// The same unit with the digits that multiples of `step` need, for the ticks of an axis.
    pub(super) fn for_steps(self, step: Seconds) -> Self {
        let magnitude = (step.0 * self.per_second).log10() + 1e-9;
        // The cast saturates and maps NaN to zero.
        let digits = (-magnitude.floor()).clamp(0.0, 9.0) as usize;
        Self { digits, ..self }
    }

    /// Formats a time in this unit, without the unit.
    pub(super) fn show(&self, time: Seconds) -> String {
        minus(format!("{:.*}", self.digits, time.0 * self.per_second))
    }

    /// Formats a time with the unit.
    pub(super) fn full(&self, time: Seconds) -> String {
        format!("{} {}", self.show(time), self.unit)
    }
}

/// Formats a share as a signed percentage, or a dash for `None`.
pub(super) fn percent(share: Option<f64>) -> String {
    match share.filter(|s| s.is_finite()) {
        Some(share) if (share * 100.0).abs() >= 9999.5 => {
            (if share > 0.0 { "> +9999 %" } else { "< −9999 %" }).to_owned()
        }
        Some(share) if (share * 100.0).abs() < 0.05 => "0.0 %".to_owned(),
        Some(share) => minus(format!("{:+.1} %", share * 100.0)),
        None => "–".to_owned(),
    }
}

/// Formats a part of a whole as a percentage, or a dash if there is no whole.
pub(super) fn percent_of(part: f64, whole: f64) -> String {
    let share = part / whole;
    if share.is_finite() { minus(format!("{:.1} %", share * 100.0)) } else { "–".to_owned() }
}

/// Uses the typographic minus, as wide as the plus.
fn minus(text: String) -> String {
    text.replace('-', "−")
}

/// A coordinate with a fixed number of digits after the point.
pub(crate) fn fixed<const DIGITS: usize>(value: f64) -> String {
    format!("{value:.DIGITS$}")
}

/// Round values between two bounds, at most about `count`, for the ticks of an axis.
pub(super) fn ticks(from: f64, to: f64, count: usize) -> Vec<f64> {
    let range = to - from;
    if !(range.is_finite() && range > 0.0) || count == 0 {
        return Vec::new();
    }
    let raw = range / count as f64;
    let magnitude = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * magnitude).into_iter().find(|&s| s >= raw * 0.999);
    let step = step.unwrap_or(10.0 * magnitude);
    let first = (from / step).ceil();
    // Counted rather than accumulated, so that rounding neither adds a tick nor drops the last.
    let ticks = (0..=count + 1).map(|i| (first + i as f64) * step);
    ticks.take_while(|t| *t <= to + range * 1e-9).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_one_unit() {
        let scale = Scale::of(Seconds(0.1234));
        assert_eq!(scale.full(Seconds(0.1234)), "123.4 ms");
        assert_eq!(scale.show(Seconds(0.00005)), "0.1");
        assert_eq!(scale.show(Seconds(-0.005)), "−5.0");
        assert_eq!(Scale::of(Seconds(f64::NAN)).unit, "ns");
        assert_eq!(scale.for_steps(Seconds(0.02)).full(Seconds(0.04)), "40 ms");
        assert_eq!(scale.for_steps(Seconds(0.00005)).show(Seconds(0.00015)), "0.15");
        assert_eq!(scale.for_steps(Seconds(f64::NAN)).show(Seconds(0.04)), "40");
    }

    #[test]
    fn percentages_are_signed_and_bounded() {
        assert_eq!(percent(Some(0.0412)), "+4.1 %");
        assert_eq!(percent(Some(-0.5)), "−50.0 %");
        assert_eq!(percent(Some(-0.0001)), "0.0 %");
        assert_eq!(percent(Some(1e9)), "> +9999 %");
        assert_eq!(percent(Some(f64::NAN)), "–");
        assert_eq!(percent(None), "–");
    }

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(0.0, 10.0, 5), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(0.3, 0.9, 3), [0.4, 0.6000000000000001, 0.8]);
        assert!(ticks(1.0, 1.0, 5).is_empty() && ticks(f64::NAN, 1.0, 5).is_empty());
        assert!(ticks(0.0, f64::INFINITY, 5).is_empty());
    }
}
