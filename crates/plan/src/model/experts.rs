//! Dimensions of a mixture of experts beyond those of a dense transformer, and of latent attention.

use serde::Serialize;
use std::fmt;

/// Experts of a model and the routing of tokens to them. All zero for a dense model.
///
/// A layer's feed-forward part consists of `experts` networks of width
/// [`ModelDims::ffn`](super::ModelDims::ffn), of which each token uses `topk`, and `shared_experts`
/// more that all tokens use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Experts {
    /// Number of routed experts per layer.
    pub experts: u64,
    /// Number of routed experts per token.
    pub topk: u64,
    /// Number of experts of the same width that every token uses.
    pub shared_experts: u64,
    /// Number of leading layers with one feed-forward network instead of experts.
    pub dense_layers: u64,
    /// Width of that network.
    pub dense_ffn: u64,
    /// Scoring of a token's affinity to an expert.
    pub router: Router,
    /// Number of equally sized expert groups; zero if there are none.
    pub groups: u64,
    /// Number of groups from which a token's experts are chosen: those with the largest sum of
    /// their two best scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    pub group_topk: u64,
    /// Sum of the weights of a token's experts.
    pub route_scale: f64,
    /// Capacity of an expert as a multiple of its equal share of a sequence's tokens; the excess is
    /// dropped. Zero means no limit.
    pub capacity: f64,
    /// Weight of the loss that balances the experts' loads.
    pub balance: f64,
}

impl Experts {
    /// Returns true if there are no experts.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Maximum number of tokens of a sequence per expert, if bounded: `capacity` times topk · seq /
    /// experts (Lepikhin et al., GShard, arXiv 2006.16668, section 3.2; a group is a sequence). It
    /// is at most the number of all tokens.
    pub fn taken(&self, seq: u64) -> Option<u64> {
        let equal = self.topk as f64 * seq as f64 / self.experts.max(1) as f64;
        (self.capacity > 0.0).then(|| ((equal * self.capacity).ceil() as u64).clamp(1, seq.max(1)))
    }
}

/// Scoring of the affinity of a token to an expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Router {
    /// Softmax over all experts (Mixtral, Qwen3).
    #[default]
    Softmax,
    /// Sigmoid per expert, with a bias that affects only the choice and follows the experts' loads
    /// (DeepSeek-V3, arXiv 2412.19437, eq. 13 to 16).
    Sigmoid,
}

impl Router {
    /// All routers.
    pub const ALL: [Self; 2] = [Self::Softmax, Self::Sigmoid];

    /// Name used in files and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Softmax => "softmax",
            Self::Sigmoid => "sigmoid",
        }
    }
}

impl fmt::Display for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Multi-head latent attention: queries, keys and values come from short latent vectors
/// (DeepSeek-V2, arXiv 2405.04434, section 2.1). All zero for other attention.
///
/// A head's queries and keys have width [`ModelDims::head_dim`](super::ModelDims::head_dim), the
/// last `qk_rope` elements of which are rotated by position; those of the keys are the same for all
/// heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Latent {
    /// Width of the queries' latent vector.
    pub q_lora: u64,
    /// Width of the latent vector of keys and values.
    pub kv_lora: u64,
    /// Number of elements of a head's queries and keys that are rotated by position.
    pub qk_rope: u64,
    /// Width of a head's values.
    pub v_dim: u64,
}

impl Latent {
    /// Returns true if the model has no latent attention.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expert_takes_its_share_of_a_sequence() {
        let experts = Experts { experts: 8, topk: 2, capacity: 1.25, ..Experts::default() };
        assert_eq!(experts.taken(64), Some(20));
        assert_eq!(experts.taken(1), Some(1), "one token finds room");
        assert_eq!(Experts { capacity: 1e30, ..experts }.taken(64), Some(64), "no more can come");
        assert_eq!(Experts { capacity: 0.0, ..experts }.taken(64), None);
    }
}
