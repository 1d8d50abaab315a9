//! The linear operator, `y = x w^T`, and its gradients.

use crate::element::narrow;
use crate::matmul::{Finished, Operand, Product};
use crate::pool::{Cut, Pool, Strips, strips};
use crate::reduce::add;
use crate::shape::expect_len;
use crate::{Element, Write};
use std::ops::Range;

/// Sizes of a linear operator on one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of tokens.
    pub rows: usize,
    /// Width of a row of `x`.
    pub inputs: usize,
    /// Width of a row of `y`.
    pub outputs: usize,
}

/// `y[rows, outputs] = x[rows, inputs] w[outputs, inputs]^T`.
pub fn forward(pool: &Pool, shape: Shape, x: &[f32], w: &[f32], y: &mut [f32]) {
    let Shape { rows, inputs, outputs } = shape;
    expect_len("x", x.len(), &[rows, inputs]);
    expect_len("w", w.len(), &[outputs, inputs]);
    expect_len("y", y.len(), &[rows, outputs]);
    let (x, w) = (Operand::rows(x, inputs), Operand::transposed(w, inputs));
    shape.product().compute(pool, x, w, y, outputs, Write::Overwrite);
}

impl Shape {
    /// Product of the forward pass.
    pub(crate) fn product(self) -> Product {
        Product { height: self.rows, width: self.outputs, depth: self.inputs }
    }

    /// Product of the input gradient.
    pub(crate) fn input_product(self) -> Product {
        Product { height: self.rows, width: self.inputs, depth: self.outputs }
    }

    /// Product of the weight gradient.
    pub(crate) fn weight_product(self) -> Product {
        Product { height: self.outputs, width: self.inputs, depth: self.rows }
    }
}

/// Elementwise function, such as [`crate::activation::gelu_tanh_forward`].
pub type Forward<T = f32> = fn(&[T], &mut [T]);

/// Gradient of such a function: reads `dy` and `x`, writes `dx`.
pub type Gradient<T = f32> = fn(&[T], &[T], &mut [T]);

/// Operations on a GEMM's result, applied in this order while its elements are in the cache.
#[derive(Debug, Default)]
pub struct Epilogue<'a, T = f32> {
    /// Bias added to every row.
    pub bias: Option<&'a [T]>,
    /// Residual of the same shape as the result, added to it.
    pub residual: Option<&'a [T]>,
    /// Function of the result, and the slice its values are written to.
    pub active: Option<(Forward<T>, &'a mut [T])>,
}

/// Function of a part of a result's row: its columns, its range in the result, and its elements.
type Each<'a, O> = &'a (dyn Fn(Range<usize>, Range<usize>, &mut [O]) + Sync);

/// Computes a product whose result has another type than its sums, or the same, and calls `each`
/// for every part of a row.
pub(crate) fn product_and<T: Element, O: Element>(
    pool: &Pool,
    product: Product,
    (a, b): (Operand<'_, T>, Operand<'_, T>),
    y: &mut [O],
    sums: &mut [f32],
    each: Each<'_, O>,
) {
    let width = product.width;
    let at = |done: &Finished, row: usize| {
        row * width + done.columns().start..row * width + done.columns().end
    };
    if let Some(y) = O::singles_mut(y) {
        product.compute_and(pool, a, b, y, width, Write::Overwrite, &|mut done| {
            for row in done.rows() {
                let (columns, at) = (done.columns(), at(&done, row));
                each(columns, at, bytemuck::cast_slice_mut(done.row(row)));
            }
        });
        return;
    }
    let y: Strips<'_, O> = strips(y, 1);
    product.compute_parts(pool, a, b, sums, &|mut done| {
        for row in done.rows() {
            let (columns, at) = (done.columns(), at(&done, row));
            // SAFETY: these are the elements of a part of the result that one thread owns
            // exclusively, in a slice that the callers found as long as the result.
            let y = unsafe { y.piece(at.clone()) };
            narrow(done.row(row), y);
            each(columns, at, y);
        }
    });
}

