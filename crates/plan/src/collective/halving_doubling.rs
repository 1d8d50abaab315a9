//! Recursive halving and doubling: as few bytes as the ring, in a logarithmic number of rounds.
//!
//! Rank *i* of 2ˢ exchanges with rank *i* ⊕ 2ᵏ in round *k*: adjacent ranks first, so that a sum
//! grows as the balanced tree over rank order and the canonical order holds. The set of chunks is
//! halved: after round *k* a rank is responsible for the chunks that agree with it in the lowest
//! *k*+1 bits, and in the end for its own.
//!
//! For other rank counts let *p* be the largest power of two below P. The surplus ranks *p*, *p*+1,
//! … each send their vector to a partner, *p* ranks lower, before the others start, and receive the
//! result afterwards; the order of summation is then no longer the canonical one.
//!
//! In the formulas *P* is the number of ranks, *S* = log₂ p, σ is 1 if there is a surplus and 0
//! otherwise, and *N* is the bytes of the whole vector. See Thakur, Rabenseifner and Gropp,
//! "Optimization of Collective Communication Operations in MPICH" (2005), sections 4.1 to 4.5.

use super::definition::{AlgorithmDef, Counted, Hints, Inner, NO_GATHER, Symmetric, ways};
use super::step::{Chunks, Combine, Step, StepList};
use super::{CollectiveKind, has_steps};

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "halving-doubling",
    number: 1,
    kinds: NO_GATHER,
    is_canonical: |p| p.ranks.is_power_of_two(),
    chunks: |p| core(p.ranks),
    rounds: |p| {
        let surplus = u32::from(!p.ranks.is_power_of_two());
        match p.kind {
            CollectiveKind::Broadcast | CollectiveKind::Reduce => 2 * p.ranks.ilog2() + surplus,
            _ => ways(p) * p.ranks.ilog2() + 2 * surplus,
        }
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
    counted: Counted::All,
    inner: Inner {
        owned: |p, me| if me < core(p.ranks) { Chunks::one(me) } else { Chunks::all(0) },
        ..AlgorithmDef::BASE.inner
    },
    hints: Hints {
        symmetric: Symmetric::PowersOfTwo,
        sends_in_place: true,
        has_pipeline: true,
        ..AlgorithmDef::BASE.hints
    },
    ..AlgorithmDef::BASE
};

/// Halving, so that every rank holds the sum of one chunk, then doubling to distribute them.
///
/// Rounds 2S + 2σ; bytes sent and received at most 2N(p−1)/p + σN; fan-in 1. Chunks: p.
pub fn all_reduce(ranks: u32, me: u32) -> Vec<Step> {
    Walk::write(ranks, me, 0, |walk| {
        let all = Chunks::all(walk.core);
        walk.hand_in(|_| all, Combine::Reduce);
        walk.halve(walk.core);
        walk.double(walk.core);
        walk.hand_back(|_| all);
    })
}

/// Halving over parts: rank *i* ends with part *i*.
///
/// Rounds S + 2σ; bytes sent at most N(P−1)/P, or N by a surplus rank; received at most
/// σN + N/P · Σₖ₌₁..S ⌈P/2ᵏ⌉; fan-in 1. Chunks: P.
pub fn reduce_scatter(ranks: u32, me: u32) -> Vec<Step> {
    Walk::write(ranks, me, 0, |walk| {
        walk.hand_in(|_| Chunks::all(ranks), Combine::Reduce);
        walk.halve(ranks);
        walk.hand_back(Chunks::one);
    })
}

/// Doubling over parts: [`reduce_scatter`] in reverse.
///
/// Rounds S + 2σ; bytes sent at most σN + N/P · Σₖ₌₁..S ⌈P/2ᵏ⌉; received at most N(P−1)/P, or N by
/// a surplus rank; fan-in 1. Chunks: P.
pub fn all_gather(ranks: u32, me: u32) -> Vec<Step> {
    Walk::write(ranks, me, 0, |walk| {
        walk.hand_in(Chunks::one, Combine::Replace);
        walk.double(ranks);
        walk.hand_back(|_| Chunks::all(ranks));
    })
}

/// The root scatters its chunks down a binomial tree, then doubling distributes them.
///
/// Rounds 2S + σ; bytes sent at most 2N(p−1)/p + σN, by the root; received at most N/2 + N(p−1)/p;
/// fan-in 1. Chunks: p.
pub fn broadcast(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    Walk::write(ranks, me, root, |walk| {
        walk.deal_out(walk.core);
        walk.double(walk.core);
        let all = Chunks::all(walk.core);
        walk.hand_back(|_| all);
    })
}

/// Halving, then the summed chunks are gathered at the root up a binomial tree.
///
/// Rounds 2S + σ; bytes sent at most N/2 + N(p−1)/p; received at most 2N(p−1)/p + σN, by the root;
/// fan-in 1. Chunks: p.
pub fn reduce(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    Walk::write(ranks, me, root, |walk| {
        let all = Chunks::all(walk.core);
        walk.hand_in(|_| all, Combine::Reduce);
        walk.halve(walk.core);
        walk.collect(walk.core);
    })
}

/// Number of ranks that do the halving: the largest power of two that is not above `ranks`.
pub(super) fn core(ranks: u32) -> u32 {
    ranks.checked_ilog2().map_or(1, |log| 1 << log)
}

