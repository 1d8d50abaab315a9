//! Element-wise operations on whole tensors, and block-wise sums of squares for the gradient norm.

use crate::Element;
use crate::instruction_set::vectorised;
use crate::ordered_sum::{self, larger};
use crate::shape::expect_len;

/// `out += a`.
pub fn add<T: Element>(a: &[T], out: &mut [T]) {
    combine(
        a,
        out,
        #[inline(always)]
        |out, a| out + a,
    );
}

/// `y = a + b`.
pub fn add3<T: Element>(a: &[T], b: &[T], y: &mut [T]) {
    expect_len("b", b.len(), &[a.len()]);
    expect_len("y", y.len(), &[a.len()]);
    vectorised(
        #[inline(always)]
        || {
            for (y, (a, b)) in y.iter_mut().zip(a.iter().zip(b)) {
                *y = T::narrow(a.widen() + b.widen());
            }
        },
    );
}

/// `out = max(out, a)`, element by element.
pub fn max<T: Element>(a: &[T], out: &mut [T]) {
    combine(a, out, larger);
}

/// `x *= factor`.
pub fn scale(factor: f32, x: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            for x in x.iter_mut() {
                *x *= factor;
            }
        },
    );
}

/// Returns the first element that is not finite, if there is one.
pub fn first_not_finite<T: Element>(x: &[T]) -> Option<f32> {
    // Finite numbers times zero sum to zero: one branch-free pass decides if a search is needed.
    let sum = vectorised(
        #[inline(always)]
        || ordered_sum::sum([x], |[x]| x * 0.0),
    );
    if sum == 0.0 { None } else { x.iter().map(|x| x.widen()).find(|x| !x.is_finite()) }
}

/// `out[i]` = the sum of squares of block `i` of `x`, in double precision, rounded once. Every
/// block has `block` elements, except that the last one has the remainder.
///
/// The gradient norm is computed from these block sums. Ranks that hold whole blocks therefore
/// compute the same numbers as one rank that holds all of them.
pub fn block_squares<G: Element>(x: &[G], block: usize, out: &mut [f32]) {
    assert!(block > 0, "`block` is zero, but a block has at least one element");
    expect_len("out", out.len(), &[x.len().div_ceil(block)]);
    vectorised(
        #[inline(always)]
        || {
            for (out, x) in out.iter_mut().zip(x.chunks(block)) {
                *out = squares(x) as f32;
            }
        },
    );
}

/// The sum of squares, in eight `f64` lanes combined as a balanced tree.
#[inline(always)]
fn squares<G: Element>(x: &[G]) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0f64; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            let x = f64::from(chunk[lane].widen());
            lanes[lane] += x * x;
        }
    }
    for (lane, x) in lanes.iter_mut().zip(tail) {
        let x = f64::from(x.widen());
        *lane += x * x;
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

#[inline(always)]
fn combine<T: Element>(a: &[T], out: &mut [T], join: impl Fn(f32, f32) -> f32) {
    expect_len("out", out.len(), &[a.len()]);
    vectorised(
        #[inline(always)]
        || {
            for (out, a) in out.iter_mut().zip(a) {
                *out = T::narrow(join(out.widen(), a.widen()));
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_within, random};

    #[test]
    fn element_wise_operations_do_as_they_say() {
        for len in [0, 1, 31, 100] {
            let (a, b) = (random("a", len), random("b", len));
            let mut y = vec![f32::NAN; len];
            add3(&a, &b, &mut y);
            let mut out = b.clone();
            add(&a, &mut out);
            assert_eq!(out, y);
            max(&a, &mut out);
            scale(-2.0, &mut y);
            for i in 0..len {
                assert_eq!(out[i], (a[i] + b[i]).max(a[i]));
                assert_eq!(y[i], -2.0 * (a[i] + b[i]));
            }
        }
    }

    #[test]
    fn squares_of_blocks_do_not_depend_on_who_holds_them() {
        let x = random("x", 1000);
        let mut whole = vec![f32::NAN; 16];
        block_squares(&x, 64, &mut whole);
        let expected: Vec<f64> =
            x.chunks(64).map(|c| c.iter().map(|&v| f64::from(v).powi(2)).sum()).collect();
        assert_within(&whole, &expected, 1e-7);
        let mut part = vec![f32::NAN; 6];
        block_squares(&x[10 * 64..], 64, &mut part);
        assert_eq!(part, whole[10..]);
        block_squares::<f32>(&[], 64, &mut []);
    }

    #[test]
    fn numbers_that_are_none_are_found_wherever_they_stand() {
        for len in [1, 17, 5000] {
            let mut x = random("x", len);
            x[0] = f32::MAX;
            assert_eq!(first_not_finite(&x), None);
            for (at, bad) in [(0, f32::INFINITY), (len - 1, f32::NAN), (len / 2, -f32::INFINITY)] {
                let old = std::mem::replace(&mut x[at], bad);
                let found = first_not_finite(&x).unwrap();
                assert_eq!(found.to_bits(), bad.to_bits());
                x[at] = old;
            }
        }
        assert_eq!(first_not_finite::<f32>(&[]), None);
    }

    #[test]
    #[should_panic(expected = "`block` is zero")]
    fn empty_blocks_are_refused() {
        block_squares(&[1.0f32], 0, &mut []);
    }
}
