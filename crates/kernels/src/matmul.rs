//! GEMM used by every kernel that multiplies matrices.
//!
//! Operands are copied into panels (`pack`), and tiles of the result are computed from panels in
//! registers (`tile`), after Goto and van de Geijn, "Anatomy of high-performance matrix
//! multiplication" (2008). The loops around this keep the panels in the caches:
//!
//! | data | elements | location |
//! |---|---|---|
//! | a tile of the result | 8 x 48 with AVX-512 | registers |
//! | the rows of one work item, packed | [`BLOCK`] x [`DEPTH`] | L2 cache |
//! | all packed panels | [`SHARED`] lines of [`DEPTH`] | L3 cache |
//!
//! The right operand is always packed: a tile reads all of a panel, and successive tiles read the
//! same one. The left operand is read in place if its rows allow it, see [`Lines::are_at_hand`].
//!
//! An element is a sum over the depth in parts of at most [`DEPTH`] terms: a part is one chain of
//! multiply-adds, and the parts are added in order. Its bits depend on nothing else: not on the
//! height and width of the result, its position in it, the layout of the operands, or the number of
//! threads. All instruction sets with fused multiply-adds give the same bits.

mod pack;
mod tile;

use crate::Write;
use crate::huge_pages::prefer_huge;
use crate::pool::{Cut, Pool, strips};
use pack::{Format, Lines};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use tile::{Kernel, Left, Tile};

/// Number of terms of an inner product that are added before the partial sum is written to memory.
/// It fixes the order of summation, so it is not tuned to a processor's caches at run time.
const DEPTH: usize = 512;

/// Capacity of a packed line in elements. It is slightly larger than the contents, so that panels
/// are not a power of two apart and do not evict each other from the L1 cache.
const LINE: usize = DEPTH + 2;

/// Number of rows of the result per work item.
const BLOCK: usize = 128;

/// Number of columns of the result per work item.
const STRIPE: usize = 192;

/// Number of rows or columns that one thread packs at a time: whole panels of every kernel.
const PACKED: usize = 192;

/// Number of rows, and of columns, that the threads of a pool pack together.
const SHARED: usize = 1536;

/// Input matrix: element (i, j) is at `i * row_stride + j * column_stride`.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    data: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Operand<'a> {
    /// Matrix whose rows are `stride` elements apart.
    pub(crate) fn rows(data: &'a [f32], stride: usize) -> Self {
        Operand { data, row_stride: stride, column_stride: 1 }
    }

    /// Transpose of a matrix whose rows are `stride` elements apart.
    pub(crate) fn transposed(data: &'a [f32], stride: usize) -> Self {
        Operand { data, row_stride: 1, column_stride: stride }
    }

    /// Panics unless all of a `height` x `width` matrix is inside the slice.
    fn expect(&self, name: &str, height: usize, width: usize) {
        let needed = extent(height, width, self.row_stride, self.column_stride);
        assert!(
            needed.is_some_and(|needed| needed <= self.data.len()),
            "operand {name} of a product, {height} x {width}, reaches beyond its {} elements",
            self.data.len(),
        );
    }
}

/// Sizes of a GEMM: `[height, width] = [height, depth] x [depth, width]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) height: usize,
    pub(crate) width: usize,
    pub(crate) depth: usize,
}

/// Finished part of a result, for operations on its elements while they are in the cache.
pub(crate) struct Finished {
    rows: Range<usize>,
    columns: Range<usize>,
    c: *mut f32,
    stride: usize,
}

impl Finished {
    /// Rows of the result that it covers.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Columns of the result that it covers.
    pub(crate) fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Covered part of one of its rows.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(self.rows.contains(&row));
        // SAFETY: the row and the columns are those of a work item that one thread owns
        // exclusively, inside a result that `Call::new` found within its slice.
        unsafe {
            let first = self.c.add(row * self.stride + self.columns.start);
            std::slice::from_raw_parts_mut(first, self.columns.len())
        }
    }
}

/// Memory for packed operands.
pub(crate) struct PackBuffer {
    kernel: Kernel,
    /// Number of rows and columns that can be packed at a time.
    lines: usize,
    a: Aligned,
    b: Aligned,
}

/// Elements aligned to a cache line, so that no register load crosses two.
struct Aligned {
    data: Vec<f32>,
    first: usize,
}

impl Aligned {
    fn zeros(len: usize) -> Self {
        let mut data = vec![0.0; len + 15];
        prefer_huge(NonNull::from(&mut data[..]).cast(), size_of_val(&data[..]));
        let first = data.as_ptr().align_offset(64).min(15);
        Self { data, first }
    }

    fn elements(&self) -> &[f32] {
        &self.data[self.first..]
    }

    fn elements_mut(&mut self) -> &mut [f32] {
        // Elements beyond the requested length belong to no line.
        let len = self.data.len() - 15;
        &mut self.data[self.first..][..len]
    }
}

impl PackBuffer {
    /// Buffer that all threads of a pool share.
    pub(crate) fn shared() -> Self {
        Self::of(SHARED)
    }

    /// Buffer of one thread that computes small GEMMs alone.
    pub(crate) fn small() -> Self {
        Self::of(STRIPE)
    }

