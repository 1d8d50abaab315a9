//! Collective algorithms as data: pure functions that return the steps of one rank.
//!
//! A [`Pattern`] defines the sender, receiver and chunks of every message in every round. It
//! contains no sizes, values or times: `comm` executes the steps on a transport, the simulator
//! times them, and [`symbolic`] proves them correct. Generating one rank's steps costs time linear
//! in their number; the steps of other ranks are never built.
//!
//! # Memory
//!
//! A rank has a **work buffer** that holds the whole vector, split into [`Pattern::chunks`] chunks
//! by [`chunk_range`]. For the kinds that operate on parts (reduce_scatter, all_gather, gather,
//! scatter, all_to_all) there are as many chunks as ranks, and part *i* is chunk *i* for every algorithm.
//! all_to_all requires parts of equal size. all_to_all and send_recv need an **output buffer** as
//! large as the work buffer; no other kind touches that buffer. The messages of a barrier are empty. The contents of an invalid chunk are unspecified.
//!
//! | kind | valid at the start | valid at the end |
//! |---|---|---|
//! | all_reduce | everything: the rank's contribution | everything: the reduction |
//! | reduce_scatter | everything: the rank's contribution | rank *i*: chunk *i* of the reduction |
//! | all_gather | rank *i*: chunk *i* | everything |
//! | broadcast | the root: everything | everything: the root's vector |
//! | reduce | everything: the rank's contribution | the root: everything, reduced |
//! | gather | rank *i*: chunk *i* | the root: everything |
//! | all_to_all | everything: chunk *j* is for rank *j* | the output: chunk *j* is from rank *j* |
//! | scatter | the root: everything | rank *i*: chunk *i* of the root's vector |
//! | send_recv | everything | the output: the vector of the rank before |
//! | barrier | nothing | nothing |
//!
//! # Execution
//!
//! A rank executes its steps in list order; rounds never decrease along the list. Within a round
//! all sends precede all receives. A round's messages may therefore be in flight at once, and a
//! rank that only starts sends never waits. [`Combine::Reduce`] takes effect in list order even if
//! messages arrive in another order, so a result never depends on timing.
//!
//! # Matching
//!
//! The *k*-th send from *a* to *b* matches the *k*-th receive at *b* from *a*. Both are in the same
//! round and name the same number of elements. A pair of ranks exchanges at most one message in
//! each direction per round. No rank sends to itself.
//!
//! # Shared memory
//!
//! If ranks share memory, a loan can replace a message: [`Action::Lend`] replaces the send and
//! [`Action::Read`] the receive, under the same rules of execution and matching. A rank reads a
//! peer's chunks after the peer has lent them, in the same round. The lender does not write to lent
//! chunks until the end of the round. It leaves the round only after every chunk it lent has been
//! read. A read therefore never races with a write, whatever the timing. Only lender and reader
//! wait for each other, and every rank knows from its own steps the peers it has to wait for.
//!
//! # Switches
//!
//! A reducing switch sums the chunks that ranks [offer](Action::Offer) to it. It returns the sum of
//! each chunk to the ranks that [take](Action::Take) it in the same round. Offers are placed like
//! sends and takes like receives. The step names the ranks that share the switch.
//!
//! # Streams
//!
//! Most algorithms have one stream of steps. If a pattern has [visits](Pattern::visits), the vector
//! passes through the dimensions of a grid in several streams that touch disjoint memory; the list
//! order is one valid execution order.
//!
//! # Order of summation
//!
//! Kinds supported by each algorithm, and the cases in which its reductions keep the canonical
//! order:
//!
//! | algorithm | kinds | canonical order |
//! |---|---|---|
//! | [`ring`] | all but send_recv | no |
//! | [`multi_ring`] | those that reduce, all_gather, broadcast | no |
//! | [`halving_doubling`] | those that reduce, all_gather, broadcast | powers of two |
//! | [`tree`] | all_reduce, broadcast, reduce | all_reduce |
//! | [`direct`], [`shared_memory`] | all; all but barrier | yes |
//! | [`parameter_server`] | all_reduce, broadcast, reduce | yes |
//! | [`naive`], [`overlapped`], [`one_shot`] | all_reduce | yes |
//! | [`bruck`] | all_gather, all_to_all, barrier | no sums |
//! | [`partitioned`] | all_reduce, reduce_scatter, all_gather | yes |
//! | [`torus`] | all_reduce, reduce_scatter, all_gather | no size above 2 |
//! | [`per_axis`] | all_reduce | no size above 2 |
//! | [`in_network`] | those that reduce, all_gather, broadcast | no |
//! | [`per_dimension`] | all_reduce, reduce_scatter, all_gather | baseline, no size above 2 unless halved |
//! | [`hierarchical`] | those that reduce, all_gather, broadcast, if both levels do | hosts of a power of two ranks, if both levels do |

