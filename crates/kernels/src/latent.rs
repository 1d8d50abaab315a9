//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, eq. 9 to 19): assembles queries,
//! keys and values from their projections, and extracts the values again.
//!
//! A head's queries and keys have `head_dim` elements, of which the last `rope` are rotated by
//! position; those of the keys are one vector for all heads. Values have `v_dim` elements and are
//! zero-padded to the width of keys, so that attention is the same as everywhere else. Within the
//! rotated part, element i is paired with element i + rope/2, as in [`crate::rope`].

use crate::Element;
use crate::math::{exp_f64, ln_f64, sin_cos_cycles};
use crate::shape::expect_len;

/// Sizes of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape<'a> {
    /// Number of heads.
    pub heads: usize,
    /// Width of a head's queries and keys.
    pub head_dim: usize,
    /// Number of rotated elements among them.
    pub rope: usize,
    /// Width of a head's values.
    pub v_dim: usize,
    /// Base of the rotation frequencies.
    pub theta: f64,
    /// Factor of the rotated elements.
    pub magnitude: f32,
    /// Frequency of each pair in radians per position; empty for those of the base.
    pub frequencies: &'a [f64],
}

impl Shape<'_> {
    /// Width of all queries, of all keys, and of all padded values.
    pub fn width(self) -> usize {
        self.heads * self.head_dim
    }

    fn plain(self) -> usize {
        self.head_dim - self.rope
    }

    /// Width of the unrotated keys together with the values.
    fn kv_width(self) -> usize {
        self.heads * (self.plain() + self.v_dim)
    }

    /// Rotates `rope` elements; `direction` is 1, or -1 for the inverse.
    fn rotate<T: Element>(self, position: u32, direction: f64, x: &mut [T]) {
        let half = self.rope / 2;
        for pair in 0..half {
            let exponent = -2.0 * pair as f64 / self.rope as f64;
            let frequency = match self.frequencies.get(pair) {
                Some(radians) => radians / std::f64::consts::TAU,
                None => exp_f64(exponent * ln_f64(self.theta)) / std::f64::consts::TAU,
            };
            let (sin, cos) = sin_cos_cycles(f64::from(position) * frequency);
            let (sin, cos) =
                ((sin * direction) as f32 * self.magnitude, cos as f32 * self.magnitude);
            let (low, high) = (x[pair].widen(), x[pair + half].widen());
            x[pair] = T::narrow(low * cos - high * sin);
            x[pair + half] = T::narrow(high * cos + low * sin);
        }
    }
}

/// `qkv = [queries | keys | values]` of one row from its queries, `[unrotated keys, values]` by
/// head, and the rotated part of the keys.
pub fn heads<T: Element>(
    shape: Shape<'_>,
    position: u32,
    q: &[T],
    kv: &[T],
    turned: &[T],
    qkv: &mut [T],
) {
    expect_len("q", q.len(), &[shape.width()]);
    expect_len("kv", kv.len(), &[shape.kv_width()]);
    expect_len("qkv", qkv.len(), &[3, shape.width()]);
    let (plain, dim) = (shape.plain(), shape.head_dim);
    let (queries, rest) = qkv.split_at_mut(shape.width());
    let (keys, values) = rest.split_at_mut(shape.width());
    queries.copy_from_slice(q);
    let own = kv.chunks_exact(plain + shape.v_dim);
    let heads = queries.chunks_exact_mut(dim).zip(keys.chunks_exact_mut(dim));
    for (((query, key), value), kv) in heads.zip(values.chunks_exact_mut(dim)).zip(own) {
        shape.rotate(position, 1.0, &mut query[plain..]);
        key[..plain].copy_from_slice(&kv[..plain]);
        key[plain..].copy_from_slice(turned);
        shape.rotate(position, 1.0, &mut key[plain..]);
        value[..shape.v_dim].copy_from_slice(&kv[plain..]);
        value[shape.v_dim..].fill(T::ZERO);
    }
}

