//! Innermost GEMM loop: one tile of the result from packed panels, kept in registers.
//!
//! On every instruction set, an element of the tile is one chain of multiply-adds over the depth,
//! in order. So its bits depend neither on the size of a tile nor on its position in it. Every
//! instruction set that fuses multiply-adds gives the same ones. Tiles of bfloat16 pairs are in
//! [`super::brain`].

use super::pack::Format;
use super::{amx, brain};
use crate::Element;

/// Operands and destination of one tile.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Number of words that each element sums.
    pub(super) depth: usize,
    /// Rows of the left operand.
    pub(super) a: Left,
    /// Panel of up to [`Kernel::columns`] columns: for each word, that of every column, and zeros up to the next multiple of [`Kernel::lanes`].
    pub(super) b: *const f32,
    /// First element of the result.
    pub(super) c: *mut f32,
    /// Row stride of the result.
    pub(super) stride: usize,
    /// Number of the panel's rows that the result has, at least one.
    pub(super) rows: usize,
    /// Number of the panel's columns that the result has, at least one.
    pub(super) columns: usize,
    /// True if the sums are added to the old values of the result.
    pub(super) add: bool,
}

/// Rows of a tile's left operand: word `k` of row `i` is `i * across + k * along` bytes from the
/// first.
///
/// A tile reads one word of each row at a time and broadcasts it to a register. So the location
/// of the rows matters little: they may be in a packed panel or in the operand itself.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub(super) data: *const u8,
    pub(super) across: usize,
    /// For [`Layout::Tiles`], distance of 16 words.
    pub(super) along: usize,
    /// Distance of 16 rows, for [`Layout::Tiles`].
    pub(super) group: usize,
}

impl Left {
    /// Pointers to its `rows` rows; those that a kernel needs beyond them repeat the last one.
    #[inline(always)]
    pub(super) fn rows<const N: usize>(self, rows: usize) -> [*const u8; N] {
        std::array::from_fn(|i| self.data.wrapping_add(i.min(rows - 1) * self.across))
    }
}

/// Order of an operand's terms in packed panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// A word is a term in single precision.
    Singles,
    /// A word is a pair of bfloat16 terms.
    Pairs,
    /// Pairs, of which every 16 words of 16 rows of the left operand are together.
    Tiles,
}

impl Layout {
    /// Number of terms in a word.
    pub(super) fn terms(self) -> usize {
        match self {
            Self::Singles => 1,
            Self::Pairs | Self::Tiles => 2,
        }
    }

    /// Number of terms to which a part of the depth is padded with zeros.
    pub(super) fn unit(self) -> usize {
        match self {
            Self::Singles => 1,
            Self::Pairs => 2,
            Self::Tiles => 32,
        }
    }

    /// Number of words of a number of terms.
    pub(super) fn words(self, terms: usize) -> usize {
        terms.next_multiple_of(self.unit()) / self.terms()
    }
}

/// Eight lines of `8 * blocks` elements, and the destination of their transpose.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub(super) from: *const f32,
    /// Stride of the lines.
    pub(super) stride: usize,
    pub(super) to: *mut f32,
    /// Stride of the transposed lines.
    pub(super) to_stride: usize,
    pub(super) blocks: usize,
}

/// Implementation of a tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    /// Number of rows of a panel of the left operand.
    pub(super) rows: usize,
    /// Number of columns of a full panel of the right operand, a multiple of `lanes`.
    pub(super) columns: usize,
    /// Granularity of the width of a panel.
    pub(super) lanes: usize,
    /// Order of terms in the panels.
    pub(super) layout: Layout,
    /// Computes a tile.
    ///
    /// # Safety
    ///
    /// The processor must have the instructions, and be [`Kernel::ready`]. `a` must have `depth`
    /// readable words in each of `Tile::rows` rows (rounded up to 16 for [`Layout::Tiles`]), `b` must have `depth` times `Tile::columns` rounded up to `lanes`, and
    /// every element of the result must be readable and writable, by this thread alone.
    pub(super) run: unsafe fn(Tile),
    /// Transposes a strip of 8 x 8 blocks.
    ///
    /// # Safety
    ///
    /// The processor must have the instructions, and all elements of the strip must exist on both
    /// sides.
    pub(super) transpose: unsafe fn(Strip),
}

