//! Max pooling over a window, and global average pooling, per channel.

use crate::Element;
use crate::instruction_set::vectorised;
use crate::pool::{Pool, strips};
use crate::shape::expect_len;
use crate::window::Window;

/// `y =` the maximum of each channel at every window position; padding is never the maximum.
pub fn max_forward<T: Element>(pool: &Pool, images: usize, window: Window, x: &[T], y: &mut [T]) {
    expect_len("x", x.len(), &[images, window.image()]);
    expect_len("y", y.len(), &[images, window.places(), window.channels]);
    let (side, channels) = (window.side_out(), window.channels);
    let lines = strips(y, side * channels);
    pool.for_each_block(images * side, 1, lines, |line, y| {
        let (image, line) = (line.start / side, line.start % side);
        let x = &x[image * window.image()..(image + 1) * window.image()];
        let rows = window.covered(line).0;
        vectorised(
            #[inline(always)]
            || {
                for (place, y) in y.chunks_mut(channels).enumerate() {
                    let columns = window.covered(place).0;
                    y.fill(T::narrow(f32::NEG_INFINITY));
                    for (row, column) in
                        rows.clone().flat_map(|row| columns.clone().map(move |c| (row, c)))
                    {
                        let pixel = &x[(row * window.side + column) * channels..][..channels];
                        for (y, x) in y.iter_mut().zip(pixel) {
                            // NaN propagates.
                            if x.widen() > y.widen() || x.widen().is_nan() {
                                *y = *x;
                            }
                        }
                    }
                }
            },
        );
    });
}

/// Input gradient of [`max_forward`]: all of it goes to the first pixel that had the maximum.
pub fn max_input_gradient<T: Element>(
    pool: &Pool,
    images: usize,
    window: Window,
    dy: &[T],
    x: &[T],
    dx: &mut [T],
) {
    expect_len("dy", dy.len(), &[images, window.places(), window.channels]);
    expect_len("x", x.len(), &[images, window.image()]);
    expect_len("dx", dx.len(), &[images, window.image()]);
    let (side, channels) = (window.side_out(), window.channels);
    // Windows may overlap in pixels, but images are independent: one image is one task.
    pool.for_each_block(images, 1, strips(dx, window.image()), |image, dx| {
        let x = &x[image.start * window.image()..image.end * window.image()];
        let each = window.places() * channels;
        let dy = &dy[image.start * each..image.end * each];
        dx.fill(T::ZERO);
        for (place, dy) in dy.chunks(channels).enumerate() {
            let (rows, columns) = (window.covered(place / side).0, window.covered(place % side).0);
            for (channel, dy) in dy.iter().enumerate() {
                let (mut best, mut at) = (f32::NEG_INFINITY, None);
                for row in rows.clone() {
                    for column in columns.clone() {
                        let here = (row * window.side + column) * channels + channel;
                        let value = x[here].widen();
                        if at.is_none() || value > best || value.is_nan() {
                            (best, at) = (value, Some(here));
                        }
                    }
                }
                if let Some(at) = at {
                    dx[at] = T::narrow(dx[at].widen() + dy.widen());
                }
            }
        }
    });
}

/// `y[images, channels] =` the mean of each channel over all `pixels` of an image.
pub fn mean_forward<T: Element>(
    pool: &Pool,
    (images, pixels, channels): (usize, usize, usize),
    x: &[T],
    y: &mut [T],
) {
    expect_len("x", x.len(), &[images, pixels, channels]);
    expect_len("y", y.len(), &[images, channels]);
    let share = 1.0 / pixels.max(1) as f32;
    pool.for_each_block(images, 1, strips(y, channels), |image, y| {
        let x = &x[image.start * pixels * channels..image.end * pixels * channels];
        for (at, y) in y.chunks_mut(SPAN).enumerate() {
            let mut sums = [0.0f32; SPAN];
            for pixel in x.chunks(channels) {
                let pixel = &pixel[at * SPAN..][..y.len()];
                for (sum, x) in sums.iter_mut().zip(pixel) {
                    *sum += x.widen();
                }
            }
            for (y, sum) in y.iter_mut().zip(sums) {
                *y = T::narrow(sum * share);
            }
        }
    });
}

