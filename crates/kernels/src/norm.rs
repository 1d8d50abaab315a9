//! Layer normalisation (Ba, Kiros and Hinton, 2016) and root-mean-square normalisation (Zhang and
//! Sennrich, 2019), over the width of each row.
//!
//! The forward pass saves a few numbers per row, from which both gradients are computed without
//! another pass over the row for its moments.

use crate::columns::{STRIP, close, open};
use crate::instruction_set::vectorised;
use crate::ordered_sum;
use crate::pool::{Pool, strips};
use crate::shape::expect_len;
use crate::{Element, Rows, Write};

/// `y = (x - mean) / sqrt(variance + epsilon) * gamma + beta`. `beta` may be empty for zeros.
///
/// Saves `stats[rows, 2]`: the mean and the reciprocal of the standard deviation of each row.
pub fn layer_norm_forward<T: Element>(
    shape: Rows,
    epsilon: f32,
    x: &[T],
    gamma: &[T],
    beta: &[T],
    y: &mut [T],
    stats: &mut [f32],
) {
    expect_rows(shape, "x", x, "y", y);
    expect_len("gamma", gamma.len(), &[shape.width]);
    assert!(beta.is_empty() || beta.len() == shape.width, "`beta` has {} elements", beta.len());
    expect_len("stats", stats.len(), &[shape.rows, 2]);
    vectorised(
        #[inline(always)]
        || {
            let share = 1.0 / shape.width as f32;
            for (row, stats) in stats.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let x = &x[shape.range(row)];
                let mean = ordered_sum::sum([x], |[x]| x) * share;
                let variance = ordered_sum::sum([x], |[x]| (x - mean) * (x - mean)) * share;
                let scale = 1.0 / (variance + epsilon).sqrt();
                *stats = [mean, scale];
                if beta.is_empty() {
                    for ((y, x), gamma) in y[shape.range(row)].iter_mut().zip(x).zip(gamma) {
                        *y = T::narrow((x.widen() - mean) * scale * gamma.widen());
                    }
                    continue;
                }
                let weights = gamma.iter().zip(beta);
                for ((y, x), (gamma, beta)) in y[shape.range(row)].iter_mut().zip(x).zip(weights) {
                    let normal = (x.widen() - mean) * scale;
                    *y = T::narrow(normal * gamma.widen() + beta.widen());
                }
            }
        },
    );
}

/// Input gradient of layer normalisation: with `g = dy * gamma` and `n` the normalised row, `dx =
/// (g - mean(g) - n * mean(g * n)) / standard deviation`.
pub fn layer_norm_input_gradient<T: Element>(
    shape: Rows,
    dy: &[T],
    x: &[T],
    gamma: &[T],
    stats: &[f32],
    dx: &mut [T],
) {
    expect_rows(shape, "dy", dy, "dx", dx);
    expect_rows(shape, "x", x, "dx", dx);
    expect_len("gamma", gamma.len(), &[shape.width]);
    expect_len("stats", stats.len(), &[shape.rows, 2]);
    vectorised(
        #[inline(always)]
        || {
            let share = 1.0 / shape.width as f32;
            for (row, &[mean, scale]) in stats.as_chunks::<2>().0.iter().enumerate() {
                let (x, dy) = (&x[shape.range(row)], &dy[shape.range(row)]);
                let along = ordered_sum::sum([dy, gamma], |[dy, gamma]| dy * gamma) * share;
                let across = ordered_sum::sum([dy, gamma, x], |[dy, gamma, x]| {
                    dy * gamma * ((x - mean) * scale)
                }) * share;
                let inputs = dy.iter().zip(gamma).zip(x);
                for (dx, ((dy, gamma), x)) in dx[shape.range(row)].iter_mut().zip(inputs) {
                    let normal = (x.widen() - mean) * scale;
                    let g = dy.widen() * gamma.widen();
                    *dx = T::narrow(scale * (g - along - normal * across));
                }
            }
        },
    );
}

