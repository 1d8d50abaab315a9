//! The linear operator, `y = x w^T`, and its gradients.

use crate::Write;
use crate::matmul::{Operand, Product};
use crate::pool::Pool;
use crate::shape::expect_len;

/// The sizes of a linear operator on one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// How many tokens pass through.
    pub rows: usize,
    /// The width of a row of `x`.
    pub inputs: usize,
    /// The width of a row of `y`.
    pub outputs: usize,
}

/// `y[rows, outputs] = x[rows, inputs] w[outputs, inputs]^T`.
pub fn forward(pool: &Pool, shape: Shape, x: &[f32], w: &[f32], y: &mut [f32]) {
    let Shape { rows, inputs, outputs } = shape;
    expect_len("x", x.len(), &[rows, inputs]);
    expect_len("w", w.len(), &[outputs, inputs]);
    expect_len("y", y.len(), &[rows, outputs]);
    Product { height: rows, width: outputs, depth: inputs }.compute(
        pool,
        Operand::rows(x, inputs),
        Operand::transposed(w, inputs),
        y,
        outputs,
        Write::Overwrite,
    );
}

/// `dx[rows, inputs] = dy[rows, outputs] w[outputs, inputs]`.
pub fn input_gradient(pool: &Pool, shape: Shape, dy: &[f32], w: &[f32], dx: &mut [f32]) {
    let Shape { rows, inputs, outputs } = shape;
    expect_len("dy", dy.len(), &[rows, outputs]);
    expect_len("w", w.len(), &[outputs, inputs]);
    expect_len("dx", dx.len(), &[rows, inputs]);
    Product { height: rows, width: inputs, depth: outputs }.compute(
        pool,
        Operand::rows(dy, outputs),
        Operand::rows(w, inputs),
        dx,
        inputs,
        Write::Overwrite,
    );
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
    Product { height: outputs, width: inputs, depth: rows }.compute(
        pool,
        Operand::transposed(dy, outputs),
        Operand::rows(x, inputs),
        dw,
        inputs,
        mode,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, bits, numeric_gradient, random, widen};
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

    #[test]
    #[should_panic(expected = "`w` holds 5 elements, but its shape [2, 3] needs 6")]
    fn a_weight_of_the_wrong_size_is_refused() {
        let s = Shape { rows: 1, inputs: 3, outputs: 2 };
        forward(&Pool::single(), s, &[0.0; 3], &[0.0; 5], &mut [0.0; 2]);
    }
}