mod algorithm;
pub mod bruck;
mod choose;
mod counts;
mod definition;
pub mod direct;
mod fabric;
mod fold;
mod grid;
pub mod halving_doubling;
pub mod hierarchical;
pub mod in_network;
mod method;
pub mod multi_ring;
pub mod naive;
mod names;
pub mod one_shot;
pub mod overlapped;
pub mod parameter_server;
pub mod partitioned;
pub mod per_axis;
pub mod per_dimension;
mod resolve;
pub mod ring;
mod ring_set;
pub mod shared_memory;
mod step;
pub mod symbolic;
pub mod themis;
pub mod torus;
pub mod tree;

pub use algorithm::{Algorithm, Packed};
pub use choose::CollectiveTimes;
pub use counts::Counts;
pub use definition::{AlgorithmDef, Hints, Rotation, Symmetric, Words};
pub use fabric::{Fabric, FabricDimension};
pub use fold::{CanonicalFold, canonical_fold};
pub use grid::{DimAlgorithm, Grid, GridDimension};
pub use method::{Ask, Library, Method};
pub use names::{CollectiveKind, NameError, Reduction, SummationOrder};
pub use per_dimension::MAX_CHUNKS;
pub use resolve::{CollectiveError, resolve};
pub use ring_set::{MAX_RINGS, RingSet};
pub use step::{Action, Chunking, Chunks, Combine, Peers, Step, chunk_range};
pub use themis::{ChunkOrder, Visit};
pub use torus::TorusShape;

use crate::units::Bytes;

/// Maximum group size for which steps are generated.
pub const MAX_RANKS: u32 = 1 << 20;

/// One collective of a group: kind, algorithm and order, independent of the vector size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pattern {
    kind: CollectiveKind,
    algorithm: Algorithm,
    order: SummationOrder,
    ranks: u32,
    root: u32,
}

impl Pattern {
    /// Resolves [`Algorithm::Auto`] and rejects unsupported combinations.
    ///
    /// Ranks and the root are indices within the group. The root is used by the kinds that have
    /// one, and is the first server of parameter servers; others ignore it.
    pub fn new(
        kind: CollectiveKind,
        algorithm: Algorithm,
        order: SummationOrder,
        ranks: u32,
        root: u32,
    ) -> Result<Self, CollectiveError> {
        let algorithm = resolve(kind, algorithm, ranks, order)?;
        if root >= ranks {
            return Err(CollectiveError::Root { kind, root, ranks });
        }
        Ok(Self { kind, algorithm, order, ranks, root })
    }

    /// Kind of collective.
    pub const fn kind(&self) -> CollectiveKind {
        self.kind
    }

    /// Algorithm; never [`Algorithm::Auto`].
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The order of summation.
    pub const fn order(&self) -> SummationOrder {
        self.order
    }

    /// The size of the group.
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The root's index within the group.
    pub const fn root(&self) -> u32 {
        self.root
    }