/// `dgamma (+)=` the sum over rows of `dy * n`, and `dbeta (+)=` the sum of `dy`, where `n` is the
/// normalised row. Rows are added in their order.
pub fn layer_norm_weight_gradient<T: Element, G: Element>(
    pool: &Pool,
    shape: Rows,
    dy: &[T],
    x: &[T],
    stats: &[f32],
    (dgamma, dbeta): (&mut [G], &mut [G]),
    mode: Write,
) {
    expect_len("dy", dy.len(), &[shape.rows, shape.width]);
    expect_len("x", x.len(), &[shape.rows, shape.width]);
    expect_len("stats", stats.len(), &[shape.rows, 2]);
    expect_len("dgamma", dgamma.len(), &[shape.width]);
    expect_len("dbeta", dbeta.len(), &[shape.width]);
    let outputs = (strips(dgamma, 1), strips(dbeta, 1));
    pool.for_each_block(shape.width, STRIP, outputs, |columns, (dgamma, dbeta)| {
        vectorised(
            #[inline(always)]
            || {
                let (mut across, mut along) = (open(mode, dgamma), open(mode, dbeta));
                for (row, &[mean, scale]) in stats.as_chunks::<2>().0.iter().enumerate() {
                    let (dy, x) = (&dy[shape.range(row)], &x[shape.range(row)]);
                    let inputs = dy[columns.clone()].iter().zip(&x[columns.clone()]);
                    let sums = across.iter_mut().zip(&mut along);
                    for ((across, along), (dy, x)) in sums.zip(inputs) {
                        *across += dy.widen() * ((x.widen() - mean) * scale);
                        *along += dy.widen();
                    }
                }
                close(&across, dgamma);
                close(&along, dbeta);
            },
        );
    });
}

/// `dgamma` alone of [`layer_norm_weight_gradient`], for a norm without `beta`.
pub fn layer_norm_gain_gradient<T: Element, G: Element>(
    pool: &Pool,
    shape: Rows,
    dy: &[T],
    x: &[T],
    stats: &[f32],
    dgamma: &mut [G],
    mode: Write,
) {
    expect_len("dy", dy.len(), &[shape.rows, shape.width]);
    expect_len("x", x.len(), &[shape.rows, shape.width]);
    expect_len("stats", stats.len(), &[shape.rows, 2]);
    expect_len("dgamma", dgamma.len(), &[shape.width]);
    pool.for_each_block(shape.width, STRIP, strips(dgamma, 1), |columns, dgamma| {
        vectorised(
            #[inline(always)]
            || {
                let mut across = open(mode, dgamma);
                for (row, &[mean, scale]) in stats.as_chunks::<2>().0.iter().enumerate() {
                    let (dy, x) = (&dy[shape.range(row)], &x[shape.range(row)]);
                    let inputs = dy[columns.clone()].iter().zip(&x[columns.clone()]);
                    for (across, (dy, x)) in across.iter_mut().zip(inputs) {
                        *across += dy.widen() * ((x.widen() - mean) * scale);
                    }
                }
                close(&across, dgamma);
            },
        );
    });
}

/// `y = x / sqrt(mean(x^2) + epsilon) * gamma`.
///
/// Saves `stats[rows]`: the reciprocal of the root mean square of each row.
pub fn rms_norm_forward<T: Element>(
    shape: Rows,
    epsilon: f32,
    x: &[T],
    gamma: &[T],
    y: &mut [T],
    stats: &mut [f32],
) {
    rms_norm_forward_from(shape, epsilon, 0.0, x, gamma, y, stats);
}

/// [`rms_norm_forward`] with gains `least + gamma` (Gemma's are one more than their parameters).
pub fn rms_norm_forward_from<T: Element>(
    shape: Rows,
    epsilon: f32,
    least: f32,
    x: &[T],
    gamma: &[T],
    y: &mut [T],
    stats: &mut [f32],
) {
    expect_rows(shape, "x", x, "y", y);
    expect_len("gamma", gamma.len(), &[shape.width]);
    expect_len("stats", stats.len(), &[shape.rows]);
    vectorised(
        #[inline(always)]
        || {
            let share = 1.0 / shape.width as f32;
            for (row, stats) in stats.iter_mut().enumerate() {
                let x = &x[shape.range(row)];
                let scale = 1.0 / (ordered_sum::sum([x], |[x]| x * x) * share + epsilon).sqrt();
                *stats = scale;
                for ((y, x), gamma) in y[shape.range(row)].iter_mut().zip(x).zip(gamma) {
                    *y = T::narrow(x.widen() * scale * (least + gamma.widen()));
                }
            }
        },
    );
}

/// Input gradient of root-mean-square normalisation: with `g = dy * gamma` and `n` the normalised
/// row, `dx = (g - n * mean(g * n)) / root mean square`.
pub fn rms_norm_input_gradient<T: Element>(
    shape: Rows,
    dy: &[T],
    x: &[T],
    gamma: &[T],
    stats: &[f32],
    dx: &mut [T],
) {
    rms_norm_input_gradient_from(shape, 0.0, dy, x, gamma, stats, dx);
}

