//! How one number of a tensor is stored.
//!
//! Every kernel computes in `f32`, whatever its operands are stored in: an element is widened when
//! it is read and rounded once when it is written, to nearest and ties to even (IEEE 754-2008,
//! section 4.3.1). So a 16-bit type costs precision only where a tensor passes through memory.
//!
//! Conversions are integer operations without branches, which the compiler turns into vector code
//! for each instruction set, with the same bits on all of them. AVX-512 has an instruction that
//! rounds to bfloat16, but it takes subnormal numbers for zero (Intel SDM, VCVTNEPS2BF16), so its
//! results would differ from those of every other processor; kernels of 16-bit operands are bound
//! by memory, not by the few instructions that it would save.

use crate::instruction_set::vectorised;
use crate::shape::expect_len;

/// A type in which a tensor's elements can be stored.
pub trait Element: Plain + PartialEq + std::fmt::Debug {
    /// Zero.
    const ZERO: Self;

    /// The number itself: no 16-bit number needs rounding.
    fn widen(self) -> f32;

    /// The nearest number that can be stored, the even one of two; NaN stays NaN, and what is too
    /// large becomes infinite.
    fn narrow(value: f32) -> Self;

    /// The slice itself, if its elements are `f32` already and need no staging.
    fn singles(_x: &[Self]) -> Option<&[f32]> {
        None
    }

    /// As [`singles`](Self::singles), to be written.
    fn singles_mut(_x: &mut [Self]) -> Option<&mut [f32]> {
        None
    }
}

/// Plain data: every pattern of bits is a value, and there is no padding.
///
/// # Safety
///
/// A type has this trait only if any bytes of its size are one of its values, and if all bytes of a
/// value are initialised.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: floats and integers are plain data.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u8 {}

/// A 16-bit float with the exponent of `f32` and 8 significant bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

// SAFETY: it is a `u16`, which is plain data.
unsafe impl Plain for Bf16 {}

/// The 16-bit float of IEEE 754: 5 bits of exponent, 11 significant bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

// SAFETY: it is a `u16`, which is plain data.
unsafe impl Plain for F16 {}

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
    const ZERO: Self = Self(0);

    /// A bfloat16 is the upper half of an `f32`.
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    /// Adding just below half a unit, plus the last bit that stays, carries exactly when rounding
    /// goes up.
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        let quiet = bits | 0x0040_0000;
        let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
        Self((if is_nan { quiet } else { rounded } >> 16) as u16)
    }
}

impl Element for F16 {
    const ZERO: Self = Self(0);

    /// The biases of the exponents differ by 112. Multiplying by 2^112 puts that right, for
    /// subnormal numbers too and exactly; infinity and NaN need their exponent filled up.
    #[inline(always)]
    fn widen(self) -> f32 {
        let magnitude = u32::from(self.0 & 0x7fff) << 13;
        let scaled = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
        let special = if magnitude >= 0x7c00 << 13 { 0x7f80_0000 } else { 0 };
        f32::from_bits(scaled | special | u32::from(self.0 & 0x8000) << 16)
    }

    /// Below 2^-14 results are subnormal: multiples of 2^-24, the unit in the last place of 1/2, so
    /// that adding 1/2 rounds to them. From 2^16 on everything is infinite; what rounds up to that
    /// is carried there.
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
        Self((result | bits >> 16 & 0x8000) as u16)
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

    /// The value of a 16-bit float by the definition of its format.
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

    /// All numbers of the type, and what lies between each and the next.
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
            // Above the largest number lies, for the purpose of rounding, the next power of two.
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
        is_rounded(Bf16, |x| x.0, 7);
        is_rounded(F16, |x| x.0, 10);
    }

    /// The vector code of each instruction set against one element at a time.
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
                assert_eq!(y, T::narrow(x));
                assert_eq!(z.to_bits(), y.widen().to_bits());
            }
        }
        agree::<Bf16>();
        agree::<F16>();
    }
}
