//! Embedding tables of a recommendation model: sums of the rows that samples look up, and the
//! gradients or the steps of those rows.
//!
//! A table may have more rows than any batch touches. Plain SGD needs no gradient of the table's
//! size: each looked-up row takes its step along the gradient of its sum, sample after sample.
//!
//! Rows are f32, whatever type their sums and gradients have.

use crate::pool::{Pool, strips};
use crate::shape::expect_len;
use crate::{Element, Write};
use std::ops::Range;

/// Shape of the lookups of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookups {
    /// Number of tables.
    pub tables: usize,
    /// Number of rows that a sample looks up in each table.
    pub each: usize,
    /// Width of a row.
    pub width: usize,
}

/// Rows of a table that are held here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldRows {
    /// First held row of the table.
    pub first: u64,
    /// Number of held rows.
    pub rows: u64,
    /// Offset of the first held row, in rows.
    pub at: u64,
    /// Offset of the table's sum within a sample's sums, in row widths.
    pub slot: usize,
}

impl HeldRows {
    /// Offset of a row in elements, if it is held.
    #[inline(always)]
    fn place(&self, id: u32, width: usize) -> Option<usize> {
        let row = u64::from(id).checked_sub(self.first).filter(|&row| row < self.rows)?;
        Some((self.at + row) as usize * width)
    }
}

/// `sums[sample, slot] =` the sum of the held rows that a sample looks up in the table with that
/// slot. `held` describes the held rows of every table.
pub fn sum_rows<T: Element>(
    pool: &Pool,
    shape: Lookups,
    held: &[Option<HeldRows>],
    ids: &[u32],
    table: &[f32],
    sums: &mut [T],
) {
    let Lookups { tables, each, width } = shape;
    let samples = ids.len() / (tables * each).max(1);
    expect_len("ids", ids.len(), &[samples, tables, each]);
    expect_len("held", held.len(), &[tables]);
    let row = sums.len() / samples.max(1);
    pool.for_each_block(samples, SAMPLES, strips(sums, row), |at, sums| {
        for (sample, sums) in at.zip(sums.chunks_mut(row.max(1))) {
            sums.fill(T::ZERO);
            let ids = &ids[sample * tables * each..][..tables * each];
            for (ids, held) in ids.chunks(each).zip(held) {
                let Some(held) = held else { continue };
                let sum = &mut sums[held.slot * width..][..width];
                for at in ids.iter().filter_map(|&id| held.place(id, width)) {
                    for (sum, value) in sum.iter_mut().zip(&table[at..at + width]) {
                        *sum = T::narrow(sum.widen() + value);
                    }
                }
            }
        }
    });
}

/// `row -= rate * gradient` for every row that a sample looked up, in the order of samples. A
/// non-finite gradient changes nothing.
pub fn step_rows<T: Element>(
    shape: Lookups,
    rate: f32,
    held: &[Option<HeldRows>],
    gradients: &[T],
    ids: &[u32],
    table: &mut [f32],
) {
    for_each_lookup(shape, held, gradients, ids, |at, gradient| {
        if !gradient.iter().all(|g| g.widen().is_finite()) {
            return;
        }
        for (value, gradient) in table[at].iter_mut().zip(gradient) {
            *value -= rate * gradient.widen();
        }
    });
}

/// `d.row =`, or `+=`, the sum of the gradients of all sums that contain the row, in the order of
/// samples. Rows without lookups get zero.
pub fn add_rows<T: Element, G: Element>(
    pool: &Pool,
    shape: Lookups,
    held: &[Option<HeldRows>],
    gradients: &[T],
    ids: &[u32],
    table: &mut [G],
    mode: Write,
) {
    if mode == Write::Overwrite {
        pool.for_each_block(table.len(), ELEMENTS, strips(table, 1), |_, part| part.fill(G::ZERO));
    }
    for_each_lookup(shape, held, gradients, ids, |at, gradient| {
        for (sum, gradient) in table[at].iter_mut().zip(gradient) {
            *sum = G::narrow(sum.widen() + gradient.widen());
        }
    });
}

/// Calls `each_row` for every row that is looked up and held here, with its element range and the
/// gradient of its sum, in the order of samples.
fn for_each_lookup<T>(
    shape: Lookups,
    held: &[Option<HeldRows>],
    gradients: &[T],
    ids: &[u32],
    mut each_row: impl FnMut(Range<usize>, &[T]),
) {
    let Lookups { tables, each, width } = shape;
    let samples = ids.len() / (tables * each).max(1);
    expect_len("ids", ids.len(), &[samples, tables, each]);
    expect_len("held", held.len(), &[tables]);
    let row = gradients.len() / samples.max(1);
    for (ids, gradients) in ids.chunks(tables * each).zip(gradients.chunks(row.max(1))) {
        for (ids, held) in ids.chunks(each).zip(held) {
            let Some(held) = held else { continue };
            let gradient = &gradients[held.slot * width..][..width];
            for at in ids.iter().filter_map(|&id| held.place(id, width)) {
                each_row(at..at + width, gradient);
            }
        }
    }
}

