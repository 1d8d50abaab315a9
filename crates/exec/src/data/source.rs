//! What a run learns from, behind one face: samples by number.

use super::corpus::{Corpus, CorpusError};
use super::sample_start;
use thiserror::Error;

/// What a user names as data.
#[derive(Clone, Debug, Default)]
pub enum DataSource {
    /// The built-in corpus, which the seed makes.
    #[default]
    Builtin,
}

/// Samples by number: the same for every rank, in every layout.
#[derive(Debug)]
pub struct Data {
    corpus: Corpus,
    seq: u64,
}

/// Why there are no samples.
#[derive(Debug, Error)]
pub enum DataError {
    /// The built-in corpus does not fit the model.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
}

impl Data {
    /// Samples of `seq` tokens for a model with `vocab` of them.
    pub fn new(source: &DataSource, vocab: u32, seq: u64, seed: u64) -> Result<Self, DataError> {
        match source {
            DataSource::Builtin => Ok(Self { corpus: Corpus::new(vocab, seed)?, seq }),
        }
    }

    /// What checkpoints call this data, to know it again.
    pub fn name(&self) -> &str {
        "builtin"
    }

    /// Fills in the tokens of a sample, from its token `ahead` on: 0 for what the model reads, 1 for what it
    /// should predict.
    pub fn fill(&self, sample: u64, ahead: u64, tokens: &mut [u32]) -> Result<(), DataError> {
        let start = sample_start(0, sample, 0, self.seq);
        self.corpus.fill(start.wrapping_add(ahead), tokens);
        Ok(())
    }

    /// The loss that no model can stay below, in nats per token, where that is known.
    pub fn floor(&self) -> Option<f64> {
        Some(self.corpus.floor_for(self.seq))
    }
}
