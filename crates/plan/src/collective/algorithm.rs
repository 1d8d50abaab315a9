//! Algorithms of collectives, and their names.

use super::grid::Grid;
use super::names::NameError;
use super::themis::ChunkOrder;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

/// Maximum number of rings that share a vector; no device has this number of links.
pub const MAX_RINGS: u32 = 256;

/// Maximum number of chunks that are pipelined through the dimensions of a grid.
pub const MAX_CHUNKS: u32 = 256;

/// Algorithm of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Algorithm {
    /// The algorithm that [`resolve`](fn@super::resolve) picks by kind, rank count and order.
    Auto,
    /// Chunks travel around a ring of neighbours; see [`ring`](super::ring).
    Ring,
    /// Several rings in different orders share the vector; see [`multi_ring`](super::multi_ring).
    MultiRing {
        /// Number of rings, from 1 to [`MAX_RINGS`].
        rings: u32,
    },
    /// Recursive halving and doubling; see [`halving_doubling`](super::halving_doubling).
    HalvingDoubling,
    /// Two complementary binary trees; see [`tree`](super::tree).
    Tree,
    /// Every rank exchanges with every other at once; see [`direct`](super::direct).
    Direct,
    /// Ranks read each other's memory; see [`shared_memory`](super::shared_memory).
    SharedMemory,
    /// Some ranks own shards of the vector; see [`parameter_server`](super::parameter_server).
    ParameterServer {
        /// Number of servers; server *s* owns chunk *s*.
        servers: u32,
    },
    /// Whole vectors are sent to all ranks, one after the other; see [`naive`](super::naive).
    Naive,
    /// Whole vectors are sent to all ranks at once; see [`overlapped`](super::overlapped).
    Overlapped,
    /// Every rank reduces one part, one message at a time; see [`partitioned`](super::partitioned).
    Partitioned,
    /// One dimension of a torus after the other; see [`torus`](super::torus).
    Torus {
        /// The sizes of the dimensions, whose product is the rank count.
        shape: TorusShape,
    },
    /// One algorithm inside each host and one between hosts; see
    /// [`hierarchical`](super::hierarchical).
    Hierarchical {
        /// The algorithm inside a host.
        inner: Level,
        /// The algorithm between hosts.
        outer: Level,
        /// Number of consecutive ranks of the group that share a host. `None` leaves it open until
        /// code that knows the cluster calls [`Algorithm::with_host`].
        host: Option<NonZeroU32>,
    },
    /// A switch reduces; see [`in_network`](super::in_network).
    InNetwork,
    /// One dimension of a grid after the other, in pipelined chunks; see
    /// [`per_dimension`](super::per_dimension).
    PerDimension {
        /// Number of chunks, from 1 to [`MAX_CHUNKS`].
        chunks: u32,
        /// Order of the dimensions for each chunk.
        order: ChunkOrder,
        /// The dimensions that the group spans. `None` leaves them open until code that knows the
        /// cluster calls [`Fabric::resolve`](super::Fabric::resolve).
        grid: Option<Grid>,
    },
}

impl Algorithm {
    /// Sets the number of consecutive ranks of the group that share a host, if the algorithm needs
    /// it and it is open. It stays open if `ranks` is 0.
    pub fn with_host(self, ranks: u32) -> Self {
        match self {
            Self::Hierarchical { inner, outer, host: None } => {
                Self::Hierarchical { inner, outer, host: NonZeroU32::new(ranks) }
            }
            settled => settled,
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Auto => f.pad("auto"),
            Self::Ring => Level::Ring.fmt(f),
            Self::MultiRing { rings } => Level::MultiRing { rings }.fmt(f),
            Self::HalvingDoubling => Level::HalvingDoubling.fmt(f),
            Self::Tree => Level::Tree.fmt(f),
            Self::Direct => Level::Direct.fmt(f),
            Self::SharedMemory => Level::SharedMemory.fmt(f),
            Self::ParameterServer { servers } => Level::ParameterServer { servers }.fmt(f),
            Self::Naive => Level::Naive.fmt(f),
            Self::Overlapped => Level::Overlapped.fmt(f),
            Self::Partitioned => Level::Partitioned.fmt(f),
            Self::Torus { shape } => Level::Torus { shape }.fmt(f),
            Self::Hierarchical { inner, outer, host: None } => {
                f.pad(&format!("hierarchical:{inner}:{outer}"))
            }
            Self::Hierarchical { inner, outer, host: Some(host) } => {
                f.pad(&format!("hierarchical:{inner}:{outer}/{host}"))
            }
            Self::InNetwork => Level::InNetwork.fmt(f),
            Self::PerDimension { chunks, order, grid } => {
                let name = match (order, chunks) {
                    (ChunkOrder::Baseline, 1) => "per-dimension".to_owned(),
                    (ChunkOrder::Baseline, _) => format!("per-dimension:{chunks}"),
                    (ChunkOrder::Themis, _) => format!("themis:{chunks}"),
                };
                f.pad(&grid.map_or(name.clone(), |grid| format!("{name}/{grid}")))
            }
        }
    }
}

