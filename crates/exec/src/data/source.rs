//! What a run learns from, behind one face: samples by number.

use super::corpus::{Corpus, CorpusError};
use super::images::Images;
use super::sample_start;
use super::text::{Samples, Text, TextError};
use paceline_plan::model::{Body, Model};
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

/// What a user names as data.
#[derive(Clone, Debug, Default)]
pub enum DataSource {
    /// The built-in corpus, which the seed makes.
    #[default]
    Builtin,
    /// Files.
    Text(Arc<Text>),
}

/// What a model's samples are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Sequences of tokens.
    Tokens {
        /// How many different tokens there are.
        vocab: u32,
        /// How long a sequence is.
        seq: u64,
    },
    /// Images, each of one class.
    Images {
        /// Pixels along each side.
        side: u64,
        /// Numbers in a pixel.
        channels: u64,
        /// How many classes there are.
        classes: u32,
    },
}

impl Reads {
    /// What a model reads, with sequences of so many tokens.
    pub fn of(model: &Model, seq: u64) -> Self {
        let vocab = u32::try_from(model.vocab).unwrap_or(u32::MAX);
        match model.body() {
            Body::Tokens {} => Self::Tokens { vocab, seq },
            Body::Images(net) => {
                Self::Images { side: net.image, channels: net.channels, classes: vocab }
            }
        }
    }
}

/// Samples by number: the same for every rank, in every layout.
#[derive(Debug)]
pub struct Data {
    seq: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Builtin(Corpus),
    Text(Samples),
    Images(Images),
}

/// Why there are no samples.
#[derive(Debug, Error)]
pub enum DataError {
    /// The built-in corpus does not fit the model.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    /// The files cannot be learnt from.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The model reads something else.
    #[error(
        "{0} are text, and this model reads images; leave --data out, the built-in ones are drawn"
    )]
    NotText(String),
}

impl Data {
    /// Samples to learn from. The seed makes the built-in ones, and the order of files.
    pub fn new(source: &DataSource, reads: Reads, seed: u64) -> Result<Self, DataError> {
        Self::drawn(source, reads, seed, Some(seed))
    }

    /// Samples that training never sees: of the same language or classes from another seed, or the
    /// held-out part of the files, in its own order.
    pub fn held_out(source: &DataSource, reads: Reads, seed: u64) -> Result<Self, DataError> {
        Self::drawn(source, reads, !seed, None)
    }

    /// Samples of a seed, those of files shuffled by another.
    fn drawn(
        source: &DataSource,
        reads: Reads,
        seed: u64,
        shuffle: Option<u64>,
    ) -> Result<Self, DataError> {
        let (seq, kind) = match (source, reads) {
            (DataSource::Builtin, Reads::Tokens { vocab, seq }) => {
                (seq, Kind::Builtin(Corpus::new(vocab, seed)?))
            }
            (DataSource::Text(text), Reads::Tokens { vocab, seq }) => {
                (seq, Kind::Text(Samples::new(text, vocab, seq, shuffle)?))
            }
            (DataSource::Builtin, Reads::Images { side, channels, classes }) => {
                (1, Kind::Images(Images::new(side, channels, classes, seed)))
            }
            (DataSource::Text(text), Reads::Images { .. }) => {
                return Err(DataError::NotText(text.path().display().to_string()));
            }
        };
        Ok(Self { seq, kind })
    }

    /// What checkpoints call this data, to know it again.
    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::Builtin(_) | Kind::Images(_) => BUILTIN,
            Kind::Text(samples) => samples.text().name(),
        }
    }

    /// Where the files are, if it is files.
    pub fn path(&self) -> Option<&Path> {
        match &self.kind {
            Kind::Builtin(_) | Kind::Images(_) => None,
            Kind::Text(samples) => Some(samples.text().path()),
        }
    }

    /// Fills in the tokens of a sample, from its token `ahead` on: 0 for what the model reads, 1 for what it
    /// should predict. Of an image that is its class.
    pub fn fill(&self, sample: u64, ahead: u64, tokens: &mut [u32]) -> Result<(), DataError> {
        match &self.kind {
            Kind::Builtin(corpus) => {
                let start = sample_start(0, sample, 0, self.seq);
                corpus.fill(start.wrapping_add(ahead), tokens);
                Ok(())
            }
            Kind::Text(samples) => Ok(samples.fill(sample, ahead, tokens)?),
            Kind::Images(images) => {
                tokens.fill(images.class(sample));
                Ok(())
            }
        }
    }

    /// Fills in what a sample shows, where that is measured: the pixels of an image, row by row.
    pub fn features(&self, sample: u64, features: &mut [f32]) {
        match &self.kind {
            Kind::Images(images) => images.fill(sample, features),
            Kind::Builtin(_) | Kind::Text(_) => features.fill(0.0),
        }
    }

    /// How many different samples there are; none if they do not end.
    pub fn samples(&self) -> Option<u64> {
        match &self.kind {
            Kind::Builtin(_) | Kind::Images(_) => None,
            Kind::Text(samples) => Some(samples.windows()),
        }
    }

    /// The loss that no model can stay below, in nats per token, where that is known.
    pub fn floor(&self) -> Option<f64> {
        match &self.kind {
            Kind::Builtin(corpus) => Some(corpus.floor_for(self.seq)),
            Kind::Text(_) | Kind::Images(_) => None,
        }
    }
}

/// What the built-in corpus is called.
pub const BUILTIN: &str = "builtin";
