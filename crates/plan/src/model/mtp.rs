//! Multi-token prediction: modules that predict tokens beyond the next one.

use serde::Serialize;

/// Modules after the last layer, each of which predicts one token further ahead than the previous
/// one (DeepSeek-V3, arXiv 2412.19437, section 2.2). All zero for a model without them.
///
/// A module joins the output of the previous one with the embedding of the next token, and has a
/// layer of the model's last kind; it shares the tables of the embedding and of the head. Only
/// training needs it; text generation omits it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Mtp {
    /// Number of modules, D.
    #[serde(rename = "mtp_depth")]
    pub depth: u64,
    /// Weight of the mean of their losses relative to the next token's loss, λ.
    #[serde(rename = "mtp_weight")]
    pub weight: f64,
}

impl Mtp {
    /// Default weight: the initial one of DeepSeek-V3 (section 4.2).
    pub const WEIGHT: f64 = 0.3;

    /// Returns true if there are no modules.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Weight of one module's loss: λ/D (eq. 25).
    pub fn share(&self) -> f64 {
        self.weight / self.depth.max(1) as f64
    }
}
