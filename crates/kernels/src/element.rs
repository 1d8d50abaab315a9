//! Storage types of tensor elements.
//!
//! Every kernel computes in `f32`, for any storage type of its operands: an element is widened when
//! it is read and rounded once when it is written, to nearest and ties to even (IEEE 754-2008,
//! section 4.3.1). So a 16-bit type costs precision only where a tensor passes through memory.
//!
//! Conversions are integer operations without branches. The compiler turns them into vector code
//! for each instruction set, with the same bits on all of them. AVX-512 has an instruction that
//! rounds to bfloat16, but it treats subnormal numbers as zero (Intel SDM, VCVTNEPS2BF16), so its
//! results would differ from those of every other processor. Element-wise kernels are memory-bound, so the few instructions it would save do not matter.
//!
//! The types are those of the `half` crate, the conversions are not: its loops are 1.6 (bfloat16)
//! to 4 times (half precision) slower than these, and its NaN have other bits where the processor
//! converts (`docs/adr/0020-16-bit-floats.md`).

use crate::instruction_set::vectorised;
use crate::shape::expect_len;
pub use half::{bf16 as Bf16, f16 as F16};

/// Type in which a tensor's elements can be stored.
pub trait Element: Plain + PartialEq + std::fmt::Debug {
    /// Zero.
    const ZERO: Self;

    /// Converts to `f32`, exactly.
    fn widen(self) -> f32;

    /// Rounds to the nearest storable number, ties to even; NaN stays NaN, and values that are too
    /// large become infinite.
    fn narrow(value: f32) -> Self;

    /// Returns the slice itself, if its elements are `f32` already and need no staging.
    fn singles(_x: &[Self]) -> Option<&[f32]> {
        None
    }

    /// Returns the slice itself, if its elements are bfloat16.
    fn brains(_x: &[Self]) -> Option<&[Bf16]> {
        None
    }

    /// Same as [`singles`](Self::singles), for writing.
    fn singles_mut(_x: &mut [Self]) -> Option<&mut [f32]> {
        None
    }
}

/// Plain data that any thread may read: every bit pattern is a valid value, without padding.
pub trait Plain: bytemuck::Pod + Send + Sync {}

impl<T: bytemuck::Pod + Send + Sync> Plain for T {}

impl Element for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }

    fn singles(x: &[Self]) -> Option<&[f32]> {
        Some(x)
    }

    fn singles_mut(x: &mut [Self]) -> Option<&mut [f32]> {
        Some(x)
    }
}

impl Element for Bf16 {
    const ZERO: Self = Self::from_bits(0);

    /// A bfloat16 is the upper half of an `f32`.
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    /// Adding just below half a unit, plus the last retained bit, carries exactly when rounding
    /// goes up.
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        let quiet = bits | 0x0040_0000;
        let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
        Self::from_bits((if is_nan { quiet } else { rounded } >> 16) as u16)
    }

    fn brains(x: &[Self]) -> Option<&[Bf16]> {
        Some(x)
    }
}

impl Element for F16 {
    const ZERO: Self = Self::from_bits(0);

    /// The exponent biases differ by 112. Multiplying by 2^112 corrects that exactly, for subnormal
    /// numbers too; infinity and NaN need all exponent bits set.
    #[inline(always)]
    fn widen(self) -> f32 {
        let magnitude = u32::from(self.to_bits() & 0x7fff) << 13;
        let scaled = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
        let special = if magnitude >= 0x7c00 << 13 { 0x7f80_0000 } else { 0 };
        f32::from_bits(scaled | special | u32::from(self.to_bits() & 0x8000) << 16)
    }

    /// Below 2^-14 results are subnormal: multiples of 2^-24, the unit in the last place of 1/2, so
    /// adding 1/2 rounds to them. From 2^16 on everything is infinite; values that round up to 2^16
    /// carry into infinity.
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let carried = magnitude.wrapping_add(0xfff + (magnitude >> 13 & 1));
        let normal = carried.wrapping_sub(112 << 23) >> 13;
        let half = f32::from_bits(126 << 23);
        let subnormal = (f32::from_bits(magnitude) + half).to_bits().wrapping_sub(126 << 23);
        let finite = if magnitude < (127 - 14) << 23 { subnormal } else { normal };
        let bounded = if magnitude >= (127 + 16) << 23 { 0x7c00 } else { finite };
        let result = if magnitude > 0x7f80_0000 { 0x7e00 } else { bounded };
        Self::from_bits((result | bits >> 16 & 0x8000) as u16)
    }
}

/// `y = x`, in single precision.
pub fn widen<T: Element>(x: &[T], y: &mut [f32]) {
    expect_len("y", y.len(), &[x.len()]);
    vectorised(
        #[inline(always)]
        || {
            for (y, x) in y.iter_mut().zip(x) {
                *y = x.widen();
            }
        },
    );
}

