//! Root-mean-square normalisation of all queries together, and of all keys together (OLMo 2, arXiv
//! 2501.00656, section 3.1), on the fused output of the query, key and value projections. Values are
//! copied.
//!
//! Ranks that hold some of the heads compute their parts of the sums of squares, and of the gradient
//! of these sums; the sums over ranks are exchanged in between.

use crate::columns::{STRIP, close, open};
use crate::instruction_set::vectorised;
use crate::ordered_sum;
use crate::pool::{Pool, strips};
use crate::shape::expect_len;
use crate::{Element, Write};
use std::ops::Range;

/// Layout of a fused row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Width of the queries here.
    pub queries: usize,
    /// Width of the keys here, equal to that of the values.
    pub keys: usize,
}

/// Norms of all queries and of all keys of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Width of all queries, and of all keys.
    pub whole: [usize; 2],
    /// Added to the mean squares.
    pub eps: f32,
}

impl Norm {
    /// Factors of queries and keys, from their sums of squares.
    fn scales(self, squares: &[f32]) -> [f32; 2] {
        [0, 1].map(|part| 1.0 / (squares[part] / self.whole[part] as f32 + self.eps).sqrt())
    }
}

impl Shape {
    /// Width of a row.
    pub fn width(self) -> usize {
        self.queries + 2 * self.keys
    }

    /// Columns of the queries and of the keys.
    fn parts(self) -> [Range<usize>; 2] {
        [0..self.queries, self.queries..self.queries + self.keys]
    }
}

/// `squares[rows, 2]`: sums of squares of the queries and of the keys.
pub fn squares<T: Element>(shape: Shape, x: &[T], squares: &mut [f32]) {
    expect_len("squares", squares.len(), &[x.len() / shape.width().max(1), 2]);
    let rows = x.chunks_exact(shape.width()).zip(squares.chunks_exact_mut(2));
    vectorised(
        #[inline(always)]
        || {
            for (x, squares) in rows {
                for (part, sum) in shape.parts().into_iter().zip(squares) {
                    *sum = ordered_sum::sum([&x[part]], |[x]| x * x);
                }
            }
        },
    );
}

/// `dx` from the gradients of the sums of squares; zero for values.
pub fn squares_gradient<T: Element>(shape: Shape, dsquares: &[f32], x: &[T], dx: &mut [T]) {
    let rows = x.chunks_exact(shape.width()).zip(dx.chunks_exact_mut(shape.width()));
    for ((x, dx), dsquares) in rows.zip(dsquares.chunks_exact(2)) {
        for (part, dsquare) in shape.parts().into_iter().zip(dsquares) {
            let inputs = dx[part.clone()].iter_mut().zip(&x[part]);
            inputs.for_each(|(dx, x)| *dx = T::narrow(2.0 * dsquare * x.widen()));
        }
        dx[shape.queries + shape.keys..].fill(T::ZERO);
    }
}

/// Normalises rows, from the sums of squares over all ranks; `gains` are those of queries and keys.
pub fn forward<T: Element>(
    shape: Shape,
    norm: Norm,
    x: &[T],
    squares: &[f32],
    gains: [&[T]; 2],
    y: &mut [T],
) {
    let rows = x.chunks_exact(shape.width()).zip(y.chunks_exact_mut(shape.width()));
    for ((x, y), squares) in rows.zip(squares.chunks_exact(2)) {
        let parts = shape.parts().into_iter().zip(gains).zip(norm.scales(squares));
        for ((part, gain), scale) in parts {
            for ((y, x), gain) in y[part.clone()].iter_mut().zip(&x[part]).zip(gain) {
                *y = T::narrow(x.widen() * scale * gain.widen());
            }
        }
        let values = shape.queries + shape.keys;
        y[values..].copy_from_slice(&x[values..]);
    }
}

