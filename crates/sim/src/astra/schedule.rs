//! Splits a case into chunks, and into the phases that every chunk runs through.
//!
//! All chunks have one size: a remainder becomes one more chunk of that size, not a smaller one.
//! All chunks therefore run through the same phases.

use super::case::{Algorithm, Algorithms, AstraError, Case, Collective, Optimization, check};
use super::exchange::{Exchange, Job};
use super::topology::PhaseDelays;
use super::tree::Tree;

/// Schedule of all ranks, which act alike.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    /// Number of chunks.
    pub(super) chunks: u32,
    /// Phases of each chunk, in order.
    pub(super) phases: Vec<Phase>,
    /// Number of chunk queues per rank: one for each dimension that an algorithm sees.
    pub(super) queues: usize,
}

/// One algorithm on one dimension.
#[derive(Clone, Debug)]
pub(super) struct Phase {
    /// The dimension, which is also the index of the queue.
    pub(super) dim: usize,
    /// Work of the ranks along the dimension.
    pub(super) work: Work,
    /// Packet delays by size.
    pub(super) wires: PhaseDelays,
    /// Reduction time of a packet, by size.
    pub(super) reduce_ns: Vec<u64>,
}

/// Work of the ranks of a group in a phase.
#[derive(Clone, Debug)]
pub(super) enum Work {
    /// Packets to one or more partners, each matched by one received packet.
    Exchange(Exchange),
    /// Up and down a binary tree.
    Tree(Tree),
}

impl Phase {
    /// Number of ranks that take part in one run of the phase.
    pub(super) fn members(&self) -> u32 {
        match &self.work {
            Work::Exchange(exchange) => exchange.members,
            Work::Tree(tree) => tree.members,
        }
    }

    /// Maximum number of packets that a rank sends.
    pub(super) fn packets(&self) -> u64 {
        match &self.work {
            Work::Exchange(exchange) => exchange.sends,
            Work::Tree(_) => 3,
        }
    }

    /// Maximum number of packets that a rank has in flight.
    pub(super) fn window(&self) -> u32 {
        match &self.work {
            Work::Exchange(exchange) => exchange.window,
            Work::Tree(_) => 2,
        }
    }
}

/// Maximum number of chunks; more would only fill memory.
const MAX_CHUNKS: u64 = 1 << 20;

/// Limit on message sizes, so that no sum of them overflows.
const MAX_BYTES: u64 = 1 << 62;

/// Splits a collective into chunks and phases, or returns why ASTRA-sim could not run it.
pub(super) fn schedule(case: &Case) -> Result<Schedule, AstraError> {
    check(case)?;
    let ranks = case.ranks();
    if case.bytes.checked_mul(ranks).is_none_or(|bytes| bytes > MAX_BYTES) {
        let remedy = "use a smaller collective";
        let (found, limit) = (case.bytes, MAX_BYTES / ranks);
        return Err(AstraError::TooLarge { what: "bytes", found, limit, remedy });
    }
    let (chunk_bytes, chunks) = cut(case)?;
    let mut phases = Vec::new();
    let mut bytes = chunk_bytes;
    for (collective, dim, clockwise) in stages(case) {
        let (phase, left) = phase(case, collective, dim, clockwise, bytes)?;
        phases.push(phase);
        bytes = left;
    }
    count_tree_uses(&mut phases);
    let queues = match case.algorithms {
        Algorithms::PerDimension(_) => case.dims.len(),
        Algorithms::OverAll(_) => 1,
    };
    Ok(Schedule { chunks, phases, queues })
}

/// Size and number of the chunks.
fn cut(case: &Case) -> Result<(u64, u32), AstraError> {
    let ranks = case.ranks();
    let mut chunk = case.bytes / u64::from(case.splits);
    let mut total = case.bytes;
    if case.collective == Collective::AllGather {
        if chunk == 0 {
            return Err(AstraError::Value {
                field: "bytes".into(),
                found: case.bytes.to_string(),
                remedy: "an all_gather needs at least one byte for each split",
            });
        }
    } else if chunk < ranks {
        // Every rank must have a byte to send.
        chunk = ranks;
        total = u64::from(case.splits) * chunk;
    }
    let chunks = total.div_ceil(chunk);
    match u32::try_from(chunks) {
        Ok(count) if chunks <= MAX_CHUNKS => Ok((chunk, count)),
        Ok(_) | Err(_) => {
            let remedy = "use fewer splits";
            let (found, limit) = (chunks, MAX_CHUNKS);
            Err(AstraError::TooLarge { what: "chunks", found, limit, remedy })
        }
    }
}

