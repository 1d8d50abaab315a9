//! Sizes in bytes, with the usual units.

use super::Problems;
use super::number::short;
use paceline_plan::units::Bytes;

/// Maximum size in bytes: one pebibyte, far above any message.
const MOST: u64 = 1 << 50;

/// Lower-case units. A bare letter is binary, as in nccl-tests and `dd`.
const UNITS: [(&str, u64); 13] = [
    ("b", 1),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
];

/// Parses a size such as `1048576`, `1MiB` or `64 MB`; `None` if the flag is absent or invalid.
pub(crate) fn size(flag: &str, text: Option<&str>, problems: &mut Problems) -> Option<Bytes> {
    let text = text?;
    let found = parse(text);
    if found.is_none() {
        problems.add(
            flag,
            format!(
                "'{}' is not a size from 1 B to 1 PiB; write bytes (1048576) or a unit (64MiB, \
                 64M for the same, 64MB for 64000000)",
                short(text)
            ),
        );
    }
    found
}

/// The number of a text such as `25MiB` or `25M`, for a flag that counts mebibytes.
pub(super) fn in_mib(text: &str) -> &str {
    let text = text.trim();
    let units = ["MiB", "M"].into_iter();
    units.filter_map(|unit| text.strip_suffix(unit)).next().unwrap_or(text).trim_end()
}

fn parse(text: &str) -> Option<Bytes> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let unit = unit.trim().to_ascii_lowercase();
    let scale = match unit.as_str() {
        "" => 1,
        unit => UNITS.iter().find(|(name, _)| *name == unit)?.1,
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    if whole.is_empty() || digits.ends_with('.') || digits.len() > 20 {
        return None;
    }
    // At most 20 digits times at most 2^40 stays below 2^107.
    let scaled = format!("{whole}{fraction}").parse::<u128>().ok()? * u128::from(scale);
    let tens = 10u128.pow(fraction.len() as u32);
    let bytes = u64::try_from(scaled / tens).ok().filter(|_| scaled.is_multiple_of(tens))?;
    (1..=MOST).contains(&bytes).then_some(Bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("1048576", 1 << 20),
            ("1MiB", 1 << 20),
            ("64 MB", 64_000_000),
            ("2gib", 2 << 30),
            ("25M", 25 << 20),
            ("8K", 8 << 10),
            ("1.5MiB", 3 << 19),
        ] {
            assert_eq!(parse(text), Some(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn a_flag_in_mebibytes_takes_the_unit_too() {
        for text in ["25", "25M", "25 MiB", " 25MiB"] {
            assert_eq!(in_mib(text), "25", "{text:?}");
        }
        assert_eq!(in_mib("25GB"), "25GB");
    }

    #[test]
    fn nonsense_and_absurd_sizes_are_refused() {
        for text in [
            "",
            "0",
            "-1",
            "1e9",
            "MiB",
            "1.3KiB",
            "1.",
            ".5M",
            "1.2.3M",
            "1 parsec",
            "18446744073709551616",
            "2000TiB",
        ] {
            let mut problems = Problems::default();
            assert_eq!(size("--size", Some(text), &mut problems), None, "{text}");
            assert!(problems.to_string().starts_with("error: --size: '"), "{problems}");
        }
    }
}
