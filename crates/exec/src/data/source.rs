//! Training data behind one interface: samples by number.

use super::clicks::Clicks;
use super::clients::{Clients, Federated};
use super::corpus::{Corpus, CorpusError};
use super::digits::Digits;
use super::images::Images;
use super::sample_start;
use super::text::{Samples, Text, TextError};
use paceline_plan::samples::SampleKind;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

/// Data source named by the user.
#[derive(Clone, Debug, Default)]
pub enum DataSource {
    /// Built-in data, generated from the seed.
    #[default]
    Builtin,
    /// Files.
    Text(Arc<Text>),
}

/// Samples by number: the same for every rank, in every layout.
#[derive(Debug)]
pub struct Data {
    seq: u64,
    /// Number of samples after which they repeat, if they do.
    distinct: Option<NonZeroU64>,
    /// Division among the replicas of federated averaging.
    clients: Option<Clients>,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Builtin(Corpus),
    Text(Samples),
    Images(Images),
    Digits(Digits),
    Clicks(Clicks),
}

/// Reason why samples are not available.
#[derive(Debug, Error)]
pub enum DataError {
    /// The built-in corpus does not fit the model.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    /// The text files cannot be used for training.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The model does not read text.
    #[error(
        "{0} are text, and this model reads something else; leave --data out, the built-in ones are drawn"
    )]
    NotText(String),
    /// Samples without classes, or without an end, are divided among clients.
    #[error(
        "clients divide a finite number of images by class: use a model of images and --unique-samples"
    )]
    NoClasses,
}

impl Data {
    /// Creates training samples. The seed gives the built-in ones, and the order of files' samples.
    pub fn new(source: &DataSource, reads: SampleKind, seed: u64) -> Result<Self, DataError> {
        Self::drawn(source, reads, seed, Some(seed))
    }

    /// Creates samples that training never sees: of the same language or classes from another seed,
    /// or the held-out part of the files, in its own order.
    pub fn held_out(source: &DataSource, reads: SampleKind, seed: u64) -> Result<Self, DataError> {
        Self::drawn(source, reads, !seed, None)
    }

    /// Creates the samples of `seed`; those of files are shuffled by `shuffle`.
    fn drawn(
        source: &DataSource,
        reads: SampleKind,
        seed: u64,
        shuffle: Option<u64>,
    ) -> Result<Self, DataError> {
        let (seq, kind) = match (source, reads) {
            (DataSource::Builtin, SampleKind::Tokens { vocab, seq, .. }) => {
                (seq, Kind::Builtin(Corpus::new(vocab, seed)?))
            }
            (DataSource::Text(text), SampleKind::Tokens { vocab, seq, lookahead: further }) => {
                (seq, Kind::Text(Samples::new(text, vocab, (seq, further), shuffle)?))
            }
            (DataSource::Builtin, SampleKind::Images { side, channels, classes }) => {
                (1, Kind::Images(Images::new(side, channels, classes, seed)))
            }
            (DataSource::Builtin, SampleKind::Digits) => (1, Kind::Digits(Digits::new(seed))),
            (DataSource::Builtin, SampleKind::Clicks { dense, tables, lookups }) => {
                (1, Kind::Clicks(Clicks::new(dense, tables, lookups, seed)))
            }
            (
                DataSource::Text(text),
                SampleKind::Images { .. } | SampleKind::Digits | SampleKind::Clicks { .. },
            ) => return Err(DataError::NotText(text.path().display().to_string())),
        };
        Ok(Self { seq, distinct: None, clients: None, kind })
    }

    /// Restricts the data to the first `distinct` samples, repeated.
    pub fn repeat_first(self, distinct: Option<NonZeroU64>) -> Self {
        Self { distinct, ..self }
    }

