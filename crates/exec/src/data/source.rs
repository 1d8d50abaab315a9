//! What a run learns from, behind one face: samples by number.

use super::clicks::Clicks;
use super::corpus::{Corpus, CorpusError};
use super::images::Images;
use super::sample_start;
use super::text::{Samples, Text, TextError};
use paceline_plan::model::{Body, Model};
use std::num::NonZeroU64;
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Sequences of tokens.
    Tokens {
        /// How many different tokens there are.
        vocab: u32,
        /// How long a sequence is.
        seq: u64,
        /// How many tokens behind a sequence's last target are read too.
        further: u64,
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
    /// What is measured and counted of clicks.
    Clicks {
        /// Numbers that are measured of each.
        dense: u64,
        /// Values of each category.
        tables: Vec<u64>,
        /// How many values of each category a sample has.
        lookups: u64,
    },
}

impl Reads {
    /// What a model reads, with sequences of so many tokens.
    pub fn of(model: &Model, seq: u64) -> Self {
        let vocab = u32::try_from(model.vocab).unwrap_or(u32::MAX);
        match model.body() {
            Body::Tokens {} => Self::Tokens { vocab, seq, further: model.mtp.depth },
            Body::Images(net) => {
                Self::Images { side: net.image, channels: net.channels, classes: vocab }
            }
            Body::Clicks(net) => {
                Self::Clicks { dense: net.dense, tables: net.tables.clone(), lookups: net.lookups }
            }
        }
    }
}

/// Samples by number: the same for every rank, in every layout.
#[derive(Debug)]
pub struct Data {
    seq: u64,
    /// After how many samples they begin anew, if they do.
    distinct: Option<NonZeroU64>,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Builtin(Corpus),
    Text(Samples),
    Images(Images),
    Clicks(Clicks),
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
        "{0} are text, and this model reads something else; leave --data out, the built-in ones are drawn"
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
            (DataSource::Builtin, Reads::Tokens { vocab, seq, .. }) => {
                (seq, Kind::Builtin(Corpus::new(vocab, seed)?))
            }
            (DataSource::Text(text), Reads::Tokens { vocab, seq, further }) => {
                (seq, Kind::Text(Samples::new(text, vocab, (seq, further), shuffle)?))
            }
            (DataSource::Builtin, Reads::Images { side, channels, classes }) => {
                (1, Kind::Images(Images::new(side, channels, classes, seed)))
            }
            (DataSource::Builtin, Reads::Clicks { dense, tables, lookups }) => {
                (1, Kind::Clicks(Clicks::new(dense, tables, lookups, seed)))
            }
            (DataSource::Text(text), Reads::Images { .. } | Reads::Clicks { .. }) => {
                return Err(DataError::NotText(text.path().display().to_string()));
            }
        };
        Ok(Self { seq, distinct: None, kind })
    }

    /// The same, but only the first so many samples, again and again.
    pub fn again(self, distinct: Option<NonZeroU64>) -> Self {
        Self { distinct, ..self }
    }

    /// The number under which a sample is found.
    fn number(&self, sample: u64) -> u64 {
        self.distinct.map_or(sample, |distinct| sample % distinct)
    }

    /// What checkpoints call this data, to know it again.
    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::Builtin(_) | Kind::Images(_) | Kind::Clicks(_) => BUILTIN,
            Kind::Text(samples) => samples.text().name(),
        }
    }

    /// Where the files are, if it is files.
    pub fn path(&self) -> Option<&Path> {
        match &self.kind {
            Kind::Builtin(_) | Kind::Images(_) | Kind::Clicks(_) => None,
            Kind::Text(samples) => Some(samples.text().path()),
        }
    }

    /// Fills in the tokens of a sample, from its token `ahead` on: 0 for what the model reads, 1 for what it
    /// should predict, and more for modules that predict further ones, which read on into what follows. Of an image that is its class.
    pub fn fill(&self, sample: u64, ahead: u64, tokens: &mut [u32]) -> Result<(), DataError> {
        let sample = self.number(sample);
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
            Kind::Clicks(clicks) if ahead == 0 => {
                clicks.ids(sample, tokens);
                Ok(())
            }
            Kind::Clicks(clicks) => {
                tokens.fill(clicks.clicked(sample));
                Ok(())
            }
        }
    }

    /// Fills in what a sample shows, where that is measured: the pixels of an image, row by row.
    pub fn features(&self, sample: u64, features: &mut [f32]) {
        let sample = self.number(sample);
        match &self.kind {
            Kind::Images(images) => images.fill(sample, features),
            Kind::Clicks(clicks) => clicks.fill(sample, features),
            Kind::Builtin(_) | Kind::Text(_) => features.fill(0.0),
        }
    }

    /// How many rows of tables a sample looks up, if it does.
    pub(crate) fn counted(&self) -> Option<usize> {
        match &self.kind {
            Kind::Clicks(clicks) => Some(clicks.looked_up()),
            Kind::Builtin(_) | Kind::Text(_) | Kind::Images(_) => None,
        }
    }

    /// How many different samples there are; none if they do not end.
    pub fn samples(&self) -> Option<u64> {
        match &self.kind {
            Kind::Builtin(_) | Kind::Images(_) | Kind::Clicks(_) => None,
            Kind::Text(samples) => Some(samples.windows()),
        }
    }

    /// The loss that no model can stay below, in nats per token, where that is known.
    pub fn floor(&self) -> Option<f64> {
        match &self.kind {
            Kind::Builtin(corpus) => Some(corpus.floor_for(self.seq)),
            Kind::Clicks(clicks) => Some(clicks.floor()),
            Kind::Text(_) | Kind::Images(_) => None,
        }
    }
}

/// What the built-in corpus is called.
pub const BUILTIN: &str = "builtin";
