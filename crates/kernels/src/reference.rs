//! Test helpers: random inputs, comparison with an `f64` reference, and gradients by finite
//! differences of that reference.

use crate::philox::Stream;

/// `len` standard normal numbers, determined by `name`.
pub(crate) fn random(name: &str, len: usize) -> Vec<f32> {
    let stream = Stream::new(7, name);
    (0..len as u64).map(|i| stream.normal(i)).collect()
}

/// `len` integers below `bound`, determined by `name`.
pub(crate) fn random_ids(name: &str, len: usize, bound: u32) -> Vec<u32> {
    let stream = Stream::new(7, name);
    (0..len as u64).map(|i| (stream.bits(i) % u64::from(bound)) as u32).collect()
}

/// Converts the numbers to double precision.
pub(crate) fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| f64::from(v)).collect()
}

/// The bit patterns, for exact comparisons.
pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// Panics unless the relative error in the Euclidean norm is at most 1e-5.
#[track_caller]
pub(crate) fn assert_close(actual: &[f32], expected: &[f64]) {
    assert_within(actual, expected, 1e-5);
}

/// Panics unless the relative error in the Euclidean norm is at most `tolerance`.
#[track_caller]
pub(crate) fn assert_within(actual: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut actual.iter().zip(expected).map(|(&a, &e)| f64::from(a) - e));
    let size = norm(&mut expected.iter().copied());
    // Written so that NaN fails.
    assert!(
        difference <= tolerance * size,
        "off by {difference:e} of {size:e}\nactual   {:?}\nexpected {:?}",
        &actual[..actual.len().min(8)],
        &expected[..expected.len().min(8)],
    );
}

/// The gradient of `sum_i dy[i] * f(x)[i]` with respect to `x`, by central differences.
pub(crate) fn numeric_gradient(x: &[f64], dy: &[f64], f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let value = |x: &[f64]| f(x).iter().zip(dy).map(|(y, d)| y * d).sum::<f64>();
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let old = x[i];
            x[i] = old + STEP;
            let above = value(&x);
            x[i] = old - STEP;
            let below = value(&x);
            x[i] = old;
            (above - below) / (2.0 * STEP)
        })
        .collect()
}
