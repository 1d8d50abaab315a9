//! What is asked of a collective: its kind, the reduction and the order of summation. The names of
//! algorithms are in [`algorithm`](super::algorithm).

use super::algorithm::{MAX_CHUNKS, MAX_RINGS, TorusShape};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// What a collective does to the vectors of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    /// Every rank ends with the reduction of all vectors.
    AllReduce,
    /// Rank *i* ends with part *i* of the reduction of all vectors.
    ReduceScatter,
    /// Rank *i* brings part *i*; every rank ends with all parts.
    AllGather,
    /// Every rank ends with the root's vector.
    Broadcast,
    /// The root ends with the reduction of all vectors.
    Reduce,
    /// Rank *i* brings part *i*; the root ends with all parts.
    Gather,
    /// Part *j* of rank *i*'s input becomes part *i* of rank *j*'s output.
    AllToAll,
}

impl CollectiveKind {
    /// Every kind, in the order in which they are listed to people.
    pub const ALL: [Self; 7] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Reduce,
        Self::Gather,
        Self::AllToAll,
    ];

    /// The word used in flags, in the text form and in traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::AllToAll => "all_to_all",
        }
    }

    /// Whether values are combined, so that the order of summation matters.
    pub const fn reduces(self) -> bool {
        match self {
            Self::AllReduce | Self::ReduceScatter | Self::Reduce => true,
            Self::AllGather | Self::Broadcast | Self::Gather | Self::AllToAll => false,
        }
    }

    /// Whether one rank, the root, plays a different part than the others.
    pub const fn has_root(self) -> bool {
        match self {
            Self::Broadcast | Self::Reduce | Self::Gather => true,
            Self::AllReduce | Self::ReduceScatter | Self::AllGather | Self::AllToAll => false,
        }
    }
}

impl fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for CollectiveKind {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| NameError::Unknown {
            what: "collective",
            text: text.to_owned(),
            known: Self::ALL.map(Self::name).join(", "),
        })
    }
}

/// How two contributions become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// Addition.
    Sum,
    /// The larger of the two; a NaN on either side gives a NaN, so that overflow is not lost.
    Max,
}

impl Reduction {
    /// The word used in flags and in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Max => "max",
        }
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Reduction {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        match text {
            "sum" => Ok(Self::Sum),
            "max" => Ok(Self::Max),
            _ => Err(NameError::Unknown {
                what: "reduction",
                text: text.to_owned(),
                known: "sum, max".to_owned(),
            }),
        }
    }
}

/// In which order contributions are summed. Either way the result is the same in every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// The balanced tree over rank order that [`CanonicalFold`](super::CanonicalFold) defines, so
    /// that algorithms which keep it agree bit for bit.
    Canonical,
    /// Whichever order the algorithm finds cheapest.
    Free,
}

impl Order {
    /// The word used in flags and in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Canonical => "canonical",
            Self::Free => "free",
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Order {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        match text {
            "canonical" => Ok(Self::Canonical),
            "free" => Ok(Self::Free),
            _ => Err(NameError::Unknown {
                what: "order",
                text: text.to_owned(),
                known: "canonical, free".to_owned(),
            }),
        }
    }
}

/// Why a word of a flag or of a plan was not understood.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NameError {
    /// The word means nothing here.
    #[error("unknown {what} '{text}' (known: {known})")]
    Unknown {
        /// What the word should have named.
        what: &'static str,
        /// The word.
        text: String,
        /// The words that would have been understood.
        known: String,
    },
    /// The number of servers is missing, zero or not a number.
    #[error("'{text}' needs a number of servers of at least 1, such as ps:4")]
    Servers {
        /// The word.
        text: String,
    },
    /// The number of rings is missing, too small, too large or not a number.
    #[error("'{text}' needs a number of rings from 1 to {MAX_RINGS}, such as multi-ring:2")]
    Rings {
        /// The word.
        text: String,
    },
    /// The sizes of a torus are missing or not numbers.
    #[error(
        "'{text}' needs from 1 to {} sizes of at least 1, such as torus:4x4x2",
        TorusShape::MAX_DIMENSIONS
    )]
    Shape {
        /// The word.
        text: String,
    },
    /// The number of chunks is missing, too small, too large or not a number.
    #[error("'{text}' needs a number of chunks from 1 to {MAX_CHUNKS}, such as themis:16")]
    Chunks {
        /// The word.
        text: String,
    },
    /// The dimensions of a grid are no sizes with the letter of an algorithm.
    #[error(
        "'{text}' needs behind the slash the sizes of its dimensions, each with r (ring), d (direct) or \
         h (halving), such as per-dimension:4/8hx16r; leave the slash out to take them from the cluster"
    )]
    Grid {
        /// The word.
        text: String,
    },
    /// A hierarchy has fewer or more than two levels.
    #[error(
        "'{text}' needs an inner and an outer algorithm, such as hierarchical:ps:ring or \
         hierarchical:multi-ring:2:halving-doubling"
    )]
    Levels {
        /// The words.
        text: String,
    },
    /// The number of ranks that share a host is zero or not a number.
    #[error("'{text}' needs behind the slash how many of its ranks share a host, at least 1")]
    Host {
        /// The words.
        text: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for kind in CollectiveKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{kind}\""));
        }
        for order in [Order::Canonical, Order::Free] {
            assert_eq!(order.to_string().parse(), Ok(order));
        }
        for reduction in [Reduction::Sum, Reduction::Max] {
            assert_eq!(reduction.to_string().parse(), Ok(reduction));
        }
    }
}