/// Input gradient of [`mean_forward`]: every pixel receives an equal share.
pub fn mean_input_gradient<T: Element>(
    pool: &Pool,
    (images, pixels, channels): (usize, usize, usize),
    dy: &[T],
    dx: &mut [T],
) {
    expect_len("dy", dy.len(), &[images, channels]);
    expect_len("dx", dx.len(), &[images, pixels, channels]);
    let share = 1.0 / pixels.max(1) as f32;
    pool.for_each_block(images, 1, strips(dx, pixels * channels), |image, dx| {
        let dy = &dy[image.start * channels..image.end * channels];
        for pixel in dx.chunks_mut(channels) {
            for (dx, dy) in pixel.iter_mut().zip(dy) {
                *dx = T::narrow(dy.widen() * share);
            }
        }
    });
}

/// Number of channels summed at a time.
const SPAN: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, assert_within, numeric_gradient, random, widen};
    use proptest::prelude::*;

    fn reference(images: usize, w: Window, x: &[f64]) -> Vec<f64> {
        let (out, mut y) = (w.side_out(), Vec::new());
        for image in 0..images {
            for place in 0..out * out {
                let (rows, columns) = (w.covered(place / out).0, w.covered(place % out).0);
                for channel in 0..w.channels {
                    let value = |row: usize, column: usize| {
                        x[((image * w.side + row) * w.side + column) * w.channels + channel]
                    };
                    let seen = rows.clone().flat_map(|r| columns.clone().map(move |c| (r, c)));
                    y.push(seen.map(|(r, c)| value(r, c)).fold(f64::NEG_INFINITY, f64::max));
                }
            }
        }
        y
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn the_largest_and_its_gradient(
            images in 0usize..3, side in 3usize..7, channels in 1usize..4, stride in 1usize..3,
        ) {
            let w = Window { side, channels, kernel: 3, stride, padding: 1 };
            let (inputs, outputs) = (images * w.image(), images * w.places() * channels);
            let (x, dy) = (random("x", inputs), random("dy", outputs));
            let (mut y, mut dx) = (vec![f32::NAN; outputs], vec![f32::NAN; inputs]);
            let pool = Pool::single();
            max_forward(&pool, images, w, &x, &mut y);
            assert_close(&y, &reference(images, w, &widen(&x)));
            max_input_gradient(&pool, images, w, &dy, &x, &mut dx);
            let of = |x: &[f64]| reference(images, w, x);
            assert_within(&dx, &numeric_gradient(&widen(&x), &widen(&dy), of), 1e-4);
        }
    }

    #[test]
    fn equals_give_to_the_first_and_what_is_no_number_shows() {
        let w = Window { side: 2, channels: 1, kernel: 2, stride: 2, padding: 0 };
        let mut dx = [9.0; 4];
        max_input_gradient(&Pool::single(), 1, w, &[3.0], &[1.0, 1.0, 0.0, 1.0], &mut dx);
        assert_eq!(dx, [3.0, 0.0, 0.0, 0.0]);
        let mut y = [0.0];
        max_forward(&Pool::single(), 1, w, &[1.0, f32::NAN, 0.0, -1.0], &mut y);
        assert!(y[0].is_nan(), "{y:?}");
    }

    #[test]
    fn means_and_shares() {
        let sizes = (2, 9, 300);
        let (x, dy) = (random("x", 2 * 9 * 300), random("dy", 2 * 300));
        let (mut y, mut dx) = (vec![f32::NAN; 600], vec![f32::NAN; 5400]);
        mean_forward(&Pool::single(), sizes, &x, &mut y);
        let mean = |x: &[f64]| {
            let of = |i: usize| (0..9).map(|p| x[(i / 300 * 9 + p) * 300 + i % 300]).sum::<f64>();
            (0..600).map(|i| of(i) / 9.0).collect::<Vec<f64>>()
        };
        assert_close(&y, &mean(&widen(&x)));
        mean_input_gradient(&Pool::single(), sizes, &dy, &mut dx);
        for (i, &dx) in dx.iter().enumerate() {
            let (image, channel) = (i / 2700, i % 300);
            assert_eq!(dx, dy[image * 300 + channel] * (1.0 / 9.0));
        }
    }
}
