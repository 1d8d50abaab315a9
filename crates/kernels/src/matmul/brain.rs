//! Tiles of bfloat16 pairs, with sums in single precision.
//!
//! The orders of summation are those of the processor's instructions, so the bits of a sum depend
//! on which one there is. Both treat subnormal numbers as zero.
//!
//! | instructions | order of the terms of a part |
//! |---|---|
//! | AVX-512 BF16 (`VDPBF16PS`) | one chain: of each pair the second term, then the first |
//! | AMX (`TDPBF16PS`) | for every 32 terms a chain of the first and one of the second terms of the pairs, whose sum is added to those before; parts continue the same sum |
//!
//! A processor with neither widens the operands and sums as in single precision.

use super::tile::Kernel;

/// Fastest kernel for bfloat16 pairs on this processor, if it has one.
pub(super) fn best() -> Option<Kernel> {
    all().into_iter().flatten().last()
}

/// All of its kernels for bfloat16 pairs, the fastest last.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(super) fn all() -> [Option<Kernel>; 2] {
    [None, None]
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) use x86::all;
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) use x86::{interleave, load, transpose};

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use crate::matmul::tile::{Kernel, Layout, Strip, Tile};
    use std::arch::asm;
    use std::arch::x86_64::*;

    pub(in crate::matmul) fn all() -> [Option<Kernel>; 2] {
        use std::arch::is_x86_feature_detected as detected;
        if !(detected!("avx512f") && detected!("avx512bw") && detected!("avx512vl")) {
            return [None, None];
        }
        #[cfg(target_os = "linux")]
        let tiles = crate::matmul::amx::is_permitted();
        #[cfg(not(target_os = "linux"))]
        let tiles = false;
        [detected!("avx512bf16").then_some(PAIRS), tiles.then_some(TILES)]
    }

    /// Kernel with the registers of the one for single precision.
    const PAIRS: Kernel = Kernel {
        rows: 8,
        columns: 48,
        lanes: 16,
        layout: Layout::Pairs,
        run: pairs,
        transpose: never,
    };

    /// Kernel with four tile registers of sums, two of each operand.
    const TILES: Kernel = Kernel {
        rows: 32,
        columns: 32,
        lanes: 16,
        layout: Layout::Tiles,
        run: tiles,
        transpose: never,
    };

    /// Pairs are packed by [`transpose`].
    unsafe fn never(_: Strip) {
        unreachable!("pairs have a transpose of their own")
    }

    /// Prefetch distance of the right operand in pairs.
    const AHEAD: usize = 8;

    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn pairs(tile: Tile) {
        // SAFETY: the caller's guarantees are those that the version for this width requires.
        unsafe {
            match tile.columns {
                33.. => pairs_wide::<3>(tile),
                17.. => pairs_wide::<2>(tile),
                _ => pairs_wide::<1>(tile),
            }
        }
    }

    /// Computes a tile of `N` registers per row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn pairs_wide<const N: usize>(tile: Tile) {
        let Tile { depth, a, mut b, c, stride, rows, columns, add } = tile;
        let mut sums = [[_mm512_setzero_ps(); N]; 8];
        let each: [*const u8; 8] = a.rows(rows);
        for k in 0..depth {
            let mut right = [_mm512_setzero_si512(); N];
            for (j, right) in right.iter_mut().enumerate() {
                // SAFETY: the caller guarantees `depth` times 16 N words at `b`.
                *right = unsafe { _mm512_loadu_si512(b.add(16 * j).cast()) };
                _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add(16 * (N * AHEAD + j)).cast());
            }
            for (sums, row) in sums.iter_mut().zip(each) {
                // SAFETY: the caller guarantees `depth` words of each row, at any address.
                let left = unsafe { row.add(k * a.along).cast::<i32>().read_unaligned() };
                let left = _mm512_set1_epi32(left);
                for (sum, &right) in sums.iter_mut().zip(&right) {
                    *sum = _mm512_dpbf16_ps(*sum, as_pairs(left), as_pairs(right));
                }
            }
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

    /// The same bits as pairs.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn as_pairs(words: __m512i) -> __m512bh {
        // SAFETY: both types are 64 bytes, of which every bit pattern is valid.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
    }

    unsafe fn tiles(tile: Tile) {
        let (down, across) = (tile.rows.div_ceil(16), tile.columns.div_ceil(16));
        if tile.rows == 16 * down && tile.columns == 16 * across {
            // SAFETY: the caller's guarantees, for a tile of whole registers.
            unsafe { whole_tiles(tile, down, across) };
            return;
        }
        // Registers are stored whole, so the edges of a result go through a copy.
        let mut copy = [0.0f32; 32 * 32];
        let row = |i: usize| tile.c.wrapping_add(i * tile.stride);
        if tile.add {
            for (i, copy) in copy.chunks_exact_mut(32).enumerate().take(tile.rows) {
                // SAFETY: the caller guarantees every element of the result.
                unsafe { row(i).copy_to_nonoverlapping(copy.as_mut_ptr(), tile.columns) };
            }
        }
        // SAFETY: the caller's guarantees for the operands; the copy has room for whole registers.
        unsafe {
            whole_tiles(Tile { c: copy.as_mut_ptr(), stride: 32, ..tile }, down, across);
        }
        for (i, copy) in copy.chunks_exact(32).enumerate().take(tile.rows) {
            // SAFETY: the caller guarantees every element of the result.
            unsafe { row(i).copy_from_nonoverlapping(copy.as_ptr(), tile.columns) };
        }
    }

    /// Computes a tile of `down` x `across` registers, each one or two.
    unsafe fn whole_tiles(tile: Tile, down: usize, across: usize) {
        let Tile { depth, a, b, c, stride, add, .. } = tile;
        for row in 0..16 * down {
            for j in 0..across {
                let line = c.wrapping_add(row * stride + 16 * j);
                // SAFETY: a prefetch hint accesses no memory.
                unsafe { _mm_prefetch::<_MM_HINT_ET0>(line.cast()) };
            }
        }
        /// Code of a tile of some registers: zeros or loads the sums, then adds 16 words at a time.
        macro_rules! run {
            ($zero:expr, $load:expr, $terms:expr, $store:expr) => {
                // SAFETY: the caller guarantees operands and result, the processor's instructions
                // and configured registers, which no compiled code uses.
                unsafe {
                    asm!(
                        "test {add}, {add}",
                        "jz 2f",
                        $load,
                        "jmp 3f",
                        "2:",
                        $zero,
                        "3:",
                        $terms,
                        "add {a0}, {step}",
                        "add {a1}, {step}",
                        "dec {count}",
                        "jnz 3b",
                        $store,
                        add = in(reg) usize::from(add),
                        a0 = inout(reg) a.data => _,
                        a1 = inout(reg) a.data.wrapping_add(a.group) => _,
                        across = in(reg) a.across,
                        step = in(reg) a.along,
                        b = inout(reg) b => _,
                        wide = in(reg) 64 * across,
                        c0 = in(reg) c,
                        c1 = in(reg) c.wrapping_add(16 * stride),
                        stride = in(reg) 4 * stride,
                        count = inout(reg) depth / 16 => _,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    );
                }
            };
        }
        match (down, across) {
            (2, 2) => run!(
                "tilezero tmm0\n tilezero tmm1\n tilezero tmm2\n tilezero tmm3",
                "tileloadd tmm0, [{c0} + {stride}*1]\n tileloadd tmm1, [{c0} + {stride}*1 + 64]\n \
                 tileloadd tmm2, [{c1} + {stride}*1]\n tileloadd tmm3, [{c1} + {stride}*1 + 64]",
                "tileloadd tmm6, [{b} + {wide}*1]\n tileloadd tmm4, [{a0} + {across}*1]\n \
                 tileloadd tmm7, [{b} + {wide}*1 + 64]\n tdpbf16ps tmm0, tmm4, tmm6\n \
                 tileloadd tmm5, [{a1} + {across}*1]\n tdpbf16ps tmm1, tmm4, tmm7\n \
                 tdpbf16ps tmm2, tmm5, tmm6\n tdpbf16ps tmm3, tmm5, tmm7\n add {b}, 2048",
                "tilestored [{c0} + {stride}*1], tmm0\n tilestored [{c0} + {stride}*1 + 64], tmm1\n \
                 tilestored [{c1} + {stride}*1], tmm2\n tilestored [{c1} + {stride}*1 + 64], tmm3"
            ),
            (1, 2) => run!(
                "tilezero tmm0\n tilezero tmm1",
                "tileloadd tmm0, [{c0} + {stride}*1]\n tileloadd tmm1, [{c0} + {stride}*1 + 64]",
                "tileloadd tmm6, [{b} + {wide}*1]\n tileloadd tmm4, [{a0} + {across}*1]\n \
                 tileloadd tmm7, [{b} + {wide}*1 + 64]\n tdpbf16ps tmm0, tmm4, tmm6\n \
                 tdpbf16ps tmm1, tmm4, tmm7\n add {b}, 2048 # {c1}",
                "tilestored [{c0} + {stride}*1], tmm0\n tilestored [{c0} + {stride}*1 + 64], tmm1"
            ),
            (2, 1) => run!(
                "tilezero tmm0\n tilezero tmm2",
                "tileloadd tmm0, [{c0} + {stride}*1]\n tileloadd tmm2, [{c1} + {stride}*1]",
                "tileloadd tmm6, [{b} + {wide}*1]\n tileloadd tmm4, [{a0} + {across}*1]\n \
                 tileloadd tmm5, [{a1} + {across}*1]\n tdpbf16ps tmm0, tmm4, tmm6\n \
                 tdpbf16ps tmm2, tmm5, tmm6\n add {b}, 1024",
                "tilestored [{c0} + {stride}*1], tmm0\n tilestored [{c1} + {stride}*1], tmm2"
            ),
            _ => run!(
                "tilezero tmm0",
                "tileloadd tmm0, [{c0} + {stride}*1]",
                "tileloadd tmm6, [{b} + {wide}*1]\n tileloadd tmm4, [{a0} + {across}*1]\n \
                 tdpbf16ps tmm0, tmm4, tmm6\n add {b}, 1024 # {c1}",
                "tilestored [{c0} + {stride}*1], tmm0"
            ),
        }
    }

    /// Adjacent terms of a line, of which the mask may exclude some, as 16 words.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(in crate::matmul) unsafe fn load(from: *const u16, mask: u32) -> __m512i {
        // SAFETY: the caller guarantees the terms that the mask includes.
        unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) }
    }

    /// Pairs of a term of 16 adjacent lines and the next one's, `along` elements further; the masks
    /// may exclude lines.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(in crate::matmul) unsafe fn interleave(
        from: *const u16,
        along: usize,
        masks: [u16; 2],
    ) -> __m512i {
        // SAFETY: the caller guarantees the elements that the masks include.
        let [first, second] = unsafe {
            [
                _mm256_maskz_loadu_epi16(masks[0], from.cast()),
                _mm256_maskz_loadu_epi16(masks[1], from.wrapping_add(along).cast()),
            ]
        };
        let [first, second] = [first, second].map(|half| _mm512_cvtepu16_epi32(half));
        _mm512_or_si512(first, _mm512_slli_epi32::<16>(second))
    }

    /// Transposes 16 x 16 words.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(in crate::matmul) fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
        let mut a = r;
        for i in 0..8 {
            a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        // Each lane of 128 bits of `b[4 i + j]` has column `4 lane + j` of rows `4 i..4 i + 4`.
        let mut b = a;
        for i in 0..4 {
            b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
            b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
            b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
            b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
        }
        let mut out = b;
        for j in 0..4 {
            let low = _mm512_shuffle_i32x4::<0x88>(b[j], b[4 + j]);
            let odd = _mm512_shuffle_i32x4::<0xdd>(b[j], b[4 + j]);
            let low_too = _mm512_shuffle_i32x4::<0x88>(b[8 + j], b[12 + j]);
            let odd_too = _mm512_shuffle_i32x4::<0xdd>(b[8 + j], b[12 + j]);
            out[j] = _mm512_shuffle_i32x4::<0x88>(low, low_too);
            out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(low, low_too);
            out[4 + j] = _mm512_shuffle_i32x4::<0x88>(odd, odd_too);
            out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(odd, odd_too);
        }
        out
    }
}