    /// Number of chunks the vector is split into: one per rank for kinds with parts.
    pub fn chunks(&self) -> u32 {
        use CollectiveKind::{
            AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter,
            Scatter, SendRecv,
        };
        match self.kind {
            ReduceScatter | AllGather | Gather | AllToAll | Scatter => self.ranks,
            SendRecv | Barrier => 1,
            AllReduce | Broadcast | Reduce => (self.algorithm.def().chunks)(self),
        }
    }

    /// Number of rounds, computed without generating the steps.
    pub fn rounds(&self) -> u32 {
        if self.ranks == 1 { 0 } else { (self.algorithm.def().rounds)(self) }
    }

    /// Collectives within one host and across hosts (one rank per host), if the algorithm has these
    /// levels.
    pub fn levels(&self) -> Option<(Self, Self)> {
        let Algorithm::Hierarchical { inner, outer, host } = self.algorithm else { return None };
        let (host, root) = (host?.get(), self.root);
        let (inner, outer) = (inner.algorithm(), outer.algorithm());
        let inside = Self { algorithm: inner, ranks: host, root: root % host, ..*self };
        let across =
            Self { algorithm: outer, ranks: self.ranks / host, root: root / host, ..*self };
        Some((inside, across))
    }

    /// Number of parameter servers: the ranks from the root on that serve.
    pub const fn servers(&self) -> u32 {
        match self.algorithm {
            Algorithm::ParameterServer { servers } => servers,
            _ => 0,
        }
    }

    /// Steps of rank `me`; empty for a rank outside the group.
    ///
    /// A group of one rank exchanges no messages; only all_to_all still copies its input to its
    /// output.
    pub fn steps(&self, me: u32) -> Vec<Step> {
        (self.algorithm.def().steps)(self, me)
    }

    /// Visits of every stream to the grid's dimensions, in order of their start; empty for an
    /// algorithm without streams. Each dimension serves one visit at a time.
    pub fn visits(&self) -> Vec<Visit> {
        match self.algorithm {
            Algorithm::PerDimension { chunks, order, grid: Some(grid) } => {
                themis::visits(self.kind, &grid, order, chunks)
            }
            _ => Vec::new(),
        }
    }

    /// Steps of rank `me` in one visit, with rounds counted from 0.
    pub fn visit_steps(&self, visit: &Visit, me: u32) -> Vec<Step> {
        match self.algorithm {
            Algorithm::PerDimension { chunks, grid: Some(grid), .. } => {
                per_dimension::visit_steps(&grid, visit, chunks, me)
            }
            _ => Vec::new(),
        }
    }

    /// Cost of the collective for a work buffer of `bytes` bytes, also for kinds in which a rank
    /// contributes only its part.
    ///
    /// Only the steps of the busiest ranks are counted, so this stays cheap for thousands of ranks.
    pub fn counts(&self, bytes: Bytes) -> Counts {
        Counts::of(self, bytes)
    }

    /// Bytes that all ranks together receive, read from others' memory and write to it. Counts the
    /// steps of every rank, which takes time in proportion to their number.
    pub fn total_bytes(&self, bytes: Bytes) -> Bytes {
        Counts::total(self, bytes)
    }

    /// Ranks among which every maximum occurs: bytes, messages per round, rounds.
    ///
    /// Contains few ranks if the others behave alike, so that counting and timing stay cheap.
    pub fn busiest(&self) -> Vec<u32> {
        counts::busiest(self)
    }
}

/// Returns true if rank `me` exists and the group is not too large; other ranks get no steps.
fn has_steps(ranks: u32, me: u32) -> bool {
    me < ranks && ranks <= MAX_RANKS
}

/// Distance of a rank from the root, counted around the group.
fn relative(rank: u32, root: u32, ranks: u32) -> u32 {
    (rank + ranks - root) % ranks
}

/// The greatest common divisor.
fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests;
