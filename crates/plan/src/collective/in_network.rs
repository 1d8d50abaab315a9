//! In-network reduction: a switch sums the vectors of its ranks and distributes the sum.
//!
//! A switch that can add (SHARP in InfiniBand and NVLink switches; Graham et al., "Scalable
//! Hierarchical Aggregation Protocol (SHArP)", 2016) receives every rank's vector once and returns
//! the sum once. This is half the traffic of the [`ring`](super::ring), in one round for any number
//! of ranks. The same switch multicasts one rank's vector to all others, so that no rank sends the
//! same data twice.
//!
//! The switch determines the order of summation, so it is not the canonical one from three ranks
//! on. Only a cluster knows if there is such a switch. [`Fabric`](super::Fabric) refuses machines
//! without one, and transports that reach no such switch refuse the steps.
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector. A switch sends
//! one message to a rank: fan-in is 1.

use super::definition::{AlgorithmDef, Inner, NO_GATHER};
use super::step::{Action, Chunks, Peers, Step, StepList};
use super::{CollectiveKind, has_steps};

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "in-network",
    number: 11,
    suggested: None,
    kinds: NO_GATHER,
    is_canonical: |_| false,
    chunks: |p| match p.kind {
        CollectiveKind::Broadcast | CollectiveKind::Reduce => 1,
        _ => p.ranks,
    },
    steps: |p, me| match p.kind {
        CollectiveKind::AllReduce => all_reduce(p.ranks, me),
        CollectiveKind::ReduceScatter => reduce_scatter(p.ranks, me),
        CollectiveKind::AllGather => all_gather(p.ranks, me),
        CollectiveKind::Broadcast => broadcast(p.ranks, me, p.root),
        CollectiveKind::Reduce => reduce(p.ranks, me, p.root),
        CollectiveKind::Gather
        | CollectiveKind::AllToAll
        | CollectiveKind::Scatter
        | CollectiveKind::SendRecv
        | CollectiveKind::Barrier => Vec::new(),
    },
    inner: Inner {
        steps: Some(|p, me| all_reduce_by_parts(p.ranks, me)),
        rounds: |p| 2 * p.rounds(),
        ..AlgorithmDef::BASE.inner
    },
    ..AlgorithmDef::BASE
};

/// All ranks send their vector to the switch, which returns the sum to all.
///
/// Rounds 1; bytes sent and received per rank N; fan-in 1. Chunks: P.
pub fn all_reduce(ranks: u32, me: u32) -> Vec<Step> {
    let mut walk = Walk::new(ranks, me);
    walk.offer(0, Chunks::all(ranks));
    walk.take(0, Chunks::all(ranks));
    walk.done()
}

/// All ranks send their vector to the switch, which returns part *i* of the sum to rank *i*.
///
/// Rounds 1; bytes sent per rank N, received N/P; fan-in 1. Chunks: P.
pub fn reduce_scatter(ranks: u32, me: u32) -> Vec<Step> {
    let mut walk = Walk::new(ranks, me);
    walk.scatter(0);
    walk.done()
}

/// All ranks send their part to the switch, which returns all other parts.
///
/// Rounds 1; bytes sent per rank N/P, received N(P−1)/P; fan-in 1. Chunks: P.
pub fn all_gather(ranks: u32, me: u32) -> Vec<Step> {
    let mut walk = Walk::new(ranks, me);
    walk.gather(0);
    walk.done()
}

/// [`reduce_scatter`] and then [`all_gather`], so that every rank owns a part of the sum in
/// between; used by a hierarchy inside a host.
///
/// Rounds 2; bytes sent per rank N(1 + 1/P), received N; fan-in 1. Chunks: P.
fn all_reduce_by_parts(ranks: u32, me: u32) -> Vec<Step> {
    let mut walk = Walk::new(ranks, me);
    walk.scatter(0);
    walk.gather(1);
    walk.done()
}

/// The root sends its vector to the switch, which sends it to all other ranks.
///
/// Rounds 1; bytes sent N by the root, received per other rank N; fan-in 1. Chunks: 1.
pub fn broadcast(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut walk = Walk::new(ranks, me);
    if me == root {
        walk.offer(0, Chunks::one(0));
    } else {
        walk.take(0, Chunks::one(0));
    }
    walk.done()
}

/// All ranks send their vector to the switch, which returns the sum to the root.
///
/// Rounds 1; bytes sent per rank N, received N by the root; fan-in 1. Chunks: 1.
pub fn reduce(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut walk = Walk::new(ranks, me);
    walk.offer(0, Chunks::one(0));
    if me == root {
        walk.take(0, Chunks::one(0));
    }
    walk.done()
}

/// Builds the steps of one rank; none for a rank that is alone or does not exist.
struct Walk {
    script: StepList,
    ranks: u32,
    me: u32,
}

impl Walk {
    fn new(ranks: u32, me: u32) -> Self {
        Self { script: StepList::default(), ranks, me }
    }

    fn scatter(&mut self, round: u32) {
        self.offer(round, Chunks::all(self.ranks));
        self.take(round, Chunks::one(self.me));
    }

    fn gather(&mut self, round: u32) {
        let after = self.me + 1;
        self.offer(round, Chunks::one(self.me));
        self.take(round, Chunks::all(self.me));
        self.take(round, Chunks::spaced(after, self.ranks.saturating_sub(after), 1));
    }

    fn offer(&mut self, round: u32, chunks: Chunks) {
        let to = Peers::consecutive(self.ranks);
        self.push(round, chunks, Action::Offer { to, chunks });
    }

    fn take(&mut self, round: u32, chunks: Chunks) {
        let from = Peers::consecutive(self.ranks);
        self.push(round, chunks, Action::Take { from, chunks });
    }

    fn push(&mut self, round: u32, chunks: Chunks, action: Action) {
        if has_steps(self.ranks, self.me) && self.ranks > 1 && chunks.count > 0 {
            self.script.extend([Step { round, action }]);
        }
    }

    fn done(self) -> Vec<Step> {
        self.script.done()
    }
}
