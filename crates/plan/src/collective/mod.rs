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

mod counts;
pub mod direct;
mod fold;
pub mod halving_doubling;
mod names;
pub mod parameter_server;
pub mod ring;
mod step;
pub mod symbolic;

pub use counts::Counts;
pub use fold::{CanonicalFold, canonical_fold};
pub use names::{Algorithm, CollectiveKind, NameError, Order, Reduction};
pub use step::{Action, Chunks, Combine, Cut, Step, chunk_range};

use crate::units::Bytes;
use thiserror::Error;

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
        match (self.kind, self.algorithm) {
            (ReduceScatter | AllGather | Gather | AllToAll, _) => self.ranks,
            (_, Algorithm::HalvingDoubling) => halving_doubling::core(self.ranks),
            (_, Algorithm::ParameterServer { servers }) => servers,
            (Broadcast | Reduce, Algorithm::Ring) => ring::chain_chunks(self.ranks),
            (Broadcast | Reduce, Algorithm::Direct) => 1,
            (_, Algorithm::Ring | Algorithm::Direct | Algorithm::Auto) => self.ranks,
        }
    }

    /// The steps of one rank; none for a rank outside the group.
    ///
    /// A group of one exchanges no messages; only all_to_all still copies its input to its output.
    pub fn steps(&self, me: u32) -> Vec<Step> {
        use Algorithm::{Auto, Direct, HalvingDoubling, ParameterServer, Ring};
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
            (HalvingDoubling, AllReduce) => halving_doubling::all_reduce(ranks, me),
            (HalvingDoubling, ReduceScatter) => halving_doubling::reduce_scatter(ranks, me),
            (HalvingDoubling, AllGather) => halving_doubling::all_gather(ranks, me),
            (HalvingDoubling, Broadcast) => halving_doubling::broadcast(ranks, me, root),
            (HalvingDoubling, Reduce) => halving_doubling::reduce(ranks, me, root),
            (Direct, AllReduce) => direct::all_reduce(ranks, me, order),
            (Direct, ReduceScatter) => direct::reduce_scatter(ranks, me, order),
            (Direct, AllGather) => direct::all_gather(ranks, me),
            (Direct, Broadcast) => direct::broadcast(ranks, me, root),
            (Direct, Reduce) => direct::reduce(ranks, me, root, order),
            (Direct, Gather) => direct::gather(ranks, me, root),
            (Direct, AllToAll) => direct::all_to_all(ranks, me),
            (ParameterServer { servers }, AllReduce) => {
                parameter_server::all_reduce(ranks, me, root, servers, order)
            }
            (ParameterServer { servers }, Reduce) => {
                parameter_server::reduce(ranks, me, root, servers, order)
            }
            (ParameterServer { servers }, Broadcast) => {
                parameter_server::broadcast(ranks, me, root, servers)
            }
            (Auto, _)
            | (HalvingDoubling, Gather | AllToAll)
            | (ParameterServer { .. }, ReduceScatter | AllGather | Gather | AllToAll) => {
                unreachable!("`resolve` refuses {kind} by {algorithm}")
            }
        }
    }

    /// What the collective costs for a vector of so many bytes: the work buffer's size, also where
    /// a rank brings only its part.
    ///
    /// The steps of the busiest ranks are counted, so this stays cheap for thousands of ranks.
    pub fn counts(&self, bytes: Bytes) -> Counts {
        Counts::of(self, bytes)
    }
}

/// Settles which algorithm carries out a collective.
///
/// [`Algorithm::Auto`] becomes the one with the fewest rounds among those with the fewest bytes per
/// rank and no crowding: halving-doubling where the rank count is a power of two, the ring where it
/// is not, and direct messages where only those keep the canonical order or nothing needs forwarding.
/// Any other algorithm is returned as it is if it can do the kind, in that order, on so many ranks.
pub fn resolve(
    kind: CollectiveKind,
    algorithm: Algorithm,
    ranks: u32,
    order: Order,
) -> Result<Algorithm, CollectiveError> {
    if !(1..=MAX_RANKS).contains(&ranks) {
        return Err(CollectiveError::Ranks { kind, ranks });
    }
    if algorithm == Algorithm::Auto {
        return Ok(automatic(kind, ranks, order));
    }
    let able = || {
        let single = Algorithm::ParameterServer { servers: 1 };
        let all = [Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::Direct, single];
        let able = all.into_iter().filter(|a| can_do(*a, kind) && keeps(*a, kind, ranks, order));
        able.map(|a| a.to_string()).collect::<Vec<_>>().join(", ")
    };
    if !can_do(algorithm, kind) {
        return Err(CollectiveError::Kind { kind, algorithm, able: able() });
    }
    if !keeps(algorithm, kind, ranks, order) {
        return Err(CollectiveError::Order { kind, algorithm, ranks, able: able() });
    }
    match algorithm {
        Algorithm::ParameterServer { servers } if !(1..=ranks).contains(&servers) => {
            Err(CollectiveError::Servers { servers, ranks })
        }
        _ => Ok(algorithm),
    }
}

