//! A model as a graph of operators with static shapes, for one microbatch.
//!
//! A model is a chain of layers; each layer is a directed acyclic graph of operators. Layers of the
//! same shape share one [`LayerGraph`], so that a hundred equal blocks are described once. Shapes are
//! *logical*: `[tokens, width]` with the tokens of one microbatch over all data-parallel replicas;
//! what a rank holds of a tensor follows from its [`Spec`](crate::spec::Spec).

mod build;
mod cost;
mod differentiate;
mod dlrm;
mod resnet;

pub use build::build;
pub use cost::Cost;

use crate::compress::CompressOp;
use crate::ids::{LayerId, ParamId, TensorId};
use crate::outer::OuterOp;
use serde::{Deserialize, Serialize};

/// A model's layers, in forward order.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// The distinct layers.
    pub kinds: Vec<LayerGraph>,
    /// The chain: which kind stands where.
    pub layers: Vec<LayerDecl>,
    /// Sequences in a microbatch over all replicas, and tokens in each.
    pub batch: u64,
    /// Tokens of one sequence.
    pub seq: u64,
}

impl Graph {
    /// The graph of a layer.
    pub fn layer(&self, layer: LayerId) -> &LayerGraph {
        &self.kinds[self.layers[layer.index()].kind]
    }

    /// The first layer that has a loss: the head, from which on layers stay on one stage.
    pub fn head(&self) -> usize {
        let with_loss = |decl: &LayerDecl| self.kinds[decl.kind].has_loss();
        self.layers.iter().position(with_loss).unwrap_or(self.layers.len().saturating_sub(1))
    }

    /// The layer that holds a parameter of another one: the head, where modules for further tokens use
    /// its table. A tied table stands with each stage that uses it.
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
    /// Gradient operators; an operator's input gradient stands right before its weight gradient.
    pub backward: Vec<Operator>,
    /// What arrives from the layer before (none for the first layer).
    pub input: Option<TensorId>,
    /// What goes to the layer after (none for the last).
    pub output: Option<TensorId>,
    /// Gradient of `output`, which arrives from the layer after.
    pub output_grad: Option<TensorId>,
    /// Gradient of `input`, which goes to the layer before.
    pub input_grad: Option<TensorId>,
}

impl LayerGraph {
    /// A tensor.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    /// A parameter.
    pub fn param(&self, id: ParamId) -> &Param {
        &self.params[id.index()]
    }

    /// Whether it has a loss.
    pub fn has_loss(&self) -> bool {
        self.tensors.iter().any(|tensor| tensor.class == TensorClass::Loss)
    }

    /// Whether it takes something in and hands it on, and nothing else comes of it: what stands
    /// between embedding and heads.
    pub fn is_block(&self) -> bool {
        self.input.is_some() && self.output.is_some() && !self.has_loss()
    }
}

/// What a tensor is, which decides its element type and who fills it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorClass {
    /// Token numbers that the model reads.
    Tokens,
    /// Numbers that the model reads: pixels.
    Features,
    /// Token numbers that it should predict.
    Targets,
    /// Token numbers that stand so many places behind those that it reads.
    Further(u16),
    /// A value in the activation type, or its gradient.
    Activation,
    /// A value that always stays f32: norm statistics, softmax sums.
    Statistic,
    /// The sum of the losses of the microbatches so far.
    Loss,
    /// Whole numbers that are computed: which experts a token goes to.
    Index,
    /// Tokens in the order of the experts that they go to, in the activation type.
    Dispatched,
    /// How many tokens go to each expert.
    Counts,
    /// How many tokens found no room with an expert, over the microbatches so far.
    Dropped,
}

