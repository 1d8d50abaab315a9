//! Parameters of a collective: kind, reduction and order of summation. The names of algorithms are
//! in [`algorithm`](super::algorithm).

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Effect of a collective on the vectors of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    /// Every rank ends with the reduction of all vectors.
    AllReduce,
    /// Rank *i* ends with part *i* of the reduction of all vectors.
    ReduceScatter,
    /// Rank *i* contributes part *i*; every rank ends with all parts.
    AllGather,
    /// Every rank ends with the root's vector.
    Broadcast,
    /// The root ends with the reduction of all vectors.
    Reduce,
    /// Rank *i* contributes part *i*; the root ends with all parts.
    Gather,
    /// Part *j* of rank *i*'s input becomes part *i* of rank *j*'s output.
    AllToAll,
    /// Rank *i* ends with part *i* of the root's vector.
    Scatter,
    /// Every rank sends its vector to the next rank, and its output is the previous rank's.
    SendRecv,
    /// No rank ends before all have begun; messages are empty.
    Barrier,
}

impl CollectiveKind {
    /// All kinds, in display order.
    pub const ALL: [Self; 10] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Reduce,
        Self::Gather,
        Self::AllToAll,
        Self::Scatter,
        Self::SendRecv,
        Self::Barrier,
    ];

    /// Name used in flags, in the text form and in traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::AllToAll => "all_to_all",
            Self::Scatter => "scatter",
            Self::SendRecv => "send_recv",
            Self::Barrier => "barrier",
        }
    }

    /// Returns true if values are combined, so that the order of summation matters.
    pub const fn reduces(self) -> bool {
        match self {
            Self::AllReduce | Self::ReduceScatter | Self::Reduce => true,
            Self::AllGather
            | Self::Broadcast
            | Self::Gather
            | Self::AllToAll
            | Self::Scatter
            | Self::SendRecv
            | Self::Barrier => false,
        }
    }

    /// Returns true if one rank, the root, has a special part.
    pub const fn has_root(self) -> bool {
        match self {
            Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter => true,
            Self::AllReduce
            | Self::ReduceScatter
            | Self::AllGather
            | Self::AllToAll
            | Self::SendRecv
            | Self::Barrier => false,
        }
    }

    /// Returns true if the result is in an output buffer of its own.
    pub const fn has_output(self) -> bool {
        matches!(self, Self::AllToAll | Self::SendRecv)
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

/// Operation that combines two contributions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// Addition.
    Sum,
    /// Maximum; a NaN in either operand yields NaN, so that overflow is not lost.
    Max,
}

impl Reduction {
    /// Name used in flags and in the text form.
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

/// Order in which contributions are summed. Both orders give the same result in every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SummationOrder {
    /// The balanced tree over rank order defined by [`CanonicalFold`](super::CanonicalFold).
    /// Algorithms that keep it agree bit for bit.
    Canonical,
    /// The cheapest order for the algorithm.
    Free,
}

impl SummationOrder {
    /// Name used in flags and in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Canonical => "canonical",
            Self::Free => "free",
        }
    }
}

impl fmt::Display for SummationOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for SummationOrder {
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

/// Parse error for a name in a flag or a plan.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NameError {
    /// The name is not known here.
    #[error("unknown {what} '{text}' (known: {known})")]
    Unknown {
        /// Kind of thing the name should have denoted.
        what: &'static str,
        /// The unknown name.
        text: String,
        /// List of the known names.
        known: String,
    },
    /// A parameter is missing, malformed or out of range.
    #[error("'{text}' needs {needs}")]
    Parameter {
        /// The rejected text.
        text: String,
        /// Values that are accepted, with an example.
        needs: &'static str,
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
        for order in [SummationOrder::Canonical, SummationOrder::Free] {
            assert_eq!(order.to_string().parse(), Ok(order));
        }
        for reduction in [Reduction::Sum, Reduction::Max] {
            assert_eq!(reduction.to_string().parse(), Ok(reduction));
        }
    }
}
