//! Convolutions over images by im2col and GEMM: one operand's rows are the patches under the
//! window, those of the other are filters (Chellapilla, Puri and Simard, "High performance
//! convolutional neural networks for document processing", 2006).
//!
//! Patches are written out for a chunk of images at a time, as many as fit a workspace whose size
//! depends on the shape alone. A 1 × 1 window reads the image itself, and nothing is written out.

use crate::element::{narrow, widen};
use crate::instruction_set::vectorised;
use crate::pool::{Pool, strips};
use crate::shape::expect_len;
use crate::window::Window;
use crate::{Element, Write, linear};
use std::ops::Range;

/// Sizes of a convolution on one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of images.
    pub images: usize,
    /// Window, and size of the images that it moves over.
    pub window: Window,
    /// Number of output channels.
    pub filters: usize,
}

/// Number of im2col elements that are written out at a time, unless one image has more.
const ROOM: usize = 1 << 20;

impl Shape {
    /// Number of images processed at a time.
    fn at_once(&self) -> usize {
        let each = self.window.places() * self.window.seen();
        (ROOM / each.max(1)).clamp(1, self.images.max(1))
    }

    /// GEMM shape for `images` images.
    fn product(&self, images: usize) -> linear::Shape {
        let rows = images * self.window.places();
        linear::Shape { rows, inputs: self.window.seen(), outputs: self.filters }
    }

    fn chunks(self) -> impl Iterator<Item = Range<usize>> {
        let step = self.at_once();
        (0..self.images).step_by(step).map(move |at| at..self.images.min(at + step))
    }

    fn expect<T>(&self, (x_name, x): (&str, &[T]), (y_name, y): (&str, &[T])) {
        expect_len(x_name, x.len(), &[self.images, self.window.image()]);
        expect_len(y_name, y.len(), &[self.images, self.window.places(), self.filters]);
    }
}

/// Number of workspace elements that a convolution and its gradients need.
pub fn workspace<T: Element, G: Element>(shape: Shape) -> usize {
    let single = is_single::<T>() && is_single::<G>();
    if single && shape.window.is_pointwise() {
        return 0;
    }
    let linear::Shape { rows, inputs, outputs } = shape.product(shape.at_once());
    let staged = if single { 0 } else { inputs * outputs + rows * outputs };
    rows * inputs + staged
}

/// `y = ` each window position's patch times the filters `w[filters, kernel, kernel, channels]`.
pub fn forward<T: Element>(
    pool: &Pool,
    shape: Shape,
    x: &[T],
    w: &[T],
    y: &mut [T],
    workspace: &mut [f32],
) {
    shape.expect(("x", x), ("y", y));
    if let (true, Some(x), Some(w)) = (shape.window.is_pointwise(), T::singles(x), T::singles(w))
        && let Some(y) = T::singles_mut(y)
    {
        return linear::forward(pool, shape.product(shape.images), x, w, y);
    }
    let (rooms, wide) = Rooms::cut(shape, w, workspace);
    for chunk in shape.chunks() {
        let part = shape.product(chunk.len());
        let seen = &mut rooms.seen[..part.rows * part.inputs];
        im2col(pool, shape, x, chunk.clone(), seen);
        let y = &mut y[rows(shape, &chunk)];
        match T::singles_mut(y) {
            Some(y) => linear::forward(pool, part, seen, wide, y),
            None => {
                let out = &mut rooms.rows[..part.rows * part.outputs];
                linear::forward(pool, part, seen, wide, out);
                narrow(out, y);
            }
        }
    }
}

/// Input gradient of a convolution: every window position contributes to the pixels it covered.
pub fn input_gradient<T: Element>(
    pool: &Pool,
    shape: Shape,
    dy: &[T],
    w: &[T],
    dx: &mut [T],
    workspace: &mut [f32],
) {
    shape.expect(("dx", dx), ("dy", dy));
    if let (true, Some(dy), Some(w)) = (shape.window.is_pointwise(), T::singles(dy), T::singles(w))
        && let Some(dx) = T::singles_mut(dx)
    {
        return linear::input_gradient(pool, shape.product(shape.images), dy, w, dx);
    }
    let (rooms, wide) = Rooms::cut(shape, w, workspace);
    for chunk in shape.chunks() {
        let part = shape.product(chunk.len());
        let seen = &mut rooms.seen[..part.rows * part.inputs];
        let dy = single(&dy[rows(shape, &chunk)], rooms.rows);
        linear::input_gradient(pool, part, dy, wide, seen);
        col2im(pool, shape, seen, &mut dx[images(shape, &chunk)]);
    }
}

