//! Tables of tokens and positions.

use super::super::device::{CudaError, Device, Stream};
use super::super::element_type::ElementType;
use super::super::jit::{Arg, Grid, Source};
use super::{elements, fresh, word};
use crate::arena::Span;
use crate::{Rows, Write};

/// Rows of one word that a block sums.
const SEGMENT: usize = 64;

/// Rows by word, cut into segments, in one list of words for the kernels.
struct Segments {
    words: Vec<u32>,
    /// First index of: order, starts, words, places, starts of folds, words of folds.
    at: [usize; 6],
    segments: u32,
    folds: u32,
    /// Rows of partial sums.
    partial: u32,
}

impl Segments {
    /// Sorts the rows of ids below `words` by id, keeping their order, and cuts runs of one id.
    fn of(ids: &[u32], words: u32) -> Self {
        let mut firsts = vec![0u32; words as usize + 1];
        let known = || ids.iter().enumerate().filter(|(_, id)| **id < words);
        known().for_each(|(_, &id)| firsts[id as usize + 1] += 1);
        for i in 1..firsts.len() {
            firsts[i] += firsts[i - 1];
        }
        let count = firsts.last().copied().unwrap_or(0);
        let mut order = vec![0u32; count as usize];
        let mut next = firsts.clone();
        for (row, &id) in known() {
            let at = &mut next[id as usize];
            order[*at as usize] = row as u32;
            *at += 1;
        }
        let [mut starts, mut own, mut places] = [const { Vec::new() }; 3];
        let [mut fold_starts, mut fold_words] = [const { Vec::new() }; 2];
        let mut used = 0u32;
        for id in 0..words {
            let (first, last) = (firsts[id as usize], firsts[id as usize + 1]);
            let several = (last - first) as usize > SEGMENT;
            if several {
                fold_starts.push(used);
                fold_words.push(id);
            }
            for start in (first..last).step_by(SEGMENT) {
                starts.push(start);
                own.push(id);
                places.push(if several { used } else { u32::MAX });
                used += u32::from(several);
            }
        }
        let (segments, folds) = (own.len() as u32, fold_words.len() as u32);
        starts.push(count);
        fold_starts.push(used);
        let (mut all, mut at) = (order, [0; 6]);
        for (part, at) in
            [starts, own, places, fold_starts, fold_words].into_iter().zip(&mut at[1..])
        {
            *at = all.len();
            all.extend(part);
        }
        Self { words: all, at, segments, folds, partial: used }
    }
}

impl Device {
    /// Rows of a table, plus those of positions if given: the table, its size, and their number in
    /// a sequence.
    pub fn embedding(
        &self,
        stream: Stream,
        element: ElementType,
        shape: Rows,
        (ids, table, y): (Span, Span, Span),
        positions: Option<(Span, usize)>,
    ) -> Result<(), CudaError> {
        let (n, width) = (elements(shape), shape.width as u64);
        let row = width.max(1) * element.bytes();
        let words = table.len / row;
        let (positions, seq) = match positions {
            Some((span, seq)) => {
                (self.of("the positions", span, seq as u64 * width, element)?, seq)
            }
            None => (0, 1),
        };
        let args = [
            Arg::At(self.of("the ids", ids, shape.rows as u64, ElementType::F32)?),
            Arg::At(self.of("the table", table, words * width, element)?),
            Arg::At(positions),
            Arg::At(self.of("y", y, n, element)?),
            Arg::Word(word(shape.rows)),
            Arg::Word(word(shape.width)),
            Arg::Word(word(words as usize)),
            Arg::Word(word(seq)),
        ];
        let kernel = (Source::Elementwise, element, "embedding_forward");
        // SAFETY: the addresses are those of spans of the shape's lengths; ids beyond the table are
        // not looked up.
        unsafe { self.launch(stream, kernel, Grid::over(n), &args) }
    }

