//! Linear operators and attention on operands of any element type.
//!
//! The GEMMs themselves work on `f32`. Operands of a 16-bit type are staged: widened into a
//! workspace, a chunk of outputs (or one sequence) at a time, so that the workspace stays small
//! relative to the tensors. Results are rounded once when they are written back. If every operand
//! is `f32` already, there is nothing to stage, and the calls are forwarded directly.

use crate::element::{narrow, widen};
use crate::pool::Pool;
use crate::shape::expect_len;
use crate::{Element, Write, attention, linear};
use std::ops::Range;

/// Number of outputs of a linear operator that are staged at a time.
const OUTPUTS: usize = 512;

/// Number of workspace elements that the linear functions need: one for each input of every row,
/// and those of a chunk of outputs. That is less than a layer saves for its backward pass.
pub fn linear_workspace<T: Element, G: Element>(shape: linear::Shape) -> usize {
    if is_single::<T>() && is_single::<G>() {
        return 0;
    }
    let linear::Shape { rows, inputs, outputs } = shape;
    let chunk = outputs.min(OUTPUTS);
    let rooms = [rows.checked_mul(inputs), rows.checked_mul(chunk), inputs.checked_mul(chunk)];
    let [whole, rows, weights] = rooms.map(|room| room.unwrap_or(usize::MAX));
    whole.saturating_add(rows).saturating_add(weights)
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
    if let (Some(x), Some(w)) = (T::singles(x), T::singles(w))
        && let Some(y) = T::singles_mut(y)
    {
        return linear::forward(pool, shape, x, w, y);
    }
    let linear::Shape { rows, inputs, outputs } = shape;
    expect_len("y", y.len(), &[rows, outputs]);
    let Rooms { whole, rest } = Rooms::cut(shape, workspace);
    widen(x, whole);
    for chunk in chunks(outputs) {
        let part = linear::Shape { outputs: chunk.len(), ..shape };
        let (weights, of_rows) = chunk_rooms(rest, part);
        widen(&w[chunk.start * inputs..chunk.end * inputs], weights);
        linear::forward(pool, part, whole, weights, of_rows);
        for row in 0..rows {
            let place = row * outputs + chunk.start..row * outputs + chunk.end;
            narrow(&of_rows[row * chunk.len()..][..chunk.len()], &mut y[place]);
        }
    }
}

/// [`linear::input_gradient`] for any element type; output chunks are added in order.
pub fn linear_input_gradient<T: Element>(
    pool: &Pool,
    shape: linear::Shape,
    dy: &[T],
    w: &[T],
    dx: &mut [T],
    workspace: &mut [f32],
) {
    if let (Some(dy), Some(w)) = (T::singles(dy), T::singles(w))
        && let Some(dx) = T::singles_mut(dx)
    {
        return linear::input_gradient(pool, shape, dy, w, dx);
    }
    let linear::Shape { rows, inputs, outputs } = shape;
    expect_len("dy", dy.len(), &[rows, outputs]);
    let Rooms { whole, rest } = Rooms::cut(shape, workspace);
    if outputs == 0 {
        whole.fill(0.0);
    }
    for chunk in chunks(outputs) {
        let part = linear::Shape { outputs: chunk.len(), ..shape };
        let (weights, of_rows) = chunk_rooms(rest, part);
        widen(&w[chunk.start * inputs..chunk.end * inputs], weights);
        columns(dy, outputs, &chunk, of_rows);
        let mode = if chunk.start == 0 { Write::Overwrite } else { Write::Accumulate };
        linear::add_input_gradient(pool, part, of_rows, weights, whole, mode);
    }
    narrow(whole, dx);
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
    if let (Some(dy), Some(x)) = (T::singles(dy), T::singles(x))
        && let Some(dw) = G::singles_mut(dw)
    {
        return linear::weight_gradient(pool, shape, dy, x, dw, mode);
    }
    let linear::Shape { rows, inputs, outputs } = shape;
    expect_len("dy", dy.len(), &[rows, outputs]);
    expect_len("dw", dw.len(), &[outputs, inputs]);
    let Rooms { whole, rest } = Rooms::cut(shape, workspace);
    widen(x, whole);
    for chunk in chunks(outputs) {
        let part = linear::Shape { outputs: chunk.len(), ..shape };
        let (sums, of_rows) = chunk_rooms(rest, part);
        columns(dy, outputs, &chunk, of_rows);
        let dw = &mut dw[chunk.start * inputs..chunk.end * inputs];
        match G::singles_mut(dw) {
            Some(dw) => linear::weight_gradient(pool, part, of_rows, whole, dw, mode),
            None => {
                widen(dw, sums);
                linear::weight_gradient(pool, part, of_rows, whole, sums, mode);
                narrow(sums, dw);
            }
        }
    }
}