impl FromStr for Algorithm {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        if text == "hierarchical" || text.starts_with("hierarchical:") {
            return hierarchical(text);
        }
        if let Some(algorithm) = per_dimension(text) {
            return algorithm;
        }
        let mut words = text.split(':');
        match Level::take(&mut words)? {
            Some(level) if words.next().is_none() => Ok(level.into()),
            Some(Level::ParameterServer { .. }) => {
                Err(NameError::Servers { text: text.to_owned() })
            }
            _ => Err(NameError::Unknown {
                what: "collective algorithm",
                text: text.to_owned(),
                known: format!(
                    "auto, {}, hierarchical:INNER:OUTER, per-dimension:C, themis:C",
                    Level::KNOWN
                ),
            }),
        }
    }
}

/// Parses a per-dimension algorithm; `None` if the text names another algorithm.
fn per_dimension(text: &str) -> Option<Result<Algorithm, NameError>> {
    let (words, grid) = match text.split_once('/') {
        Some((words, grid)) => (words, Some(grid)),
        None => (text, None),
    };
    let (name, parameter) = match words.split_once(':') {
        Some((name, parameter)) => (name, Some(parameter)),
        None => (words, None),
    };
    let (order, chunks) = match (name, parameter) {
        ("per-dimension", None) => (ChunkOrder::Baseline, Some(1)),
        ("per-dimension", Some(chunks)) => (ChunkOrder::Baseline, chunks.parse().ok()),
        ("themis", chunks) => (ChunkOrder::Themis, chunks.and_then(|chunks| chunks.parse().ok())),
        _ => return None,
    };
    let Some(chunks) = chunks.filter(|chunks| (1..=MAX_CHUNKS).contains(chunks)) else {
        return Some(Err(NameError::Chunks { text: text.to_owned() }));
    };
    Some(match grid.map(Grid::parse) {
        None => Ok(Algorithm::PerDimension { chunks, order, grid: None }),
        Some(Some(grid)) => Ok(Algorithm::PerDimension { chunks, order, grid: Some(grid) }),
        Some(None) => Err(NameError::Grid { text: text.to_owned() }),
    })
}

