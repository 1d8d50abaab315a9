//! What is learnt from, and how text becomes tokens.

use super::{Keeping, Problems};
use clap::Args;
use paceline_exec::data::{BUILTIN, DataSource, Tokenizer};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Data, as it was written.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Data")]
pub(crate) struct DataFlags {
    /// builtin, a file, or a directory of files [default: builtin]
    ///
    /// The built-in text is endless and its entropy known. Files are read where they are, in an order that
    /// the seed shuffles anew for every epoch; the last twentieth is held out for `paceline eval`.
    #[arg(long, value_name = "builtin|FILE|DIR")]
    pub data: Option<String>,
    /// builtin (a token is a byte) or a Hugging Face tokenizer.json [default: builtin]
    #[arg(long, value_name = "builtin|FILE")]
    pub tokenizer: Option<String>,
}

/// What is learnt from.
#[derive(Debug)]
pub(crate) struct DataChoice {
    /// Where samples come from.
    pub source: DataSource,
    /// How text becomes tokens.
    pub tokenizer: Tokenizer,
}

/// The tokenizer's file beside a checkpoint.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// What holds where the flags are silent: a checkpoint's own.
#[derive(Clone, Debug, Default)]
pub(crate) struct DataDefaults {
    /// Files.
    pub data: Option<PathBuf>,
    /// A tokenizer.json.
    pub tokenizer: Option<PathBuf>,
}

impl DataDefaults {
    /// Those of the checkpoint that is resumed, if any.
    pub(crate) fn of(keeping: &Keeping) -> Self {
        let state = keeping.resume.as_ref().map(|resume| resume.state());
        Self {
            data: state.and_then(|state| state.data.path.clone()),
            tokenizer: keeping.beside(TOKENIZER),
        }
    }
}

impl DataFlags {
    /// Opens what the flags name. None if something is wrong.
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
                .map_err(|error| problems.say("--tokenizer", error.to_string()))
                .ok()?,
            (Some(_), None) if self.tokenizer.is_some() => {
                problems.say("--tokenizer", "the built-in text is tokens already; use --data FILE");
                return None;
            }
            (None, Some(_)) => Tokenizer::Bytes,
            (Some(_) | None, None) => Tokenizer::Words,
        };
        let source = match data {
            None => DataSource::Builtin,
            Some(path) => {
                text(&tokenizer, &path).map_err(|problem| problems.say("--data", problem)).ok()?
            }
        };
        Some(DataChoice { source, tokenizer })
    }
}

/// A file or directory as samples. Tokens that cannot be kept beside it are kept for a while elsewhere.
fn text(tokenizer: &Tokenizer, path: &Path) -> Result<DataSource, String> {
    let text = tokenizer.text(path, &std::env::temp_dir()).map_err(|error| error.to_string())?;
    Ok(DataSource::Text(Arc::new(text)))
}
