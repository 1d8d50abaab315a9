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
    /// Token ids.
    U32,
    /// Raw bytes.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> u64 {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::Fp8 | Self::U8 => 1,
        }
    }

    /// Name used in flags and in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Fp8 => "fp8",
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
            "u32" => Self::U32,
            "u8" => Self::U8,
            _ => return Err(format!("unknown element type '{text}' (known: f32, bf16, f16, fp8)")),
        })
    }
}
