//! Activation functions of a feed-forward layer, each with its input gradient.
//!
//! All are elementwise, except gated ones, which halve the width of a row. The gradients are computed
//! from the saved input of the forward pass.

use crate::instruction_set::vectorised;
use crate::math::{exp_f64, normal_distribution, sigmoid};
use crate::shape::expect_len;
use crate::{Element, Rows};

/// `y = max(x, 0)`; NaN stays NaN.
pub fn relu_forward<T: Element>(x: &[T], y: &mut [T]) {
    map(
        x,
        y,
        #[inline(always)]
        |x| if x < 0.0 { 0.0 } else { x },
    );
}

/// `dx = dy` where `x` is positive, and zero elsewhere.
pub fn relu_input_gradient<T: Element>(dy: &[T], x: &[T], dx: &mut [T]) {
    map_gradient(
        dy,
        x,
        dx,
        #[inline(always)]
        |x| if x > 0.0 { 1.0 } else { 0.0 },
    );
}

/// `y = max(x, 0)^2` (So et al., "Primer", 2021).
pub fn squared_relu_forward<T: Element>(x: &[T], y: &mut [T]) {
    map(
        x,
        y,
        #[inline(always)]
        |x| if x < 0.0 { 0.0 } else { x * x },
    );
}

/// `dx = 2 max(x, 0) dy`.
pub fn squared_relu_input_gradient<T: Element>(dy: &[T], x: &[T], dx: &mut [T]) {
    map_gradient(
        dy,
        x,
        dx,
        #[inline(always)]
        |x| if x < 0.0 { 0.0 } else { 2.0 * x },
    );
}

/// GELU in the tanh approximation that GPT-2 uses (Hendrycks and Gimpel, 2016, section 2): `y = x /
/// 2 * (1 + tanh(u))` with `u = sqrt(2 / pi) * (x + 0.044715 x^3)`.
///
/// Since `(1 + tanh(u)) / 2` is the logistic function of `2 u`, no tanh is computed, and there is
/// no cancellation for large negative `x`.
pub fn gelu_tanh_forward<T: Element>(x: &[T], y: &mut [T]) {
    map(
        x,
        y,
        #[inline(always)]
        |x| x * sigmoid(TWICE_ROOT * (x + CUBIC * (x * x * x))),
    );
}

/// Input gradient of [`gelu_tanh_forward`].
pub fn gelu_tanh_input_gradient<T: Element>(dy: &[T], x: &[T], dx: &mut [T]) {
    map_gradient(
        dy,
        x,
        dx,
        #[inline(always)]
        |x| gelu_tanh(x).1,
    );
}

/// Value and slope of GELU in the tanh approximation.
#[inline(always)]
fn gelu_tanh(x: f32) -> (f32, f32) {
    let s = sigmoid(TWICE_ROOT * (x + CUBIC * (x * x * x)));
    (x * s, s + x * (s * (1.0 - s)) * (TWICE_ROOT * (1.0 + 3.0 * CUBIC * (x * x))))
}

/// GELU by the error function (Hendrycks and Gimpel, 2016): `y = x` times the normal distribution
/// function of x.
pub fn gelu_erf_forward<T: Element>(x: &[T], y: &mut [T]) {
    map(
        x,
        y,
        #[inline(always)]
        |x| gelu_erf(x).0,
    );
}

/// Input gradient of [`gelu_erf_forward`].
pub fn gelu_erf_input_gradient<T: Element>(dy: &[T], x: &[T], dx: &mut [T]) {
    map_gradient(
        dy,
        x,
        dx,
        #[inline(always)]
        |x| gelu_erf(x).1,
    );
}

/// Value and slope of GELU by the error function.
#[inline(always)]
fn gelu_erf(x: f32) -> (f32, f32) {
    const DENSITY: f64 = 0.398_942_280_401_432_7;
    let x = f64::from(x);
    let share = normal_distribution(x);
    ((x * share) as f32, (share + x * DENSITY * exp_f64(-0.5 * x * x)) as f32)
}

