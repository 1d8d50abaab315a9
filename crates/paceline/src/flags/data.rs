//! Training data and tokenizer flags.

use super::{CheckpointOptions, Problems};
use clap::Args;
use paceline_exec::data::{BUILTIN, DataSource, Tokenizer};
use paceline_exec::private::PrivateDir;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Training data flags.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Data")]
pub(crate) struct DataFlags {
    /// Training data: builtin, a file, or a directory of files [default: builtin]
    ///
    /// The built-in text is endless and its entropy is known. Files are read in place, in an order
    /// that the seed reshuffles for every epoch; the last twentieth is held out for `paceline
    /// eval`.
    #[arg(long, value_name = "builtin|FILE|DIR")]
    pub data: Option<String>,
    /// Tokenizer: builtin (a token is a byte) or a Hugging Face tokenizer.json [default: builtin]
    #[arg(long, value_name = "builtin|FILE")]
    pub tokenizer: Option<String>,
}

/// The selected training data.
#[derive(Debug)]
pub(crate) struct DataChoice {
    /// Source of the samples.
    pub source: DataSource,
    /// Tokenizer of the text.
    pub tokenizer: Tokenizer,
}

/// Name of the tokenizer file next to a checkpoint.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// Defaults of the data flags, from a trained model.
#[derive(Clone, Debug, Default)]
pub(crate) struct DataDefaults {
    /// Path of the data files.
    pub data: Option<PathBuf>,
    /// Path of a tokenizer.json.
    pub tokenizer: Option<PathBuf>,
}

impl DataDefaults {
    /// The defaults of a run that starts from pretrained weights: their tokenizer, if they have one.
    pub(crate) fn of(keeping: &CheckpointOptions) -> Self {
        let beside = keeping.init_from.as_ref().map(|from| from.path().join(TOKENIZER));
        Self { data: None, tokenizer: beside.filter(|file| file.is_file()) }
    }
}

impl DataFlags {
    /// Opens the data and the tokenizer; `None` on error.
    pub(crate) fn check(
        &self,
        defaults: &DataDefaults,
        problems: &mut Problems,
    ) -> Option<DataChoice> {
        let named = |given: &Option<String>, default: &Option<PathBuf>| match given.as_deref() {
            Some(BUILTIN) => None,
            Some(path) => Some(PathBuf::from(path)),
            None => default.clone(),
        };
        let data = named(&self.data, &defaults.data);
        let file = named(&self.tokenizer, &defaults.tokenizer);
        let tokenizer = match (&file, &data) {
            (Some(file), Some(_)) => Tokenizer::open(file)
                .map_err(|error| problems.add("--tokenizer", error.to_string()))
                .ok()?,
            (Some(_), None) if self.tokenizer.is_some() => {
                problems.add("--tokenizer", "the built-in text is tokens already; use --data FILE");
                return None;
            }
            (None, Some(_)) => Tokenizer::Bytes,
            (Some(_) | None, None) => Tokenizer::Words,
        };
        let source = match data {
            None => DataSource::Builtin,
            Some(path) => {
                text(&tokenizer, &path).map_err(|problem| problems.add("--data", problem)).ok()?
            }
        };
        Some(DataChoice { source, tokenizer })
    }
}

/// Opens a file or directory as samples; its tokens are in the user's cache directory.
fn text(tokenizer: &Tokenizer, path: &Path) -> Result<DataSource, String> {
    let cache = || PrivateDir::cache("tokens");
    let text = tokenizer.text(path, cache).map_err(|error| error.to_string())?;
    Ok(DataSource::Text(Arc::new(text)))
}
