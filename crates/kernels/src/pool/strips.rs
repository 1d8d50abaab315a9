//! Outputs that several threads write concurrently, each thread its own rows.

use std::marker::PhantomData;
use std::ops::Range;
use std::slice;

/// An output that can be split into rows for writing: [`Strips`], or several of them as a tuple.
///
/// # Safety
///
/// Pieces of disjoint row ranges must not overlap, for all ranges within the rows that
/// `expect_rows` accepts.
pub unsafe trait Cut: Sync {
    /// The part that covers a range of rows.
    type Piece;

    /// Panics unless there are exactly `rows` rows.
    fn expect_rows(&self, rows: usize);

    /// Returns the part that covers `rows`.
    ///
    /// # Safety
    ///
    /// `rows` must be within the rows that `expect_rows` accepts, and no other piece of any of them
    /// may be alive.
    unsafe fn piece(&self, rows: Range<usize>) -> Self::Piece;
}

/// Views a slice as rows of `width` elements.
pub fn strips<T>(data: &mut [T], width: usize) -> Strips<'_, T> {
    Strips { data: data.as_mut_ptr(), len: data.len(), width, borrow: PhantomData }
}

/// A slice that is written by rows, see [`strips`].
#[derive(Debug)]
pub struct Strips<'a, T> {
    data: *mut T,
    len: usize,
    width: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it represents an exclusive borrow; each piece goes to one thread, see `Cut::piece`.
unsafe impl<T: Send> Sync for Strips<'_, T> {}
// SAFETY: as for the slice that it represents.
unsafe impl<T: Send> Send for Strips<'_, T> {}

// SAFETY: each row is a distinct range of `width` elements.
unsafe impl<'a, T: Send> Cut for Strips<'a, T> {
    type Piece = &'a mut [T];

    fn expect_rows(&self, rows: usize) {
        let (len, width) = (self.len, self.width);
        assert!(
            rows.checked_mul(width) == Some(len),
            "{len} elements are not {rows} rows of {width}"
        );
    }

    unsafe fn piece(&self, rows: Range<usize>) -> &'a mut [T] {
        let (start, len) = (rows.start * self.width, rows.len() * self.width);
        debug_assert!(start + len <= self.len);
        // SAFETY: the caller guarantees that the rows are inside the slice, and that nothing else
        // accesses them while this piece is alive; the slice is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.data.add(start), len) }
    }
}

// SAFETY: it has no pieces that could overlap.
unsafe impl Cut for () {
    type Piece = ();

    fn expect_rows(&self, _rows: usize) {}

    unsafe fn piece(&self, _rows: Range<usize>) {}
}

// SAFETY: its pieces are those of the contained value, if there is one.
unsafe impl<C: Cut> Cut for Option<C> {
    type Piece = Option<C::Piece>;

    fn expect_rows(&self, rows: usize) {
        if let Some(cut) = self {
            cut.expect_rows(rows);
        }
    }

    unsafe fn piece(&self, rows: Range<usize>) -> Self::Piece {
        // SAFETY: the caller's guarantees apply to the contained value.
        self.as_ref().map(|cut| unsafe { cut.piece(rows) })
    }
}

macro_rules! cut_together {
    ($($name:ident $at:tt),+) => {
        // SAFETY: the members are distinct exclusive borrows, and the rows of each are disjoint.
        unsafe impl<$($name: Cut),+> Cut for ($($name,)+) {
            type Piece = ($($name::Piece,)+);

            fn expect_rows(&self, rows: usize) {
                $(self.$at.expect_rows(rows);)+
            }

            unsafe fn piece(&self, rows: Range<usize>) -> Self::Piece {
                // SAFETY: the caller's guarantees apply to each member.
                unsafe { ($(self.$at.piece(rows.clone()),)+) }
            }
        }
    };
}

cut_together!(A 0, B 1);
cut_together!(A 0, B 1, C 2);
cut_together!(A 0, B 1, C 2, D 3);
