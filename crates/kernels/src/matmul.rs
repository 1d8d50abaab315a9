//! GEMM used by every kernel that multiplies matrices.
//!
//! Operands are copied into panels (`pack`, `pairs`), and tiles of the result are computed from
//! panels in registers (`tile`, `brain`), after Goto and van de Geijn, "Anatomy of high-performance
//! matrix multiplication" (2008). The loops around this keep the panels in the caches:
//!
//! | data | size | location |
//! |---|---|---|
//! | a tile of the result | 8 x 48 with AVX-512, 32 x 32 with AMX | registers |
//! | one part of the rows of one work item, packed | [`BLOCK`] lines of [`DEPTH`] words | L2 cache |
//! | all packed panels | [`SHARED`] lines of [`DEPTH`] words, or fewer and longer ones | L3 cache |
//!
//! A panel consists of words of 32 bits. Where the processor multiplies bfloat16 pairs (AVX-512
//! BF16, AMX), a word of such an operand is a pair of terms; otherwise operands of any type are
//! widened when they are packed, and a word is one term.
//!
//! The right operand is always packed: a tile reads all of a panel, and successive tiles read the
//! same one. The left operand is read in place if its rows allow it, see [`Lines::are_at_hand`].
//!
//! An element is a sum over the depth in parts of at most [`DEPTH`] words: a part is one chain of
//! multiply-adds, and the parts are added in order. Its bits depend on nothing else: not on the
//! height and width of the result, its position in it, the layout of the operands, or the number of
//! threads. All instruction sets with fused multiply-adds give the same bits, except where bfloat16
//! pairs are multiplied: `brain` states the orders of those sums.

mod amx;
mod brain;
mod pack;
mod pairs;
mod tile;

use crate::huge_pages::prefer_huge;
use crate::pool::{Cut, PackBuffers, Pool, Strips, strips};
use crate::{Bf16, Element, Write};
use pack::Lines;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use tile::{Kernel, Tile};

/// Number of words of an inner product that are added before the partial sum leaves the registers.
/// It fixes the order of summation, so it is not tuned to a processor's caches at run time.
const DEPTH: usize = 512;

/// Excess of a packed line's capacity over its contents, in words: panels are not a power of two
/// apart, so that they do not evict each other from the L1 cache.
const GAP: usize = 2;

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
pub(crate) struct Operand<'a, T = f32> {
    data: &'a [T],
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> Operand<'a, T> {
    /// Matrix whose rows are `stride` elements apart.
    pub(crate) fn rows(data: &'a [T], stride: usize) -> Self {
        Operand { data, row_stride: stride, column_stride: 1 }
    }

    /// Transpose of a matrix whose rows are `stride` elements apart.
    pub(crate) fn transposed(data: &'a [T], stride: usize) -> Self {
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
    /// First element.
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
        // exclusively, inside a result that `Call::new` found within its slice, or inside the
        // memory for sums that `Call::sums` found large enough.
        unsafe {
            let first = self.c.add((row - self.rows.start) * self.stride);
            std::slice::from_raw_parts_mut(first, self.columns.len())
        }
    }
}

/// Memory for packed operands, and for the sums of one work item.
pub(crate) struct PackBuffer {
    /// Kernels for single precision and for pairs.
    kernels: [Kernel; 2],
    /// Number of rows and columns that can be packed at a time, with [`DEPTH`] words each.
    lines: usize,
    a: Aligned,
    b: Aligned,
    sums: Aligned,
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
        Self::with([Kernel::of::<f32>(), Kernel::of::<Bf16>()], lines)
    }

    fn with(kernels: [Kernel; 2], lines: usize) -> Self {
        let room = || Aligned::zeros(lines * (DEPTH + GAP));
        let sums = Aligned::zeros(BLOCK.next_multiple_of(48) * STRIPE.next_multiple_of(48));
        Self { kernels, lines, a: room(), b: room(), sums }
    }

    /// Kernel for operands of a type.
    fn kernel<T: Element>(&self) -> Kernel {
        self.kernels[usize::from(T::brains(&[]).is_some())]
    }
}

impl Product {
    /// Computes `c = a b`, or `c += a b`, where the rows of `c` are `stride` elements apart, with
    /// all threads of a pool.
    pub(crate) fn compute<T: Element>(
        self,
        pool: &Pool,
        a: Operand<'_, T>,
        b: Operand<'_, T>,
        c: &mut [f32],
        stride: usize,
        mode: Write,
    ) {
        self.compute_and(pool, a, b, c, stride, mode, &|_| {});
    }

