//! One dimension of a torus after the other, so that every message goes to a neighbour.
//!
//! The ranks form a torus of sizes A × B × …; the first dimension runs through consecutive ranks. A
//! rank reduces and scatters along the ring of its first dimension, then its remaining part along
//! the second, and so on; then everything is gathered in reverse order. The bytes are those of one
//! [`ring`](super::ring) through all ranks, in far fewer rounds. Most bytes move in the first
//! dimension; each further dimension moves less by the factor of the previous size.
//!
//! After the dimensions below *d*, whose sizes have the product *q*, a rank is responsible for the
//! chunks that are congruent to it modulo *q*; after all of them, for its own.
//!
//! In the formulas *P* = A·B·… is the number of ranks, *D* = (A−1) + (B−1) + …, and *N* the bytes
//! of the whole vector. A ring of two ranks adds two numbers, and addition commutes: with no
//! dimension above 2 the order of summation is canonical, and the algorithm is halving and
//! doubling.

use super::algorithm::TorusShape;
use super::has_steps;
use super::step::{Chunks, Combine, Step, StepList};

/// A reduce_scatter along each dimension, followed by all_gathers in reverse order.
///
/// Rounds 2D; bytes sent and received per rank 2N(P−1)/P; fan-in 1. Chunks: P.
pub fn all_reduce(shape: TorusShape, me: u32) -> Vec<Step> {
    Walk::write(shape, me, |walk| {
        walk.scatter();
        walk.gather();
    })
}

/// A reduce_scatter along each dimension, in order.
///
/// Rounds D; bytes sent and received per rank N(P−1)/P; fan-in 1. Chunks: P.
pub fn reduce_scatter(shape: TorusShape, me: u32) -> Vec<Step> {
    Walk::write(shape, me, Walk::scatter)
}

/// An all_gather along each dimension, in reverse order.
///
/// Rounds D; bytes sent and received per rank N(P−1)/P; fan-in 1. Chunks: P.
pub fn all_gather(shape: TorusShape, me: u32) -> Vec<Step> {
    Walk::write(shape, me, Walk::gather)
}

/// Builder for the steps of one rank.
struct Walk {
    script: StepList,
    round: u32,
    shape: TorusShape,
    ranks: u32,
    me: u32,
}

impl Walk {
    fn write(shape: TorusShape, me: u32, steps: impl FnOnce(&mut Self)) -> Vec<Step> {
        let ranks = u32::try_from(shape.ranks()).unwrap_or(u32::MAX);
        if !has_steps(ranks, me) {
            return Vec::new();
        }
        let mut walk = Self { script: StepList::default(), round: 0, shape, ranks, me };
        steps(&mut walk);
        walk.script.done()
    }

    fn scatter(&mut self) {
        for ring in self.rings() {
            for k in 0..ring.size - 1 {
                let gone = (ring.place + ring.size - 1 - k) % ring.size;
                let come = (gone + ring.size - 1) % ring.size;
                self.exchange(&ring, gone, come, Combine::Reduce);
            }
        }
    }

    fn gather(&mut self) {
        for ring in self.rings().rev() {
            for k in 0..ring.size - 1 {
                let gone = (ring.place + ring.size - k) % ring.size;
                let come = (gone + ring.size - 1) % ring.size;
                self.exchange(&ring, gone, come, Combine::Replace);
            }
        }
    }

    /// One round along a ring: sends the chunks of place `gone` ahead and receives those of `come`.
    fn exchange(&mut self, ring: &Ring, gone: u32, come: u32, how: Combine) {
        let next = ring.rank_at((ring.place + 1) % ring.size);
        let previous = ring.rank_at((ring.place + ring.size - 1) % ring.size);
        self.script.send(self.round, next, ring.chunks_of(gone, self.ranks));
        self.script.recv(self.round, previous, ring.chunks_of(come, self.ranks), how);
        self.round += 1;
    }

    /// This rank's ring in each dimension.
    fn rings(&self) -> impl DoubleEndedIterator<Item = Ring> + use<> {
        let (mut rings, mut below) = (Vec::new(), 1);
        for size in self.shape.sizes() {
            let place = self.me / below % size;
            rings.push(Ring { size, below, place, first: self.me - place * below });
            below *= size;
        }
        rings.into_iter()
    }
}

/// The ranks that differ from a rank in a single dimension only.
struct Ring {
    size: u32,
    /// Product of the sizes of the preceding dimensions: the rank distance of neighbours.
    below: u32,
    place: u32,
    /// The rank at place 0.
    first: u32,
}

impl Ring {
    fn rank_at(&self, place: u32) -> u32 {
        self.first + place * self.below
    }

    /// Chunks owned by the rank at `place` after this dimension is done.
    fn chunks_of(&self, place: u32, ranks: u32) -> Chunks {
        Chunks::congruent(self.rank_at(place), self.below * self.size, ranks)
    }
}
