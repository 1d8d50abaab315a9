//! Element types of a plan, and monomorphised code for each of them.

use paceline_plan::DType;
use paceline_plan::strategy::Strategy;

/// Floating-point type in which tensors are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float {
    F32,
    Bf16,
    F16,
}

impl Float {
    /// Returns the type of a dtype, if kernels exist for it.
    pub(crate) fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::Bf16 => Some(Self::Bf16),
            DType::F16 => Some(Self::F16),
            DType::Fp8 | DType::Nvfp4 | DType::Mxfp4 | DType::U32 | DType::U8 => None,
        }
    }
}

/// Types in which a plan stores the tensors it computes with. Statistics, losses, master weights
/// and moments are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Types {
    /// Type of weights and activations.
    pub(crate) activation: Float,
    /// Type of weight gradients.
    pub(crate) gradient: Float,
}

impl Types {
    /// Types of a strategy, if kernels exist for both.
    pub(crate) fn of(strategy: &Strategy) -> Option<Self> {
        Some(Self {
            activation: Float::of(strategy.dtype)?,
            gradient: Float::of(strategy.grad_dtype)?,
        })
    }
}

/// Compiles an expression for every pair of types and runs the one selected by `$types`. In it, the
/// first name is the type of activations and the second that of gradients.
macro_rules! typed {
    ($types:expr, <$activation:ident, $gradient:ident> $body:expr) => {{
        use $crate::types::Float::{Bf16, F16, F32};
        typed!(@arms $types, $activation, $gradient, $body,
            F32 = f32, Bf16 = paceline_kernels::Bf16, F16 = paceline_kernels::F16)
    }};
    (@arms $types:expr, $activation:ident, $gradient:ident, $body:expr,
        $($word:ident = $type:ty),+) => {
        match $types.activation {
            $($word => {
                type $activation = $type;
                typed!(@gradient $types, $gradient, $body)
            })+
        }
    };
    (@gradient $types:expr, $gradient:ident, $body:expr) => {
        match $types.gradient {
            F32 => {
                type $gradient = f32;
                $body
            }
            Bf16 => {
                type $gradient = paceline_kernels::Bf16;
                $body
            }
            F16 => {
                type $gradient = paceline_kernels::F16;
                $body
            }
        }
    };
}
pub(crate) use typed;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_types_has_its_code() {
        for activation in [Float::F32, Float::Bf16, Float::F16] {
            for gradient in [Float::F32, Float::Bf16, Float::F16] {
                let types = Types { activation, gradient };
                let sizes = typed!(types, <T, G> (size_of::<T>(), size_of::<G>()));
                let size = |float| if float == Float::F32 { 4 } else { 2 };
                assert_eq!(sizes, (size(activation), size(gradient)));
            }
        }
    }

    #[test]
    fn products_in_eight_bits_are_not_run_in_sixteen() {
        let strategy = Strategy { dtype: DType::Fp8, ..Strategy::default() };
        assert_eq!(Types::of(&strategy), None);
    }
}
