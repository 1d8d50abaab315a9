//! One algorithm inside each host and one between hosts, in any combination.
//!
//! The ranks of a group are H hosts of g consecutive ranks each. An all_reduce is the inner
//! algorithm's, split in the middle. There, every chunk has been summed within the host and has one
//! owner. The owners of the same chunk on all hosts then sum it by the outer algorithm, and the
//! inner one distributes it. The traffic between hosts follows from the ownership:
//!
//! | inner algorithm | owners in a host | bytes each sends across |
//! |---|---|---|
//! | ring, multi-ring, direct, partitioned, shared-memory, torus, in-network | every rank | N/g |
//! | halving-doubling | the largest power of two p ≤ g | N/p |
//! | ps:K | the K servers | N/K |
//! | tree | the roots of the two trees | N/2 |
//! | naive, overlapped, one-shot, per-axis | every rank has everything | N, and nothing is left to distribute |
//!
//! A parameter server in each host with a ring between the servers is `hierarchical:ps:ring`.
//!
//! If g is a power of two and both algorithms keep the canonical order, so does the whole: the sum
//! of a host is then a subtree of the canonical tree ([`CanonicalFold`](super::CanonicalFold)).
//!
//! The counts are the sum of those of the two algorithms, with the outer one's for the bytes
//! between hosts; fan-in is the larger of the two. Chunks: those of the inner times those of the
//! outer algorithm.

use super::definition::{AlgorithmDef, Counted, Hints, Inner, NO_GATHER, Symmetric};
use super::step::{Action, Chunks, Peers, Step, StepList};
use super::{Algorithm, CollectiveError, CollectiveKind, Pattern, counts, resolve};

/// Number in messages.
pub const NUMBER: u8 = 255;
/// Values that the text form accepts.
pub(super) const NEEDS_LEVELS: &str = "an inner and an outer algorithm, such as hierarchical:ps:ring \
                                       or hierarchical:multi-ring:2:halving-doubling";
pub(super) const NEEDS_HOST: &str = "the number of ranks per host, at least 1, after the slash";

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "hierarchical",
    number: NUMBER,
    suggested: None,
    kinds: NO_GATHER,
    is_canonical: |p| {
        let Some((inner, outer)) = p.levels() else { return false };
        (inner.ranks.is_power_of_two() || outer.ranks == 1)
            && resolve::keeps_order(&inner)
            && resolve::keeps_order(&outer)
    },
    check,
    chunks: |p| p.levels().map_or(p.ranks, |(inner, outer)| inner.chunks() * outer.chunks()),
    rounds: |p| p.levels().map_or(0, |(inner, outer)| inner_rounds(&inner) + outer.rounds()),
    steps: |p, me| {
        let Some((inner, outer)) = p.levels() else { return Vec::new() };
        match p.kind {
            CollectiveKind::AllReduce => all_reduce(&inner, &outer, me),
            CollectiveKind::ReduceScatter => reduce_scatter(&inner, &outer, me),
            CollectiveKind::AllGather => all_gather(&inner, &outer, me),
            CollectiveKind::Broadcast => broadcast(&inner, &outer, me),
            CollectiveKind::Reduce => reduce(&inner, &outer, me),
            CollectiveKind::Gather
            | CollectiveKind::AllToAll
            | CollectiveKind::Scatter
            | CollectiveKind::SendRecv
            | CollectiveKind::Barrier => Vec::new(),
        }
    },
    counted: Counted::AllIfSmall,
    edges: |p| {
        let Some((inner, outer)) = p.levels() else { return Vec::new() };
        let of_host = counts::busiest(&inner);
        let hosts = counts::busiest(&outer).into_iter();
        hosts.flat_map(|host| of_host.iter().map(move |rank| host * inner.ranks + rank)).collect()
    },
    hints: Hints { symmetric: Symmetric::None, ..AlgorithmDef::BASE.hints },
    ..AlgorithmDef::BASE
};

