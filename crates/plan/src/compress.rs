//! What gradients are turned into before they go over a wire, and what that takes.
//!
//! A compressed reduction is made of ordinary ops: an operator that encodes a bucket's gradients, a
//! collective of what comes out, an operator that decodes it (see `lower/compress.rs`). What is lost in
//! encoding stays in an *error* buffer and is added to the next iteration's gradients, so that nothing is
//! lost for good (Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847).

use crate::graph::BLOCK;
use crate::program::Entry;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What a user asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// Gradients go as they are.
    #[default]
    None,
    /// Whole numbers from −127 to 127 and a scale for each block.
    Int8,
    /// Signs, and for every 64 of them the mean of what is above zero and of what is below (Seide et al.
    /// 2014).
    OneBit,
    /// The largest elements of each tensor and where they stand; so much of all (Aji and Heafield, arXiv
    /// 1704.05021).
    TopK(f64),
    /// Each matrix as the product of two narrow ones of so many columns (PowerSGD; Vogels et al., arXiv
    /// 1905.13727).
    PowerSgd(u32),
}

impl Compression {
    /// What elements become, if they are encoded one by one.
    pub const fn codec(self) -> Option<Codec> {
        match self {
            Self::Int8 => Some(Codec::Int8),
            Self::OneBit => Some(Codec::OneBit),
            Self::TopK(_) => Some(Codec::TopK),
            Self::None | Self::PowerSgd(_) => None,
        }
    }
}

/// How elements are written into the 32-bit words of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Codec {
    /// Per block: the scale, then four elements to a word.
    Int8,
    /// Per block: how many elements there are before the zeros at its end; then for every 64 elements the
    /// means of both signs in 16 bits each, and the signs.
    OneBit,
    /// Places, then values.
    TopK,
}

impl Codec {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Int8, Self::OneBit, Self::TopK];

    /// The word in plans.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::OneBit => "onebit",
            Self::TopK => "topk",
        }
    }

    /// Words that a block becomes, if blocks are encoded one by one.
    pub const fn words_per_block(self) -> Option<u64> {
        match self {
            Self::Int8 => Some(1 + BLOCK / 4),
            Self::OneBit => Some(1 + BLOCK / 64 * 3),
            Self::TopK => None,
        }
    }
}

/// The operators of a compressed reduction. The first output of those that name an error works in place.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CompressOp {
    /// gradient, error → message, error.
    Encode {
        /// Into what.
        codec: Codec,
    },
    /// gradient, error → message of the largest elements, error.
    Pick {
        /// How much of each tensor.
        fraction: f64,
        /// Which bucket of the program.
        bucket: u32,
    },
    /// messages of all ranks about this rank's part, error → message of the sum, error.
    Merge {
        /// From and into what.
        codec: Codec,
        /// How many messages.
        terms: u32,
    },
    /// messages → their sum.
    Decode {
        /// From what.
        codec: Codec,
        /// How many messages.
        terms: u32,
    },
    /// → first right factors of a bucket's matrices, as good as any.
    Guess {
        /// Columns.
        rank: u32,
        /// Which bucket of the program.
        bucket: u32,
    },
    /// gradient, right factors, error → left factors M·Q with all that is no matrix, error (the M).
    Left {
        /// Columns.
        rank: u32,
        /// Which bucket of the program.
        bucket: u32,
    },
    /// left factors, error → left factors with orthonormal columns, right factors Mᵀ·P, error.
    Right {
        /// Columns.
        rank: u32,
        /// Which bucket of the program.
        bucket: u32,
    },
    /// left factors, right factors → gradient P·Qᵀ.
    Product {
        /// Columns.
        rank: u32,
        /// Which bucket of the program.
        bucket: u32,
    },
}

