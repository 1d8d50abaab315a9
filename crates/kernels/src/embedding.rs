//! Token and position embedding.
//!
//! A token table may be cut by vocabulary rows: a shard holds rows `first..first + held`. Tokens
//! of other shards give rows of zeros, so that the sum over shards is the whole lookup.

use crate::shape::expect_len;
use crate::{Rows, Write};

/// `y[row] = table[ids[row] - first]`, or zeros where that row is not in `table[held, width]`.
pub fn forward(shape: Rows, first: u32, ids: &[u32], table: &[f32], y: &mut [f32]) {
    let held = held_rows(shape, table.len());
    expect_len("ids", ids.len(), &[shape.rows]);
    expect_len("y", y.len(), &[shape.rows, shape.width]);
    for (row, &id) in ids.iter().enumerate() {
        let y = &mut y[shape.range(row)];
        match local(id, first, held) {
            Some(id) => y.copy_from_slice(&table[shape.range(id)]),
            None => y.fill(0.0),
        }
    }
}

/// `dtable[ids[row] - first] += dy[row]` for every row held here, in the order of the rows.
pub fn weight_gradient(
    shape: Rows,
    first: u32,
    ids: &[u32],
    dy: &[f32],
    dtable: &mut [f32],
    mode: Write,
) {
    let held = held_rows(shape, dtable.len());
    expect_len("ids", ids.len(), &[shape.rows]);
    expect_len("dy", dy.len(), &[shape.rows, shape.width]);
    mode.prepare(dtable);
    for (row, &id) in ids.iter().enumerate() {
        if let Some(id) = local(id, first, held) {
            add(&mut dtable[shape.range(id)], &dy[shape.range(row)]);
        }
    }
}

/// `y = x + table[position]`. `positions` holds the position of each row of one sequence; `x` holds
/// any number of sequences of that length.
///
/// Panics on a position that `table` does not have: the plan has checked the longest sequence.
pub fn position_forward(shape: Rows, positions: &[u32], x: &[f32], table: &[f32], y: &mut [f32]) {
    expect_len("x", x.len(), &[shape.rows, shape.width]);
    expect_len("y", y.len(), &[shape.rows, shape.width]);
    let held = held_rows(shape, table.len());
    expect_positions(shape, positions, held);
    y.copy_from_slice(x);
    for (row, &position) in (0..shape.rows).zip(positions.iter().cycle()) {
        add(&mut y[shape.range(row)], &table[shape.range(position as usize)]);
    }
}

/// `dtable[position] (+)= dy` for every row, in their order. The gradient of the input is `dy`.
pub fn position_weight_gradient(
    shape: Rows,
    positions: &[u32],
    dy: &[f32],
    dtable: &mut [f32],
    mode: Write,
) {
    expect_len("dy", dy.len(), &[shape.rows, shape.width]);
    let held = held_rows(shape, dtable.len());
    expect_positions(shape, positions, held);
    mode.prepare(dtable);
    for (row, &position) in (0..shape.rows).zip(positions.iter().cycle()) {
        add(&mut dtable[shape.range(position as usize)], &dy[shape.range(row)]);
    }
}

/// The index of `id` in the rows `first..first + held`, if it is one of them.
#[inline(always)]
pub(crate) fn local(id: u32, first: u32, held: usize) -> Option<usize> {
    id.checked_sub(first).map(|index| index as usize).filter(|&index| index < held)
}

/// How many rows a table of `len` elements has.
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
fn add(y: &mut [f32], x: &[f32]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y += x;
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
        weight_gradient(shape, 0, &ids, &dy, &mut whole, Write::Overwrite);
        assert_close(&whole, &expected);

        let mut part = vec![f32::NAN; 9];
        weight_gradient(shape, 2, &ids, &dy, &mut part, Write::Overwrite);
        assert_eq!(part, whole[6..15]);
        weight_gradient(shape, 2, &ids, &dy, &mut part, Write::Accumulate);
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
        position_forward(shape, &[5], &[0.0; 4], &[0.0; 20], &mut [0.0; 4]);
    }

    #[test]
    fn no_rows_need_no_positions() {
        position_forward(Rows { rows: 0, width: 4 }, &[], &[], &[0.0; 20], &mut []);
        forward(Rows { rows: 2, width: 4 }, 8, &[1, u32::MAX], &[], &mut [1.0; 8]);
    }
}
