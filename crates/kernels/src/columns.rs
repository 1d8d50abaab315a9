//! Sums over the rows of a matrix, one strip of columns at a time.
//!
//! The gradient of a weight that every row shares is such a sum. It is computed in single precision
//! for a strip of columns that fits on the stack, from the old values or from zero, row after row.
//! It is rounded once at the end. So a 16-bit gradient loses nothing while its rows are added, and
//! strips may be distributed over threads without changing a bit.

use crate::element::Element;
use crate::shape::Write;
use std::ops::Range;

/// Number of columns in a strip.
pub(crate) const STRIP: usize = 128;

/// Running sums of one strip.
pub(crate) type Sums = [f32; STRIP];

/// Strips of a matrix of `width` columns.
pub(crate) fn strips(width: usize) -> impl Iterator<Item = Range<usize>> {
    (0..width).step_by(STRIP).map(move |first| first..width.min(first + STRIP))
}

/// Initial sums of a strip.
#[inline(always)]
pub(crate) fn open<G: Element>(mode: Write, old: &[G]) -> Sums {
    let mut sums = [0.0; STRIP];
    for (sum, &old) in sums.iter_mut().zip(old) {
        *sum = mode.start(old);
    }
    sums
}

/// Writes a strip's sums, rounded.
#[inline(always)]
pub(crate) fn close<G: Element>(sums: &Sums, new: &mut [G]) {
    for (new, &sum) in new.iter_mut().zip(sums) {
        *new = G::narrow(sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Bf16;

    #[test]
    fn strips_cover_every_column_once() {
        for width in [0, 1, STRIP - 1, STRIP, STRIP + 1, 3 * STRIP + 5] {
            let columns: Vec<usize> = strips(width).flatten().collect();
            assert_eq!(columns, (0..width).collect::<Vec<_>>());
            assert!(strips(width).all(|strip| strip.len() <= STRIP));
        }
    }

    #[test]
    fn small_terms_reach_a_narrow_sum() {
        let mut gradient = [Bf16::narrow(256.0)];
        let mut sums = open(Write::Accumulate, &gradient);
        for _ in 0..8 {
            sums[0] += 0.5;
        }
        close(&sums, &mut gradient);
        assert_eq!(gradient[0].widen(), 260.0, "each 0.5 alone would have been rounded away");
        assert_eq!(open(Write::Overwrite, &gradient)[0], 0.0);
    }
}
