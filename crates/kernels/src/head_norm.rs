//! Root-mean-square normalisation of queries and keys, head by head (Henry et al., arXiv
//! 2010.04245; as in Qwen3), on the fused output of the query, key and value projections. Values
//! are copied.

use crate::columns::{STRIP, close, open};
use crate::norm::{rms_norm_forward_from, rms_norm_input_gradient_from};
use crate::pool::{Pool, strips};
use crate::shape::expect_len;
use crate::{Element, Rows, Write};

/// Layout of a fused row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key heads, equal to the number of value heads.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Least gain, to which the parameters are added: 0, or 1 in Gemma.
    pub least: f32,
}

impl Shape {
    /// Width of a row.
    pub fn width(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Number of statistics per row: one for each normalised head.
    pub fn stats(self) -> usize {
        self.parts().iter().map(|part| part.rows).sum()
    }

    /// Query heads and key heads of a row, as matrices.
    fn parts(self) -> [Rows; 2] {
        [self.heads, self.kv_heads].map(|rows| Rows { rows, width: self.head_dim })
    }
}

/// Normalises rows; `gains` are those of queries and of keys.
pub fn forward<T: Element>(
    shape: Shape,
    eps: f32,
    x: &[T],
    gains: [&[T]; 2],
    y: &mut [T],
    stats: &mut [f32],
) {
    let rows = x.chunks_exact(shape.width()).zip(y.chunks_exact_mut(shape.width()));
    for ((x, y), stats) in rows.zip(stats.chunks_exact_mut(shape.stats())) {
        let (mut at, mut stat) = (0, 0);
        for (part, gain) in shape.parts().into_iter().zip(gains) {
            let elements = at..at + part.rows * part.width;
            let stats = &mut stats[stat..stat + part.rows];
            rms_norm_forward_from(
                part,
                eps,
                shape.least,
                &x[elements.clone()],
                gain,
                &mut y[elements],
                stats,
            );
            at += part.rows * part.width;
            stat += part.rows;
        }
        y[at..].copy_from_slice(&x[at..]);
    }
}

/// Input gradient of rows.
pub fn input_gradient<T: Element>(
    shape: Shape,
    dy: &[T],
    x: &[T],
    gains: [&[T]; 2],
    stats: &[f32],
    dx: &mut [T],
) {
    let width = shape.width();
    let rows = dy.chunks_exact(width).zip(x.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
    for (((dy, x), dx), stats) in rows.zip(stats.chunks_exact(shape.stats())) {
        let (mut at, mut stat) = (0, 0);
        for (part, gain) in shape.parts().into_iter().zip(gains) {
            let elements = at..at + part.rows * part.width;
            let stats = &stats[stat..stat + part.rows];
            let (dy, x) = (&dy[elements.clone()], &x[elements.clone()]);
            rms_norm_input_gradient_from(part, shape.least, dy, x, gain, stats, &mut dx[elements]);
            at += part.rows * part.width;
            stat += part.rows;
        }
        dx[at..].copy_from_slice(&dy[at..]);
    }
}

/// Gradients of the gains: sums over rows and over the heads of a row, in their order.
pub fn weight_gradient<T: Element, G: Element>(
    pool: &Pool,
    shape: Shape,
    dy: &[T],
    x: &[T],
    stats: &[f32],
    dgains: [&mut [G]; 2],
    mode: Write,
) {
    let width = shape.width();
    expect_len("x", x.len(), &[dy.len()]);
    let (mut at, mut stat) = (0, 0);
    for (part, dgain) in shape.parts().into_iter().zip(dgains) {
        pool.for_each_block(part.width, STRIP, strips(dgain, 1), |columns, dgain| {
            let mut sums = open(mode, dgain);
            let rows = dy.chunks_exact(width).zip(x.chunks_exact(width));
            for ((dy, x), stats) in rows.zip(stats.chunks_exact(shape.stats())) {
                for head in 0..part.rows {
                    let start = at + head * part.width;
                    let of = start + columns.start..start + columns.end;
                    let scale = stats[stat + head];
                    let inputs = dy[of.clone()].iter().zip(&x[of]);
                    for (sum, (dy, x)) in sums.iter_mut().zip(inputs) {
                        *sum += dy.widen() * (x.widen() * scale);
                    }
                }
            }
            close(&sums, dgain);
        });
        at += part.rows * part.width;
        stat += part.rows;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, numeric_gradient, random, widen};

    const SHAPE: Shape = Shape { heads: 2, kv_heads: 1, head_dim: 4, least: 0.0 };

    fn reference(x: &[f64], gains: [&[f64]; 2]) -> Vec<f64> {
        let mut y = x.to_vec();
        for row in y.chunks_mut(SHAPE.width()) {
            for (at, head) in row.chunks_mut(4).take(3).enumerate() {
                let gain = gains[usize::from(at == 2)];
                let scale = (head.iter().map(|v| v * v).sum::<f64>() / 4.0 + 1e-5).sqrt();
                head.iter_mut().zip(gain).for_each(|(v, g)| *v *= g / scale);
            }
        }
        y
    }

    #[test]
    fn norms_and_gradients_agree_with_the_reference() {
        let len = 3 * SHAPE.width();
        let (x, dy, gains) = (random("x", len), random("dy", len), random("gains", 8));
        let both = [&gains[..4], &gains[4..]];
        let (mut y, mut stats) = (vec![f32::NAN; len], vec![f32::NAN; 9]);
        forward(SHAPE, 1e-5, &x, both, &mut y, &mut stats);
        let (wide_x, wide_gains, wide_dy) = (widen(&x), widen(&gains), widen(&dy));
        assert_close(&y, &reference(&wide_x, [&wide_gains[..4], &wide_gains[4..]]));
        let mut dx = vec![f32::NAN; len];
        input_gradient(SHAPE, &dy, &x, both, &stats, &mut dx);
        let by_x = numeric_gradient(&wide_x, &wide_dy, |x| {
            reference(x, [&wide_gains[..4], &wide_gains[4..]])
        });
        assert_close(&dx, &by_x);
        let mut dgains = vec![f32::NAN; 8];
        let (dq, dk) = dgains.split_at_mut(4);
        let pool = Pool::single();
        weight_gradient(&pool, SHAPE, &dy, &x, &stats, [dq, dk], Write::Overwrite);
        let by_gains =
            numeric_gradient(&wide_gains, &wide_dy, |g| reference(&wide_x, [&g[..4], &g[4..]]));
        assert_close(&dgains, &by_gains);
    }
}