/// Number of workspace elements that [`attention_forward`] needs on `threads` threads.
pub fn attention_forward_workspace<T: Element>(threads: usize, shape: attention::Shape) -> usize {
    let staged = if is_single::<T>() { 0 } else { sequence(shape).total(1) };
    shape.forward_workspace().saturating_mul(threads).saturating_add(staged)
}

/// Number of workspace elements that [`attention_backward`] needs on `threads` threads.
pub fn attention_backward_workspace<T: Element>(threads: usize, shape: attention::Shape) -> usize {
    let staged = if is_single::<T>() { 0 } else { sequence(shape).total(2) };
    shape.backward_workspace().saturating_mul(threads).saturating_add(staged)
}

/// [`attention::forward`] for any element type.
pub fn attention_forward<T: Element>(
    pool: &Pool,
    shape: attention::Shape,
    qkv: &[T],
    out: &mut [T],
    lse: &mut [f32],
    workspace: &mut [f32],
) {
    expect_len(
        "workspace",
        workspace.len(),
        &[attention_forward_workspace::<T>(pool.threads(), shape)],
    );
    if let Some(qkv) = T::singles(qkv)
        && let Some(out) = T::singles_mut(out)
    {
        return attention::forward(pool, shape, qkv, out, lse, workspace);
    }
    let size = sequence(shape);
    let (wide_qkv, rest) = workspace.split_at_mut(size.qkv);
    let (wide_out, rest) = rest.split_at_mut(size.out);
    let one = attention::Shape { batch: 1, ..shape };
    for sequence in 0..shape.batch {
        widen(&qkv[range(size.qkv, sequence)], wide_qkv);
        let lse = &mut lse[range(size.lse, sequence)];
        attention::forward(pool, one, wide_qkv, wide_out, lse, rest);
        narrow(wide_out, &mut out[range(size.out, sequence)]);
    }
}

/// [`attention::backward`] for any element type.
#[expect(clippy::too_many_arguments, reason = "one name per tensor of the operator")]
pub fn attention_backward<T: Element>(
    pool: &Pool,
    shape: attention::Shape,
    dout: &[T],
    qkv: &[T],
    out: &[T],
    lse: &[f32],
    dqkv: &mut [T],
    workspace: &mut [f32],
) {
    expect_len(
        "workspace",
        workspace.len(),
        &[attention_backward_workspace::<T>(pool.threads(), shape)],
    );
    if let (Some(dout), Some(qkv), Some(out)) = (T::singles(dout), T::singles(qkv), T::singles(out))
        && let Some(dqkv) = T::singles_mut(dqkv)
    {
        return attention::backward(pool, shape, dout, qkv, out, lse, dqkv, workspace);
    }
    let size = sequence(shape);
    let (wide_qkv, rest) = workspace.split_at_mut(size.qkv);
    let (wide_dqkv, rest) = rest.split_at_mut(size.qkv);
    let (wide_out, rest) = rest.split_at_mut(size.out);
    let (wide_dout, rest) = rest.split_at_mut(size.out);
    let one = attention::Shape { batch: 1, ..shape };
    for sequence in 0..shape.batch {
        let (inputs, outputs) = (range(size.qkv, sequence), range(size.out, sequence));
        widen(&qkv[inputs.clone()], wide_qkv);
        widen(&out[outputs.clone()], wide_out);
        widen(&dout[outputs], wide_dout);
        let lse = &lse[range(size.lse, sequence)];
        attention::backward(pool, one, wide_dout, wide_qkv, wide_out, lse, wide_dqkv, rest);
        narrow(wide_dqkv, &mut dqkv[inputs]);
    }
}

/// Number of elements in one sequence's tensors.
#[derive(Clone, Copy)]
struct Sequence {
    qkv: usize,
    out: usize,
    lse: usize,
}

impl Sequence {
    fn total(self, times: usize) -> usize {
        self.qkv.saturating_add(self.out).saturating_mul(times)
    }
}

/// Element range of a sequence, with `each` elements per sequence.
fn range(each: usize, sequence: usize) -> Range<usize> {
    sequence * each..(sequence + 1) * each
}

