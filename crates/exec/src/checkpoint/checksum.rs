//! Checksums of a checkpoint's tensors, computed from parts in any order.
//!
//! No rank holds a whole tensor, so the checksum is a sum over elements, modulo 2⁶⁴, of SplitMix64's
//! finaliser applied to an element's bits and index. Each rank adds what it writes, and the
//! committing rank adds the ranks. Any change of one element changes the sum, because the finaliser
//! is a bijection; of several elements, all but one in 2⁶⁴ changes do.

use super::error::CheckpointError;
use super::pieces::{Files, In, Piece};
use super::{LARGEST, MOMENTS, RANK_STATE, WEIGHTS};
use crate::data::corpus::mix;
use crate::regular;
use crate::safetensors::{Contents, Reader, SafetensorsError};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::Path;

/// 2⁶⁴ divided by the golden ratio, as in SplitMix64: spreads indices over all bits.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Number of elements read at once.
const CHUNK: usize = 1 << 16;

/// Sum over elements of a tensor, of which `values` begin at element `first`.
fn sum(first: u64, values: &[f32]) -> u64 {
    let mut index = first.wrapping_mul(SPREAD);
    let mut sum = 0u64;
    for value in values {
        sum = sum.wrapping_add(mix(index ^ u64::from(value.to_bits())));
        index = index.wrapping_add(SPREAD);
    }
    sum
}

/// Checksums of a file's tensors.
type Sums = BTreeMap<String, u64>;

/// Checksums of what one rank, or all ranks, have written.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Checksums {
    /// Of tensors, by file and name, in hexadecimal.
    #[serde(with = "hexadecimal")]
    tensors: BTreeMap<String, Sums>,
    /// SHA-256 of the other files.
    #[serde(default)]
    files: BTreeMap<String, String>,
}

impl Checksums {
    /// Adds the checksums of another rank.
    pub(super) fn add(&mut self, other: Self) {
        for (file, sums) in other.tensors {
            let own = self.tensors.entry(file).or_default();
            for (tensor, sum) in sums {
                let total = own.entry(tensor).or_default();
                *total = total.wrapping_add(sum);
            }
        }
    }

    /// Adds a file that is not made of tensors.
    pub(super) fn add_file(&mut self, name: &str, contents: &[u8]) {
        self.files.insert(name.to_owned(), digest(contents));
    }

    /// Compares the files of a checkpoint, only its weights if `weights_only`. Returns the number
    /// of tensors and of their bytes.
    pub(super) fn verify(
        &self,
        folder: &Path,
        weights_only: bool,
    ) -> Result<(usize, u64), CheckpointError> {
        let damaged = |name: &str, problem: String| CheckpointError::State {
            path: folder.join(name),
            problem,
        };
        for (name, expected) in &self.files {
            let contents = regular::read(&folder.join(name), LARGEST)
                .map_err(|source| CheckpointError::Read { path: folder.join(name), source })?;
            let found = digest(&contents);
            if found != *expected {
                let problem = format!("is damaged: its SHA-256 is {found}, not {expected}");
                return Err(damaged(name, problem));
            }
        }
        let (mut tensors, mut bytes) = (0, 0);
        for (name, sums) in
            self.tensors.iter().filter(|(name, _)| !weights_only || *name == WEIGHTS)
        {
            let reader = Reader::open(&folder.join(name))?;
            for (tensor, expected) in sums {
                bytes += verify_tensor(&reader, tensor, *expected)?;
                tensors += 1;
            }
            if let Some(unknown) = reader.tensors().keys().find(|name| !sums.contains_key(*name)) {
                return Err(damaged(
                    name,
                    format!("has the tensor '{unknown}', which was not saved"),
                ));
            }
        }
        Ok((tensors, bytes))
    }
}

/// Compares a tensor; returns its bytes.
fn verify_tensor(reader: &Reader, tensor: &str, expected: u64) -> Result<u64, SafetensorsError> {
    let elements = match reader.tensors().get(tensor) {
        Some(found) => found.elements(),
        None => return Err(reader.wrong(tensor, "is missing".to_owned())),
    };
    let mut values = vec![0.0; (CHUNK as u64).min(elements) as usize];
    let (mut first, mut found) = (0, 0u64);
    while first < elements {
        let values = &mut values[..(CHUNK as u64).min(elements - first) as usize];
        reader.read(tensor, first, values)?;
        found = found.wrapping_add(sum(first, values));
        first += values.len() as u64;
    }
    if found == expected {
        return Ok(elements * 4);
    }
    let problem = format!("is damaged: its checksum is {found:016x}, not {expected:016x}");
    Err(reader.wrong(tensor, problem))
}