/// Forward pass with a fused epilogue, for any element type: bitwise equal to running the operators
/// one after the other. `sums` is a workspace of [`crate::mixed_precision::linear_workspace`].
pub fn forward_and<T: Element>(
    pool: &Pool,
    shape: Shape,
    x: &[T],
    w: &[T],
    y: &mut [T],
    after: Epilogue<'_, T>,
    sums: &mut [f32],
) {
    let Shape { rows, inputs, outputs } = shape;
    expect_len("x", x.len(), &[rows, inputs]);
    expect_len("w", w.len(), &[outputs, inputs]);
    expect_len("y", y.len(), &[rows, outputs]);
    let Epilogue { bias, residual, active } = after;
    bias.inspect(|bias| expect_len("bias", bias.len(), &[outputs]));
    residual.inspect(|residual| expect_len("residual", residual.len(), &[rows, outputs]));
    let active = active.map(|(function, active)| {
        expect_len("active", active.len(), &[rows, outputs]);
        (function, strips(active, 1))
    });
    let operands = (Operand::rows(x, inputs), Operand::transposed(w, inputs));
    product_and(pool, shape.product(), operands, y, sums, &|columns, at, y| {
        if let Some(bias) = bias {
            add(&bias[columns], y);
        }
        if let Some(residual) = residual {
            add(&residual[at.clone()], y);
        }
        if let Some((function, active)) = &active {
            // SAFETY: these are the elements of a part of the result that one thread owns
            // exclusively, in a slice as long as the result.
            function(y, unsafe { active.piece(at) });
        }
    });
}

/// `dx[rows, inputs] = dy[rows, outputs] w[outputs, inputs]`.
pub fn input_gradient(pool: &Pool, shape: Shape, dy: &[f32], w: &[f32], dx: &mut [f32]) {
    let Shape { rows, inputs, outputs } = shape;
    expect_len("dy", dy.len(), &[rows, outputs]);
    expect_len("w", w.len(), &[outputs, inputs]);
    expect_len("dx", dx.len(), &[rows, inputs]);
    let (dy, w) = (Operand::rows(dy, outputs), Operand::rows(w, inputs));
    shape.input_product().compute(pool, dy, w, dx, inputs, Write::Overwrite);
}

/// Input gradient fused with the function before the operator, given by its gradient and its input,
/// for any element type: bitwise equal to running the operators one after the other. `sums` is a
/// workspace of [`crate::mixed_precision::linear_workspace`].
pub fn input_gradient_through<T: Element>(
    pool: &Pool,
    shape: Shape,
    dy: &[T],
    w: &[T],
    (gradient, x): (Gradient<T>, &[T]),
    dx: &mut [T],
    sums: &mut [f32],
) {
    // Number of elements copied at a time, since the gradient is written over its own input.
    const SPAN: usize = 64;
    let Shape { rows, inputs, outputs } = shape;
    expect_len("dy", dy.len(), &[rows, outputs]);
    expect_len("w", w.len(), &[outputs, inputs]);
    expect_len("x", x.len(), &[rows, inputs]);
    expect_len("dx", dx.len(), &[rows, inputs]);
    let operands = (Operand::rows(dy, outputs), Operand::rows(w, inputs));
    product_and(pool, shape.input_product(), operands, dx, sums, &|_, at, dx| {
        for (dx, x) in dx.chunks_mut(SPAN).zip(x[at].chunks(SPAN)) {
            let mut copy = [T::ZERO; SPAN];
            let dy = &mut copy[..dx.len()];
            dy.copy_from_slice(dx);
            gradient(dy, x, dx);
        }
    });
}

