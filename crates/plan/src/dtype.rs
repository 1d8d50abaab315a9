//! Element types.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 16-bit float with f32's range.
    Bf16,
    /// IEEE 16-bit float.
    F16,
    /// 8-bit float (e4m3 forward, e5m2 gradients) for GEMMs; stored activations stay bf16.
    Fp8,
    /// 4-bit float (e2m1) for GEMMs, in blocks of 16 with an 8-bit float (e4m3) as scale, and one f32
    /// scale per tensor; stored activations stay bf16.
    Nvfp4,
    /// 4-bit float (e2m1) for GEMMs, in blocks of 32 with a power of two as scale (OCP Microscaling
    /// Formats 1.0); stored activations stay bf16.
    Mxfp4,
    /// Token ids.
    U32,
    /// Raw bytes.
    U8,
}

impl DType {
    /// Bytes of one element. Types of less than a byte are operands of GEMMs only and are not stored
    /// one by one.
    pub const fn size(self) -> u64 {
        self.bits().div_ceil(8)
    }

    /// Bits of one element, without the scales of blocks.
    pub const fn bits(self) -> u64 {
        match self {
            Self::F32 | Self::U32 => 32,
            Self::Bf16 | Self::F16 => 16,
            Self::Fp8 | Self::U8 => 8,
            Self::Nvfp4 | Self::Mxfp4 => 4,
        }
    }

    /// Returns true if GEMMs cast their operands to this type, and everything else is bf16.
    pub const fn is_of_products(self) -> bool {
        match self {
            Self::Fp8 | Self::Nvfp4 | Self::Mxfp4 => true,
            Self::F32 | Self::Bf16 | Self::F16 | Self::U32 | Self::U8 => false,
        }
    }

    /// Bits of one element with its share of a block's scale.
    pub fn scaled_bits(self) -> f64 {
        let scale = match self {
            Self::Nvfp4 => 8.0 / 16.0,
            Self::Mxfp4 => 8.0 / 32.0,
            Self::F32 | Self::Bf16 | Self::F16 | Self::Fp8 | Self::U32 | Self::U8 => 0.0,
        };
        self.bits() as f64 + scale
    }

    /// Name used in flags and in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Fp8 => "fp8",
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp4 => "mxfp4",
            Self::U32 => "u32",
            Self::U8 => "u8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "f32" => Self::F32,
            "bf16" => Self::Bf16,
            "f16" => Self::F16,
            "fp8" => Self::Fp8,
            "nvfp4" => Self::Nvfp4,
            "mxfp4" => Self::Mxfp4,
            "u32" => Self::U32,
            "u8" => Self::U8,
            _ => {
                let known = "f32, bf16, f16, fp8, nvfp4, mxfp4";
                return Err(format!("unknown element type '{text}' (known: {known})"));
            }
        })
    }
}
