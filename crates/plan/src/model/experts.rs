//! What a mixture of experts has beyond a dense transformer, and attention with latent vectors.

use serde::Serialize;
use std::fmt;

/// The experts of a model: which there are, and how tokens come to them. All zero for a dense model.
///
/// A layer's feed-forward part is `experts` networks of width [`Shape::ffn`](super::Shape::ffn), of
/// which each token goes through `topk`, and `shared_experts` more that all tokens go through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Experts {
    /// Experts of one layer that tokens choose from.
    pub experts: u64,
    /// Experts that a token goes to.
    pub topk: u64,
    /// Experts of the same width that every token goes to.
    pub shared_experts: u64,
    /// Leading layers that have one feed-forward network in place of experts.
    pub dense_layers: u64,
    /// The width of that network.
    pub dense_ffn: u64,
    /// How a token's affinity to an expert is scored.
    pub router: Router,
    /// Groups that experts stand in, equally many in each; zero where there are none.
    pub groups: u64,
    /// Groups that a token's experts come from: those whose two best add up to the most (DeepSeek-V3,
    /// arXiv 2412.19437, section 2.1.2).
    pub group_topk: u64,
    /// What the weights of a token's experts add up to.
    pub route_scale: f64,
    /// How many times its equal share of a sequence's tokens an expert takes; what is beyond is
    /// dropped. Zero takes everything.
    pub capacity: f64,
    /// Weight of the loss that balances the experts' loads.
    pub balance: f64,
}

impl Experts {
    /// Whether there are none.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// The most tokens of a sequence that one expert takes, if there is such a bound: `capacity` times
    /// topk · seq / experts (Lepikhin et al., GShard, arXiv 2006.16668, section 3.2; a group is a
    /// sequence). No more than all tokens can come.
    pub fn taken(&self, seq: u64) -> Option<u64> {
        let equal = self.topk as f64 * seq as f64 / self.experts.max(1) as f64;
        (self.capacity > 0.0).then(|| ((equal * self.capacity).ceil() as u64).clamp(1, seq.max(1)))
    }
}

/// How the affinity of a token to an expert is scored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Router {
    /// By a softmax over all experts (Mixtral, Qwen3).
    #[default]
    Softmax,
    /// By a sigmoid for each, with a bias that only the choice sees and that follows the experts' loads
    /// (DeepSeek-V3, arXiv 2412.19437, eq. 13 to 16).
    Sigmoid,
}

impl Router {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Softmax, Self::Sigmoid];

    /// The word used in files and reports.
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

/// Attention whose queries, keys and values come from short latent vectors (DeepSeek-V2, arXiv
/// 2405.04434, section 2.1). All zero for other attention.
///
/// A head's queries and keys have [`Shape::head_dim`](super::Shape::head_dim) numbers, the last
/// `qk_rope` of which are turned by position; those of the keys are the same for all heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Latent {
    /// The width of the queries' latent vector.
    pub q_lora: u64,
    /// The width of that of keys and values.
    pub kv_lora: u64,
    /// Numbers of a head's queries and keys that are turned by position.
    pub qk_rope: u64,
    /// The width of a head's values.
    pub v_dim: u64,
}

impl Latent {
    /// Whether attention is of another kind.
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