/// Input gradient of [`rms_norm_forward_from`].
pub fn rms_norm_input_gradient_from<T: Element>(
    shape: Rows,
    least: f32,
    dy: &[T],
    x: &[T],
    gamma: &[T],
    stats: &[f32],
    dx: &mut [T],
) {
    expect_rows(shape, "dy", dy, "dx", dx);
    expect_rows(shape, "x", x, "dx", dx);
    expect_len("gamma", gamma.len(), &[shape.width]);
    expect_len("stats", stats.len(), &[shape.rows]);
    vectorised(
        #[inline(always)]
        || {
            let share = 1.0 / shape.width as f32;
            for (row, &scale) in stats.iter().enumerate() {
                let (x, dy) = (&x[shape.range(row)], &dy[shape.range(row)]);
                let across = ordered_sum::sum([dy, gamma, x], |[dy, gamma, x]| {
                    dy * (least + gamma) * (x * scale)
                }) * share;
                let inputs = dy.iter().zip(gamma).zip(x);
                for (dx, ((dy, gamma), x)) in dx[shape.range(row)].iter_mut().zip(inputs) {
                    let g = dy.widen() * (least + gamma.widen());
                    *dx = T::narrow(scale * (g - x.widen() * scale * across));
                }
            }
        },
    );
}

/// `dgamma (+)=` the sum over rows of `dy * n`, where `n` is the normalised row. Rows are added in
/// their order.
pub fn rms_norm_weight_gradient<T: Element, G: Element>(
    pool: &Pool,
    shape: Rows,
    dy: &[T],
    x: &[T],
    stats: &[f32],
    dgamma: &mut [G],
    mode: Write,
) {
    expect_len("dy", dy.len(), &[shape.rows, shape.width]);
    expect_len("x", x.len(), &[shape.rows, shape.width]);
    expect_len("stats", stats.len(), &[shape.rows]);
    expect_len("dgamma", dgamma.len(), &[shape.width]);
    pool.for_each_block(shape.width, STRIP, strips(dgamma, 1), |columns, dgamma| {
        vectorised(
            #[inline(always)]
            || {
                let mut across = open(mode, dgamma);
                for (row, &scale) in stats.iter().enumerate() {
                    let (dy, x) = (&dy[shape.range(row)], &x[shape.range(row)]);
                    let inputs = dy[columns.clone()].iter().zip(&x[columns.clone()]);
                    for (across, (dy, x)) in across.iter_mut().zip(inputs) {
                        *across += dy.widen() * (x.widen() * scale);
                    }
                }
                close(&across, dgamma);
            },
        );
    });
}

