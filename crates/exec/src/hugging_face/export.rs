//! Export of a checkpoint to a directory that `transformers` loads.

use crate::checkpoint::Checkpoint;
use crate::logical;
use crate::safetensors::{Contents, SafetensorsError};
use paceline_plan::model::Model;
use paceline_plan::model::hugging_face::{Family, View};
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

fn family(model: &Model) -> Result<(&'static Family, Model), ExportError> {
    let refused = |problem| ExportError::Model { model: model.name().to_owned(), problem };
    Family::of(model).map_err(refused)
}

/// Files that an export writes.
const OWN: [&str; 4] =
    ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];

/// A file of another model in a directory, which an export would leave there; `transformers` might
/// read it.
pub fn foreign_file(directory: &Path) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> =
        fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let extension = path.extension().unwrap_or_default().to_string_lossy();
        let of_a_model = ["bin", "json", "model", "pt", "pth", "safetensors", "txt"];
        of_a_model.contains(&&*extension) && !name.starts_with('.') && !OWN.contains(&&*name)
    });
    found.into_iter().min()
}

/// Writes `config.json`, `model.safetensors`, `tokenizer.json` and `tokenizer_config.json`, for
/// sequences of `seq` tokens.
///
/// Each file is complete or absent. The configuration is removed first and written last, since a
/// directory without it is not a model. Tensors are processed one at a time.
pub fn export(
    model: &Model,
    checkpoint: &Checkpoint,
    (tokenizer, seq): (&[u8], u64),
    directory: &Path,
) -> Result<(), ExportError> {
    let (family, model) = family(model)?;
    let model = &model;
    let refused = |path: &Path| {
        let path = path.to_owned();
        move |source| ExportError::Write { path, source }
    };
    fs::create_dir_all(directory).map_err(refused(directory))?;
    let old = directory.join("config.json");
    match fs::remove_file(&old) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(refused(&old)(error)),
        Ok(()) | Err(_) => {}
    }
    whole(&directory.join("model.safetensors"), |file, path| {
        weights((family, model), checkpoint, file, path)
    })?;
    let about = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq,
    });
    let [about, config] = [about, family.write(model, seq)].map(|json| format!("{json:#}\n"));
    for (name, contents) in [
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", about.as_bytes()),
        ("config.json", config.as_bytes()),
    ] {
        whole(&directory.join(name), |mut file, path| {
            file.write_all(contents).map_err(refused(path))
        })?;
    }
    // New names are on disk only when their directory is.
    File::open(directory).and_then(|folder| folder.sync_all()).map_err(refused(directory))
}

/// Writes a file through a temporary file beside it.
fn whole(
    path: &Path,
    write: impl FnOnce(&File, &Path) -> Result<(), ExportError>,
) -> Result<(), ExportError> {
    let refused = |source| ExportError::Write { path: path.to_owned(), source };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let partial = path.with_file_name(format!(".{name}.{}.partial", std::process::id()));
    // What a dead process of this number left, and nothing that it links to.
    let _ = fs::remove_file(&partial);
    let written = File::create_new(&partial).map_err(refused).and_then(|file| {
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
    (family, model): (&Family, &Model),
    checkpoint: &Checkpoint,
    file: &File,
    path: &Path,
) -> Result<(), ExportError> {
    let refused = |source| ExportError::Write { path: path.to_owned(), source };
    let tensors = logical::tensors(model);
    // The family was chosen because it has all tensors.
    let views = family.views(model, None).unwrap_or_default();
    let (mut shapes, mut left) = (BTreeMap::new(), BTreeMap::new());
    for view in views.values().flatten() {
        shapes.insert(view.name.clone(), view.shape.clone());
        *left.entry(view.name.clone()).or_insert(0) += view.len();
    }
    // `transformers` requires this value to know the layout of the file.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let contents = Contents::new(shapes, &metadata).map_err(|e| refused(e.into()))?;
    file.set_len(contents.file_len()).map_err(refused)?;
    file.write_all_at(contents.header(), 0).map_err(refused)?;
    // Their tensors that are not complete; what no view covers is zero.
    let mut partial: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (name, &dims) in &tensors {
        checkpoint.weights().expect(name, &dims)?;
        let mut first = 0;
        for view in views.get(name).into_iter().flatten() {
            let mut values = vec![0.0; view.len() as usize];
            checkpoint.weights().read(name, first, &mut values)?;
            first += values.len() as u64;
            let whole = partial
                .entry(view.name.clone())
                .or_insert_with(|| vec![0.0; view.total() as usize]);
            scatter(view, &values, whole);
            let missing = left.entry(view.name.clone()).or_default();
            *missing -= view.len();
            if *missing == 0
                && let Some(whole) = partial.remove(&view.name)
                && let Some(tensor) = contents.tensor(&view.name)
            {
                file.write_all_at(bytemuck::cast_slice(&whole), tensor.at).map_err(refused)?;
            }
        }
    }
    Ok(())
}

/// Copies the elements of a view into their tensor.
fn scatter(view: &View, own: &[f32], whole: &mut [f32]) {
    let mut rest = own;
    for (first, len) in view.runs() {
        let (run, behind) = rest.split_at(len as usize);
        whole[first as usize..(first + len) as usize].copy_from_slice(run);
        rest = behind;
    }
}
