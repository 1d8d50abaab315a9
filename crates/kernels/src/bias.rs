//! Bias that may follow a linear operator.
//!
//! It is a separate operator: under tensor parallelism it is added once, after the partial products
//! have been summed.

use crate::columns::{STRIP, close, open};
use crate::instruction_set::vectorised;
use crate::pool::{self, Pool};
use crate::shape::expect_len;
use crate::{Element, Rows, Write};

/// `y = x + b`, the same bias for every row.
pub fn forward<T: Element>(shape: Rows, x: &[T], b: &[T], y: &mut [T]) {
    expect_len("x", x.len(), &[shape.rows, shape.width]);
    expect_len("b", b.len(), &[shape.width]);
    expect_len("y", y.len(), &[shape.rows, shape.width]);
    vectorised(
        #[inline(always)]
        || {
            for row in 0..shape.rows {
                let inputs = x[shape.range(row)].iter().zip(b);
                for (y, (x, b)) in y[shape.range(row)].iter_mut().zip(inputs) {
                    *y = T::narrow(x.widen() + b.widen());
                }
            }
        },
    );
}

/// `db[width] (+)=` the sum of the rows of `dy`, added in their order. The input gradient is `dy`
/// itself.
pub fn weight_gradient<T: Element, G: Element>(
    pool: &Pool,
    shape: Rows,
    dy: &[T],
    db: &mut [G],
    mode: Write,
) {
    expect_len("dy", dy.len(), &[shape.rows, shape.width]);
    expect_len("db", db.len(), &[shape.width]);
    pool.for_each_block(shape.width, STRIP, pool::strips(db, 1), |columns, db| {
        vectorised(
            #[inline(always)]
            || {
                let mut sums = open(mode, db);
                for row in 0..shape.rows {
                    for (sum, dy) in sums.iter_mut().zip(&dy[shape.range(row)][columns.clone()]) {
                        *sum += dy.widen();
                    }
                }
                close(&sums, db);
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, random};

    #[test]
    fn it_is_added_to_every_row_and_its_gradient_sums_them() {
        for (rows, width) in [(0, 3), (1, 1), (7, 19), (5, 0), (3, 1200)] {
            let shape = Rows { rows, width };
            let (x, b) = (random("x", rows * width), random("b", width));
            let mut y = vec![f32::NAN; x.len()];
            forward(shape, &x, &b, &mut y);
            for (i, &v) in y.iter().enumerate() {
                assert_eq!(v, x[i] + b[i % width]);
            }

            let pool = Pool::single();
            let mut db = vec![f32::NAN; width];
            weight_gradient(&pool, shape, &x, &mut db, Write::Overwrite);
            let expected: Vec<f64> =
                (0..width).map(|c| (0..rows).map(|r| f64::from(x[r * width + c])).sum()).collect();
            assert_close(&db, &expected);
            weight_gradient(&pool, shape, &x, &mut db, Write::Accumulate);
            assert_close(&db, &expected.iter().map(|v| 2.0 * v).collect::<Vec<_>>());
        }
    }
}
