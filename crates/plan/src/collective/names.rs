//! What is asked of a collective: its kind, the algorithm, the reduction and the order of summation.

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

/// How a collective is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Algorithm {
    /// Whatever [`resolve`](super::resolve) picks for the kind, the rank count and the order.
    Auto,
    /// Chunks travel around a ring of neighbours; see [`ring`](super::ring).
    Ring,
    /// Recursive halving and doubling; see [`halving_doubling`](super::halving_doubling).
    HalvingDoubling,
    /// Everyone talks to everyone at once; see [`direct`](super::direct).
    Direct,
    /// Some ranks own shards of the vector; see [`parameter_server`](super::parameter_server).
    ParameterServer {
        /// How many ranks serve; server *s* owns chunk *s*.
        servers: u32,
    },
}

impl Algorithm {
    /// What `--collective` accepts today.
    const KNOWN: &'static str = "auto, ring, halving-doubling, direct, ps, ps:K";

    /// Names that the command line reserves, without their parameters.
    const RESERVED: [&'static str; 7] =
        ["multi-ring", "tree", "read-reduce", "hierarchical", "naive", "overlapped", "partitioned"];
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Ring => f.pad("ring"),
            Self::HalvingDoubling => f.pad("halving-doubling"),
            Self::Direct => f.pad("direct"),
            Self::ParameterServer { servers: 1 } => f.pad("ps"),
            Self::ParameterServer { servers } => f.pad(&format!("ps:{servers}")),
        }
    }
}

impl FromStr for Algorithm {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        match text {
            "auto" => return Ok(Self::Auto),
            "ring" => return Ok(Self::Ring),
            "halving-doubling" => return Ok(Self::HalvingDoubling),
            "direct" => return Ok(Self::Direct),
            "ps" => return Ok(Self::ParameterServer { servers: 1 }),
            _ => {}
        }
        if let Some(count) = text.strip_prefix("ps:") {
            return match count.parse() {
                Ok(servers) if servers > 0 => Ok(Self::ParameterServer { servers }),
                _ => Err(NameError::Servers { text: text.to_owned() }),
            };
        }
        let word = text.split_once(':').map_or(text, |(word, _)| word);
        let (text, known) = (text.to_owned(), Self::KNOWN.to_owned());
        if Self::RESERVED.contains(&word) {
            Err(NameError::NotYet { text, known })
        } else {
            Err(NameError::Unknown { what: "collective algorithm", text, known })
        }
    }
}

impl TryFrom<String> for Algorithm {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<Algorithm> for String {
    fn from(algorithm: Algorithm) -> Self {
        algorithm.to_string()
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
    /// The word names an algorithm that is planned for but not written.
    #[error("collective algorithm '{text}' is not available yet (available: {known})")]
    NotYet {
        /// The word.
        text: String,
        /// The algorithms that exist.
        known: String,
    },
    /// The number of servers is missing, zero or not a number.
    #[error("'{text}' needs a number of servers of at least 1, such as ps:4")]
    Servers {
        /// The word.
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
        for text in ["auto", "ring", "halving-doubling", "direct", "ps", "ps:4"] {
            let algorithm: Algorithm = text.parse().unwrap();
            assert_eq!(algorithm.to_string(), text);
            let json = serde_json::to_string(&algorithm).unwrap();
            assert_eq!(serde_json::from_str::<Algorithm>(&json).unwrap(), algorithm);
        }
        for order in [Order::Canonical, Order::Free] {
            assert_eq!(order.to_string().parse(), Ok(order));
        }
        for reduction in [Reduction::Sum, Reduction::Max] {
            assert_eq!(reduction.to_string().parse(), Ok(reduction));
        }
    }

    #[test]
    fn one_server_has_one_name() {
        assert_eq!("ps:1".parse::<Algorithm>().unwrap().to_string(), "ps");
    }

    #[test]
    fn later_algorithms_are_told_from_nonsense() {
        for text in ["multi-ring:4", "tree", "hierarchical:ring:direct", "naive"] {
            let error = text.parse::<Algorithm>().unwrap_err();
            assert!(matches!(error, NameError::NotYet { .. }), "{error}");
            assert!(error.to_string().contains("halving-doubling"), "{error}");
        }
        assert!(matches!("rings".parse::<Algorithm>(), Err(NameError::Unknown { .. })));
        assert!(matches!("".parse::<Algorithm>(), Err(NameError::Unknown { .. })));
        for text in ["ps:", "ps:0", "ps:-1", "ps:99999999999", "ps:x"] {
            assert!(matches!(text.parse::<Algorithm>(), Err(NameError::Servers { .. })), "{text}");
        }
    }
}
