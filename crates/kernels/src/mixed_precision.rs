//! Linear operators on operands of any element type.
//!
//! GEMMs read operands of 16 bits as they are and sum in `f32`; results are rounded once when they
//! are written.

use crate::instruction_set::vectorised;
use crate::linear::product_and;
use crate::matmul::Operand;
use crate::pool::{Cut, Pool, strips};
use crate::shape::expect_len;
use crate::{Element, Write, linear};

/// Number of workspace elements that the linear functions need: sums of the deepest products.
pub fn linear_workspace<T: Element, G: Element>(shape: linear::Shape) -> usize {
    let (mut own, mut of_weights) = (0, 0);
    if !is_single::<T>() {
        own = shape.product().sums::<T>().max(shape.input_product().sums::<T>());
    }
    if !is_single::<G>() {
        of_weights = shape.weight_product().sums::<T>();
    }
    own.max(of_weights)
}

/// [`linear::forward`] for any element type.
pub fn linear_forward<T: Element>(
    pool: &Pool,
    shape: linear::Shape,
    x: &[T],
    w: &[T],
    y: &mut [T],
    workspace: &mut [f32],
) {
    let nothing = linear::Epilogue { bias: None, residual: None, active: None };
    linear::forward_and(pool, shape, x, w, y, nothing, workspace);
}

/// [`linear::input_gradient`] for any element type.
pub fn linear_input_gradient<T: Element>(
    pool: &Pool,
    shape: linear::Shape,
    dy: &[T],
    w: &[T],
    dx: &mut [T],
    workspace: &mut [f32],
) {
    let linear::Shape { rows, inputs, outputs } = shape;
    expect_len("dy", dy.len(), &[rows, outputs]);
    expect_len("w", w.len(), &[outputs, inputs]);
    expect_len("dx", dx.len(), &[rows, inputs]);
    let operands = (Operand::rows(dy, outputs), Operand::rows(w, inputs));
    product_and(pool, shape.input_product(), operands, dx, workspace, &|_, _, _| {});
}

/// [`linear::weight_gradient`] for any element type.
pub fn linear_weight_gradient<T: Element, G: Element>(
    pool: &Pool,
    shape: linear::Shape,
    dy: &[T],
    x: &[T],
    dw: &mut [G],
    mode: Write,
    workspace: &mut [f32],
) {
    let linear::Shape { rows, inputs, outputs } = shape;
    expect_len("dy", dy.len(), &[rows, outputs]);
    expect_len("x", x.len(), &[rows, inputs]);
    expect_len("dw", dw.len(), &[outputs, inputs]);
    let (dy, x) = (Operand::transposed(dy, outputs), Operand::rows(x, inputs));
    let product = shape.weight_product();
    if let Some(dw) = G::singles_mut(dw) {
        return product.compute(pool, dy, x, dw, inputs, mode);
    }
    let dw = strips(dw, 1);
    product.compute_parts(pool, dy, x, workspace, &|mut done| {
        for row in done.rows() {
            let at = row * inputs + done.columns().start..row * inputs + done.columns().end;
            // SAFETY: these are the elements of a part of the result that one thread owns
            // exclusively, in a slice as long as the result.
            let dw = unsafe { dw.piece(at) };
            let sums = done.row(row);
            vectorised(
                #[inline(always)]
                || {
                    for (dw, &sum) in dw.iter_mut().zip(&*sums) {
                        *dw = G::narrow(mode.start(*dw) + sum);
                    }
                },
            );
        }
    });
}