/// Gradients of the inputs: `dx` with fixed sums of squares, and `dsquares`, of these sums, from the
/// elements here. With `r` the factor of a row of `n` elements, `dsquares` is `−r³/2n Σ dy·gain·x`.
pub fn input_gradient<T: Element>(
    shape: Shape,
    norm: Norm,
    (dy, x): (&[T], &[T]),
    squares: &[f32],
    gains: [&[T]; 2],
    (dx, dsquares): (&mut [T], &mut [f32]),
) {
    let width = shape.width();
    let rows = dy.chunks_exact(width).zip(x.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
    let sums = squares.chunks_exact(2).zip(dsquares.chunks_exact_mut(2));
    vectorised(
        #[inline(always)]
        || {
            for (((dy, x), dx), (squares, dsquares)) in rows.zip(sums) {
                let scales = norm.scales(squares);
                for (at, part) in shape.parts().into_iter().enumerate() {
                    let (scale, gain) = (scales[at], gains[at]);
                    let (dy, x) = (&dy[part.clone()], &x[part.clone()]);
                    let across = ordered_sum::sum([dy, gain, x], |[dy, gain, x]| dy * gain * x);
                    let share = scale * scale * scale / (2.0 * norm.whole[at] as f32);
                    dsquares[at] = -share * across;
                    for ((dx, dy), gain) in dx[part].iter_mut().zip(dy).zip(gain) {
                        *dx = T::narrow(dy.widen() * gain.widen() * scale);
                    }
                }
                let values = shape.queries + shape.keys;
                dx[values..].copy_from_slice(&dy[values..]);
            }
        },
    );
}

/// Gradients of the gains: sums over rows, in their order.
pub fn weight_gradient<T: Element, G: Element>(
    pool: &Pool,
    (shape, norm): (Shape, Norm),
    (dy, x): (&[T], &[T]),
    squares: &[f32],
    dgains: [&mut [G]; 2],
    mode: Write,
) {
    let width = shape.width();
    expect_len("x", x.len(), &[dy.len()]);
    for (at, (part, dgain)) in shape.parts().into_iter().zip(dgains).enumerate() {
        pool.for_each_block(part.len(), STRIP, strips(dgain, 1), |columns, dgain| {
            let mut sums = open(mode, dgain);
            let of = part.start + columns.start..part.start + columns.end;
            let rows = dy.chunks_exact(width).zip(x.chunks_exact(width));
            for ((dy, x), squares) in rows.zip(squares.chunks_exact(2)) {
                let scale = norm.scales(squares)[at];
                let inputs = dy[of.clone()].iter().zip(&x[of.clone()]);
                for (sum, (dy, x)) in sums.iter_mut().zip(inputs) {
                    *sum += dy.widen() * (x.widen() * scale);
                }
            }
            close(&sums, dgain);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, numeric_gradient, random, widen};

    const SHAPE: Shape = Shape { queries: 6, keys: 4 };
    const NORM: Norm = Norm { whole: [6, 4], eps: 1e-5 };

    fn reference(x: &[f64], gains: &[f64]) -> Vec<f64> {
        let mut y = x.to_vec();
        for row in y.chunks_mut(SHAPE.width()) {
            for part in SHAPE.parts() {
                let count = part.len() as f64;
                let square = row[part.clone()].iter().map(|v| v * v).sum::<f64>() / count;
                let scale = 1.0 / (square + 1e-5).sqrt();
                let gains = &gains[part.clone()];
                row[part].iter_mut().zip(gains).for_each(|(v, g)| *v *= g * scale);
            }
        }
        y
    }

    #[test]
    fn norms_and_gradients_agree_with_the_reference() {
        let len = 3 * SHAPE.width();
        let (x, dy, gains) = (random("x", len), random("dy", len), random("gains", 10));
        let both = [&gains[..6], &gains[6..]];
        let (mut sums, mut y) = (vec![f32::NAN; 6], vec![f32::NAN; len]);
        squares(SHAPE, &x, &mut sums);
        forward(SHAPE, NORM, &x, &sums, both, &mut y);
        let (wide_x, wide_gains, wide_dy) = (widen(&x), widen(&gains), widen(&dy));
        assert_close(&y, &reference(&wide_x, &wide_gains));

        let (mut dx, mut dsums, mut of_sums) =
            (vec![f32::NAN; len], vec![f32::NAN; 6], vec![f32::NAN; len]);
        input_gradient(SHAPE, NORM, (&dy, &x), &sums, both, (&mut dx, &mut dsums));
        squares_gradient(SHAPE, &dsums, &x, &mut of_sums);
        dx.iter_mut().zip(&of_sums).for_each(|(dx, more)| *dx += more);
        let by_x = numeric_gradient(&wide_x, &wide_dy, |x| reference(x, &wide_gains));
        assert_close(&dx, &by_x);

        let mut dgains = vec![f32::NAN; 10];
        let (dq, dk) = dgains.split_at_mut(6);
        let (of, pool) = ((SHAPE, NORM), Pool::single());
        weight_gradient(&pool, of, (&dy, &x), &sums, [dq, dk], Write::Overwrite);
        let by_gains = numeric_gradient(&wide_gains, &wide_dy, |g| reference(&wide_x, g));
        assert_close(&dgains, &by_gains);
    }

    /// Two ranks with half of the heads each: their sums add up, and so do their gradients.
    #[test]
    fn halves_of_the_heads_make_the_whole() {
        let x = random("x", SHAPE.width());
        let half = Shape { queries: 3, keys: 2 };
        let of = |rank: usize| -> Vec<f32> {
            let [q, k, v] = [0, 6, 10].map(|at| at + rank * if at == 0 { 3 } else { 2 });
            [&x[q..q + 3], &x[k..k + 2], &x[v..v + 2]].concat()
        };
        let mut whole = [f32::NAN; 2];
        squares(SHAPE, &x, &mut whole);
        let mut parts = [[f32::NAN; 2]; 2];
        (0..2).for_each(|rank| squares(half, &of(rank), &mut parts[rank]));
        let sums = [0, 1].map(|at| parts[0][at] + parts[1][at]);
        assert_close(&sums, &widen(&whole));
        let gains = [1.0f32; 6];
        let mut y = vec![f32::NAN; SHAPE.width()];
        forward(SHAPE, NORM, &x, &whole, [&gains, &gains[..4]], &mut y);
        let mut own = vec![f32::NAN; half.width()];
        forward(half, NORM, &of(1), &whole, [&gains[..3], &gains[..2]], &mut own);
        assert_eq!(own, [&y[3..6], &y[8..10], &y[12..14]].concat());
    }
}