/// Number of samples that a thread takes at a time.
const SAMPLES: usize = 16;

/// Number of elements that a thread sets to zero at a time.
const ELEMENTS: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, random, random_ids};

    const SHAPE: Lookups = Lookups { tables: 2, each: 3, width: 5 };

    /// Two unsharded tables of 4 and 6 rows.
    fn whole() -> [Option<HeldRows>; 2] {
        [(0, 4, 0), (4, 6, 1)].map(|(at, rows, slot)| Some(HeldRows { first: 0, rows, at, slot }))
    }

    fn ids() -> Vec<u32> {
        let mut ids = random_ids("ids", 7 * 6, 6);
        ids.chunks_mut(6).for_each(|ids| ids[..3].iter_mut().for_each(|id| *id %= 4));
        ids
    }

    #[test]
    fn sums_are_those_of_the_rows_looked_up_and_parts_add_up() {
        let (ids, table) = (ids(), random("table", 10 * 5));
        let mut sums = vec![f32::NAN; 7 * 10];
        sum_rows(&Pool::single(), SHAPE, &whole(), &ids, &table, &mut sums);
        let expected = |i: usize| {
            let (sample, slot, column) = (i / 10, i % 10 / 5, i % 5);
            let of = ids[sample * 6 + slot * 3..][..3].iter();
            of.map(|&id| f64::from(table[(slot * 4 + id as usize) * 5 + column])).sum::<f64>()
        };
        assert_close(&sums, &(0..70).map(expected).collect::<Vec<_>>());

        // Rows 0 and 1 of the first table and 0 to 2 of the second here, the others elsewhere.
        let part = |first: [u64; 2], rows: [u64; 2]| {
            [0, 1].map(|t| {
                let at = if t == 0 { 0 } else { rows[0] };
                Some(HeldRows { first: first[t], rows: rows[t], at, slot: t })
            })
        };
        let rows = |of: &[usize]| {
            of.iter().flat_map(|row| table[row * 5..row * 5 + 5].to_vec()).collect::<Vec<f32>>()
        };
        let mut halves = [vec![f32::NAN; 70], vec![f32::NAN; 70]];
        let parts = [
            (part([0, 0], [2, 3]), rows(&[0, 1, 4, 5, 6])),
            (part([2, 3], [2, 3]), rows(&[2, 3, 7, 8, 9])),
        ];
        for ((held, table), sums) in parts.iter().zip(&mut halves) {
            sum_rows(&Pool::single(), SHAPE, held, &ids, table, sums);
        }
        let both: Vec<f64> =
            halves[0].iter().zip(&halves[1]).map(|(a, b)| f64::from(a + b)).collect();
        assert_close(&sums, &both);
    }

    #[test]
    fn rows_step_along_the_gradients_of_the_sums_they_are_in() {
        let (ids, table) = (ids(), random("table", 50));
        let gradients = random("gradients", 70);
        let mut stepped = table.clone();
        step_rows(SHAPE, 0.5, &whole(), &gradients, &ids, &mut stepped);
        let mut expected: Vec<f64> = table.iter().map(|&v| f64::from(v)).collect();
        for (i, &id) in ids.iter().enumerate() {
            let (sample, slot) = (i / 6, i % 6 / 3);
            for column in 0..5 {
                let row = slot * 4 + id as usize;
                expected[row * 5 + column] -=
                    0.5 * f64::from(gradients[sample * 10 + slot * 5 + column]);
            }
        }
        assert_close(&stepped, &expected);
        let lost = vec![f32::NAN; 70];
        step_rows(SHAPE, 0.5, &whole(), &lost, &ids, &mut stepped);
        assert_close(&stepped, &expected);
    }

    /// A plain SGD step goes along the gradient, and gradients add up over microbatches.
    #[test]
    fn gradients_of_rows_are_what_their_steps_go_along() {
        let (ids, gradients) = (ids(), random("gradients", 70));
        let mut stepped = vec![0.0; 50];
        step_rows(SHAPE, -1.0, &whole(), &gradients, &ids, &mut stepped);
        let expected: Vec<f64> = stepped.iter().map(|&v| f64::from(v)).collect();
        let add = |(ids, gradients): (&[u32], &[f32]), sums: &mut [f32], mode| {
            add_rows(&Pool::single(), SHAPE, &whole(), gradients, ids, sums, mode);
        };
        let mut whole_batch = vec![f32::NAN; 50];
        add((&ids, &gradients), &mut whole_batch, Write::Overwrite);
        assert_close(&whole_batch, &expected);
        let mut parts = vec![f32::NAN; 50];
        add((&ids[..18], &gradients[..30]), &mut parts, Write::Overwrite);
        add((&ids[18..], &gradients[30..]), &mut parts, Write::Accumulate);
        assert_close(&parts, &expected);
    }
}