    fn of(lines: usize) -> Self {
        Self::with(Kernel::best(), lines)
    }

    fn with(kernel: Kernel, lines: usize) -> Self {
        let room = |panel: usize| Aligned::zeros(lines.next_multiple_of(panel) * LINE);
        Self { kernel, lines, a: room(kernel.rows), b: room(kernel.columns) }
    }

    /// Layouts of packed rows and of packed columns.
    fn formats(&self) -> (Format, Format) {
        let Kernel { rows, columns, lanes, .. } = self.kernel;
        (
            Format { panel: rows, multiple: rows, room: LINE },
            Format { panel: columns, multiple: lanes, room: LINE },
        )
    }
}

impl Product {
    /// Computes `c = a b`, or `c += a b`, where the rows of `c` are `stride` elements apart, with
    /// all threads of a pool.
    pub(crate) fn compute(
        self,
        pool: &Pool,
        a: Operand<'_>,
        b: Operand<'_>,
        c: &mut [f32],
        stride: usize,
        mode: Write,
    ) {
        self.compute_and(pool, a, b, c, stride, mode, &|_| {});
    }

    /// [`Product::compute`] that calls `finish` once for every part of the result when its sums are
    /// complete, on the thread that computed it.
    #[expect(clippy::too_many_arguments, reason = "operands, result and what is done with it")]
    pub(crate) fn compute_and(
        self,
        pool: &Pool,
        a: Operand<'_>,
        b: Operand<'_>,
        c: &mut [f32],
        stride: usize,
        mode: Write,
        finish: &(dyn Fn(Finished) + Sync),
    ) {
        let call = Call::new(self, a, b, c, stride, mode);
        let rooms = &mut *pool.pack_buffers();
        call.run(&mut rooms.shared, &|pieces, body| pool.for_each(pieces, body), finish);
    }

    /// [`Product::compute`] on the calling thread alone: for GEMMs inside a tile of a pool.
    pub(crate) fn compute_in(
        self,
        room: &mut PackBuffer,
        a: Operand<'_>,
        b: Operand<'_>,
        c: &mut [f32],
        stride: usize,
        mode: Write,
    ) {
        let call = Call::new(self, a, b, c, stride, mode);
        call.run(room, &|pieces, body| (0..pieces).for_each(body), &|_| {});
    }
}

/// Distributes the work items of a GEMM: calls the function once for each index.
type Deal<'a> = &'a dyn Fn(usize, &(dyn Fn(usize) + Sync));

/// GEMM whose operands and result have been checked against its sizes.
struct Call<'a> {
    product: Product,
    a: Lines<'a>,
    b: Lines<'a>,
    c: Target<'a>,
    mode: Write,
}

/// Result of a GEMM; threads write disjoint parts of it concurrently.
#[derive(Clone, Copy)]
struct Target<'a> {
    data: *mut f32,
    stride: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: it represents an exclusive borrow, of which `Call::run` gives each work item its own
// elements.
unsafe impl Sync for Target<'_> {}

/// Range of rows, columns and terms of a GEMM.
#[derive(Clone)]
struct BlockRange {
    rows: Range<usize>,
    columns: Range<usize>,
    terms: Range<usize>,
}

impl<'a> Call<'a> {
    fn new(
        product: Product,
        a: Operand<'a>,
        b: Operand<'a>,
        c: &'a mut [f32],
        stride: usize,
        mode: Write,
    ) -> Self {
        let Product { height, width, depth } = product;
        a.expect("a", height, depth);
        b.expect("b", depth, width);
        let needed = extent(height, width, stride, 1);
        assert!(
            needed.is_some_and(|needed| needed <= c.len()) && (width <= stride || height <= 1),
            "a result of {height} x {width} with rows {stride} apart does not fit {} elements",
            c.len(),
        );
        let c = Target { data: c.as_mut_ptr(), stride, borrow: PhantomData };
        Self { product, a: Lines::rows(a), b: Lines::columns(b), c, mode }
    }

    /// Computes part after part; all threads work on the same part.
    fn run(&self, room: &mut PackBuffer, deal: Deal<'_>, finish: &(dyn Fn(Finished) + Sync)) {
        let Product { height, width, depth } = self.product;
        let kernel = room.kernel;
        let tall = if self.a.are_at_hand() { height.max(1) } else { room.lines };
        let tall = share(height, tall, kernel.rows);
        let wide = share(width, room.lines, kernel.columns);
        let deep = share(depth, DEPTH, 1);
        // Contents of the buffer, by first line and first term.
        let mut packed = [None; 2];
        for left in (0..width).step_by(wide) {
            for top in (0..height).step_by(tall) {
                let part = BlockRange {
                    rows: top..height.min(top + tall),
                    columns: left..width.min(left + wide),
                    terms: 0..0,
                };
                if depth == 0 {
                    self.empty(part, finish);
                    continue;
                }
                for first in (0..depth).step_by(deep) {
                    let part = BlockRange { terms: first..depth.min(first + deep), ..part.clone() };
                    let wanted = [Some((top, first)), Some((left, first))];
                    let stale = [packed[0] != wanted[0], packed[1] != wanted[1]];
                    self.pack(room, deal, &part, stale);
                    packed = wanted;
                    self.multiply(room, deal, &part, finish);
                }
            }
        }
    }

