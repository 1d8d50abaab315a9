//! Which algorithm carries out a collective: the choice where it is left to us, and the refusal of
//! what cannot be done.

use super::algorithm::{Algorithm, MAX_CHUNKS, MAX_RINGS, TorusShape};
use super::grid::{Grid, Way};
use super::themis::ChunkOrder;
use super::{CollectiveKind, MAX_RANKS, Order, per_dimension};
use thiserror::Error;

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
    if !can_do(algorithm, kind) {
        let able = able(kind, ranks, order);
        return Err(CollectiveError::Kind { kind, algorithm, able });
    }
    check_parameters(algorithm, ranks)?;
    if !keeps(algorithm, kind, ranks, order) {
        let able = able(kind, ranks, order);
        return Err(CollectiveError::Order { kind, algorithm, ranks, able });
    }
    Ok(algorithm)
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

/// The names of those that can, of the algorithms that need no more than a rank count.
fn able(kind: CollectiveKind, ranks: u32, order: Order) -> String {
    let all = [
        Algorithm::Ring,
        Algorithm::MultiRing { rings: 2 },
        Algorithm::HalvingDoubling,
        Algorithm::Tree,
        Algorithm::Direct,
        Algorithm::ReadReduce,
        Algorithm::ParameterServer { servers: 1 },
        Algorithm::Naive,
        Algorithm::Overlapped,
        Algorithm::Partitioned,
    ];
    let able = all.into_iter().filter(|a| can_do(*a, kind) && keeps(*a, kind, ranks, order));
    able.map(|a| a.to_string()).collect::<Vec<_>>().join(", ")
}

/// Whether the algorithm is written for the kind.
fn can_do(algorithm: Algorithm, kind: CollectiveKind) -> bool {
    use CollectiveKind::{
        AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, ReduceScatter,
    };
    match algorithm {
        Algorithm::Auto | Algorithm::Ring | Algorithm::Direct | Algorithm::ReadReduce => true,
        Algorithm::HalvingDoubling | Algorithm::MultiRing { .. } | Algorithm::InNetwork => {
            match kind {
                AllReduce | ReduceScatter | AllGather | Broadcast | Reduce => true,
                Gather | AllToAll => false,
            }
        }
        Algorithm::Tree | Algorithm::ParameterServer { .. } => match kind {
            AllReduce | Reduce | Broadcast => true,
            ReduceScatter | AllGather | Gather | AllToAll => false,
        },
        Algorithm::Partitioned | Algorithm::Torus { .. } => match kind {
            AllReduce | ReduceScatter | AllGather => true,
            Broadcast | Reduce | Gather | AllToAll => false,
        },
        Algorithm::PerDimension { .. } => per_dimension::can_do(kind),
        Algorithm::Naive | Algorithm::Overlapped => match kind {
            AllReduce => true,
            ReduceScatter | AllGather | Broadcast | Reduce | Gather | AllToAll => false,
        },
        Algorithm::Hierarchical { inner, outer, host: _ } => {
            [inner, outer].into_iter().all(|level| can_do(level.into(), kind))
                && match kind {
                    AllReduce | ReduceScatter | AllGather | Broadcast | Reduce => true,
                    Gather | AllToAll => false,
                }
        }
    }
}

/// Whether the algorithm keeps the order; addition commutes, so two ranks cannot get it wrong.
fn keeps(algorithm: Algorithm, kind: CollectiveKind, ranks: u32, order: Order) -> bool {
    if order == Order::Free || !kind.reduces() || ranks <= 2 {
        return true;
    }
    match algorithm {
        Algorithm::Ring | Algorithm::MultiRing { .. } | Algorithm::InNetwork => false,
        Algorithm::HalvingDoubling => ranks.is_power_of_two(),
        // Towards a root, the trees are those of the free order.
        Algorithm::Tree => kind == CollectiveKind::AllReduce,
        Algorithm::Torus { shape } => shape.sizes().all(|size| size <= 2),
        Algorithm::PerDimension { order, grid, .. } => {
            let dimensions = grid.iter().flat_map(|grid| grid.dimensions());
            order == ChunkOrder::Baseline
                && dimensions.into_iter().all(|d| d.size <= 2 || d.way == Way::Halving)
        }
        Algorithm::Hierarchical { inner, outer, host } => {
            let host = host.map_or(1, |host| host.get());
            let hosts = ranks / host;
            (host.is_power_of_two() || hosts == 1)
                && keeps(inner.into(), kind, host, order)
                && keeps(outer.into(), kind, hosts, order)
        }
        Algorithm::Auto
        | Algorithm::Direct
        | Algorithm::ReadReduce
        | Algorithm::ParameterServer { .. }
        | Algorithm::Naive
        | Algorithm::Overlapped
        | Algorithm::Partitioned => true,
    }
}

