//! Reductions of vectors.

use paceline_plan::collective::{Reduction, canonical_fold};

/// Reduces `from` into `into`, element by element.
pub(crate) fn reduce_into(reduction: Reduction, into: &mut [f32], from: &[f32]) {
    debug_assert_eq!(into.len(), from.len());
    match reduction {
        Reduction::Sum => {
            for (a, b) in into.iter_mut().zip(from) {
                *a += b;
            }
        }
        Reduction::Max => {
            for (a, b) in into.iter_mut().zip(from) {
                *a = maximum(*a, *b);
            }
        }
    }
}

/// The contributions of all members but one, in the members' order, and that one's place.
pub(crate) struct Contributions<'a> {
    /// What the others sent.
    pub(crate) others: &'a mut [Vec<f32>],
    /// How many of them stand before the member that reduces.
    pub(crate) before: usize,
}

impl Contributions<'_> {
    /// Reduces elements `at..` of the others with `own`, in canonical order, into `own`.
    ///
    /// A tile at a time, so that every partial sum stays in the nearest cache.
    pub(crate) fn fold_into(&mut self, reduction: Reduction, own: &mut [f32], at: usize) {
        const TILE: usize = 2048;
        for (i, own) in own.chunks_mut(TILE).enumerate() {
            self.fold_tile(reduction, own, at + i * TILE);
        }
    }

    fn fold_tile(&mut self, reduction: Reduction, own: &mut [f32], at: usize) {
        let tile = at..at + own.len();
        let (before, others) = (self.before, &mut *self.others);
        let (left, right) = (0..before, before..others.len());
        let members = left.map(Some).chain([None]).chain(right.map(Some));
        // `None` is the reducing member. Both reductions commute, so whichever operand is its own
        // takes the result, and in the end that is where everything has gone.
        canonical_fold(members, |a, b| match (a, b) {
            (Some(a), Some(b)) => {
                if let Ok([into, from]) = others.get_disjoint_mut([a, b]) {
                    reduce_into(reduction, &mut into[tile.clone()], &from[tile.clone()]);
                }
                Some(a)
            }
            (None, Some(other)) | (Some(other), None) => {
                reduce_into(reduction, own, &others[other][tile.clone()]);
                None
            }
            (None, None) => None,
        });
    }
}

/// The larger of two numbers: NaN if either is, and +0 above −0, so that the order of the operands
/// never shows.
fn maximum(a: f32, b: f32) -> f32 {
    if a > b {
        a
    } else if b > a {
        b
    } else if a == b {
        // Equal numbers have equal bits, except for zeros, of which this gives the positive one.
        f32::from_bits(a.to_bits() & b.to_bits())
    } else {
        f32::NAN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maximum_commutes_and_keeps_nan() {
        let values = [0.0, -0.0, 1.5, -1.5, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN];
        for a in values {
            for b in values {
                assert_eq!(maximum(a, b).to_bits(), maximum(b, a).to_bits(), "{a} {b}");
            }
            assert!(maximum(a, f32::NAN).is_nan());
        }
        assert_eq!(maximum(-0.0, 0.0).to_bits(), 0.0f32.to_bits());
        assert_eq!(maximum(-3.0, -2.0), -2.0);
    }

    #[test]
    fn folds_follow_the_canonical_tree_wherever_the_own_part_stands() {
        let value =
            |rank: usize, i: usize| ((rank * 7919 + i * 104_729) % 1000) as f32 * 0.1 + 1e-3;
        let (elements, at) = (5000, 3);
        for ranks in 1..=9 {
            let parts: Vec<Vec<f32>> =
                (0..ranks).map(|r| (0..elements).map(|i| value(r, i)).collect()).collect();
            for own in 0..ranks {
                let mut others = parts.clone();
                let mut result = others.remove(own).split_off(at);
                let mut all = Contributions { others: &mut others, before: own };
                all.fold_into(Reduction::Sum, &mut result, at);
                for (i, found) in (at..elements).zip(&result) {
                    let wanted = canonical_fold(parts.iter().map(|part| part[i]), |a, b| a + b);
                    assert_eq!(Some(found.to_bits()), wanted.map(f32::to_bits));
                }
            }
        }
    }
}