/// Input gradients of [`heads`].
pub fn heads_gradient<T: Element>(
    shape: Shape<'_>,
    position: u32,
    dqkv: &[T],
    dq: &mut [T],
    dkv: &mut [T],
    dturned: &mut [T],
) {
    expect_len("dqkv", dqkv.len(), &[3, shape.width()]);
    expect_len("dkv", dkv.len(), &[shape.kv_width()]);
    let (plain, dim) = (shape.plain(), shape.head_dim);
    let (queries, rest) = dqkv.split_at(shape.width());
    let (keys, values) = rest.split_at(shape.width());
    dq.copy_from_slice(queries);
    dq.chunks_exact_mut(dim).for_each(|query| shape.rotate(position, -1.0, &mut query[plain..]));
    let own = dkv.chunks_exact_mut(plain + shape.v_dim);
    for ((key, value), dkv) in keys.chunks_exact(dim).zip(values.chunks_exact(dim)).zip(own) {
        dkv[..plain].copy_from_slice(&key[..plain]);
        dkv[plain..].copy_from_slice(&value[..shape.v_dim]);
    }
    for (at, dturned) in dturned.iter_mut().enumerate() {
        let of_heads = keys.chunks_exact(dim).map(|key| key[plain + at].widen());
        *dturned = T::narrow(of_heads.sum());
    }
    shape.rotate(position, -1.0, dturned);
}

/// Values of one row without their padding.
pub fn values<T: Element>(shape: Shape<'_>, padded: &[T], y: &mut [T]) {
    expect_len("padded", padded.len(), &[shape.width()]);
    let heads = padded.chunks_exact(shape.head_dim).zip(y.chunks_exact_mut(shape.v_dim));
    heads.for_each(|(padded, y)| y.copy_from_slice(&padded[..shape.v_dim]));
}

/// Gradient of padded values; that of the padding is zero.
pub fn values_gradient<T: Element>(shape: Shape<'_>, dy: &[T], dpadded: &mut [T]) {
    expect_len("dpadded", dpadded.len(), &[shape.width()]);
    let heads = dpadded.chunks_exact_mut(shape.head_dim).zip(dy.chunks_exact(shape.v_dim));
    for (dpadded, dy) in heads {
        dpadded[..shape.v_dim].copy_from_slice(dy);
        dpadded[shape.v_dim..].fill(T::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, numeric_gradient, random, widen};

    const SHAPE: Shape<'static> = Shape {
        heads: 2,
        head_dim: 7,
        rope: 4,
        v_dim: 5,
        theta: 10_000.0,
        magnitude: 1.0,
        frequencies: &[],
    };

    /// Reference; `x` holds queries, keys with values, and rotated key elements in a row.
    fn reference(position: f64, x: &[f64]) -> Vec<f64> {
        let (q, rest) = x.split_at(14);
        let (kv, turned) = rest.split_at(16);
        let turn = |x: &[f64]| {
            let mut y = x.to_vec();
            for i in 0..2 {
                let angle = position * 10_000f64.powf(-(i as f64) / 2.0);
                y[i] = x[i] * angle.cos() - x[i + 2] * angle.sin();
                y[i + 2] = x[i + 2] * angle.cos() + x[i] * angle.sin();
            }
            y
        };
        let queries = q.chunks(7).flat_map(|q| [&q[..3], &turn(&q[3..])[..]].concat());
        let keys = kv.chunks(8).flat_map(|kv| [&kv[..3], &turn(turned)[..]].concat());
        let values = kv.chunks(8).flat_map(|kv| [&kv[3..], &[0.0; 2]].concat());
        queries.chain(keys).chain(values).collect()
    }

    #[test]
    fn heads_and_gradients_agree_with_the_reference() {
        let (x, dy) = (random("x", 34), random("dy", 42));
        let mut qkv = vec![f32::NAN; 42];
        heads(SHAPE, 9, &x[..14], &x[14..30], &x[30..], &mut qkv);
        assert_close(&qkv, &reference(9.0, &widen(&x)));
        let mut dx = vec![f32::NAN; 34];
        let (dq, rest) = dx.split_at_mut(14);
        let (dkv, dturned) = rest.split_at_mut(16);
        heads_gradient(SHAPE, 9, &dy, dq, dkv, dturned);
        assert_close(&dx, &numeric_gradient(&widen(&x), &widen(&dy), |x| reference(9.0, x)));
    }

    #[test]
    fn padding_comes_off_and_on() {
        let padded = random("padded", 14);
        let mut y = vec![f32::NAN; 10];
        values(SHAPE, &padded, &mut y);
        assert_eq!(y[5..], padded[7..12]);
        let mut back = vec![f32::NAN; 14];
        values_gradient(SHAPE, &y, &mut back);
        assert_eq!((&back[7..12], &back[12..]), (&padded[7..12], &[0.0; 2][..]));
    }
}
