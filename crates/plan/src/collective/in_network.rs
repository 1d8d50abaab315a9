//! In-network reduction: a switch sums what its ranks send to it and hands the sum out.
//!
//! A switch that can add (SHARP in InfiniBand and NVLink switches; Graham et al., "Scalable
//! Hierarchical Aggregation Protocol (SHArP)", 2016) takes every rank's vector once and returns the sum
//! once: half of what the [`ring`](super::ring) moves, in one round for any number of ranks. The same
//! switch hands one rank's vector to all others, so that nobody sends the same twice.
//!
//! The order of summation is the switch's own and so not the canonical one from three ranks on. Whether
//! there is such a switch only a cluster knows: [`Fabric`](super::Fabric) refuses what has none, and
//! transports that reach no such switch refuse the steps.
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector. A switch sends one
//! message to a rank: fan-in is 1.

use super::has_steps;
use super::step::{Action, Chunks, Peers, Script, Step};

/// Everyone's vector goes up and the sum comes down.
///
/// Rounds 1; bytes sent and received per rank N; fan-in 1. Chunks: P.
pub fn all_reduce(ranks: u32, me: u32) -> Vec<Step> {
    let mut walk = Walk::new(ranks, me);
    walk.offer(0, Chunks::all(ranks));
    walk.take(0, Chunks::all(ranks));
    walk.done()
}

/// Everyone's vector goes up and part *i* of the sum comes down to rank *i*.
///
/// Rounds 1; bytes sent per rank N, received N/P; fan-in 1. Chunks: P.
pub fn reduce_scatter(ranks: u32, me: u32) -> Vec<Step> {
    let mut walk = Walk::new(ranks, me);
    walk.scatter(0);
    walk.done()
}

/// Everyone's part goes up and all others come down.
///
/// Rounds 1; bytes sent per rank N/P, received N(P−1)/P; fan-in 1. Chunks: P.
pub fn all_gather(ranks: u32, me: u32) -> Vec<Step> {
    let mut walk = Walk::new(ranks, me);
    walk.gather(0);
    walk.done()
}

/// As [`reduce_scatter`] and then [`all_gather`], so that in between every rank owns a part of the sum:
/// what a hierarchy does inside a host.
///
/// Rounds 2; bytes sent per rank N(1 + 1/P), received N; fan-in 1. Chunks: P.
pub(super) fn all_reduce_by_parts(ranks: u32, me: u32) -> Vec<Step> {
    let mut walk = Walk::new(ranks, me);
    walk.scatter(0);
    walk.gather(1);
    walk.done()
}

/// The root's vector goes up and comes down to everyone else.
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

/// Everyone's vector goes up and the sum comes down to the root.
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

/// The steps of one rank while they are written; none for a rank that is alone or does not exist.
struct Walk {
    script: Script,
    ranks: u32,
    me: u32,
}

impl Walk {
    fn new(ranks: u32, me: u32) -> Self {
        Self { script: Script::default(), ranks, me }
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