/// Gated GELU with [`gelu_erf_forward`]'s GELU.
pub fn geglu_erf_forward<T: Element>(shape: Rows, x: &[T], y: &mut [T]) {
    gated(
        shape,
        x,
        y,
        #[inline(always)]
        |gate| gelu_erf(gate).0,
    );
}

/// Input gradient of [`geglu_erf_forward`], laid out as that input: `[dgate | dup]`.
pub fn geglu_erf_input_gradient<T: Element>(shape: Rows, dy: &[T], x: &[T], dx: &mut [T]) {
    gated_gradient(shape, (dy, x), dx, gelu_erf);
}

/// Bound of gate and up, and steepness of the gate, in gpt-oss.
const CLAMP: (f32, f32) = (7.0, 1.702);

/// The clamped SwiGLU of gpt-oss: a row of `x` is `[gate | up]`, and `y = gate * sigmoid(1.702
/// gate) * (up + 1)` with gate at most 7 and up within ±7.
pub fn clamped_swiglu_forward<T: Element>(shape: Rows, x: &[T], y: &mut [T]) {
    let Rows { rows, width } = shape;
    expect_len("x", x.len(), &[rows, 2, width]);
    expect_len("y", y.len(), &[rows, width]);
    let (bound, steep) = CLAMP;
    vectorised(
        #[inline(always)]
        || {
            for row in 0..rows {
                let (gate, up) = x[2 * row * width..][..2 * width].split_at(width);
                for (y, (gate, up)) in y[shape.range(row)].iter_mut().zip(gate.iter().zip(up)) {
                    let gate = gate.widen().min(bound);
                    let up = up.widen().clamp(-bound, bound);
                    *y = T::narrow(gate * sigmoid(steep * gate) * (up + 1.0));
                }
            }
        },
    );
}

/// Input gradient of [`clamped_swiglu_forward`], laid out as that input: `[dgate | dup]`.
pub fn clamped_swiglu_input_gradient<T: Element>(shape: Rows, dy: &[T], x: &[T], dx: &mut [T]) {
    let Rows { rows, width } = shape;
    expect_len("dy", dy.len(), &[rows, width]);
    expect_len("x", x.len(), &[rows, 2, width]);
    expect_len("dx", dx.len(), &[rows, 2, width]);
    let (bound, steep) = CLAMP;
    vectorised(
        #[inline(always)]
        || {
            for row in 0..rows {
                let both = 2 * row * width..2 * (row + 1) * width;
                let (gates, ups) = x[both.clone()].split_at(width);
                let (dgate, dup) = dx[both].split_at_mut(width);
                let inputs = dy[shape.range(row)].iter().zip(gates.iter().zip(ups));
                for ((dgate, dup), (dy, (gate, up))) in dgate.iter_mut().zip(dup).zip(inputs) {
                    let (dy, gate, up) = (dy.widen(), gate.widen(), up.widen());
                    let (low, mid) = (gate.min(bound), up.clamp(-bound, bound));
                    let s = sigmoid(steep * low);
                    let slope = s + low * steep * (s * (1.0 - s));
                    let through = if gate <= bound { slope } else { 0.0 };
                    *dgate = T::narrow(dy * (mid + 1.0) * through);
                    *dup = T::narrow(if up == mid { dy * (low * s) } else { 0.0 });
                }
            }
        },
    );
}

/// SwiGLU (Shazeer, "GLU variants improve transformer", 2020, section 2):
/// a row of `x` is `[gate | up]`, each `shape.width` wide, and `y = gate * sigmoid(gate) * up`.
pub fn swiglu_forward<T: Element>(shape: Rows, x: &[T], y: &mut [T]) {
    gated(
        shape,
        x,
        y,
        #[inline(always)]
        |gate| gate * sigmoid(gate),
    );
}

