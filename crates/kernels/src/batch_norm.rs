//! Batch normalisation (Ioffe and Szegedy, arXiv 1502.03167) of images: over all pixels of a
//! microbatch, channel by channel.
//!
//! Its sums are separate operators, because the pixels may be distributed over ranks: the results
//! are reduced over the ranks, or not. All of them hold two numbers per channel: first one number
//! of every channel, then the other.

use crate::instruction_set::vectorised;
use crate::pool::{Pool, strips};
use crate::shape::expect_len;
use crate::{Element, Rows, Write};

/// Number of pixels that are summed in single precision before their sum is added in double.
const BLOCK: usize = 256;

/// Number of workspace elements that the sums need; `shape` has one row per pixel.
pub fn workspace(shape: Rows) -> usize {
    shape.rows.div_ceil(BLOCK) * 2 * shape.width
}

/// Per channel Σ (x − shift) and Σ (x − shift)² over all pixels. A shift close to the mean avoids
/// cancellation in the variance (Chan, Golub and LeVeque, 1983, section 3).
pub fn sums<T: Element>(
    pool: &Pool,
    shape: Rows,
    x: &[T],
    shift: &[T],
    sums: &mut [f32],
    workspace: &mut [f32],
) {
    expect_len("x", x.len(), &[shape.rows, shape.width]);
    expect_len("shift", shift.len(), &[shape.width]);
    in_blocks(pool, shape, sums, workspace, |row, first, second| {
        let x = &x[shape.range(row)];
        for (((first, second), x), shift) in first.iter_mut().zip(second).zip(x).zip(shift) {
            let off = x.widen() - shift.widen();
            *first += off;
            *second += off * off;
        }
    });
}

/// Per channel Σ dy and Σ dy · n, where n is the normalised x.
pub fn gradient_sums<T: Element>(
    pool: &Pool,
    shape: Rows,
    dy: &[T],
    x: &[T],
    statistics: &[f32],
    sums: &mut [f32],
    workspace: &mut [f32],
) {
    expect_len("dy", dy.len(), &[shape.rows, shape.width]);
    expect_len("x", x.len(), &[shape.rows, shape.width]);
    expect_len("statistics", statistics.len(), &[2, shape.width]);
    let (mean, scale) = statistics.split_at(shape.width);
    in_blocks(pool, shape, sums, workspace, |row, first, second| {
        let (x, dy) = (&x[shape.range(row)], &dy[shape.range(row)]);
        let constants = mean.iter().zip(scale);
        let inputs = dy.iter().zip(x).zip(constants);
        for ((first, second), ((dy, x), (mean, scale))) in first.iter_mut().zip(second).zip(inputs)
        {
            *first += dy.widen();
            *second += dy.widen() * ((x.widen() - mean) * scale);
        }
    });
}

/// Sums over rows: within blocks in single precision, and over blocks in their order in double.
fn in_blocks(
    pool: &Pool,
    shape: Rows,
    sums: &mut [f32],
    workspace: &mut [f32],
    add: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
) {
    expect_len("sums", sums.len(), &[2, shape.width]);
    let blocks = shape.rows.div_ceil(BLOCK);
    let parts = &mut workspace[..blocks * 2 * shape.width];
    pool.for_each_block(blocks, 1, strips(parts, 2 * shape.width), |block, part| {
        vectorised(
            #[inline(always)]
            || {
                part.fill(0.0);
                let (first, second) = part.split_at_mut(shape.width);
                for row in block.start * BLOCK..shape.rows.min(block.end * BLOCK) {
                    add(row, first, second);
                }
            },
        );
    });
    for (channel, sum) in sums.iter_mut().enumerate() {
        let of_blocks = parts.iter().skip(channel).step_by(2 * shape.width.max(1));
        *sum = of_blocks.map(|&part| f64::from(part)).sum::<f64>() as f32;
    }
}

/// `y = (x − mean) / sqrt(variance + epsilon) · gain + bias`, with mean and variance of `count`
/// pixels from their [`sums`]. Saves `statistics`: the mean and the reciprocal of the standard
/// deviation.
#[expect(clippy::too_many_arguments, reason = "one name per tensor of the operator")]
pub fn forward<T: Element>(
    pool: &Pool,
    shape: Rows,
    count: f32,
    epsilon: f32,
    x: &[T],
    sums: &[f32],
    (gain, bias, shift): (&[T], &[T], &[T]),
    y: &mut [T],
    statistics: &mut [f32],
) {
    expect_len("x", x.len(), &[shape.rows, shape.width]);
    expect_len("sums", sums.len(), &[2, shape.width]);
    expect_len("gain", gain.len(), &[shape.width]);
    expect_len("bias", bias.len(), &[shape.width]);
    expect_len("statistics", statistics.len(), &[2, shape.width]);
    let (mean, scale) = statistics.split_at_mut(shape.width);
    for channel in 0..shape.width {
        let (first, second) = (sums[channel] / count, sums[shape.width + channel] / count);
        mean[channel] = shift[channel].widen() + first;
        scale[channel] = 1.0 / ((second - first * first).max(0.0) + epsilon).sqrt();
    }
    let (mean, scale) = (&*mean, &*scale);
    pool.for_each_block(shape.rows, BLOCK, strips(y, shape.width), |rows, y| {
        vectorised(
            #[inline(always)]
            || {
                for (row, y) in rows.zip(y.chunks_mut(shape.width.max(1))) {
                    let constants = mean.iter().zip(scale).zip(gain.iter().zip(bias));
                    let inputs = x[shape.range(row)].iter().zip(constants);
                    for (y, (x, ((mean, scale), (gain, bias)))) in y.iter_mut().zip(inputs) {
                        let normal = (x.widen() - mean) * scale;
                        *y = T::narrow(normal * gain.widen() + bias.widen());
                    }
                }
            },
        );
    });
}

