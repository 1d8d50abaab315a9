//! The shape shared by most kernels, and the check of slice lengths.

use crate::element::Element;
use std::ops::Range;

/// A row-major matrix of activations: `rows` tokens of `width` features each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Number of rows: batch times sequence length.
    pub rows: usize,
    /// Number of elements per row.
    pub width: usize,
}

impl Rows {
    /// The element range of row `row` in the slice.
    #[inline(always)]
    pub(crate) fn range(self, row: usize) -> Range<usize> {
        row * self.width..(row + 1) * self.width
    }
}

/// Write mode of a weight gradient: overwrites its destination or adds to it.
///
/// Accumulating onto zeros gives the same bits as overwriting (up to the sign of a zero), so a
/// gradient buffer need not be cleared before the first microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// The old values are ignored.
    Overwrite,
    /// The new gradient is added to the old values.
    Accumulate,
}

impl Write {
    /// Clears `destination` in overwrite mode, for a kernel that can only add.
    pub(crate) fn prepare<T: Element>(self, destination: &mut [T]) {
        match self {
            Write::Overwrite => destination.fill(T::ZERO),
            Write::Accumulate => {}
        }
    }

    /// Initial value of a sum.
    #[inline(always)]
    pub(crate) fn start<T: Element>(self, old: T) -> f32 {
        match self {
            Write::Overwrite => 0.0,
            Write::Accumulate => old.widen(),
        }
    }
}

/// Panics unless `len` equals the product of the shape's `sizes`.
#[track_caller]
pub(crate) fn expect_len(name: &str, len: usize, sizes: &[usize]) {
    let needed = sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
    assert!(
        needed == Some(len),
        "`{name}` holds {len} elements, but its shape {sizes:?} needs {}",
        needed.map_or_else(|| "more than can be addressed".to_owned(), |n| n.to_string()),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "`x` holds 5 elements, but its shape [2, 3] needs 6")]
    fn a_wrong_length_names_the_slice_and_the_length_it_needs() {
        expect_len("x", 5, &[2, 3]);
    }

    #[test]
    #[should_panic(expected = "needs more than can be addressed")]
    fn an_absurd_shape_does_not_wrap_around() {
        expect_len("x", 0, &[usize::MAX, 2]);
    }

    #[test]
    fn overwriting_clears_and_accumulating_keeps() {
        let mut x = [1.0, 2.0];
        Write::Accumulate.prepare(&mut x);
        assert_eq!(x, [1.0, 2.0]);
        Write::Overwrite.prepare(&mut x);
        assert_eq!(x, [0.0, 0.0]);
    }
}
