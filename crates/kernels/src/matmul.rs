//! The matrix product behind every kernel that has one.
//!
//! Operands are copied into panels (`pack`), and tiles of the result are computed from panels in
//! registers (`tile`), after Goto and van de Geijn, "Anatomy of high-performance matrix
//! multiplication" (2008). The loops around this keep the panels in the caches:
//!
//! | what | elements | where it stays |
//! |---|---|---|
//! | a tile of the result | 8 x 48 with AVX-512 | registers |
//! | the rows of one piece of work, packed | [`BLOCK`] x [`DEPTH`] | second cache |
//! | all packed panels | [`SHARED`] lines of [`DEPTH`] | third cache |
//!
//! The right operand is always packed: a tile reads all of a panel, and tile after tile the same.
//! The left one is read where it lies if its rows can be, see [`Lines::are_at_hand`].
//!
//! An element is a sum over the depth in parts of at most [`DEPTH`] terms: a part is one chain of
//! multiply-adds, and the parts are added in order. Nothing else has a say in its bits: not the
//! height and width of the result, not its place in it, not the layout of the operands, not the
//! number of threads, and not which of the instruction sets with fused multiply-adds ran.

mod pack;
mod tile;

use crate::Write;
use crate::pages::prefer_large;
use crate::pool::{Cut, Pool, strips};
use pack::{Format, Lines};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use tile::{Kernel, Left, Tile};

/// How many terms of an inner product are added before the partial sum goes to memory. It fixes the
/// order of summation, and so it is not tuned to a processor's caches at run time.
const DEPTH: usize = 512;

/// How many elements a packed line has room for. A few more than it holds, so that panels do not lie
/// a power of two apart, where they would drive each other out of the first cache.
const LINE: usize = DEPTH + 2;

/// How many rows of the result one piece of work has.
const BLOCK: usize = 128;

/// How many columns of the result one piece of work has.
const STRIPE: usize = 192;

/// How many rows or columns one thread packs at a time: whole panels of every kernel.
const PACKED: usize = 192;

/// How many rows, and how many columns, the threads of a pool pack together.
const SHARED: usize = 1536;

/// A matrix that is read: element (i, j) stands at `i * row_stride + j * column_stride`.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    data: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Operand<'a> {
    /// A matrix whose rows lie `stride` elements apart.
    pub(crate) fn rows(data: &'a [f32], stride: usize) -> Self {
        Operand { data, row_stride: stride, column_stride: 1 }
    }

    /// The transpose of a matrix whose rows lie `stride` elements apart.
    pub(crate) fn transposed(data: &'a [f32], stride: usize) -> Self {
        Operand { data, row_stride: 1, column_stride: stride }
    }

    /// Panics unless all of a `height` x `width` matrix lies inside the slice.
    fn expect(&self, name: &str, height: usize, width: usize) {
        let needed = extent(height, width, self.row_stride, self.column_stride);
        assert!(
            needed.is_some_and(|needed| needed <= self.data.len()),
            "operand {name} of a product, {height} x {width}, reaches beyond its {} elements",
            self.data.len(),
        );
    }
}

/// The sizes of a product: `[height, width] = [height, depth] x [depth, width]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) height: usize,
    pub(crate) width: usize,
    pub(crate) depth: usize,
}

/// A finished part of a result, for what is done to its elements while they are in the cache.
pub(crate) struct Finished {
    rows: Range<usize>,
    columns: Range<usize>,
    c: *mut f32,
    stride: usize,
}

impl Finished {
    /// The rows of the result it covers.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// The columns of the result it covers.
    pub(crate) fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Its part of one of its rows.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(self.rows.contains(&row));
        // SAFETY: the row and the columns are those of a piece of work that one thread has to
        // itself, inside a result that `Call::check` found within its slice.
        unsafe {
            let first = self.c.add(row * self.stride + self.columns.start);
            std::slice::from_raw_parts_mut(first, self.columns.len())
        }
    }
}

/// Memory for packed operands.
pub(crate) struct Room {
    kernel: Kernel,
    /// How many rows and columns can be packed at a time.
    lines: usize,
    a: Aligned,
    b: Aligned,
}

/// Elements on the boundary of a cache line, so that no register is filled from two.
struct Aligned {
    data: Vec<f32>,
    first: usize,
}

impl Aligned {
    fn zeros(len: usize) -> Self {
        let mut data = vec![0.0; len + 15];
        prefer_large(NonNull::from(&mut data[..]).cast(), size_of_val(&data[..]));
        let first = data.as_ptr().align_offset(64).min(15);
        Self { data, first }
    }

    fn elements(&self) -> &[f32] {
        &self.data[self.first..]
    }