/// `y = x`, rounded.
pub fn narrow<T: Element>(x: &[f32], y: &mut [T]) {
    expect_len("y", y.len(), &[x.len()]);
    vectorised(
        #[inline(always)]
        || {
            for (y, &x) in y.iter_mut().zip(x) {
                *y = T::narrow(x);
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Value of a 16-bit float by the definition of its format.
    fn defined(half: u16, fraction_bits: u32) -> f64 {
        let exponent_bits = 15 - fraction_bits;
        let bias = (1 << (exponent_bits - 1)) - 1;
        let sign = if half & 0x8000 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from(half >> fraction_bits & ((1 << exponent_bits) - 1));
        let fraction = f64::from(half & ((1 << fraction_bits) - 1));
        let unit = 2f64.powi(-(fraction_bits as i32));
        sign * match exponent {
            0 => fraction * unit * 2f64.powi(1 - bias),
            e if e == (1 << exponent_bits) - 1 => {
                if fraction == 0.0 {
                    f64::INFINITY
                } else {
                    f64::NAN
                }
            }
            e => (1.0 + fraction * unit) * 2f64.powi(e - bias),
        }
    }

    /// Checks all numbers of the type, and the values between each and the next.
    fn is_rounded<T: Element>(of: fn(u16) -> T, bits: fn(T) -> u16, fraction_bits: u32) {
        let infinity = ((1u16 << (15 - fraction_bits)) - 1) << fraction_bits;
        for half in 0..=u16::MAX {
            let (value, wanted) = (of(half).widen(), defined(half, fraction_bits));
            if wanted.is_nan() {
                assert!(value.is_nan() && T::narrow(value).widen().is_nan());
                continue;
            }
            assert_eq!(f64::from(value).to_bits(), wanted.to_bits(), "{half:#06x}");
            assert_eq!(bits(T::narrow(value)), half);
        }
        for low in 0..infinity {
            let (a, b) = (of(low).widen(), of(low + 1).widen());
            // For rounding, the next power of two follows the largest number.
            let b = if b.is_finite() { b } else { 2.0 * a - of(low - 1).widen() };
            let middle = a + (b - a) / 2.0;
            if !b.is_finite() {
                continue;
            }
            for sign in [0, 0x8000] {
                let signed = |x: f32| if sign == 0 { x } else { -x };
                assert_eq!(bits(T::narrow(signed(middle))), (low + low % 2) | sign, "{low:#06x}");
                assert_eq!(bits(T::narrow(signed(middle.next_down()))), low | sign);
                assert_eq!(bits(T::narrow(signed(middle.next_up()))), (low + 1) | sign);
            }
        }
        assert_eq!(bits(T::narrow(f32::MAX)), infinity);
        assert_eq!(bits(T::narrow(-0.0)), 0x8000);
    }

    #[test]
    fn every_number_is_its_definition_and_everything_else_rounds_to_nearest_even() {
        is_rounded(Bf16::from_bits, Bf16::to_bits, 7);
        is_rounded(F16::from_bits, F16::to_bits, 10);
    }

    /// Compares with the `half` crate wherever both promise the same bits: everywhere but for NaN.
    #[test]
    fn numbers_are_those_of_the_half_crate_and_nan_keeps_its_bits() {
        for bits in 0..=u16::MAX {
            let (brain, half) = (Bf16::from_bits(bits), F16::from_bits(bits));
            assert_eq!(brain.widen().to_bits(), u32::from(bits) << 16, "also a signalling NaN");
            assert_eq!(half.widen().is_nan(), half.is_nan());
            if !half.is_nan() {
                assert_eq!(half.widen().to_bits(), half.to_f32().to_bits(), "{bits:#06x}");
            }
        }
        let edges = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].into_iter();
        for value in edges.flat_map(|low| (0..=u16::MAX).map(move |high| (high, low))) {
            let value = f32::from_bits(u32::from(value.0) << 16 | value.1);
            let (sign, payload) = (value.to_bits() >> 16 & 0x8000, value.to_bits() >> 16 | 0x40);
            let [brain, half] = match value.is_nan() {
                true => [payload, sign | 0x7e00],
                false => {
                    [Bf16::from_f32(value).to_bits(), F16::from_f32(value).to_bits()].map(u32::from)
                }
            };
            assert_eq!(u32::from(Bf16::narrow(value).to_bits()), brain, "{value:e}");
            assert_eq!(u32::from(F16::narrow(value).to_bits()), half, "{value:e}");
        }
    }

    /// Compares the vector code of each instruction set with converting one element at a time.
    #[test]
    fn long_slices_are_converted_as_single_elements_are() {
        fn agree<T: Element>() {
            let x: Vec<f32> =
                (0..70_000u32).map(|i| f32::from_bits(i.wrapping_mul(61_681))).collect();
            let mut y = vec![T::ZERO; x.len()];
            narrow(&x, &mut y);
            let mut z = vec![0.0; x.len()];
            widen(&y, &mut z);
            for ((x, y), z) in x.into_iter().zip(y).zip(z) {
                assert_eq!(bytemuck::bytes_of(&y), bytemuck::bytes_of(&T::narrow(x)));
                assert_eq!(z.to_bits(), y.widen().to_bits());
            }
        }
        agree::<Bf16>();
        agree::<F16>();
    }
}
