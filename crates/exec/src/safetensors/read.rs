//! Reads tensors, and parts of them, from an untrusted file.

use super::{Element, LONGEST_HEADER, METADATA, Tensor};
use crate::regular;
use paceline_kernels as kernels;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Open file whose table of contents has been checked against its length: every tensor that it
/// names is within the file.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: File,
    tensors: BTreeMap<String, Tensor>,
    metadata: BTreeMap<String, String>,
}

/// Error in a safetensors file.
#[derive(Debug, Error)]
pub enum SafetensorsError {
    /// The file cannot be opened or read.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file as a whole is not valid.
    #[error("{}: {problem}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// A tensor is absent or not as expected.
    #[error("{}: tensor '{tensor}' {problem}", .path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Description of the problem.
        problem: String,
    },
}

#[derive(Deserialize)]
struct Row {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Tensor(Row),
    Metadata(BTreeMap<String, String>),
}

impl Reader {
    /// Opens a file and reads its table of contents.
    pub fn open(path: &Path) -> Result<Self, SafetensorsError> {
        let io = |source| SafetensorsError::Io { path: path.to_owned(), source };
        let wrong = |problem: String| SafetensorsError::File { path: path.to_owned(), problem };
        let file = regular::open(path).map_err(io)?;
        let len = file.metadata().map_err(io)?.len();
        let mut start = [0; 8];
        if len < 8 {
            return Err(wrong(format!("is cut short: {len} bytes are not a safetensors file")));
        }
        file.read_exact_at(&mut start, 0).map_err(io)?;
        let header = u64::from_le_bytes(start);
        // Checked before anything is allocated for it.
        if header > LONGEST_HEADER || header > len - 8 {
            return Err(wrong(format!(
                "is cut short or no safetensors file: it announces a header of {header} bytes and has {len} in all"
            )));
        }
        let mut text = vec![0; header as usize];
        file.read_exact_at(&mut text, 8).map_err(io)?;
        let lines: BTreeMap<String, Line> = serde_json::from_slice(&text)
            .map_err(|error| wrong(format!("its header cannot be read: {error}")))?;
        let mut reader = Self {
            path: path.to_owned(),
            file,
            tensors: BTreeMap::new(),
            metadata: BTreeMap::new(),
        };
        for (name, line) in lines {
            match line {
                Line::Tensor(row) => {
                    let tensor = reader.checked(&name, &row, 8 + header, len)?;
                    reader.tensors.insert(name, tensor);
                }
                Line::Metadata(metadata) if name == METADATA => reader.metadata = metadata,
                Line::Metadata(_) => {
                    return Err(reader.wrong(&name, "has no dtype, shape and data_offsets".into()));
                }
            }
        }
        Ok(reader)
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }

    /// Metadata of the file.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Returns a tensor that must exist with this shape.
    pub fn expect(&self, name: &str, shape: &[u64]) -> Result<&Tensor, SafetensorsError> {
        match self.tensors.get(name) {
            None => {
                Err(self
                    .wrong(name, format!("is missing ({} others are there)", self.tensors.len())))
            }
            Some(tensor) if tensor.shape != shape => Err(self
                .wrong(name, format!("has shape {:?}, the model needs {shape:?}", tensor.shape))),
            Some(tensor) => Ok(tensor),
        }
    }