    /// Divides the first `distinct` samples among the replicas of federated averaging, which read
    /// `batch` samples together in an iteration.
    pub(crate) fn among_clients(
        self,
        federated: Option<Federated>,
        (replicas, batch): (u32, u64),
        seed: u64,
    ) -> Result<Self, DataError> {
        let Some(federated) = federated else { return Ok(self) };
        let class = |sample: u64| match &self.kind {
            Kind::Images(images) => Some(images.class(sample)),
            Kind::Digits(digits) => Some(digits.class(sample)),
            Kind::Builtin(_) | Kind::Text(_) | Kind::Clicks(_) => None,
        };
        let distinct = self.distinct.ok_or(DataError::NoClasses)?;
        let classes: Option<Vec<u32>> = (0..distinct.get()).map(class).collect();
        let classes = classes.ok_or(DataError::NoClasses)?;
        let clients = Clients::new(federated, &classes, replicas, batch, seed);
        Ok(Self { clients: Some(clients), ..self })
    }

    /// Factor of a replica's step in the mean over all replicas; 1 unless they are clients.
    pub(crate) fn client_factor(&self, replica: u32, iteration: u32) -> f32 {
        self.clients.as_ref().map_or(1.0, |clients| clients.factor(replica, iteration))
    }

    /// Sample number after division among clients and repetition.
    fn number(&self, sample: u64) -> u64 {
        if let Some(clients) = &self.clients {
            return clients.sample(sample);
        }
        self.distinct.map_or(sample, |distinct| sample % distinct)
    }

    /// Name by which checkpoints recognise this data.
    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::Builtin(_) | Kind::Images(_) | Kind::Digits(_) | Kind::Clicks(_) => BUILTIN,
            Kind::Text(samples) => samples.text().name(),
        }
    }

    /// Path of the files, if the data is files.
    pub fn path(&self) -> Option<&Path> {
        match &self.kind {
            Kind::Builtin(_) | Kind::Images(_) | Kind::Digits(_) | Kind::Clicks(_) => None,
            Kind::Text(samples) => Some(samples.text().path()),
        }
    }

    /// Fills in the tokens of a sample, from its token `ahead` on: 0 for the model's inputs, 1 for
    /// its targets. Larger values are for modules that predict lookahead tokens, beyond the
    /// sequence. For an image this is its class.
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
            Kind::Digits(digits) => {
                tokens.fill(digits.class(sample));
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

    /// Fills in the measured features of a sample: the pixels of an image, row by row.
    pub fn features(&self, sample: u64, features: &mut [f32]) {
        let sample = self.number(sample);
        match &self.kind {
            Kind::Images(images) => images.fill(sample, features),
            Kind::Digits(digits) => digits.fill(sample, features),
            Kind::Clicks(clicks) => clicks.fill(sample, features),
            Kind::Builtin(_) | Kind::Text(_) => features.fill(0.0),
        }
    }

    /// Number of table rows that a sample looks up, for clicks.
    pub(crate) fn counted(&self) -> Option<usize> {
        match &self.kind {
            Kind::Clicks(clicks) => Some(clicks.looked_up()),
            Kind::Builtin(_) | Kind::Text(_) | Kind::Images(_) | Kind::Digits(_) => None,
        }
    }

    /// Number of different samples; `None` if they are endless.
    pub fn samples(&self) -> Option<u64> {
        match &self.kind {
            Kind::Builtin(_) | Kind::Images(_) | Kind::Digits(_) | Kind::Clicks(_) => None,
            Kind::Text(samples) => Some(samples.windows()),
        }
    }

    /// Loss floor that no model goes below, in nats per token (or click), if known.
    pub fn floor(&self) -> Option<f64> {
        match &self.kind {
            Kind::Builtin(corpus) => Some(corpus.floor_for(self.seq)),
            Kind::Clicks(clicks) => Some(clicks.floor()),
            Kind::Text(_) | Kind::Images(_) | Kind::Digits(_) => None,
        }
    }
}

/// Name of the built-in data.
pub const BUILTIN: &str = "builtin";
