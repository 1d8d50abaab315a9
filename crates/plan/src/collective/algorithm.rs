//! Algorithms of collectives: the table, and their names.

use super::definition::{AlgorithmDef, Words};
use super::grid::Grid;
use super::names::NameError;
use super::ring_set::RingSet;
use super::themis::ChunkOrder;
use super::torus::TorusShape;
use super::{
    bruck, direct, halving_doubling, hierarchical, in_network, multi_ring, naive, one_shot,
    overlapped, parameter_server, partitioned, per_axis, per_dimension, ring, shared_memory, torus,
    tree,
};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

/// Generates the algorithms from one row each: name, parameter if it has one, entry.
macro_rules! algorithms {
    ($($(#[$doc:meta])* $name:ident $({ $(#[$about:meta])* $field:ident: $type:ty })? = $def:expr;)*) => {
        /// Algorithm of a collective.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub enum Algorithm {
            /// The algorithm that [`resolve`](fn@super::resolve) picks by kind, rank count and order.
            Auto,
            $($(#[$doc])* $name $({ $(#[$about])* $field: $type })?,)*
            /// One algorithm inside each host and one between hosts; see
            /// [`hierarchical`](super::hierarchical).
            Hierarchical {
                /// The algorithm inside a host.
                inner: Packed,
                /// The algorithm between hosts.
                outer: Packed,
                /// Number of consecutive ranks of the group that share a host. `None` leaves it open
                /// until code that knows the cluster calls [`Algorithm::with_host`].
                host: Option<NonZeroU32>,
            },
            /// One dimension of a grid after the other, in pipelined chunks; see
            /// [`per_dimension`](super::per_dimension).
            PerDimension {
                /// Number of chunks, from 1 to [`MAX_CHUNKS`](super::MAX_CHUNKS).
                chunks: u32,
                /// Order of the dimensions for each chunk.
                order: ChunkOrder,
                /// The dimensions that the group spans. `None` leaves them open until code that
                /// knows the cluster calls [`Fabric::resolve`](super::Fabric::resolve).
                grid: Option<Grid>,
            },
        }

        /// Entries of the algorithms that can be a level of a hierarchy.
        const TABLE: &[AlgorithmDef] = &[$($def),*];

        impl Algorithm {
            /// Entry in the table.
            pub const fn def(self) -> &'static AlgorithmDef {
                match self {
                    Self::Auto => &AUTO,
                    $(Self::$name { .. } => &$def,)*
                    Self::Hierarchical { .. } => &hierarchical::DEF,
                    Self::PerDimension { .. } => &per_dimension::DEF,
                }
            }

            /// Number and parameter; `None` for an algorithm with levels or with open parameters.
            pub fn pack(self) -> Option<Packed> {
                let parameter = match self {
                    $(Self::$name $({ $field })? => {
                        #[allow(unused_mut)]
                        let mut words = Words::default();
                        $($field.store(&mut words);)?
                        words
                    })*
                    Self::Auto | Self::Hierarchical { .. } | Self::PerDimension { .. } => return None,
                };
                Some(Packed { number: self.def().number, parameter })
            }
        }

        impl Packed {
            fn unpack(self) -> Option<Algorithm> {
                $(if self.number == $def.number {
                    return Some(Algorithm::$name $({ $field: <$type>::load(self.parameter)? })?);
                })*
                None
            }
        }
    };
}

algorithms! {
    /// Chunks travel around a ring of neighbours; see [`ring`](super::ring).
    Ring = ring::DEF;
    /// Several rings in different orders share the vector; see [`multi_ring`](super::multi_ring).
    MultiRing {
        /// How many rings, and where they run.
        rings: RingSet
    } = multi_ring::DEF;
    /// Recursive halving and doubling; see [`halving_doubling`](super::halving_doubling).
    HalvingDoubling = halving_doubling::DEF;
    /// Two complementary binary trees; see [`tree`](super::tree).
    Tree = tree::DEF;
    /// Every rank exchanges with every other at once; see [`direct`](super::direct).
    Direct = direct::DEF;
    /// Ranks read each other's memory; see [`shared_memory`](super::shared_memory).
    SharedMemory = shared_memory::DEF;
    /// Some ranks own shards of the vector; see [`parameter_server`](super::parameter_server).
    ParameterServer {
        /// Number of servers; server *s* owns chunk *s*.
        servers: u32
    } = parameter_server::DEF;
    /// Ranks take turns in sending whole vectors to all others; see [`naive`](super::naive).
    Naive = naive::DEF;
    /// Whole vectors are sent to all ranks, every rank one at a time; see
    /// [`overlapped`](super::overlapped).
    Overlapped = overlapped::DEF;
    /// Whole vectors are sent to all ranks at once; see [`one_shot`](super::one_shot).
    OneShot = one_shot::DEF;
    /// Every rank reduces one part, one message at a time; see [`partitioned`](super::partitioned).
    Partitioned = partitioned::DEF;
    /// One dimension of a torus after the other; see [`torus`](super::torus).
    Torus {
        /// The sizes of the dimensions, whose product is the rank count.
        shape: TorusShape
    } = torus::DEF;
    /// The whole vector along one axis of a torus after the other; see [`per_axis`](super::per_axis).
    PerAxis {
        /// The sizes of the axes, whose product is the rank count.
        shape: TorusShape
    } = per_axis::DEF;
    /// Parts move by powers of two; see [`bruck`](super::bruck).
    Bruck = bruck::DEF;
    /// A switch reduces; see [`in_network`](super::in_network).
    InNetwork = in_network::DEF;
}

const AUTO: AlgorithmDef =
    AlgorithmDef { name: "auto", number: 254, suggested: None, ..AlgorithmDef::BASE };

/// An algorithm as a number and a parameter: its form in messages, and as a level of a hierarchy.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Packed {
    number: u8,
    parameter: Words,
}

impl Packed {
    /// The algorithm with this number and parameter, if there is one.
    pub fn new(number: u8, parameter: Words) -> Option<Self> {
        Self { number, parameter }.unpack()?.pack()
    }

    /// Number of the algorithm.
    pub const fn number(self) -> u8 {
        self.number
    }

    /// Parameter of the algorithm.
    pub const fn parameter(self) -> Words {
        self.parameter
    }

    /// The algorithm.
    pub fn algorithm(self) -> Algorithm {
        self.unpack().expect("checked when it was packed")
    }
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.algorithm().fmt(f)
    }
}

