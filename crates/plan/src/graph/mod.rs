//! A model as a graph of operators with static shapes, for one microbatch.
//!
//! A model is a chain of layers; each layer is a directed acyclic graph of operators. Layers of the
//! same shape share one [`LayerGraph`], so that a hundred equal blocks are described once. Shapes
//! are *logical*: `[tokens, width]` with the tokens of one microbatch over all data-parallel
//! replicas; a rank's shard of a tensor follows from its [`Spec`](crate::spec::Spec).

mod build;
mod cost;
mod differentiate;
mod dlrm;
mod resnet;

pub use build::build;
pub use cost::Cost;

use crate::compress::CompressOp;
use crate::ids::{LayerId, ParamId, TensorId};
use crate::outer_optimizer::OuterOp;
use serde::{Deserialize, Serialize};

/// A model's layers, in forward order.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// The distinct layers.
    pub kinds: Vec<LayerGraph>,
    /// The chain of layers, each with its kind.
    pub layers: Vec<LayerDecl>,
    /// Number of sequences in a microbatch over all replicas.
    pub batch: u64,
    /// Number of tokens per sequence.
    pub seq: u64,
}

impl Graph {
    /// The graph of a layer.
    pub fn layer(&self, layer: LayerId) -> &LayerGraph {
        &self.kinds[self.layers[layer.index()].kind]
    }

    /// First layer with a loss: the head. It and all later layers are on one stage.
    pub fn head(&self) -> usize {
        let with_loss = |decl: &LayerDecl| self.kinds[decl.kind].has_loss();
        self.layers.iter().position(with_loss).unwrap_or(self.layers.len().saturating_sub(1))
    }

    /// Layer that holds a parameter of another layer: the head, if prediction modules use its
    /// table. A tied table is stored on each stage that uses it.
    pub fn holder(&self, layer: LayerId, param: ParamId) -> (LayerId, ParamId) {
        if !self.layer(layer).param(param).borrowed {
            return (layer, param);
        }
        let head = LayerId::from(self.head());
        let name = &self.layer(layer).param(param).name;
        let own = self.layer(head).params.iter().position(|held| held.name == *name);
        (head, own.map_or(param, ParamId::from))
    }
}

/// One layer of the chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerDecl {
    /// Its name, the prefix of its parameters' names: `blocks.3`.
    pub name: String,
    /// Position of its graph in [`Graph::kinds`].
    pub kind: usize,
}

/// The operators of one layer, forward and backward.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerGraph {
    /// `embedding`, `block`, `head`.
    pub name: String,
    /// All tensors, gradients of activations included.
    pub tensors: Vec<Tensor>,
    /// Parameters.
    pub params: Vec<Param>,
    /// Forward operators, in an order that respects their dependencies.
    pub forward: Vec<Operator>,
    /// Gradient operators; an operator's input gradient directly precedes its weight gradient.
    pub backward: Vec<Operator>,
    /// Input from the previous layer (`None` for the first layer).
    pub input: Option<TensorId>,
    /// Output to the next layer (`None` for the last).
    pub output: Option<TensorId>,
    /// Gradient of `output`, received from the next layer.
    pub output_grad: Option<TensorId>,
    /// Gradient of `input`, passed to the previous layer.
    pub input_grad: Option<TensorId>,
}

impl LayerGraph {
    /// Tensor with the given id.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    /// Parameter with the given id.
    pub fn param(&self, id: ParamId) -> &Param {
        &self.params[id.index()]
    }

    /// Returns true if the layer has a loss.
    pub fn has_loss(&self) -> bool {
        self.tensors.iter().any(|tensor| tensor.class == TensorClass::Loss)
    }

    /// Returns true for layers between embedding and heads: they have an input and an output, but
    /// no loss.
    pub fn is_block(&self) -> bool {
        self.input.is_some() && self.output.is_some() && !self.has_loss()
    }
}

/// Class of a tensor; determines its element type and the source of its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorClass {
    /// Token ids that the model reads.
    Tokens,
    /// Input features that the model reads, e.g. pixels.
    Features,
    /// Token ids that the model should predict.
    Targets,
    /// Token ids the given number of positions after the input tokens.
    Lookahead(u16),
    /// A value in the activation type, or its gradient.
    Activation,
    /// A value that always stays f32: norm statistics, softmax sums.
    Statistic,
    /// Sum of the losses of the microbatches so far.
    Loss,
    /// Computed integers: the experts chosen for a token.
    Index,
    /// Tokens in the order of their experts, in the activation type.
    Dispatched,
    /// Number of tokens per expert.
    Counts,
    /// Number of tokens dropped for lack of expert capacity, over the microbatches so far.
    Dropped,
}

