//! Fields of operators.

use serde::{Deserialize, Serialize};

/// A square sliding window over images, stored row by row with a pixel's channels adjacent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Window {
    /// Pixels along each side of an image.
    pub side: u64,
    /// Number of channels per pixel.
    pub channels: u64,
    /// Pixels along each side of the window.
    pub kernel: u64,
    /// Pixels between consecutive window positions.
    pub stride: u64,
    /// Padding pixels at each edge.
    pub padding: u64,
}

impl Window {
    /// Number of window positions along each side.
    pub const fn side_out(&self) -> u64 {
        let reach = self.side + 2 * self.padding;
        if reach < self.kernel { 0 } else { (reach - self.kernel) / self.stride + 1 }
    }

    /// Number of window positions on one image.
    pub const fn places(&self) -> u64 {
        self.side_out() * self.side_out()
    }
}

/// Role of a linear operator's matrix in its layer. Only sharding rules read this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinearRole {
    /// Queries, keys and values, concatenated.
    Qkv,
    /// Attention's output projection.
    AttentionOut,
    /// Up-projection of the feed-forward part.
    Up,
    /// Down-projection of the feed-forward part.
    Down,
    /// Logits.
    Head,
    /// A token's affinities to the experts.
    Router,
    /// Projection down to a latent vector.
    Latent,
    /// Projection of one of the two inputs that a multi-token prediction module joins.
    Join,
}

/// Layer norm or root-mean-square norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// Mean and variance, gain and bias.
    Layer,
    /// Root mean square, gain only.
    Rms,
}

/// An element-wise non-linearity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationKind {
    /// GELU by the tanh formula, as in GPT-2.
    Gelu,
    /// max(0, x).
    Relu,
    /// max(0, x)².
    SquaredRelu,
}

/// Shape of an attention operator; after sharding, of one rank's shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Heads {
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of one head.
    pub head_dim: u64,
}

/// Routing of tokens to experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Routing {
    /// Number of experts to choose from.
    pub experts: u64,
    /// Number of experts per token.
    pub topk: u64,
    /// True if affinities are sigmoids with a selection bias; otherwise they are a softmax.
    pub sigmoid: bool,
    /// Sum of the weights of a token's experts.
    pub scale: f64,
    /// Number of tokens per sequence.
    pub seq: u64,
    /// Maximum number of tokens of a sequence per expert; `None` for no limit.
    pub capacity: Option<u64>,
    /// Weight of a sequence's load imbalance in the loss.
    pub balance: f64,
    /// Number of equally sized expert groups.
    pub groups: u64,
    /// Number of groups from which a token's experts are chosen.
    pub kept_groups: u64,
    /// Number of ranks that each hold a zigzag shard of every sequence; 1 before sharding.
    pub parts: u64,
}

/// Shape of multi-head latent attention; after sharding, of one rank's shard.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatentHeads {
    /// Number of heads.
    pub heads: u64,
    /// Width of a head's queries and keys.
    pub head_dim: u64,
    /// Number of these, at their end, that are rotated by position.
    pub rope: u64,
    /// Width of a head's values.
    pub v_dim: u64,
    /// Base of the RoPE wavelengths.
    pub theta: f64,
}
