//! Parsing and formatting of numbers with units.

/// Kind of unit of a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Unit {
    /// No unit: ranks, layers, a ratio.
    #[default]
    Plain,
    /// Seconds.
    Time,
    /// Bytes.
    Size,
    /// Bytes per second.
    Rate,
    /// Floating-point operations per second.
    Work,
    /// A fraction of a whole.
    Share,
    /// A multiple of the original value.
    Times,
}

/// A value in the base unit of its kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Number {
    /// The value in seconds, bytes and so on.
    pub value: f64,
    /// Its kind of unit.
    pub unit: Unit,
}

const SUFFIXES: [(&str, f64, Unit); 50] = [
    ("", 1.0, Unit::Plain),
    ("x", 1.0, Unit::Times),
    ("×", 1.0, Unit::Times),
    ("ns", 1e-9, Unit::Time),
    ("us", 1e-6, Unit::Time),
    ("µs", 1e-6, Unit::Time),
    ("ms", 1e-3, Unit::Time),
    ("s", 1.0, Unit::Time),
    ("h", 3600.0, Unit::Time),
    ("days", 86_400.0, Unit::Time),
    ("years", 365.25 * 86_400.0, Unit::Time),
    ("B", 1.0, Unit::Size),
    ("kB", 1e3, Unit::Size),
    ("MB", 1e6, Unit::Size),
    ("GB", 1e9, Unit::Size),
    ("TB", 1e12, Unit::Size),
    ("KiB", 1024.0, Unit::Size),
    ("MiB", 1048576.0, Unit::Size),
    ("GiB", 1073741824.0, Unit::Size),
    ("TiB", 1099511627776.0, Unit::Size),
    ("B/s", 1.0, Unit::Rate),
    ("kB/s", 1e3, Unit::Rate),
    ("MB/s", 1e6, Unit::Rate),
    ("GB/s", 1e9, Unit::Rate),
    ("TB/s", 1e12, Unit::Rate),
    ("bit/s", 0.125, Unit::Rate),
    ("kbit/s", 125.0, Unit::Rate),
    ("Mbit/s", 125e3, Unit::Rate),
    ("Gbit/s", 125e6, Unit::Rate),
    ("Tbit/s", 125e9, Unit::Rate),
    ("FLOP/s", 1.0, Unit::Work),
    ("MFLOP/s", 1e6, Unit::Work),
    ("GFLOP/s", 1e9, Unit::Work),
    ("TFLOP/s", 1e12, Unit::Work),
    ("PFLOP/s", 1e15, Unit::Work),
    ("K", 1024.0, Unit::Size),
    ("M", 1048576.0, Unit::Size),
    ("G", 1073741824.0, Unit::Size),
    ("GBps", 1e9, Unit::Rate),
    ("TBps", 1e12, Unit::Rate),
    ("Mb/s", 125e3, Unit::Rate),
    ("Mbps", 125e3, Unit::Rate),
    ("Gb/s", 125e6, Unit::Rate),
    ("Gbps", 125e6, Unit::Rate),
    ("Tb/s", 125e9, Unit::Rate),
    ("Tbps", 125e9, Unit::Rate),
    ("GFLOPS", 1e9, Unit::Work),
    ("TFLOPS", 1e12, Unit::Work),
    ("PFLOPS", 1e15, Unit::Work),
    ("%", 0.01, Unit::Share),
];

impl Number {
    /// Parses a number with its unit; `None` if the text is not one.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit() && !".-".contains(c));
        let (digits, suffix) = text.split_at(end.unwrap_or(text.len()));
        let suffix = suffix.trim();
        let (_, scale, unit) = SUFFIXES.iter().find(|(name, ..)| *name == suffix)?;
        let value: f64 = digits.parse().ok()?;
        value.is_finite().then_some(Self { value: value * scale, unit: *unit })
    }
}

impl Unit {
    /// Unit of a JSON field, by its name.
    pub(crate) fn of_field(path: &str) -> Self {
        let last = path.rsplit('.').next().unwrap_or(path);
        let memory = path.starts_with("memory.");
        match last {
            "bubble_fraction" | "mfu" | "mfu_full_attention" | "utilisation" | "goodput"
            | "best_goodput" => Self::Share,
            last if last.ends_with("_s") && !last.ends_with("_per_s") => Self::Time,
            last if last.starts_with("bytes") || last.ends_with("bytes") || memory => Self::Size,
            _ if path.starts_with("critical_path.") => Self::Time,
            _ if path.starts_with("bytes_by_axis.") => Self::Size,
            _ => Self::Plain,
        }
    }