    /// Reads elements of a tensor, from `first` on, row by row.
    pub fn read(&self, name: &str, first: u64, into: &mut [f32]) -> Result<(), SafetensorsError> {
        let tensor = self.tensors.get(name).ok_or_else(|| self.wrong(name, "is missing".into()))?;
        let end = first.checked_add(into.len() as u64);
        if end.is_none_or(|end| end > tensor.elements()) {
            return Err(self.wrong(
                name,
                format!(
                    "has {} elements; {} from {first} on are asked for",
                    tensor.elements(),
                    into.len()
                ),
            ));
        }
        let at = tensor.at + first * tensor.element.size();
        let io = |source| SafetensorsError::Io { path: self.path.clone(), source };
        match tensor.element {
            Element::F32 => self.file.read_exact_at(bytemuck::cast_slice_mut(into), at).map_err(io),
            Element::Bf16 | Element::F16 => {
                let widen: fn(u16) -> f32 = match tensor.element {
                    Element::F16 => |bits| kernels::Element::widen(kernels::F16::from_bits(bits)),
                    Element::F32 | Element::Bf16 => |bits| f32::from_bits(u32::from(bits) << 16),
                };
                let mut halves = [0u16; 4096];
                for (chunk, values) in into.chunks_mut(halves.len()).enumerate() {
                    let halves = &mut halves[..values.len()];
                    let at = at + (chunk * 4096 * 2) as u64;
                    self.file.read_exact_at(bytemuck::cast_slice_mut(halves), at).map_err(io)?;
                    values.iter_mut().zip(halves).for_each(|(value, half)| *value = widen(*half));
                }
                Ok(())
            }
        }
    }

    /// Reads a whole tensor.
    pub fn whole(&self, name: &str) -> Result<Vec<f32>, SafetensorsError> {
        let tensor = self.tensors.get(name).ok_or_else(|| self.wrong(name, "is missing".into()))?;
        // The elements are within the file, so the file's length bounds the allocation.
        let mut values = vec![0.0; tensor.elements() as usize];
        self.read(name, 0, &mut values)?;
        Ok(values)
    }

    /// Error about one of the file's tensors.
    pub(crate) fn wrong(&self, tensor: &str, problem: String) -> SafetensorsError {
        SafetensorsError::Tensor { path: self.path.clone(), tensor: tensor.to_owned(), problem }
    }