/// Refuses an algorithm whose parameters do not suit the rank count.
fn check_parameters(algorithm: Algorithm, ranks: u32) -> Result<(), CollectiveError> {
    match algorithm {
        Algorithm::ParameterServer { servers } if !(1..=ranks).contains(&servers) => {
            Err(CollectiveError::Servers { servers, ranks })
        }
        Algorithm::MultiRing { rings } if !(1..=MAX_RINGS).contains(&rings) => {
            Err(CollectiveError::Rings { rings })
        }
        Algorithm::Torus { shape } if shape.ranks() != u64::from(ranks) => {
            Err(CollectiveError::Shape { shape, ranks })
        }
        Algorithm::Hierarchical { inner, outer, host } => {
            let host = host.ok_or(CollectiveError::NoHost { algorithm, ranks })?.get();
            if !ranks.is_multiple_of(host) {
                return Err(CollectiveError::Host { host, ranks });
            }
            check_parameters(inner.into(), host)?;
            check_parameters(outer.into(), ranks / host)
        }
        Algorithm::PerDimension { chunks, .. } if !(1..=MAX_CHUNKS).contains(&chunks) => {
            Err(CollectiveError::Chunks { chunks })
        }
        Algorithm::PerDimension { grid, .. } => {
            let grid = grid.ok_or(CollectiveError::OpenGrid { algorithm, ranks })?;
            if grid.ranks() != u64::from(ranks) {
                return Err(CollectiveError::Grid { grid, ranks });
            }
            if grid.is_possible() { Ok(()) } else { Err(CollectiveError::Halving { grid }) }
        }
        Algorithm::Auto
        | Algorithm::Ring
        | Algorithm::MultiRing { .. }
        | Algorithm::HalvingDoubling
        | Algorithm::Tree
        | Algorithm::Direct
        | Algorithm::ReadReduce
        | Algorithm::ParameterServer { .. }
        | Algorithm::Naive
        | Algorithm::Overlapped
        | Algorithm::Partitioned
        | Algorithm::Torus { .. }
        | Algorithm::InNetwork => Ok(()),
    }
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
    /// There are no rings, or absurdly many.
    #[error("multi-ring:{rings}: there can be from 1 to {MAX_RINGS} rings")]
    Rings {
        /// The rings asked for.
        rings: u32,
    },
    /// The torus has not as many places as the group has ranks.
    #[error("torus:{shape} has {} places, but the group has {ranks} ranks", .shape.ranks())]
    Shape {
        /// The sizes of the torus.
        shape: TorusShape,
        /// The size of the group.
        ranks: u32,
    },
    /// Nobody has said how many ranks share a host.
    #[error(
        "{algorithm} needs to know how many of the {ranks} ranks share a host; write it behind a \
         slash, such as {algorithm}/{}", example(*.ranks)
    )]
    NoHost {
        /// The algorithm.
        algorithm: Algorithm,
        /// The size of the group.
        ranks: u32,
    },
    /// The ranks cannot be dealt out to hosts evenly.
    #[error("{ranks} ranks cannot share hosts evenly, {host} to each; give a divisor of {ranks}")]
    Host {
        /// The ranks of a host.
        host: u32,
        /// The size of the group.
        ranks: u32,
    },
    /// Hosts have different numbers of the group's ranks.
    #[error("{ranks} ranks do not share hosts evenly; use as many of each host")]
    UnevenHosts {
        /// The size of the group.
        ranks: u32,
    },
    /// There are no chunks, or absurdly many.
    #[error("there can be from 1 to {MAX_CHUNKS} chunks, not {chunks}")]
    Chunks {
        /// The chunks asked for.
        chunks: u32,
    },
    /// Nobody has said which dimensions the group spans.
    #[error(
        "{algorithm} needs to know the dimensions of the {ranks} ranks; name a cluster, or write them \
         behind a slash, such as {algorithm}/{ranks}r"
    )]
    OpenGrid {
        /// The algorithm.
        algorithm: Algorithm,
        /// The size of the group.
        ranks: u32,
    },
    /// The grid has not as many places as the group has ranks.
    #[error("a grid of {grid} has {} places, but the group has {ranks} ranks", .grid.ranks())]
    Grid {
        /// The dimensions.
        grid: Grid,
        /// The size of the group.
        ranks: u32,
    },
    /// A dimension that is halved has no power of two of ranks, or the grid too many dimensions for that.
    #[error(
        "a grid of {grid} cannot be halved: h needs a power of two and at most {} dimensions; use r or d",
        Grid::MAX_WITH_HALVING
    )]
    Halving {
        /// The dimensions.
        grid: Grid,
    },
    /// The group's ranks do not fill the dimensions that they span.
    #[error(
        "{algorithm} needs ranks that fill a grid of the cluster's dimensions in order; these {ranks} ranks \
         do not"
    )]
    NoGrid {
        /// The algorithm.
        algorithm: Algorithm,
        /// The size of the group.
        ranks: u32,
    },
    /// The group spans more dimensions than a grid can have.
    #[error(
        "{algorithm} goes through at most {} dimensions, and the group spans {dimensions}",
        Grid::MAX_DIMENSIONS
    )]
    ManyDimensions {
        /// The algorithm.
        algorithm: Algorithm,
        /// How many the group spans.
        dimensions: usize,
    },
    /// No switch there can sum.
    #[error(
        "{algorithm} needs a switch that sums, and {dimension} has none: say in_network_reduction = true \
         in the cluster's file if it has"
    )]
    NoReduction {
        /// The algorithm.
        algorithm: Algorithm,
        /// The dimension.
        dimension: String,
    },
}

/// A number of ranks that could share a host: the largest divisor that a machine is likely to have.
fn example(ranks: u32) -> u32 {
    (1..=8).rev().find(|host| ranks.is_multiple_of(*host)).unwrap_or(1)
}