fn check(p: &Pattern) -> Result<(), CollectiveError> {
    let Pattern { algorithm, ranks, .. } = *p;
    let Algorithm::Hierarchical { host: Some(host), .. } = algorithm else {
        // The largest divisor that a machine is likely to have.
        let host = (1..=8).rev().find(|host| ranks.is_multiple_of(*host)).unwrap_or(1);
        return Err(CollectiveError::Unfit(format!(
            "{algorithm} needs to know how many of the {ranks} ranks share a host; write it after a \
             slash, such as {algorithm}/{host}"
        )));
    };
    if !ranks.is_multiple_of(host.get()) {
        return Err(CollectiveError::Unfit(format!(
            "{ranks} ranks cannot share hosts evenly, {host} to each; give a divisor of {ranks}"
        )));
    }
    let Some((inner, outer)) = p.levels() else { return Ok(()) };
    (inner.algorithm.def().check)(&inner)?;
    (outer.algorithm.def().check)(&outer)
}

/// The first half of the inner all_reduce, the outer one among the owners, the second half.
///
/// Rounds, and bytes of an owner: the inner algorithm's for N plus the outer one's for its bytes
/// between hosts; fan-in the larger one. `inner` and `outer` are the all_reduces of one host and of
/// one rank of every host.
pub fn all_reduce(inner: &Pattern, outer: &Pattern, me: u32) -> Vec<Step> {
    let Some(place) = LevelPosition::of(inner, outer, me) else { return Vec::new() };
    let Inner { steps, rounds, is_replicated, owned } = inner.algorithm.def().inner;
    let steps = steps.map_or_else(|| inner.steps(place.index), |steps| steps(inner, place.index));
    let middle = if is_replicated { rounds(inner) } else { rounds(inner) / 2 };
    let (first, second) = steps.split_at(steps.partition_point(|step| step.round < middle));
    let mut script = StepList::default();
    script.extend(first.iter().map(|step| place.inside(step, 0, Split::Contiguous)));
    let owned = match is_replicated || inner.ranks == 1 {
        true => Chunks::all(inner.chunks()),
        false => owned(inner, place.index),
    };
    if owned.count > 0 {
        let crossing = outer.steps(place.host);
        script.extend(crossing.iter().map(|step| place.across(step, middle, owned)));
    }
    let later = outer.rounds();
    script.extend(second.iter().map(|step| place.inside(step, later, Split::Contiguous)));
    script.done()
}

/// A reduce_scatter inside each host, then one between hosts of each rank's result.
///
/// Rounds, bytes: the inner algorithm's for N plus the outer one's for N/g; fan-in the larger one.
pub fn reduce_scatter(inner: &Pattern, outer: &Pattern, me: u32) -> Vec<Step> {
    let Some(place) = LevelPosition::of(inner, outer, me) else { return Vec::new() };
    let mut script = StepList::default();
    script.extend(inner.steps(place.index).iter().map(|s| place.inside(s, 0, Split::Dealt)));
    let later = inner.rounds();
    script.extend(outer.steps(place.host).iter().map(|s| place.across_parts(s, later)));
    script.done()
}

/// An all_gather between hosts, then one inside each: [`reduce_scatter`] in reverse.
///
/// Rounds, bytes: the outer algorithm's for N/g plus the inner one's for N; fan-in the larger one.
pub fn all_gather(inner: &Pattern, outer: &Pattern, me: u32) -> Vec<Step> {
    let Some(place) = LevelPosition::of(inner, outer, me) else { return Vec::new() };
    let mut script = StepList::default();
    script.extend(outer.steps(place.host).iter().map(|s| place.across_parts(s, 0)));
    let later = outer.rounds();
    script.extend(inner.steps(place.index).iter().map(|s| place.inside(s, later, Split::Dealt)));
    script.done()
}

/// A broadcast from the root to the rank of the same index on every host, then one inside each.
///
/// Rounds, bytes, all for N: at most the outer algorithm's plus the inner one's; fan-in the larger
/// one.
pub fn broadcast(inner: &Pattern, outer: &Pattern, me: u32) -> Vec<Step> {
    let Some(place) = LevelPosition::of(inner, outer, me) else { return Vec::new() };
    let mut script = StepList::default();
    if place.index == inner.root() {
        let all = Chunks::all(inner.chunks());
        script.extend(outer.steps(place.host).iter().map(|s| place.across(s, 0, all)));
    }
    let (steps, later) = (inner.steps(place.index), outer.rounds());
    script.extend(steps.iter().map(|s| place.inside(s, later, Split::Contiguous)));
    script.done()
}