    /// Handles a depth of zero: a sum of no terms.
    fn empty(&self, part: BlockRange, finish: &(dyn Fn(Finished) + Sync)) {
        let mut finished = self.finished(part.rows, part.columns);
        for row in finished.rows() {
            self.mode.prepare(finished.row(row));
        }
        finish(finished);
    }

    /// Packs the rows and the columns of a part, where they are `stale`.
    fn pack(&self, room: &mut PackBuffer, deal: Deal<'_>, part: &BlockRange, stale: [bool; 2]) {
        let kernel = room.kernel;
        let (rows, columns) = room.formats();
        let (a, b) = (strips(room.a.elements_mut(), LINE), strips(room.b.elements_mut(), LINE));
        let sides = [(self.a, &part.rows, rows, a), (self.b, &part.columns, columns, b)];
        let pieces = |side: usize| {
            if stale[side] { sides[side].1.len().div_ceil(PACKED) } else { 0 }
        };
        let of_a = if self.a.are_at_hand() { 0 } else { pieces(0) };
        deal(of_a + pieces(1), &|piece| {
            let (side, piece) = if piece < of_a { (0, piece) } else { (1, piece - of_a) };
            let (operand, lines, format, panels) = &sides[side];
            let first = piece * PACKED;
            let count = PACKED.min(lines.len() - first);
            // SAFETY: the buffer has as many lines as are packed at a time, rounded up to whole
            // panels; every work item has its own, and each is packed once.
            let panels =
                unsafe { panels.piece(first..first + count.next_multiple_of(format.panel)) };
            let lines = lines.start + first..lines.start + first + count;
            operand.pack(kernel, lines, part.terms.clone(), *format, panels);
        });
    }

    /// Multiplies the packed operands, one work item at a time.
    fn multiply(
        &self,
        room: &PackBuffer,
        deal: Deal<'_>,
        part: &BlockRange,
        finish: &(dyn Fn(Finished) + Sync),
    ) {
        let (kernel, depth) = (room.kernel, part.terms.len());
        let block = BLOCK.next_multiple_of(kernel.rows);
        let stripe = STRIPE.next_multiple_of(kernel.columns);
        let (height, width) = (part.rows.len(), part.columns.len());
        let down = height.div_ceil(block);
        let add = part.terms.start > 0 || self.mode == Write::Accumulate;
        let last = part.terms.end == self.product.depth;
        deal(down * width.div_ceil(stripe), &|piece| {
            let rows = piece % down * block..height.min((piece % down + 1) * block);
            let columns = piece / down * stripe..width.min((piece / down + 1) * stripe);
            for j in columns.clone().step_by(kernel.columns) {
                for i in rows.clone().step_by(kernel.rows) {
                    let at = (part.rows.start + i) * self.c.stride + part.columns.start + j;
                    // SAFETY: the kernel was chosen for this processor. `pack` has written the
                    // panels of `depth` terms that begin at lines `i` and `j`, each LINE elements
                    // per line, except for rows that are read in place in the operand. The tile is
                    // inside this work item's part of the result, which is within its slice and
                    // overlaps no other work item's.
                    unsafe {
                        (kernel.run)(Tile {
                            depth,
                            a: if self.a.are_at_hand() {
                                self.a.at(part.rows.start + i, part.terms.start)
                            } else {
                                let data = room.a.elements().as_ptr().add(i * LINE);
                                Left { data, across: 1, along: kernel.rows }
                            },
                            b: room.b.elements().as_ptr().add(j * LINE),
                            c: self.c.data.add(at),
                            stride: self.c.stride,
                            rows: kernel.rows.min(rows.end - i),
                            columns: kernel.columns.min(columns.end - j),
                            add,
                        });
                    }
                }
            }
            if last {
                let from = |start: usize, r: &Range<usize>| start + r.start..start + r.end;
                let rows = from(part.rows.start, &rows);
                finish(self.finished(rows, from(part.columns.start, &columns)));
            }
        });
    }

    fn finished(&self, rows: Range<usize>, columns: Range<usize>) -> Finished {
        Finished { rows, columns, c: self.c.data, stride: self.c.stride }
    }
}

/// Size of the largest of equal parts of `size`, a multiple of `unit` and at most about `most`.
fn share(size: usize, most: usize, unit: usize) -> usize {
    size.div_ceil(size.div_ceil(most).max(1)).next_multiple_of(unit).max(unit)
}

/// Number of elements that a matrix with these strides spans, or `None` on overflow.
fn extent(height: usize, width: usize, row_stride: usize, column_stride: usize) -> Option<usize> {
    if height == 0 || width == 0 {
        return Some(0);
    }
    let down = (height - 1).checked_mul(row_stride)?;
    let across = (width - 1).checked_mul(column_stride)?;
    down.checked_add(across)?.checked_add(1).filter(|&n| isize::try_from(n).is_ok())
}

#[cfg(test)]
mod tests;