    fn checked(
        &self,
        name: &str,
        row: &Row,
        data: u64,
        len: u64,
    ) -> Result<Tensor, SafetensorsError> {
        let elements = [Element::F32, Element::Bf16, Element::F16];
        let Some(element) = elements.into_iter().find(|e| e.name() == row.dtype) else {
            let known = elements.map(Element::name).join(", ");
            return Err(self.wrong(name, format!("is of type {}; {known} can be read", row.dtype)));
        };
        let count = row.shape.iter().try_fold(1u64, |count, &dim| count.checked_mul(dim));
        let bytes = count.and_then(|count| count.checked_mul(element.size()));
        let [start, end] = row.data_offsets;
        if bytes.is_none_or(|bytes| end.checked_sub(start) != Some(bytes)) {
            return Err(self.wrong(
                name,
                format!("of shape {:?} cannot lie in the bytes {start} to {end}", row.shape),
            ));
        }
        if end > len - data {
            return Err(self.wrong(
                name,
                format!(
                    "ends {} bytes behind the end of the file, which is cut short",
                    end - (len - data)
                ),
            ));
        }
        Ok(Tensor { element, shape: row.shape.clone(), at: data + start })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Contents;
    use super::*;
    use proptest::prelude::*;

    /// File that is deleted at the end of its test.
    struct Temporary(PathBuf);

    impl Temporary {
        fn of(name: &str, bytes: &[u8]) -> Self {
            let name = format!("paceline-safetensors-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::write(&path, bytes).unwrap();
            Self(path)
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(data);
        bytes
    }

    fn told(name: &str, bytes: &[u8]) -> String {
        Reader::open(&Temporary::of(name, bytes).0).unwrap_err().to_string()
    }

    #[test]
    fn what_is_laid_out_is_read_back_in_parts() {
        let shapes = BTreeMap::from([
            ("b".to_owned(), vec![2, 3]),
            ("a".to_owned(), vec![5]),
            ("empty".to_owned(), vec![0, 4]),
        ]);
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let contents = Contents::new(shapes, &metadata).unwrap();
        let mut bytes = contents.header().to_vec();
        assert_eq!(bytes.len() % 64, 0);
        let values: Vec<f32> = (0..11).map(|i| i as f32).collect();
        bytes.extend_from_slice(bytemuck::cast_slice(&values));
        assert_eq!(bytes.len() as u64, contents.file_len());
        let temporary = Temporary::of("parts", &bytes);
        let reader = Reader::open(&temporary.0).unwrap();
        assert_eq!(reader.metadata(), &metadata);
        assert_eq!(reader.tensors()["b"], *contents.tensor("b").unwrap());
        let mut part = [0.0; 2];
        reader.read("b", 3, &mut part).unwrap();
        assert_eq!(part, [8.0, 9.0]);
        assert_eq!(reader.whole("a").unwrap(), values[..5]);
        assert!(reader.whole("empty").unwrap().is_empty());
        let told = reader.read("b", 5, &mut part).unwrap_err().to_string();
        assert!(told.ends_with("tensor 'b' has 6 elements; 2 from 5 on are asked for"), "{told}");
        let told = reader.expect("b", &[3, 2]).unwrap_err().to_string();
        assert!(told.ends_with("'b' has shape [2, 3], the model needs [3, 2]"), "{told}");
        let told = reader.expect("c", &[1]).unwrap_err().to_string();
        assert!(told.ends_with("tensor 'c' is missing (3 others are there)"), "{told}");
    }

    #[test]
    fn halves_are_widened_exactly() {
        let header = r#"{"h":{"dtype":"F16","shape":[4],"data_offsets":[0,8]},
            "b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]}}"#;
        let halves: [u16; 6] = [0x3c00, 0xc500, 0x0001, 0x7bff, 0x3f80, 0xc0a0];
        let temporary = Temporary::of("halves", &file(header, bytemuck::cast_slice(&halves)));
        let reader = Reader::open(&temporary.0).unwrap();
        assert_eq!(reader.whole("h").unwrap(), [1.0, -5.0, 2f32.powi(-24), 65504.0]);
        assert_eq!(reader.whole("b").unwrap(), [1.0, -5.0]);
    }

    #[test]
    fn giant_lengths_allocate_nothing() {
        let announced = told("giant", &u64::MAX.to_le_bytes());
        assert!(
            announced.contains("announces a header of 18446744073709551615 bytes"),
            "{announced}"
        );
        let short = told("short", &[1, 2, 3]);
        assert!(short.contains("is cut short: 3 bytes"), "{short}");
        let header =
            r#"{"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#;
        let overflow = told("overflow", &file(header, &[]));
        assert!(overflow.contains("tensor 'w' of shape [4611686018427387904, 4]"), "{overflow}");
        let header = r#"{"w":{"dtype":"F32","shape":[4],"data_offsets":[18446744073709551600,18446744073709551615]}}"#;
        assert!(told("far", &file(header, &[0; 16])).contains("tensor 'w'"));
    }

    #[test]
    fn what_is_wrong_with_a_tensor_is_said_with_its_name() {
        let header = r#"{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
        let cut = told("cut", &file(header, &[0; 10]));
        assert!(
            cut.ends_with("tensor 'w' ends 6 bytes behind the end of the file, which is cut short"),
            "{cut}"
        );
        let header = r#"{"w":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}}"#;
        assert!(told("type", &file(header, &[0; 16])).contains("is of type I64; F32, BF16, F16"));
        let odd = told("odd", &file(r#"{"w":{"no":"shape"}}"#, &[]));
        assert!(odd.contains("tensor 'w' has no dtype"), "{odd}");
        assert!(told("json", &file("{", &[])).contains("its header cannot be read"));
    }

    proptest! {
        /// For any content, opening a file yields an error or readable tensors.
        #[test]
        fn no_bytes_panic(header in "\\PC{0,80}", data in prop::collection::vec(any::<u8>(), 0..64)) {
            let temporary = Temporary::of("any", &file(&header, &data));
            if let Ok(reader) = Reader::open(&temporary.0) {
                for name in reader.tensors().keys() {
                    reader.whole(name).unwrap();
                }
            }
        }
    }
}
