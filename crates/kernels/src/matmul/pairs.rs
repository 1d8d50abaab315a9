//! Packs bfloat16 operands: a word of a panel is a pair of terms that follow each other.

use super::pack::{Format, Lines};
use super::tile::Kernel;
use crate::Bf16;
use std::ops::Range;

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
impl Lines<'_, Bf16> {
    /// Never called: no kernel of another processor multiplies pairs.
    pub(super) fn pack_pairs(
        self,
        _: &Kernel,
        _: Range<usize>,
        _: Range<usize>,
        _: Format,
        _: &mut [f32],
    ) {
        unreachable!("no kernel for pairs")
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use super::*;
    use crate::matmul::brain::{interleave, load, transpose};
    use crate::matmul::pack::{AHEAD, fetch};
    use std::arch::x86_64::*;

    /// Mask of the first `count` of some bits, at most all of them.
    fn first(count: usize) -> u32 {
        if count >= 32 { !0 } else { (1 << count) - 1 }
    }

    impl Lines<'_, Bf16> {
        /// [`Lines::pack`] of pairs; a line is zero-padded to whole words of its kernel.
        pub(in crate::matmul) fn pack_pairs(
            self,
            kernel: &Kernel,
            lines: Range<usize>,
            terms: Range<usize>,
            format: Format,
            panels: &mut [f32],
        ) {
            let Format { panel, multiple, room, tiled } = format;
            let words = kernel.layout.words(terms.len());
            let (Some(line), Some(term)) = (lines.clone().last(), terms.clone().last()) else {
                return;
            };
            assert!(line * self.across + term * self.along < self.data.len());
            assert!(words <= room && lines.len().div_ceil(panel) * panel * room <= panels.len());
            assert!(if tiled { panel == 16 } else { multiple == 8 || multiple == 16 });
            let to = panels.as_mut_ptr();
            let copy = Copy { lines, terms, words, format, to };
            // SAFETY: kernels for pairs run only on processors with these instructions. The
            // assertions found the last term of the last line in the operand and whole panels in
            // the slice.
            unsafe {
                match (tiled, self.along == 1, self.across == 1) {
                    (false, true, _) => self.transposed(copy),
                    (false, false, true) => self.interleaved(copy),
                    (true, true, _) => self.tiles(copy),
                    (true, false, true) => self.transposed_tiles(copy),
                    (_, false, false) => self.gathered(copy),
                }
            }
        }

        fn address(&self, line: usize, term: usize) -> *const u16 {
            self.data.as_ptr().cast::<u16>().wrapping_add(line * self.across + term * self.along)
        }

        /// Packs lines with adjacent terms into panels.
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        unsafe fn transposed(self, copy: Copy) {
            for at in (0..copy.lines.len()).step_by(16) {
                let count = (copy.lines.len() - at).min(16);
                for word in (0..copy.words).step_by(16) {
                    let left = (copy.terms.len()).saturating_sub(2 * word);
                    let mut rows = [_mm512_setzero_si512(); 16];
                    for (i, row) in rows.iter_mut().enumerate().take(count) {
                        let from =
                            self.address(copy.lines.start + at + i, copy.terms.start + 2 * word);
                        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(128).cast());
                        // SAFETY: the mask excludes what is not in the operand.
                        *row = unsafe { load(from, first(left)) };
                    }
                    for (k, row) in transpose(rows).into_iter().enumerate() {
                        if word + k < copy.words {
                            // SAFETY: the word is one of the panel's.
                            unsafe { copy.put(at, word + k, row) };
                        }
                    }
                }
            }
        }

        /// Packs adjacent lines into panels.
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        unsafe fn interleaved(self, copy: Copy) {
            for word in 0..copy.words {
                let left = copy.terms.len().saturating_sub(2 * word);
                let term = copy.terms.start + 2 * word;
                for ahead in [0, 1] {
                    let next = (term + 2 * AHEAD + ahead) * self.along + copy.lines.start;
                    fetch(self.data, next, copy.lines.len());
                }
                for at in (0..copy.lines.len()).step_by(16) {
                    let row = first(copy.lines.len() - at) as u16;
                    let masks = [0, 1].map(|i| if left > i { row } else { 0 });
                    // SAFETY: the masks exclude what is not in the operand, and the word is one of
                    // the panel's.
                    unsafe {
                        let from = self.address(copy.lines.start + at, term);
                        copy.put(at, word, interleave(from, self.along, masks));
                    }
                }
            }
        }

        /// Packs lines with adjacent terms into tiles.
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        unsafe fn tiles(self, copy: Copy) {
            for at in 0..copy.lines.len().next_multiple_of(16) {
                for word in (0..copy.words).step_by(16) {
                    let left = (copy.terms.len()).saturating_sub(2 * word);
                    let left = if at < copy.lines.len() { left } else { 0 };
                    // SAFETY: the mask excludes what is not in the operand, and the words are those
                    // of a tile.
                    unsafe {
                        let from = self.address(copy.lines.start + at, copy.terms.start + 2 * word);
                        _mm512_storeu_si512(copy.tile(at, word).cast(), load(from, first(left)));
                    }
                }
            }
        }

        /// Packs adjacent lines into tiles.
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        unsafe fn transposed_tiles(self, copy: Copy) {
            for word in (0..copy.words).step_by(16) {
                for ahead in 0..32 {
                    let term = copy.terms.start + 2 * word + 32 + ahead;
                    fetch(self.data, term * self.along + copy.lines.start, copy.lines.len());
                }
                for at in (0..copy.lines.len()).step_by(16) {
                    let row = first(copy.lines.len() - at) as u16;
                    let mut pairs = [_mm512_setzero_si512(); 16];
                    for (k, pairs) in pairs.iter_mut().enumerate() {
                        let left = copy.terms.len().saturating_sub(2 * (word + k));
                        let masks = [0, 1].map(|i| if left > i { row } else { 0 });
                        let term = copy.terms.start + 2 * (word + k);
                        // SAFETY: the masks exclude what is not in the operand.
                        *pairs = unsafe {
                            interleave(self.address(copy.lines.start + at, term), self.along, masks)
                        };
                    }
                    for (i, line) in transpose(pairs).into_iter().enumerate() {
                        // SAFETY: the words are those of a tile.
                        unsafe { _mm512_storeu_si512(copy.tile(at + i, word).cast(), line) };
                    }
                }
            }
        }

        /// Packs any other layout, pair by pair.
        unsafe fn gathered(self, copy: Copy) {
            let Format { panel, multiple, tiled, .. } = copy.format;
            let multiple = if tiled { panel } else { multiple };
            for at in 0..copy.lines.len().next_multiple_of(multiple) {
                for word in 0..copy.words {
                    let half = |i: usize| {
                        let term = copy.terms.start + 2 * word + i;
                        let there = at < copy.lines.len() && term < copy.terms.end;
                        let line = copy.lines.start + at;
                        let value = || self.data[line * self.across + term * self.along].to_bits();
                        if there { u32::from(value()) } else { 0 }
                    };
                    let pair = f32::from_bits(half(0) | half(1) << 16);
                    // SAFETY: the word is one of the panel's.
                    unsafe {
                        let to = if tiled {
                            copy.tile(at, word).add(word % 16)
                        } else {
                            copy.at(at, word)
                        };
                        *to = pair;
                    }
                }
            }
        }
    }

    /// Lines and terms that are packed, and where.
    struct Copy {
        lines: Range<usize>,
        terms: Range<usize>,
        words: usize,
        format: Format,
        to: *mut f32,
    }

    impl Copy {
        /// Place of a word of line number `at`.
        fn at(&self, at: usize, word: usize) -> *mut f32 {
            let Format { panel, multiple, room, .. } = self.format;
            let width =
                (self.lines.len() - at / panel * panel).next_multiple_of(multiple).min(panel);
            self.to.wrapping_add(at / panel * panel * room + word * width + at % panel)
        }

        /// Place of a word of line number `at` in tiles, if its number is a multiple of 16, else of
        /// the one before that is.
        fn tile(&self, at: usize, word: usize) -> *mut f32 {
            self.to.wrapping_add(at / 16 * 16 * self.format.room + word / 16 * 256 + at % 16 * 16)
        }

        /// Writes a word of 16 lines from number `at` on, as far as they are in a panel.
        #[inline]
        #[target_feature(enable = "avx512f")]
        unsafe fn put(&self, at: usize, word: usize, row: __m512i) {
            // SAFETY: the caller guarantees the word; widths are multiples of 16, or else of 8.
            unsafe {
                if self.format.multiple == 16 {
                    _mm512_storeu_si512(self.at(at, word).cast(), row);
                    return;
                }
                let halves = [_mm512_castsi512_si256(row), _mm512_extracti64x4_epi64::<1>(row)];
                for (at, half) in (at..self.lines.len()).step_by(8).zip(halves) {
                    _mm256_storeu_si256(self.at(at, word).cast(), half);
                }
            }
        }
    }
}