/// A reduce inside each host to the rank of the root's index, then one from those to the root.
///
/// Rounds, bytes, all for N: at most the inner algorithm's plus the outer one's; fan-in the larger
/// one.
pub fn reduce(inner: &Pattern, outer: &Pattern, me: u32) -> Vec<Step> {
    let Some(place) = LevelPosition::of(inner, outer, me) else { return Vec::new() };
    let mut script = StepList::default();
    let steps = inner.steps(place.index);
    script.extend(steps.iter().map(|s| place.inside(s, 0, Split::Contiguous)));
    if place.index == inner.root() {
        let (all, later) = (Chunks::all(inner.chunks()), inner.rounds());
        script.extend(outer.steps(place.host).iter().map(|s| place.across(s, later, all)));
    }
    script.done()
}

/// Number of rounds of an inner pattern.
fn inner_rounds(inner: &Pattern) -> u32 {
    match inner.kind {
        CollectiveKind::AllReduce => (inner.algorithm.def().inner.rounds)(inner),
        _ => inner.rounds(),
    }
}

/// Subdivision of an inner algorithm's chunks for the outer one.
#[derive(Clone, Copy)]
enum Split {
    /// Each into consecutive chunks.
    Contiguous,
    /// Part *j* of a host is every g-th part of the vector, so that rank j + g·h ends with its own.
    Dealt,
}

/// Position of a rank; translates steps of one level to steps of the whole group.
struct LevelPosition {
    /// Number of ranks per host.
    size: u32,
    hosts: u32,
    host: u32,
    /// Index within the host.
    index: u32,
    /// Number of chunks of the outer pattern.
    chunks: u32,
}

impl LevelPosition {
    fn of(inner: &Pattern, outer: &Pattern, me: u32) -> Option<Self> {
        let (size, hosts) = (inner.ranks(), outer.ranks());
        let (host, index) = (me / size, me % size);
        (host < hosts).then(|| Self { size, hosts, host, index, chunks: outer.chunks() })
    }

    /// A step inside this rank's host.
    fn inside(&self, step: &Step, later: u32, split: Split) -> Step {
        let first_rank = self.host * self.size;
        changed(
            step,
            later,
            |peer| first_rank + peer,
            |chunks| match split {
                Split::Contiguous => chunks.subdivide(0, self.chunks, self.chunks, 1),
                Split::Dealt => chunks.subdivide(0, 1, self.hosts, self.size),
            },
        )
    }

    /// A step among the owners of these consecutive chunks of the inner pattern, which together
    /// form the vector of the outer pattern.
    fn across(&self, step: &Step, later: u32, owned: Chunks) -> Step {
        let first = owned.first * self.chunks;
        let chunks = |chunks: Chunks| chunks.subdivide(first, owned.count, owned.count, 1);
        changed(step, later, |host| host * self.size + self.index, chunks)
    }

    /// A step among the ranks of one index, whose parts are interleaved.
    fn across_parts(&self, step: &Step, later: u32) -> Step {
        let chunks = |chunks: Chunks| chunks.subdivide(self.index, self.size, 1, 1);
        changed(step, later, |host| host * self.size + self.index, chunks)
    }
}

/// A step `later` rounds later, with ranks and chunks renumbered.
fn changed(
    step: &Step,
    later: u32,
    rank: impl Fn(u32) -> u32,
    chunks: impl Fn(Chunks) -> Chunks,
) -> Step {
    let peers = |peers: Peers| {
        let (first, last) = (rank(peers.first), rank(peers.last()));
        let stride = (last - first).checked_div(peers.count.saturating_sub(1)).unwrap_or(1);
        Peers { first, stride, ..peers }
    };
    let action = match step.action {
        Action::Send { to, chunks: c } => Action::Send { to: rank(to), chunks: chunks(c) },
        Action::Lend { to, chunks: c } => Action::Lend { to: rank(to), chunks: chunks(c) },
        Action::Recv { from, chunks: c, how } => {
            Action::Recv { from: rank(from), chunks: chunks(c), how }
        }
        Action::Read { from, chunks: c, how } => {
            Action::Read { from: rank(from), chunks: chunks(c), how }
        }
        Action::Write { to, chunks: c } => Action::Write { to: rank(to), chunks: chunks(c) },
        Action::Offer { to, chunks: c } => Action::Offer { to: peers(to), chunks: chunks(c) },
        Action::Take { from, chunks: c } => Action::Take { from: peers(from), chunks: chunks(c) },
        Action::Fold { chunks: c } => Action::Fold { chunks: chunks(c) },
        Action::Emit { chunks: c, into } => Action::Emit { chunks: chunks(c), into: chunks(into) },
    };
    Step { round: step.round + later, action }
}