impl Kernel {
    /// Fastest kernel for operands of a type on this processor.
    pub(super) fn of<T: Element>() -> Self {
        let pairs = if T::brains(&[]).is_some() { brain::best() } else { None };
        pairs.unwrap_or_else(Self::best)
    }

    /// Fastest kernel for single precision on this processor.
    fn best() -> Self {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            use std::arch::is_x86_feature_detected as detected;
            if detected!("avx512f") && detected!("avx2") && detected!("fma") {
                return AVX512;
            }
            if detected!("avx2") && detected!("fma") {
                return AVX2;
            }
        }
        PORTABLE
    }

    /// Layouts of packed rows and of packed columns, for lines of a capacity.
    pub(super) fn formats(&self, room: usize) -> (Format, Format) {
        let Self { rows, columns, lanes, layout, .. } = *self;
        let rows = if layout == Layout::Tiles { 16 } else { rows };
        (
            Format { panel: rows, multiple: rows, room, tiled: layout == Layout::Tiles },
            Format { panel: columns, multiple: lanes, room, tiled: false },
        )
    }

    /// Rows of the left operand that were packed at `data`, from a word on.
    pub(super) fn packed(&self, data: *const f32, room: usize, word: usize) -> Left {
        let data = data.cast::<u8>();
        match self.layout {
            Layout::Singles | Layout::Pairs => Left {
                data: data.wrapping_add(4 * word * self.rows),
                across: 4,
                along: 4 * self.rows,
                group: 0,
            },
            Layout::Tiles => Left {
                data: data.wrapping_add(4 * word * 16),
                across: 64,
                along: 1024,
                group: 4 * 16 * room,
            },
        }
    }

    /// Prepares the thread for tiles, until the result is dropped.
    ///
    /// # Safety
    ///
    /// The processor must have the kernel's instructions.
    pub(super) unsafe fn ready(&self) -> Option<amx::Configured> {
        match self.layout {
            Layout::Singles | Layout::Pairs => None,
            // SAFETY: the caller guarantees the instructions.
            Layout::Tiles => Some(unsafe { amx::Configured::new() }),
        }
    }

    /// All kernels that run on this processor, for comparison.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Self> {
        let mut all = vec![PORTABLE];
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            use std::arch::is_x86_feature_detected as detected;
            if detected!("avx2") && detected!("fma") {
                all.push(AVX2);
                if detected!("avx512f") {
                    all.push(AVX512);
                }
            }
        }
        all
    }

    /// Returns true if it fuses multiply-adds, that is, does not round a product before adding it.
    #[cfg(test)]
    pub(super) fn is_fused(&self) -> bool {
        self.columns != PORTABLE.columns || FUSED
    }
}

/// True if multiply-adds can be fused without runtime detection: elsewhere that is a function call,
/// and far slower than two operations.
const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// Kernel compiled from plain loops, for the registers of the baseline, which are NEON's on ARM.
const PORTABLE: Kernel = Kernel {
    rows: 4,
    columns: 16,
    lanes: 16,
    layout: Layout::Singles,
    run: portable,
    transpose: transpose_portable,
};

unsafe fn portable(tile: Tile) {
    let mut sums = [[0.0f32; 16]; 4];
    let rows: [*const u8; 4] = tile.a.rows(tile.rows);
    for k in 0..tile.depth {
        // SAFETY: the caller guarantees `depth` times 16 elements.
        let b: [f32; 16] = unsafe { *tile.b.add(16 * k).cast() };
        for (sums, row) in sums.iter_mut().zip(rows) {
            // SAFETY: the caller guarantees `depth` elements of each row.
            let a = unsafe { *row.add(k * tile.a.along).cast::<f32>() };
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum = if FUSED { a.mul_add(b, *sum) } else { *sum + a * b };
            }
        }
    }
    for (i, sums) in sums.iter().enumerate().take(tile.rows) {
        for (j, sum) in sums.iter().enumerate().take(tile.columns) {
            // SAFETY: the caller guarantees every element of the result.
            unsafe {
                let c = tile.c.add(i * tile.stride + j);
                *c = if tile.add { *c + sum } else { *sum };
            }
        }
    }
}

