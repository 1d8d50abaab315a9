//! Tensor placements along mesh axes, and the one table of conversions between them.
//!
//! Along every mesh axis a tensor is replicated, sharded or partial. A mismatch between an
//! operator's output and the next operator's input is resolved only by [`conversion`], the single
//! source of collectives.

use crate::collective::{CollectiveKind, Reduction};
use serde::{Deserialize, Serialize};
use std::fmt;
use thiserror::Error;

/// Distribution of a sharded dimension across the ranks of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Rank i holds the i-th of n equal contiguous ranges.
    Contiguous,
    /// The dimension consists of blocks (queries, keys, values); each is sharded contiguously, and
    /// a rank holds its range of every block.
    Blocks,
    /// 2n ranges; rank i holds ranges i and 2n−1−i, which balances causal attention.
    Zigzag,
    /// The dimension consists of blocks (tables), and a rank holds some of them completely.
    Whole,
}

/// Part of a tensor held by one rank of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// The whole tensor.
    Replicate,
    /// A shard along one dimension.
    Shard {
        /// The sharded dimension.
        dim: u8,
        /// Its distribution across the ranks.
        layout: Layout,
    },
    /// A value of full shape that must still be reduced with those of the other ranks.
    Partial(Reduction),
    /// A shard of a padded flat bucket of tensors (ZeRO).
    FlatShard,
}

impl Placement {
    /// Contiguous shard of the token dimension.
    pub const TOKENS: Self = Self::Shard { dim: 0, layout: Layout::Contiguous };
    /// Zigzag shard of the token dimension.
    pub const ZIGZAG: Self = Self::Shard { dim: 0, layout: Layout::Zigzag };
    /// Shard of the width; blocks (if the tensor has them) are each sharded.
    pub const WIDTH: Self = Self::Shard { dim: 1, layout: Layout::Blocks };
    /// Shard of a weight's rows; blocks (if it has them) are each sharded.
    pub const ROWS: Self = Self::Shard { dim: 0, layout: Layout::Blocks };
    /// A partial sum.
    pub const SUM: Self = Self::Partial(Reduction::Sum);
    /// A partial maximum.
    pub const MAX: Self = Self::Partial(Reduction::Max);
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicate => f.write_str("R"),
            Self::Shard { dim, layout } => {
                let mark = match layout {
                    Layout::Contiguous => "",
                    Layout::Blocks => "b",
                    Layout::Zigzag => "z",
                    Layout::Whole => "w",
                };
                write!(f, "S{dim}{mark}")
            }
            Self::Partial(Reduction::Sum) => f.write_str("P+"),
            Self::Partial(Reduction::Max) => f.write_str("P^"),
            Self::FlatShard => f.write_str("F"),
        }
    }
}

/// A tensor's placement on every axis. Pipeline stages never share a tensor, so `pp` has no entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Along the data-parallel axis.
    pub dp: Placement,
    /// Along the context-parallel axis.
    pub cp: Placement,
    /// Along the tensor-parallel axis.
    pub tp: Placement,
}

/// Operation that converts one placement into another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conversion {
    /// Nothing: the placements are equal.
    None,
    /// Each rank keeps a slice of its data; free.
    Slice,
    /// A collective among the ranks of the axis.
    Collective(CollectiveKind, Reduction),
}

/// Error: no rule converts one placement into the other.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("no conversion leads from {from} to {to}")]
pub struct NoConversion {
    /// The existing placement.
    pub from: Placement,
    /// The required placement.
    pub to: Placement,
}

/// Looks up the conversion from `from` to `to` along one axis.
pub fn conversion(from: Placement, to: Placement) -> Result<Conversion, NoConversion> {
    use CollectiveKind::{AllGather, AllReduce, AllToAll, ReduceScatter};
    use Placement::{FlatShard, Partial, Replicate, Shard};
    if from == to {
        return Ok(Conversion::None);
    }
    Ok(match (from, to) {
        (Partial(how), Replicate) => Conversion::Collective(AllReduce, how),
        (Partial(how), Shard { .. } | FlatShard) => Conversion::Collective(ReduceScatter, how),
        (Shard { .. } | FlatShard, Replicate) => Conversion::Collective(AllGather, Reduction::Sum),
        (Shard { .. }, Shard { .. }) => Conversion::Collective(AllToAll, Reduction::Sum),
        (Replicate, Shard { .. } | FlatShard) => Conversion::Slice,
        (Replicate, Replicate) | (FlatShard, FlatShard) => Conversion::None,
        (Replicate | Shard { .. } | FlatShard | Partial(_), Partial(_))
        | (Shard { .. }, FlatShard)
        | (FlatShard, Shard { .. }) => return Err(NoConversion { from, to }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_the_design() {
        let collective = |from, to| match conversion(from, to) {
            Ok(Conversion::Collective(kind, _)) => Some(kind),
            Ok(Conversion::None | Conversion::Slice) | Err(_) => None,
        };
        use CollectiveKind::*;
        assert_eq!(collective(Placement::SUM, Placement::Replicate), Some(AllReduce));
        assert_eq!(collective(Placement::SUM, Placement::TOKENS), Some(ReduceScatter));
        assert_eq!(collective(Placement::SUM, Placement::FlatShard), Some(ReduceScatter));
        assert_eq!(collective(Placement::TOKENS, Placement::Replicate), Some(AllGather));
        assert_eq!(collective(Placement::TOKENS, Placement::WIDTH), Some(AllToAll));
        assert_eq!(conversion(Placement::Replicate, Placement::WIDTH), Ok(Conversion::Slice));
        assert_eq!(
            conversion(Placement::MAX, Placement::Replicate),
            Ok(Conversion::Collective(AllReduce, Reduction::Max))
        );
        assert!(conversion(Placement::Replicate, Placement::SUM).is_err());
    }
}
