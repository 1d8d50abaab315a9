//! A collective on a network, in ASTRA-sim's terms, and reasons for rejecting one.

use thiserror::Error;

/// One ASTRA-sim run: a single collective over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Link model for concurrent messages.
    pub backend: Backend,
    /// The collective.
    pub collective: Collective,
    /// Size of each rank's buffer; for an all-gather, of its shard.
    pub bytes: u64,
    /// The network, innermost dimension first.
    pub dims: Vec<Dimension>,
    /// Algorithm per dimension, or one over all ranks.
    pub algorithms: Algorithms,
    /// Number of chunks of the collective (`preferred-dataset-splits`).
    pub splits: u32,
    /// Maximum number of chunks in flight per dimension (`active-chunks-per-dimension`).
    pub active_chunks: u32,
    /// Use of several dimensions by an all-reduce.
    pub optimization: Optimization,
    /// Time per packet at a rank before it is sent or counts as received.
    pub endpoint_delay_ns: u64,
    /// Local memory bandwidth in 10⁹ bytes per second; a reduction makes three passes.
    pub local_mem_gbps: f64,
}

impl Case {
    /// Number of ranks; `u64::MAX` on overflow.
    pub fn ranks(&self) -> u64 {
        self.dims.iter().fold(1, |product: u64, dim| product.saturating_mul(dim.size.into()))
    }
}

/// One dimension of the network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dimension {
    /// Topology of its ranks.
    pub kind: Kind,
    /// Number of ranks along it.
    pub size: u32,
    /// Link bandwidth in GiB per second (ASTRA-sim's files call it GB/s).
    pub bandwidth_gibps: f64,
    /// Latency per hop, in addition to the transfer time.
    pub latency_ns: f64,
}

/// Link model for concurrent messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Every message is carried as if it were alone.
    CongestionUnaware,
    /// Messages are carried one after the other. One dimension only.
    CongestionAware,
}

/// Kind of collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Every rank gets the sum.
    AllReduce,
    /// Every rank gets every shard.
    AllGather,
    /// Every rank gets its shard of the sum.
    ReduceScatter,
    /// Every rank gets its shard of each rank's data.
    AllToAll,
}

/// Topology of the ranks along a dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Each rank is linked to its two neighbours; messages take the shorter direction.
    Ring,
    /// Each rank is linked to one switch: two hops to any rank.
    Switch,
    /// Each rank is linked to every other: one hop.
    FullyConnected,
}

/// Assignment of algorithms to dimensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Algorithms {
    /// One algorithm per dimension.
    PerDimension(Vec<Algorithm>),
    /// One algorithm over all ranks in rank order, regardless of dimensions: `oneRing`,
    /// `oneDirect`, `oneHalvingDoubling`.
    OverAll(Algorithm),
}

/// Collective algorithm within a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Every packet is sent to the next rank.
    Ring,
    /// Packets are sent to every other rank, at most `window` at a time, or all at once.
    Direct {
        /// Maximum number of packets in flight.
        window: Option<u32>,
    },
    /// Packets are sent to the rank at distance 1, 2, 4…; and back for an all-reduce.
    HalvingDoubling,
    /// Up and down one of two trees, alternately. Always performs an all-reduce.
    DoubleBinaryTree,
}

/// Use of several dimensions by an all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Optimization {
    /// A whole all-reduce in each dimension.
    Baseline,
    /// Reduce-scatter up to the last dimension, all-reduce there, all-gather back down.
    LocalBwAware,
}

/// Reason that a case cannot be simulated.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AstraError {
    /// A value that ASTRA-sim itself rejects, divides by, or waits for without end.
    #[error("{field} is {found}; {remedy}")]
    Value {
        /// Name of the field.
        field: String,
        /// The given value.
        found: String,
        /// A value that would work.
        remedy: &'static str,
    },
    /// The congestion-aware backend supports only one dimension.
    #[error(
        "the congestion-aware backend has one dimension, not {dims}; use the congestion-unaware \
         one, or a network of one dimension"
    )]
    OneDimension {
        /// Requested number of dimensions.
        dims: usize,
    },
    /// ASTRA-sim has no such algorithm.
    #[error("{algorithm} does not do {collective}; {remedy}")]
    Unsupported {
        /// The algorithm.
        algorithm: &'static str,
        /// The requested collective.
        collective: &'static str,
        /// An alternative that would work.
        remedy: &'static str,
    },
    /// Some ranks wait for messages that are never sent: ASTRA-sim ends without their times.
    #[error(
        "{finished} of {ranks} ranks finish, the others wait for each other without end; use a \
         power of two for halving-doubling, and one active chunk with trees"
    )]
    Stuck {
        /// Number of ranks that finish.
        finished: u64,
        /// Number of all ranks.
        ranks: u64,
    },
    /// Too large to simulate on one machine.
    #[error("{what}: {found} is over the limit of {limit}; {remedy}")]
    TooLarge {
        /// The quantity that is too large.
        what: &'static str,
        /// Its value, or a lower bound.
        found: u64,
        /// Its limit.
        limit: u64,
        /// An alternative that would work.
        remedy: &'static str,
    },
}

