//! Going along bytes of other ranks, which lie in pieces.

use crate::transport::Lent;
use std::ops::Range;

/// Goes along bytes that lie in pieces.
pub(super) struct Cursor<'a> {
    pieces: &'a [&'a [u8]],
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(super) fn new(pieces: &'a [&'a [u8]]) -> Self {
        let mut cursor = Self { pieces, rest: &[] };
        cursor.settle();
        cursor
    }

    /// How many bytes lie together from here on.
    pub(super) fn ahead(&self) -> usize {
        self.rest.len()
    }

    /// The next bytes, at most as many as lie together.
    pub(super) fn take(&mut self, bytes: usize) -> &'a [u8] {
        let (taken, rest) = self.rest.split_at(bytes.min(self.rest.len()));
        self.rest = rest;
        self.settle();
        taken
    }

    fn settle(&mut self) {
        while let ([], [next, more @ ..]) = (self.rest, self.pieces) {
            (self.rest, self.pieces) = (next, more);
        }
    }
}

/// Goes along what a rank has lent and the ranges that it is for, piece by piece.
pub(super) fn along(
    ranges: impl Iterator<Item = Range<usize>>,
    lent: &Lent,
    mut visit: impl FnMut(Range<usize>, &[u8]),
) {
    let pieces = lent.pieces();
    let mut cursor = Cursor::new(&pieces);
    for Range { mut start, end } in ranges {
        while start < end && cursor.ahead() > 0 {
            let piece = cursor.take(end - start);
            visit(start..start + piece.len(), piece);
            start += piece.len();
        }
    }
}
