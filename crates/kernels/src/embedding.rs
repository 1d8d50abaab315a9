//! Token and position embedding.
//!
//! A token table may be sharded by vocabulary rows: a shard holds rows `first..first + held`.
//! Tokens of other shards give rows of zeros, so that the sum over shards is the whole lookup.

use crate::columns::{close, open, strips};
use crate::instruction_set::vectorised;
use crate::shape::expect_len;
use crate::{Element, Rows, Write};

/// `y[row] = table[ids[row] - first]`, or zeros where that row is not in `table[held, width]`.
pub fn forward<T: Element>(shape: Rows, first: u32, ids: &[u32], table: &[T], y: &mut [T]) {
    let held = held_rows(shape, table.len());
    expect_len("ids", ids.len(), &[shape.rows]);
    expect_len("y", y.len(), &[shape.rows, shape.width]);
    for (row, &id) in ids.iter().enumerate() {
        let y = &mut y[shape.range(row)];
        match local(id, first, held) {
            Some(id) => y.copy_from_slice(&table[shape.range(id)]),
            None => y.fill(T::ZERO),
        }
    }
}

/// `dtable[ids[row] - first] (+)= dy[row]` for every row held here. The rows of one token are added
/// in their order, in single precision, and their sum is rounded once.
///
/// `order` is a workspace of one element per row; its contents do not matter.
pub fn weight_gradient<T: Element, G: Element>(
    shape: Rows,
    first: u32,
    ids: &[u32],
    dy: &[T],
    dtable: &mut [G],
    mode: Write,
    order: &mut [u32],
) {
    let held = held_rows(shape, dtable.len());
    expect_len("ids", ids.len(), &[shape.rows]);
    expect_len("dy", dy.len(), &[shape.rows, shape.width]);
    expect_len("order", order.len(), &[shape.rows]);
    mode.prepare(dtable);
    // Rows sorted by token: rows of equal tokens are adjacent and in their order.
    order.iter_mut().zip(0..).for_each(|(place, row)| *place = row);
    order.sort_unstable_by_key(|&row| (ids[row as usize], row));
    vectorised(
        #[inline(always)]
        || {
            for rows in order.chunk_by(|&a, &b| ids[a as usize] == ids[b as usize]) {
                let Some(id) = local(ids[rows[0] as usize], first, held) else { continue };
                let dtable = &mut dtable[shape.range(id)];
                for columns in strips(shape.width) {
                    let dtable = &mut dtable[columns.clone()];
                    let mut sums = open(Write::Accumulate, dtable);
                    for &row in rows {
                        add(&mut sums, &dy[shape.range(row as usize)][columns.clone()]);
                    }
                    close(&sums, dtable);
                }
            }
        },
    );
}

/// `y = x + table[position]`. `positions` holds the position of each row of one sequence; `x` holds
/// any number of sequences of that length.
///
/// Panics on a position outside `table`: the plan has checked the longest sequence.
pub fn position_forward<T: Element>(
    shape: Rows,
    positions: &[u32],
    x: &[T],
    table: &[T],
    y: &mut [T],
) {
    expect_len("x", x.len(), &[shape.rows, shape.width]);
    expect_len("y", y.len(), &[shape.rows, shape.width]);
    let held = held_rows(shape, table.len());
    expect_positions(shape, positions, held);
    vectorised(
        #[inline(always)]
        || {
            for (row, &position) in (0..shape.rows).zip(positions.iter().cycle()) {
                let (x, place) = (&x[shape.range(row)], &table[shape.range(position as usize)]);
                for (y, (x, place)) in y[shape.range(row)].iter_mut().zip(x.iter().zip(place)) {
                    *y = T::narrow(x.widen() + place.widen());
                }
            }
        },
    );
}

/// `dtable[position] (+)= dy` for every row. The rows of one position are added in their order, in
/// single precision, and their sum is rounded once. The input gradient is `dy`.
///
/// No position may occur twice in `positions`.
pub fn position_weight_gradient<T: Element, G: Element>(
    shape: Rows,
    positions: &[u32],
    dy: &[T],
    dtable: &mut [G],
    mode: Write,
) {
    expect_len("dy", dy.len(), &[shape.rows, shape.width]);
    let held = held_rows(shape, dtable.len());
    expect_positions(shape, positions, held);
    mode.prepare(dtable);
    let seq = positions.len();
    vectorised(
        #[inline(always)]
        || {
            for (first, &position) in positions.iter().enumerate() {
                let dtable = &mut dtable[shape.range(position as usize)];
                for columns in strips(shape.width) {
                    let dtable = &mut dtable[columns.clone()];
                    let mut sums = open(Write::Accumulate, dtable);
                    for row in (first..shape.rows).step_by(seq) {
                        add(&mut sums, &dy[shape.range(row)][columns.clone()]);
                    }
                    close(&sums, dtable);
                }
            }
        },
    );
}