fn is_single<T: Element>() -> bool {
    T::singles(&[]).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_within, random};
    use crate::{Bf16, F16, attention};
    use proptest::prelude::*;

    /// Random numbers in a type, and the same numbers in double precision.
    fn stored<T: Element>(name: &str, len: usize) -> (Vec<T>, Vec<f64>) {
        let x: Vec<T> = random(name, len).into_iter().map(T::narrow).collect();
        let wide = x.iter().map(|x| f64::from(x.widen())).collect();
        (x, wide)
    }

    fn singles<T: Element>(x: &[T]) -> Vec<f32> {
        x.iter().map(|x| x.widen()).collect()
    }

    /// `tolerance` is a few units in the last place of `T`; sums are exact to single precision.
    fn linear_agrees<T: Element, G: Element>(shape: linear::Shape, tolerance: f64, of_g: f64) {
        let (linear::Shape { rows, inputs, outputs }, pool) = (shape, Pool::single());
        let (x, wide_x) = stored::<T>("x", rows * inputs);
        let (w, wide_w) = stored::<T>("w", outputs * inputs);
        let (dy, wide_dy) = stored::<T>("dy", rows * outputs);
        let mut workspace = vec![f32::NAN; linear_workspace::<T, G>(shape)];
        let product = |m: usize, n: usize, k: usize, f: &dyn Fn(usize, usize, usize) -> f64| {
            let cell = |i: usize| (0..k).map(|l| f(i / n, i % n, l)).sum::<f64>();
            (0..m * n).map(cell).collect::<Vec<_>>()
        };

        let mut y = vec![T::ZERO; rows * outputs];
        linear_forward(&pool, shape, &x, &w, &mut y, &mut workspace);
        let wanted = product(rows, outputs, inputs, &|r, o, i| {
            wide_x[r * inputs + i] * wide_w[o * inputs + i]
        });
        assert_within(&singles(&y), &wanted, tolerance);

        let mut dx = vec![T::ZERO; rows * inputs];
        linear_input_gradient(&pool, shape, &dy, &w, &mut dx, &mut workspace);
        let wanted = product(rows, inputs, outputs, &|r, i, o| {
            wide_dy[r * outputs + o] * wide_w[o * inputs + i]
        });
        assert_within(&singles(&dx), &wanted, tolerance);

        let mut dw = vec![G::narrow(7.0); outputs * inputs];
        linear_weight_gradient(&pool, shape, &dy, &x, &mut dw, Write::Overwrite, &mut workspace);
        let wanted = product(outputs, inputs, rows, &|o, i, r| {
            wide_dy[r * outputs + o] * wide_x[r * inputs + i]
        });
        assert_within(&singles(&dw), &wanted, of_g);
        linear_weight_gradient(&pool, shape, &dy, &x, &mut dw, Write::Accumulate, &mut workspace);
        let twice: Vec<f64> = wanted.iter().map(|v| 2.0 * v).collect();
        assert_within(&singles(&dw), &twice, of_g);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn stored_linear_operators_agree_with_the_reference(
            rows in 0usize..12, inputs in 0usize..12, outputs in 0usize..12,
        ) {
            let shape = linear::Shape { rows, inputs, outputs };
            linear_agrees::<f32, f32>(shape, 1e-5, 1e-5);
            linear_agrees::<Bf16, f32>(shape, 8e-3, 1e-5);
            linear_agrees::<Bf16, Bf16>(shape, 8e-3, 8e-3);
            linear_agrees::<F16, f32>(shape, 1e-3, 1e-5);
            linear_agrees::<f32, Bf16>(shape, 1e-5, 8e-3);
        }
    }

    #[test]
    fn deep_products_are_rounded_once() {
        let shape = linear::Shape { rows: 3, inputs: 5, outputs: 1031 };
        linear_agrees::<Bf16, Bf16>(shape, 8e-3, 8e-3);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn stored_attention_is_near_that_of_its_widened_operands(
            batch in 0usize..3, seq in 0usize..90, kv_heads in 1usize..3, head_dim in 1usize..40,
        ) {
            let shape = attention::Shape {
                batch, seq, heads: 2 * kv_heads, kv_heads, head_dim,
                scores: attention::Scores::default(),
            };
            attention_agrees::<F16>(shape, 4e-3);
            attention_agrees::<Bf16>(shape, 3e-2);
        }
    }

    /// `tolerance` is a few units in the last place of `T`.
    fn attention_agrees<T: Element>(shape: attention::Shape, tolerance: f64) {
        let attention::Shape { batch, seq, heads, kv_heads, head_dim, .. } = shape;
        let (rows, pool) = (batch * seq, Pool::single());
        let (qkv, _) = stored::<T>("qkv", rows * (heads + 2 * kv_heads) * head_dim);
        let (dout, _) = stored::<T>("dout", rows * heads * head_dim);
        let mut out = vec![T::ZERO; dout.len()];
        let mut lse = vec![f32::NAN; rows * heads];
        let mut room = vec![f32::NAN; shape.forward_workspace::<T>()];
        attention::forward(&pool, shape, &qkv, None, &mut out, &mut lse, &mut room);
        let mut dqkv = vec![T::ZERO; qkv.len()];
        let mut room = vec![f32::NAN; shape.backward_workspace::<T>()];
        attention::backward(&pool, shape, &dout, &qkv, &out, &lse, &mut dqkv, &mut room);

        let (qkv, dout) = (singles(&qkv), singles(&dout));
        let mut wide_out = vec![f32::NAN; out.len()];
        let mut wide_lse = vec![f32::NAN; lse.len()];
        let mut room = vec![f32::NAN; shape.forward_workspace::<f32>()];
        attention::forward(&pool, shape, &qkv, None, &mut wide_out, &mut wide_lse, &mut room);
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        assert_within(&lse, &wide(&wide_lse), 1e-5);
        assert_within(&singles(&out), &wide(&wide_out), tolerance);
        let mut wide_dqkv = vec![f32::NAN; qkv.len()];
        let mut room = vec![f32::NAN; shape.backward_workspace::<f32>()];
        let out = singles(&out);
        attention::backward(&pool, shape, &dout, &qkv, &out, &lse, &mut wide_dqkv, &mut room);
        assert_within(&singles(&dqkv), &wide(&wide_dqkv), tolerance);
    }
}
