//! A collective on a network, in ASTRA-sim's terms, and why one cannot be simulated.

use thiserror::Error;

/// One run of ASTRA-sim: a collective over all ranks, and nothing else.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// What a link does with several messages at once.
    pub backend: Backend,
    /// What the ranks do together.
    pub collective: Collective,
    /// Size of the collective: of the buffer of each rank, which for an all-gather is its shard.
    pub bytes: u64,
    /// The network, innermost dimension first.
    pub dims: Vec<Dimension>,
    /// Which algorithm works on which dimension.
    pub algorithms: Algorithms,
    /// Into how many chunks the collective is cut (`preferred-dataset-splits`).
    pub splits: u32,
    /// How many chunks may be under way in a dimension at once (`active-chunks-per-dimension`).
    pub active_chunks: u32,
    /// How an all-reduce uses several dimensions.
    pub optimization: Optimization,
    /// What every packet costs at a rank before it is sent or counts as received.
    pub endpoint_delay_ns: u64,
    /// Rate of local memory, which a reduction passes three times; in units of 10⁹ bytes a second.
    pub local_mem_gbps: f64,
}

impl Case {
    /// The number of ranks; the largest number there is where they cannot be counted.
    pub fn ranks(&self) -> u64 {
        self.dims.iter().fold(1, |product: u64, dim| product.saturating_mul(dim.size.into()))
    }
}

/// One dimension of the network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dimension {
    /// How its ranks are wired.
    pub kind: Kind,
    /// How many ranks are along it.
    pub size: u32,
    /// Rate of a link in GiB a second, which ASTRA-sim's files call GB/s.
    pub bandwidth_gibps: f64,
    /// What a hop takes beside the bytes.
    pub latency_ns: f64,
}

/// What a link does with several messages at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// It carries each as if it were alone.
    CongestionUnaware,
    /// It carries one after the other. One dimension only.
    CongestionAware,
}

/// What the ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Every rank gets the sum.
    AllReduce,
    /// Every rank gets every shard.
    AllGather,
    /// Every rank gets its part of the sum.
    ReduceScatter,
    /// Every rank gets its part of each rank's data.
    AllToAll,
}

/// How the ranks along a dimension are wired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Each to its two neighbours; messages take the shorter way.
    Ring,
    /// Each to one switch: two hops to anyone.
    Switch,
    /// Each to each: one hop.
    FullyConnected,
}

/// Which algorithm works on which dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Algorithms {
    /// One for each dimension.
    PerDimension(Vec<Algorithm>),
    /// One over all ranks in the order of their numbers, blind to dimensions: `oneRing`,
    /// `oneDirect`, `oneHalvingDoubling`.
    OverAll(Algorithm),
}

/// How a collective is done by the ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// To the next rank, again and again.
    Ring,
    /// To every other rank, at most `window` packets at a time, or all at once.
    Direct {
        /// Packets in flight.
        window: Option<u32>,
    },
    /// To the rank at distance 1, 2, 4…; and back for an all-reduce.
    HalvingDoubling,
    /// Up and down one of two trees, by turns. Does an all-reduce whatever it is asked for.
    DoubleBinaryTree,
}

/// How an all-reduce uses several dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Optimization {
    /// A whole all-reduce in each dimension.
    Baseline,
    /// Reduce-scatter up to the last dimension, all-reduce there, all-gather back down.
    LocalBwAware,
}

/// Why a case has no answer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AstraError {
    /// A value that ASTRA-sim itself refuses, divides by, or waits for without end.
    #[error("{field} is {found}; {remedy}")]
    Value {
        /// Which value, as the case names it.
        field: String,
        /// What it is.
        found: String,
        /// What would work.
        remedy: &'static str,
    },
    /// The congestion-aware backend has one dimension.
    #[error(
        "the congestion-aware backend has one dimension, not {dims}; use the congestion-unaware \
         one, or a network of one dimension"
    )]
    OneDimension {
        /// How many were asked for.
        dims: usize,
    },
    /// ASTRA-sim has no such algorithm.
    #[error("{algorithm} does not do {collective}; {remedy}")]
    Unsupported {
        /// The algorithm.
        algorithm: &'static str,
        /// What it was asked to do.
        collective: &'static str,
        /// What would work.
        remedy: &'static str,
    },
    /// Some ranks wait for messages that nobody sends: ASTRA-sim ends without their times.
    #[error(
        "{finished} of {ranks} ranks finish, the others wait for each other without end; use a \
         power of two for halving-doubling, and one active chunk with trees"
    )]
    Stuck {
        /// Ranks that finish.
        finished: u64,
        /// All ranks.
        ranks: u64,
    },
    /// More than one machine should be asked to simulate.
    #[error("{what}: {found} is over the limit of {limit}; {remedy}")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How much there is, at least.
        found: u64,
        /// How much there may be.
        limit: u64,
        /// What would work.
        remedy: &'static str,
    },
}

/// The largest number of ranks: far beyond any cluster, and small enough to count messages in.
const MAX_RANKS: u64 = 1 << 24;

/// ASTRA-sim marks four dimensions as taking part, and reads beyond them for a fifth.
const MAX_DIMS: usize = 4;

/// Refuses what ASTRA-sim refuses or cannot do, before anything is computed from it.
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
