//! Conversion of 16-bit floats to f32 and back, without branches, so that loops vectorise.
//!
//! Rounding is to nearest, ties to even (IEEE 754-2008, 4.3.1). NaN stays NaN and becomes quiet.

/// A bfloat16 is the upper half of an f32.
#[inline(always)]
pub(crate) const fn bf16_to_f32(half: u16) -> f32 {
    f32::from_bits((half as u32) << 16)
}

/// Adding just below half a unit plus the last kept bit carries exactly when rounding goes up.
#[inline(always)]
pub(crate) const fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let quiet = bits | 0x0040_0000;
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    (if is_nan { quiet } else { rounded } >> 16) as u16
}

/// The exponent biases differ by 112. Multiplying by 2¹¹² corrects this exactly, for subnormal
/// numbers too; only infinities and NaN need their exponent filled with ones.
#[inline(always)]
pub(crate) const fn f16_to_f32(half: u16) -> f32 {
    let magnitude = ((half & 0x7fff) as u32) << 13;
    let scaled = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let special = if magnitude >= 0x7c00 << 13 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled | special | ((half & 0x8000) as u32) << 16)
}

/// Below 2⁻¹⁴ results are subnormal: multiples of 2⁻²⁴, the unit in the last place of ½, so adding
/// ½ rounds to them. From 2¹⁶ on all results are infinite; values that round up to that limit are
/// carried there.
#[inline(always)]
pub(crate) const fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let normal =
        magnitude.wrapping_add(0xfff + (magnitude >> 13 & 1)).wrapping_sub(112 << 23) >> 13;
    let half = f32::from_bits(126 << 23);
    let subnormal = (f32::from_bits(magnitude) + half).to_bits().wrapping_sub(126 << 23);
    let finite = if magnitude < (127 - 14) << 23 { subnormal } else { normal };
    let bounded = if magnitude >= (127 + 16) << 23 { 0x7c00 } else { finite };
    let result = if magnitude > 0x7f80_0000 { 0x7e00 } else { bounded };
    (result | bits >> 16 & 0x8000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Value of an f16 by its definition.
    fn definition(half: u16) -> f64 {
        let sign = if half & 0x8000 == 0 { 1.0 } else { -1.0 };
        let (exponent, fraction) = (i32::from(half >> 10 & 31), f64::from(half & 1023));
        sign * match exponent {
            0 => fraction * 2f64.powi(-24),
            31 if fraction == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
        }
    }

    #[test]
    fn every_half_is_its_definition_and_comes_back() {
        for half in 0..=u16::MAX {
            let (value, wanted) = (f16_to_f32(half), definition(half));
            if wanted.is_nan() {
                assert!(value.is_nan() && f16_to_f32(f32_to_f16(value)).is_nan());
            } else {
                assert_eq!(f64::from(value).to_bits(), wanted.to_bits(), "{half:#06x}");
                assert_eq!(f32_to_f16(value), half);
            }
            let value = bf16_to_f32(half);
            if value.is_nan() {
                assert!(bf16_to_f32(f32_to_bf16(value)).is_nan());
            } else {
                assert_eq!(f32_to_bf16(value), half);
            }
        }
    }

    /// Checks rounding between neighbours: to the nearer one, and at the midpoint to even.
    fn rounds_to_nearest(widen: fn(u16) -> f32, narrow: fn(f32) -> u16, largest: u16) {
        for low in 0..largest {
            let (a, b) = (widen(low), widen(low + 1));
            let middle = a + (b - a) / 2.0;
            let even = low + low % 2;
            for sign in [0, 0x8000] {
                let signed = |x: f32| if sign == 0 { x } else { -x };
                assert_eq!(narrow(signed(middle)), even | sign, "{low:#06x}");
                assert_eq!(narrow(signed(middle.next_down())), low | sign);
                assert_eq!(narrow(signed(middle.next_up())), (low + 1) | sign);
            }
        }
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        rounds_to_nearest(f16_to_f32, f32_to_f16, 0x7bff);
        rounds_to_nearest(bf16_to_f32, f32_to_bf16, 0x7f7f);
        assert_eq!(f32_to_f16(65519.99), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
        assert_eq!(f32_to_f16(f32::MAX), 0x7c00);
        assert_eq!(f32_to_bf16(f32::MAX), 0x7f80);
    }
}