/// Stages of a chunk in order: collective, dimension, and true for clockwise.
fn stages(case: &Case) -> Vec<(Collective, usize, bool)> {
    let dims = match case.algorithms {
        Algorithms::PerDimension(_) => case.dims.len(),
        Algorithms::OverAll(_) => 1,
    };
    let whole = |dim| (case.collective, dim, true);
    match (case.collective, case.optimization) {
        (Collective::AllReduce, Optimization::LocalBwAware) => {
            let last = dims - 1;
            let up = (0..last).map(|dim| (Collective::ReduceScatter, dim, true));
            let down = (0..last).rev().map(|dim| (Collective::AllGather, dim, false));
            up.chain([(Collective::AllReduce, last, true)]).chain(down).collect()
        }
        (Collective::AllGather, Optimization::Baseline | Optimization::LocalBwAware) => {
            (0..dims).rev().map(whole).collect()
        }
        (Collective::AllReduce, Optimization::Baseline)
        | (
            Collective::ReduceScatter | Collective::AllToAll,
            Optimization::Baseline | Optimization::LocalBwAware,
        ) => (0..dims).map(whole).collect(),
    }
}

/// Builds one phase for a chunk of `bytes`; also returns the size of the chunk after it.
fn phase(
    case: &Case,
    collective: Collective,
    dim: usize,
    clockwise: bool,
    bytes: u64,
) -> Result<(Phase, u64), AstraError> {
    let (dims, algorithm) = match &case.algorithms {
        Algorithms::PerDimension(algorithms) => (&case.dims[dim..=dim], algorithms[dim]),
        Algorithms::OverAll(algorithm) => (&case.dims[..], *algorithm),
    };
    // At most the limit on ranks, which fits into `u32`.
    let members = dims.iter().map(|dim| dim.size).product();
    let job = Job { collective, members, clockwise, bytes };
    let work = match algorithm {
        Algorithm::Ring => Work::Exchange(Exchange::ring(&job)),
        Algorithm::Direct { window } => Work::Exchange(Exchange::direct(&job, window)),
        Algorithm::HalvingDoubling => Work::Exchange(Exchange::halving_doubling(&job)?),
        Algorithm::DoubleBinaryTree => Work::Tree(Tree::new(members)),
    };
    let (sizes, left) = match &work {
        Work::Exchange(exchange) => (exchange.sizes.clone(), after(&job)),
        // A tree always leaves the whole chunk, whatever the collective.
        Work::Tree(_) => (vec![bytes], bytes),
    };
    // Written once and read twice, each rounded down.
    let pass_ns = |bytes: u64| (bytes as f64 / (case.local_mem_gbps * 1e9) * 1e9) as u64;
    let reduce_ns = sizes.iter().map(|&bytes| pass_ns(bytes).saturating_mul(3)).collect();
    Ok((Phase { dim, work, wires: PhaseDelays::new(dims, &sizes), reduce_ns }, left))
}

/// Size of a chunk after an exchange.
fn after(job: &Job) -> u64 {
    match job.collective {
        Collective::AllReduce | Collective::AllToAll => job.bytes,
        Collective::AllGather => job.bytes * u64::from(job.members),
        Collective::ReduceScatter => job.bytes / u64::from(job.members),
    }
}

/// Counts tree uses, which select the tree of a phase. A chunk that uses a dimension's trees twice
/// takes one of each; other chunks alternate.
fn count_tree_uses(phases: &mut [Phase]) {
    let dims: Vec<usize> = phases.iter().map(|phase| phase.dim).collect();
    let count = |range: &[usize], dim| range.iter().filter(|&&other| other == dim).count() as u32;
    for (at, phase) in phases.iter_mut().enumerate() {
        if let Work::Tree(tree) = &mut phase.work {
            tree.uses_before = count(&dims[..at], phase.dim);
            tree.uses_per_chunk = count(&dims, phase.dim);
        }
    }
}
