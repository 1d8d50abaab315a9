//! Tables of tokens and positions.

use super::super::device::{CudaError, Device, Stream, Table};
use super::super::element_type::ElementType;
use super::super::jit::{Arg, Grid, Source};
use super::{elements, fresh, word};
use crate::arena::Span;
use crate::{Rows, Write};

/// Positions of a rank's rows: `seq` tokens of every sequence.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// Positions of the tokens of a sequence, if they are not its first ones in order.
    pub table: Option<Table>,
    /// Tokens of a sequence that the rank has.
    pub seq: usize,
    /// Tokens of its sequence before the first row.
    pub offset: usize,
}

/// Table of words or a shard of it.
#[derive(Clone, Copy, Debug)]
pub struct Words {
    /// Rows of the table.
    pub table: Span,
    /// Word of the first row.
    pub first: u32,
}

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
    /// Sorts the rows of the ids of a table by id, keeping their order, and cuts runs of one id. Its
    /// `words` ids begin with `first`.
    fn of(ids: &[u32], first: u32, words: u32) -> Self {
        let mut firsts = vec![0u32; words as usize + 1];
        let local = ids.iter().map(|id| id.wrapping_sub(first)).enumerate();
        let known = || local.clone().filter(|(_, id)| *id < words);
        known().for_each(|(_, id)| firsts[id as usize + 1] += 1);
        for i in 1..firsts.len() {
            firsts[i] += firsts[i - 1];
        }
        let count = firsts.last().copied().unwrap_or(0);
        let mut order = vec![0u32; count as usize];
        let mut next = firsts.clone();
        for (row, id) in known() {
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
    /// Rows of a table, plus those of a table of positions if given.
    pub fn embedding(
        &self,
        stream: Stream,
        element: ElementType,
        shape: Rows,
        (ids, Words { table, first }, y): (Span, Words, Span),
        positions: Option<(Span, Places)>,
    ) -> Result<(), CudaError> {
        let (n, width) = (elements(shape), shape.width as u64);
        let row = width.max(1) * element.bytes();
        let words = table.len / row;
        let none = Places { table: None, seq: 1, offset: 0 };
        let (positions, places) = match positions {
            Some((span, places)) => (self.positions((span, width, element), &places)?, places),
            None => (0, none),
        };
        let args = [
            Arg::At(self.of("the ids", ids, shape.rows as u64, ElementType::F32)?),
            Arg::At(self.of("the table", table, words * width, element)?),
            Arg::At(positions),
            Arg::At(self.of("y", y, n, element)?),
            Arg::Word(word(shape.rows)),
            Arg::Word(word(shape.width)),
            Arg::Word(word(words as usize)),
            Arg::Word(first),
        ];
        let args = [&args[..], &self.places(&places)].concat();
        let kernel = (Source::Elementwise, element, "embedding_forward");
        // SAFETY: the addresses are those of spans of the shape's lengths; ids beyond the table are
        // not looked up.
        unsafe { self.launch(stream, kernel, Grid::over(n), &args) }
    }

    /// Address of a table of positions, which must have a row for every place.
    fn positions(
        &self,
        (span, width, element): (Span, u64, ElementType),
        places: &Places,
    ) -> Result<u64, CudaError> {
        let row = width.max(1) * element.bytes();
        let rows = match places.table {
            // The places were checked when the table was made.
            Some(_) => span.len / row,
            None => (span.len / row).max(places.seq as u64),
        };
        self.of("the positions", span, rows * width, element)
    }

    fn places(&self, places: &Places) -> [Arg; 3] {
        let table = places.table.map_or(0, |table| self.table_at(table));
        [Arg::At(table), Arg::Word(word(places.seq.max(1))), Arg::Word(word(places.offset))]
    }

    /// `y = x + positions`.
    pub fn position(
        &self,
        stream: Stream,
        element: ElementType,
        shape: Rows,
        (x, positions, y): (Span, Span, Span),
        places: &Places,
    ) -> Result<(), CudaError> {
        let (n, width) = (elements(shape), shape.width as u64);
        let [at, seq, offset] = self.places(places);
        let args = [
            Arg::At(self.of("x", x, n, element)?),
            Arg::At(self.positions((positions, width, element), places)?),
            Arg::At(self.of("y", y, n, element)?),
            Arg::Word(word(shape.rows)),
            Arg::Word(word(shape.width)),
            at,
            seq,
            offset,
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
        (dy, Words { table: dtable, first }): (Span, Words),
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
            Segments::of(ids, first, word(words as usize));
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
        (places, mode): (&Places, Write),
    ) -> Result<(), CudaError> {
        let width = shape.width as u64;
        let of_table = places.seq as u64 * width;
        let table = self.positions((dtable, width, ElementType::F32), places)?;
        if dtable.len > of_table * 4 && mode == Write::Overwrite {
            // Other ranks have the other positions, or nobody has.
            self.clear(stream, dtable)?;
        }
        let [at, seq, offset] = self.places(places);
        let args = [
            Arg::At(self.of("dy", dy, elements(shape), element)?),
            Arg::At(table),
            Arg::Word(word(shape.rows)),
            Arg::Word(word(shape.width)),
            Arg::Word(fresh(mode)),
            at,
            seq,
            offset,
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
        let Segments { words, at, segments, folds, partial } = Segments::of(&ids, 0, 8);
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