fn sequence(shape: attention::Shape) -> Sequence {
    let attention::Shape { seq, heads, kv_heads, head_dim, .. } = shape;
    let width = |heads: usize| heads.saturating_mul(head_dim).saturating_mul(seq);
    Sequence {
        qkv: width(heads.saturating_add(kv_heads.saturating_mul(2))),
        out: width(heads),
        lse: heads.saturating_mul(seq),
    }
}

fn is_single<T: Element>() -> bool {
    T::singles(&[]).is_some()
}

fn chunks(outputs: usize) -> impl Iterator<Item = Range<usize>> {
    (0..outputs).step_by(OUTPUTS).map(move |first| first..outputs.min(first + OUTPUTS))
}

/// Gathers a range of columns of every row, in single precision.
fn columns<T: Element>(x: &[T], width: usize, columns: &Range<usize>, y: &mut [f32]) {
    for (row, y) in y.chunks_exact_mut(columns.len()).enumerate() {
        widen(&x[row * width + columns.start..row * width + columns.end], y);
    }
}

/// Staging areas for the operands of a linear operator.
struct Rooms<'a> {
    /// Operand or result that is `inputs` wide.
    whole: &'a mut [f32],
    /// Weights of a chunk, then its columns of the rows.
    rest: &'a mut [f32],
}

impl<'a> Rooms<'a> {
    #[track_caller]
    fn cut(shape: linear::Shape, workspace: &'a mut [f32]) -> Self {
        let chunk = shape.outputs.min(OUTPUTS);
        let (whole, rest) = workspace.split_at_mut(shape.rows * shape.inputs);
        expect_len("workspace", rest.len(), &[chunk, shape.inputs + shape.rows]);
        Self { whole, rest }
    }
}

/// Staging areas of a chunk's weights and of its columns of the rows.
fn chunk_rooms(rest: &mut [f32], chunk: linear::Shape) -> (&mut [f32], &mut [f32]) {
    let (weights, rest) = rest.split_at_mut(chunk.outputs * chunk.inputs);
    (weights, &mut rest[..chunk.outputs * chunk.rows])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_within, random};
    use crate::{Bf16, F16};
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
    fn many_outputs_are_staged_in_chunks() {
        let shape = linear::Shape { rows: 3, inputs: 5, outputs: 2 * OUTPUTS + 7 };
        linear_agrees::<Bf16, Bf16>(shape, 8e-3, 8e-3);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn stored_attention_is_that_of_its_widened_operands(
            batch in 0usize..3, seq in 0usize..9, kv_heads in 1usize..3, head_dim in 1usize..5,
        ) {
            let shape = attention::Shape {
                batch, seq, heads: 2 * kv_heads, kv_heads, head_dim, causal: true,
            };
            let (size, pool) = (sequence(shape), Pool::single());
            let (qkv, _) = stored::<F16>("qkv", batch * size.qkv);
            let (dout, _) = stored::<F16>("dout", batch * size.out);
            let mut out = vec![F16::ZERO; batch * size.out];
            let mut lse = vec![f32::NAN; batch * size.lse];
            let mut room = vec![f32::NAN; attention_forward_workspace::<F16>(1, shape)];
            attention_forward(&pool, shape, &qkv, &mut out, &mut lse, &mut room);
            let mut dqkv = vec![F16::ZERO; batch * size.qkv];
            let mut room = vec![f32::NAN; attention_backward_workspace::<F16>(1, shape)];
            attention_backward(&pool, shape, &dout, &qkv, &out, &lse, &mut dqkv, &mut room);

            let (qkv, dout) = (singles(&qkv), singles(&dout));
            let mut wide_out = vec![f32::NAN; out.len()];
            let mut wide_lse = vec![f32::NAN; lse.len()];
            let mut room = vec![f32::NAN; shape.forward_workspace()];
            attention::forward(&pool, shape, &qkv, &mut wide_out, &mut wide_lse, &mut room);
            prop_assert_eq!(&lse, &wide_lse);
            for (&wide, half) in wide_out.iter().zip(&out) {
                prop_assert_eq!(F16::narrow(wide), *half);
            }
            let mut wide_dqkv = vec![f32::NAN; qkv.len()];
            let mut room = vec![f32::NAN; shape.backward_workspace()];
            let out = singles(&out);
            attention::backward(&pool, shape, &dout, &qkv, &out, &wide_lse, &mut wide_dqkv, &mut room);
            for (&wide, half) in wide_dqkv.iter().zip(&dqkv) {
                prop_assert_eq!(F16::narrow(wide), *half);
            }
        }
    }
}
