//! The table entry of an algorithm: all that planning, simulation and execution know about it.

use super::resolve::CollectiveError;
use super::step::{Chunks, Step};
use super::{CollectiveKind, Pattern, counts};
use std::fmt;

/// Numbers that form an algorithm's parameter, unused ones 0.
pub type Words = [u32; 6];

/// Entry of an algorithm. Functions take a pattern of that algorithm; its parameter need not fit.
#[derive(Clone, Copy)]
pub struct AlgorithmDef {
    /// Name, without its parameter.
    pub name: &'static str,
    /// Number in messages.
    pub number: u8,
    /// Text form of the parameter, if there is one.
    pub(super) parameter: Option<Parameter>,
    /// A parameter that suits a group of any size; `None` if none does, or if the algorithm needs
    /// more than a group.
    pub(super) suggested: Option<Words>,
    /// Kinds that it implements.
    pub(super) kinds: &'static [CollectiveKind],
    /// Returns true if reductions of three ranks or more keep the canonical order.
    pub(super) is_canonical: fn(&Pattern) -> bool,
    /// Rejects a parameter that does not fit the rank count.
    pub(super) check: fn(&Pattern) -> Result<(), CollectiveError>,
    /// Number of chunks, for kinds without parts.
    pub(super) chunks: fn(&Pattern) -> u32,
    /// Number of rounds of two ranks or more.
    pub(super) rounds: fn(&Pattern) -> u32,
    /// Steps of one rank.
    pub(super) steps: fn(&Pattern, u32) -> Vec<Step>,
    /// Ranks that are counted.
    pub(super) counted: Counted,
    /// Ranks around the edges, where the busiest are; see [`counts::at_edges`].
    pub(super) edges: fn(&Pattern) -> Vec<u32>,
    /// All_reduce inside a host, split in the middle.
    pub(super) inner: Inner,
    /// Facts about its messages that engines use.
    pub hints: Hints,
}

/// Text form of an algorithm's parameter: one word, which does not begin with a letter.
#[derive(Clone, Copy)]
pub(super) struct Parameter {
    /// Name and parameter as in the list of known algorithms.
    pub(super) form: &'static str,
    /// Values that are accepted, with an example.
    pub(super) needs: &'static str,
    /// Parses the word, if there is one.
    pub(super) parse: fn(Option<&str>) -> Option<Words>,
    /// The word, unless the parameter is the default.
    pub(super) print: fn(Words) -> Option<String>,
}

/// Ranks whose steps are counted; see [`Pattern::busiest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// The ranks around the edges: all others behave like them.
    Edges,
    /// All ranks, unless there are too many steps: several rings, dimensions or levels have
    /// different edges, where counts are exact up to the rounding of chunk sizes.
    AllIfSmall,
    /// All ranks: loads are irregular, but a rank has few steps.
    All,
}

/// An all_reduce as the inner level of a hierarchy. In the middle every chunk has been summed within
/// the host and has its owners.
#[derive(Clone, Copy)]
pub(super) struct Inner {
    /// Steps, if they differ from those of the algorithm alone: every owner needs a part in between.
    pub(super) steps: Option<fn(&Pattern, u32) -> Vec<Step>>,
    /// Number of rounds.
    pub(super) rounds: fn(&Pattern) -> u32,
    /// True if every rank ends with everything in the middle, so that nothing is left to distribute.
    pub(super) is_replicated: bool,
    /// Consecutive chunks that a rank of two or more owns in the middle.
    pub(super) owned: fn(&Pattern, u32) -> Chunks,
}

/// Facts about an algorithm's messages.
#[derive(Clone, Copy, Debug)]
pub struct Hints {
    /// True if messages go around rings through consecutive ranks, so that one member of a host sends
    /// to the next host.
    pub is_ring: bool,
    /// Ranks that behave alike.
    pub symmetric: Symmetric,
    /// Rotations of the ranks that leave the steps of rootless kinds unchanged.
    pub rotation: fn(&Pattern) -> Rotation,
    /// True if a sender does not touch what it has sent until the peers must have answered, so that
    /// messages may be sent without copying them.
    pub sends_in_place: bool,
    /// True if pieces of a large vector may follow each other through the rounds: every link is busy
    /// in every round, with one peer at a time.
    pub has_pipeline: bool,
}

/// Ranks of an algorithm that behave alike, up to the root and the ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Symmetric {
    /// All.
    All,
    /// All, for rootless kinds of a power of two of ranks.
    PowersOfTwo,
    /// None.
    None,
}

/// Symmetry of the steps under rotation of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// None.
    None,
    /// Ranks at equal distances in rank order exchange alike.
    Ranks,
    /// The same, and messages load every axis of a torus alike.
    Axes,
}

/// Kinds that reduce, all_gather and broadcast.
pub(super) const NO_GATHER: &[CollectiveKind] = &[
    CollectiveKind::AllReduce,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllGather,
    CollectiveKind::Broadcast,
    CollectiveKind::Reduce,
];

/// All kinds but send_recv, whose only message needs no way around.
pub(super) const AROUND: &[CollectiveKind] = &[
    CollectiveKind::AllReduce,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllGather,
    CollectiveKind::Broadcast,
    CollectiveKind::Reduce,
    CollectiveKind::Gather,
    CollectiveKind::AllToAll,
    CollectiveKind::Scatter,
    CollectiveKind::Barrier,
];

/// All kinds but the barrier, in which there is nothing to read.
pub(super) const WITH_DATA: &[CollectiveKind] = &[
    CollectiveKind::AllReduce,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllGather,
    CollectiveKind::Broadcast,
    CollectiveKind::Reduce,
    CollectiveKind::Gather,
    CollectiveKind::AllToAll,
    CollectiveKind::Scatter,
    CollectiveKind::SendRecv,
];

/// Kinds that consist of reducing and gathering parts.
pub(super) const PARTS: &[CollectiveKind] =
    &[CollectiveKind::AllReduce, CollectiveKind::ReduceScatter, CollectiveKind::AllGather];

/// Kinds that move whole vectors.
pub(super) const WHOLE: &[CollectiveKind] =
    &[CollectiveKind::AllReduce, CollectiveKind::Broadcast, CollectiveKind::Reduce];

impl AlgorithmDef {
    /// An algorithm without a parameter for all kinds in any order, with as many chunks as ranks,
    /// one round, no steps, and no facts about its messages.
    pub(super) const BASE: Self = Self {
        name: "",
        number: u8::MAX,
        parameter: None,
        suggested: Some([0; 6]),
        kinds: &CollectiveKind::ALL,
        is_canonical: |_| true,
        check: |_| Ok(()),
        chunks: Pattern::ranks,
        rounds: |_| 1,
        steps: |_, _| Vec::new(),
        counted: Counted::Edges,
        edges: |p| counts::around(p.ranks(), &[0, p.root()]),
        inner: Inner {
            steps: None,
            rounds: Pattern::rounds,
            is_replicated: false,
            owned: |_, me| Chunks::one(me),
        },
        hints: Hints {
            is_ring: false,
            symmetric: Symmetric::All,
            rotation: |_| Rotation::None,
            sends_in_place: false,
            has_pipeline: false,
        },
    };

    /// Name with the form of its parameter.
    pub(super) fn form(&self) -> &'static str {
        self.parameter.map_or(self.name, |parameter| parameter.form)
    }
}

impl fmt::Debug for AlgorithmDef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Number of times that a kind crosses the group: all_reduce gathers what it has scattered.
pub(super) const fn ways(pattern: &Pattern) -> u32 {
    match pattern.kind() {
        CollectiveKind::AllReduce => 2,
        _ => 1,
    }
}
