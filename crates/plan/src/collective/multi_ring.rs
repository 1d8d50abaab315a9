//! Several concurrent rings with different rank orders, each for its share of the vector.
//!
//! A ring in rank order loads one of a rank's links in one direction. Rings in other orders use other
//! neighbours, and therefore other links on a machine with a dedicated link per device pair, and
//! leave a host through other ports. Which orders they are is in [`RingSet`]: code that knows the
//! cluster finds them on its links ([`Fabric::resolve`](super::Fabric::resolve)). P ranks of which
//! nothing is known have φ(P) such rings, the count of numbers below P coprime to P; a larger request
//! is capped there.
//!
//! In the formulas *P* is the number of ranks, *C* the number of rings, and *N* the bytes of
//! the whole vector. The vector is split into chunks as for one [`ring`], and each chunk into C
//! pieces; piece *r* travels on ring *r*. As on one ring, sums start at any rank, so the order is
//! not canonical.

use super::definition::{AlgorithmDef, Counted, Hints, NO_GATHER, Parameter, Rotation, Symmetric};
use super::ring_set::{MAX_RINGS, RingSet, Route};
use super::step::{Chunks, Combine, Step, StepList};
use super::{Algorithm, CollectiveError, CollectiveKind, Pattern, has_steps, ring};

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "multi-ring",
    number: 8,
    parameter: Some(Parameter {
        form: "multi-ring:C",
        needs: "a number of rings from 1 to 256, such as multi-ring:2",
        parse: |word| Some(RingSet::parse(word?)?.words()),
        print: |words| Some(RingSet::of_words(words)?.to_string()),
    }),
    suggested: Some([2, 0, 0, 0, 0, 0]),
    kinds: NO_GATHER,
    is_canonical: |_| false,
    check: |p| {
        let host = rings(p).host().unwrap_or(1);
        if !(1..=MAX_RINGS).contains(&rings(p).count()) {
            let text = format!("{}: there can be from 1 to {MAX_RINGS} rings", p.algorithm);
            return Err(CollectiveError::Unfit(text));
        }
        if !p.ranks.is_multiple_of(host) {
            let text = format!("{}: {} ranks are not hosts of {host}", p.algorithm, p.ranks);
            return Err(CollectiveError::Unfit(text));
        }
        if !rings(p).is_apart(p.ranks) {
            let text = format!("{}: two rings of {} ranks take one link", p.algorithm, p.ranks);
            return Err(CollectiveError::Unfit(text));
        }
        Ok(())
    },
    chunks: ring::chunks,
    rounds: ring::rounds,
    steps: |p, me| match p.kind {
        CollectiveKind::AllReduce => all_reduce(p.ranks, me, rings(p)),
        CollectiveKind::ReduceScatter => reduce_scatter(p.ranks, me, rings(p)),
        CollectiveKind::AllGather => all_gather(p.ranks, me, rings(p)),
        CollectiveKind::Broadcast => broadcast(p.ranks, me, p.root, rings(p)),
        CollectiveKind::Reduce => reduce(p.ranks, me, p.root, rings(p)),
        CollectiveKind::Gather
        | CollectiveKind::AllToAll
        | CollectiveKind::Scatter
        | CollectiveKind::SendRecv
        | CollectiveKind::Barrier => Vec::new(),
    },
    counted: Counted::AllIfSmall,
    hints: Hints {
        symmetric: Symmetric::None,
        rotation: |p| match rings(p).host() {
            None => Rotation::Ranks,
            Some(_) => Rotation::None,
        },
        sends_in_place: true,
        ..AlgorithmDef::BASE.hints
    },
    ..AlgorithmDef::BASE
};

fn rings(p: &Pattern) -> RingSet {
    match p.algorithm {
        Algorithm::MultiRing { rings } => rings,
        _ => RingSet::new(0),
    }
}

/// Each ring reduces its piece of every chunk in one pass and distributes it in a second pass.
///
/// Rounds 2(P−1); bytes sent and received per rank 2N(P−1)/P; fan-in C. Chunks: P.
pub fn all_reduce(ranks: u32, me: u32, rings: RingSet) -> Vec<Step> {
    Rings::write(ranks, me, rings, |rings| {
        rings.scatter_rounds(0);
        rings.gather_rounds(ranks - 1);
    })
}

/// On each ring, the piece of part *i* starts at the rank after *i* and arrives at *i*, reduced.
///
/// Rounds P−1; bytes sent and received per rank N(P−1)/P; fan-in C. Chunks: P.
pub fn reduce_scatter(ranks: u32, me: u32, rings: RingSet) -> Vec<Step> {
    Rings::write(ranks, me, rings, |rings| rings.scatter_rounds(0))
}

/// Each part travels around from its owner, one piece per ring.
///
/// Rounds P−1; bytes sent and received per rank N(P−1)/P; fan-in C. Chunks: P.
pub fn all_gather(ranks: u32, me: u32, rings: RingSet) -> Vec<Step> {
    Rings::write(ranks, me, rings, |rings| rings.gather_rounds(0))
}

