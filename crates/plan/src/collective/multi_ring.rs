//! Several concurrent rings with different rank orders, each for its share of the vector.
//!
//! A ring in rank order loads one of a rank's links in one direction. Ring 0 runs that way and ring
//! 1 backwards, so that full-duplex links carry data both ways. Ring 2 skips ranks: it always goes
//! to the *s*-th next rank, for the smallest *s* > 1 that still visits every rank. Ring 3 is the
//! same backwards, and so on. These rings use other neighbours, and therefore other links on a
//! machine with a dedicated link per device pair. P ranks have φ(P) such rings, the count of
//! numbers below P coprime to P; a larger request is capped at φ(P).
//!
//! In the formulas *P* is the number of ranks, *C* ≤ φ(P) the number of rings, and *N* the bytes of
//! the whole vector. The vector is split into chunks as for one [`ring`], and each chunk into C
//! pieces; piece *r* travels on ring *r*. As on one ring, sums start at any rank, so the order is
//! not canonical.

use super::definition::{AlgorithmDef, Counted, Hints, NO_GATHER, Parameter, Rotation, Symmetric};
use super::step::{Chunks, Combine, Step, StepList};
use super::{Algorithm, CollectiveError, CollectiveKind, Pattern, gcd, has_steps, relative, ring};

/// Maximum number of rings that share a vector; no device has this number of links.
pub const MAX_RINGS: u32 = 256;

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "multi-ring",
    number: 8,
    parameter: Some(Parameter {
        form: "multi-ring:C",
        needs: "a number of rings from 1 to 256, such as multi-ring:2",
        parse: |word| {
            let rings = word?.parse().ok().filter(|rings| (1..=MAX_RINGS).contains(rings))?;
            Some([rings, 0, 0, 0, 0, 0])
        },
        print: |[rings, ..]| Some(rings.to_string()),
    }),
    suggested: Some([2, 0, 0, 0, 0, 0]),
    kinds: NO_GATHER,
    is_canonical: |_| false,
    check: |p| match rings(p) {
        1..=MAX_RINGS => Ok(()),
        _ => Err(CollectiveError::Unfit(format!(
            "{}: there can be from 1 to {MAX_RINGS} rings",
            p.algorithm
        ))),
    },
    chunks: ring::chunks,
    rounds: ring::rounds,
    steps: |p, me| match p.kind {
        CollectiveKind::AllReduce => all_reduce(p.ranks, me, rings(p)),
        CollectiveKind::ReduceScatter => reduce_scatter(p.ranks, me, rings(p)),
        CollectiveKind::AllGather => all_gather(p.ranks, me, rings(p)),
        CollectiveKind::Broadcast => broadcast(p.ranks, me, p.root, rings(p)),
        CollectiveKind::Reduce => reduce(p.ranks, me, p.root, rings(p)),
        CollectiveKind::Gather | CollectiveKind::AllToAll => Vec::new(),
    },
    counted: Counted::AllIfSmall,
    hints: Hints {
        is_ring: true,
        symmetric: Symmetric::PowersOfTwo,
        rotation: |_| Rotation::Ranks,
        sends_in_place: true,
        ..AlgorithmDef::BASE.hints
    },
    ..AlgorithmDef::BASE
};

fn rings(p: &Pattern) -> u32 {
    match p.algorithm {
        Algorithm::MultiRing { rings } => rings,
        _ => 0,
    }
}

/// Each ring reduces its piece of every chunk in one pass and distributes it in a second pass.
///
/// Rounds 2(P−1); bytes sent and received per rank 2N(P−1)/P; fan-in C. Chunks: P.
pub fn all_reduce(ranks: u32, me: u32, rings: u32) -> Vec<Step> {
    Rings::write(ranks, me, rings, |rings| {
        rings.scatter_rounds(0);
        rings.gather_rounds(ranks - 1);
    })
}

/// On each ring, the piece of part *i* starts at the rank after *i* and arrives at *i*, reduced.
///
/// Rounds P−1; bytes sent and received per rank N(P−1)/P; fan-in C. Chunks: P.
pub fn reduce_scatter(ranks: u32, me: u32, rings: u32) -> Vec<Step> {
    Rings::write(ranks, me, rings, |rings| rings.scatter_rounds(0))
}

/// Each part travels around from its owner, one piece per ring.
///
/// Rounds P−1; bytes sent and received per rank N(P−1)/P; fan-in C. Chunks: P.
pub fn all_gather(ranks: u32, me: u32, rings: u32) -> Vec<Step> {
    Rings::write(ranks, me, rings, |rings| rings.gather_rounds(0))
}

