//! Elementary functions that give the same bits on every platform.
//!
//! The C library's `exp`, `ln` and `cos` differ in the last bit from one system to the next, so a
//! loss curve would depend on the machine. These functions use only operations whose rounding IEEE
//! 754 defines exactly, have no branches that prevent vectorisation, and state their error.

use std::f64::consts::{LN_2, TAU};

/// e to the power of `x`, with a relative error below 1.5e-7.
///
/// Results below 2^-125 (`x` below about -87) are zero: a softmax does not need subnormal numbers,
/// and processors are slow with them. Above 88.72 the result is infinite; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
    const SHIFT: f32 = 12_582_912.0;
    // ln 2 in two parts, the first short enough that a multiple of it is exact.
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = (LN_2 - 355.0 / 512.0) as f32;

    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + SHIFT;
    let n = shifted - SHIFT;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;

    // The Taylor series about 0 for |r| <= ln 2 / 2; the first omitted term is below 6e-9.
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;

    // 2^(n-1) from its bits, times p doubled: 2^n itself is out of range at n = 128, and at n =
    // -126 the bits are those of zero, which flushes results that would be subnormal.
    let half = f32::from_bits(shifted.to_bits().wrapping_add(126) << 23);
    (p + p) * half
}

/// The logistic function, 1 / (1 + e^-x).
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The hyperbolic tangent, with an error below 2e-7 of its value.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    // Near zero the quotient below would cancel; the first omitted term is below 2e-9.
    let square = x * x;
    let series = x
        * (1.0
            + square
                * (-1.0 / 3.0
                    + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))));
    let whole = 1.0 - 2.0 / (1.0 + exp(2.0 * x));
    if square < 0.0625 { series } else { whole }
}

/// Distribution function of the normal distribution, with a relative error below 1.5e-7 (a
/// Chebyshev approximation of the complementary error function; Press et al., Numerical Recipes,
/// section 6.2).
#[inline(always)]
pub(crate) fn normal_distribution(x: f64) -> f64 {
    const SERIES: [f64; 10] = [
        -1.26551223,
        1.00002368,
        0.37409196,
        0.09678418,
        -0.18628806,
        0.27886807,
        -1.13520398,
        1.48851587,
        -0.82215223,
        0.17087277,
    ];
    let z = x.abs() * std::f64::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.5 * z);
    let sum = SERIES.iter().rev().fold(0.0, |sum, term| sum * t + term);
    let tail = 0.5 * t * exp_f64(sum - z * z);
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// e to the power of `x` in double precision, for `x` between -700 and 700; outside, the value at
/// the bound.
#[inline(always)]
pub(crate) fn exp_f64(x: f64) -> f64 {
    let x = x.clamp(-700.0, 700.0);
    let shifted = x * std::f64::consts::LOG2_E + SHIFT_F64;
    let n = shifted - SHIFT_F64;
    let r = x - n * LN_2_HIGH_F64 - n * LN_2_LOW_F64;
    // The Taylor series about 0; the first omitted term is below 5e-18.
    let p = series(r, &[1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]);
    p * f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52)
}

/// The natural logarithm in double precision: -inf at 0, NaN below it.
#[inline(always)]
pub(crate) fn ln_f64(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        f64::NAN
    } else if x == 0.0 {
        f64::NEG_INFINITY
    } else if x < f64::MIN_POSITIVE {
        // A subnormal number is first scaled by 2^54 into the normal range.
        ln_of_normal(x * 18_014_398_509_481_984.0) - 54.0 * LN_2
    } else if x == f64::INFINITY {
        x
    } else {
        ln_of_normal(x)
    }
}

/// The natural logarithm of a number known to be positive, finite and not subnormal: no branches.
#[inline(always)]
pub(crate) fn ln_of_normal(x: f64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    let bits = x.to_bits();
    let m = f64::from_bits((bits & MANTISSA) | 1.0f64.to_bits());
    // Exponent as a number: its bits below those of 2^52, minus 2^52 and the exponent's bias.
    const TWO_52: f64 = 4_503_599_627_370_496.0;
    let exponent = f64::from_bits((bits >> 52) | TWO_52.to_bits()) - (TWO_52 + 1023.0);
    let upper = m > std::f64::consts::SQRT_2;
    let m = if upper { m * 0.5 } else { m };
    let exponent = if upper { exponent + 1.0 } else { exponent };
    // ln m = 2 artanh s, whose series in s^2 <= 0.0295 needs twelve terms.
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut p = 1.0 / 23.0;
    p = p * z + 1.0 / 21.0;
    p = p * z + 1.0 / 19.0;
    p = p * z + 1.0 / 17.0;
    p = p * z + 1.0 / 15.0;
    p = p * z + 1.0 / 13.0;
    p = p * z + 1.0 / 11.0;
    p = p * z + 1.0 / 9.0;
    p = p * z + 1.0 / 7.0;
    p = p * z + 1.0 / 5.0;
    p = p * z + 1.0 / 3.0;
    p = p * z + 1.0;
    exponent * LN_2_HIGH_F64 + (exponent * LN_2_LOW_F64 + 2.0 * s * p)
}