/// Input gradient, with the [`gradient_sums`] over the `count` pixels of the microbatch: `dx = gain
/// / deviation · (dy − mean(dy) − n · mean(dy · n))`.
#[expect(clippy::too_many_arguments, reason = "one name per tensor of the operator")]
pub fn input_gradient<T: Element>(
    pool: &Pool,
    shape: Rows,
    count: f32,
    dy: &[T],
    x: &[T],
    gain: &[T],
    statistics: &[f32],
    sums: &[f32],
    dx: &mut [T],
) {
    expect_len("dy", dy.len(), &[shape.rows, shape.width]);
    expect_len("x", x.len(), &[shape.rows, shape.width]);
    expect_len("gain", gain.len(), &[shape.width]);
    expect_len("statistics", statistics.len(), &[2, shape.width]);
    expect_len("sums", sums.len(), &[2, shape.width]);
    let (mean, scale) = statistics.split_at(shape.width);
    let (along, across) = sums.split_at(shape.width);
    let share = 1.0 / count;
    pool.for_each_block(shape.rows, BLOCK, strips(dx, shape.width), |rows, dx| {
        vectorised(
            #[inline(always)]
            || {
                for (row, dx) in rows.zip(dx.chunks_mut(shape.width.max(1))) {
                    let inputs = dy[shape.range(row)].iter().zip(&x[shape.range(row)]);
                    let constants = mean.iter().zip(scale).zip(along.iter().zip(across)).zip(gain);
                    let all = inputs.zip(constants);
                    for (dx, ((dy, x), (((mean, scale), (along, across)), gain))) in
                        dx.iter_mut().zip(all)
                    {
                        let normal = (x.widen() - mean) * scale;
                        let centred = dy.widen() - along * share - normal * (across * share);
                        *dx = T::narrow(gain.widen() * scale * centred);
                    }
                }
            },
        );
    });
}

/// Weights of a microbatch in a norm's gradients and in its running averages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shares {
    /// Share of this rank in the gradient sums, which may be over several ranks.
    pub gradients: f32,
    /// Share of the microbatch in an iteration's average.
    pub averages: f32,
}

