//! Readers of a cluster file's values; each says why a value is unfit.

use crate::cluster::Cluster;
use crate::cluster::quantity::{self, Quantity};
use paceline_plan::located::{Entry, Errors, Section, Value};
use paceline_plan::units::Bytes;

/// Reader of one file: a field that cannot be read is `None` and recorded, and reading continues.
pub(super) struct Reader {
    pub(super) errors: Errors,
}

impl Reader {
    pub(super) fn quantity(
        &mut self,
        section: &Section<'_>,
        key: &str,
        kind: &Quantity,
    ) -> Option<f64> {
        self.errors.required(section, key, kind.example, |value| measured(value, kind))
    }

    /// Reads each table of a list; messages name them by `label` and number.
    pub(super) fn each<'a, T>(
        &mut self,
        list: &'a [Entry],
        label: &str,
        mut read: impl FnMut(&mut Self, Section<'a>) -> Option<T>,
    ) -> Option<Vec<T>> {
        let read: Vec<_> = (list.iter().enumerate())
            .map(|(index, entry)| {
                let section = self.errors.as_table(entry, format!("{label} {}", index + 1))?;
                read(self, section)
            })
            .collect();
        read.into_iter().collect()
    }
}

pub(super) fn text(value: &Value) -> Result<String, String> {
    match value.text() {
        Some(text) if !text.trim().is_empty() => Ok(text.into()),
        Some(_) => Err("it is empty".into()),
        None => Err("it is not text".into()),
    }
}

pub(super) fn boolean(value: &Value) -> Result<bool, String> {
    value.flag().ok_or_else(|| "it is neither true nor false".into())
}

pub(super) fn count(value: &Value) -> Result<u32, String> {
    whole(value, 1, Cluster::MAX_DEVICES)
}

pub(super) fn whole(value: &Value, least: u64, most: u64) -> Result<u32, String> {
    let number = value.whole(least..=most).and_then(|number| u32::try_from(number).ok());
    number.ok_or_else(|| format!("it is not a whole number from {least} to {most}"))
}

/// Parses a fraction from a millionth to 1: with less, times are no numbers.
pub(super) fn share(value: &Value) -> Result<f64, String> {
    let number = value.number().filter(|share| (1e-6..=1.0).contains(share));
    number.ok_or_else(|| "it is not a number from 0.000001 to 1".into())
}

/// Parses a ratio or factor of at least 1.
pub(super) fn ratio(value: &Value) -> Result<f64, String> {
    let number = value.number().filter(|ratio| (1.0..=1e6).contains(ratio));
    number.ok_or_else(|| "it is not a number from 1 to 1000000".into())
}

pub(super) fn memory(value: &Value) -> Result<Bytes, String> {
    match (value.text(), value.whole(0..=u64::MAX)) {
        (Some(text), _) => quantity::read_bytes(text),
        (None, Some(bytes)) => quantity::check_bytes(bytes.into()),
        (None, None) => Err("it is not a number of bytes".into()),
    }
}

pub(super) fn measured(value: &Value, kind: &Quantity) -> Result<f64, String> {
    match (value.text(), value.number()) {
        (Some(text), _) => kind.read(text),
        (None, Some(number)) => kind.check(number),
        (None, None) => Err(format!("it is not {}", kind.noun)),
    }
}
