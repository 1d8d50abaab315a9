//! Selection of the algorithm of a collective: resolves `auto` and rejects unsupported requests.

use super::algorithm::{Algorithm, MAX_CHUNKS, MAX_RINGS, TorusShape};
use super::grid::{DimAlgorithm, Grid};
use super::themis::ChunkOrder;
use super::{CollectiveKind, Fabric, MAX_RANKS, SummationOrder, per_dimension};
use crate::units::Bytes;
use thiserror::Error;

/// Determines the algorithm that executes a collective.
///
/// [`Algorithm::Auto`] becomes the algorithm with the fewest rounds among those with the fewest
/// bytes per rank and no contention. That is halving-doubling for broadcast, reduce and
/// power-of-two rank counts, and the ring otherwise. Direct messages are chosen if only they keep
/// the canonical order or nothing needs forwarding. Any other algorithm is returned unchanged if it
/// supports the kind, in that order, on `ranks` ranks.
pub fn resolve(
    kind: CollectiveKind,
    algorithm: Algorithm,
    ranks: u32,
    order: SummationOrder,
) -> Result<Algorithm, CollectiveError> {
    if !(1..=MAX_RANKS).contains(&ranks) {
        return Err(CollectiveError::Ranks { kind, ranks });
    }
    if algorithm == Algorithm::Auto {
        return Ok(cheapest(kind, ranks, order, Bytes::ZERO, &Fabric::unknown()));
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

/// The cheapest algorithm for a vector of some bytes on a fabric. Today kind, rank count and order
/// alone decide.
pub(super) fn cheapest(
    kind: CollectiveKind,
    ranks: u32,
    order: SummationOrder,
    _bytes: Bytes,
    _fabric: &Fabric,
) -> Algorithm {
    use CollectiveKind::{
        AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, ReduceScatter,
    };
    let halves_evenly = ranks.is_power_of_two();
    let canonical = order == SummationOrder::Canonical && kind.reduces();
    match kind {
        Gather | AllToAll => Algorithm::Direct,
        Broadcast | Reduce if ranks <= 2 => Algorithm::Direct,
        _ if canonical && !halves_evenly => Algorithm::Direct,
        Broadcast | Reduce => Algorithm::HalvingDoubling,
        AllReduce | ReduceScatter | AllGather if halves_evenly => Algorithm::HalvingDoubling,
        AllReduce | ReduceScatter | AllGather => Algorithm::Ring,
    }
}

/// Names of the suitable algorithms among those that need only a rank count.
fn able(kind: CollectiveKind, ranks: u32, order: SummationOrder) -> String {
    let all = [
        Algorithm::Ring,
        Algorithm::MultiRing { rings: 2 },
        Algorithm::HalvingDoubling,
        Algorithm::Tree,
        Algorithm::Direct,
        Algorithm::SharedMemory,
        Algorithm::ParameterServer { servers: 1 },
        Algorithm::Naive,
        Algorithm::Overlapped,
        Algorithm::Partitioned,
    ];
    let able = all.into_iter().filter(|a| can_do(*a, kind) && keeps(*a, kind, ranks, order));
    able.map(|a| a.to_string()).collect::<Vec<_>>().join(", ")
}

/// Returns true if the algorithm implements the kind.
fn can_do(algorithm: Algorithm, kind: CollectiveKind) -> bool {
    use CollectiveKind::{
        AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, ReduceScatter,
    };
    match algorithm {
        Algorithm::Auto | Algorithm::Ring | Algorithm::Direct | Algorithm::SharedMemory => true,
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

/// Returns true if the algorithm keeps the order; with two ranks it always does: addition commutes.
fn keeps(algorithm: Algorithm, kind: CollectiveKind, ranks: u32, order: SummationOrder) -> bool {
    if order == SummationOrder::Free || !kind.reduces() || ranks <= 2 {
        return true;
    }
    match algorithm {
        Algorithm::Ring | Algorithm::MultiRing { .. } | Algorithm::InNetwork => false,
        Algorithm::HalvingDoubling => ranks.is_power_of_two(),
        // Reductions to a root use the trees of the free order.
        Algorithm::Tree => kind == CollectiveKind::AllReduce,
        Algorithm::Torus { shape } => shape.sizes().all(|size| size <= 2),
        Algorithm::PerDimension { order, grid, .. } => {
            let dimensions = grid.iter().flat_map(|grid| grid.dimensions());
            order == ChunkOrder::Baseline
                && dimensions.into_iter().all(|d| d.size <= 2 || d.way == DimAlgorithm::Halving)
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
        | Algorithm::SharedMemory
        | Algorithm::ParameterServer { .. }
        | Algorithm::Naive
        | Algorithm::Overlapped
        | Algorithm::Partitioned => true,
    }
}

/// Rejects an algorithm whose parameters do not fit the rank count.
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
        | Algorithm::SharedMemory
        | Algorithm::ParameterServer { .. }
        | Algorithm::Naive
        | Algorithm::Overlapped
        | Algorithm::Partitioned
        | Algorithm::Torus { .. }
        | Algorithm::InNetwork => Ok(()),
    }
}

/// Reason a requested collective is rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CollectiveError {
    /// The algorithm does not implement the kind.
    #[error("{algorithm} cannot do {kind}; what can: {able}")]
    Kind {
        /// Requested kind.
        kind: CollectiveKind,
        /// Requested algorithm.
        algorithm: Algorithm,
        /// Suitable algorithms.
        able: String,
    },
    /// The algorithm does not keep the canonical order.
    #[error("{algorithm} cannot do {kind} of {ranks} ranks in canonical order; what can: {able}")]
    Order {
        /// Requested kind.
        kind: CollectiveKind,
        /// Requested algorithm.
        algorithm: Algorithm,
        /// The size of the group.
        ranks: u32,
        /// Suitable algorithms.
        able: String,
    },
    /// The group is empty or exceeds the maximum size.
    #[error("{kind} of {ranks} ranks: a group has from 1 to {MAX_RANKS} ranks")]
    Ranks {
        /// Requested kind.
        kind: CollectiveKind,
        /// The size of the group.
        ranks: u32,
    },
    /// The root is not in the group.
    #[error("{kind}: root {root} is not one of the group's {ranks} ranks (0 to {})", ranks - 1)]
    Root {
        /// Requested kind.
        kind: CollectiveKind,
        /// The root's index.
        root: u32,
        /// The size of the group.
        ranks: u32,
    },
    /// There are no servers, or more servers than ranks.
    #[error(
        "ps:{servers} in a group of {ranks}: servers are ranks of the group, from 1 to {ranks}"
    )]
    Servers {
        /// Requested number of servers.
        servers: u32,
        /// The size of the group.
        ranks: u32,
    },
    /// The number of rings is zero or exceeds the maximum.
    #[error("multi-ring:{rings}: there can be from 1 to {MAX_RINGS} rings")]
    Rings {
        /// Requested number of rings.
        rings: u32,
    },
    /// The product of the torus sizes differs from the group size.
    #[error("torus:{shape} has {} places, but the group has {ranks} ranks", .shape.ranks())]
    Shape {
        /// The sizes of the torus.
        shape: TorusShape,
        /// The size of the group.
        ranks: u32,
    },
    /// The number of ranks per host is not given.
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
    /// The ranks cannot be distributed evenly over hosts.
    #[error("{ranks} ranks cannot share hosts evenly, {host} to each; give a divisor of {ranks}")]
    Host {
        /// Number of ranks per host.
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
    /// The number of chunks is zero or exceeds the maximum.
    #[error("there can be from 1 to {MAX_CHUNKS} chunks, not {chunks}")]
    Chunks {
        /// Requested number of chunks.
        chunks: u32,
    },
    /// The dimensions that the group spans are not given.
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
    /// The product of the grid sizes differs from the group size.
    #[error("a grid of {grid} has {} places, but the group has {ranks} ranks", .grid.ranks())]
    Grid {
        /// The dimensions.
        grid: Grid,
        /// The size of the group.
        ranks: u32,
    },
    /// The size of a halved dimension is not a power of two, or the grid has too many dimensions
    /// for halving.
    #[error(
        "a grid of {grid} cannot be halved: h needs a power of two and at most {} dimensions; use r or d",
        Grid::MAX_WITH_HALVING
    )]
    Halving {
        /// The dimensions.
        grid: Grid,
    },
    /// The group's ranks do not fill the dimensions they span.
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
    /// The group spans more dimensions than a grid supports.
    #[error(
        "{algorithm} supports at most {} dimensions, and the group spans {dimensions}",
        Grid::MAX_DIMENSIONS
    )]
    ManyDimensions {
        /// The algorithm.
        algorithm: Algorithm,
        /// Number of dimensions the group spans.
        dimensions: usize,
    },
    /// No switch of the dimension supports in-network reduction.
    #[error(
        "{algorithm} needs in-network reduction, which {dimension} lacks: set in_network_reduction = true in the cluster file if its switch has it"
    )]
    NoReduction {
        /// The algorithm.
        algorithm: Algorithm,
        /// The dimension.
        dimension: String,
    },
}

/// Example number of ranks per host: the largest divisor that a machine is likely to have.
fn example(ranks: u32) -> u32 {
    (1..=8).rev().find(|host| ranks.is_multiple_of(*host)).unwrap_or(1)
}