    /// `y = x + positions`.
    pub fn position(
        &self,
        stream: Stream,
        element: ElementType,
        shape: Rows,
        (x, positions, y): (Span, Span, Span),
        seq: usize,
    ) -> Result<(), CudaError> {
        let n = elements(shape);
        let of_table = seq as u64 * shape.width as u64;
        let args = [
            Arg::At(self.of("x", x, n, element)?),
            Arg::At(self.of("the positions", positions, of_table, element)?),
            Arg::At(self.of("y", y, n, element)?),
            Arg::Word(word(shape.rows)),
            Arg::Word(word(shape.width)),
            Arg::Word(word(seq)),
        ];
        let kernel = (Source::Elementwise, element, "position_forward");
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, kernel, Grid::over(n), &args) }
    }

    /// Gradient of a table in f32, without atomics: the rows of every id are summed in order. `ids`
    /// are those that the device has.
    pub fn embedding_weight(
        &mut self,
        stream: Stream,
        element: ElementType,
        shape: Rows,
        (dy, dtable): (Span, Span),
        ids: &[u32],
        mode: Write,
    ) -> Result<(), CudaError> {
        let width = shape.width as u64;
        let words = dtable.len / (4 * width.max(1));
        let dy = self.of("dy", dy, elements(shape), element)?;
        let table = self.of("the table's gradient", dtable, words * width, ElementType::F32)?;
        if mode == Write::Overwrite {
            self.clear(stream, dtable)?;
        }
        let ids = &ids[..ids.len().min(shape.rows)];
        let Segments { words: all, at, segments, folds, partial } =
            Segments::of(ids, word(words as usize));
        let sizes = [all.len() as u64 * 4, u64::from(partial) * width * 4];
        let [lists, partial] = self.scratch(stream, sizes)?;
        self.fill_scratch(stream, lists, &all)?;
        let list = |i: usize| Arg::At(lists + 4 * at[i] as u64);
        let wide = word(shape.width);
        let args = [
            Arg::At(dy),
            list(0),
            list(1),
            list(2),
            list(3),
            Arg::At(table),
            Arg::At(partial),
            Arg::Word(wide),
        ];
        let threads = wide.div_ceil(8).clamp(32, 256).next_multiple_of(32);
        let kernel = (Source::Elementwise, element, "embedding_segments");
        // SAFETY: rows and words of the lists are below those of the operands.
        unsafe { self.launch(stream, kernel, Grid::of(segments, threads), &args) }?;
        let args = [Arg::At(partial), list(4), list(5), Arg::At(table), Arg::Word(wide)];
        let kernel = (Source::Elementwise, element, "embedding_fold");
        // SAFETY: as above; the partial sums have been queued before.
        unsafe { self.launch(stream, kernel, Grid::of(folds, 256), &args) }
    }

    /// Gradient of a table of positions in f32.
    pub fn position_weight(
        &self,
        stream: Stream,
        element: ElementType,
        shape: Rows,
        (dy, dtable): (Span, Span),
        (seq, mode): (usize, Write),
    ) -> Result<(), CudaError> {
        let of_table = seq as u64 * shape.width as u64;
        let args = [
            Arg::At(self.of("dy", dy, elements(shape), element)?),
            Arg::At(self.of("the table's gradient", dtable, of_table, ElementType::F32)?),
            Arg::Word(word(shape.rows)),
            Arg::Word(word(shape.width)),
            Arg::Word(word(seq)),
            Arg::Word(fresh(mode)),
        ];
        let kernel = (Source::Elementwise, element, "position_gradient");
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, kernel, Grid::over(of_table), &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_hold_the_rows_of_each_word_in_order() {
        let mut ids: Vec<u32> = (0..300).map(|i| if i % 3 == 0 { 5 } else { i % 7 }).collect();
        ids[17] = 9;
        let Segments { words, at, segments, folds, partial } = Segments::of(&ids, 8);
        let list = |i: usize, len: usize| &words[at[i]..at[i] + len];
        let (starts, own) = (list(1, segments as usize + 1), list(2, segments as usize));
        let mut rows = Vec::new();
        for (i, &id) in own.iter().enumerate() {
            let run = &words[starts[i] as usize..starts[i + 1] as usize];
            assert!(run.len() <= SEGMENT && run.is_sorted());
            assert!(run.iter().all(|&row| ids[row as usize] == id));
            rows.extend(run);
        }
        rows.sort_unstable();
        let expected: Vec<u32> = (0..300).filter(|&row| ids[row as usize] < 8).collect();
        assert_eq!(rows, expected);
        // Only word 5 has more rows than a segment.
        assert_eq!((folds, list(5, 1)), (1, &[5][..]));
        assert_eq!(list(4, 2), [0, partial]);
        let places = list(3, segments as usize);
        let several: Vec<u32> = places.iter().copied().filter(|&p| p != u32::MAX).collect();
        assert_eq!(several, (0..partial).collect::<Vec<_>>());
    }
}