/// `dgain (+)= Σ dy · n` and `dbias (+)= Σ dy`, times this rank's share. Also adds its share of the
/// iteration's mean and unbiased variance (Bessel) of `count` pixels.
pub fn weight_gradient<G: Element>(
    count: f32,
    epsilon: f32,
    shares: Shares,
    sums: &[f32],
    statistics: &[f32],
    [dgain, dbias, mean, variance]: [&mut [G]; 4],
    mode: Write,
) {
    let channels = dgain.len();
    expect_len("sums", sums.len(), &[2, channels]);
    expect_len("statistics", statistics.len(), &[2, channels]);
    let unbiased = count / (count - 1.0).max(1.0);
    let add = |into: &mut G, value: f32| *into = G::narrow(mode.start(*into) + value);
    for channel in 0..channels {
        let scale = statistics[channels + channel];
        let spread = (1.0 / (scale * scale) - epsilon).max(0.0) * unbiased;
        add(&mut dgain[channel], sums[channels + channel] * shares.gradients);
        add(&mut dbias[channel], sums[channel] * shares.gradients);
        add(&mut mean[channel], statistics[channel] * shares.averages);
        add(&mut variance[channel], spread * shares.averages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, assert_within, bits, numeric_gradient, random, widen};
    use std::num::NonZeroUsize;

    const EPSILON: f32 = 1e-5;

    fn moments(shape: Rows, x: &[f64], channel: usize) -> (f64, f64) {
        let n = shape.rows as f64;
        let of = |row: usize| x[row * shape.width + channel];
        let mean = (0..shape.rows).map(of).sum::<f64>() / n;
        let variance = (0..shape.rows).map(|row| (of(row) - mean).powi(2)).sum::<f64>() / n;
        (mean, variance)
    }

    fn reference(shape: Rows, x: &[f64], gain: &[f64], bias: &[f64]) -> Vec<f64> {
        let all: Vec<_> = (0..shape.width).map(|c| moments(shape, x, c)).collect();
        let value = |i: usize| {
            let channel = i % shape.width;
            let (mean, variance) = all[channel];
            let normal = (x[i] - mean) / (variance + f64::from(EPSILON)).sqrt();
            normal * gain[channel] + bias[channel]
        };
        (0..x.len()).map(value).collect()
    }

    struct Run {
        y: Vec<f32>,
        dx: Vec<f32>,
        weights: [Vec<f32>; 4],
    }

    fn run(shape: Rows, x: &[f32], shift: &[f32], threads: usize) -> Run {
        let pool = Pool::new(NonZeroUsize::new(threads).unwrap()).unwrap();
        let (width, count) = (shape.width, shape.rows as f32);
        let (gain, bias) = (random("gain", width), random("bias", width));
        let dy = random("dy", x.len());
        let mut room = vec![f32::NAN; workspace(shape)];
        let [mut total, mut statistics, mut of_dy] = [(); 3].map(|()| vec![f32::NAN; 2 * width]);
        let (mut y, mut dx) = (vec![f32::NAN; x.len()], vec![f32::NAN; x.len()]);
        sums(&pool, shape, x, shift, &mut total, &mut room);
        let params = (&gain[..], &bias[..], shift);
        forward(&pool, shape, count, EPSILON, x, &total, params, &mut y, &mut statistics);
        gradient_sums(&pool, shape, &dy, x, &statistics, &mut of_dy, &mut room);
        input_gradient(&pool, shape, count, &dy, x, &gain, &statistics, &of_dy, &mut dx);
        let mut weights = [(); 4].map(|()| vec![f32::NAN; width]);
        let shares = Shares { gradients: 1.0, averages: 0.25 };
        let into = weights.each_mut().map(|w| &mut w[..]);
        weight_gradient(count, EPSILON, shares, &of_dy, &statistics, into, Write::Overwrite);
        let into = weights.each_mut().map(|w| &mut w[..]);
        weight_gradient(count, EPSILON, shares, &of_dy, &statistics, into, Write::Accumulate);
        Run { y, dx, weights }
    }

    #[test]
    fn it_and_its_gradients_are_what_the_definition_says() {
        for (rows, width) in [(4, 1), (9, 5), (60, 3)] {
            let shape = Rows { rows, width };
            let x = random("x", rows * width);
            let shift = random("shift", width);
            let (gain, bias) = (widen(&random("gain", width)), widen(&random("bias", width)));
            let (dy, wide) = (widen(&random("dy", x.len())), widen(&x));
            let run = run(shape, &x, &shift, 1);
            assert_within(&run.y, &reference(shape, &wide, &gain, &bias), 1e-5);
            let of_x = |x: &[f64]| reference(shape, x, &gain, &bias);
            assert_within(&run.dx, &numeric_gradient(&wide, &dy, of_x), 1e-3);
            let of_gain = |gain: &[f64]| reference(shape, &wide, gain, &bias);
            let expected = numeric_gradient(&gain, &dy, of_gain).iter().map(|g| 2.0 * g).collect();
            let expected: Vec<f64> = expected;
            assert_within(&run.weights[0], &expected, 1e-4);
            let of_bias = |bias: &[f64]| reference(shape, &wide, &gain, bias);
            let expected: Vec<f64> =
                numeric_gradient(&bias, &dy, of_bias).iter().map(|g| 2.0 * g).collect();
            assert_within(&run.weights[1], &expected, 1e-4);
            let all: Vec<_> = (0..width).map(|c| moments(shape, &wide, c)).collect();
            let means: Vec<f64> = all.iter().map(|m| m.0 * 0.5).collect();
            assert_close(&run.weights[2], &means);
            let bessel = rows as f64 / (rows as f64 - 1.0);
            let spreads: Vec<f64> = all.iter().map(|m| m.1 * bessel * 0.5).collect();
            assert_within(&run.weights[3], &spreads, 1e-4);
        }
    }

    /// Mean of a thousand standard deviations, shifted as by a learnt running average.
    #[test]
    fn a_far_mean_does_not_drown_the_variance() {
        let shape = Rows { rows: 4096, width: 2 };
        let x: Vec<f32> = random("x", 8192).iter().map(|x| 1000.0 + x).collect();
        let run = run(shape, &x, &[1000.0; 2], 1);
        let (gain, bias) = (widen(&random("gain", 2)), widen(&random("bias", 2)));
        assert_within(&run.y, &reference(shape, &widen(&x), &gain, &bias), 1e-4);
    }

    #[test]
    fn threads_change_no_bit() {
        let shape = Rows { rows: 1000, width: 7 };
        let x = random("x", 7000);
        let runs = [1, 3].map(|threads| run(shape, &x, &[0.0; 7], threads));
        assert_eq!(bits(&runs[0].y), bits(&runs[1].y));
        assert_eq!(bits(&runs[0].dx), bits(&runs[1].dx));
        assert_eq!(bits(&runs[0].weights[0]), bits(&runs[1].weights[0]));
    }
}