/// Input gradient of [`swiglu_forward`], laid out as that input: `[dgate | dup]`.
pub fn swiglu_input_gradient<T: Element>(shape: Rows, dy: &[T], x: &[T], dx: &mut [T]) {
    gated_gradient(
        shape,
        (dy, x),
        dx,
        #[inline(always)]
        |gate| {
            let s = sigmoid(gate);
            (gate * s, s + gate * (s * (1.0 - s)))
        },
    );
}

/// Gated GELU (Shazeer 2020, section 2), as in Gemma: a row of `x` is `[gate | up]`, and `y =
/// gelu(gate) * up` with [`gelu_tanh_forward`]'s GELU.
pub fn geglu_forward<T: Element>(shape: Rows, x: &[T], y: &mut [T]) {
    gated(
        shape,
        x,
        y,
        #[inline(always)]
        |gate| gelu_tanh(gate).0,
    );
}

/// Input gradient of [`geglu_forward`], laid out as that input: `[dgate | dup]`.
pub fn geglu_input_gradient<T: Element>(shape: Rows, dy: &[T], x: &[T], dx: &mut [T]) {
    gated_gradient(shape, (dy, x), dx, gelu_tanh);
}

/// `y = f(gate) * up` for rows `[gate | up]`.
#[inline(always)]
fn gated<T: Element>(shape: Rows, x: &[T], y: &mut [T], f: impl Fn(f32) -> f32) {
    let Rows { rows, width } = shape;
    expect_len("x", x.len(), &[rows, 2, width]);
    expect_len("y", y.len(), &[rows, width]);
    vectorised(
        #[inline(always)]
        || {
            for row in 0..rows {
                let (gate, up) = x[2 * row * width..][..2 * width].split_at(width);
                for (y, (gate, up)) in y[shape.range(row)].iter_mut().zip(gate.iter().zip(up)) {
                    *y = T::narrow(f(gate.widen()) * up.widen());
                }
            }
        },
    );
}

/// Input gradient of [`gated`]; `f` returns the function's value and slope.
#[inline(always)]
fn gated_gradient<T: Element>(
    shape: Rows,
    (dy, x): (&[T], &[T]),
    dx: &mut [T],
    f: impl Fn(f32) -> (f32, f32),
) {
    let Rows { rows, width } = shape;
    expect_len("dy", dy.len(), &[rows, width]);
    expect_len("x", x.len(), &[rows, 2, width]);
    expect_len("dx", dx.len(), &[rows, 2, width]);
    vectorised(
        #[inline(always)]
        || {
            for row in 0..rows {
                let both = 2 * row * width..2 * (row + 1) * width;
                let (gate, up) = x[both.clone()].split_at(width);
                let (dgate, dup) = dx[both].split_at_mut(width);
                let inputs = dy[shape.range(row)].iter().zip(gate.iter().zip(up));
                for ((dgate, dup), (dy, (gate, up))) in dgate.iter_mut().zip(dup).zip(inputs) {
                    let (dy, up) = (dy.widen(), up.widen());
                    let (value, slope) = f(gate.widen());
                    *dgate = T::narrow(dy * up * slope);
                    *dup = T::narrow(dy * value);
                }
            }
        },
    );
}

/// 2 sqrt(2 / pi).
const TWICE_ROOT: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::SQRT_2;
/// Coefficient of the cubic term in the approximation of GELU.
const CUBIC: f32 = 0.044_715;

#[inline(always)]
fn map<T: Element>(x: &[T], y: &mut [T], f: impl Fn(f32) -> f32) {
    expect_len("y", y.len(), &[x.len()]);
    vectorised(
        #[inline(always)]
        || {
            for (y, x) in y.iter_mut().zip(x) {
                *y = T::narrow(f(x.widen()));
            }
        },
    );
}