    fn elements_mut(&mut self) -> &mut [f32] {
        // What is beyond the length asked for belongs to no line.
        let len = self.data.len() - 15;
        &mut self.data[self.first..][..len]
    }
}

impl Room {
    /// Room for the threads of a pool together.
    pub(crate) fn shared() -> Self {
        Self::of(SHARED)
    }

    /// Room for one thread that computes small products by itself.
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

    /// How packed rows and packed columns lie in it.
    fn formats(&self) -> (Format, Format) {
        let Kernel { rows, columns, lanes, .. } = self.kernel;
        (
            Format { panel: rows, multiple: rows, room: LINE },
            Format { panel: columns, multiple: lanes, room: LINE },
        )
    }
}

impl Product {
    /// Computes `c = a b`, or `c += a b`, where the rows of `c` lie `stride` elements apart, with
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

    /// [`Product::compute`], calling `finish` once for every part of the result when its sums are
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
        let rooms = &mut *pool.rooms();
        call.run(&mut rooms.shared, &|pieces, body| pool.for_each(pieces, body), finish);
    }

    /// [`Product::compute`] on the calling thread alone: for products inside a tile of a pool.
    pub(crate) fn compute_in(
        self,
        room: &mut Room,
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

/// How the pieces of a product are handed out: calls the function once for each number.
type Deal<'a> = &'a dyn Fn(usize, &(dyn Fn(usize) + Sync));

/// A product whose operands and result have been found to fit its sizes.
struct Call<'a> {
    product: Product,
    a: Lines<'a>,
    b: Lines<'a>,
    c: Target<'a>,
    mode: Write,
}

/// The result of a product, which threads write in different places at the same time.
#[derive(Clone, Copy)]
struct Target<'a> {
    data: *mut f32,
    stride: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for an exclusive borrow, of which `Call::run` gives each piece of work its own
// elements.
unsafe impl Sync for Target<'_> {}

/// Some rows, some columns and some terms of a product.
#[derive(Clone)]
struct Part {
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

    /// Computes part after part; the threads work on one part together.
    fn run(&self, room: &mut Room, deal: Deal<'_>, finish: &(dyn Fn(Finished) + Sync)) {
        let Product { height, width, depth } = self.product;
        let kernel = room.kernel;
        let tall = if self.a.are_at_hand() { height.max(1) } else { room.lines };
        let tall = share(height, tall, kernel.rows);
        let wide = share(width, room.lines, kernel.columns);
        let deep = share(depth, DEPTH, 1);
        // What the room holds, by its first line and first term.
        let mut packed = [None; 2];
        for left in (0..width).step_by(wide) {
            for top in (0..height).step_by(tall) {
                let part = Part {
                    rows: top..height.min(top + tall),
                    columns: left..width.min(left + wide),
                    terms: 0..0,
                };
                if depth == 0 {
                    self.empty(part, finish);
                    continue;
                }
                for first in (0..depth).step_by(deep) {
                    let part = Part { terms: first..depth.min(first + deep), ..part.clone() };
                    let wanted = [Some((top, first)), Some((left, first))];
                    let stale = [packed[0] != wanted[0], packed[1] != wanted[1]];
                    self.pack(room, deal, &part, stale);
                    packed = wanted;
                    self.multiply(room, deal, &part, finish);
                }
            }
        }
    }

    /// A sum of no terms.
    fn empty(&self, part: Part, finish: &(dyn Fn(Finished) + Sync)) {
        let mut finished = self.finished(part.rows, part.columns);
        for row in finished.rows() {
            self.mode.prepare(finished.row(row));
        }
        finish(finished);
    }

    /// Packs the rows and the columns of a part, as far as they are `stale`.
    fn pack(&self, room: &mut Room, deal: Deal<'_>, part: &Part, stale: [bool; 2]) {
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
            // SAFETY: the room has as many lines as are packed at a time, filled up to whole
            // panels; every piece has its own, and each is packed once.
            let panels =
                unsafe { panels.piece(first..first + count.next_multiple_of(format.panel)) };
            let lines = lines.start + first..lines.start + first + count;
            operand.pack(kernel, lines, part.terms.clone(), *format, panels);
        });
    }

    /// Multiplies what has been packed, piece by piece.
    fn multiply(
        &self,
        room: &Room,
        deal: Deal<'_>,
        part: &Part,
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
                    // a line, but for rows that are read in the operand; the tile lies in this
                    // piece of the result, which is within its slice and which no other piece meets.
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

/// The largest of equal shares of `size`, each a multiple of `unit` and at most about `most`.
fn share(size: usize, most: usize, unit: usize) -> usize {
    size.div_ceil(size.div_ceil(most).max(1)).next_multiple_of(unit).max(unit)
}

/// How many elements a matrix with these strides spans, or nothing when that overflows.
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