/// `dw (+)=` the sum over all window positions of `dy` times the patch there. Images are added in
/// their order, a chunk at a time.
pub fn weight_gradient<T: Element, G: Element>(
    pool: &Pool,
    shape: Shape,
    dy: &[T],
    x: &[T],
    dw: &mut [G],
    mode: Write,
    workspace: &mut [f32],
) {
    shape.expect(("x", x), ("dy", dy));
    expect_len("dw", dw.len(), &[shape.filters, shape.window.seen()]);
    if let (true, Some(dy), Some(x)) = (shape.window.is_pointwise(), T::singles(dy), T::singles(x))
        && let Some(dw) = G::singles_mut(dw)
    {
        return linear::weight_gradient(pool, shape.product(shape.images), dy, x, dw, mode);
    }
    if shape.images == 0 {
        return mode.prepare(dw);
    }
    let room = Rooms::of(shape, workspace);
    let mut mode = mode;
    let staged = G::singles_mut(dw).is_none();
    if staged {
        widen(dw, room.weights);
    }
    for chunk in shape.chunks() {
        let part = shape.product(chunk.len());
        let seen = &mut room.seen[..part.rows * part.inputs];
        im2col(pool, shape, x, chunk.clone(), seen);
        let dy = single(&dy[rows(shape, &chunk)], room.rows);
        let sums = match G::singles_mut(dw) {
            Some(dw) => dw,
            None => &mut *room.weights,
        };
        linear::weight_gradient(pool, part, dy, seen, sums, mode);
        mode = Write::Accumulate;
    }
    if staged {
        narrow(room.weights, dw);
    }
}

/// Parts of the workspace: im2col patches, and for 16-bit types the widened weights and rows.
struct Rooms<'w> {
    seen: &'w mut [f32],
    weights: &'w mut [f32],
    rows: &'w mut [f32],
}

impl<'w> Rooms<'w> {
    fn of(shape: Shape, workspace: &'w mut [f32]) -> Self {
        let linear::Shape { rows, inputs, outputs } = shape.product(shape.at_once());
        let (seen, rest) = workspace.split_at_mut(rows * inputs);
        let weights = rest.len().min(inputs * outputs);
        let (weights, rows) = rest.split_at_mut(weights);
        Self { seen, weights, rows }
    }

    /// Splits the workspace, and returns the weights in single precision.
    fn cut<T: Element>(
        shape: Shape,
        w: &'w [T],
        workspace: &'w mut [f32],
    ) -> (RowRooms<'w>, &'w [f32]) {
        let Self { seen, weights, rows } = Self::of(shape, workspace);
        expect_len("w", w.len(), &[shape.filters, shape.window.seen()]);
        let wide = match T::singles(w) {
            Some(w) => w,
            None => {
                widen(w, weights);
                &*weights
            }
        };
        (RowRooms { seen, rows }, wide)
    }
}

/// [`Rooms`] without the weights, which are being read.
struct RowRooms<'w> {
    seen: &'w mut [f32],
    rows: &'w mut [f32],
}

/// Rows in single precision: the slice itself, or a widened copy in `room`.
fn single<'a, T: Element>(x: &'a [T], room: &'a mut [f32]) -> &'a [f32] {
    match T::singles(x) {
        Some(x) => x,
        None => {
            let room = &mut room[..x.len()];
            widen(x, room);
            room
        }
    }
}

/// Element range of a chunk of images in the input.
fn images(shape: Shape, chunk: &Range<usize>) -> Range<usize> {
    let each = shape.window.image();
    chunk.start * each..chunk.end * each
}

/// Element range of a chunk of images in the output.
fn rows(shape: Shape, chunk: &Range<usize>) -> Range<usize> {
    let each = shape.window.places() * shape.filters;
    chunk.start * each..chunk.end * each
}