/// Sine and cosine of an angle given in full turns, so that removing whole turns is exact.
#[inline(always)]
pub(crate) fn sin_cos_cycles(turns: f64) -> (f64, f64) {
    let fraction = turns - ((turns + SHIFT_F64) - SHIFT_F64);
    let shifted = fraction * 4.0 + SHIFT_F64;
    let quarter = shifted.to_bits() & 3;
    let x = (fraction - (shifted - SHIFT_F64) * 0.25) * TAU;
    // Taylor series for |x| <= pi / 4; the first omitted terms are below 1e-17.
    let z = -x * x;
    let sin = x * series(z, &[1, 6, 20, 42, 72, 110, 156, 210, 272]);
    let cos = series(z, &[1, 2, 12, 30, 56, 90, 132, 182, 240]);
    let (a, b) = if quarter & 1 == 0 { (sin, cos) } else { (cos, sin) };
    (if quarter & 2 == 0 { a } else { -a }, if (quarter + 1) & 2 == 0 { b } else { -b })
}

/// Integer power by repeated squaring: the standard library does not specify the error of its own.
pub(crate) fn powi(base: f64, exponent: u64) -> f64 {
    let (mut result, mut square, mut rest) = (1.0, base, exponent);
    while rest > 0 {
        if rest & 1 == 1 {
            result *= square;
        }
        square *= square;
        rest >>= 1;
    }
    result
}

/// Adding 1.5 * 2^52 leaves the nearest integer in the low bits of the sum.
const SHIFT_F64: f64 = 6_755_399_441_055_744.0;

/// ln 2 in two parts, the first with 21 trailing zero bits, so that a multiple of it is exact.
const LN_2_HIGH_F64: f64 = 0.693_147_180_369_123_8;
const LN_2_LOW_F64: f64 = 1.908_214_929_270_587_7e-10;

/// Sum of the series whose term `i` is `z` / `ratios[i]` times the previous term, by Horner's rule.
#[inline(always)]
fn series<const N: usize>(z: f64, ratios: &[u32; N]) -> f64 {
    let mut p = 1.0;
    let mut i = N - 1;
    while i > 0 {
        p = 1.0 + p * (z * (1.0 / f64::from(ratios[i])));
        i -= 1;
    }
    p
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_whole_range() {
        let mut worst = 0.0f64;
        let mut x = -86.9f32;
        while x < 88.7 {
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / exact - 1.0).abs());
            x += 0.000_37;
        }
        assert!(worst < 1.5e-7, "relative error {worst:e}");
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-88.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::MIN), 0.0);
        assert_eq!(exp(88.73), f32::INFINITY);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-86.98) >= f32::MIN_POSITIVE);
        assert_eq!(sigmoid(-200.0), 0.0);
        assert_eq!(sigmoid(200.0), 1.0);
        assert_eq!(sigmoid(0.0), 0.5);
    }

    #[test]
    fn double_precision_functions_are_accurate() {
        for i in -100_000..100_000 {
            let x = f64::from(i) * 0.006_9;
            assert!((exp_f64(x) / x.exp() - 1.0).abs() < 1e-15, "exp {x}");
            let p = exp_f64(x * 0.1);
            assert!((ln_f64(p) - p.ln()).abs() <= 2e-16 * (1.0 + p.ln().abs()), "ln {p}");
            let (sin, cos) = sin_cos_cycles(x);
            // The standard library gets an angle that is already rounded.
            let angle = x.fract() * TAU;
            assert!((sin - angle.sin()).abs() < 2e-15, "sin {x}");
            assert!((cos - angle.cos()).abs() < 2e-15, "cos {x}");
        }
    }

    #[test]
    fn double_precision_functions_at_the_ends() {
        assert_eq!(ln_f64(1.0), 0.0);
        assert_eq!(ln_f64(0.0), f64::NEG_INFINITY);
        assert_eq!(ln_f64(f64::INFINITY), f64::INFINITY);
        assert!(ln_f64(-1.0).is_nan());
        assert!((ln_f64(1e-310) - (1e-310f64).ln()).abs() < 1e-12);
        assert_eq!(sin_cos_cycles(0.25), (1.0, sin_cos_cycles(0.25).1));
        assert_eq!(sin_cos_cycles(0.0), (0.0, 1.0));
        assert_eq!(powi(0.9, 0), 1.0);
        assert!((powi(0.999, 1000) - 0.999f64.powf(1000.0)).abs() < 1e-13);
        assert_eq!(powi(0.5, u64::MAX), 0.0);
    }
}
