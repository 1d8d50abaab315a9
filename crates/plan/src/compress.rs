//! Gradient compression: formats, operators and message sizes.
//!
//! A compressed reduction consists of ordinary ops: an operator that encodes a bucket's gradients,
//! a collective of the result, and an operator that decodes it (see `lower/compress.rs`). The
//! encoding error stays in an *error feedback* buffer and is added to the next iteration's
//! gradients, so that nothing is lost permanently (Seide et al., Interspeech 2014; Karimireddy et
//! al., arXiv 1901.09847).

use crate::graph::BLOCK;
use crate::program::Entry;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Requested compression.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// Gradients are sent uncompressed.
    #[default]
    None,
    /// Integers from −127 to 127 and a scale for each block.
    Int8,
    /// Signs, and for every 64 of them the mean of the positive and of the negative elements (Seide
    /// et al. 2014).
    OneBit,
    /// The given fraction of each tensor: its largest elements with their indices (Aji and
    /// Heafield, arXiv 1704.05021).
    TopK(f64),
    /// Each matrix as the product of two narrow matrices with the given number of columns
    /// (PowerSGD; Vogels et al., arXiv 1905.13727).
    PowerSgd(u32),
}

impl Compression {
    /// Codec of the elements, if they are encoded one by one.
    pub const fn codec(self) -> Option<Codec> {
        match self {
            Self::Int8 => Some(Codec::Int8),
            Self::OneBit => Some(Codec::OneBit),
            Self::TopK(_) => Some(Codec::TopK),
            Self::None | Self::PowerSgd(_) => None,
        }
    }
}

/// Format of elements in the 32-bit words of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Codec {
    /// Per block: the scale, then four elements per word.
    Int8,
    /// Per block: the number of elements before its trailing zeros; then for every 64 elements the
    /// means of both signs in 16 bits each, and the signs.
    OneBit,
    /// Indices, then values.
    TopK,
}

impl Codec {
    /// All codecs.
    pub const ALL: [Self; 3] = [Self::Int8, Self::OneBit, Self::TopK];

    /// Name in plans.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::OneBit => "onebit",
            Self::TopK => "topk",
        }
    }

    /// Number of words per encoded block, if blocks are encoded one by one.
    pub const fn words_per_block(self) -> Option<u64> {
        match self {
            Self::Int8 => Some(1 + BLOCK / 4),
            Self::OneBit => Some(1 + BLOCK / 64 * 3),
            Self::TopK => None,
        }
    }
}

/// Operators of a compressed reduction. Operators with an error operand update it in place.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CompressOp {
    /// gradient, error → message, error.
    Encode {
        /// Target codec.
        codec: Codec,
    },
    /// gradient, error → message of the largest elements, error.
    SelectTopK {
        /// Fraction of each tensor.
        fraction: f64,
        /// Index of the bucket in the program.
        bucket: u32,
    },
    /// messages of all ranks for this rank's part, error → message of the sum, error.
    Merge {
        /// Source and target codec.
        codec: Codec,
        /// Number of messages.
        terms: u32,
    },
    /// messages → their sum.
    Decode {
        /// Source codec.
        codec: Codec,
        /// Number of messages.
        terms: u32,
    },
    /// → arbitrary initial right factors of a bucket's matrices.
    InitRight {
        /// Number of columns.
        rank: u32,
        /// Index of the bucket in the program.
        bucket: u32,
    },
    /// gradient, right factors, error → left factors M·Q with unfactored tensors, error (the M).
    Left {
        /// Number of columns.
        rank: u32,
        /// Index of the bucket in the program.
        bucket: u32,
    },
    /// left factors, error → left factors with orthonormal columns, right factors Mᵀ·P, error.
    Right {
        /// Number of columns.
        rank: u32,
        /// Index of the bucket in the program.
        bucket: u32,
    },
    /// left factors, right factors → gradient P·Qᵀ.
    Product {
        /// Number of columns.
        rank: u32,
        /// Index of the bucket in the program.
        bucket: u32,
    },
}

impl CompressOp {
    /// Short name for traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Encode { .. } => "encode",
            Self::SelectTopK { .. } => "select_topk",
            Self::Merge { .. } => "merge",
            Self::Decode { .. } => "decode",
            Self::InitRight { .. } => "init_right",
            Self::Left { .. } => "left_factors",
            Self::Right { .. } => "right_factors",
            Self::Product { .. } => "factors_product",
        }
    }

    /// Approximate operations per input or output element.
    pub(crate) fn intensity(self) -> f64 {
        match self {
            Self::SelectTopK { .. } => 12.0,
            Self::Encode { .. } | Self::Decode { .. } => 4.0,
            Self::Merge { .. } => 8.0,
            Self::InitRight { .. } => 40.0,
            Self::Left { rank, .. } | Self::Product { rank, .. } => 2.0 * f64::from(rank),
            // The factor itself, and the residual of the matrix.
            Self::Right { rank, .. } => 4.0 * f64::from(rank),
        }
    }
}

/// Lengths of a tensor's factors: left rows × rank and right columns × rank; `None` if both
/// together are no shorter than the tensor.
pub fn factors(entry: &Entry, rank: u32) -> Option<[u64; 2]> {
    let [rows, columns] = entry.local;
    let [left, right] = [rows, columns].map(|side| side.saturating_mul(u64::from(rank)));
    (left.saturating_add(right) < entry.elements()).then_some([left, right])
}

/// Number of elements of all left factors and of all right factors of a bucket. Tensors that are
/// not factored count in full on the left.
pub fn factor_lengths(entries: &[Entry], rank: u32) -> [u64; 2] {
    entries.iter().fold([0, 0], |[left, right], entry| match factors(entry, rank) {
        Some(of) => [left + of[0], right + of[1]],
        None => [left + entry.elements(), right],
    })
}

/// Number of a tensor's elements that are sent: at least one for any fraction. Tensors are counted
/// separately, so ranks that hold the same tensor next to different ones select the same elements.
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
                "topk" => Err("'topk': missing fraction, as in topk:0.01".into()),
                "powersgd" => Err("'powersgd': missing rank, as in powersgd:4".into()),
                _ => Err(none_of(text)),
            },
            // Each sent element takes two words, its index and its value.
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