impl TensorClass {
    /// Whether microbatches add to it rather than replace it.
    pub const fn adds_up(self) -> bool {
        match self {
            Self::Loss | Self::Dropped => true,
            Self::Tokens
            | Self::Features
            | Self::Targets
            | Self::Further(_)
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
    /// What it is.
    pub class: TensorClass,
    /// Widths of the parts that stand side by side in a row (`[q | k | v]`); empty for one part.
    pub blocks: Vec<u64>,
}

/// How a parameter starts.
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
    /// Starting values.
    pub init: Init,
    /// Whether weight decay applies (matrices: yes; biases and norms: no).
    pub decay: bool,
    /// How many experts' matrices stand below each other; none for what is no expert's. `blocks` are
    /// then those of one expert.
    pub experts: u64,
    /// Whether this is one use of the embedding's table that other layers use too. Where they stand
    /// on two stages, both hold equal values, and their gradients are summed once an iteration.
    pub tied: bool,
    /// Whether the head holds it, which stands on the same stage.
    pub borrowed: bool,
    /// Whether a layer behind this one on the same stage uses it too, whose backward pass has begun the
    /// sum that this one's gradient is added to.
    pub adds: bool,
    /// Whether it is an average over past iterations instead of something learnt: its gradient is the
    /// iteration's own average, towards which the step moves it.
    pub running: bool,
    /// Whether a sample touches a few of its rows only: it has no gradient of its own size, and the
    /// operator that knows which rows those are takes their step.
    pub sparse: bool,
}

/// A square window that moves over images, which lie row by row with a pixel's channels side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Window {
    /// Pixels along each side of an image.
    pub side: u64,
    /// Numbers in a pixel.
    pub channels: u64,
    /// Pixels along each side of the window.
    pub kernel: u64,
    /// Pixels from one place of the window to the next.
    pub stride: u64,
    /// Pixels that the window reaches beyond each edge.
    pub padding: u64,
}

impl Window {
    /// Places of the window along each side.
    pub const fn side_out(&self) -> u64 {
        let reach = self.side + 2 * self.padding;
        if reach < self.kernel { 0 } else { (reach - self.kernel) / self.stride + 1 }
    }

    /// Places of the window on one image.
    pub const fn places(&self) -> u64 {
        self.side_out() * self.side_out()
    }
}

/// Which computation of an operator this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// The operator itself.
    Forward,
    /// Its gradient for its inputs.
    InputGradient,
    /// Its gradient for its parameters, added to what earlier microbatches left.
    WeightGradient,
}

/// One operator, or one part of its gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct Operator {
    /// What it computes.
    pub kind: OpKind,
    /// Forward, input gradient or weight gradient.
    pub part: Part,
    /// Tensors it reads.
    pub inputs: Vec<TensorId>,
    /// Parameters it reads (forward, input gradient) or whose gradient it adds to (weight gradient).
    pub params: Vec<ParamId>,
    /// Tensors it writes.
    pub outputs: Vec<TensorId>,
}

/// Which matrix of a layer a linear operator holds. Sharding rules read this, nothing else does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinearRole {
    /// Queries, keys and values, side by side.
    Qkv,
    /// Attention's output projection.
    AttentionOut,
    /// Into the wide middle of the feed-forward part.
    Up,
    /// Back out of it.
    Down,
    /// Logits.
    Head,
    /// A token's affinities to the experts.
    Router,
    /// Down to a latent vector.
    Latent,
    /// From one of the two that a module for a further token joins.
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
    /// GELU by the tanh formula, as GPT-2 has it.
    Gelu,
    /// max(0, x).
    Relu,
    /// max(0, x)².
    SquaredRelu,
}

/// The shape of an attention operator. After sharding, of one rank's part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Heads {
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of one head.
    pub head_dim: u64,
}

/// How tokens come to experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Routing {
    /// Experts to choose from.
    pub experts: u64,
    /// Experts a token goes to.
    pub topk: u64,
    /// Whether affinities are sigmoids, with a bias for the choice, or a softmax.
    pub sigmoid: bool,
    /// What the weights of a token's experts add up to.
    pub scale: f64,
    /// Tokens of one sequence.
    pub seq: u64,
    /// How many tokens of a sequence an expert takes; none for all that come.
    pub capacity: Option<u64>,
    /// What a sequence's imbalance counts for in the loss.
    pub balance: f64,
    /// Groups of equally many experts.
    pub groups: u64,
    /// Groups that a token's experts come from.
    pub kept_groups: u64,
    /// Ranks that each have a part of every sequence, in a zigzag. Before sharding one.
    pub parts: u64,
}

/// The shape of attention whose heads come from latent vectors. After sharding, of one rank's part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatentHeads {
    /// Heads.
    pub heads: u64,
    /// Numbers of a head's queries and keys.
    pub head_dim: u64,
    /// How many of these, at their end, are turned by position.
    pub rope: u64,
    /// Numbers of a head's values.
    pub v_dim: u64,
    /// Base of the wavelengths.
    pub theta: f64,
}