/// Index of `id` in the rows `first..first + held`, if it is one of them.
#[inline(always)]
pub(crate) fn local(id: u32, first: u32, held: usize) -> Option<usize> {
    id.checked_sub(first).map(|index| index as usize).filter(|&index| index < held)
}

/// Number of rows of a table of `len` elements.
#[track_caller]
fn held_rows(shape: Rows, len: usize) -> usize {
    let held = len.checked_div(shape.width).unwrap_or(0);
    expect_len("table", len, &[held, shape.width]);
    held
}

#[track_caller]
fn expect_positions(shape: Rows, positions: &[u32], held: usize) {
    assert!(
        shape.rows == 0 || (!positions.is_empty() && shape.rows.is_multiple_of(positions.len())),
        "{} rows are not whole sequences of {} positions",
        shape.rows,
        positions.len(),
    );
    if let Some(position) = positions.iter().find(|&&p| p as usize >= held && shape.width > 0) {
        panic!("position {position} is beyond the {held} rows of the table");
    }
}

#[inline(always)]
fn add<T: Element>(sums: &mut [f32], x: &[T]) {
    for (sum, x) in sums.iter_mut().zip(x) {
        *sum += x.widen();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, numeric_gradient, random, random_ids, widen};

    #[test]
    fn the_sum_over_shards_is_the_whole_lookup() {
        let shape = Rows { rows: 23, width: 5 };
        let (ids, table) = (random_ids("ids", 23, 11), random("table", 11 * 5));
        let mut whole = vec![f32::NAN; 23 * 5];
        forward(shape, 0, &ids, &table, &mut whole);
        for (row, &id) in ids.iter().enumerate() {
            assert_eq!(whole[shape.range(row)], table[shape.range(id as usize)]);
        }
        let mut sum = vec![0.0; 23 * 5];
        for (first, held) in [(0, 4), (4, 0), (4, 6), (10, 1)] {
            let shard = &table[first * 5..(first + held) * 5];
            let mut part = vec![f32::NAN; 23 * 5];
            forward(shape, first as u32, &ids, shard, &mut part);
            add(&mut sum, &part);
        }
        assert_eq!(sum, whole);
    }

    #[test]
    fn the_gradient_of_a_shard_is_that_of_the_whole_cut() {
        let shape = Rows { rows: 40, width: 3 };
        let (ids, dy) = (random_ids("ids", 40, 7), random("dy", 120));
        let reference = |table: &[f64]| -> Vec<f64> {
            ids.iter().flat_map(|&id| table[shape.range(id as usize)].to_vec()).collect()
        };
        let table = random("table", 21);
        let expected = numeric_gradient(&widen(&table), &widen(&dy), reference);
        let mut whole = vec![f32::NAN; 21];
        weight_gradient(shape, 0, &ids, &dy, &mut whole, Write::Overwrite, &mut [0; 40]);
        assert_close(&whole, &expected);

        let mut part = vec![f32::NAN; 9];
        weight_gradient(shape, 2, &ids, &dy, &mut part, Write::Overwrite, &mut [0; 40]);
        assert_eq!(part, whole[6..15]);
        weight_gradient(shape, 2, &ids, &dy, &mut part, Write::Accumulate, &mut [0; 40]);
        assert_close(&part, &expected[6..15].iter().map(|v| 2.0 * v).collect::<Vec<_>>());
    }

    #[test]
    fn positions_repeat_for_every_sequence() {
        let shape = Rows { rows: 6, width: 4 };
        let (x, table) = (random("x", 24), random("table", 5 * 4));
        let positions = [3, 0, 4];
        let reference = |table: &[f64]| -> Vec<f64> {
            (0..24)
                .map(|i| f64::from(x[i]) + table[positions[i / 4 % 3] as usize * 4 + i % 4])
                .collect()
        };
        let mut y = vec![f32::NAN; 24];
        position_forward(shape, &positions, &x, &table, &mut y);
        assert_close(&y, &reference(&widen(&table)));

        let dy = random("dy", 24);
        let mut dtable = vec![f32::NAN; 20];
        position_weight_gradient(shape, &positions, &dy, &mut dtable, Write::Overwrite);
        let expected = numeric_gradient(&widen(&table), &widen(&dy), reference);
        assert_close(&dtable, &expected);
        position_weight_gradient(shape, &positions, &dy, &mut dtable, Write::Accumulate);
        assert_close(&dtable, &expected.iter().map(|v| 2.0 * v).collect::<Vec<_>>());
    }

    #[test]
    #[should_panic(expected = "position 5 is beyond the 5 rows of the table")]
    fn a_position_beyond_the_table_is_refused() {
        let shape = Rows { rows: 1, width: 4 };
        position_forward(shape, &[5], &[0.0f32; 4], &[0.0; 20], &mut [0.0; 4]);
    }

    #[test]
    fn no_rows_need_no_positions() {
        position_forward(Rows { rows: 0, width: 4 }, &[], &[], &[0.0f32; 20], &mut []);
        forward(Rows { rows: 2, width: 4 }, 8, &[1, u32::MAX], &[], &mut [1.0f32; 8]);
    }
}