/// Maximum number of ranks: far beyond any cluster, and small enough for counting messages.
const MAX_RANKS: u64 = 1 << 24;

/// ASTRA-sim flags four dimensions as participating and reads out of bounds for a fifth.
const MAX_DIMS: usize = 4;

/// Rejects cases that ASTRA-sim rejects or cannot run, before anything is computed from them.
pub(super) fn check(case: &Case) -> Result<(), AstraError> {
    let value = |field: String, found: String, remedy| AstraError::Value { field, found, remedy };
    let counts = [("splits", case.splits), ("active_chunks", case.active_chunks)];
    if let Some((field, _)) = counts.into_iter().find(|&(_, count)| count == 0) {
        return Err(value(field.into(), "0".into(), "it must be at least 1"));
    }
    if case.bytes == 0 {
        return Err(value("bytes".into(), "0".into(), "it must be at least 1"));
    }
    if !(case.local_mem_gbps.is_finite() && case.local_mem_gbps > 0.0) {
        let found = case.local_mem_gbps.to_string();
        return Err(value("local_mem_gbps".into(), found, "it must be above 0"));
    }
    if case.dims.is_empty() || case.dims.len() > MAX_DIMS {
        let found = case.dims.len().to_string();
        return Err(value("the number of dimensions".into(), found, "ASTRA-sim has 1 to 4"));
    }
    if case.backend == Backend::CongestionAware && case.dims.len() > 1 {
        return Err(AstraError::OneDimension { dims: case.dims.len() });
    }
    for (number, dim) in case.dims.iter().enumerate() {
        let named = |field: &str| format!("{field} of dimension {number}");
        if dim.size < 2 {
            let found = dim.size.to_string();
            return Err(value(named("size"), found, "it must be at least 2"));
        }
        if !(dim.bandwidth_gibps.is_finite() && dim.bandwidth_gibps > 0.0) {
            let found = dim.bandwidth_gibps.to_string();
            return Err(value(named("bandwidth_gibps"), found, "it must be above 0"));
        }
        if !(dim.latency_ns.is_finite() && dim.latency_ns >= 0.0) {
            let found = dim.latency_ns.to_string();
            return Err(value(named("latency_ns"), found, "it must be 0 or more"));
        }
    }
    let ranks = case.ranks();
    if ranks > MAX_RANKS {
        let remedy = "use fewer ranks";
        return Err(AstraError::TooLarge { what: "ranks", found: ranks, limit: MAX_RANKS, remedy });
    }
    check_algorithms(case)
}

fn check_algorithms(case: &Case) -> Result<(), AstraError> {
    let algorithms = match &case.algorithms {
        Algorithms::PerDimension(list) if list.len() == case.dims.len() => list.as_slice(),
        Algorithms::PerDimension(list) => {
            return Err(AstraError::Value {
                field: "the number of algorithms".into(),
                found: format!("{} for {} dimensions", list.len(), case.dims.len()),
                remedy: "give one for each dimension, or one over all",
            });
        }
        Algorithms::OverAll(Algorithm::DoubleBinaryTree) => {
            return Err(AstraError::Unsupported {
                algorithm: "double binary tree",
                collective: "a collective over all dimensions at once",
                remedy: "give one algorithm for each dimension",
            });
        }
        Algorithms::OverAll(algorithm) => std::slice::from_ref(algorithm),
    };
    let sizes: Vec<u64> = match case.algorithms {
        Algorithms::PerDimension(_) => case.dims.iter().map(|dim| dim.size.into()).collect(),
        Algorithms::OverAll(_) => vec![case.ranks()],
    };
    for (number, (&algorithm, &size)) in algorithms.iter().zip(&sizes).enumerate() {
        match algorithm {
            Algorithm::Direct { window: Some(0) } => {
                return Err(AstraError::Value {
                    field: format!("the window of algorithm {number}"),
                    found: "0".into(),
                    remedy: "it must be at least 1",
                });
            }
            Algorithm::DoubleBinaryTree if !size.is_power_of_two() => {
                return Err(AstraError::Value {
                    field: format!("size of dimension {number}"),
                    found: size.to_string(),
                    remedy: "a double binary tree needs a power of two",
                });
            }
            Algorithm::Ring
            | Algorithm::Direct { .. }
            | Algorithm::HalvingDoubling
            | Algorithm::DoubleBinaryTree => {}
        }
    }
    Ok(())
}