/// Writes out the patches: one row for each image of a chunk and each window position.
fn im2col<T: Element>(pool: &Pool, shape: Shape, x: &[T], chunk: Range<usize>, seen: &mut [f32]) {
    let window = shape.window;
    let (side, width) = (window.side_out(), window.kernel * window.channels);
    // One line of window positions at a time.
    let lines = chunk.len() * side;
    let strips = strips(seen, side * window.seen());
    pool.for_each_block(lines, 1, strips, |line, seen| {
        let (image, y) = (chunk.start + line.start / side, line.start % side);
        let x = &x[image * window.image()..(image + 1) * window.image()];
        vectorised(
            #[inline(always)]
            || {
                let (rows, above) = window.covered(y);
                for (place, patch) in seen.chunks_mut(window.seen()).enumerate() {
                    let (columns, before) = window.covered(place);
                    if rows.len() < window.kernel || columns.len() < window.kernel {
                        patch.fill(0.0);
                    }
                    let len = columns.len() * window.channels;
                    for (at, row) in rows.clone().enumerate() {
                        let from = (row * window.side + columns.start) * window.channels;
                        let to = (above + at) * width + before * window.channels;
                        let values = x[from..from + len].iter();
                        for (seen, value) in patch[to..to + len].iter_mut().zip(values) {
                            *seen = value.widen();
                        }
                    }
                }
            },
        );
    });
}

/// Adds the patch gradients to the pixels they cover: per pixel in window order.
fn col2im<T: Element>(pool: &Pool, shape: Shape, seen: &[f32], dx: &mut [T]) {
    let window = shape.window;
    let (side, row, channels) = (window.side_out(), window.side * window.channels, window.channels);
    let width = window.kernel * channels;
    let lines = dx.len().checked_div(row).unwrap_or(0);
    pool.for_each_block(lines, 1, strips(dx, row), |line, dx| {
        let (image, y) = (line.start / window.side, line.start % window.side);
        // Lines of window positions that cover this line of pixels.
        let reach = y + window.padding;
        let first = (reach + 1).saturating_sub(window.kernel).div_ceil(window.stride);
        let last = (reach / window.stride).min(side.saturating_sub(1));
        vectorised(
            #[inline(always)]
            || {
                for start in (0..row).step_by(SPAN) {
                    let end = row.min(start + SPAN);
                    let mut sums = [0.0f32; SPAN];
                    for place_y in first..=last {
                        if side == 0 {
                            break;
                        }
                        let at = reach - place_y * window.stride;
                        let line = (image * side + place_y) * side;
                        for place_x in 0..side {
                            let (columns, before) = window.covered(place_x);
                            // Covered elements of the line, within the span.
                            let (from, to) = (columns.start * channels, columns.end * channels);
                            let (low, high) = (from.max(start), to.min(end));
                            if low >= high {
                                continue;
                            }
                            let patch = (line + place_x) * window.seen() + at * width;
                            let skip = patch + before * channels + low - from;
                            let given = &seen[skip..skip + high - low];
                            for (sum, given) in
                                sums[low - start..high - start].iter_mut().zip(given)
                            {
                                *sum += given;
                            }
                        }
                    }
                    for (dx, sum) in dx[start..end].iter_mut().zip(sums) {
                        *dx = T::narrow(sum);
                    }
                }
            },
        );
    });
}

/// Number of elements of a line of pixels that are summed at a time.
const SPAN: usize = 512;

