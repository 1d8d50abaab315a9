//! Flags whose value is one of some words.

use super::Problems;
use std::fmt::Display;
use std::str::FromStr;

/// A value that is one of some words; none if the flag is absent or wrong.
pub(crate) fn word<T>(flag: &str, text: &Option<String>, problems: &mut Problems) -> Option<T>
where
    T: FromStr,
    T::Err: Display,
{
    let text = text.as_deref()?;
    text.parse().map_err(|error: T::Err| problems.say(flag, error.to_string())).ok()
}
