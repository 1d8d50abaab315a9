//! Rotary position embedding (Su et al., "RoFormer", 2021, section 3.2) on the fused output of the
//! query, key and value projections.
//!
//! A row is `[query heads | key heads | value heads]`; queries and keys are rotated, values are
//! left unchanged. Within a head of width d, element i is paired with element i + d/2, as in
//! Hugging Face's Llama, so that its checkpoints load unchanged. The pair is rotated by `position *
//! theta^(-2i/d)`. The angle is reduced in double precision, so that it stays accurate at long
//! contexts, unlike a rotation computed in single precision.

use crate::Element;
use crate::instruction_set::vectorised;
use crate::math::{exp_f64, ln_f64, sin_cos_cycles};
use crate::shape::expect_len;

/// Layout of a fused row, and the base of the rotation frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotation<'a> {
    /// Number of query heads per row.
    pub heads: usize,
    /// Number of key heads per row, equal to the number of value heads.
    pub kv_heads: usize,
    /// Width of one head, an even number.
    pub head_dim: usize,
    /// The base of the frequencies: 10 000 in the paper, 500 000 in Llama 3.
    pub theta: f64,
    /// Number of leading elements of a head that are rotated, an even number; 0 for all.
    pub dims: usize,
    /// Factor of the rotated elements.
    pub magnitude: f32,
    /// Frequency of each pair in radians per position; empty for those of the base.
    pub frequencies: &'a [f64],
}

/// Rotates the queries and keys of `qkv` into `out`.
///
/// `positions` holds the position of each row of one sequence; `qkv` holds any number of sequences
/// of that length, one after the other.
pub fn forward<T: Element>(rotation: Rotation<'_>, positions: &[u32], qkv: &[T], out: &mut [T]) {
    expect_len("out", out.len(), &[qkv.len()]);
    out.copy_from_slice(qkv);
    forward_in_place(rotation, positions, out);
}

/// Rotates the queries and keys of `qkv` in place.
pub fn forward_in_place<T: Element>(rotation: Rotation<'_>, positions: &[u32], qkv: &mut [T]) {
    rotate(rotation, positions, qkv, 1.0);
}

/// Computes the input gradient; the transpose of a rotation is the inverse rotation.
pub fn input_gradient<T: Element>(
    rotation: Rotation<'_>,
    positions: &[u32],
    dout: &[T],
    dqkv: &mut [T],
) {
    expect_len("dqkv", dqkv.len(), &[dout.len()]);
    dqkv.copy_from_slice(dout);
    input_gradient_in_place(rotation, positions, dqkv);
}

/// Computes the input gradient in place of the output gradient.
pub fn input_gradient_in_place<T: Element>(
    rotation: Rotation<'_>,
    positions: &[u32],
    dqkv: &mut [T],
) {
    rotate(rotation, positions, dqkv, -1.0);
}

/// Number of pairs of a head rotated per pass: their angles fit on the stack.
const PAIRS: usize = 64;

fn rotate<T: Element>(rotation: Rotation<'_>, positions: &[u32], qkv: &mut [T], direction: f32) {
    let Rotation { heads, kv_heads, head_dim, theta, dims, magnitude, frequencies: given } =
        rotation;
    let dims = if dims == 0 { head_dim } else { dims };
    assert!(dims.is_multiple_of(2), "`dims` is {dims}, but elements turn in pairs");
    let (seq, width) = (positions.len(), (heads + 2 * kv_heads) * head_dim);
    let batch = qkv.len().checked_div(seq * width).unwrap_or(0);
    expect_len("qkv", qkv.len(), &[batch, seq, width]);
    let (half, rotated) = (dims / 2, (heads + kv_heads) * head_dim);
    let turn = direction * magnitude;
    vectorised(
        #[inline(always)]
        || {
            for first in (0..half).step_by(PAIRS) {
                let pairs = first..half.min(first + PAIRS);
                let count = pairs.len();
                let mut frequencies = [0.0f64; PAIRS];
                for (frequency, pair) in frequencies.iter_mut().zip(pairs.clone()) {
                    let exponent = -2.0 * pair as f64 / dims as f64;
                    *frequency = match given.get(pair) {
                        Some(radians) => radians / std::f64::consts::TAU,
                        None => exp_f64(exponent * ln_f64(theta)) / std::f64::consts::TAU,
                    };
                }
                for (row, &position) in positions.iter().enumerate() {
                    let (mut sin, mut cos) = ([0.0f32; PAIRS], [0.0f32; PAIRS]);
                    for i in 0..PAIRS {
                        let (s, c) = sin_cos_cycles(f64::from(position) * frequencies[i]);
                        sin[i] = s as f32 * turn;
                        cos[i] = c as f32 * magnitude;
                    }
                    for sequence in 0..batch {
                        let start = (sequence * seq + row) * width;
                        for head in qkv[start..start + rotated].chunks_exact_mut(head_dim) {
                            let (low, high) = head[..dims].split_at_mut(half);
                            rotate_pairs(
                                &mut low[pairs.clone()],
                                &mut high[pairs.clone()],
                                &sin[..count],
                                &cos[..count],
                            );
                        }
                    }
                }
            }
        },
    );
}