/// `dw[outputs, inputs] (+)= dy[rows, outputs]^T x[rows, inputs]`.
pub fn weight_gradient(
    pool: &Pool,
    shape: Shape,
    dy: &[f32],
    x: &[f32],
    dw: &mut [f32],
    mode: Write,
) {
    let Shape { rows, inputs, outputs } = shape;
    expect_len("dy", dy.len(), &[rows, outputs]);
    expect_len("x", x.len(), &[rows, inputs]);
    expect_len("dw", dw.len(), &[outputs, inputs]);
    let (dy, x) = (Operand::transposed(dy, outputs), Operand::rows(x, inputs));
    shape.weight_product().compute(pool, dy, x, dw, inputs, mode);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activation::{gelu_tanh_forward, gelu_tanh_input_gradient};
    use crate::reduce::add3;
    use crate::reference::{assert_close, bits, numeric_gradient, random, widen};
    use crate::{Rows, bias};
    use proptest::prelude::*;

    fn reference(s: Shape, x: &[f64], w: &[f64]) -> Vec<f64> {
        let mut y = vec![0.0; s.rows * s.outputs];
        for r in 0..s.rows {
            for o in 0..s.outputs {
                y[r * s.outputs + o] =
                    (0..s.inputs).map(|i| x[r * s.inputs + i] * w[o * s.inputs + i]).sum();
            }
        }
        y
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn forward_and_gradients_agree_with_the_reference(
            rows in 0usize..12, inputs in 0usize..12, outputs in 0usize..12,
        ) {
            let s = Shape { rows, inputs, outputs };
            let (x, w) = (random("x", rows * inputs), random("w", outputs * inputs));
            let dy = random("dy", rows * outputs);
            let (wide_x, wide_w, wide_dy) = (widen(&x), widen(&w), widen(&dy));

            let pool = Pool::single();
            let mut y = vec![f32::NAN; rows * outputs];
            forward(&pool, s, &x, &w, &mut y);
            assert_close(&y, &reference(s, &wide_x, &wide_w));

            let mut dx = vec![f32::NAN; x.len()];
            input_gradient(&pool, s, &dy, &w, &mut dx);
            assert_close(&dx, &numeric_gradient(&wide_x, &wide_dy, |x| reference(s, x, &wide_w)));

            let mut dw = vec![f32::NAN; w.len()];
            weight_gradient(&pool, s, &dy, &x, &mut dw, Write::Overwrite);
            assert_close(&dw, &numeric_gradient(&wide_w, &wide_dy, |w| reference(s, &wide_x, w)));

            let mut sum = random("old", w.len());
            let expected: Vec<f64> =
                sum.iter().zip(&dw).map(|(&a, &b)| f64::from(a) + f64::from(b)).collect();
            weight_gradient(&pool, s, &dy, &x, &mut sum, Write::Accumulate);
            assert_close(&sum, &expected);
        }
    }

    #[test]
    fn accumulating_onto_zeros_gives_the_bits_of_overwriting() {
        let pool = Pool::single();
        for rows in [1, 2, 5, 511, 513, 1500] {
            let s = Shape { rows, inputs: 33, outputs: 18 };
            let (dy, x) = (random("dy", rows * 18), random("x", rows * 33));
            let (mut over, mut onto) = (vec![f32::NAN; 18 * 33], vec![0.0; 18 * 33]);
            weight_gradient(&pool, s, &dy, &x, &mut over, Write::Overwrite);
            weight_gradient(&pool, s, &dy, &x, &mut onto, Write::Accumulate);
            assert_eq!(bits(&over), bits(&onto), "{rows} rows");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn what_follows_gives_the_bits_of_operators_one_after_the_other(
            rows in 0usize..150, inputs in 0usize..9, outputs in 0usize..220, threads in 1usize..3,
            which in any::<(bool, bool, bool)>(),
        ) {
            let s = Shape { rows, inputs, outputs };
            let pool = Pool::new(threads.try_into().unwrap()).unwrap();
            let (x, w) = (random("x", rows * inputs), random("w", outputs * inputs));
            let (b, residual) = (random("b", outputs), random("r", rows * outputs));
            let all = Rows { rows, width: outputs };
            let len = rows * outputs;

            let mut expected = vec![f32::NAN; len];
            forward(&pool, s, &x, &w, &mut expected);
            if which.0 {
                let product = expected.clone();
                bias::forward(all, &product, &b, &mut expected);
            }
            if which.1 {
                let biased = expected.clone();
                add3(&residual, &biased, &mut expected);
            }
            let mut expected_active = vec![f32::NAN; if which.2 { len } else { 0 }];
            if which.2 {
                gelu_tanh_forward(&expected, &mut expected_active);
            }

            let (mut y, mut active) = (vec![f32::NAN; len], vec![f32::NAN; expected_active.len()]);
            let after = Epilogue {
                bias: which.0.then_some(&b[..]),
                residual: which.1.then_some(&residual[..]),
                active: which.2.then_some((gelu_tanh_forward as Forward, &mut active[..])),
            };
            forward_and(&pool, s, &x, &w, &mut y, after, &mut []);
            prop_assert_eq!(bits(&y), bits(&expected));
            prop_assert_eq!(bits(&active), bits(&expected_active));

            let (dy, up) = (random("dy", len), random("up", rows * inputs));
            let (mut through, mut dx) = (vec![f32::NAN; up.len()], vec![f32::NAN; up.len()]);
            input_gradient(&pool, s, &dy, &w, &mut dx);
            let product = dx.clone();
            gelu_tanh_input_gradient(&product, &up, &mut dx);
            let function = (gelu_tanh_input_gradient as Gradient, &up[..]);
            input_gradient_through(&pool, s, &dy, &w, function, &mut through, &mut []);
            prop_assert_eq!(bits(&through), bits(&dx));
        }
    }

    #[test]
    #[should_panic(expected = "`w` holds 5 elements, but its shape [2, 3] needs 6")]
    fn a_weight_of_the_wrong_size_is_refused() {
        let s = Shape { rows: 1, inputs: 3, outputs: 2 };
        forward(&Pool::single(), s, &[0.0; 3], &[0.0; 5], &mut [0.0; 2]);
    }
}
