//! Element types of device tensors.

/// Element type of a tensor on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ElementType {
    /// 32-bit floats.
    F32,
    /// 16-bit brain floats.
    Bf16,
    /// IEEE half-precision floats.
    F16,
}

impl ElementType {
    /// Size of one element in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Name of the type in the kernels' source.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}