    /// [`Product::compute`] that calls `finish` once for every part of the result when its sums are
    /// complete, on the thread that computed it.
    #[expect(clippy::too_many_arguments, reason = "operands, result and what is done with it")]
    pub(crate) fn compute_and<T: Element>(
        self,
        pool: &Pool,
        a: Operand<'_, T>,
        b: Operand<'_, T>,
        c: &mut [f32],
        stride: usize,
        mode: Write,
        finish: &(dyn Fn(Finished) + Sync),
    ) {
        let call = Call::new(self, a, b, Target::matrix(self, c, stride), mode);
        let rooms = &mut *pool.pack_buffers();
        call.run(&mut rooms.shared, &|pieces, body| pool.for_each_slot(pieces, body), finish);
    }

    /// Number of elements of memory for sums that [`Product::compute_parts`] needs: none, unless an
    /// inner product is so deep that its operands cannot be packed at once.
    pub(crate) fn sums<T: Element>(self) -> usize {
        let kernel = Kernel::of::<T>();
        let of = |at_hand| {
            let blocks = Blocks::of(self, &kernel, SHARED, at_hand);
            if blocks.deep < self.depth { blocks.tall * blocks.wide } else { 0 }
        };
        of(true).max(of(false))
    }

    /// Calls `finish` with every part of `a b` when its sums are complete, on the thread that
    /// computed it; the result itself is not stored. `sums` has [`Product::sums`] elements.
    pub(crate) fn compute_parts<T: Element>(
        self,
        pool: &Pool,
        a: Operand<'_, T>,
        b: Operand<'_, T>,
        sums: &mut [f32],
        finish: &(dyn Fn(Finished) + Sync),
    ) {
        let PackBuffers { shared, own } = &mut *pool.pack_buffers();
        let target =
            Target::Parts { own: strips(own, 1), sums: sums.as_mut_ptr(), len: sums.len() };
        let call = Call::new(self, a, b, target, Write::Overwrite);
        call.run(shared, &|pieces, body| pool.for_each_slot(pieces, body), finish);
    }

    /// [`Product::compute`] on the calling thread alone: for GEMMs inside a tile of a pool.
    pub(crate) fn compute_in<T: Element>(
        self,
        room: &mut PackBuffer,
        a: Operand<'_, T>,
        b: Operand<'_, T>,
        c: &mut [f32],
        stride: usize,
        mode: Write,
    ) {
        let call = Call::new(self, a, b, Target::matrix(self, c, stride), mode);
        call.run(room, &|pieces, body| (0..pieces).for_each(|piece| body(0, piece)), &|_| {});
    }
}

/// Distributes the work items of a GEMM: calls the function once for each index, with a number that
/// no two calls have at the same time.
type Deal<'a> = &'a dyn Fn(usize, &(dyn Fn(usize, usize) + Sync));

/// GEMM whose operands and result have been checked against its sizes.
struct Call<'a, T> {
    product: Product,
    a: Lines<'a, T>,
    b: Lines<'a, T>,
    c: Target<'a>,
    mode: Write,
}

