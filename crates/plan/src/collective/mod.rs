//! Collective algorithms as data: pure functions to the steps of one rank.
//!
//! A [`Pattern`] says which rank sends which chunks to whom in which round. It knows neither sizes
//! nor values nor time: `comm` interprets the steps on wires, the simulator times them, and
//! [`symbolic`] proves them right. The steps of one rank cost no more than they are many; those of
//! the others are never built.
//!
//! # Memory
//!
//! A rank has a **work buffer** that holds the whole vector, cut into [`Pattern::chunks`] chunks by
//! [`chunk_range`]. For the kinds that deal in parts (reduce_scatter, all_gather, gather,
//! all_to_all) there are as many chunks as ranks and part *i* is chunk *i*, whatever the algorithm.
//! all_to_all needs its parts to have equal sizes and an **output buffer** as large as the work
//! buffer, which no other kind touches. A chunk that is not valid holds anything at all.
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
//!
//! # Execution
//!
//! A rank carries out its steps in the order of the list; rounds never decrease along it. Within a
//! round all sends stand before all receives, so that a round's messages may be under way at once
//! and a rank that only starts sending never waits. [`Combine::Reduce`] takes effect in the order
//! of the list even if messages arrive in another, so a result never depends on timing.
//!
//! # Matching
//!
//! The *k*-th send from *a* to *b* matches the *k*-th receive at *b* from *a*. Both stand in the
//! same round and name equally many elements, and a pair of ranks exchanges at most one message in
//! each direction in a round. No rank sends to itself.
//!
//! # Shared memory
//!
//! Where ranks share memory, a loan can take the place of a message: [`Action::Lend`] that of the
//! send, [`Action::Read`] that of the receive, under the same rules of execution and matching. A rank
//! reads a peer's chunks once the peer has lent them, in the same round. From then on until the end
//! of the round the lender does not write to them, and it leaves the round, for the next one or for
//! good, only after all that it lent in it has been read. So a read never meets a write, whatever the
//! timing; nothing but lender and reader wait for each other, and every rank knows from its own
//! steps whom it has to wait for.
//!
//! # Switches
//!
//! A switch that sums takes what ranks [offer](Action::Offer) to it and hands the sum of each chunk to
//! those that [take](Action::Take) it in the same round. Offers stand where sends stand and takes where
//! receives stand; which ranks meet at a switch is part of the step.
//!
//! # Streams
//!
//! Most algorithms have one stream of steps. Where a pattern has [visits](Pattern::visits), the vector goes
//! through the dimensions of a grid in several streams that touch different memory; the order of the list
//! is one in which they may be carried out.
//!
//! # Order of summation
//!
//! What every algorithm can do, and which keep the canonical order where they reduce:
//!
//! | algorithm | kinds | canonical order |
//! |---|---|---|
//! | [`ring`], [`multi_ring`] | all; all but gather and all_to_all | no |
//! | [`halving_doubling`] | all but gather and all_to_all | powers of two |
//! | [`tree`] | all_reduce, broadcast, reduce | all_reduce |
//! | [`direct`], [`read_reduce`] | all | yes |
//! | [`parameter_server`] | all_reduce, broadcast, reduce | yes |
//! | [`naive`], [`overlapped`] | all_reduce | yes |
//! | [`partitioned`] | all_reduce, reduce_scatter, all_gather | yes |
//! | [`torus`] | all_reduce, reduce_scatter, all_gather | no size above 2 |
//! | [`in_network`] | all but gather and all_to_all | no |
//! | [`per_dimension`] | all_reduce, reduce_scatter, all_gather | baseline, no size above 2 unless halved |
//! | [`hierarchical`] | what both levels can, but gather and all_to_all | hosts of a power of two ranks, if both levels do |

mod algorithm;
mod counts;
pub mod direct;
mod fabric;
mod fold;
mod grid;
pub mod halving_doubling;
pub mod hierarchical;
pub mod in_network;
pub mod multi_ring;
pub mod naive;
mod names;
pub mod overlapped;
pub mod parameter_server;
pub mod partitioned;
pub mod per_dimension;
pub mod read_reduce;
mod resolve;
pub mod ring;
mod step;
pub mod symbolic;
pub mod themis;
pub mod torus;
pub mod tree;

pub use algorithm::{Algorithm, Level, MAX_CHUNKS, MAX_RINGS, TorusShape};
pub use counts::Counts;
pub use fabric::{Fabric, FabricDimension};
pub use fold::{CanonicalFold, canonical_fold};
pub use grid::{Grid, GridDimension, Way};
pub use names::{CollectiveKind, NameError, Order, Reduction};
pub use resolve::{CollectiveError, resolve};
pub use step::{Action, Chunks, Combine, Cut, Peers, Step, chunk_range};
pub use themis::{ChunkOrder, Visit};

