//! Sums and maxima in one fixed order that the compiler can vectorise.
//!
//! Element `i` of a run of [`RUN`] elements is added to lane `i mod LANES`; each lane adds in
//! order; the lanes are joined as a balanced tree; the runs of a longer slice are added in order in
//! `f64`. The order depends on the length alone, and long sums do not lose small terms.

use crate::element::Element;

/// Number of independent accumulators of a sum: one register of the widest vectors.
pub(crate) const LANES: usize = 16;

/// Number of elements that are added in `f32` before their sum is added in `f64`.
pub(crate) const RUN: usize = 1024;

/// Sums `term` over corresponding elements of `N` slices of one length.
#[inline(always)]
pub(crate) fn sum<T: Element, const N: usize>(x: [&[T]; N], term: impl Fn([f32; N]) -> f32) -> f32 {
    let len = x[0].len();
    let mut total = 0.0f64;
    let mut start = 0;
    while start < len {
        let end = len.min(start + RUN);
        total += f64::from(run(x.map(|x| &x[start..end]), &term));
        start = end;
    }
    total as f32
}

/// Largest element; negative infinity for an empty slice. Skips NaN: the sum that follows a maximum
/// propagates it.
#[inline(always)]
pub(crate) fn max<T: Element>(x: &[T]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(chunk[lane].widen(), lanes[lane]);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(tail) {
        *lane = larger(value.widen(), *lane);
    }
    tree(lanes, larger)
}

/// Larger of two numbers, with a fixed choice for zeros of different sign and for NaN.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
fn run<T: Element, const N: usize>(x: [&[T]; N], term: &impl Fn([f32; N]) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let parts = x.map(|x| x.as_chunks::<LANES>());
    for index in 0..parts[0].0.len() {
        let chunk = parts.map(|(chunks, _)| &chunks[index]);
        for lane in 0..LANES {
            lanes[lane] += term(chunk.map(|c| c[lane].widen()));
        }
    }
    for index in 0..parts[0].1.len() {
        lanes[index] += term(parts.map(|(_, tail)| tail[index].widen()));
    }
    tree(lanes, |a, b| a + b)
}

#[inline(always)]
fn tree(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = join(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;

    #[test]
    fn sums_and_maxima_agree_with_f64_at_every_length() {
        for len in (0..70).chain([RUN - 1, RUN, RUN + 1, 5 * RUN + 7]) {
            let (a, b) = (random("a", len), random("b", len));
            let exact: f64 = a.iter().zip(&b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            let ours = sum([&a[..], &b], |[a, b]| a * b);
            let scale = (len.max(1) as f64).sqrt();
            assert!((f64::from(ours) - exact).abs() < 1e-6 * scale, "length {len}");
            let largest = a.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&a[..]), largest, "length {len}");
        }
    }

    #[test]
    fn a_sum_does_not_depend_on_the_address() {
        let x = random("x", 333);
        let expected = sum([&x[..]], |[v]| v).to_bits();
        for shift in 1..8 {
            let mut moved = vec![0.0; shift];
            moved.extend_from_slice(&x);
            assert_eq!(sum([&moved[shift..]], |[v]| v).to_bits(), expected);
        }
    }

    #[test]
    fn small_terms_survive_a_long_sum() {
        let x = vec![1.0f32; 40_000_000 / 16];
        assert_eq!(sum([&x[..]], |[v]| v), 2_500_000.0);
        let tiny = vec![1e-7f32; 3_000_000];
        let total = f64::from(sum([&tiny[..]], |[v]| v));
        assert!((total - 0.3).abs() < 1e-6, "{total}");
    }
}
