//! Scaling and bounding of rows and elements.

use crate::instruction_set::vectorised;
use crate::math::{sigmoid, tanh};
use crate::ordered_sum;
use crate::shape::expect_len;
use crate::{Element, Rows};

/// `y = factor x`. Its own input gradient.
pub fn scale<T: Element>(factor: f32, x: &[T], y: &mut [T]) {
    expect_len("y", y.len(), &[x.len()]);
    vectorised(
        #[inline(always)]
        || x.iter().zip(y).for_each(|(x, y)| *y = T::narrow(factor * x.widen())),
    );
}

/// `y = cap tanh(x / cap)`.
pub fn softcap<T: Element>(cap: f32, x: &[T], y: &mut [T]) {
    expect_len("y", y.len(), &[x.len()]);
    vectorised(
        #[inline(always)]
        || x.iter().zip(y).for_each(|(x, y)| *y = T::narrow(cap * tanh(x.widen() / cap))),
    );
}

/// Input gradient of [`softcap`].
pub fn softcap_input_gradient<T: Element>(cap: f32, dy: &[T], x: &[T], dx: &mut [T]) {
    expect_len("dx", dx.len(), &[x.len()]);
    vectorised(
        #[inline(always)]
        || {
            for (dx, (dy, x)) in dx.iter_mut().zip(dy.iter().zip(x)) {
                let share = tanh(x.widen() / cap);
                *dx = T::narrow(dy.widen() * (1.0 - share * share));
            }
        },
    );
}

/// `y = x` within ±limit.
pub fn clamp<T: Element>(limit: f32, x: &[T], y: &mut [T]) {
    expect_len("y", y.len(), &[x.len()]);
    x.iter().zip(y).for_each(|(x, y)| *y = T::narrow(x.widen().clamp(-limit, limit)));
}

/// Input gradient of [`clamp`].
pub fn clamp_input_gradient<T: Element>(limit: f32, dy: &[T], x: &[T], dx: &mut [T]) {
    expect_len("dx", dx.len(), &[x.len()]);
    for (dx, (dy, x)) in dx.iter_mut().zip(dy.iter().zip(x)) {
        *dx = if x.widen().abs() <= limit { *dy } else { T::ZERO };
    }
}

/// Each row of `x` times its factor: the number in `by`, or the sigmoid of it.
pub fn rows<T: Element, S: Element>(shape: Rows, logits: bool, x: &[T], by: &[S], y: &mut [T]) {
    expect_len("by", by.len(), &[shape.rows]);
    expect_len("y", y.len(), &[shape.rows, shape.width]);
    for (row, by) in by.iter().enumerate() {
        let factor = if logits { sigmoid(by.widen()) } else { by.widen() };
        scale(factor, &x[shape.range(row)], &mut y[shape.range(row)]);
    }
}

/// Gradients of [`rows`] for the rows and for the numbers.
pub fn rows_gradient<T: Element, S: Element>(
    shape: Rows,
    logits: bool,
    dy: &[T],
    x: &[T],
    by: &[S],
    dx: &mut [T],
    dby: &mut [S],
) {
    expect_len("by", by.len(), &[shape.rows]);
    expect_len("dby", dby.len(), &[shape.rows]);
    for (row, (by, dby)) in by.iter().zip(dby).enumerate() {
        let (dy, x) = (&dy[shape.range(row)], &x[shape.range(row)]);
        let by = by.widen();
        let (factor, slope) = match logits {
            true => {
                let share = sigmoid(by);
                (share, share * (1.0 - share))
            }
            false => (by, 1.0),
        };
        scale(factor, dy, &mut dx[shape.range(row)]);
        *dby = S::narrow(slope * ordered_sum::sum([dy, x], |[dy, x]| dy * x));
    }
}

/// Queries of rows `[queries | rest]` times `1 + slope ln(1 + floor((position + 1) / floor))` (Llama
/// 4's temperature of attention). Its own input gradient.
pub fn temperature<T: Element>(
    shape: Rows,
    queries: usize,
    (floor, slope): (f64, f64),
    positions: &[u32],
    x: &[T],
    y: &mut [T],
) {
    expect_len("y", y.len(), &[shape.rows, shape.width]);
    for (row, position) in (0..shape.rows).zip(positions.iter().cycle()) {
        let steps = ((f64::from(*position) + 1.0) / floor).floor();
        let factor = (1.0 + slope * (1.0 + steps).ln()) as f32;
        let (x, y) = (&x[shape.range(row)], &mut y[shape.range(row)]);
        scale(factor, &x[..queries], &mut y[..queries]);
        y[queries..].copy_from_slice(&x[queries..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, numeric_gradient, random, widen};

    #[test]
    fn bounds_and_their_gradients_agree_with_the_reference() {
        let x: Vec<f32> = random("x", 40).iter().map(|x| 4.0 * x).collect();
        let dy = random("dy", 40);
        let (mut y, mut dx) = (vec![0.0; 40], vec![0.0; 40]);
        let capped = |x: &[f64]| x.iter().map(|x| 3.0 * (x / 3.0).tanh()).collect::<Vec<_>>();
        softcap(3.0, &x, &mut y);
        softcap_input_gradient(3.0, &dy, &x, &mut dx);
        assert_close(&y, &capped(&widen(&x)));
        assert_close(&dx, &numeric_gradient(&widen(&x), &widen(&dy), capped));
        let clipped = |x: &[f64]| x.iter().map(|x| x.clamp(-1.0, 1.0)).collect::<Vec<_>>();
        clamp(1.0, &x, &mut y);
        clamp_input_gradient(1.0, &dy, &x, &mut dx);
        assert_close(&y, &clipped(&widen(&x)));
        assert_close(&dx, &numeric_gradient(&widen(&x), &widen(&dy), clipped));
    }

    #[test]
    fn scaled_rows_and_their_gradients_agree_with_the_reference() {
        let shape = Rows { rows: 4, width: 5 };
        let (x, by, dy) = (random("x", 20), random("by", 4), random("dy", 20));
        for logits in [false, true] {
            let both: Vec<f32> = x.iter().chain(&by).copied().collect();
            let scaled = |both: &[f64]| {
                let factor = |by: f64| if logits { 1.0 / (1.0 + (-by).exp()) } else { by };
                (0..20).map(|at| both[at] * factor(both[20 + at / 5])).collect::<Vec<_>>()
            };
            let (mut y, mut dx, mut dby) = (vec![0.0; 20], vec![0.0; 20], vec![0.0; 4]);
            rows(shape, logits, &x, &by, &mut y);
            rows_gradient(shape, logits, &dy, &x, &by, &mut dx, &mut dby);
            assert_close(&y, &scaled(&widen(&both)));
            let expected = numeric_gradient(&widen(&both), &widen(&dy), scaled);
            assert_close(&dx, &expected[..20]);
            assert_close(&dby, &expected[20..]);
        }
    }

    #[test]
    fn queries_grow_with_the_logarithm_of_the_position() {
        let (shape, mut y) = (Rows { rows: 3, width: 2 }, [0.0f32; 6]);
        temperature(shape, 1, (2.0, 0.5), &[0, 1, 5], &[1.0; 6], &mut y);
        let grown = |steps: f64| (1.0 + 0.5 * (1.0 + steps).ln()) as f32;
        assert_eq!(y, [1.0, 1.0, grown(1.0), 1.0, grown(3.0), 1.0]);
    }
}