impl TensorClass {
    /// Returns true if microbatches add to the value instead of replacing it.
    pub const fn adds_up(self) -> bool {
        match self {
            Self::Loss | Self::Dropped => true,
            Self::Tokens
            | Self::Features
            | Self::Targets
            | Self::Lookahead(_)
            | Self::Activation
            | Self::Statistic
            | Self::Index
            | Self::Dispatched
            | Self::Counts => false,
        }
    }
}

/// A value between operators of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name within its layer.
    pub name: String,
    /// Logical `[tokens, width]`.
    pub dims: [u64; 2],
    /// Class of the tensor.
    pub class: TensorClass,
    /// Widths of the parts concatenated in a row (`[q | k | v]`); empty for one part.
    pub blocks: Vec<u64>,
}

/// Initial values of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// All zero.
    Zero,
    /// All one.
    One,
    /// Normal with this standard deviation, drawn per logical element.
    Normal(f64),
}

/// A trained parameter of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Name within its layer.
    pub name: String,
    /// Logical dimensions; a vector has one row: `[1, width]`. Linear weights are `[out, in]`.
    pub dims: [u64; 2],
    /// Sizes of the parts along the first dimension (second for vectors), as for tensors.
    pub blocks: Vec<u64>,
    /// Initial values.
    pub init: Init,
    /// True if weight decay applies (matrices: yes; biases and norms: no).
    pub decay: bool,
    /// Number of experts whose matrices are stacked along the rows; 0 for parameters outside
    /// experts. `blocks` are then those of one expert.
    pub experts: u64,
    /// True if this is one use of the embedding's table that other layers use too. If the uses are
    /// on two stages, both hold equal values, and their gradients are summed once per iteration.
    pub tied: bool,
    /// True if the head, which is on the same stage, holds it.
    pub borrowed: bool,
    /// True if a later layer on the same stage uses it too. That layer's backward pass has started
    /// the sum to which this gradient is added.
    pub adds: bool,
    /// True if it is a running average instead of a learned parameter. Its gradient is the
    /// iteration's own average, towards which the step moves it.
    pub running: bool,
    /// True if a sample touches only a few of its rows. It has no gradient of its own size; the
    /// operator that knows the rows performs their step.
    pub sparse: bool,
}

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

/// Pass of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpPass {
    /// The operator itself.
    Forward,
    /// Its gradient for its inputs.
    BackwardInput,
    /// Its gradient for its parameters, added to the sum of earlier microbatches.
    BackwardWeight,
}

/// One operator, or one pass of its gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct Operator {
    /// Computation performed.
    pub kind: OpKind,
    /// Forward, input gradient or weight gradient.
    pub pass: OpPass,
    /// Tensors it reads.
    pub inputs: Vec<TensorId>,
    /// Parameters it reads (forward, input gradient) or whose gradient it adds to (weight gradient).
    pub params: Vec<ParamId>,
    /// Tensors it writes.
    pub outputs: Vec<TensorId>,
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

