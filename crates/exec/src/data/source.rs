//! What a run learns from, behind one face: samples by number.

use super::corpus::{Corpus, CorpusError};
use super::sample_start;
use super::text::{Samples, Text, TextError};
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
}

impl Data {
    /// Samples of `seq` tokens to learn from, for a model with `vocab` of them. The seed makes the built-in
    /// text, and the order of files.
    pub fn new(source: &DataSource, vocab: u32, seq: u64, seed: u64) -> Result<Self, DataError> {
        let kind = match source {
            DataSource::Builtin => Kind::Builtin(Corpus::new(vocab, seed)?),
            DataSource::Text(text) => Kind::Text(Samples::new(text, vocab, seq, Some(seed))?),
        };
        Ok(Self { seq, kind })
    }

    /// Samples that training never sees: text of the same language from another seed, or the held-out
    /// part of the files, in its own order.
    pub fn held_out(
        source: &DataSource,
        vocab: u32,
        seq: u64,
        seed: u64,
    ) -> Result<Self, DataError> {
        let kind = match source {
            DataSource::Builtin => Kind::Builtin(Corpus::new(vocab, !seed)?),
            DataSource::Text(text) => Kind::Text(Samples::new(text, vocab, seq, None)?),
        };
        Ok(Self { seq, kind })
    }

    /// What checkpoints call this data, to know it again.
    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::Builtin(_) => BUILTIN,
            Kind::Text(samples) => samples.text().name(),
        }
    }

    /// Where the files are, if it is files.
    pub fn path(&self) -> Option<&Path> {
        match &self.kind {
            Kind::Builtin(_) => None,
            Kind::Text(samples) => Some(samples.text().path()),
        }
    }

    /// Fills in the tokens of a sample, from its token `ahead` on: 0 for what the model reads, 1 for what it
    /// should predict.
    pub fn fill(&self, sample: u64, ahead: u64, tokens: &mut [u32]) -> Result<(), DataError> {
        match &self.kind {
            Kind::Builtin(corpus) => {
                let start = sample_start(0, sample, 0, self.seq);
                corpus.fill(start.wrapping_add(ahead), tokens);
                Ok(())
            }
            Kind::Text(samples) => Ok(samples.fill(sample, ahead, tokens)?),
        }
    }

    /// How many different samples there are; none if they do not end.
    pub fn samples(&self) -> Option<u64> {
        match &self.kind {
            Kind::Builtin(_) => None,
            Kind::Text(samples) => Some(samples.windows()),
        }
    }

    /// The loss that no model can stay below, in nats per token, where that is known.
    pub fn floor(&self) -> Option<f64> {
        match &self.kind {
            Kind::Builtin(corpus) => Some(corpus.floor_for(self.seq)),
            Kind::Text(_) => None,
        }
    }
}

/// What the built-in corpus is called.
pub const BUILTIN: &str = "builtin";
