//! Numeric flags: any text yields a number in range or a problem.

use super::Problems;
use std::ops::RangeInclusive;

/// Parses a whole number in a range; `None` if the flag is absent or invalid.
pub(crate) fn whole(
    flag: &str,
    text: Option<&str>,
    range: RangeInclusive<u64>,
    problems: &mut Problems,
) -> Option<u64> {
    let text = text?;
    // A number beyond 64 bits is out of range.
    let value = text.trim().parse::<u128>().ok();
    let value = value.and_then(|value| u64::try_from(value).ok());
    let found = value.filter(|value| range.contains(value));
    if found.is_none() {
        let (least, most) = range.into_inner();
        problems
            .add(flag, format!("'{}' is not a whole number from {least} to {most}", short(text)));
    }
    found
}

/// Parses a finite number in a range; `None` if the flag is absent or invalid.
pub(crate) fn real(
    flag: &str,
    text: Option<&str>,
    range: RangeInclusive<f64>,
    problems: &mut Problems,
) -> Option<f64> {
    let text = text?;
    let found = text.trim().parse::<f64>().ok().filter(|value| range.contains(value));
    if found.is_none() {
        let (least, most) = range.into_inner();
        problems.add(flag, format!("'{}' is not a number from {least} to {most}", short(text)));
    }
    found
}

/// The typed text, shortened for a message.
pub(super) fn short(text: &str) -> String {
    const MOST: usize = 40;
    if text.chars().count() <= MOST {
        return text.to_owned();
    }
    text.chars().take(MOST).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_numbers_are_problems_that_name_the_flag() {
        for text in ["0", "-1", "18446744073709551616", "1e9", "NaN", "", "4.0", "9e999", "٣"] {
            let mut problems = Problems::default();
            assert_eq!(whole("--dp", Some(text), 1..=64, &mut problems), None);
            assert_eq!(
                problems.to_string(),
                format!("error: --dp: '{text}' is not a whole number from 1 to 64")
            );
        }
        for text in ["-1", "NaN", "inf", "1e999", "x", ""] {
            let mut problems = Problems::default();
            assert_eq!(real("--lr", Some(text), 0.0..=10.0, &mut problems), None, "{text}");
            assert!(!problems.is_empty());
        }
    }

    #[test]
    fn good_numbers_and_absent_flags_pass() {
        let mut problems = Problems::default();
        assert_eq!(whole("--dp", Some("64"), 1..=64, &mut problems), Some(64));
        assert_eq!(whole("--dp", None, 1..=64, &mut problems), None);
        assert_eq!(real("--lr", Some("3e-3"), 0.0..=10.0, &mut problems), Some(3e-3));
        assert!(problems.is_empty());
    }

    #[test]
    fn long_garbage_is_cut() {
        let mut problems = Problems::default();
        whole("--dp", Some(&"é".repeat(10_000)), 1..=64, &mut problems);
        assert!(problems.to_string().len() < 200);
    }
}