    /// Names of the unit's multiples in ascending order, each with its value in base units.
    fn parts(self) -> &'static [(&'static str, f64)] {
        match self {
            Self::Plain => &[("", 1.0)],
            Self::Times => &[("×", 1.0)],
            Self::Share => &[("%", 0.01)],
            Self::Time => &[
                ("ns", 1e-9),
                ("µs", 1e-6),
                ("ms", 1e-3),
                ("s", 1.0),
                ("h", 3600.0),
                ("days", 86_400.0),
                ("years", 365.25 * 86_400.0),
            ],
            Self::Size => &[
                ("B", 1.0),
                ("KiB", 1024.0),
                ("MiB", 1048576.0),
                ("GiB", 1073741824.0),
                ("TiB", 1099511627776.0),
            ],
            Self::Rate => {
                &[("B/s", 1.0), ("kB/s", 1e3), ("MB/s", 1e6), ("GB/s", 1e9), ("TB/s", 1e12)]
            }
            Self::Work => {
                &[("FLOP/s", 1.0), ("GFLOP/s", 1e9), ("TFLOP/s", 1e12), ("PFLOP/s", 1e15)]
            }
        }
    }

    /// The multiple that gives a value few digits before the point, with its value in base units.
    pub(crate) fn part(self, value: f64) -> (&'static str, f64) {
        let parts = self.parts();
        let fitting = parts.iter().rev().find(|(_, scale)| value.abs() >= *scale * 0.9999);
        *fitting.unwrap_or(match self {
            // Zero is shown in the most familiar unit.
            Self::Time if value == 0.0 => &("s", 1.0),
            Self::Share => &("%", 0.01),
            _ => &parts[0],
        })
    }

    /// Returns true if its larger multiples are not powers of ten or two, so that ticks share one.
    pub(crate) fn is_calendar(self, largest: f64) -> bool {
        self == Self::Time && largest >= 3600.0
    }

    /// Formats a value with three digits and its unit.
    pub(crate) fn show(self, value: f64) -> String {
        // A share below this is the rounding error of a difference.
        let value = if self == Self::Share && value.abs() < 1e-9 { 0.0 } else { value };
        let (name, scale) = self.part(value);
        let digits = digits(value / scale);
        match (self, name) {
            (_, "") => digits,
            (Self::Times, _) => format!("{digits}×"),
            _ => format!("{digits} {name}"),
        }
    }
}

/// Formats three significant digits, with thousands separators and without trailing zeros.
pub(crate) fn digits(value: f64) -> String {
    if !value.is_finite() {
        return value.to_string();
    }
    if value != 0.0 && !(1e-3..1e12).contains(&value.abs()) {
        return format!("{value:.2e}").replace('-', "−");
    }
    let places = match value.abs() {
        v if v >= 99.95 || v == 0.0 => 0,
        v if v >= 9.995 => 1,
        v if v >= 0.9995 => 2,
        _ => 3,
    };
    let text = format!("{:.places$}", value.abs());
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) && whole.len() > 4 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    let fraction = fraction.trim_end_matches('0');
    let sign = if value < 0.0 { "−" } else { "" };
    let point = if fraction.is_empty() { "" } else { "." };
    format!("{sign}{grouped}{point}{fraction}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read() {
        for (text, value, unit) in [
            ("8", 8.0, Unit::Plain),
            ("0.5x", 0.5, Unit::Times),
            ("200 Gbit/s", 25e9, Unit::Rate),
            ("64MiB", 67108864.0, Unit::Size),
            ("5 us", 5e-6, Unit::Time),
            ("312TFLOP/s", 312e12, Unit::Work),
            ("312 TFLOPS", 312e12, Unit::Work),
            ("200Gbps", 25e9, Unit::Rate),
            ("25M", 26214400.0, Unit::Size),
        ] {
            let read = Number::read(text).unwrap();
            assert!((read.value / value - 1.0).abs() < 1e-12 && read.unit == unit, "{text}");
        }
        for text in ["", "ring", "dgx-a100:4", "1 parsec", "1.2.3", "-", "[4,4]", "1e5"] {
            assert_eq!(Number::read(text), None, "{text}");
        }
    }

    #[test]
    fn fields_say_what_they_count() {
        assert_eq!(Unit::of_field("iteration_s"), Unit::Time);
        assert_eq!(Unit::of_field("peak_bytes"), Unit::Size);
        assert_eq!(Unit::of_field("memory.activations"), Unit::Size);
        assert_eq!(Unit::of_field("bubble_fraction"), Unit::Share);
        assert_eq!(Unit::of_field("ops.all_gather tp.time_s"), Unit::Time);
        assert_eq!(Unit::of_field("bytes_sent_per_rank_max"), Unit::Size);
        assert_eq!(Unit::of_field("rounds"), Unit::Plain);
    }

    #[test]
    fn values_have_three_digits_and_a_unit() {
        for (unit, value, shown) in [
            (Unit::Time, 0.0123456, "12.3 ms"),
            (Unit::Time, 86_400.0 * 400.0, "1.1 years"),
            (Unit::Time, 0.0, "0 s"),
            (Unit::Size, 1536.0, "1.5 KiB"),
            (Unit::Share, 0.125, "12.5 %"),
            (Unit::Share, 0.0, "0 %"),
            (Unit::Share, 4.8e-17, "0 %"),
            (Unit::Plain, 1_234_567.0, "1,234,567"),
            (Unit::Plain, 1234.0, "1234"),
            (Unit::Times, 2.0, "2×"),
            (Unit::Plain, -0.25, "−0.25"),
            (Unit::Plain, 1e-9, "1.00e−9"),
            (Unit::Plain, f64::NAN, "NaN"),
        ] {
            assert_eq!(unit.show(value), shown);
        }
    }
}