/// Panics unless the input and the output of a norm have its shape.
#[track_caller]
fn expect_rows<T>(shape: Rows, input: &str, x: &[T], output: &str, y: &[T]) {
    expect_len(input, x.len(), &[shape.rows, shape.width]);
    expect_len(output, y.len(), &[shape.rows, shape.width]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, numeric_gradient, random, widen};
    use proptest::prelude::*;

    const EPSILON: f32 = 1e-5;

    fn layer_norm(width: usize, x: &[f64], gamma: &[f64], beta: &[f64]) -> Vec<f64> {
        let mut y = Vec::new();
        for x in x.chunks(width) {
            let mean = x.iter().sum::<f64>() / width as f64;
            let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / width as f64;
            let scale = 1.0 / (variance + f64::from(EPSILON)).sqrt();
            y.extend((0..width).map(|i| (x[i] - mean) * scale * gamma[i] + beta[i]));
        }
        y
    }

    fn rms_norm(width: usize, x: &[f64], gamma: &[f64]) -> Vec<f64> {
        let mut y = Vec::new();
        for x in x.chunks(width) {
            let square = x.iter().map(|v| v * v).sum::<f64>() / width as f64;
            let scale = 1.0 / (square + f64::from(EPSILON)).sqrt();
            y.extend((0..width).map(|i| x[i] * scale * gamma[i]));
        }
        y
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn layer_norm_agrees_with_the_reference(rows in 0usize..6, width in 2usize..40) {
            let shape = Rows { rows, width };
            // An offset of several deviations, as in activations: the mean must be removed.
            let x: Vec<f32> = random("x", rows * width).iter().map(|v| v + 3.0).collect();
            let (gamma, beta) = (random("gamma", width), random("beta", width));
            let dy = random("dy", rows * width);
            let (wx, wg, wb, wd) = (widen(&x), widen(&gamma), widen(&beta), widen(&dy));

            let mut y = vec![f32::NAN; x.len()];
            let mut stats = vec![f32::NAN; 2 * rows];
            layer_norm_forward(shape, EPSILON, &x, &gamma, &beta, &mut y, &mut stats);
            assert_close(&y, &layer_norm(width, &wx, &wg, &wb));

            let mut dx = vec![f32::NAN; x.len()];
            layer_norm_input_gradient(shape, &dy, &x, &gamma, &stats, &mut dx);
            let expected = numeric_gradient(&wx, &wd, |x| layer_norm(width, x, &wg, &wb));
            if width > 2 {
                // Two elements always become -1 and 1: their gradient is rounding error.
                assert_close(&dx, &expected);
            }

            let (mut dgamma, mut dbeta) = (vec![f32::NAN; width], vec![f32::NAN; width]);
            let over = Write::Overwrite;
            let pool = Pool::single();
            let outputs = (&mut dgamma[..], &mut dbeta[..]);
            layer_norm_weight_gradient(&pool, shape, &dy, &x, &stats, outputs, over);
            let dg = numeric_gradient(&wg, &wd, |g| layer_norm(width, &wx, g, &wb));
            let db = numeric_gradient(&wb, &wd, |b| layer_norm(width, &wx, &wg, b));
            assert_close(&dgamma, &dg);
            assert_close(&dbeta, &db);
            let onto = Write::Accumulate;
            let outputs = (&mut dgamma[..], &mut dbeta[..]);
            layer_norm_weight_gradient(&pool, shape, &dy, &x, &stats, outputs, onto);
            assert_close(&dgamma, &dg.iter().map(|v| 2.0 * v).collect::<Vec<_>>());
            assert_close(&dbeta, &db.iter().map(|v| 2.0 * v).collect::<Vec<_>>());
        }

        #[test]
        fn rms_norm_agrees_with_the_reference(rows in 0usize..6, width in 2usize..40) {
            let shape = Rows { rows, width };
            let (x, gamma) = (random("x", rows * width), random("gamma", width));
            let dy = random("dy", rows * width);
            let (wx, wg, wd) = (widen(&x), widen(&gamma), widen(&dy));

            let mut y = vec![f32::NAN; x.len()];
            let mut stats = vec![f32::NAN; rows];
            rms_norm_forward(shape, EPSILON, &x, &gamma, &mut y, &mut stats);
            assert_close(&y, &rms_norm(width, &wx, &wg));

            let mut dx = vec![f32::NAN; x.len()];
            rms_norm_input_gradient(shape, &dy, &x, &gamma, &stats, &mut dx);
            assert_close(&dx, &numeric_gradient(&wx, &wd, |x| rms_norm(width, x, &wg)));

            let mut dgamma = vec![f32::NAN; width];
            rms_norm_weight_gradient(&Pool::single(), shape, &dy, &x, &stats, &mut dgamma, Write::Overwrite);
            let dg = numeric_gradient(&wg, &wd, |g| rms_norm(width, &wx, g));
            assert_close(&dgamma, &dg);
            rms_norm_weight_gradient(&Pool::single(), shape, &dy, &x, &stats, &mut dgamma, Write::Accumulate);
            assert_close(&dgamma, &dg.iter().map(|v| 2.0 * v).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours() {
        let (rows, width) = (5, 129);
        let (x, gamma) = (random("x", rows * width), random("gamma", width));
        let (mut y, mut stats) = (vec![0.0; rows * width], vec![0.0; rows]);
        rms_norm_forward(Rows { rows, width }, EPSILON, &x, &gamma, &mut y, &mut stats);
        let (mut one, mut stat) = (vec![0.0; width], vec![0.0; 1]);
        let third = 2 * width..3 * width;
        let shape = Rows { rows: 1, width };
        rms_norm_forward(shape, EPSILON, &x[third.clone()], &gamma, &mut one, &mut stat);
        assert_eq!(one, y[third]);
    }

    #[test]
    fn a_constant_row_is_finite() {
        let shape = Rows { rows: 1, width: 4 };
        let (mut y, mut stats) = ([f32::NAN; 4], [f32::NAN; 2]);
        layer_norm_forward(shape, EPSILON, &[7.0; 4], &[1.0; 4], &[0.5; 4], &mut y, &mut stats);
        assert_eq!(y, [0.5; 4]);
    }
}
