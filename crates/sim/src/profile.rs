//! The software that runs a plan, as far as it changes what a plan costs.
//!
//! A plan says which operators run and what is sent; it does not say how many kernels an operator
//! takes or what those write to memory in between. That is a property of the software, the same for
//! every model and every cluster, so it has a name and is chosen once.

use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// What a software stack fuses, keeps out of memory and adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Profile {
    /// What it is called on the command line.
    pub name: &'static str,
    /// Whether attention runs as one kernel that never writes its scores (Dao et al., arXiv
    /// 2205.14135) and skips the half that causality masks. Otherwise every product, the softmax
    /// and the dropout read and write all seq × seq scores of each head.
    pub fused_attention: bool,
    /// Whether activations are dropped at random: masks are written, kept and applied again. The
    /// plan has no such operator, because it trains without; published runs often do not.
    pub dropout: bool,
    /// Whether neighbouring element-wise operators are one kernel (bias and GELU; bias, dropout and
    /// the residual's addition), so that what stands between them is never written.
    pub fused_elementwise: bool,
    /// Whether what surrounds matrix products touches memory once: products add biases and
    /// accumulate weight gradients while they write their result, the loss never writes f32 logits,
    /// and the optimizer is one kernel. Otherwise each of these is a row of kernels.
    pub single_pass: bool,
    /// Whether a message that all tensor-parallel ranks hold whole is cut among them, sent in parts
    /// and gathered again by the receivers: "scatter/gather" in Narayanan et al. (arXiv 2104.04473,
    /// section 4.1).
    pub sliced_messages: bool,
}

impl Profile {
    /// What current stacks do: fused attention, few passes over memory, no dropout.
    pub const MODERN: Self = Self {
        name: "modern",
        fused_attention: true,
        dropout: false,
        fused_elementwise: true,
        single_pass: true,
        sliced_messages: true,
    };

    /// Megatron-LM as Narayanan et al. (arXiv 2104.04473) and Korthikanti et al. (arXiv 2205.05198)
    /// measured it: scores are written, softmax is one kernel with scale and mask, bias + GELU and
    /// bias + dropout + addition are one kernel each (section 4.2 of the former).
    pub const MEGATRON_2021: Self = Self {
        name: "megatron-2021",
        fused_attention: false,
        dropout: true,
        fused_elementwise: true,
        single_pass: false,
        sliced_messages: true,
    };

    /// All profiles, the default first.
    pub const ALL: [Self; 2] = [Self::MODERN, Self::MEGATRON_2021];
}

impl Default for Profile {
    fn default() -> Self {
        Self::MODERN
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|profile| profile.name == text).ok_or_else(|| {
            let known = Self::ALL.map(|profile| profile.name).join(", ");
            format!("'{text}' is no known software profile; known are: {known}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_profile() {
        for profile in Profile::ALL {
            assert_eq!(profile.to_string().parse(), Ok(profile));
        }
        let told = "megatron".parse::<Profile>().unwrap_err();
        assert_eq!(
            told,
            "'megatron' is no known software profile; known are: modern, megatron-2021"
        );
    }
}