/// Each ring's share streams down a chain that starts at the root.
///
/// Rounds P−2 + K, where K = 4(P−2) + 1 is the number of chunks; bytes sent and received per rank N;
/// fan-in C.
pub fn broadcast(ranks: u32, me: u32, root: u32, rings: RingSet) -> Vec<Step> {
    if root >= ranks {
        return Vec::new();
    }
    Rings::write(ranks, me, rings, |rings| {
        let chain = |route: &Route| {
            let (here, root) = (route.place(me), route.place(root));
            Chain {
                place: (here + ranks - root) % ranks,
                previous: route.rank(here + ranks - 1),
                next: route.rank(here + 1),
            }
        };
        let chains: Vec<_> = rings.routes.iter().map(chain).collect();
        rings.stream(&chains, Combine::Replace);
    })
}

/// Each ring's share is summed along a chain that ends at the root.
///
/// Rounds P−2 + K, where K = 4(P−2) + 1 is the number of chunks; bytes sent and received per rank N;
/// fan-in C.
pub fn reduce(ranks: u32, me: u32, root: u32, rings: RingSet) -> Vec<Step> {
    if root >= ranks {
        return Vec::new();
    }
    Rings::write(ranks, me, rings, |rings| {
        let chain = |route: &Route| {
            let (here, root) = (route.place(me), route.place(root));
            Chain {
                // The chain of `broadcast` reversed: place 0 is the farthest from the root.
                place: ranks - 1 - (here + ranks - root) % ranks,
                previous: route.rank(here + 1),
                next: route.rank(here + ranks - 1),
            }
        };
        let chains: Vec<_> = rings.routes.iter().map(chain).collect();
        rings.stream(&chains, Combine::Reduce);
    })
}

/// Builder for the steps of one rank.
struct Rings {
    script: StepList,
    ranks: u32,
    me: u32,
    routes: Vec<Route>,
}

/// Position of a rank in a chain.
struct Chain {
    place: u32,
    previous: u32,
    next: u32,
}

impl Rings {
    fn write(ranks: u32, me: u32, rings: RingSet, steps: impl FnOnce(&mut Self)) -> Vec<Step> {
        if !has_steps(ranks, me) || rings.count() == 0 {
            return Vec::new();
        }
        let routes = rings.routes(ranks);
        let mut rings = Self { script: StepList::default(), ranks, me, routes };
        steps(&mut rings);
        rings.script.done()
    }

    /// The P−1 rounds after which rank *i* holds the sum of part *i*.
    fn scatter_rounds(&mut self, first_round: u32) {
        for k in 0..self.ranks - 1 {
            self.exchange(first_round + k, k + 1, Combine::Reduce);
        }
    }

    /// The P−1 rounds that pass part *i* from rank *i* to all ranks.
    fn gather_rounds(&mut self, first_round: u32) {
        for k in 0..self.ranks - 1 {
            self.exchange(first_round + k, k, Combine::Replace);
        }
    }

    /// One round in which each ring forwards the part of the rank `behind` places behind.
    fn exchange(&mut self, round: u32, behind: u32, how: Combine) {
        let mut script = std::mem::take(&mut self.script);
        let here = |route: &Route| route.place(self.me) + self.ranks;
        for (ring, route) in (0..).zip(&self.routes) {
            let chunks = self.piece(route.rank(here(route) - behind), ring);
            script.send(round, route.rank(here(route) + 1), chunks);
        }
        for (ring, route) in (0..).zip(&self.routes) {
            let chunks = self.piece(route.rank(here(route) - behind - 1), ring);
            script.recv(round, route.rank(here(route) - 1), chunks, how);
        }
        self.script = script;
    }

    /// Streams all chunks in sequence, one piece per chain.
    fn stream(&mut self, chains: &[Chain], how: Combine) {
        let (last, chunks) = (self.ranks - 1, ring::chain_chunks(self.ranks));
        // At place d, chunk c arrives in round d−1+c and is sent in round d+c.
        for round in 0..(last + chunks).saturating_sub(1) {
            for (ring, chain) in (0..).zip(chains).filter(|(_, chain)| chain.place < last) {
                if let Some(chunk) = round.checked_sub(chain.place).filter(|&c| c < chunks) {
                    self.script.send(round, chain.next, self.piece(chunk, ring));
                }
            }
            for (ring, chain) in (0..).zip(chains).filter(|(_, chain)| chain.place > 0) {
                if let Some(chunk) = (round + 1).checked_sub(chain.place).filter(|&c| c < chunks) {
                    self.script.recv(round, chain.previous, self.piece(chunk, ring), how);
                }
            }
        }
    }

    /// Piece of a chunk that travels on a ring.
    fn piece(&self, chunk: u32, ring: u32) -> Chunks {
        Chunks::one(chunk).piece(ring, self.routes.len() as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_ring_is_the_ring() {
        for ranks in 1..=9 {
            for me in 0..ranks {
                let (one, root) = (RingSet::new(1), 1 % ranks);
                assert_eq!(all_reduce(ranks, me, one), ring::all_reduce(ranks, me));
                assert_eq!(broadcast(ranks, me, root, one), ring::broadcast(ranks, me, root));
                assert_eq!(reduce(ranks, me, root, one), ring::reduce(ranks, me, root));
            }
        }
    }
}