impl Algorithm {
    /// One algorithm inside hosts and one between them, for a number of ranks per host that is still
    /// open; `None` if one of them cannot be a level.
    pub fn hierarchical(inner: Self, outer: Self) -> Option<Self> {
        let has_hosts =
            |level| matches!(level, Self::MultiRing { rings } if rings.host().is_some());
        if has_hosts(inner) || has_hosts(outer) {
            return None;
        }
        Some(Self::Hierarchical { inner: inner.pack()?, outer: outer.pack()?, host: None })
    }

    /// Sets the number of consecutive ranks of the group that share a host, if the algorithm needs
    /// it and it is open. It stays open if `ranks` is 0.
    pub fn with_host(self, ranks: u32) -> Self {
        match self {
            Self::Hierarchical { inner, outer, host: None } => {
                Self::Hierarchical { inner, outer, host: NonZeroU32::new(ranks) }
            }
            complete => complete,
        }
    }

    /// Algorithms inside hosts and between them, if it has these levels.
    pub fn levels(self) -> Option<[Self; 2]> {
        match self {
            Self::Hierarchical { inner, outer, .. } => Some([inner.algorithm(), outer.algorithm()]),
            _ => None,
        }
    }

    /// Algorithms that need nothing but a group, each with a parameter that suits any.
    pub fn for_any_group() -> impl Iterator<Item = Self> {
        TABLE.iter().filter_map(|def| {
            Some(Packed { number: def.number, parameter: def.suggested? }.algorithm())
        })
    }

    /// All algorithms with the forms of their parameters, separated by commas.
    pub fn known() -> String {
        format!("auto, {}, hierarchical:INNER:OUTER, per-dimension:C, themis:C", levels())
    }
}