fn is_single<T: Element>() -> bool {
    T::singles(&[]).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bf16;
    use crate::reference::{assert_close, assert_within, bits, numeric_gradient, random, widen};
    use proptest::prelude::*;
    use std::num::NonZeroUsize;

    fn reference(s: Shape, x: &[f64], w: &[f64]) -> Vec<f64> {
        let Window { side, channels, kernel, stride, padding } = s.window;
        let out = s.window.side_out();
        let mut y = Vec::new();
        for image in 0..s.images {
            for (oy, ox) in (0..out * out).map(|place| (place / out, place % out)) {
                for filter in 0..s.filters {
                    let mut sum = 0.0;
                    for (ky, kx) in (0..kernel * kernel).map(|k| (k / kernel, k % kernel)) {
                        let (iy, ix) = (oy * stride + ky, ox * stride + kx);
                        let inside = |i: usize| (padding..side + padding).contains(&i);
                        if !inside(iy) || !inside(ix) {
                            continue;
                        }
                        for c in 0..channels {
                            let pixel = (iy - padding) * side + ix - padding;
                            sum += x[(image * side * side + pixel) * channels + c]
                                * w[(filter * kernel * kernel + ky * kernel + kx) * channels + c];
                        }
                    }
                    y.push(sum);
                }
            }
        }
        y
    }

    fn shapes() -> impl Strategy<Value = Shape> {
        (0usize..4, 1usize..8, 1usize..4, 1usize..4, 1usize..3, 0usize..3, 1usize..5).prop_map(
            |(images, side, channels, kernel, stride, padding, filters)| {
                let padding = padding.min(kernel - 1);
                let window = Window { side: side.max(kernel), channels, kernel, stride, padding };
                Shape { images, window, filters }
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn it_and_its_gradients_are_what_the_definition_says(s in shapes(), threads in 1usize..4) {
            let pool = Pool::new(NonZeroUsize::new(threads).unwrap()).unwrap();
            let (inputs, outputs) =
                (s.images * s.window.image(), s.images * s.window.places() * s.filters);
            let (x, w) = (random("x", inputs), random("w", s.filters * s.window.seen()));
            let dy = random("dy", outputs);
            let mut room = vec![f32::NAN; workspace::<f32, f32>(s)];
            let mut y = vec![f32::NAN; outputs];
            forward(&pool, s, &x, &w, &mut y, &mut room);
            assert_close(&y, &reference(s, &widen(&x), &widen(&w)));

            let mut dx = vec![f32::NAN; inputs];
            input_gradient(&pool, s, &dy, &w, &mut dx, &mut room);
            let by_x = |x: &[f64]| reference(s, x, &widen(&w));
            assert_within(&dx, &numeric_gradient(&widen(&x), &widen(&dy), by_x), 1e-4);

            let mut dw = vec![f32::NAN; w.len()];
            weight_gradient(&pool, s, &dy, &x, &mut dw, Write::Overwrite, &mut room);
            let by_w = |w: &[f64]| reference(s, &widen(&x), w);
            let expected = numeric_gradient(&widen(&w), &widen(&dy), by_w);
            assert_within(&dw, &expected, 1e-4);
            weight_gradient(&pool, s, &dy, &x, &mut dw, Write::Accumulate, &mut room);
            let twice: Vec<f64> = expected.iter().map(|v| 2.0 * v).collect();
            assert_within(&dw, &twice, 1e-4);
        }
    }

    /// With several chunks, any number of threads gives the bits of one thread.
    #[test]
    fn threads_change_no_bit_and_narrow_types_are_rounded_once() {
        let window = Window { side: 33, channels: 20, kernel: 3, stride: 1, padding: 1 };
        let s = Shape { images: 7, window, filters: 24 };
        assert!(s.at_once() < s.images, "several chunks");
        let (inputs, outputs) = (s.images * window.image(), s.images * window.places() * s.filters);
        let (x, w) = (random("x", inputs), random("w", s.filters * window.seen()));
        let dy = random("dy", outputs);
        let run = |threads: usize| {
            let pool = Pool::new(NonZeroUsize::new(threads).unwrap()).unwrap();
            let mut room = vec![f32::NAN; workspace::<f32, f32>(s)];
            let (mut y, mut dx) = (vec![0.0; outputs], vec![0.0; inputs]);
            let mut dw = vec![0.0; w.len()];
            forward(&pool, s, &x, &w, &mut y, &mut room);
            input_gradient(&pool, s, &dy, &w, &mut dx, &mut room);
            weight_gradient(&pool, s, &dy, &x, &mut dw, Write::Overwrite, &mut room);
            [bits(&y), bits(&dx), bits(&dw)]
        };
        assert_eq!(run(1), run(3));

        let half = |x: &[f32]| x.iter().map(|&x| Bf16::narrow(x)).collect::<Vec<_>>();
        let wide = |x: &[Bf16]| x.iter().map(|x| x.widen()).collect::<Vec<_>>();
        let (xh, wh, dyh) = (half(&x), half(&w), half(&dy));
        let pool = Pool::single();
        let mut room = vec![f32::NAN; workspace::<Bf16, Bf16>(s)];
        let mut y = half(&vec![0.0; outputs]);
        forward(&pool, s, &xh, &wh, &mut y, &mut room);
        let mut exact = vec![0.0; outputs];
        forward(&pool, s, &wide(&xh), &wide(&wh), &mut exact, &mut room.clone());
        assert_eq!(y, half(&exact));
        let mut dw = half(&vec![0.0; w.len()]);
        weight_gradient(&pool, s, &dyh, &xh, &mut dw, Write::Overwrite, &mut room);
        let mut exact = vec![0.0; w.len()];
        let mode = Write::Overwrite;
        weight_gradient(&pool, s, &wide(&dyh), &wide(&xh), &mut exact, mode, &mut room);
        assert_eq!(dw, half(&exact));
        let mut dx = half(&vec![0.0; inputs]);
        input_gradient(&pool, s, &dyh, &wh, &mut dx, &mut room);
        let mut exact = vec![0.0; inputs];
        input_gradient(&pool, s, &wide(&dyh), &wide(&wh), &mut exact, &mut room);
        assert_eq!(dx, half(&exact));
    }
}
