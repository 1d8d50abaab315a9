//! What a model has that predicts further tokens than the next one.

use serde::Serialize;

/// Modules behind the last layer, each of which predicts one token further on than the one before it
/// (DeepSeek-V3, arXiv 2412.19437, section 2.2). All zero for a model without.
///
/// A module joins what the one before puts out with the embedding of the next token, and has a layer of
/// the model's last kind; it shares the tables of the embedding and of the head. Only training
/// needs it: whoever generates text leaves it out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Mtp {
    /// How many modules there are, D.
    #[serde(rename = "mtp_depth")]
    pub depth: u64,
    /// What the mean of their losses counts for beside the next token's, λ.
    #[serde(rename = "mtp_weight")]
    pub weight: f64,
}

impl Mtp {
    /// The weight that DeepSeek-V3 began with (section 4.2), where a model does not say.
    pub const WEIGHT: f64 = 0.3;

    /// Whether there are none.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// What the loss of one module counts for: λ/D (eq. 25).
    pub fn share(&self) -> f64 {
        self.weight / self.depth.max(1) as f64
    }
}
