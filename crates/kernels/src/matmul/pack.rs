//! Packs operands in the order in which a tile reads them.
//!
//! A panel holds adjacent lines (rows of the left operand, columns of the right one): for each word
//! of the sums, that of every line. Tiles then read memory sequentially, whatever the layout
//! of the operand, and the copy is small enough for a cache. Here a word is a term in single
//! precision; `pairs` packs pairs of bfloat16.

use super::Operand;
use super::tile::{Kernel, Layout, Left, Strip};
use crate::Element;
use crate::element::widen;
use crate::instruction_set::vectorised;
use std::ops::Range;

/// Number of terms of a line that are read before moving to the next line.
pub(super) const RUN: usize = 64;

/// Prefetch distance in terms for adjacent lines: each term may be on another page, which hardware
/// prefetchers do not cross.
pub(super) const AHEAD: usize = 8;

/// Prefetches elements that will be read soon; beyond the end of the slice this is harmless.
#[inline(always)]
pub(super) fn fetch<T>(data: &[T], first: usize, count: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for at in (first..first + count).step_by(64 / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch hint accesses no memory, wherever its address points.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(data.as_ptr().wrapping_add(at).cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (data, first, count);
}

/// Memory layout of panels.
#[derive(Clone, Copy)]
pub(super) struct Format {
    /// Number of lines of a whole panel.
    pub(super) panel: usize,
    /// The last panel's lines are padded to a multiple of this: a divisor of `panel`.
    pub(super) multiple: usize,
    /// Capacity of a line in words.
    pub(super) room: usize,
    /// True if every 16 words of a panel's lines are together, line after line.
    pub(super) tiled: bool,
}

/// Lines of an operand: element `k` of line `i` is at `i * across + k * along`.
#[derive(Clone, Copy)]
pub(super) struct Lines<'a, T> {
    pub(super) data: &'a [T],
    pub(super) across: usize,
    pub(super) along: usize,
}

impl<'a, T: Element> Lines<'a, T> {
    /// Rows of a left operand.
    pub(super) fn rows(operand: Operand<'a, T>) -> Self {
        Self { data: operand.data, across: operand.row_stride, along: operand.column_stride }
    }

    /// Columns of a right operand.
    pub(super) fn columns(operand: Operand<'a, T>) -> Self {
        Self { data: operand.data, across: operand.column_stride, along: operand.row_stride }
    }

    /// Returns true if tiles may read the rows of a left operand in place. A packed copy would cost
    /// as much as several tiles and hide no latency: the operand's elements arrive while tiles
    /// compute. Only at strides of a large power of two does a cache have too few ways for the
    /// lines that a tile reads. Pairs must be adjacent, and no tile may read beyond the operand.
    pub(super) fn are_at_hand(&self, kernel: &Kernel, height: usize, depth: usize) -> bool {
        let (to_stride, places) = if self.along == 1 { (self.across, 1) } else { (self.along, 2) };
        let spread = !(to_stride * places * size_of::<T>()).is_multiple_of(4096);
        let whole = self.along == 1 && depth.is_multiple_of(kernel.layout.unit());
        match kernel.layout {
            Layout::Singles => spread && T::singles(&[]).is_some(),
            Layout::Pairs => spread && whole,
            Layout::Tiles => whole && height.is_multiple_of(16),
        }
    }

    /// Lines from `line` on, from term `term` on, as a tile reads them in place.
    ///
    /// # Safety
    ///
    /// The line and the term must be within the operand.
    pub(super) unsafe fn at(&self, kernel: &Kernel, line: usize, term: usize) -> Left {
        let Self { across, along, .. } = *self;
        // SAFETY: the caller guarantees that the element exists.
        let data = unsafe { self.data.as_ptr().add(line * across + term * along) };
        let terms = match kernel.layout {
            Layout::Singles | Layout::Pairs => kernel.layout.terms(),
            Layout::Tiles => kernel.layout.unit(),
        };
        let bytes = |elements: usize| elements * size_of::<T>();
        let (across, along) = (bytes(across), bytes(terms * along));
        Left { data: data.cast(), across, along, group: 16 * across }
    }

    /// Writes the panels of some lines, `panel` lines each; a shorter one is zero-padded to a
    /// multiple of `multiple`. A panel begins every `panel * room` words of `panels`.
    ///
    /// The lines and terms must be within the operand, and there must be at most `room` words.
    pub(super) fn pack(
        self,
        kernel: &Kernel,
        lines: Range<usize>,
        terms: Range<usize>,
        format: Format,
        panels: &mut [f32],
    ) {
        let words = kernel.layout.words(terms.len());
        let Format { panel, multiple, room, .. } = format;
        assert!(words <= room && lines.len().div_ceil(panel) * panel * room <= panels.len());
        match (kernel.layout, T::brains(self.data)) {
            (Layout::Pairs | Layout::Tiles, Some(data)) => {
                let Self { across, along, .. } = self;
                return Lines { data, across, along }
                    .pack_pairs(kernel, lines, terms, format, panels);
            }
            (Layout::Pairs | Layout::Tiles, None) => unreachable!("pairs are of bfloat16"),
            (Layout::Singles, _) => {}
        }
        let whole = lines.len() / panel * panel;
        if self.across == 1 {
            let lines = lines.start..lines.start + whole;
            // A copy of a constant length compiles to a few moves of the widest registers, any
            // other to a call.
            match panel {
                4 => self.copy::<4>(lines, terms.clone(), room, panels),
                6 => self.copy::<6>(lines, terms.clone(), room, panels),
                8 => self.copy::<8>(lines, terms.clone(), room, panels),
                16 => self.copy::<16>(lines, terms.clone(), room, panels),
                48 => self.copy::<48>(lines, terms.clone(), room, panels),
                _ => self.gather(lines, terms.clone(), panel, panel * room, panels),
            }
        } else {
            for at in (0..whole).step_by(panel) {
                let lines = lines.start + at..lines.start + at + panel;
                self.one(kernel, lines, terms.clone(), panel, &mut panels[at * room..]);
            }
        }
        if whole < lines.len() {
            let width = (lines.len() - whole).next_multiple_of(multiple);
            let out = &mut panels[whole * room..][..width * terms.len()];
            out.fill(0.0);
            self.one(kernel, lines.start + whole..lines.end, terms, width, out);
        }
    }

    /// Packs whole panels of adjacent lines, term by term.
    fn copy<const N: usize>(
        self,
        lines: Range<usize>,
        terms: Range<usize>,
        room: usize,
        panels: &mut [f32],
    ) {
        vectorised(
            #[inline(always)]
            || {
                for (k, term) in terms.enumerate() {
                    let row = &self.data[term * self.along..][lines.clone()];
                    fetch(self.data, (term + AHEAD) * self.along + lines.start, lines.len());
                    for (line, chunk) in (0..).step_by(N).zip(row.as_chunks::<N>().0) {
                        for (word, term) in panels[line * room + k * N..][..N].iter_mut().zip(chunk)
                        {
                            *word = term.widen();
                        }
                    }
                }
            },
        );
    }

    /// Packs one panel of any layout.
    fn one(
        self,
        kernel: &Kernel,
        lines: Range<usize>,
        terms: Range<usize>,
        width: usize,
        panel: &mut [f32],
    ) {
        if self.along == 1 {
            self.transpose_tile(kernel, lines, terms, width, panel);
        } else {
            self.gather(lines, terms, width, 0, panel);
        }
    }

    /// Packs panels of `width` lines element by element, for any layout; they begin `to_stride`
    /// elements apart.
    fn gather(
        self,
        lines: Range<usize>,
        terms: Range<usize>,
        width: usize,
        to_stride: usize,
        panels: &mut [f32],
    ) {
        for (i, line) in lines.enumerate() {
            for (k, term) in terms.clone().enumerate() {
                let at = i / width * to_stride + k * width + i % width;
                panels[at] = self.data[line * self.across + term * self.along].widen();
            }
        }
    }

    /// Packs lines with contiguous terms: a transpose, in 8 x 8 blocks where possible.
    fn transpose_tile(
        self,
        kernel: &Kernel,
        lines: Range<usize>,
        terms: Range<usize>,
        width: usize,
        panel: &mut [f32],
    ) {
        let (whole_lines, whole_terms) = (lines.len() / 8 * 8, terms.len() / 8 * 8);
        if whole_lines > 0 && whole_terms > 0 {
            let last = (lines.start + whole_lines - 1) * self.across + terms.start + whole_terms;
            assert!(last <= self.data.len() && panel.len() >= whole_terms * width);
            // Limits the terms at a time, so that the written data stays in the L1 cache.
            for k in (0..whole_terms).step_by(RUN) {
                for i in (0..whole_lines).step_by(8) {
                    let from = (lines.start + i) * self.across + terms.start + k;
                    if k + RUN < whole_terms {
                        let next = |line| from + line * self.across + RUN;
                        (0..8).for_each(|line| fetch(self.data, next(line), RUN));
                    }
                    let count = RUN.min(whole_terms - k);
                    let mut wide;
                    let (from, stride) = match T::singles(self.data) {
                        Some(data) => (&data[from..], self.across),
                        None => {
                            wide = [0.0; 8 * RUN];
                            for (line, wide) in wide.chunks_exact_mut(RUN).enumerate() {
                                widen(
                                    &self.data[from + line * self.across..][..count],
                                    &mut wide[..count],
                                );
                            }
                            (&wide[..], RUN)
                        }
                    };
                    // SAFETY: the processor has the instructions that the kernel needs. The
                    // assertion above found the last element of the last strip within the operand,
                    // and the panel has `width` elements for each term, of which the strip takes
                    // eight from `i` on.
                    unsafe {
                        (kernel.transpose)(Strip {
                            from: from.as_ptr(),
                            stride,
                            to: panel.as_mut_ptr().add(k * width + i),
                            to_stride: width,
                            blocks: count / 8,
                        });
                    }
                }
            }
        }
        for (i, line) in lines.enumerate() {
            let row = &self.data[line * self.across..][terms.clone()];
            let from = if i < whole_lines { whole_terms } else { 0 };
            for (k, &value) in row.iter().enumerate().skip(from) {
                panel[k * width + i] = value.widen();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn panels_hold_their_lines_and_zeros(
            lines in (0usize..9, 1usize..30), terms in (0usize..9, 0usize..20),
            panel in prop::sample::select(vec![1usize, 4, 6, 8, 12, 16, 48]),
            spare in 0usize..3, layout in 0usize..3,
        ) {
            let (lines, terms) = (lines.0..lines.0 + lines.1, terms.0..terms.0 + terms.1);
            let data = random("data", 40 * 80);
            let operand = match layout {
                0 => Operand { data: &data, row_stride: 40, column_stride: 1 },
                1 => Operand { data: &data, row_stride: 1, column_stride: 40 },
                _ => Operand { data: &data, row_stride: 2, column_stride: 80 },
            };
            let format = Format { panel, multiple: if panel % 4 == 0 { 4 } else { panel }, room: terms.len() + spare, tiled: false };
            for kernel in Kernel::all() {
                for all in [Lines::rows(operand), Lines::columns(operand)] {
                    let len = lines.len().next_multiple_of(panel) * format.room;
                    let mut panels = vec![f32::NAN; len];
                    all.pack(&kernel, lines.clone(), terms.clone(), format, &mut panels);
                    for first in (0..lines.len()).step_by(panel) {
                        let count = panel.min(lines.len() - first);
                        let width = if count == panel { panel } else { count.next_multiple_of(format.multiple) };
                        for (k, term) in terms.clone().enumerate() {
                            for i in 0..width {
                                let line = lines.start + first + i;
                                let there = i < count;
                                let expected =
                                    if there { data[line * all.across + term * all.along] } else { 0.0 };
                                prop_assert_eq!(panels[first * format.room + k * width + i], expected);
                            }
                        }
                    }
                }
            }
        }
    }
}
