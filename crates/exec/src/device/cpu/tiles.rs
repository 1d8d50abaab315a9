//! Loops over rows, sequences and elements on all threads of a rank.

use paceline_kernels::pool::{Cut, Pool, strips};
use paceline_kernels::{Element, Rows, reduce};
use std::ops::Range;

/// Number of elements a thread takes at a time: as many as fit the L1 cache.
const TILE: usize = 1 << 14;

/// Runs a kernel of rows on all threads, some rows at a time. `body` gets the shape of its part,
/// its rows, and its part of the outputs. Rows are independent, so the bits do not depend on the
/// number of threads.
pub(super) fn over_rows<C: Cut>(
    pool: &Pool,
    shape: Rows,
    outputs: C,
    body: impl Fn(Rows, Range<usize>, C::Piece) + Sync,
) {
    let block = (TILE / shape.width.max(1)).max(1);
    pool.for_each_block(shape.rows, block, outputs, |rows, piece| {
        body(Rows { rows: rows.len(), ..shape }, rows, piece);
    });
}

/// Like [`over_rows`], for element-wise kernels.
pub(super) fn over_elements<T: Element>(
    pool: &Pool,
    output: &mut [T],
    body: impl Fn(Range<usize>, &mut [T]) + Sync,
) {
    pool.for_each_block(output.len(), TILE, strips(output, 1), body);
}

/// `into += from` on all threads.
pub(super) fn add<T: Element>(pool: &Pool, from: &[T], into: &mut [T]) {
    over_elements(pool, into, |at, into| reduce::add(&from[at], into));
}

/// Like [`over_rows`], one sequence at a time. `body` gets the elements of its sequence.
pub(super) fn over_sequences<T: Element>(
    pool: &Pool,
    shape: Rows,
    positions: &[u32],
    output: &mut [T],
    body: impl Fn(Range<usize>, &mut [T]) + Sync,
) {
    let (sequences, width) = (shape.rows / positions.len(), positions.len() * shape.width);
    pool.for_each_block(sequences, 1, strips(output, width), |at, piece| {
        body(at.start * width..at.end * width, piece);
    });
}

/// Element range of a row range.
pub(super) fn elements(shape: Rows, rows: &Range<usize>) -> Range<usize> {
    rows.start * shape.width..rows.end * shape.width
}