fn digest(contents: &[u8]) -> String {
    Sha256::digest(contents).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Adds up the checksums of the pieces that a rank writes.
#[derive(Debug)]
pub(super) struct Summing<'a> {
    files: [(&'static str, Vec<TensorSum<'a>>); 3],
}

#[derive(Debug)]
struct TensorSum<'a> {
    name: &'a str,
    /// Bytes of the tensor in its file.
    bytes: std::ops::Range<u64>,
    sum: u64,
}

impl<'a> Summing<'a> {
    pub(super) fn new(files: &'a Files) -> Self {
        let of = |contents: Option<&'a Contents>| {
            let tensors = contents.into_iter().flat_map(Contents::tensors);
            let sums = tensors.map(|(name, tensor)| TensorSum {
                name,
                bytes: tensor.at..tensor.at + 4 * tensor.elements(),
                sum: 0,
            });
            // The contents are in the order of their offsets.
            sums.collect()
        };
        let [weights, moments, rank_state] =
            [Some(&files.weights), files.moments.as_ref(), files.rank_state.as_ref()].map(of);
        Self { files: [(WEIGHTS, weights), (MOMENTS, moments), (RANK_STATE, rank_state)] }
    }

    /// Adds the values of a piece, which may cover several tensors.
    pub(super) fn add(&mut self, piece: &Piece, values: &[f32]) {
        let file = match piece.file {
            In::Weights => 0,
            In::Moments => 1,
            In::RankState => 2,
        };
        let tensors = &mut self.files[file].1;
        let mut at = tensors.partition_point(|tensor| tensor.bytes.end <= piece.at);
        let (mut position, mut rest) = (piece.at, values);
        while let (Some(tensor), false) = (tensors.get_mut(at), rest.is_empty()) {
            let count = ((tensor.bytes.end - position) / 4).min(rest.len() as u64);
            let (own, behind) = rest.split_at(count as usize);
            let first = (position - tensor.bytes.start) / 4;
            tensor.sum = tensor.sum.wrapping_add(sum(first, own));
            (position, rest, at) = (position + 4 * count, behind, at + 1);
        }
    }

    /// The checksums; tensors of which this rank wrote nothing count as zero.
    pub(super) fn finish(self) -> Checksums {
        let named = self.files.into_iter().filter(|(_, tensors)| !tensors.is_empty());
        let tensors = named.map(|(name, tensors)| {
            let sums = tensors.into_iter().map(|tensor| (tensor.name.to_owned(), tensor.sum));
            (name.to_owned(), sums.collect())
        });
        Checksums { tensors: tensors.collect(), files: BTreeMap::new() }
    }
}

/// Sums as text: JSON numbers of 64 bits lose digits in many readers.
mod hexadecimal {
    use super::Sums;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::collections::BTreeMap;

    pub(super) fn serialize<S: Serializer>(
        tensors: &BTreeMap<String, Sums>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let texts = |sums: &Sums| -> BTreeMap<String, String> {
            sums.iter().map(|(name, sum)| (name.clone(), format!("{sum:016x}"))).collect()
        };
        let files: BTreeMap<&String, _> =
            tensors.iter().map(|(file, sums)| (file, texts(sums))).collect();
        files.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<String, Sums>, D::Error> {
        let files: BTreeMap<String, BTreeMap<String, String>> =
            BTreeMap::deserialize(deserializer)?;
        let number = |text: String| u64::from_str_radix(&text, 16).map_err(D::Error::custom);
        let read = |sums: BTreeMap<String, String>| -> Result<Sums, D::Error> {
            sums.into_iter().map(|(name, text)| Ok((name, number(text)?))).collect()
        };
        files.into_iter().map(|(file, sums)| Ok((file, read(sums)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_in_any_order_sum_to_the_whole_and_every_flip_shows() {
        let values: Vec<f32> = (0..1000).map(|i| i as f32 * 0.37 - 100.0).collect();
        let whole = sum(0, &values);
        let parts = [(700, 1000), (0, 13), (13, 700)];
        let added = parts.map(|(from, to)| sum(from as u64, &values[from..to]));
        assert_eq!(added.into_iter().fold(0, u64::wrapping_add), whole);
        let mut seen = std::collections::BTreeSet::from([whole]);
        for at in 0..1000 {
            let mut flipped = values.clone();
            flipped[at] = f32::from_bits(flipped[at].to_bits() ^ 1 << (at % 32));
            assert!(seen.insert(sum(0, &flipped)), "{at}");
        }
        let mut swapped = values.clone();
        swapped.swap(3, 4);
        assert!(seen.insert(sum(0, &swapped)));
    }
}
