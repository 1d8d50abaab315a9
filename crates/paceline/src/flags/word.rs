//! Flags with named values.

use super::Problems;
use std::fmt::Display;
use std::str::FromStr;

/// Parses a named value; `None` if the flag is absent or invalid.
pub(crate) fn word<T>(flag: &str, text: &Option<String>, problems: &mut Problems) -> Option<T>
where
    T: FromStr,
    T::Err: Display,
{
    let text = text.as_deref()?;
    text.parse().map_err(|error: T::Err| problems.add(flag, error.to_string())).ok()
}
