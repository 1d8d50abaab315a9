//! Sizes in bytes, with the usual units.

use super::Problems;
use super::number::short;
use paceline_plan::units::Bytes;

/// Maximum size in bytes: one pebibyte, far above any message.
const MOST: u64 = 1 << 50;

const UNITS: [(&str, u64); 9] = [
    ("b", 1),
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
                "'{}' is not a size from 1 B to 1 PiB; write bytes (1048576) or a unit (64MiB, 64MB)",
                short(text)
            ),
        );
    }
    found
}

fn parse(text: &str) -> Option<Bytes> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let unit = unit.trim().to_ascii_lowercase();
    let scale = match unit.as_str() {
        "" => 1,
        unit => UNITS.iter().find(|(name, _)| *name == unit)?.1,
    };
    let bytes = digits.parse::<u64>().ok()?.checked_mul(scale)?;
    (1..=MOST).contains(&bytes).then_some(Bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in
            [("1048576", 1 << 20), ("1MiB", 1 << 20), ("64 MB", 64_000_000), ("2gib", 2 << 30)]
        {
            assert_eq!(parse(text), Some(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn nonsense_and_absurd_sizes_are_refused() {
        for text in
            ["", "0", "-1", "1e9", "MiB", "1.5MiB", "1 parsec", "18446744073709551616", "2000TiB"]
        {
            let mut problems = Problems::default();
            assert_eq!(size("--size", Some(text), &mut problems), None, "{text}");
            assert!(problems.to_string().starts_with("error: --size: '"), "{problems}");
        }
    }
}
