//! Export of a checkpoint to a directory that `transformers` loads.

use super::config::config;
use super::family::Family;
use super::names::parts;
use crate::checkpoint::Checkpoint;
use crate::logical;
use crate::safetensors::{Contents, SafetensorsError};
use paceline_plan::model::Model;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Reason why an export failed.
#[derive(Debug, Error)]
pub enum ExportError {
    /// The model has no equivalent in `transformers`.
    #[error("{model} cannot be exported: {problem}")]
    Model {
        /// The model.
        model: String,
        /// Description of the problem.
        problem: String,
    },
    /// The system reports an error.
    #[error("{}: cannot be written: {source}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The checkpoint is invalid.
    #[error(transparent)]
    Tensors(#[from] SafetensorsError),
}

/// Checks that a model has an equivalent in `transformers`.
pub fn can_export(model: &Model) -> Result<(), ExportError> {
    family(model).map(|_| ())
}

fn family(model: &Model) -> Result<Family, ExportError> {
    let refused = |problem| ExportError::Model { model: model.name().to_owned(), problem };
    Family::of(model).map_err(refused)
}

/// Writes `config.json`, `model.safetensors` and, if there is one, `tokenizer.json`.
///
/// Each file is complete or absent. The configuration is written last, since a directory without it
/// is not a model. Tensors are processed one at a time.
pub fn export(
    model: &Model,
    checkpoint: &Checkpoint,
    tokenizer: Option<&[u8]>,
    directory: &Path,
) -> Result<(), ExportError> {
    let family = family(model)?;
    let refused = |path: &Path| {
        let path = path.to_owned();
        move |source| ExportError::Write { path, source }
    };
    fs::create_dir_all(directory).map_err(refused(directory))?;
    whole(&directory.join("model.safetensors"), |file, path| {
        weights(model, checkpoint, file, path)
    })?;
    if let Some(tokenizer) = tokenizer {
        let path = directory.join("tokenizer.json");
        whole(&path, |mut file, path| file.write_all(tokenizer).map_err(refused(path)))?;
    }
    let config = format!("{:#}\n", config(family, model));
    whole(&directory.join("config.json"), |mut file, path| {
        file.write_all(config.as_bytes()).map_err(refused(path))
    })
}

/// Writes a file through a temporary file beside it.
fn whole(
    path: &Path,
    write: impl FnOnce(&File, &Path) -> Result<(), ExportError>,
) -> Result<(), ExportError> {
    let refused = |source| ExportError::Write { path: path.to_owned(), source };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let partial = path.with_file_name(format!(".{name}.{}.partial", std::process::id()));
    let written = File::create(&partial).map_err(refused).and_then(|file| {
        write(&file, path)?;
        file.sync_all().map_err(refused)?;
        fs::rename(&partial, path).map_err(refused)
    });
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}

fn weights(
    model: &Model,
    checkpoint: &Checkpoint,
    file: &File,
    path: &Path,
) -> Result<(), ExportError> {
    let refused = |source| ExportError::Write { path: path.to_owned(), source };
    let tensors = logical::tensors(model);
    let mut shapes = BTreeMap::new();
    for (name, &dims) in &tensors {
        for part in parts(model, name, dims).into_iter().flatten() {
            shapes.insert(part.name.clone(), part.shape(dims[1]));
        }
    }
    // `transformers` requires this value to know the layout of the file.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let contents = Contents::new(shapes, &metadata).map_err(|e| refused(e.into()))?;
    file.set_len(contents.file_len()).map_err(refused)?;
    file.write_all_at(contents.header(), 0).map_err(refused)?;
    for (name, &dims) in &tensors {
        checkpoint.weights().expect(name, &dims)?;
        let mut first = 0;
        for part in parts(model, name, dims).into_iter().flatten() {
            let mut values = vec![0.0; (part.rows * dims[1]) as usize];
            checkpoint.weights().read(name, first, &mut values)?;
            first += values.len() as u64;
            let values = part.turned(values, part.rows);
            let Some(tensor) = contents.tensor(&part.name) else { continue };
            let mut rest = &values[..];
            for (first, len) in part.runs(dims[1]) {
                let (run, behind) = rest.split_at(len as usize);
                let at = tensor.at + first * size_of::<f32>() as u64;
                file.write_all_at(bytemuck::cast_slice(run), at).map_err(refused)?;
                rest = behind;
            }
        }
    }
    Ok(())
}
