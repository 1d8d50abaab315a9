//! Iteration over lent bytes of other ranks, stored in several pieces.

use crate::shared_memory::Lent;
use std::ops::Range;

/// Cursor over bytes stored in several pieces.
pub(super) struct Cursor<'a> {
    pieces: &'a [&'a [u8]],
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(super) fn new(pieces: &'a [&'a [u8]]) -> Self {
        let mut cursor = Self { pieces, rest: &[] };
        cursor.skip_empty();
        cursor
    }

    /// Number of contiguous bytes from the current position.
    pub(super) fn ahead(&self) -> usize {
        self.rest.len()
    }

    /// Takes the next `bytes` bytes, or fewer if the contiguous run is shorter.
    pub(super) fn take(&mut self, bytes: usize) -> &'a [u8] {
        let (taken, rest) = self.rest.split_at(bytes.min(self.rest.len()));
        self.rest = rest;
        self.skip_empty();
        taken
    }

    fn skip_empty(&mut self) {
        while let ([], [next, more @ ..]) = (self.rest, self.pieces) {
            (self.rest, self.pieces) = (next, more);
        }
    }
}

/// Visits lent bytes together with their destination ranges, piece by piece.
pub(super) fn along(
    ranges: impl Iterator<Item = Range<usize>>,
    lent: &Lent,
    mut visit: impl FnMut(Range<usize>, &[u8]),
) {
    // SAFETY: the steps tell the lender only after the step that visits them.
    #[expect(unsafe_code, reason = "the steps of a collective keep the protocol of loans")]
    let pieces = unsafe { lent.pieces() };
    let mut cursor = Cursor::new(&pieces);
    for Range { mut start, end } in ranges {
        while start < end && cursor.ahead() > 0 {
            let piece = cursor.take(end - start);
            visit(start..start + piece.len(), piece);
            start += piece.len();
        }
    }
}