/// The algorithms that can be a level of a hierarchy.
fn levels() -> String {
    TABLE.iter().map(AlgorithmDef::form).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let def = self.def();
        match *self {
            Self::Hierarchical { host, .. } => {
                let [inner, outer] = self.levels().unwrap_or([Self::Auto; 2]);
                let host = host.map_or(String::new(), |host| format!("/{host}"));
                f.pad(&format!("hierarchical:{inner}:{outer}{host}"))
            }
            Self::PerDimension { chunks, order, grid } => {
                let name = match (order, chunks) {
                    (ChunkOrder::Baseline, 1) => "per-dimension".to_owned(),
                    (ChunkOrder::Baseline, _) => format!("per-dimension:{chunks}"),
                    (ChunkOrder::Themis, _) => format!("themis:{chunks}"),
                };
                f.pad(&grid.map_or(name.clone(), |grid| format!("{name}/{grid}")))
            }
            flat => {
                let word = def.parameter.zip(flat.pack());
                let word = word.and_then(|(of, packed)| (of.print)(packed.parameter));
                match word {
                    Some(word) => f.pad(&format!("{}:{word}", def.name)),
                    None => f.pad(def.name),
                }
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
        if let Some(algorithm) = per_dimension::parse(text) {
            return algorithm;
        }
        let mut words = text.split(':');
        let found = take(&mut words)?.map(Packed::algorithm);
        match (found, words.next()) {
            (Some(found), None) => Ok(found),
            (found, _) => Err(match found.and_then(|found| found.def().parameter) {
                Some(of) => NameError::Parameter { text: text.to_owned(), needs: of.needs },
                None => NameError::Unknown {
                    what: "collective algorithm",
                    text: text.to_owned(),
                    known: Self::known(),
                },
            }),
        }
    }
}

/// Consumes the words of one algorithm: its name, and its parameter if it has one. Returns `None`
/// for an unknown name.
fn take<'t>(
    words: &mut (impl Iterator<Item = &'t str> + Clone),
) -> Result<Option<Packed>, NameError> {
    let Some(name) = words.next() else { return Ok(None) };
    let Some(def) = TABLE.iter().find(|def| def.name == name) else { return Ok(None) };
    let number = def.number;
    let Some(form) = def.parameter else {
        return Ok(Some(Packed { number, parameter: Words::default() }));
    };
    // Names start with a letter and parameters do not, so `ps:ring` is two levels.
    let word = words.clone().next().filter(|word| !word.starts_with(char::is_alphabetic));
    let parameter = (form.parse)(word).ok_or_else(|| NameError::Parameter {
        text: word.map_or(name.to_owned(), |word| format!("{name}:{word}")),
        needs: form.needs,
    })?;
    if word.is_some() {
        words.next();
    }
    Ok(Some(Packed { number, parameter }))
}

fn hierarchical(text: &str) -> Result<Algorithm, NameError> {
    let wrong = |needs| NameError::Parameter { text: text.to_owned(), needs };
    let (both, host) = match text.split_once('/') {
        None => (text, None),
        Some((both, host)) => {
            (both, Some(host.parse().map_err(|_| wrong(hierarchical::NEEDS_HOST))?))
        }
    };
    let mut words = both.split(':').skip(1).peekable();
    let mut level = || match words.peek().copied() {
        None => Err(wrong(hierarchical::NEEDS_LEVELS)),
        Some(word) => take(&mut words)?.ok_or_else(|| NameError::Unknown {
            what: "algorithm of one level",
            text: word.to_owned(),
            known: levels(),
        }),
    };
    let (inner, outer) = (level()?, level()?);
    match words.next() {
        None => Ok(Algorithm::Hierarchical { inner, outer, host }),
        Some(_) => Err(wrong(hierarchical::NEEDS_LEVELS)),
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

/// A parameter as words.
trait Field: Sized {
    fn store(self, words: &mut Words);
    fn load(words: Words) -> Option<Self>;
}

impl Field for u32 {
    fn store(self, words: &mut Words) {
        words[0] = self;
    }

    fn load(words: Words) -> Option<Self> {
        Some(words[0])
    }
}

impl Field for RingSet {
    fn store(self, words: &mut Words) {
        *words = self.words();
    }

    fn load(words: Words) -> Option<Self> {
        Self::of_words(words)
    }
}

impl Field for TorusShape {
    fn store(self, words: &mut Words) {
        *words = self.words();
    }

    fn load(words: Words) -> Option<Self> {
        Self::of_words(words)
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
            "multi-ring:4/8",
            "multi-ring:3/4@0213,1032",
            "halving-doubling",
            "tree",
            "direct",
            "shared-memory",
            "ps",
            "ps:4",
            "naive",
            "overlapped",
            "one-shot",
            "partitioned",
            "torus:8",
            "torus:4x4x2",
            "per-axis:4x4x2",
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
    fn numbers_and_names_are_used_once() {
        for (at, def) in TABLE.iter().enumerate() {
            let other = |other: &AlgorithmDef| def.number == other.number || def.name == other.name;
            assert!(!TABLE[..at].iter().chain([&AUTO]).any(other), "{def:?}");
            let zero = Packed { number: def.number, parameter: Words::default() };
            let named = zero.unpack().is_none_or(|algorithm| algorithm.def().name == def.name);
            assert!(named, "{def:?}");
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
            assert!(error(text).to_string().contains("a number of servers"), "{text}");
        }
        for text in
            ["multi-ring", "multi-ring:", "multi-ring:0", "multi-ring:257", "multi-ring:2/0"]
        {
            assert!(error(text).to_string().contains("a number of rings"), "{text}");
        }
        for text in ["torus", "torus:", "torus:0", "torus:2x0", "torus:2xx2", "torus:1x1x1x1x1x1x1"]
        {
            assert!(error(text).to_string().contains("such as torus:4x4x2"), "{text}");
        }
        for text in ["themis", "themis:", "themis:0", "per-dimension:257", "per-dimension:x/8r"] {
            assert!(error(text).to_string().contains("a number of chunks"), "{text}");
        }
        for text in ["themis:2/", "per-dimension/8", "per-dimension:2/0r"] {
            assert!(error(text).to_string().contains("the sizes of its dimensions"), "{text}");
        }
        for text in ["hierarchical", "hierarchical:ring", "hierarchical:ring:ring:ring"] {
            assert!(error(text).to_string().contains("an inner and an outer"), "{text}");
        }
        for text in ["hierarchical:ring:ring/", "hierarchical:ring:ring/0", "hierarchical:ps:ps/x"]
        {
            assert!(error(text).to_string().contains("ranks per host"), "{text}");
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