/// Each ring's share streams down a chain that starts at the root.
///
/// Rounds P−2 + K, where K = 4(P−2) + 1 is the number of chunks; bytes sent and received per rank N;
/// fan-in C.
pub fn broadcast(ranks: u32, me: u32, root: u32, rings: u32) -> Vec<Step> {
    if root >= ranks {
        return Vec::new();
    }
    Rings::write(ranks, me, rings, |rings| {
        let place = relative(me, root, ranks);
        let chains: Vec<_> = rings
            .strides
            .iter()
            .map(|&stride| Chain {
                place: times(place, inverse(stride, ranks), ranks),
                previous: (me + ranks - stride) % ranks,
                next: (me + stride) % ranks,
            })
            .collect();
        rings.stream(&chains, Combine::Replace);
    })
}

/// Each ring's share is summed along a chain that ends at the root.
///
/// Rounds P−2 + K, where K = 4(P−2) + 1 is the number of chunks; bytes sent and received per rank N;
/// fan-in C.
pub fn reduce(ranks: u32, me: u32, root: u32, rings: u32) -> Vec<Step> {
    if root >= ranks {
        return Vec::new();
    }
    Rings::write(ranks, me, rings, |rings| {
        let place = relative(me, root, ranks);
        let chains: Vec<_> = rings
            .strides
            .iter()
            .map(|&stride| Chain {
                // The chain of `broadcast` reversed: place 0 is the farthest from the root.
                place: ranks - 1 - times(place, inverse(stride, ranks), ranks),
                previous: (me + stride) % ranks,
                next: (me + ranks - stride) % ranks,
            })
            .collect();
        rings.stream(&chains, Combine::Reduce);
    })
}

/// Builder for the steps of one rank.
struct Rings {
    script: StepList,
    ranks: u32,
    me: u32,
    /// Distance in rank order to the next rank, per ring.
    strides: Vec<u32>,
}

/// Position of a rank in a chain.
struct Chain {
    place: u32,
    previous: u32,
    next: u32,
}

impl Rings {
    fn write(ranks: u32, me: u32, rings: u32, steps: impl FnOnce(&mut Self)) -> Vec<Step> {
        if !has_steps(ranks, me) || rings == 0 {
            return Vec::new();
        }
        let strides = strides(ranks, rings);
        let mut rings = Self { script: StepList::default(), ranks, me, strides };
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
        let (ranks, me) = (self.ranks, self.me);
        let at = |behind: u32, stride: u32| (me + ranks - times(behind, stride, ranks)) % ranks;
        for (ring, &stride) in (0..).zip(&self.strides) {
            let chunks = self.piece(at(behind, stride), ring);
            self.script.send(round, (me + stride) % ranks, chunks);
        }
        for (ring, &stride) in (0..).zip(&self.strides) {
            let chunks = self.piece(at(behind + 1, stride), ring);
            self.script.recv(round, at(1, stride), chunks, how);
        }
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
        Chunks::one(chunk).piece(ring, self.strides.len() as u32)
    }
}

/// Distance to the next rank on each ring, for at most `rings` rings.
fn strides(ranks: u32, rings: u32) -> Vec<u32> {
    let halves = (1..ranks).take_while(|stride| 2 * stride <= ranks);
    let strides = halves.filter(|&stride| gcd(stride, ranks) == 1);
    let both = strides.flat_map(|stride| [stride, ranks - stride]);
    // Two ranks have only one ring, identical in both directions.
    both.take(rings.min(ranks - 1) as usize).collect()
}

/// a·b modulo m.
fn times(a: u32, b: u32, m: u32) -> u32 {
    (u64::from(a) * u64::from(b) % u64::from(m)) as u32
}

/// Multiplicative inverse of `a` modulo `m`; exists if both are coprime.
fn inverse(a: u32, m: u32) -> u32 {
    // Extended Euclid; `x·a ≡ r` holds for both pairs.
    let (mut r, mut next_r) = (i64::from(m), i64::from(a % m));
    let (mut x, mut next_x) = (0i64, 1i64);
    while next_r != 0 {
        let quotient = r / next_r;
        (r, next_r) = (next_r, r - quotient * next_r);
        (x, next_x) = (next_x, x - quotient * next_x);
    }
    x.rem_euclid(i64::from(m)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directions_alternate_and_every_ring_visits_everyone() {
        assert_eq!(strides(8, 9), [1, 7, 3, 5]);
        assert_eq!(strides(5, 3), [1, 4, 2]);
        assert_eq!(strides(2, 4), [1]);
        assert!(strides(1, 4).is_empty());
        for ranks in 2..60 {
            for stride in strides(ranks, u32::MAX) {
                assert_eq!(times(stride, inverse(stride, ranks), ranks), 1, "{stride} of {ranks}");
            }
        }
    }

    #[test]
    fn one_ring_is_the_ring() {
        for ranks in 1..=9 {
            for me in 0..ranks {
                assert_eq!(all_reduce(ranks, me, 1), ring::all_reduce(ranks, me));
                assert_eq!(
                    broadcast(ranks, me, 1 % ranks, 1),
                    ring::broadcast(ranks, me, 1 % ranks)
                );
                assert_eq!(reduce(ranks, me, 1 % ranks, 1), ring::reduce(ranks, me, 1 % ranks));
            }
        }
    }
}
