//! Fields of operators.

use super::frequencies::Scaling;
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
    /// Mean and variance, gain only.
    LayerGain,
    /// Root mean square; the gain is one more than its parameter.
    RmsUnit,
}

impl NormKind {
    /// Returns true if rows are centred on their mean.
    pub const fn is_centred(self) -> bool {
        matches!(self, Self::Layer | Self::LayerGain)
    }
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
    /// GELU by the error function.
    GeluErf,
}

/// An element-wise non-linearity of the first half of a row, multiplied with the second half.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GateKind {
    /// gelu(gate)·up, with GELU by the error function.
    GeluErf,
    /// With gate at most 7 and up within ±7: gate·sigmoid(1.702·gate)·(up + 1), as in gpt-oss.
    ClampedSwiGlu,
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

/// Keys that a query attends to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// Its own and earlier ones.
    #[default]
    Causal,
    /// The last n positions, its own included.
    Window(u64),
    /// Its own and earlier positions of its chunk of n tokens.
    Chunk(u64),
    /// All.
    Full,
}

impl Mask {
    /// Number of keys under a causal mask that gives `seq` queries as many scores as this mask
    /// does: costs are stated for causal attention.
    pub fn causal_keys(self, seq: u64) -> u64 {
        match self {
            Self::Causal => seq,
            Self::Full => 2 * seq,
            Self::Chunk(chunk) => chunk.min(seq),
            // s·w - w²/2 scores, of which s·k/2 are s·(2w - w²/s)/2.
            Self::Window(window) => {
                let window = window.min(seq);
                2 * window - (window as u128 * window as u128 / u128::from(seq.max(1))) as u64
            }
        }
    }
}

/// Scores of attention, beyond `q·k/√d` under a causal mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scores {
    /// Keys that a query attends to.
    pub mask: Mask,
    /// Factor of the scores; 0 for 1/√d.
    pub scale: f64,
    /// Bound c of the scores, c·tanh(score/c); 0 for none.
    pub softcap: f64,
    /// Number of heads of the model if scores have a bias linear in the distance (Press et al.,
    /// ALiBi, arXiv 2108.12409); 0 if they have none.
    pub alibi: u64,
    /// Factor of these biases; 0 for 1.
    pub alibi_scale: f64,
    /// True if each head has a learned score of no key (`sinks`).
    pub sinks: bool,
}

impl Scores {
    /// Returns true for causal attention without any of the rest.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }
}

/// Rotation by position, beyond pairs (i, i + d/2) of whole heads at unscaled frequencies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rotary {
    /// Number of leading elements of a head that are rotated; 0 for all.
    pub dims: u64,
    /// Change of the frequencies.
    pub scaling: Scaling,
    /// Factor of the rotated elements.
    pub magnitude: f64,
}

impl Default for Rotary {
    fn default() -> Self {
        Self { dims: 0, scaling: Scaling::None, magnitude: 1.0 }
    }
}

impl Rotary {
    /// Returns true for whole heads at unscaled frequencies.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }
}

/// Head-wise norm of queries and keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadNormKind {
    /// Root mean square of each head; one gain for all query heads and one for all key heads.
    #[default]
    Head,
    /// The same, with gains that are one more than their parameters.
    HeadUnit,
    /// Root mean square of each head, without gains.
    Bare,
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
    /// True if the weights of a token's experts are their scores, not divided by their sum.
    pub raw: bool,
    /// True if a group is judged by its best expert instead of its best two.
    pub best_of_group: bool,
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
    /// Rest of the rotation; all `rope` elements are rotated.
    pub rotary: Rotary,
}
