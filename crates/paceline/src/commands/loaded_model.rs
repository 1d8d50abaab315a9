//! A trained model, as loaded by `eval` and `generate`.

use crate::failure::Failure;
use crate::flags::{DataDefaults, MODEL, Problems, TOKENIZER, read_text};
use paceline_exec::checkpoint::Checkpoint;
use paceline_exec::data::{BUILTIN, Tokenizer};
use paceline_exec::hugging_face::Pretrained;
use paceline_exec::inference::{ImageNetwork, Network, trains_only};
use paceline_plan::model::Model;
use std::path::{Path, PathBuf};

/// A model with its weights.
pub(super) enum LoadedModel {
    /// A model that reads tokens.
    Tokens(Network),
    /// A model that reads images.
    Images(ImageNetwork),
}

impl LoadedModel {
    pub(super) fn model(&self) -> &Model {
        match self {
            Self::Tokens(network) => network.model(),
            Self::Images(network) => network.model(),
        }
    }
}

/// A model with its weights, and its training data.
pub(super) struct Trained {
    pub(super) network: LoadedModel,
    /// Its training data and tokenizer, if known.
    pub(super) defaults: DataDefaults,
    /// Seed of its training data.
    pub(super) seed: u64,
    /// Path that it was loaded from.
    pub(super) path: PathBuf,
    builtin: bool,
}

impl Trained {
    /// Opens a run, a checkpoint or a Hugging Face directory.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let mut problems = Problems::default();
        let opened = if Checkpoint::is_near(path) {
            checkpoint(path)
        } else if Pretrained::is_near(path) {
            pretrained(path)
        } else {
            Err(format!(
                "{}: neither a run with a checkpoint nor a Hugging Face directory is here",
                path.display()
            ))
        };
        opened.map_err(|problem| {
            problems.located(problem);
            Failure::Input(problems)
        })
    }

    /// The tokenizer of its text.
    pub(super) fn tokenizer(&self) -> Result<Tokenizer, Failure> {
        match &self.defaults.tokenizer {
            Some(file) => Tokenizer::open(file)
                .map_err(|error| Failure::flag("--tokenizer", error.to_string())),
            None if self.builtin => Ok(Tokenizer::Words),
            None => Ok(Tokenizer::Bytes),
        }
    }
}

fn checkpoint(path: &Path) -> Result<Trained, String> {
    let checkpoint = Checkpoint::open(path).map_err(|error| error.to_string())?;
    checkpoint.verify_weights().map_err(|error| error.to_string())?;
    let file = checkpoint.path().join(MODEL);
    let name = file.display().to_string();
    let text = read_text(&file).map_err(|what| format!("{name} {what}"))?;
    let model = Model::parse(&text, &name).map_err(|errors| errors.to_string())?;
    if let Some(why) = trains_only(&model) {
        return Err(why);
    }
    let network = if ImageNetwork::is(&model) {
        ImageNetwork::from_checkpoint(&model, &checkpoint).map(LoadedModel::Images)
    } else {
        Network::from_checkpoint(&model, &checkpoint).map(LoadedModel::Tokens)
    };
    let network = network.map_err(|error| error.to_string())?;
    let state = checkpoint.state();
    let tokenizer = Some(checkpoint.path().join(TOKENIZER)).filter(|file| file.is_file());
    Ok(Trained {
        network,
        defaults: DataDefaults { data: state.data.path.clone(), tokenizer },
        seed: state.seed,
        path: checkpoint.path().to_owned(),
        builtin: state.data.source == BUILTIN,
    })
}

fn pretrained(path: &Path) -> Result<Trained, String> {
    let pretrained = Pretrained::open(path).map_err(|error| error.to_string())?;
    let network = Network::from_pretrained(&pretrained).map_err(|error| error.to_string())?;
    let tokenizer = Some(path.join(TOKENIZER)).filter(|file| file.is_file());
    Ok(Trained {
        network: LoadedModel::Tokens(network),
        defaults: DataDefaults { data: None, tokenizer },
        seed: 0,
        path: path.to_owned(),
        builtin: false,
    })
}