impl CompressOp {
    /// A short name for traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Encode { .. } => "encode",
            Self::Pick { .. } => "pick",
            Self::Merge { .. } => "merge",
            Self::Decode { .. } => "decode",
            Self::Guess { .. } => "guess_factors",
            Self::Left { .. } => "left_factors",
            Self::Right { .. } => "right_factors",
            Self::Product { .. } => "factors_product",
        }
    }

    /// Rough operations per element that goes in or out.
    pub(crate) fn intensity(self) -> f64 {
        match self {
            Self::Pick { .. } => 12.0,
            Self::Encode { .. } | Self::Decode { .. } => 4.0,
            Self::Merge { .. } => 8.0,
            Self::Guess { .. } => 40.0,
            Self::Left { rank, .. } | Self::Product { rank, .. } => 2.0 * f64::from(rank),
            // The factor itself, and what it leaves of the matrix.
            Self::Right { rank, .. } => 4.0 * f64::from(rank),
        }
    }
}

/// How long the factors of a tensor are: left rows × rank and right columns × rank; none if that is no
/// shorter than the tensor.
pub fn factors(entry: &Entry, rank: u32) -> Option<[u64; 2]> {
    let [rows, columns] = entry.local;
    let [left, right] = [rows, columns].map(|side| side.saturating_mul(u64::from(rank)));
    (left.saturating_add(right) < entry.elements()).then_some([left, right])
}

/// Elements of all left factors of a bucket, tensors that have none standing there whole, and of all right
/// factors.
pub fn factor_lengths(entries: &[Entry], rank: u32) -> [u64; 2] {
    entries.iter().fold([0, 0], |[left, right], entry| match factors(entry, rank) {
        Some(of) => [left + of[0], right + of[1]],
        None => [left + entry.elements(), right],
    })
}

/// How many of a tensor's elements are sent: at least one, however small the fraction. Tensors count one by
/// one, so that ranks which hold the same tensor beside different ones pick the same of it.
pub fn picked(entry: &Entry, fraction: f64) -> u64 {
    let elements = entry.elements();
    ((elements as f64 * fraction).ceil() as u64).clamp(1, elements.max(1))
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Int8 => f.write_str("int8"),
            Self::OneBit => f.write_str("onebit"),
            Self::TopK(fraction) => write!(f, "topk:{fraction}"),
            Self::PowerSgd(rank) => write!(f, "powersgd:{rank}"),
        }
    }
}

impl FromStr for Compression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None => match text {
                "none" => Ok(Self::None),
                "int8" => Ok(Self::Int8),
                "onebit" => Ok(Self::OneBit),
                "topk" => Err("'topk': say how much is sent, as in topk:0.01".into()),
                "powersgd" => Err("'powersgd': say of what rank, as in powersgd:4".into()),
                _ => Err(none_of(text)),
            },
            // Each element that is sent takes two words, its place and its value.
            Some(("topk", fraction)) => match fraction.parse::<f64>() {
                Ok(fraction) if fraction > 0.0 && fraction <= 0.5 => Ok(Self::TopK(fraction)),
                Ok(_) | Err(_) => Err(format!(
                    "'{text}': the fraction must be above 0 and at most 0.5, as in topk:0.01"
                )),
            },
            Some(("powersgd", rank)) => match rank.parse::<u32>() {
                Ok(rank) if (1..=1024).contains(&rank) => Ok(Self::PowerSgd(rank)),
                Ok(_) | Err(_) => {
                    Err(format!("'{text}': the rank must be 1 to 1024, as in powersgd:4"))
                }
            },
            Some(_) => Err(none_of(text)),
        }
    }
}

fn none_of(text: &str) -> String {
    format!("'{text}' is none of none, int8, onebit, topk:FRACTION, powersgd:RANK")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_back_and_nonsense_is_refused() {
        for text in ["none", "int8", "onebit", "topk:0.01", "powersgd:4"] {
            assert_eq!(text.parse::<Compression>().map(|c| c.to_string()), Ok(text.to_owned()));
        }
        for text in
            ["", "int4", "topk", "topk:0", "topk:-1", "topk:0.6", "topk:NaN", "powersgd:0", "zip:3"]
        {
            assert!(text.parse::<Compression>().is_err(), "{text}");
        }
    }
}
