//! From a case to chunks, and to the phases that every chunk runs through.
//!
//! All chunks are of one size: what is left over becomes one more chunk of that size, not a
//! smaller one. So all run through the same phases.

use super::case::{Algorithm, Algorithms, AstraError, Case, Collective, Optimization, check};
use super::exchange::{Exchange, Job};
use super::topology::Wires;
use super::tree::Tree;

/// What the ranks do, all of them alike.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    /// How many chunks there are.
    pub(super) chunks: u32,
    /// What each runs through, in order.
    pub(super) phases: Vec<Phase>,
    /// Queues of chunks at a rank: one for each dimension that an algorithm sees.
    pub(super) queues: usize,
}

/// One algorithm at work on one dimension.
#[derive(Clone, Debug)]
pub(super) struct Phase {
    /// The dimension, which is the number of the queue too.
    pub(super) dim: usize,
    /// What the ranks along the dimension do.
    pub(super) work: Work,
    /// What their packets take on the way, by size.
    pub(super) wires: Wires,
    /// What adding up a packet takes, by size.
    pub(super) reduce_ns: Vec<u64>,
}

/// What the ranks of a group do in a phase.
#[derive(Clone, Debug)]
pub(super) enum Work {
    /// Packets to one or more partners, each paid for with one received.
    Exchange(Exchange),
    /// Up and down a binary tree.
    Tree(Tree),
}

impl Phase {
    /// How many ranks take part in one run of the phase.
    pub(super) fn members(&self) -> u32 {
        match &self.work {
            Work::Exchange(exchange) => exchange.members,
            Work::Tree(tree) => tree.members,
        }
    }

    /// Packets that a rank sends, at most.
    pub(super) fn packets(&self) -> u64 {
        match &self.work {
            Work::Exchange(exchange) => exchange.sends,
            Work::Tree(_) => 3,
        }
    }

    /// Packets that a rank has in flight, at most.
    pub(super) fn window(&self) -> u32 {
        match &self.work {
            Work::Exchange(exchange) => exchange.window,
            Work::Tree(_) => 2,
        }
    }
}

/// Chunks beyond these would fill memory without telling anything.
const MAX_CHUNKS: u64 = 1 << 20;

/// Message sizes stay below this, so that no sum of them overflows.
const MAX_BYTES: u64 = 1 << 62;

/// Cuts a collective into chunks and phases, or says why ASTRA-sim could not run it.
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
        // Every rank must get a byte to send.
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

/// What a chunk does in which dimension, in order, and whether clockwise.
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

/// One phase on a chunk of `bytes`, and the size of the chunk after it.
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
    // No more than the limit on ranks, which fits.
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
        // Whatever it is asked for, a tree leaves the whole.
        Work::Tree(_) => (vec![bytes], bytes),
    };
    // Written once and read twice, each rounded down.
    let pass_ns = |bytes: u64| (bytes as f64 / (case.local_mem_gbps * 1e9) * 1e9) as u64;
    let reduce_ns = sizes.iter().map(|&bytes| pass_ns(bytes).saturating_mul(3)).collect();
    Ok((Phase { dim, work, wires: Wires::new(dims, &sizes), reduce_ns }, left))
}

/// The size of a chunk after an exchange.
fn after(job: &Job) -> u64 {
    match job.collective {
        Collective::AllReduce | Collective::AllToAll => job.bytes,
        Collective::AllGather => job.bytes * u64::from(job.members),
        Collective::ReduceScatter => job.bytes / u64::from(job.members),
    }
}

/// Which tree a phase uses depends on how often its dimension's trees were used before: a chunk
/// that comes by twice takes one of each, others take turns.
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
