//! Several rings at once, in different orders, each for its share of the vector.
//!
//! A ring in rank order loads one of a rank's links in one direction. Ring 0 goes that way, ring 1
//! backwards, so that full-duplex links carry data both ways; ring 2 steps over ranks, always to the
//! *s*-th next for the smallest *s* that still visits everyone, ring 3 the same backwards, and so on:
//! other neighbours, and so other links of a machine where every two devices have their own. P ranks
//! have φ(P) such rings, as many as there are numbers below P with no divisor in common with it;
//! whoever asks for more gets those.
//!
//! In the formulas *P* is the number of ranks, *C* ≤ φ(P) that of rings, and *N* the bytes of the whole
//! vector. The vector is cut into chunks as for one [`ring`], and each chunk into C pieces,
//! of which piece *r* travels on ring *r*. As on one ring, sums start anywhere, so the order is not the
//! canonical one.

use super::step::{Chunks, Combine, Script, Step};
use super::{gcd, has_steps, relative, ring};

/// On each ring its piece of each chunk is summed around once, then handed around once.
///
/// Rounds 2(P−1); bytes sent and received per rank 2N(P−1)/P; fan-in C. Chunks: P.
pub fn all_reduce(ranks: u32, me: u32, rings: u32) -> Vec<Step> {
    Rings::write(ranks, me, rings, |rings| {
        rings.scatter_rounds(0);
        rings.gather_rounds(ranks - 1);
    })
}

/// On each ring its piece of part *i* starts behind rank *i* and arrives there, summed.
///
/// Rounds P−1; bytes sent and received per rank N(P−1)/P; fan-in C. Chunks: P.
pub fn reduce_scatter(ranks: u32, me: u32, rings: u32) -> Vec<Step> {
    Rings::write(ranks, me, rings, |rings| rings.scatter_rounds(0))
}

/// Each part travels around from its owner, a piece on each ring.
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
                // The chain of `broadcast` backwards: place 0 is the farthest from the root.
                place: ranks - 1 - times(place, inverse(stride, ranks), ranks),
                previous: (me + stride) % ranks,
                next: (me + ranks - stride) % ranks,
            })
            .collect();
        rings.stream(&chains, Combine::Reduce);
    })
}

/// The steps of one rank while they are written.
struct Rings {
    script: Script,
    ranks: u32,
    me: u32,
    /// By ring, how far ahead in rank order the next rank is.
    strides: Vec<u32>,
}

/// Where a rank stands in a chain.
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
        let mut rings = Self { script: Script::default(), ranks, me, strides };
        steps(&mut rings);
        rings.script.done()
    }

    /// The P−1 rounds after which rank *i* holds the sum of part *i*.
    fn scatter_rounds(&mut self, first_round: u32) {
        for k in 0..self.ranks - 1 {
            self.exchange(first_round + k, k + 1, Combine::Reduce);
        }
    }

    /// The P−1 rounds that hand part *i* from rank *i* to everyone.
    fn gather_rounds(&mut self, first_round: u32) {
        for k in 0..self.ranks - 1 {
            self.exchange(first_round + k, k, Combine::Replace);
        }
    }

    /// A round in which each ring passes on the part of the rank so many places behind.
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

    /// All chunks, one after the other, a piece on every chain.
    fn stream(&mut self, chains: &[Chain], how: Combine) {
        let (last, chunks) = (self.ranks - 1, ring::chain_chunks(self.ranks));
        // At place d, chunk c comes in during round d−1+c and goes out during round d+c.
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

    /// What of a chunk travels on a ring.
    fn piece(&self, chunk: u32, ring: u32) -> Chunks {
        Chunks::one(chunk).piece(ring, self.strides.len() as u32)
    }
}

/// How far ahead the next rank is on each of at most so many rings.
fn strides(ranks: u32, rings: u32) -> Vec<u32> {
    let halves = (1..ranks).take_while(|stride| 2 * stride <= ranks);
    let strides = halves.filter(|&stride| gcd(stride, ranks) == 1);
    let both = strides.flat_map(|stride| [stride, ranks - stride]);
    // Two ranks have but one ring, which is the same backwards.
    both.take(rings.min(ranks - 1) as usize).collect()
}

/// a·b modulo m.
fn times(a: u32, b: u32, m: u32) -> u32 {
    (u64::from(a) * u64::from(b) % u64::from(m)) as u32
}

/// The number whose product with `a` is 1 modulo `m`; there is one if they have no divisor in common.
fn inverse(a: u32, m: u32) -> u32 {
    // Euclid's algorithm, in which `x·a ≡ r` holds for both pairs.
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