/// The closed set of operators. Inputs and outputs are those of the forward pass; `differentiate`
/// determines those of gradients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpKind {
    /// token ids → rows of a table.
    Embedding,
    /// x → x + the position's row of a table.
    Position,
    /// x → (normalised x, statistics).
    Norm {
        /// Kind of norm.
        norm: NormKind,
        /// Added to the variance.
        eps: f64,
    },
    /// x → x·Wᵀ.
    Linear {
        /// Role of the matrix in its layer.
        role: LinearRole,
    },
    /// x → x + b.
    Bias,
    /// qkv → qkv with queries and keys rotated by position.
    Rope {
        /// Head counts.
        heads: Heads,
        /// Base of the RoPE wavelengths.
        theta: f64,
    },
    /// qkv → (weighted values, log of the softmax's denominator per head and row).
    Attention {
        /// Head counts.
        heads: Heads,
        /// Number of tokens per sequence.
        seq: u64,
    },
    /// qkv → its keys and values alone, which ring attention sends around the ring. Its gradient is
    /// added to that of all three: (gradient of the keys and values, d.qkv) → d.qkv.
    KeysValues {
        /// Head counts.
        heads: Heads,
    },
    /// One step of ring attention: a rank's queries against the keys and values of the rank `step`
    /// places before it, merged into the running (weighted values, denominators).
    ///
    /// Forward: (qkv, keys and values, values so far, denominators so far) → (values,
    /// denominators).
    ///
    /// Gradient: (d.values, qkv, values, denominators, keys and values, d.qkv so far[, gradient of
    /// the keys and values so far]) → (d.qkv, gradient of the keys and values).
    AttentionBlock {
        /// Head counts.
        heads: Heads,
        /// Query tokens of one sequence on this rank.
        queries: u64,
        /// Key tokens in this step.
        keys: u64,
        /// Distance in ranks that the keys and values have travelled.
        step: u32,
    },
    /// Element-wise non-linearity.
    Activation {
        /// The function.
        function: ActivationKind,
    },
    /// [gate | up] → silu(gate)·up.
    SwiGlu,
    /// a, b → a + b.
    Add,
    /// logits → largest logit per row.
    RowMax,
    /// logits, max, targets → (Σ exp(logit − max), target's logit − max) per row.
    SoftmaxStats,
    /// stats → Σ over rows of the loss, added to the iteration's loss. The gradient of the logits
    /// is (softmax − one-hot)·scale.
    CrossEntropy {
        /// Weight of one token's loss: 1 / tokens of the global batch.
        scale: f64,
    },
    /// images → at every window position, the product of its pixels with a matrix whose rows are
    /// filters: [filters, kernel · kernel · channels].
    Conv {
        /// The window and its input images.
        window: Window,
    },
    /// (images; running mean) → per channel (Σ (x − r), Σ (x − r)²) over all pixels of the
    /// microbatch. Subtracting the running mean r limits cancellation (Chan, Golub and LeVeque,
    /// "Algorithms for computing the sample variance", 1983, section 3). Its gradient: (dy, x,
    /// statistics) → per channel (Σ dy, Σ dy·n) with n the normalised x.
    BatchSums {
        /// Number of channels per pixel.
        channels: u64,
    },
    /// (x, sums; gain, bias, running mean, running variance) → (normalised x, statistics), with
    /// mean and reciprocal deviation per channel as statistics (Ioffe and Szegedy, arXiv
    /// 1502.03167, algorithm 1). The gradient of x takes (dy, x, statistics, sums of gradients),
    /// that of the weights (sums of gradients, statistics).
    BatchNorm {
        /// Number of channels per pixel.
        channels: u64,
        /// Added to the variance.
        eps: f64,
        /// Number of pixels of a microbatch.
        pixels: u64,
        /// Number of ranks whose microbatches are summed.
        over: u32,
        /// Weight of a microbatch in the running averages: its fraction of an iteration's images.
        share: f64,
    },
    /// images → the maximum of each channel at every window position.
    MaxPool {
        /// The window and its input images.
        window: Window,
    },
    /// images → the mean of each channel.
    AveragePool {
        /// Number of channels per pixel.
        channels: u64,
    },
    /// ids → for each table the sum of the rows that a sample looks up, concatenated. Its weight
    /// gradient takes (gradient of the sums, ids).
    EmbeddingBag {
        /// Number of tables.
        tables: u64,
        /// Rows of each table that a sample looks up.
        lookups: u64,
        /// Width of a row.
        width: u64,
    },
    /// (gradient of the sums, ids) → a plain SGD step on the looked-up rows, instead of their
    /// gradient.
    StepRows {
        /// Number of tables.
        tables: u64,
        /// Rows of each table that a sample looks up.
        lookups: u64,
        /// Width of a row.
        width: u64,
    },
    /// (x, sums of rows) → x and the dot products of all pairs of vectors among x and the sums,
    /// concatenated (Naumov et al., arXiv 1906.00091, section 2.1.3). Its gradient: (dy, x, sums) →
    /// (dx, d.sums).
    Interact {
        /// Number of tables.
        tables: u64,
        /// Width of a vector.
        width: u64,
        /// Number of ranks that sent sums of whole tables, each its own tables for all samples.
        parts: u32,
    },
    /// (logit, target) → Σ over rows of the binary loss, added to the iteration's loss. The
    /// gradient of the logits is (probability − target)·scale.
    BinaryCrossEntropy {
        /// Weight of one sample's loss.
        scale: f64,
    },
    /// affinities of whole sequences → (choices, their weights, dropped choices[, their number]).
    /// The output rows are this rank's tokens of the sequences. First choices of all tokens take
    /// precedence over second choices, and earlier tokens over later ones. A sigmoid's bias is a
    /// parameter whose gradient is the experts' excess load. The gradient of the affinities
    /// includes that of the balancing loss.
    Route(Routing),
    /// (x, choices) → (tokens in expert order, index of each choice among them, counts). Each rank
    /// with experts has a region, filled from its start.
    Dispatch {
        /// Number of experts to choose from.
        experts: u64,
        /// Number of experts per token.
        topk: u64,
        /// Number of regions, each for an equal number of experts.
        regions: u64,
    },
    /// (tokens in expert order, counts) → product with their expert's matrix, for all local
    /// experts.
    ExpertLinear {
        /// Role of the matrix in the expert.
        role: LinearRole,
        /// Number of local experts.
        experts: u64,
        /// Number of token regions: one for each source rank.
        regions: u64,
        /// Number of tokens received under balanced load; used for the cost.
        rows: u64,
    },
    /// (tokens in expert order, indices, weights) → weighted sum per token.
    Combine {
        /// Number of experts per token.
        topk: u64,
    },
    /// qkv → (qkv with queries and keys normalised per head, statistics).
    HeadNorm {
        /// Head counts.
        heads: Heads,
        /// Added to the mean square.
        eps: f64,
    },
    /// (queries, unrotated parts of the keys and values, rotated parts of the keys) → qkv, with
    /// values zero-padded to the width of keys.
    LatentHeads(LatentHeads),
    /// weighted values as wide as keys → without the padding.
    LatentValues(LatentHeads),
    /// gradient → Σ g² per block of [`BLOCK`] elements. The gradient may be one of several equal
    /// shards that the replicas hold; the blocks of the other shards are zero.
    BlockSquares {
        /// Number of shards of the gradient.
        parts: u32,
        /// True if sharded among the replicas of experts.
        experts: bool,
    },
    /// sums of blocks → sums of tensors.
    TensorSquares,
    /// sums of tensors → norm of the gradient.
    Norm2,
    /// numbers, or none → their sum.
    Total,
    /// One operator of a compressed reduction.
    Compress(CompressOp),
    /// One operator of the outer step of local SGD.
    Outer(OuterOp),
}

