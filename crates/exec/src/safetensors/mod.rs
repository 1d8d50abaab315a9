//! The safetensors format: a table of contents in JSON, then the tensors' bytes.
//!
//! ```text
//! 8 bytes     length of the header, little-endian
//! header      {"__metadata__": {…}, "NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}
//! the rest    the tensors, row by row, where `data_offsets` say, counted from the header's end
//! ```
//!
//! A [`Contents`] fixes the location of every element of every tensor before a byte is written.
//! This lets ranks write their own elements of one file without communication. That, and reading
//! parts of a tensor, is why the format is implemented here and not by a crate that holds whole
//! files in memory.

mod read;

pub use read::{Reader, SafetensorsError};

use serde::ser::{Serialize, SerializeMap, Serializer};
use std::collections::BTreeMap;

#[cfg(target_endian = "big")]
compile_error!("tensors are written as they lie in memory, and the format is little-endian");

/// Header length beyond which a file is rejected, as in the format's reference reader.
const LONGEST_HEADER: u64 = 100_000_000;

/// Element type that can be read; all are written as `F32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Four bytes.
    F32,
    /// The upper half of an `F32`.
    Bf16,
    /// Two bytes, IEEE 754.
    F16,
}

impl Element {
    /// Bytes per element.
    pub const fn size(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Name of the type in the format.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
        }
    }
}

/// One tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Element type.
    pub element: Element,
    /// Dimensions.
    pub shape: Vec<u64>,
    /// Offset of the first byte in the file.
    pub at: u64,
}

impl Tensor {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// Layout of a file to be written: its tensors and their offsets.
#[derive(Clone, Debug)]
pub struct Contents {
    tensors: BTreeMap<String, Tensor>,
    header: Vec<u8>,
    len: u64,
}

impl Contents {
    /// Lays out `F32` tensors in the order of their names: equal names and shapes give equal
    /// offsets. `metadata` is for people and other programs.
    pub fn new(
        shapes: BTreeMap<String, Vec<u64>>,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, serde_json::Error> {
        let mut tensors = BTreeMap::new();
        let mut at = 0;
        for (name, shape) in shapes {
            let tensor = Tensor { element: Element::F32, shape, at };
            at += tensor.elements() * tensor.element.size();
            tensors.insert(name, tensor);
        }
        let mut json = serde_json::to_vec(&Header { tensors: &tensors, metadata })?;
        // Trailing spaces are the format's own padding; they align the tensors for mapped reads.
        json.resize((8 + json.len()).next_multiple_of(64) - 8, b' ');
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.append(&mut json);
        let before = header.len() as u64;
        tensors.values_mut().for_each(|tensor| tensor.at += before);
        Ok(Self { tensors, header, len: before + at })
    }

    /// A tensor of the file.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// All tensors with their names, in the order of their offsets.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Bytes at the start of the file.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.len
    }
}

/// Table of contents, with offsets counted from its end.
struct Header<'a> {
    tensors: &'a BTreeMap<String, Tensor>,
    metadata: &'a BTreeMap<String, String>,
}

#[derive(serde::Serialize)]
struct Row<'a> {
    dtype: &'static str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if !self.metadata.is_empty() {
            map.serialize_entry(METADATA, self.metadata)?;
        }
        for (name, tensor) in self.tensors {
            let end = tensor.at + tensor.elements() * tensor.element.size();
            let row = Row {
                dtype: tensor.element.name(),
                shape: &tensor.shape,
                data_offsets: [tensor.at, end],
            };
            map.serialize_entry(name, &row)?;
        }
        map.end()
    }
}

/// The only key that is not a tensor name.
const METADATA: &str = "__metadata__";