fn automatic(kind: CollectiveKind, ranks: u32, order: Order) -> Algorithm {
    use CollectiveKind::{
        AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, ReduceScatter,
    };
    let halves_evenly = ranks.is_power_of_two();
    let canonical = order == Order::Canonical && kind.reduces();
    match kind {
        Gather | AllToAll => Algorithm::Direct,
        Broadcast | Reduce if ranks <= 2 => Algorithm::Direct,
        _ if canonical && !halves_evenly => Algorithm::Direct,
        Broadcast | Reduce => Algorithm::HalvingDoubling,
        AllReduce | ReduceScatter | AllGather if halves_evenly => Algorithm::HalvingDoubling,
        AllReduce | ReduceScatter | AllGather => Algorithm::Ring,
    }
}

/// Whether the algorithm is written for the kind.
fn can_do(algorithm: Algorithm, kind: CollectiveKind) -> bool {
    use CollectiveKind::{
        AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, ReduceScatter,
    };
    match algorithm {
        Algorithm::Auto | Algorithm::Ring | Algorithm::Direct => true,
        Algorithm::HalvingDoubling => match kind {
            AllReduce | ReduceScatter | AllGather | Broadcast | Reduce => true,
            Gather | AllToAll => false,
        },
        Algorithm::ParameterServer { .. } => match kind {
            AllReduce | Reduce | Broadcast => true,
            ReduceScatter | AllGather | Gather | AllToAll => false,
        },
    }
}

/// Whether the algorithm keeps the order; addition commutes, so two ranks cannot get it wrong.
fn keeps(algorithm: Algorithm, kind: CollectiveKind, ranks: u32, order: Order) -> bool {
    if order == Order::Free || !kind.reduces() || ranks <= 2 {
        return true;
    }
    match algorithm {
        Algorithm::Ring => false,
        Algorithm::HalvingDoubling => ranks.is_power_of_two(),
        Algorithm::Auto | Algorithm::Direct | Algorithm::ParameterServer { .. } => true,
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

/// Why a collective cannot be done as asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CollectiveError {
    /// The algorithm does not exist for the kind.
    #[error("{algorithm} cannot do {kind}; what can: {able}")]
    Kind {
        /// What should have been done.
        kind: CollectiveKind,
        /// How it should have been done.
        algorithm: Algorithm,
        /// The algorithms that can.
        able: String,
    },
    /// The algorithm sums in an order of its own.
    #[error("{algorithm} cannot do {kind} of {ranks} ranks in canonical order; what can: {able}")]
    Order {
        /// What should have been done.
        kind: CollectiveKind,
        /// How it should have been done.
        algorithm: Algorithm,
        /// By how many.
        ranks: u32,
        /// The algorithms that can.
        able: String,
    },
    /// The group is empty or absurdly large.
    #[error("{kind} of {ranks} ranks: a group has from 1 to {MAX_RANKS} ranks")]
    Ranks {
        /// What should have been done.
        kind: CollectiveKind,
        /// By how many.
        ranks: u32,
    },
    /// The root is not in the group.
    #[error("{kind}: root {root} is not one of the group's {ranks} ranks (0 to {})", ranks - 1)]
    Root {
        /// What should have been done.
        kind: CollectiveKind,
        /// The root's index.
        root: u32,
        /// The size of the group.
        ranks: u32,
    },
    /// There are no servers, or more than ranks.
    #[error(
        "ps:{servers} in a group of {ranks}: servers are ranks of the group, from 1 to {ranks}"
    )]
    Servers {
        /// The servers asked for.
        servers: u32,
        /// The size of the group.
        ranks: u32,
    },
}

#[cfg(test)]
mod tests;