/// The closed set of operators. Inputs and outputs are listed as the forward part has them; gradients
/// take what `differentiate` gives them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpKind {
    /// tokens → rows of a table.
    Embedding,
    /// x → x + the position's row of a table.
    Position,
    /// x → (normalised x, statistics).
    Norm {
        /// Which norm.
        norm: NormKind,
        /// Added to the variance.
        eps: f64,
    },
    /// x → x·Wᵀ.
    Linear {
        /// Which matrix of its layer it is.
        role: LinearRole,
    },
    /// x → x + b.
    Bias,
    /// qkv → qkv with queries and keys rotated by position.
    Rope {
        /// Head counts.
        heads: Heads,
        /// Base of the wavelengths.
        theta: f64,
    },
    /// qkv → (weighted values, log of the softmax's denominator per head and row).
    Attention {
        /// Head counts.
        heads: Heads,
        /// Tokens of one sequence.
        seq: u64,
    },
    /// qkv → its keys and values alone, which ring attention sends round. Its gradient is added to
    /// that of all three: (gradient of the keys and values, d.qkv) → d.qkv.
    KeysValues {
        /// Head counts.
        heads: Heads,
    },
    /// One step of ring attention: a rank's queries against the keys and values of the rank `step`
    /// places before it, merged into the running (weighted values, denominators):
    /// (qkv, keys and values, values so far, denominators so far) → (values, denominators). Its
    /// gradient: (d.values, qkv, values, denominators, keys and values, d.qkv so far[, gradient of the
    /// keys and values so far]) → (d.qkv, gradient of the keys and values).
    AttentionBlock {
        /// Head counts.
        heads: Heads,
        /// Query tokens of one sequence on this rank.
        queries: u64,
        /// Key tokens in this step.
        keys: u64,
        /// How far the keys and values have come.
        step: u32,
    },
    /// Element-wise non-linearity.
    Activation {
        /// Which one.
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
    /// stats → Σ over rows of the loss, added to the iteration's loss. Its gradient is that of the
    /// logits: (softmax − one-hot)·scale.
    CrossEntropy {
        /// What one token's loss counts for: 1 / tokens of the global batch.
        scale: f64,
    },
    /// images → at every place of the window, the product of what it sees with a matrix whose rows are
    /// filters: [filters, kernel · kernel · channels].
    Conv {
        /// The window and the images that it moves over.
        window: Window,
    },
    /// (images; running mean) → per channel (Σ (x − r), Σ (x − r)²) over all pixels of the microbatch,
    /// from the running mean r so that little cancels (Chan, Golub and LeVeque, "Algorithms for
    /// computing the sample variance", 1983, section 3). Its gradient: (dy, x, statistics) → per channel
    /// (Σ dy, Σ dy·n) with n the normalised x.
    BatchSums {
        /// Numbers in a pixel.
        channels: u64,
    },
    /// (x, sums; gain, bias, running mean, running variance) → (normalised x, statistics), where the
    /// statistics are mean and reciprocal deviation per channel (Ioffe and Szegedy, arXiv 1502.03167,
    /// algorithm 1). The gradient for x takes (dy, x, statistics, sums of gradients), that for the
    /// weights (sums of gradients, statistics).
    BatchNorm {
        /// Numbers in a pixel.
        channels: u64,
        /// Added to the variance.
        eps: f64,
        /// Pixels of a microbatch.
        pixels: u64,
        /// Ranks whose microbatches the sums are over.
        over: u32,
        /// What a microbatch counts for in the running averages: its share of an iteration's images.
        share: f64,
    },
    /// images → the largest of each channel at every place of the window.
    MaxPool {
        /// The window and the images that it moves over.
        window: Window,
    },
    /// images → the mean of each channel.
    AveragePool {
        /// Numbers in a pixel.
        channels: u64,
    },
    /// ids → for each table the sum of the rows that a sample looks up, side by side. Its weight gradient is of
    /// (gradient of the sums, ids).
    EmbeddingBag {
        /// How many tables there are.
        tables: u64,
        /// Rows of each that a sample looks up.
        lookups: u64,
        /// The width of a row.
        width: u64,
    },
    /// (gradient of the sums, ids) → a step of plain descent of the rows that were looked up, in place of
    /// their gradient.
    StepRows {
        /// How many tables there are.
        tables: u64,
        /// Rows of each that a sample looks up.
        lookups: u64,
        /// The width of a row.
        width: u64,
    },
    /// (x, sums of rows) → x and the products of all pairs of vectors among x and the sums, side by side
    /// (Naumov et al., arXiv 1906.00091, section 2.1.3). Its gradient: (dy, x, sums) → (dx, d.sums).
    Interact {
        /// How many tables there are.
        tables: u64,
        /// The width of a vector.
        width: u64,
        /// Ranks from which the sums of whole tables came, each with its own tables of all samples.
        parts: u32,
    },
    /// (logit, target) → Σ over rows of the loss of a yes or no, added to the iteration's loss. Its
    /// gradient is that of the logits: (probability − target)·scale.
    BinaryCrossEntropy {
        /// What one sample's loss counts for.
        scale: f64,
    },
    /// affinities of whole sequences → (choices, their weights, those without room[, how many]). The
    /// rows that come out are those that this rank has of the sequences; each token's first choice
    /// counts before any second one, and earlier tokens before later ones. A sigmoid's bias is a
    /// parameter whose gradient is the experts' excess load. The gradient of the affinities includes
    /// that of the balancing loss.
    Route(Routing),
    /// (x, choices) → (tokens in expert order, each choice's place among them, counts). There is a
    /// region for each rank that has experts, filled from its start.
    Dispatch {
        /// Experts to choose from.
        experts: u64,
        /// Experts a token goes to.
        topk: u64,
        /// Regions, each for an equal number of experts.
        regions: u64,
    },
    /// (tokens in expert order, counts) → their expert's product, for each of the experts held here.
    ExpertLinear {
        /// Which matrix of the expert it is.
        role: LinearRole,
        /// Experts held here.
        experts: u64,
        /// Regions that the tokens stand in: one for each rank that they come from.
        regions: u64,
        /// Tokens that come if all experts are equally liked, which is what is costed.
        rows: u64,
    },
    /// (tokens in expert order, places, weights) → weighted sum per token.
    Combine {
        /// Experts a token went to.
        topk: u64,
    },
    /// qkv → (qkv with queries and keys normalised head by head, statistics).
    HeadNorm {
        /// Head counts.
        heads: Heads,
        /// Added to the mean square.
        eps: f64,
    },
    /// (queries, keys' unturned numbers and values, keys' turned numbers) → qkv, with values as wide
    /// as keys, zero at their ends.
    LatentHeads(LatentHeads),
    /// weighted values as wide as keys → as wide as they are.
    LatentValues(LatentHeads),
    /// gradient → Σ g² per block of [`BLOCK`] elements. The gradient may be one of several equal parts
    /// that the replicas hold; the blocks of the others are zero.
    BlockSquares {
        /// Into how many parts the gradient is dealt out.
        parts: u32,
        /// Whether among the replicas of experts.
        experts: bool,
    },
    /// sums of blocks → sums of tensors.
    TensorSquares,
    /// sums of tensors → the gradient's norm.
    Norm2,
    /// numbers, or none → their sum.
    Total,
    /// A part of a compressed reduction.
    Compress(CompressOp),
    /// A part of the comparison of replicas that train apart.
    Outer(OuterOp),
}

/// Elements of a block: sums of squares are formed per block, and ZeRO and buckets cut only at block
/// boundaries, so that the norm has the same bits in every layout.
pub const BLOCK: u64 = 1024;

impl OpKind {
    /// Which inputs a part of the operator overwrites with which outputs, if it works in place.
    pub(crate) fn replaces(&self, part: Part) -> &'static [(usize, usize)] {
        match (self, part) {
            // The logits are the largest activation of a language model, and nothing reads them after
            // their gradient has been computed.
            (Self::CrossEntropy { .. }, Part::InputGradient) => &[(1, 0)],
            // Steps of a ring add up.
            (Self::AttentionBlock { .. }, Part::Forward) => &[(2, 0), (3, 1)],
            (Self::AttentionBlock { step: ..=1, .. }, Part::InputGradient) => &[(5, 0)],
            (Self::AttentionBlock { .. }, Part::InputGradient) => &[(5, 0), (6, 1)],
            (Self::KeysValues { .. }, Part::InputGradient) => &[(1, 0)],
            _ => &[],
        }
    }

    /// A short name for traces.
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