unsafe fn transpose_portable(strip: Strip) {
    for j in 0..8 * strip.blocks {
        for i in 0..8 {
            // SAFETY: the caller guarantees the elements of the strip on both sides.
            unsafe {
                *strip.to.add(j * strip.to_stride + i) = *strip.from.add(i * strip.stride + j)
            };
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
use x86::{AVX2, AVX512};

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use super::{Kernel, Layout, Strip, Tile};
    use std::arch::x86_64::*;

    /// Kernel with 24 registers of sums, three of the right operand and one of the left, out of 32.
    pub(super) const AVX512: Kernel =
        Kernel { rows: 8, columns: 48, lanes: 16, layout: Layout::Singles, run: avx512, transpose };

    /// Kernel with 12 registers of sums, two of the right operand and one of the left, out of 16.
    pub(super) const AVX2: Kernel =
        Kernel { rows: 6, columns: 16, lanes: 8, layout: Layout::Singles, run: avx2, transpose };

    /// Prefetch distance of the right operand in terms: its panels stream from the L2 cache.
    const AHEAD: usize = 8;

    /// Same for the left operand, whose terms may be far apart and come from farther away.
    const FAR: usize = 16;

    #[target_feature(enable = "avx512f")]
    unsafe fn avx512(tile: Tile) {
        // Eight rows whose elements are adjacent need one address, any others one each.
        let neighbours = tile.a.across == size_of::<f32>() && tile.rows == 8;
        // SAFETY: the caller's guarantees are those that the version for this width requires.
        unsafe {
            match (tile.columns, neighbours) {
                (33.., true) => avx512_wide::<3, true>(tile),
                (17.., true) => avx512_wide::<2, true>(tile),
                (_, true) => avx512_wide::<1, true>(tile),
                (33.., false) => avx512_wide::<3, false>(tile),
                (17.., false) => avx512_wide::<2, false>(tile),
                (_, false) => avx512_wide::<1, false>(tile),
            }
        }
    }

    /// Computes a tile of `N` registers per row, of adjacent rows if `NEIGHBOURS`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn avx512_wide<const N: usize, const NEIGHBOURS: bool>(tile: Tile) {
        let Tile { depth, a, mut b, c, stride, rows, columns, add } = tile;
        let mut sums = [[_mm512_setzero_ps(); N]; 8];
        let each: [*const u8; 8] = a.rows(rows);
        let mut first = a.data;
        for row in 0..rows {
            for j in 0..N {
                _mm_prefetch::<_MM_HINT_T0>(c.wrapping_add(row * stride + 16 * j).cast());
            }
            _mm_prefetch::<_MM_HINT_T0>(c.wrapping_add(row * stride + 16 * N - 1).cast());
        }
        for k in 0..depth {
            let mut right = [_mm512_setzero_ps(); N];
            for (j, right) in right.iter_mut().enumerate() {
                // SAFETY: the caller guarantees `depth` times 16 N elements at `b`.
                *right = unsafe { _mm512_loadu_ps(b.add(16 * j)) };
                _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add(16 * (N * AHEAD + j)).cast());
            }
            if NEIGHBOURS {
                _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(FAR * a.along).cast());
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let left = if NEIGHBOURS {
                    first.wrapping_add(4 * i)
                } else {
                    each[i].wrapping_add(k * a.along)
                };
                // SAFETY: the caller guarantees `depth` elements of each row.
                let left = _mm512_set1_ps(unsafe { *left.cast::<f32>() });
                for (sum, &right) in sums.iter_mut().zip(&right) {
                    *sum = _mm512_fmadd_ps(left, right, *sum);
                }
            }
            first = first.wrapping_add(a.along);
            b = b.wrapping_add(16 * N);
        }
        for (i, sums) in sums.iter().enumerate() {
            if i == rows {
                break;
            }
            for (j, &sum) in sums.iter().enumerate() {
                let here = columns - 16 * j;
                let mask = if here >= 16 { !0 } else { (1 << here) - 1 };
                // SAFETY: the caller guarantees every element of the result, and the mask excludes
                // elements beyond its columns.
                unsafe {
                    let c = c.add(i * stride + 16 * j);
                    let old =
                        if add { _mm512_maskz_loadu_ps(mask, c) } else { _mm512_setzero_ps() };
                    let new = if add { _mm512_add_ps(old, sum) } else { sum };
                    _mm512_mask_storeu_ps(c, mask, new);
                }
            }
        }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2(tile: Tile) {
        // SAFETY: the caller's guarantees are those that the version for this width requires.
        unsafe { if tile.columns > 8 { avx2_wide::<2>(tile) } else { avx2_wide::<1>(tile) } }
    }

    /// Computes a tile of `N` registers per row.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2_wide<const N: usize>(tile: Tile) {
        let Tile { depth, a, mut b, c, stride, rows, columns, add } = tile;
        let mut sums = [[_mm256_setzero_ps(); N]; 6];
        let each: [*const u8; 6] = a.rows(rows);
        for k in 0..depth {
            let mut right = [_mm256_setzero_ps(); N];
            for (j, right) in right.iter_mut().enumerate() {
                // SAFETY: the caller guarantees `depth` times 8 N elements at `b`.
                *right = unsafe { _mm256_loadu_ps(b.add(8 * j)) };
            }
            for (sums, row) in sums.iter_mut().zip(each) {
                // SAFETY: the caller guarantees `depth` elements of each row.
                let left = _mm256_set1_ps(unsafe { *row.add(k * a.along).cast::<f32>() });
                for (sum, &right) in sums.iter_mut().zip(&right) {
                    *sum = _mm256_fmadd_ps(left, right, *sum);
                }
            }
            b = b.wrapping_add(8 * N);
        }
        for (i, sums) in sums.iter().enumerate() {
            if i == rows {
                break;
            }
            for (j, &sum) in sums.iter().enumerate() {
                let here = (columns - 8 * j).min(8) as i32;
                let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(here), lanes);
                // SAFETY: the caller guarantees every element of the result, and the mask excludes
                // elements beyond its columns.
                unsafe {
                    let c = c.add(i * stride + 8 * j);
                    let new =
                        if add { _mm256_add_ps(_mm256_maskload_ps(c, mask), sum) } else { sum };
                    _mm256_maskstore_ps(c, mask, new);
                }
            }
        }
    }

    #[target_feature(enable = "avx2")]
    unsafe fn transpose(strip: Strip) {
        let Strip { mut from, stride, mut to, to_stride, blocks } = strip;
        for _ in 0..blocks {
            // SAFETY: the caller guarantees every block of the strip.
            unsafe { transpose_block(from, stride, to, to_stride) };
            from = from.wrapping_add(8);
            to = to.wrapping_add(8 * to_stride);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn transpose_block(from: *const f32, stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the caller guarantees eight elements in each of eight rows.
        let r: [__m256; 8] =
            std::array::from_fn(|i| unsafe { _mm256_loadu_ps(from.add(i * stride)) });
        // Interleaves pairs of rows, then groups of four, then the halves of all eight.
        let pairs: [__m256; 8] = std::array::from_fn(|i| {
            let (x, y) = (r[i / 2 * 2], r[i / 2 * 2 + 1]);
            if i % 2 == 0 { _mm256_unpacklo_ps(x, y) } else { _mm256_unpackhi_ps(x, y) }
        });
        let fours: [__m256; 8] = std::array::from_fn(|i| {
            let base = i / 4 * 4 + i % 4 / 2;
            let (x, y) = (pairs[base], pairs[base + 2]);
            if i % 2 == 0 {
                _mm256_shuffle_ps::<0b01_00_01_00>(x, y)
            } else {
                _mm256_shuffle_ps::<0b11_10_11_10>(x, y)
            }
        });
        for i in 0..8 {
            let (x, y) = (fours[i % 4], fours[i % 4 + 4]);
            let column = if i < 4 {
                _mm256_permute2f128_ps::<0x20>(x, y)
            } else {
                _mm256_permute2f128_ps::<0x31>(x, y)
            };
            // SAFETY: the caller guarantees eight elements in each of eight rows.
            unsafe { _mm256_storeu_ps(to.add(i * to_stride), column) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;

    #[test]
    fn strips_are_transposed() {
        let from = random("from", 8 * 19);
        for kernel in Kernel::all() {
            let mut to = vec![0.0; 16 * 9];
            let (from_, to_) = (from.as_ptr(), to.as_mut_ptr());
            // SAFETY: `all` returns only kernels that this processor supports; 8 lines of 19
            // contain 8 of 16, and 16 of 9 contain 16 of 8.
            unsafe {
                (kernel.transpose)(Strip {
                    from: from_,
                    stride: 19,
                    to: to_,
                    to_stride: 9,
                    blocks: 2,
                });
            }
            for i in 0..8 {
                for j in 0..16 {
                    assert_eq!(to[j * 9 + i], from[i * 19 + j]);
                }
            }
        }
    }
}