#[inline(always)]
fn rotate_pairs<T: Element>(low: &mut [T], high: &mut [T], sin: &[f32], cos: &[f32]) {
    for ((low, high), (&sin, &cos)) in low.iter_mut().zip(high).zip(sin.iter().zip(cos)) {
        let (x, y) = (low.widen(), high.widen());
        *low = T::narrow(x * cos - y * sin);
        *high = T::narrow(y * cos + x * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, assert_within, numeric_gradient, random, widen};

    fn reference(r: Rotation<'_>, positions: &[u32], x: &[f64]) -> Vec<f64> {
        let dims = if r.dims == 0 { r.head_dim } else { r.dims };
        let (half, width) = (dims / 2, (r.heads + 2 * r.kv_heads) * r.head_dim);
        let mut y = x.to_vec();
        for (row, y) in y.chunks_mut(width).enumerate() {
            let position = f64::from(positions[row % positions.len()]);
            for head in y[..(r.heads + r.kv_heads) * r.head_dim].chunks_mut(r.head_dim) {
                let old = head.to_vec();
                for i in 0..half {
                    let plain = r.theta.powf(-2.0 * i as f64 / dims as f64);
                    let angle = position * r.frequencies.get(i).copied().unwrap_or(plain);
                    let (sin, cos) = angle.sin_cos();
                    let (sin, cos) = (sin * f64::from(r.magnitude), cos * f64::from(r.magnitude));
                    head[i] = old[i] * cos - old[i + half] * sin;
                    head[i + half] = old[i + half] * cos + old[i] * sin;
                }
            }
        }
        y
    }

    /// An unscaled rotation of whole heads.
    fn rotation_of(head_dim: usize) -> Rotation<'static> {
        let (dims, magnitude, frequencies) = (0, 1.0, &[][..]);
        Rotation { heads: 1, kv_heads: 1, head_dim, theta: 10_000.0, dims, magnitude, frequencies }
    }

    fn cases() -> Vec<(Rotation<'static>, Vec<u32>, usize)> {
        let rotation =
            |heads, kv_heads, head_dim| Rotation { heads, kv_heads, ..rotation_of(head_dim) };
        vec![
            (rotation(1, 1, 2), vec![0], 1),
            (rotation(4, 2, 6), vec![0, 1, 2, 3, 4], 2),
            (rotation(2, 2, 64), vec![100_000, 7, 131_071], 1),
            (Rotation { theta: 500_000.0, ..rotation(1, 1, 256) }, vec![3, 8_191], 2),
            (rotation(2, 1, 4), vec![], 0),
            (Rotation { dims: 4, magnitude: 1.5, ..rotation(2, 1, 6) }, vec![0, 9], 2),
            (Rotation { frequencies: &[0.5, 0.01], ..rotation(1, 1, 4) }, vec![3, 8], 1),
        ]
    }

    #[test]
    fn forward_and_gradient_agree_with_the_reference() {
        for (r, positions, batch) in cases() {
            let len = batch * positions.len() * (r.heads + 2 * r.kv_heads) * r.head_dim;
            let x = random("x", len);
            let mut y = vec![f32::NAN; len];
            forward(r, &positions, &x, &mut y);
            assert_close(&y, &reference(r, &positions, &widen(&x)));

            let dy = random("dy", len);
            let mut dx = vec![f32::NAN; len];
            input_gradient(r, &positions, &dy, &mut dx);
            if len < 300 {
                let wide = widen(&dy);
                let f = |x: &[f64]| reference(r, &positions, x);
                assert_close(&dx, &numeric_gradient(&widen(&x), &wide, f));
            }
            if r.magnitude == 1.0 {
                forward_in_place(r, &positions, &mut dx);
                assert_within(&dx, &widen(&dy), 1e-6);
            }
        }
    }

    #[test]
    fn values_and_position_zero_are_untouched() {
        let r = Rotation { heads: 2, kv_heads: 1, head_dim: 8, ..rotation_of(8) };
        let x = random("x", 2 * 32);
        let mut y = x.clone();
        forward_in_place(r, &[0, 5], &mut y);
        assert_eq!(y[..32], x[..32]);
        assert_eq!(y[32 + 24..], x[32 + 24..]);
        assert_ne!(y[32..32 + 8], x[32..32 + 8]);
    }

    #[test]
    #[should_panic(expected = "`dims` is 3")]
    fn an_odd_head_is_refused() {
        let r = Rotation { heads: 1, kv_heads: 1, head_dim: 3, ..rotation_of(3) };
        forward_in_place(r, &[0], &mut [0.0; 9]);
    }
}
