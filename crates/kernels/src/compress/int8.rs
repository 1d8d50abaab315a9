//! Block encoded as integers from −127 to 127 and their scale.

use crate::instruction_set::vectorised;

/// Writes the scale and the integers; leaves the rounding error in `error`.
pub(super) fn encode(values: &[f32], error: &mut [f32], words: &mut [u32]) {
    vectorised(
        #[inline(always)]
        || {
            let largest =
                values.iter().fold(0.0f32, |most, x| if x.abs() > most { x.abs() } else { most });
            // The sum of finite numbers times zero is zero; with any non-finite number it is not.
            let finite = values.iter().fold(0.0f32, |sum, x| sum + x * 0.0) == 0.0;
            if !finite {
                words.fill(0);
                words[0] = f32::NAN.to_bits();
                // The integers may be anything: times this scale, all become NaN.
                words[1..].fill(0x0101_0101);
                return;
            }
            let scale = largest / 127.0;
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            // Numbers too small for their scale to have an inverse stay in the error.
            let (scale, inverse) = if inverse.is_finite() { (scale, inverse) } else { (0.0, 0.0) };
            words[0] = scale.to_bits();
            let groups = values.chunks(4).zip(error.chunks_mut(4));
            for ((values, error), word) in groups.zip(&mut words[1..]) {
                let mut bytes = [0u8; 4];
                for ((value, error), byte) in values.iter().zip(error).zip(&mut bytes) {
                    let whole = (value * inverse).round_ties_even().clamp(-127.0, 127.0);
                    *error = value - whole * scale;
                    *byte = (whole as i8) as u8;
                }
                *word = u32::from_le_bytes(bytes);
            }
        },
    );
}

/// Adds the decoded values.
pub(super) fn add(words: &[u32], values: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            let scale = f32::from_bits(words[0]);
            for (values, word) in values.chunks_mut(4).zip(&words[1..]) {
                for (value, byte) in values.iter_mut().zip(word.to_le_bytes()) {
                    *value += f32::from(byte as i8) * scale;
                }
            }
        },
    );
}
