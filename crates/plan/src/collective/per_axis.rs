//! An all_reduce of the whole vector along one axis of a torus after the other.
//!
//! The ranks form a torus of sizes A × B × …, as in [`torus`](super::torus). Each axis sums the whole
//! vector of its rings in turn, so that nothing is scattered from one axis to the next. Every axis
//! moves 2(s−1)/s vectors, where a torus' further axes move only what is left of one: each additional
//! axis *increases* the bytes that a rank sends, while it lowers the number of rounds.
//!
//! In the formulas *D* = (A−1) + (B−1) + …, *V* = (A−1)/A + (B−1)/B + …, and *N* the bytes of the
//! whole vector.

use super::counts::around_in_grid;
use super::definition::{AlgorithmDef, Counted, Hints, Inner, Parameter, Symmetric};
use super::step::{Chunks, Combine, Step, StepList};
use super::torus::TorusShape;
use super::{Algorithm, CollectiveError, CollectiveKind, Pattern, has_steps};

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "per-axis",
    number: 14,
    parameter: Some(Parameter {
        form: "per-axis:AxBxC",
        needs: "from 1 to 6 sizes of at least 1, such as per-axis:4x4x2",
        parse: |word| Some(TorusShape::parse(word?)?.words()),
        print: |words| Some(TorusShape::of_words(words)?.to_string()),
    }),
    suggested: None,
    kinds: &[CollectiveKind::AllReduce],
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
        2 * sizes.map(|size| size - 1).sum::<u32>()
    },
    steps: |p, me| shape(p).map_or_else(Vec::new, |shape| all_reduce(shape, me)),
    counted: Counted::AllIfSmall,
    edges: |p| around_in_grid(shape(p).into_iter().flat_map(|shape| shape.sizes())),
    inner: Inner { is_replicated: true, ..AlgorithmDef::BASE.inner },
    hints: Hints { symmetric: Symmetric::None, ..AlgorithmDef::BASE.hints },
    ..AlgorithmDef::BASE
};

fn shape(p: &Pattern) -> Option<TorusShape> {
    match p.algorithm {
        Algorithm::PerAxis { shape } => Some(shape),
        _ => None,
    }
}

/// A ring all_reduce of the whole vector along each axis, in order.
///
/// Rounds 2D; bytes sent and received per rank 2NV; fan-in 1. Chunks: P.
pub fn all_reduce(shape: TorusShape, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    let Ok(ranks) = u32::try_from(shape.ranks()) else { return Vec::new() };
    if has_steps(ranks, me) {
        let (mut stride, mut round) = (1, 0);
        for size in shape.sizes() {
            round = axis(&mut script, round, (ranks, me), (size, stride));
            stride *= size;
        }
    }
    script.done()
}

/// The rounds of one axis; returns the next round.
fn axis(
    script: &mut StepList,
    first: u32,
    (ranks, me): (u32, u32),
    (size, stride): (u32, u32),
) -> u32 {
    let place = me / stride % size;
    let at = |place: u32| me - me / stride % size * stride + place % size * stride;
    let (next, previous) = (at(place + 1), at(place + size - 1));
    // The vector is divided into as many parts as the axis has members.
    let each = ranks / size;
    let part = |index: u32| Chunks::spaced(index % size * each, each, 1);
    let mut round = first;
    for (turns, how) in [(0, Combine::Reduce), (1, Combine::Replace)] {
        for k in 0..size - 1 {
            let gone = place + 2 * size - 1 - k + turns;
            script.send(round, next, part(gone));
            script.recv(round, previous, part(gone + size - 1), how);
            round += 1;
        }
    }
    round
}