use crate::units::Bytes;

/// The largest group whose steps can be written down.
pub const MAX_RANKS: u32 = 1 << 20;

/// One collective of a group: what is done and how, for vectors of any size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pattern {
    kind: CollectiveKind,
    algorithm: Algorithm,
    order: Order,
    ranks: u32,
    root: u32,
}

impl Pattern {
    /// Chooses the algorithm if that is left to us, and refuses what cannot be done.
    ///
    /// Ranks and the root are counted within the group. The root matters to the kinds that have
    /// one, and is the first server of parameter servers; others ignore it.
    pub fn new(
        kind: CollectiveKind,
        algorithm: Algorithm,
        order: Order,
        ranks: u32,
        root: u32,
    ) -> Result<Self, CollectiveError> {
        let algorithm = resolve(kind, algorithm, ranks, order)?;
        if root >= ranks {
            return Err(CollectiveError::Root { kind, root, ranks });
        }
        Ok(Self { kind, algorithm, order, ranks, root })
    }

    /// What is done.
    pub const fn kind(&self) -> CollectiveKind {
        self.kind
    }

    /// How it is done; never [`Algorithm::Auto`].
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The order of summation.
    pub const fn order(&self) -> Order {
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

    /// Into how many chunks the vector is cut.
    pub fn chunks(&self) -> u32 {
        use CollectiveKind::{AllGather, AllToAll, Broadcast, Gather, Reduce, ReduceScatter};
        let Self { kind, algorithm, order, ranks, root: _ } = *self;
        match (kind, algorithm) {
            (_, Algorithm::Hierarchical { .. }) => {
                self.levels().map_or(ranks, |(inner, outer)| inner.chunks() * outer.chunks())
            }
            (ReduceScatter | AllGather | Gather | AllToAll, _) => ranks,
            (_, Algorithm::HalvingDoubling) => halving_doubling::core(ranks),
            (_, Algorithm::Tree) => tree::chunks(kind, ranks, order),
            (_, Algorithm::ParameterServer { servers }) => servers,
            (Broadcast | Reduce, Algorithm::Ring | Algorithm::MultiRing { .. }) => {
                ring::chain_chunks(ranks)
            }
            (Broadcast | Reduce, Algorithm::Direct | Algorithm::InNetwork)
            | (Broadcast, Algorithm::ReadReduce) => 1,
            (_, Algorithm::Naive | Algorithm::Overlapped) => 1,
            (
                _,
                Algorithm::Ring
                | Algorithm::MultiRing { .. }
                | Algorithm::Direct
                | Algorithm::ReadReduce
                | Algorithm::Partitioned
                | Algorithm::Torus { .. }
                | Algorithm::InNetwork
                | Algorithm::PerDimension { .. }
                | Algorithm::Auto,
            ) => ranks,
        }
    }

    /// From the first message to the last, without writing any steps down.
    pub fn rounds(&self) -> u32 {
        use CollectiveKind::{AllReduce, Broadcast, Reduce};
        let Self { kind, algorithm, order, ranks, root: _ } = *self;
        if ranks == 1 {
            return 0;
        }
        let both_ways = if kind == AllReduce { 2 } else { 1 };
        let surplus = u32::from(!ranks.is_power_of_two());
        match (algorithm, kind) {
            (Algorithm::Ring | Algorithm::MultiRing { .. }, Broadcast | Reduce) => {
                ranks - 2 + ring::chain_chunks(ranks)
            }
            (Algorithm::Ring | Algorithm::MultiRing { .. } | Algorithm::Partitioned, _) => {
                both_ways * (ranks - 1)
            }
            (Algorithm::HalvingDoubling, Broadcast | Reduce) => 2 * ranks.ilog2() + surplus,
            (Algorithm::HalvingDoubling, _) => both_ways * ranks.ilog2() + 2 * surplus,
            (Algorithm::Tree, _) => tree::rounds(kind, ranks, order),
            (Algorithm::ReadReduce, Reduce) => 2,
            (Algorithm::ParameterServer { servers: 2.. }, _) => 2,
            (
                Algorithm::Auto
                | Algorithm::Direct
                | Algorithm::ReadReduce
                | Algorithm::ParameterServer { .. },
                _,
            ) => both_ways,
            (Algorithm::Naive, _) => ranks - 1,
            (Algorithm::Overlapped | Algorithm::InNetwork, _) => 1,
            (Algorithm::PerDimension { .. }, _) => {
                let ends = self.visits().into_iter().map(|visit| visit.rounds.end);
                ends.max().unwrap_or(0)
            }
            (Algorithm::Torus { shape }, _) => {
                both_ways * shape.sizes().map(|size| size - 1).sum::<u32>()
            }
            (Algorithm::Hierarchical { .. }, _) => {
                let rounds = |(inner, outer): (Self, Self)| {
                    hierarchical::inner_rounds(&inner) + outer.rounds()
                };
                self.levels().map_or(0, rounds)
            }
        }
    }

    /// The collectives of one host and of one rank of every host, if the algorithm has these levels.
    pub fn levels(&self) -> Option<(Self, Self)> {
        let Algorithm::Hierarchical { inner, outer, host } = self.algorithm else { return None };
        let (host, root) = (host?.get(), self.root);
        let inside = Self { algorithm: inner.into(), ranks: host, root: root % host, ..*self };
        let across =
            Self { algorithm: outer.into(), ranks: self.ranks / host, root: root / host, ..*self };
        Some((inside, across))
    }

    /// The steps of one rank; none for a rank outside the group.
    ///
    /// A group of one exchanges no messages; only all_to_all still copies its input to its output.
    pub fn steps(&self, me: u32) -> Vec<Step> {
        use Algorithm::{
            Auto, Direct, HalvingDoubling, Hierarchical, InNetwork, MultiRing, Naive, Overlapped,
            ParameterServer, Partitioned, PerDimension, ReadReduce, Ring, Torus, Tree,
        };
        use CollectiveKind::{
            AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, ReduceScatter,
        };
        let Self { kind, algorithm, order, ranks, root } = *self;
        match (algorithm, kind) {
            (Ring, AllReduce) => ring::all_reduce(ranks, me),
            (Ring, ReduceScatter) => ring::reduce_scatter(ranks, me),
            (Ring, AllGather) => ring::all_gather(ranks, me),
            (Ring, Broadcast) => ring::broadcast(ranks, me, root),
            (Ring, Reduce) => ring::reduce(ranks, me, root),
            (Ring, Gather) => ring::gather(ranks, me, root),
            (Ring, AllToAll) => ring::all_to_all(ranks, me),
            (MultiRing { rings }, AllReduce) => multi_ring::all_reduce(ranks, me, rings),
            (MultiRing { rings }, ReduceScatter) => multi_ring::reduce_scatter(ranks, me, rings),
            (MultiRing { rings }, AllGather) => multi_ring::all_gather(ranks, me, rings),
            (MultiRing { rings }, Broadcast) => multi_ring::broadcast(ranks, me, root, rings),
            (MultiRing { rings }, Reduce) => multi_ring::reduce(ranks, me, root, rings),
            (HalvingDoubling, AllReduce) => halving_doubling::all_reduce(ranks, me),
            (HalvingDoubling, ReduceScatter) => halving_doubling::reduce_scatter(ranks, me),
            (HalvingDoubling, AllGather) => halving_doubling::all_gather(ranks, me),
            (HalvingDoubling, Broadcast) => halving_doubling::broadcast(ranks, me, root),
            (HalvingDoubling, Reduce) => halving_doubling::reduce(ranks, me, root),
            (Tree, AllReduce) => tree::all_reduce(ranks, me, order),
            (Tree, Broadcast) => tree::broadcast(ranks, me, root),
            (Tree, Reduce) => tree::reduce(ranks, me, root),
            (Direct, AllReduce) => direct::all_reduce(ranks, me, order),
            (Direct, ReduceScatter) => direct::reduce_scatter(ranks, me, order),
            (Direct, AllGather) => direct::all_gather(ranks, me),
            (Direct, Broadcast) => direct::broadcast(ranks, me, root),
            (Direct, Reduce) => direct::reduce(ranks, me, root, order),
            (Direct, Gather) => direct::gather(ranks, me, root),
            (Direct, AllToAll) => direct::all_to_all(ranks, me),
            (ReadReduce, AllReduce) => read_reduce::all_reduce(ranks, me, order),
            (ReadReduce, ReduceScatter) => read_reduce::reduce_scatter(ranks, me, order),
            (ReadReduce, AllGather) => read_reduce::all_gather(ranks, me),
            (ReadReduce, Broadcast) => read_reduce::broadcast(ranks, me, root),
            (ReadReduce, Reduce) => read_reduce::reduce(ranks, me, root, order),
            (ReadReduce, Gather) => read_reduce::gather(ranks, me, root),
            (ReadReduce, AllToAll) => read_reduce::all_to_all(ranks, me),
            (ParameterServer { servers }, AllReduce) => {
                parameter_server::all_reduce(ranks, me, root, servers, order)
            }
            (ParameterServer { servers }, Reduce) => {
                parameter_server::reduce(ranks, me, root, servers, order)
            }
            (ParameterServer { servers }, Broadcast) => {
                parameter_server::broadcast(ranks, me, root, servers)
            }
            (Naive, AllReduce) => naive::all_reduce(ranks, me),
            (Overlapped, AllReduce) => overlapped::all_reduce(ranks, me),
            (Partitioned, AllReduce) => partitioned::all_reduce(ranks, me, order),
            (Partitioned, ReduceScatter) => partitioned::reduce_scatter(ranks, me, order),
            (Partitioned, AllGather) => partitioned::all_gather(ranks, me),
            (Torus { shape }, AllReduce) => torus::all_reduce(shape, me),
            (Torus { shape }, ReduceScatter) => torus::reduce_scatter(shape, me),
            (Torus { shape }, AllGather) => torus::all_gather(shape, me),
            (Hierarchical { .. }, AllReduce) => self.in_levels(hierarchical::all_reduce, me),
            (Hierarchical { .. }, ReduceScatter) => {
                self.in_levels(hierarchical::reduce_scatter, me)
            }
            (Hierarchical { .. }, AllGather) => self.in_levels(hierarchical::all_gather, me),
            (Hierarchical { .. }, Broadcast) => self.in_levels(hierarchical::broadcast, me),
            (Hierarchical { .. }, Reduce) => self.in_levels(hierarchical::reduce, me),
            (InNetwork, AllReduce) => in_network::all_reduce(ranks, me),
            (InNetwork, ReduceScatter) => in_network::reduce_scatter(ranks, me),
            (InNetwork, AllGather) => in_network::all_gather(ranks, me),
            (InNetwork, Broadcast) => in_network::broadcast(ranks, me, root),
            (InNetwork, Reduce) => in_network::reduce(ranks, me, root),
            (PerDimension { grid, chunks, .. }, AllReduce | ReduceScatter | AllGather) => grid
                .map_or_else(Vec::new, |grid| {
                    per_dimension::steps(&grid, &self.visits(), chunks, me)
                }),
            (Auto, _)
            | (
                HalvingDoubling | MultiRing { .. } | Hierarchical { .. } | InNetwork,
                Gather | AllToAll,
            )
            | (Tree | ParameterServer { .. }, ReduceScatter | AllGather | Gather | AllToAll)
            | (
                Partitioned | Torus { .. } | PerDimension { .. },
                Broadcast | Reduce | Gather | AllToAll,
            )
            | (
                Naive | Overlapped,
                ReduceScatter | AllGather | Broadcast | Reduce | Gather | AllToAll,
            ) => unreachable!("`resolve` refuses {kind} by {algorithm}"),
        }
    }

    /// The visits of every stream to the dimensions of a grid, in the order in which they start; none for
    /// an algorithm that knows no streams. Each dimension serves one visit after the other.
    pub fn visits(&self) -> Vec<Visit> {
        match self.algorithm {
            Algorithm::PerDimension { chunks, order, grid: Some(grid) } => {
                themis::visits(self.kind, &grid, order, chunks)
            }
            _ => Vec::new(),
        }
    }

    /// The steps of one rank in one visit, whose first round is numbered 0.
    pub fn visit_steps(&self, visit: &Visit, me: u32) -> Vec<Step> {
        match self.algorithm {
            Algorithm::PerDimension { chunks, grid: Some(grid), .. } => {
                per_dimension::visit_steps(&grid, visit, chunks, me)
            }
            _ => Vec::new(),
        }
    }

    fn in_levels(&self, steps: fn(&Self, &Self, u32) -> Vec<Step>, me: u32) -> Vec<Step> {
        self.levels().map_or_else(Vec::new, |(inner, outer)| steps(&inner, &outer, me))
    }

    /// What the collective costs for a vector of so many bytes: the work buffer's size, also where
    /// a rank brings only its part.
    ///
    /// The steps of the busiest ranks are counted, so this stays cheap for thousands of ranks.
    pub fn counts(&self, bytes: Bytes) -> Counts {
        Counts::of(self, bytes)
    }

    /// Ranks among which the most of everything is found: bytes, messages of a round, rounds.
    ///
    /// Few of many where the others do alike, so that counting and timing stay cheap.
    pub fn busiest(&self) -> Vec<u32> {
        counts::busiest(self)
    }
}

/// Whether a rank has anything to do; the algorithms write no steps for a rank that does not exist.
fn has_steps(ranks: u32, me: u32) -> bool {
    me < ranks && ranks <= MAX_RANKS
}

/// How many places a rank stands after the root, going around the group.
fn relative(rank: u32, root: u32, ranks: u32) -> u32 {
    (rank + ranks - root) % ranks
}

/// The greatest common divisor.
fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests;
