//! Kinds of samples that models read.

use crate::model::network::Input;
use crate::model::{Body, Model};

/// Kind of a model's samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SampleKind {
    /// Sequences of tokens.
    Tokens {
        /// Number of different tokens.
        vocab: u32,
        /// Length of a sequence.
        seq: u64,
        /// Number of lookahead tokens read beyond a sequence's last target.
        lookahead: u64,
    },
    /// Images, each of one class.
    Images {
        /// Pixels along each side.
        side: u64,
        /// Numbers in a pixel.
        channels: u64,
        /// Number of classes.
        classes: u32,
    },
    /// Handwritten digits.
    Digits,
    /// Clicks with measured numbers and categories.
    Clicks {
        /// Number of measured numbers per sample.
        dense: u64,
        /// Number of values of each category in a sample.
        lookups: u64,
        /// Number of values of each category.
        tables: Vec<u64>,
    },
}

impl SampleKind {
    /// Sample kind of a model, with sequences of `seq` tokens.
    pub fn of(model: &Model, seq: u64) -> Self {
        let vocab = u32::try_from(model.vocab).unwrap_or(u32::MAX);
        match model.body() {
            Body::Tokens {} | Body::Decoder { .. } => {
                Self::Tokens { vocab, seq, lookahead: model.mtp.depth }
            }
            Body::Images(net) => {
                Self::Images { side: net.image, channels: net.channels, classes: vocab }
            }
            Body::Network(net) => match net.input {
                Input::Digits => Self::Digits,
                Input::Images { side, channels, classes: _ } => {
                    Self::Images { side, channels, classes: vocab }
                }
                Input::Tokens { .. } => Self::Tokens { vocab, seq, lookahead: net.lookahead(seq) },
            },
            Body::Clicks(net) => {
                Self::Clicks { dense: net.dense, lookups: net.lookups, tables: net.tables.clone() }
            }
        }
    }

    /// Number of different tokens or classes.
    pub const fn classes(&self) -> u32 {
        match *self {
            Self::Tokens { vocab: classes, .. } | Self::Images { classes, .. } => classes,
            Self::Digits => 10,
            // Clicked and not clicked.
            Self::Clicks { .. } => 2,
        }
    }
}