fn hierarchical(text: &str) -> Result<Algorithm, NameError> {
    let (levels, host) = match text.split_once('/') {
        None => (text, None),
        Some((levels, host)) => match host.parse() {
            Ok(host) => (levels, Some(host)),
            Err(_) => return Err(NameError::Host { text: text.to_owned() }),
        },
    };
    let mut words = levels.split(':').skip(1).peekable();
    let mut level = || match words.peek().copied() {
        None => Err(NameError::Levels { text: text.to_owned() }),
        Some(word) => Level::take(&mut words)?.ok_or_else(|| NameError::Unknown {
            what: "algorithm of one level",
            text: word.to_owned(),
            known: Level::KNOWN.to_owned(),
        }),
    };
    let (inner, outer) = (level()?, level()?);
    match words.next() {
        None => Ok(Algorithm::Hierarchical { inner, outer, host }),
        Some(_) => Err(NameError::Levels { text: text.to_owned() }),
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

impl From<Level> for Algorithm {
    fn from(level: Level) -> Self {
        match level {
            Level::Ring => Self::Ring,
            Level::MultiRing { rings } => Self::MultiRing { rings },
            Level::HalvingDoubling => Self::HalvingDoubling,
            Level::Tree => Self::Tree,
            Level::Direct => Self::Direct,
            Level::SharedMemory => Self::SharedMemory,
            Level::ParameterServer { servers } => Self::ParameterServer { servers },
            Level::Naive => Self::Naive,
            Level::Overlapped => Self::Overlapped,
            Level::Partitioned => Self::Partitioned,
            Level::Torus { shape } => Self::Torus { shape },
            Level::InNetwork => Self::InNetwork,
        }
    }
}

/// An algorithm for one level of a hierarchy: any that is not hierarchical itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// See [`Algorithm::Ring`].
    Ring,
    /// See [`Algorithm::MultiRing`].
    MultiRing {
        /// Number of rings.
        rings: u32,
    },
    /// See [`Algorithm::HalvingDoubling`].
    HalvingDoubling,
    /// See [`Algorithm::Tree`].
    Tree,
    /// See [`Algorithm::Direct`].
    Direct,
    /// See [`Algorithm::SharedMemory`].
    SharedMemory,
    /// See [`Algorithm::ParameterServer`].
    ParameterServer {
        /// Number of servers.
        servers: u32,
    },
    /// See [`Algorithm::Naive`].
    Naive,
    /// See [`Algorithm::Overlapped`].
    Overlapped,
    /// See [`Algorithm::Partitioned`].
    Partitioned,
    /// See [`Algorithm::Torus`].
    Torus {
        /// The sizes of the dimensions.
        shape: TorusShape,
    },
    /// See [`Algorithm::InNetwork`].
    InNetwork,
}

impl Level {
    const KNOWN: &'static str = "ring, multi-ring:C, halving-doubling, tree, direct, shared-memory, \
                                 ps, ps:K, naive, overlapped, partitioned, torus:AxBxC, in-network";

    /// Consumes the words of one algorithm: its name, and its parameter if it has one. Returns
    /// `None` for an unknown name.
    fn take<'t>(
        words: &mut (impl Iterator<Item = &'t str> + Clone),
    ) -> Result<Option<Self>, NameError> {
        let Some(word) = words.next() else { return Ok(None) };
        // Names start with a letter and parameters do not, so `ps:ring` is two levels.
        let parameter = words.clone().next().filter(|p| !p.starts_with(char::is_alphabetic));
        let text = || parameter.map_or(word.to_owned(), |p| format!("{word}:{p}"));
        let number = || parameter.and_then(|p| p.parse().ok()).filter(|&n| n > 0);
        let (level, takes_parameter) = match word {
            "ring" => (Self::Ring, false),
            "halving-doubling" => (Self::HalvingDoubling, false),
            "tree" => (Self::Tree, false),
            "direct" => (Self::Direct, false),
            "shared-memory" => (Self::SharedMemory, false),
            "naive" => (Self::Naive, false),
            "overlapped" => (Self::Overlapped, false),
            "partitioned" => (Self::Partitioned, false),
            "in-network" => (Self::InNetwork, false),
            "ps" if parameter.is_none() => (Self::ParameterServer { servers: 1 }, false),
            "ps" => {
                let servers = number().ok_or_else(|| NameError::Servers { text: text() })?;
                (Self::ParameterServer { servers }, true)
            }
            "multi-ring" => {
                let rings = number().filter(|&rings| rings <= MAX_RINGS);
                let rings = rings.ok_or_else(|| NameError::Rings { text: text() })?;
                (Self::MultiRing { rings }, true)
            }
            "torus" => {
                let shape = parameter.and_then(TorusShape::parse);
                let shape = shape.ok_or_else(|| NameError::Shape { text: text() })?;
                (Self::Torus { shape }, true)
            }
            _ => return Ok(None),
        };
        if takes_parameter {
            words.next();
        }
        Ok(Some(level))
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ring => f.pad("ring"),
            Self::MultiRing { rings } => f.pad(&format!("multi-ring:{rings}")),
            Self::HalvingDoubling => f.pad("halving-doubling"),
            Self::Tree => f.pad("tree"),
            Self::Direct => f.pad("direct"),
            Self::SharedMemory => f.pad("shared-memory"),
            Self::ParameterServer { servers: 1 } => f.pad("ps"),
            Self::ParameterServer { servers } => f.pad(&format!("ps:{servers}")),
            Self::Naive => f.pad("naive"),
            Self::Overlapped => f.pad("overlapped"),
            Self::Partitioned => f.pad("partitioned"),
            Self::Torus { shape } => f.pad(&format!("torus:{shape}")),
            Self::InNetwork => f.pad("in-network"),
        }
    }
}

/// Sizes of a torus' dimensions, innermost first, where consecutive ranks are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TorusShape {
    /// Sizes of at least 1, padded with 0 for unused dimensions.
    sizes: [u32; Self::MAX_DIMENSIONS],
}

impl TorusShape {
    /// Maximum number of dimensions of a shape.
    pub const MAX_DIMENSIONS: usize = 6;

    /// Creates a shape; `None` if a dimension is empty, or if there are too few or too many
    /// dimensions.
    pub fn new(sizes: &[u32]) -> Option<Self> {
        let mut shape = Self { sizes: [0; Self::MAX_DIMENSIONS] };
        shape.sizes.get_mut(..sizes.len())?.copy_from_slice(sizes);
        (!sizes.is_empty() && !sizes.contains(&0)).then_some(shape)
    }

