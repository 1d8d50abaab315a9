//! Numbers with units ("80 GiB", "300 GB/s", "5 us"), parsed strictly and written exactly.
//!
//! A decimal unit only moves the decimal point, so numbers are scaled as text and rounded once: "5
//! us" is the float nearest to 0.000005, and written values parse back to the same bits.

use paceline_plan::units::Bytes;

/// A physical quantity, with its units and plausible range.
pub(super) struct Quantity {
    /// Name of the quantity in messages.
    pub(super) noun: &'static str,
    /// An example value.
    pub(super) example: &'static str,
    units: &'static [Unit],
    least: f64,
    most: f64,
}

struct Unit {
    name: &'static str,
    /// Other spellings in use; messages and files show only the name.
    others: &'static [&'static str],
    /// Power of ten of the unit, relative to the base unit.
    exponent: i32,
    /// Divisor in addition to the power of ten (8 for bits).
    divisor: f64,
}

const fn unit(name: &'static str, exponent: i32, others: &'static [&'static str]) -> Unit {
    Unit { name, others, exponent, divisor: 1.0 }
}

const fn bits(name: &'static str, exponent: i32, others: &'static [&'static str]) -> Unit {
    Unit { name, others, exponent, divisor: 8.0 }
}

/// Bytes per second; network rates may be given in bits.
pub(super) const RATE: Quantity = Quantity {
    noun: "a rate",
    example: "\"300 GB/s\"",
    units: &[
        unit("TB/s", 12, &["TBps"]),
        unit("GB/s", 9, &["GBps"]),
        unit("MB/s", 6, &["MBps"]),
        unit("kB/s", 3, &["kBps", "KB/s", "KBps"]),
        unit("B/s", 0, &["Bps"]),
        bits("Tbit/s", 12, &["Tb/s", "Tbps"]),
        bits("Gbit/s", 9, &["Gb/s", "Gbps"]),
        bits("Mbit/s", 6, &["Mb/s", "Mbps"]),
        bits("kbit/s", 3, &["kb/s", "kbps", "Kb/s", "Kbps", "Kbit/s"]),
        bits("bit/s", 0, &["b/s", "bps"]),
    ],
    least: 1.0,
    most: 1e18,
};

/// Floating-point operations per second.
pub(super) const FLOPS: Quantity = Quantity {
    noun: "an arithmetic rate",
    example: "\"312 TFLOP/s\"",
    units: &[
        unit("PFLOP/s", 15, &["PFLOPS", "PFLOPs", "PFLOPs/s", "PFlop/s"]),
        unit("TFLOP/s", 12, &["TFLOPS", "TFLOPs", "TFLOPs/s", "TFlop/s"]),
        unit("GFLOP/s", 9, &["GFLOPS", "GFLOPs", "GFLOPs/s", "GFlop/s"]),
        unit("MFLOP/s", 6, &["MFLOPS", "MFLOPs", "MFLOPs/s", "MFlop/s"]),
        unit("FLOP/s", 0, &["FLOPS", "FLOPs", "FLOPs/s", "Flop/s"]),
    ],
    least: 1.0,
    most: 1e24,
};

/// Seconds; a latency may be zero.
pub(super) const TIME: Quantity = Quantity {
    noun: "a time",
    example: "\"5 us\"",
    units: &[
        unit("s", 0, &["sec"]),
        unit("ms", -3, &["msec"]),
        unit("us", -6, &["µs", "μs", "usec"]),
        unit("ns", -9, &["nsec"]),
    ],
    least: 0.0,
    most: 1e3,
};

/// Watts.
pub(super) const POWER: Quantity = Quantity {
    noun: "a power",
    example: "\"400 W\"",
    units: &[unit("kW", 3, &[]), unit("W", 0, &["watt", "watts"]), unit("mW", -3, &[])],
    least: 0.0,
    most: 1e6,
};

impl Unit {
    fn is_called(&self, name: &str) -> bool {
        self.name == name || self.others.contains(&name)
    }
}

impl Quantity {
    /// Parses a text into the base unit.
    pub(super) fn read(&self, text: &str) -> Result<f64, String> {
        let (number, name) = split(text)?;
        let Some(unit) = self.units.iter().find(|unit| unit.is_called(name)) else {
            let names: Vec<_> = self.units.iter().map(|unit| unit.name).collect();
            return Err(unknown_unit(name, &names));
        };
        // Shifting the exponent in the text leaves a single rounding, in the float parser.
        let shifted: f64 = format!("{number}e{}", unit.exponent)
            .parse()
            .map_err(|_| format!("'{number}' is not a number"))?;
        self.check(shifted / unit.divisor)
    }

    /// Checks that a number in the base unit is in the plausible range.
    pub(super) fn check(&self, value: f64) -> Result<f64, String> {
        if (self.least..=self.most).contains(&value) {
            Ok(value + 0.0) // Turns the one negative value in range, −0, into 0.
        } else {
            let (least, most) = (self.write(self.least), self.write(self.most));
            Err(format!("{} lies between {least} and {most}", self.noun))
        }
    }

    /// Writes the shortest text that parses back to exactly this value.
    pub(super) fn write(&self, value: f64) -> String {
        let scientific = format!("{value:e}");
        let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        let mut own = self.units.iter().filter(|unit| unit.divisor == 1.0);
        let fitting = own.clone().find(|unit| unit.exponent <= exponent || value == 0.0);
        let Some(unit) = fitting.or(own.next_back()) else { return scientific };
        let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
        format!("{} {}", place_point(&digits, exponent - unit.exponent + 1), unit.name)
    }
}

/// Parses a text like "80 GiB" into a whole number of bytes.
pub(super) fn read_bytes(text: &str) -> Result<Bytes, String> {
    let (number, name) = split(text)?;
    let Some((_, scale)) = BYTE_UNITS.iter().find(|(unit, _)| *unit == name) else {
        return Err(unknown_unit(name, &BYTE_UNITS.map(|(unit, _)| unit)));
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if number.len() > 20 {
        return Err(format!("'{number}' has more digits than any memory"));
    }
    // At most 20 digits times at most 2^40 stays below 2^107.
    let digits: u128 =
        format!("{whole}{fraction}").parse().map_err(|_| format!("'{number}' is not a number"))?;
    let scaled = digits * u128::from(*scale);
    let tens = 10u128.pow(fraction.len() as u32);
    if !scaled.is_multiple_of(tens) {
        return Err("this is not a whole number of bytes".into());
    }
    check_bytes(scaled / tens)
}

/// Checks that a number of bytes is in the plausible range.
pub(super) fn check_bytes(bytes: u128) -> Result<Bytes, String> {
    match u64::try_from(bytes) {
        Ok(bytes @ 1..=MOST_BYTES) => Ok(Bytes(bytes)),
        _ => Err(format!("a memory size lies between 1 B and {}", write_bytes(Bytes(MOST_BYTES)))),
    }
}

/// Writes bytes with the largest unit that divides them.
pub(super) fn write_bytes(bytes: Bytes) -> String {
    let (name, scale) = BYTE_UNITS
        .into_iter()
        .filter(|(_, scale)| bytes.0.is_multiple_of(*scale))
        .max_by_key(|(_, scale)| *scale)
        .filter(|_| bytes.0 > 0)
        .unwrap_or(("B", 1));
    format!("{} {name}", bytes.0 / scale)
}

/// An example memory size.
pub(super) const BYTES_EXAMPLE: &str = "\"80 GiB\"";

const MOST_BYTES: u64 = 1 << 60;

const BYTE_UNITS: [(&str, u64); 10] = [
    ("B", 1),
    ("KB", 1_000),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

/// Splits "1.5 GB" at the unit: digits, at most one point between digits, at most one space.
fn split(text: &str) -> Result<(&str, &str), String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, rest) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.contains('.') {
        return Err("it does not begin with a plain positive number".into());
    }
    match rest.strip_prefix(' ').unwrap_or(rest) {
        "" => Err("the unit is missing".into()),
        unit => Ok((number, unit)),
    }
}

fn unknown_unit(name: &str, known: &[&str]) -> String {
    format!("unknown unit '{name}' (known: {})", known.join(", "))
}

/// Places the decimal point after the first `point` digits.
fn place_point(digits: &str, point: i32) -> String {
    match usize::try_from(point) {
        Err(_) | Ok(0) => format!("0.{}{digits}", "0".repeat(point.unsigned_abs() as usize)),
        Ok(point) if point >= digits.len() => {
            format!("{digits}{}", "0".repeat(point - digits.len()))
        }
        Ok(point) => format!("{}.{}", &digits[..point], &digits[point..]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_mean_what_they_say() {
        assert_eq!(RATE.read("300 GB/s"), Ok(300e9));
        assert_eq!(RATE.read("200 Gbit/s"), Ok(25e9));
        assert_eq!(RATE.read("3.35TB/s"), Ok(3.35e12));
        assert_eq!(FLOPS.read("312 TFLOP/s"), Ok(312e12));
        assert_eq!(TIME.read("5 us"), Ok(5e-6), "rounded once: 5 × 1e-6 is another float");
        assert_eq!(TIME.read("5 µs"), Ok(5e-6));
        assert_eq!(TIME.read("0 s"), Ok(0.0));
        for text in ["200Gb/s", "200 Gbps", "25GBps", "25 GB/s", "200000Mbps"] {
            assert_eq!(RATE.read(text), Ok(25e9), "{text}");
        }
        for text in ["312 TFLOPS", "312TFLOPs", "0.312 PFLOPS", "312 TFLOPs/s"] {
            assert_eq!(FLOPS.read(text), Ok(312e12), "{text}");
        }
        assert_eq!(TIME.read("5 usec"), Ok(5e-6));
        assert_eq!(read_bytes("80 GB"), Ok(Bytes(80_000_000_000)));
        assert_eq!(read_bytes("80 GiB"), Ok(Bytes(80 << 30)));
        assert_eq!(read_bytes("1.5 KiB"), Ok(Bytes(1536)));
    }

    #[test]
    fn nothing_is_guessed() {
        for text in ["", "GB/s", "300", "300 ", "300  GB/s", "-300 GB/s", "+1 GB/s", "1e3 GB/s"] {
            assert!(RATE.read(text).is_err(), "{text:?}");
        }
        for text in ["300 gb/s", "300 GBit", "300 G", "300 GiB/s", ".5 GB/s", "1. GB/s"] {
            assert!(RATE.read(text).is_err(), "{text:?}");
        }
        let error = RATE.read("200 gb/s").unwrap_err();
        assert!(error.starts_with("unknown unit 'gb/s' (known: TB/s"), "{error}");
        assert!(error.contains("Gbit/s"), "{error}");
        assert_eq!(read_bytes("1.5 B").unwrap_err(), "this is not a whole number of bytes");
    }

    #[test]
    fn absurd_values_are_refused() {
        assert_eq!(RATE.read("0 B/s").unwrap_err(), "a rate lies between 1 B/s and 1000000 TB/s");
        assert!(RATE.read(&format!("{} TB/s", "9".repeat(400))).is_err());
        for value in [0.0, -1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MIN_POSITIVE] {
            assert!(RATE.check(value).is_err(), "{value}");
            assert!(FLOPS.check(value).is_err(), "{value}");
        }
        assert!(TIME.check(-1e-9).is_err() && TIME.check(f64::NAN).is_err());
        assert!(TIME.check(-0.0).unwrap().is_sign_positive());
        assert!(read_bytes("0 B").is_err() && read_bytes("99999999999 TiB").is_err());
        assert!(read_bytes(&format!("{} B", "9".repeat(400))).is_err());
        assert!(check_bytes(u128::MAX).is_err());
    }

    #[test]
    fn values_are_written_with_the_unit_that_fits() {
        assert_eq!(RATE.write(2.5e10), "25 GB/s");
        assert_eq!(RATE.write(2.039e12), "2.039 TB/s");
        assert_eq!(FLOPS.write(19.5e12), "19.5 TFLOP/s");
        assert_eq!(FLOPS.write(4500e12), "4.5 PFLOP/s");
        assert_eq!(TIME.write(2e-6), "2 us");
        assert_eq!(TIME.write(1.5e-12), "0.0015 ns");
        assert_eq!(TIME.write(0.0), "0 s");
        assert_eq!(write_bytes(Bytes(80 << 30)), "80 GiB");
        assert_eq!(write_bytes(Bytes(80_000_000_000)), "80 GB");
        assert_eq!(write_bytes(Bytes(81_559 << 20)), "81559 MiB");
        assert_eq!(write_bytes(Bytes(0)), "0 B");
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(exponent in -14.0f64..18.0) {
            let value = 10f64.powf(exponent);
            if value <= 1e3 {
                prop_assert_eq!(TIME.read(&TIME.write(value)), Ok(value));
            }
            if value >= 1.0 {
                prop_assert_eq!(RATE.read(&RATE.write(value)), Ok(value));
                prop_assert_eq!(FLOPS.read(&FLOPS.write(value)), Ok(value));
            }
        }

        #[test]
        fn bytes_that_are_written_read_back(bytes in 1..=MOST_BYTES) {
            prop_assert_eq!(read_bytes(&write_bytes(Bytes(bytes))), Ok(Bytes(bytes)));
        }

        #[test]
        fn no_text_breaks_the_reader(text in ".{0,24}") {
            let _ = (RATE.read(&text), TIME.read(&text), read_bytes(&text));
        }
    }
}