#[inline(always)]
fn map_gradient<T: Element>(dy: &[T], x: &[T], dx: &mut [T], slope: impl Fn(f32) -> f32) {
    expect_len("x", x.len(), &[dy.len()]);
    expect_len("dx", dx.len(), &[dy.len()]);
    vectorised(
        #[inline(always)]
        || {
            for (dx, (dy, x)) in dx.iter_mut().zip(dy.iter().zip(x)) {
                *dx = T::narrow(dy.widen() * slope(x.widen()));
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, numeric_gradient, random, widen};

    type Forward = fn(&[f32], &mut [f32]);
    type Gradient = fn(&[f32], &[f32], &mut [f32]);
    type Reference<'a> = &'a dyn Fn(f64) -> f64;

    #[test]
    fn functions_of_one_element_agree_with_the_reference() {
        let gelu = |x: f64| {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + u.tanh())
        };
        let cases: [(Forward, Gradient, Reference); 3] = [
            (relu_forward, relu_input_gradient, &|x| x.max(0.0)),
            (squared_relu_forward, squared_relu_input_gradient, &|x| x.max(0.0).powi(2)),
            (gelu_tanh_forward, gelu_tanh_input_gradient, &gelu),
        ];
        for (forward, gradient, reference) in cases {
            for len in [0, 1, 15, 16, 17, 1000] {
                let x: Vec<f32> = random("x", len).iter().map(|v| 3.0 * v).collect();
                let dy = random("dy", len);
                let (mut y, mut dx) = (vec![f32::NAN; len], vec![f32::NAN; len]);
                forward(&x, &mut y);
                let wide = widen(&x);
                assert_close(&y, &wide.iter().map(|&v| reference(v)).collect::<Vec<_>>());
                gradient(&dy, &x, &mut dx);
                let expected: Vec<f64> = wide
                    .iter()
                    .zip(&dy)
                    .map(|(&v, &d)| {
                        numeric_gradient(&[v], &[f64::from(d)], |v| vec![reference(v[0])])[0]
                    })
                    .collect();
                assert_close(&dx, &expected);
            }
        }
    }

    #[test]
    fn swiglu_agrees_with_the_reference() {
        check_gated(swiglu_forward, swiglu_input_gradient, |x| x / (1.0 + (-x).exp()));
    }

    #[test]
    fn geglu_agrees_with_the_reference() {
        check_gated(geglu_forward, geglu_input_gradient, |x| {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            x / 2.0 * (1.0 + u.tanh())
        });
    }

    /// Checks a gated activation against `f(gate) * up`, and its gradient against finite
    /// differences.
    fn check_gated(
        forward: fn(Rows, &[f32], &mut [f32]),
        gradient: fn(Rows, &[f32], &[f32], &mut [f32]),
        f: fn(f64) -> f64,
    ) {
        for (rows, width) in [(0, 4), (3, 0), (1, 1), (4, 17), (2, 64)] {
            let shape = Rows { rows, width };
            let x: Vec<f32> = random("x", 2 * rows * width).iter().map(|v| 3.0 * v).collect();
            let dy = random("dy", rows * width);
            let reference = |x: &[f64]| {
                let mut y = Vec::new();
                for row in x.chunks((2 * width).max(1)) {
                    y.extend((0..width).map(|i| f(row[i]) * row[width + i]));
                }
                y
            };
            let (mut y, mut dx) = (vec![f32::NAN; rows * width], vec![f32::NAN; x.len()]);
            forward(shape, &x, &mut y);
            assert_close(&y, &reference(&widen(&x)));
            gradient(shape, &dy, &x, &mut dx);
            assert_close(&dx, &numeric_gradient(&widen(&x), &widen(&dy), reference));
        }
    }

    #[test]
    fn extreme_inputs_stay_finite_and_nan_stays_nan() {
        let x = [-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4];
        let (mut y, mut dx) = ([f32::NAN; 7], [f32::NAN; 7]);
        gelu_tanh_forward(&x, &mut y);
        gelu_tanh_input_gradient(&[1.0; 7], &x, &mut dx);
        assert_eq!(y, [0.0, 0.0, 0.0, 0.0, 20.0, 100.0, 1e4]);
        assert_eq!(dx, [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]);
        let mut y = [0.0];
        for forward in [relu_forward, squared_relu_forward, gelu_tanh_forward] {
            forward(&[f32::NAN], &mut y);
            assert!(y[0].is_nan());
        }
    }
}
