//! Import of a Hugging Face directory.

use crate::checkpoint::Source;
use crate::regular;
use crate::safetensors::{Reader, SafetensorsError};
use paceline_plan::located;
use paceline_plan::model::Model;
use paceline_plan::model::hugging_face::{self, View};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Maximum size of a configuration or an index: an index lists thousands of tensors.
const LARGEST: u64 = 64 << 20;

/// A pretrained model: its dimensions, and its weights in one or several files.
#[derive(Debug)]
pub struct Pretrained {
    path: PathBuf,
    model: Model,
    /// Views of their tensors that form ours, by our names.
    views: BTreeMap<String, Vec<View>>,
    files: Vec<Reader>,
    /// Index of the file of each Hugging Face tensor.
    places: BTreeMap<String, usize>,
}

/// Error of a Hugging Face directory.
#[derive(Debug, Error)]
pub enum ImportError {
    /// The system reports an error.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The model cannot be represented.
    #[error(transparent)]
    Model(#[from] located::Errors),
    /// A weight file is invalid.
    #[error(transparent)]
    Tensors(#[from] SafetensorsError),
    /// The index of weight files is invalid.
    #[error("{}: {problem}", .path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// There are no readable weights.
    #[error(
        "{}: neither model.safetensors nor model.safetensors.index.json is here; convert other formats \
         with `save_pretrained(…, safe_serialization=True)`",
        .path.display()
    )]
    NoWeights {
        /// The directory.
        path: PathBuf,
    },
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Pretrained {
    /// Opens a directory; reads shapes only.
    pub fn open(path: &Path) -> Result<Self, ImportError> {
        let config = path.join("config.json");
        let text = read(&config)?;
        let model = hugging_face::parse(&text, &config.display().to_string())?;
        let mut found = Self {
            path: path.to_owned(),
            model,
            views: BTreeMap::new(),
            files: Vec::new(),
            places: BTreeMap::new(),
        };
        let (single, index) =
            (path.join("model.safetensors"), path.join("model.safetensors.index.json"));
        if single.is_file() {
            found.add(&single)?;
        } else if index.is_file() {
            let wrong = |problem| ImportError::Index { path: index.clone(), problem };
            let Index { weight_map } = serde_json::from_str(&read(&index)?)
                .map_err(|error| wrong(format!("is not a list of weights: {error}")))?;
            let mut names: Vec<&String> = weight_map.values().collect();
            names.sort();
            names.dedup();
            for name in names {
                let plain = Path::new(name).components().count() == 1 && !name.starts_with('.');
                if !plain {
                    return Err(wrong(format!("names the file '{name}' outside of the directory")));
                }
                found.add(&path.join(name))?;
            }
        } else {
            return Err(ImportError::NoWeights { path: path.to_owned() });
        }
        // `transformers` drops multi-token prediction weights, but keeps their number.
        let module = format!("model.layers.{}.eh_proj.weight", found.model.layers);
        if !found.places.contains_key(&module) {
            found.model = found.model.without_mtp();
        }
        if let Some((family, paired)) = hugging_face::storage(&text) {
            let lacking = |name: String| ImportError::Index {
                path: config.clone(),
                problem: format!("describes the tensor {name}, which its family does not store"),
            };
            found.views = family.views(&found.model, paired).map_err(lacking)?;
        }
        Ok(found)
    }

    /// Returns true if a directory looks like a Hugging Face model.
    pub fn is_near(path: &Path) -> bool {
        path.join("config.json").is_file()
    }

    /// Model dimensions.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads one of our tensors, whole.
    pub fn tensor(&self, name: &str, dims: [u64; 2]) -> Result<Vec<f32>, SafetensorsError> {
        let views = self.views.get(name).ok_or_else(|| SafetensorsError::Tensor {
            path: self.path.clone(),
            tensor: name.to_owned(),
            problem: "is none of this family's".to_owned(),
        })?;
        // Nothing is allocated for a tensor that the files do not have.
        for view in views {
            let (reader, theirs) = self.find(&view.name)?;
            reader.expect(theirs, &view.shape)?;
        }
        let mut values = vec![0.0; (dims[0] * dims[1]) as usize];
        let mut rest = &mut values[..];
        for view in views {
            let (reader, theirs) = self.find(&view.name)?;
            let (own, behind) = rest.split_at_mut(view.len() as usize);
            rest = behind;
            if view.runs().next().is_none_or(|(_, run)| run < SHORT) && view.len() > SHORT {
                // Scattered elements: one pass over the file, then one over memory.
                let mut whole = vec![0.0; view.total() as usize];
                reader.read(theirs, 0, &mut whole)?;
                gather(view, &whole, own);
                continue;
            }
            let mut rest = own;
            for (first, len) in view.runs() {
                let (run, behind) = rest.split_at_mut(len as usize);
                reader.read(theirs, first, run)?;
                rest = behind;
            }
        }
        Ok(values)
    }

    /// File of a tensor, and the tensor's name there: older GPT-2 files have no prefix.
    fn find<'a>(&self, name: &'a str) -> Result<(&Reader, &'a str), SafetensorsError> {
        let names = [Some(name), name.strip_prefix("transformer.")].into_iter().flatten();
        let mut places = names.filter_map(|name| Some((self.places.get(name)?, name)));
        match places.next() {
            Some((&at, name)) => Ok((&self.files[at], name)),
            None => Err(SafetensorsError::Tensor {
                path: self.path.clone(),
                tensor: name.to_owned(),
                problem: format!("is missing ({} others are there)", self.places.len()),
            }),
        }
    }

    fn add(&mut self, path: &Path) -> Result<(), ImportError> {
        let reader = Reader::open(path)?;
        let at = self.files.len();
        self.places.extend(reader.tensors().keys().map(|name| (name.clone(), at)));
        self.files.push(reader);
        Ok(())
    }
}

/// Elements of a run below which reading it by itself is slower than reading the whole tensor.
const SHORT: u64 = 256;

/// Copies the elements of a view out of their tensor.
fn gather(view: &View, whole: &[f32], own: &mut [f32]) {
    let mut rest = own;
    for (first, len) in view.runs() {
        let (run, behind) = std::mem::take(&mut rest).split_at_mut(len as usize);
        run.copy_from_slice(&whole[first as usize..(first + len) as usize]);
        rest = behind;
    }
}

/// Reads parts of tensors that can only be read whole; caches the last one.
#[derive(Debug)]
pub(crate) struct Whole<'a> {
    pretrained: &'a Pretrained,
    last: Option<(String, Vec<f32>)>,
}

impl<'a> Whole<'a> {
    pub(crate) fn new(pretrained: &'a Pretrained) -> Self {
        Self { pretrained, last: None }
    }
}

impl Source for Whole<'_> {
    fn read(
        &mut self,
        name: &str,
        dims: [u64; 2],
        first: u64,
        into: &mut [f32],
    ) -> Result<(), SafetensorsError> {
        if self.last.as_ref().is_none_or(|(last, _)| last != name) {
            self.last = Some((name.to_owned(), self.pretrained.tensor(name, dims)?));
        }
        if let Some((_, values)) = &self.last {
            into.copy_from_slice(&values[first as usize..first as usize + into.len()]);
        }
        Ok(())
    }

    fn whole(&mut self, name: &str, dims: [u64; 2]) -> Result<Vec<f32>, SafetensorsError> {
        self.pretrained.tensor(name, dims)
    }
}

fn read(path: &Path) -> Result<String, ImportError> {
    regular::read_text(path, LARGEST)
        .map_err(|source| ImportError::Io { path: path.to_owned(), source })
}