    /// The sizes.
    pub fn sizes(&self) -> impl DoubleEndedIterator<Item = u32> + Clone + use<> {
        self.sizes.into_iter().filter(|&size| size > 0)
    }

    /// Number of ranks of a torus of this shape.
    pub fn ranks(&self) -> u64 {
        self.sizes().fold(1, |ranks: u64, size| ranks.saturating_mul(size.into()))
    }

    fn parse(text: &str) -> Option<Self> {
        let sizes: Option<Vec<u32>> = text.split('x').map(|size| size.parse().ok()).collect();
        Self::new(&sizes?)
    }
}

impl fmt::Display for TorusShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.sizes().map(|size| size.to_string()).collect::<Vec<_>>().join("x"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for text in [
            "auto",
            "ring",
            "multi-ring:4",
            "halving-doubling",
            "tree",
            "direct",
            "shared-memory",
            "ps",
            "ps:4",
            "naive",
            "overlapped",
            "partitioned",
            "torus:8",
            "torus:4x4x2",
            "hierarchical:ps:ring",
            "hierarchical:ring:halving-doubling/8",
            "hierarchical:ps:2:multi-ring:3",
            "hierarchical:torus:2x2:tree/4",
            "hierarchical:multi-ring:2:ps",
            "in-network",
            "hierarchical:ring:in-network",
            "per-dimension",
            "per-dimension:4",
            "per-dimension:4/8hx16r",
            "themis:64",
            "themis:64/8hx16r@240000x23000",
        ] {
            let algorithm: Algorithm = text.parse().unwrap();
            assert_eq!(algorithm.to_string(), text);
            let json = serde_json::to_string(&algorithm).unwrap();
            assert_eq!(serde_json::from_str::<Algorithm>(&json).unwrap(), algorithm);
        }
    }

    #[test]
    fn one_server_has_one_name() {
        assert_eq!("ps:1".parse::<Algorithm>().unwrap().to_string(), "ps");
    }

    #[test]
    fn a_host_is_settled_once() {
        let open: Algorithm = "hierarchical:ps:ring".parse().unwrap();
        assert_eq!(open.with_host(8).to_string(), "hierarchical:ps:ring/8");
        assert_eq!(open.with_host(8).with_host(4), open.with_host(8));
        assert_eq!(open.with_host(0), open);
        assert_eq!(Algorithm::Ring.with_host(8), Algorithm::Ring);
    }

    #[test]
    fn nonsense_is_told_what_would_work() {
        let error = |text: &str| text.parse::<Algorithm>().unwrap_err();
        for text in ["", "rings", "ring:2", "tree:2", "auto:1", "Ring", " ring", "ring/8"] {
            let error = error(text);
            assert!(matches!(error, NameError::Unknown { .. }), "{text}: {error}");
            assert!(error.to_string().contains("halving-doubling"), "{error}");
        }
        for text in ["ps:", "ps:0", "ps:-1", "ps:99999999999", "ps:x", "ps:2:3"] {
            assert!(matches!(error(text), NameError::Servers { .. }), "{text}");
        }
        for text in ["multi-ring", "multi-ring:", "multi-ring:0", "multi-ring:257"] {
            assert!(matches!(error(text), NameError::Rings { .. }), "{text}");
        }
        for text in ["torus", "torus:", "torus:0", "torus:2x0", "torus:2xx2", "torus:1x1x1x1x1x1x1"]
        {
            assert!(matches!(error(text), NameError::Shape { .. }), "{text}");
        }
        for text in ["themis", "themis:", "themis:0", "per-dimension:257", "per-dimension:x/8r"] {
            assert!(matches!(error(text), NameError::Chunks { .. }), "{text}");
        }
        for text in ["themis:2/", "per-dimension/8", "per-dimension:2/0r"] {
            assert!(matches!(error(text), NameError::Grid { .. }), "{text}");
        }
        for text in ["hierarchical", "hierarchical:ring", "hierarchical:ring:ring:ring"] {
            assert!(matches!(error(text), NameError::Levels { .. }), "{text}");
        }
        for text in ["hierarchical:ring:ring/", "hierarchical:ring:ring/0", "hierarchical:ps:ps/x"]
        {
            assert!(matches!(error(text), NameError::Host { .. }), "{text}");
        }
        for text in ["hierarchical:auto:ring", "hierarchical:ring:hierarchical:ring:ring"] {
            assert!(matches!(error(text), NameError::Unknown { .. }), "{text}");
        }
        assert_eq!(
            error("hierarchical:ring:rnig").to_string().split(" (").next(),
            Some("unknown algorithm of one level 'rnig'")
        );
    }
}