/// Elements per block. Sums of squares are formed per block, and ZeRO and buckets split only at
/// block boundaries, so that the norm is bitwise identical in every layout.
pub const BLOCK: u64 = 1024;

impl OpKind {
    /// Pairs (input, output) of which the output overwrites the input, for in-place operators.
    pub(crate) fn replaces(&self, part: OpPass) -> &'static [(usize, usize)] {
        match (self, part) {
            // The logits are the largest activation of a language model, and nothing reads them after
            // their gradient has been computed.
            (Self::CrossEntropy { .. }, OpPass::BackwardInput) => &[(1, 0)],
            // Ring steps accumulate.
            (Self::AttentionBlock { .. }, OpPass::Forward) => &[(2, 0), (3, 1)],
            (Self::AttentionBlock { step: ..=1, .. }, OpPass::BackwardInput) => &[(5, 0)],
            (Self::AttentionBlock { .. }, OpPass::BackwardInput) => &[(5, 0), (6, 1)],
            (Self::KeysValues { .. }, OpPass::BackwardInput) => &[(1, 0)],
            _ => &[],
        }
    }

    /// Short name for traces.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Position => "position",
            Self::Norm { .. } => "norm",
            Self::Linear { role } => match role {
                LinearRole::Qkv => "qkv",
                LinearRole::AttentionOut => "attention_out",
                LinearRole::Up => "up",
                LinearRole::Down => "down",
                LinearRole::Head => "head",
                LinearRole::Router => "router",
                LinearRole::Latent => "latent",
                LinearRole::Join => "join",
            },
            Self::Bias => "bias",
            Self::Rope { .. } => "rope",
            Self::Attention { .. } => "attention",
            Self::KeysValues { .. } => "keys_values",
            Self::AttentionBlock { .. } => "attention_block",
            Self::Activation { function } => match function {
                ActivationKind::Gelu => "gelu",
                ActivationKind::Relu => "relu",
                ActivationKind::SquaredRelu => "squared_relu",
            },
            Self::SwiGlu => "swiglu",
            Self::Add => "add",
            Self::RowMax => "row_max",
            Self::SoftmaxStats => "softmax_stats",
            Self::CrossEntropy { .. } => "cross_entropy",
            Self::Conv { .. } => "conv",
            Self::BatchSums { .. } => "batch_sums",
            Self::BatchNorm { .. } => "batch_norm",
            Self::MaxPool { .. } => "max_pool",
            Self::AveragePool { .. } => "average_pool",
            Self::EmbeddingBag { .. } => "embedding_bag",
            Self::StepRows { .. } => "step_rows",
            Self::Interact { .. } => "interact",
            Self::BinaryCrossEntropy { .. } => "binary_cross_entropy",
            Self::Route(_) => "route",
            Self::Dispatch { .. } => "dispatch",
            Self::ExpertLinear { .. } => "expert_linear",
            Self::Combine { .. } => "combine",
            Self::HeadNorm { .. } => "head_norm",
            Self::LatentHeads(_) => "latent_heads",
            Self::LatentValues(_) => "latent_values",
            Self::BlockSquares { .. } => "block_squares",
            Self::TensorSquares => "tensor_squares",
            Self::Norm2 => "norm2",
            Self::Total => "total",
            Self::Compress(op) => op.name(),
            Self::Outer(op) => op.name(),
        }
    }
}