/// Destination of a GEMM's sums; threads write disjoint parts of it concurrently.
enum Target<'a> {
    /// The result.
    Matrix { data: *mut f32, stride: usize, borrow: PhantomData<&'a mut [f32]> },
    /// Memory of the thread that computes a work item, or if the depth is packed in several parts,
    /// that of all work items.
    Parts { own: Strips<'a, PackBuffer>, sums: *mut f32, len: usize },
}

// SAFETY: it represents exclusive borrows, of which `Call::run` gives each work item its own
// elements.
unsafe impl Sync for Target<'_> {}

impl<'a> Target<'a> {
    fn matrix(product: Product, c: &'a mut [f32], stride: usize) -> Self {
        let Product { height, width, .. } = product;
        let needed = extent(height, width, stride, 1);
        assert!(
            needed.is_some_and(|needed| needed <= c.len()) && (width <= stride || height <= 1),
            "a result of {height} x {width} with rows {stride} apart does not fit {} elements",
            c.len(),
        );
        Self::Matrix { data: c.as_mut_ptr(), stride, borrow: PhantomData }
    }
}

/// Range of rows, columns and terms of a GEMM.
#[derive(Clone)]
struct BlockRange {
    rows: Range<usize>,
    columns: Range<usize>,
    terms: Range<usize>,
}

/// Rows, columns and terms that are packed at a time.
#[derive(Clone, Copy)]
struct Blocks {
    tall: usize,
    wide: usize,
    deep: usize,
    /// Number of terms that are summed in registers: a divisor of `deep`, unless that is all.
    part: usize,
    /// Capacity of a packed line in words.
    room: usize,
}

impl Blocks {
    /// Packs the whole depth if enough lines of it fit, else as many parts of it as do.
    fn of(product: Product, kernel: &Kernel, lines: usize, at_hand: bool) -> Self {
        let Product { height, width, depth } = product;
        let each = kernel.layout.terms();
        let part = share(depth, DEPTH * each, kernel.layout.unit());
        let capacity = lines * (DEPTH + GAP);
        let room = |terms: usize| kernel.layout.words(terms).next_multiple_of(16) + GAP;
        let fit = capacity / room(depth);
        let enough = |size: usize, unit: usize| {
            size.next_multiple_of(unit) <= fit || fit >= (lines / 4).max(unit)
        };
        let whole = enough(width, kernel.columns) && (at_hand || enough(height, kernel.rows));
        let (most, deep) = match whole {
            true => (fit, depth),
            false => {
                let most = if depth <= 2 * DEPTH * each { lines } else { lines / 2 };
                (most, part * ((capacity / most - GAP) * each / part).max(1))
            }
        };
        let along = |size: usize, unit: usize| share(size, (most / unit * unit).max(unit), unit);
        Self {
            tall: if at_hand { height.max(1) } else { along(height, kernel.rows) },
            wide: along(width, kernel.columns),
            deep,
            part,
            room: room(deep.min(depth)),
        }
    }
}

impl<'a, T: Element> Call<'a, T> {
    fn new(
        product: Product,
        a: Operand<'a, T>,
        b: Operand<'a, T>,
        c: Target<'a>,
        mode: Write,
    ) -> Self {
        let Product { height, width, depth } = product;
        a.expect("a", height, depth);
        b.expect("b", depth, width);
        Self { product, a: Lines::rows(a), b: Lines::columns(b), c, mode }
    }

    /// Computes one block after the other; all threads work on the same one.
    fn run(&self, room: &mut PackBuffer, deal: Deal<'_>, finish: &(dyn Fn(Finished) + Sync)) {
        let Product { height, width, depth } = self.product;
        let kernel = room.kernel::<T>();
        let at_hand = self.a.are_at_hand(&kernel, height, depth);
        let blocks = Blocks::of(self.product, &kernel, room.lines, at_hand);
        let Blocks { tall, wide, deep, .. } = blocks;
        let step = Step { kernel, blocks, at_hand };
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
                    deal(part.rows.len(), &|slot, row| {
                        let row = part.rows.start + row;
                        self.empty(slot, row..row + 1, part.columns.clone(), finish);
                    });
                    continue;
                }
                for first in (0..depth).step_by(deep) {
                    let part = BlockRange { terms: first..depth.min(first + deep), ..part.clone() };
                    let wanted = [Some((top, first)), Some((left, first))];
                    let stale = [packed[0] != wanted[0], packed[1] != wanted[1]];
                    self.pack(room, deal, &step, &part, stale);
                    packed = wanted;
                    self.multiply(room, deal, &step, &part, finish);
                }
            }
        }
    }

    /// Handles a depth of zero: a sum of no terms.
    fn empty(
        &self,
        slot: usize,
        rows: Range<usize>,
        columns: Range<usize>,
        finish: &(dyn Fn(Finished) + Sync),
    ) {
        for first in columns.clone().step_by(STRIPE) {
            let columns = first..columns.end.min(first + STRIPE);
            let blocks = Blocks { tall: 1, wide: 1, deep: 0, part: 0, room: 0 };
            let block = BlockRange { rows: rows.clone(), columns: columns.clone(), terms: 0..0 };
            let (c, stride) = self.sums(slot, &blocks, &block, &rows, &columns);
            let mut finished = Finished { rows: rows.clone(), columns, c, stride };
            for row in finished.rows() {
                self.mode.prepare(finished.row(row));
            }
            finish(finished);
        }
    }

    /// Packs the rows and the columns of a block, where they are `stale`.
    fn pack(
        &self,
        buffer: &mut PackBuffer,
        deal: Deal<'_>,
        step: &Step,
        block: &BlockRange,
        stale: [bool; 2],
    ) {
        let &Step { kernel, blocks: Blocks { room, .. }, at_hand } = step;
        let (rows, columns) = kernel.formats(room);
        let (a, b) = (buffer.a.elements_mut(), buffer.b.elements_mut());
        let whole = |data: &mut [f32]| data.len() / room * room;
        let (of_a, of_b) = (whole(a), whole(b));
        let (a, b) = (strips(&mut a[..of_a], room), strips(&mut b[..of_b], room));
        let sides = [(self.a, &block.rows, rows, a), (self.b, &block.columns, columns, b)];
        let pieces = |side: usize| {
            if stale[side] { sides[side].1.len().div_ceil(PACKED) } else { 0 }
        };
        let of_a = if at_hand { 0 } else { pieces(0) };
        deal(of_a + pieces(1), &|_, piece| {
            let (side, piece) = if piece < of_a { (0, piece) } else { (1, piece - of_a) };
            let (operand, lines, format, panels) = &sides[side];
            let first = piece * PACKED;
            let count = PACKED.min(lines.len() - first);
            // SAFETY: the buffer has as many lines as are packed at a time, rounded up to whole
            // panels, see `Blocks::of`; every work item has its own, and each is packed once.
            let panels =
                unsafe { panels.piece(first..first + count.next_multiple_of(format.panel)) };
            let lines = lines.start + first..lines.start + first + count;
            operand.pack(&kernel, lines, block.terms.clone(), *format, panels);
        });
    }

    /// Multiplies the packed operands, one work item at a time.
    fn multiply(
        &self,
        buffer: &PackBuffer,
        deal: Deal<'_>,
        step: &Step,
        block: &BlockRange,
        finish: &(dyn Fn(Finished) + Sync),
    ) {
        let &Step { kernel, ref blocks, at_hand } = step;
        let item = BLOCK.next_multiple_of(kernel.rows);
        let stripe = STRIPE.next_multiple_of(kernel.columns);
        let (height, width) = (block.rows.len(), block.columns.len());
        let down = height.div_ceil(item);
        let last = block.terms.end == self.product.depth;
        deal(down * width.div_ceil(stripe), &|slot, piece| {
            let rows = piece % down * item..height.min((piece % down + 1) * item);
            let columns = piece / down * stripe..width.min((piece / down + 1) * stripe);
            let from = |start: usize, r: &Range<usize>| start + r.start..start + r.end;
            let own = (from(block.rows.start, &rows), from(block.columns.start, &columns));
            let (c, stride) = self.sums(slot, blocks, block, &own.0, &own.1);
            // SAFETY: the kernel was chosen for this processor.
            let _ready = unsafe { kernel.ready() };
            for first in block.terms.clone().step_by(blocks.part) {
                let terms = first..block.terms.end.min(first + blocks.part);
                let word = (first - block.terms.start) / kernel.layout.terms();
                for j in columns.clone().step_by(kernel.columns) {
                    let count = kernel.columns.min(columns.end - j);
                    let b = j * blocks.room + word * count.next_multiple_of(kernel.lanes);
                    for i in rows.clone().step_by(kernel.rows) {
                        // SAFETY: the kernel was chosen for this processor. `pack` has written the
                        // panels of the block's terms that begin at lines `i` and `j`, except for
                        // rows that are read in place in the operand. The tile is inside this work
                        // item's part of the sums, which overlaps no other work item's.
                        unsafe {
                            (kernel.run)(Tile {
                                depth: kernel.layout.words(terms.len()),
                                a: if at_hand {
                                    self.a.at(&kernel, block.rows.start + i, first)
                                } else {
                                    let data = buffer.a.elements().as_ptr().add(i * blocks.room);
                                    kernel.packed(data, blocks.room, word)
                                },
                                b: buffer.b.elements().as_ptr().add(b),
                                c: c.add((i - rows.start) * stride + j - columns.start),
                                stride,
                                rows: kernel.rows.min(rows.end - i),
                                columns: count,
                                add: first > 0 || self.mode == Write::Accumulate,
                            });
                        }
                    }
                }
            }
            if last {
                let (rows, columns) = own;
                finish(Finished { rows, columns, c, stride });
            }
        });
    }

    /// First element, and the stride of rows, of the memory for the sums of a work item.
    fn sums(
        &self,
        slot: usize,
        blocks: &Blocks,
        block: &BlockRange,
        rows: &Range<usize>,
        columns: &Range<usize>,
    ) -> (*mut f32, usize) {
        match &self.c {
            Target::Matrix { data, stride, .. } => {
                let from = rows.start * stride + columns.start;
                // SAFETY: `Target::matrix` has found every element of the result within the slice.
                (unsafe { data.add(from) }, *stride)
            }
            Target::Parts { own, .. } if blocks.deep >= self.product.depth => {
                // SAFETY: no two calls have the same slot at the same time.
                let own = unsafe { own.piece(slot..slot + 1) };
                let sums = own[0].sums.elements_mut();
                assert!(rows.len() * columns.len() <= sums.len());
                (sums.as_mut_ptr(), columns.len())
            }
            Target::Parts { sums, len, .. } => {
                let (top, stride) = (rows.start - block.rows.start, blocks.wide);
                let from = top * stride + columns.start - block.columns.start;
                assert!((top + rows.len()) * stride <= *len && block.columns.len() <= stride);
                // SAFETY: the assertion found the rows of the block within the slice.
                (unsafe { sums.add(from) }, stride)
            }
        }
    }
}

/// What is the same for all blocks of a GEMM.
struct Step {
    kernel: Kernel,
    blocks: Blocks,
    /// True if the left operand is read in place.
    at_hand: bool,
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
