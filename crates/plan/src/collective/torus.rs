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

use super::counts::around_in_grid;
use super::definition::{AlgorithmDef, Counted, Hints, PARTS, Parameter, Symmetric, Words, ways};
use super::step::{Chunks, Combine, Step, StepList};
use super::{Algorithm, CollectiveError, CollectiveKind, Pattern, has_steps};
use std::fmt;

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "torus",
    number: 10,
    parameter: Some(Parameter {
        form: "torus:AxBxC",
        needs: "from 1 to 6 sizes of at least 1, such as torus:4x4x2",
        parse: |word| Some(TorusShape::parse(word?)?.words()),
        print: |words| Some(TorusShape::of_words(words)?.to_string()),
    }),
    suggested: None,
    kinds: PARTS,
    is_canonical: |p| shape(p).is_some_and(|shape| shape.sizes().all(|size| size <= 2)),
    check: |p| match shape(p) {
        Some(shape) if shape.ranks() == u64::from(p.ranks) => Ok(()),
        shape => Err(CollectiveError::Unfit(format!(
            "{} has {} places, but the group has {} ranks",
            p.algorithm,
            shape.map_or(0, |shape| shape.ranks()),
            p.ranks
        ))),
    },
    rounds: |p| {
        let sizes = shape(p).into_iter().flat_map(|shape| shape.sizes());
        ways(p) * sizes.map(|size| size - 1).sum::<u32>()
    },
    steps: |p, me| match (p.kind, shape(p)) {
        (CollectiveKind::AllReduce, Some(shape)) => all_reduce(shape, me),
        (CollectiveKind::ReduceScatter, Some(shape)) => reduce_scatter(shape, me),
        (CollectiveKind::AllGather, Some(shape)) => all_gather(shape, me),
        _ => Vec::new(),
    },
    counted: Counted::AllIfSmall,
    edges: |p| around_in_grid(shape(p).into_iter().flat_map(|shape| shape.sizes())),
    hints: Hints { symmetric: Symmetric::None, ..AlgorithmDef::BASE.hints },
    ..AlgorithmDef::BASE
};

fn shape(p: &Pattern) -> Option<TorusShape> {
    match p.algorithm {
        Algorithm::Torus { shape } => Some(shape),
        _ => None,
    }
}

/// Sizes of a torus' dimensions, innermost first, where consecutive ranks are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TorusShape {
    /// Sizes of at least 1, padded with 0 for unused dimensions.
    sizes: [u32; Self::MAX_DIMENSIONS],
}

impl TorusShape {
    /// Maximum number of dimensions of a shape.
    pub const MAX_DIMENSIONS: usize = 6;

    /// Creates a shape; `None` if a dimension is empty, or if there are too few or too many
    /// dimensions.
    pub fn new(sizes: &[u32]) -> Option<Self> {
        let mut shape = Self { sizes: [0; Self::MAX_DIMENSIONS] };
        shape.sizes.get_mut(..sizes.len())?.copy_from_slice(sizes);
        (!sizes.is_empty() && !sizes.contains(&0)).then_some(shape)
    }

    /// The sizes.
    pub fn sizes(&self) -> impl DoubleEndedIterator<Item = u32> + Clone + use<> {
        self.sizes.into_iter().filter(|&size| size > 0)
    }

    /// Number of ranks of a torus of this shape.
    pub fn ranks(&self) -> u64 {
        self.sizes().fold(1, |ranks: u64, size| ranks.saturating_mul(size.into()))
    }

    /// The sizes as the words of a parameter.
    pub(super) const fn words(self) -> Words {
        self.sizes
    }

    pub(super) fn of_words(words: Words) -> Option<Self> {
        let dimensions = words.iter().take_while(|size| **size > 0).count();
        Self::new(&words[..dimensions])
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let sizes: Option<Vec<u32>> = text.split('x').map(|size| size.parse().ok()).collect();
        Self::new(&sizes?)
    }
}

impl fmt::Display for TorusShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.sizes().map(|size| size.to_string()).collect::<Vec<_>>().join("x"))
    }
}

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