/// Builds the steps of one rank, and knows its position.
///
/// The halving works on places 0 to p−1. A place is a rank xor the root: the root has place 0, and
/// pairs of places that differ in bit *k* are pairs of ranks that do, which keeps the order of
/// summation. A root among the surplus ranks swaps roles with its partner.
struct Walk {
    script: StepList,
    round: u32,
    ranks: u32,
    core: u32,
    root: u32,
    /// This rank's place, or its partner's if it is a surplus rank.
    place: u32,
    surplus: bool,
}

impl Walk {
    fn write(ranks: u32, me: u32, root: u32, steps: impl FnOnce(&mut Self)) -> Vec<Step> {
        if !has_steps(ranks, me) || root >= ranks {
            return Vec::new();
        }
        let core = core(ranks);
        let mut walk = Self {
            script: StepList::default(),
            round: 0,
            ranks,
            core,
            root,
            place: 0,
            surplus: false,
        };
        let role = walk.swapped(me);
        walk.place = (role ^ root) % core;
        walk.surplus = role >= core;
        steps(&mut walk);
        walk.script.done()
    }

    /// Swaps the root and its partner if the root is a surplus rank; its own inverse.
    fn swapped(&self, rank: u32) -> u32 {
        let (root, partner) = (self.root, self.root % self.core);
        if rank == root {
            partner
        } else if rank == partner {
            root
        } else {
            rank
        }
    }

    fn rank_at(&self, place: u32) -> u32 {
        self.swapped((place ^ self.root) % self.core)
    }

    /// The surplus rank of this rank's pair, which may be this rank itself.
    fn surplus_of_pair(&self) -> Option<u32> {
        let role = (self.place ^ self.root) % self.core + self.core;
        (role < self.ranks).then(|| self.swapped(role))
    }

    /// One round in which the surplus ranks send to their partners, if there are any.
    fn hand_in(&mut self, chunks: impl Fn(u32) -> Chunks, how: Combine) {
        if let Some(surplus) = self.surplus_of_pair() {
            if self.surplus {
                self.script.send(self.round, self.rank_at(self.place), chunks(surplus));
            } else {
                self.script.recv(self.round, surplus, chunks(surplus), how);
            }
        }
        self.round += u32::from(self.ranks > self.core);
    }

    /// One round in which the partners send to the surplus ranks, if there are any.
    fn hand_back(&mut self, chunks: impl Fn(u32) -> Chunks) {
        if let Some(surplus) = self.surplus_of_pair() {
            if self.surplus {
                let partner = self.rank_at(self.place);
                self.script.recv(self.round, partner, chunks(surplus), Combine::Replace);
            } else {
                self.script.send(self.round, surplus, chunks(surplus));
            }
        }
        self.round += u32::from(self.ranks > self.core);
    }

    /// S rounds after which a place holds the sum of the chunks congruent to it modulo p.
    fn halve(&mut self, chunks: u32) {
        for bit in self.bits() {
            if !self.surplus {
                let (peer, modulus) = (self.place ^ bit, 2 * bit);
                let theirs = Chunks::congruent(peer, modulus, chunks);
                let mine = Chunks::congruent(self.place, modulus, chunks);
                self.script.send(self.round, self.rank_at(peer), theirs);
                self.script.recv(self.round, self.rank_at(peer), mine, Combine::Reduce);
            }
            self.round += 1;
        }
    }

    /// S rounds, the halving in reverse, after which every place holds all chunks.
    fn double(&mut self, chunks: u32) {
        for bit in self.bits().rev() {
            if !self.surplus {
                let (peer, modulus) = (self.place ^ bit, 2 * bit);
                let theirs = Chunks::congruent(peer, modulus, chunks);
                let mine = Chunks::congruent(self.place, modulus, chunks);
                self.script.send(self.round, self.rank_at(peer), mine);
                self.script.recv(self.round, self.rank_at(peer), theirs, Combine::Replace);
            }
            self.round += 1;
        }
    }

    /// S rounds that scatter from the root; a place then has the chunks congruent to it modulo p.
    fn deal_out(&mut self, chunks: u32) {
        for bit in self.bits() {
            if !self.surplus && self.place < 2 * bit {
                let peer = self.rank_at(self.place ^ bit);
                let dealt = Chunks::congruent(self.place | bit, 2 * bit, chunks);
                if self.place < bit {
                    self.script.send(self.round, peer, dealt);
                } else {
                    self.script.recv(self.round, peer, dealt, Combine::Replace);
                }
            }
            self.round += 1;
        }
    }

    /// S rounds, the scatter in reverse, after which the root has all chunks.
    fn collect(&mut self, chunks: u32) {
        for bit in self.bits().rev() {
            if !self.surplus && self.place < 2 * bit {
                let peer = self.rank_at(self.place ^ bit);
                let collected = Chunks::congruent(self.place | bit, 2 * bit, chunks);
                if self.place < bit {
                    self.script.recv(self.round, peer, collected, Combine::Replace);
                } else {
                    self.script.send(self.round, peer, collected);
                }
            }
            self.round += 1;
        }
    }

    /// The distances 1, 2, 4, …, p/2.
    fn bits(&self) -> impl DoubleEndedIterator<Item = u32> + use<> {
        (0..self.core.ilog2()).map(|k| 1 << k)
    }
}
