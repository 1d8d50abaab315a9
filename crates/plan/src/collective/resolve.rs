//! Selection of the algorithm of a collective: resolves `auto` and rejects unsupported requests.

use super::{Algorithm, CollectiveKind, MAX_RANKS, Pattern, SummationOrder};
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
        return Ok(by_rounds(kind, ranks, order));
    }
    if !can_do(algorithm, kind) {
        let able = able(kind, ranks, order);
        return Err(CollectiveError::Kind { kind, algorithm, able });
    }
    let pattern = Pattern { kind, algorithm, order, ranks, root: 0 };
    (algorithm.def().check)(&pattern)?;
    if !keeps_order(&pattern) {
        let able = able(kind, ranks, order);
        return Err(CollectiveError::Order { kind, algorithm, ranks, able });
    }
    Ok(algorithm)
}

/// The algorithm with the fewest rounds among those with the fewest bytes per rank, for a machine of
/// which nothing is known.
pub(super) fn by_rounds(kind: CollectiveKind, ranks: u32, order: SummationOrder) -> Algorithm {
    use CollectiveKind::{
        AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter, Scatter,
        SendRecv,
    };
    let halves_evenly = ranks.is_power_of_two();
    let canonical = order == SummationOrder::Canonical && kind.reduces();
    match kind {
        Gather | AllToAll | Scatter | SendRecv => Algorithm::Direct,
        Barrier => Algorithm::Bruck,
        Broadcast | Reduce if ranks <= 2 => Algorithm::Direct,
        _ if canonical && !halves_evenly => Algorithm::Direct,
        Broadcast | Reduce => Algorithm::HalvingDoubling,
        AllReduce | ReduceScatter | AllGather if halves_evenly => Algorithm::HalvingDoubling,
        AllReduce | ReduceScatter | AllGather => Algorithm::Ring,
    }
}

/// Names of the suitable algorithms among those that need only a rank count.
fn able(kind: CollectiveKind, ranks: u32, order: SummationOrder) -> String {
    let able = Algorithm::for_any_group().filter(|&algorithm| {
        let pattern = Pattern { kind, algorithm, order, ranks, root: 0 };
        can_do(algorithm, kind) && keeps_order(&pattern)
    });
    able.map(|a| a.to_string()).collect::<Vec<_>>().join(", ")
}

/// Returns true if the algorithm, and each of its levels, implements the kind.
fn can_do(algorithm: Algorithm, kind: CollectiveKind) -> bool {
    algorithm.def().kinds.contains(&kind)
        && algorithm.levels().is_none_or(|levels| levels.iter().all(|&level| can_do(level, kind)))
}

/// Returns true if the sums are in the order of the pattern; those of two ranks always are, because
/// addition commutes.
pub(super) fn keeps_order(pattern: &Pattern) -> bool {
    let fixed = pattern.order == SummationOrder::Canonical && pattern.kind.reduces();
    !fixed || pattern.ranks <= 2 || (pattern.algorithm.def().is_canonical)(pattern)
}

/// Reason a requested collective is rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CollectiveError {
    /// The algorithm does not implement the kind.
    #[error("{algorithm} does not support {kind}; use one of {able}")]
    Kind {
        /// Requested kind.
        kind: CollectiveKind,
        /// Requested algorithm.
        algorithm: Algorithm,
        /// Suitable algorithms.
        able: String,
    },
    /// The algorithm does not keep the canonical order.
    #[error(
        "{algorithm} does not support {kind} of {ranks} ranks in canonical order; use one of {able}"
    )]
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
    /// The parameter of the algorithm does not fit the group, or the group does not fit it.
    #[error("{0}")]
    Unfit(String),
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
