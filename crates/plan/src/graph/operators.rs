//! The table of operators: one row per operator, from which everything else about it follows.
//!
//! ```text
//! Variant = "text form" { fields } => cost class, gradient, sharding rule, in-place outputs;
//! ```
//!
//! | generated from a row | by |
//! |---|---|
//! | variant of [`OpKind`], its documentation | `operators!` |
//! | text form and its parser, field by field ([`Attribute`]) | `operators!` |
//! | name in traces: the text form's first word unless the row has a `named` | `operators!` |
//! | FLOPs, bytes and kernel of the simulator | [`CostClass`] |
//! | gradient operators | [`Gradient`] |
//! | placements along the tensor-parallel axis, one rank's fields | [`Sharding`] |
//!
//! A new operator is one row here, one kernel, and one binding in each device.

use super::OpPass;
use super::attributes::{
    ActivationKind, GateKind, HeadNormKind, Heads, LatentHeads, LinearRole, NormKind, Rotary,
    Routing, Scores, Window,
};
use super::cost::{CostClass, ElementWise, Permute, Product, RowWise};
use super::differentiate::Gradient;
use super::differentiate::Of::{Dy, Sign, Sums, X, Y};
use super::row::{
    Row, element_wise, first, input, lookup, permute, product, reduction, row, row_wise, weight,
};
use super::sharding::{self, Sharding};
use crate::compress::CompressOp;
use crate::outer_optimizer::OuterOp;
use crate::text::{Attribute, Line, ParseError, Word};
use serde::{Deserialize, Serialize};

macro_rules! operators {
    ($(
        $(#[$doc:meta])*
        $name:ident = $word:literal $(| $also:literal)*
        $({ $($(#[$field_doc:meta])* $field:ident: $type:ty,)+ })?
        $(($inner:ident: $group:ty))?
        => $row:expr $(, named $named:expr)?;
    )+) => {
        /// The closed set of operators. Inputs and outputs are those of the forward pass; its
        /// [`Gradient`] determines those of gradients.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum OpKind {
            $(
                $(#[$doc])*
                $name $({ $($(#[$field_doc])* $field: $type),+ })? $(($group))?,
            )+
        }

        #[allow(unused_variables)]
        impl OpKind {
            pub(crate) fn row(&self) -> Row {
                match *self {
                    $(Self::$name $({ $($field),+ })? $(($inner))? => $row,)+
                }
            }

            /// Short name for traces.
            pub fn name(&self) -> &'static str {
                match *self {
                    $(Self::$name $({ $($field),+ })? $(($inner))? => {
                        let name = $word;
                        $(let name = $named;)?
                        name
                    })+
                }
            }

            /// Writes the text form: a word, then the fields.
            pub(crate) fn print(&self, out: &mut String) {
                match self {
                    $(Self::$name $({ $($field),+ })? $(($inner))? => {
                        let word = $word;
                        $(let word = Attribute::keyword($inner, word);)?
                        out.push_str(word);
                        $($(Attribute::print($field, stringify!($field), out);)+)?
                        $(Attribute::print($inner, word, out);)?
                    })+
                }
            }

            /// Reads the text form.
            pub(crate) fn parse(line: &mut Line<'_>) -> Result<Self, ParseError> {
                let word = line.word("operator")?;
                Ok(match word {
                    $($word $(| $also)* => Self::$name
                        $({ $($field: Attribute::parse(stringify!($field), line)?),+ })?
                        $((<$group as Attribute>::parse(word, line)?))?,)+
                    other => return line.error(format!("there is no operator '{other}'")),
                })
            }

            /// The operator on one of `tp` equal shares of its heads.
            pub(crate) fn cut(self, tp: u64) -> Self {
                match self {
                    $(Self::$name $({ $($field),+ })? $(($inner))? => Self::$name
                        $({ $($field: Attribute::cut($field, tp)),+ })?
                        $((Attribute::cut($inner, tp)))?,)+
                }
            }
        }
    };
}

operators! {
    /// token ids → rows of a table.
    Embedding = "embedding"
        => lookup(1).gradient(weight(&[Dy, X(0)])).sharding(sharding::VOCABULARY);

    /// x → x + the position's row of a table.
    Position = "position"
        => element_wise(ElementWise::Position)
            .intensity(1.0)
            .gradient(weight(&[Dy]).passed())
            .sharding(Sharding::Stream);

    /// x → (normalised x, statistics).
    Norm = "norm" {
        /// Kind of norm.
        norm: NormKind,
        /// Added to the variance.
        eps: f64,
    } => row_wise(RowWise::Norm(norm))
        .intensity(4.0)
        .gradient(input(&[Dy, X(0), Y(1)]).weight(&[Dy, X(0), Y(1)]))
        .sharding(Sharding::Stream);

    /// x → x·Wᵀ.
    Linear = "linear" {
        /// Role of the matrix in its layer.
        role: LinearRole,
    } => product(Product::Dense { role })
        .gradient(input(&[Dy]).weight(&[Dy, X(0)]))
        .sharding(sharding::linear(role)),
        named role.word();

    /// x → x + b.
    Bias = "bias"
        => element_wise(ElementWise::Bias)
            .intensity(1.0)
            .gradient(weight(&[Dy]).passed())
            .sharding(Sharding::LikeInput);

    /// qkv → qkv with queries and keys rotated by position.
    Rope = "rope" {
        /// Head counts.
        heads: Heads,
        /// Base of the RoPE wavelengths.
        theta: f64,
        /// Rest of the rotation.
        rotary: Rotary,
    } => element_wise(ElementWise::Rotation)
        .intensity(4.0)
        .gradient(input(&[Dy]))
        .sharding(Sharding::Width);

    /// qkv → (weighted values, log of the softmax's denominator per head and row). With
    /// `sinks`, a parameter holds each head's score of no key, of which the third output is a copy
    /// for its gradient.
    Attention = "attention" {
        /// Head counts.
        heads: Heads,
        /// Number of tokens per sequence.
        seq: u64,
        /// Scores.
        scores: Scores,
    } => row(CostClass::Attention {
            heads,
            queries: seq,
            keys: scores.mask.causal_keys(seq),
            merged: false,
        })
        .gradient(input(&[Dy, X(0), Y(0), Y(1)]).weight(&[Dy, Y(0), Y(1), Y(2)]))
        .sharding(Sharding::WidthWithParams);

    /// qkv → qkv with the query of position p multiplied by 1 + slope·ln(1 + ⌊(p + 1)/floor⌋), as
    /// in Llama 4's layers without rotation.
    Temperature = "temperature" {
        /// Head counts.
        heads: Heads,
        /// Positions over which the factor is constant.
        floor: f64,
        /// Growth of the factor.
        slope: f64,
    } => element_wise(ElementWise::Rotation)
        .intensity(1.0)
        .gradient(input(&[Dy]))
        .sharding(Sharding::Width);

    /// qkv → its keys and values alone, which ring attention sends around the ring. Its gradient is
    /// added to that of all three: (gradient of the keys and values, d.qkv) → d.qkv. Inserted by
    /// sharding along the sequence, for both attention and its gradient.
    KeysValues = "keys_values" {
        /// Head counts.
        heads: Heads,
    } => permute(Permute::Copy).in_place(&[], &[(1, 0)]);

    /// One step of ring attention: a rank's queries against the keys and values of the rank `step`
    /// places before it, merged into the running (weighted values, denominators).
    ///
    /// Forward: (qkv, keys and values, values so far, denominators so far) → (values,
    /// denominators).
    ///
    /// Gradient: (d.values, qkv, values, denominators, keys and values, d.qkv so far[, gradient of
    /// the keys and values so far]) → (d.qkv, gradient of the keys and values).
    AttentionBlock = "attention_block" {
        /// Head counts.
        heads: Heads,
        /// Query tokens of one sequence on this rank.
        queries: u64,
        /// Key tokens in this step.
        keys: u64,
        /// Distance in ranks that the keys and values have travelled.
        step: u32,
        /// Scores.
        scores: Scores,
    } => row(CostClass::Attention { heads, queries, keys, merged: true })
        // Ring steps accumulate.
        .in_place(&[(2, 0), (3, 1)], if step <= 1 { &[(5, 0)] } else { &[(5, 0), (6, 1)] });

    /// Element-wise non-linearity.
    Activation = "activation" {
        /// The function.
        function: ActivationKind,
    } => element_wise(ElementWise::Function)
        .intensity(10.0)
        .gradient(match function {
            ActivationKind::Relu => input(&[Dy, Sign]),
            ActivationKind::Gelu | ActivationKind::SquaredRelu | ActivationKind::GeluErf => {
                input(&[Dy, X(0)])
            }
        })
        .sharding(Sharding::LikeInput),
        named function.word();

    /// [gate | up] → silu(gate)·up.
    SwiGlu = "swiglu"
        => element_wise(ElementWise::Gated)
            .intensity(10.0)
            .gradient(input(&[Dy, X(0)]))
            .sharding(Sharding::Width);

    /// [gate | up] → gelu(gate)·up, with GELU by the tanh formula.
    GeGlu = "geglu"
        => element_wise(ElementWise::Gated)
            .intensity(10.0)
            .gradient(input(&[Dy, X(0)]))
            .sharding(Sharding::Width);

    /// [gate | up] → a function of both.
    Gated = "gated" {
        /// The function.
        gate: GateKind,
    } => element_wise(ElementWise::Gated)
        .intensity(10.0)
        .gradient(input(&[Dy, X(0)]))
        .sharding(Sharding::Width),
        named gate.word();

    /// x → x·factor.
    Scale = "scale" {
        /// The factor.
        factor: f64,
    } => element_wise(ElementWise::Sum)
        .intensity(1.0)
        .gradient(input(&[Dy]))
        .sharding(Sharding::LikeInput);

    /// x → cap·tanh(x/cap).
    SoftCap = "softcap" {
        /// Bound of the result.
        cap: f64,
    } => element_wise(ElementWise::Function)
        .intensity(10.0)
        .gradient(input(&[Dy, X(0)]))
        .sharding(Sharding::LikeInput);

    /// x → x clipped to ±limit.
    Clamp = "clamp" {
        /// Bound of the result.
        limit: f64,
    } => element_wise(ElementWise::Function)
        .intensity(2.0)
        .gradient(input(&[Dy, X(0)]))
        .sharding(Sharding::LikeInput);

    /// (x, one number per row) → each row times its number, or times the sigmoid of it.
    RowScale = "row_scale" {
        /// True if the numbers are logits.
        sigmoid: bool,
    } => row_wise(RowWise::Short)
        .intensity(2.0)
        .gradient(Gradient::NONE.input(&[0, 1], &[Dy, X(0), X(1)]))
        .sharding(Sharding::Stream);

    /// a, b → a + b.
    Add = "add"
        => element_wise(ElementWise::Sum)
            .intensity(1.0)
            .gradient(Gradient::NONE.passed())
            .sharding(Sharding::LikeInput);

    /// Tensors → their columns beside each other.
    Concat = "concat" {
        /// Number of tensors.
        parts: u64,
    } => permute(Permute::Copy)
        .gradient(Gradient::NONE.input(first(parts), &[Dy]))
        .sharding(Sharding::LikeInput);

    /// x → consecutive columns of it.
    Slice = "slice" {
        /// The first one.
        first: u64,
        /// Number of columns.
        width: u64,
    } => permute(Permute::Copy).gradient(input(&[Dy])).sharding(Sharding::Stream);

    /// logits → largest logit per row. The loss's gradient covers it.
    RowMax = "row_max"
        => row_wise(RowWise::LossPart).intensity(1.0).sharding(sharding::ROW_MAX);

    /// logits, max, targets → (Σ exp(logit − max), target's logit − max) per row. The loss's
    /// gradient covers it.
    SoftmaxStats = "softmax_stats"
        => row_wise(RowWise::LossPart).intensity(8.0).sharding(sharding::SOFTMAX_STATS);

    /// stats → Σ over rows of the loss, added to the iteration's loss. The gradient of the logits
    /// is (softmax − one-hot)·scale.
    CrossEntropy = "cross_entropy" {
        /// Weight of one token's loss: 1 / tokens of the global batch.
        scale: f64,
    } => row_wise(RowWise::Loss)
        .intensity(8.0)
        .gradient(Gradient::LOSS.input(&[1], &[X(0), X(1), X(2), X(3)]))
        .sharding(sharding::CROSS_ENTROPY)
        // The logits are the largest activation of a language model, and nothing reads them after
        // their gradient has been computed.
        .in_place(&[], &[(1, 0)]);

    /// images → at every window position, the product of its pixels with a matrix whose rows are
    /// filters: [filters, kernel · kernel · channels].
    Conv = "conv" {
        /// The window and its input images.
        window: Window,
    } => product(Product::Windows(window)).gradient(input(&[Dy]).weight(&[Dy, X(0)]));

    /// (images; running mean) → per channel (Σ (x − r), Σ (x − r)²) over all pixels of the
    /// microbatch. Subtracting the running mean r limits cancellation (Chan, Golub and LeVeque,
    /// "Algorithms for computing the sample variance", 1983, section 3). Its gradient: (dy, x,
    /// statistics) → per channel (Σ dy, Σ dy·n) with n the normalised x, inserted before that of
    /// the norm that follows.
    BatchSums = "batch_sums" {
        /// Number of channels per pixel.
        channels: u64,
    } => row_wise(RowWise::BatchNorm).intensity(4.0);

    /// (x, sums; gain, bias, running mean, running variance) → (normalised x, statistics), with
    /// mean and reciprocal deviation per channel as statistics (Ioffe and Szegedy, arXiv
    /// 1502.03167, algorithm 1). The gradient of x takes (dy, x, statistics, sums of gradients),
    /// that of the weights (sums of gradients, statistics).
    BatchNorm = "batch_norm" {
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
    } => row_wise(RowWise::BatchNorm)
        .intensity(4.0)
        .gradient(input(&[Dy, X(0), Y(1), Sums]).weight(&[Sums, Y(1)]));

    /// images → the maximum of each channel at every window position.
    MaxPool = "max_pool" {
        /// The window and its input images.
        window: Window,
    } => reduction()
        // One maximum per pixel of the window.
        .intensity((window.kernel * window.kernel) as f64)
        .gradient(input(&[Dy, X(0)]));

    /// images → the mean of each channel.
    AveragePool = "average_pool" {
        /// Number of channels per pixel.
        channels: u64,
    } => reduction().intensity(1.0).gradient(input(&[Dy]));

    /// ids → for each table the sum of the rows that a sample looks up, concatenated. Its weight
    /// gradient takes (gradient of the sums, ids).
    EmbeddingBag = "embedding_bag" {
        /// Number of tables.
        tables: u64,
        /// Rows of each table that a sample looks up.
        lookups: u64,
        /// Width of a row.
        width: u64,
    } => lookup(tables * lookups).intensity(1.0).gradient(weight(&[Dy, X(0)]));

    /// (gradient of the sums, ids) → a plain SGD step on the looked-up rows, instead of their
    /// gradient.
    StepRows = "step_rows" {
        /// Number of tables.
        tables: u64,
        /// Rows of each table that a sample looks up.
        lookups: u64,
        /// Width of a row.
        width: u64,
    } => lookup(tables * lookups).intensity(1.0);

    /// (x, sums of rows) → x and the dot products of all pairs of vectors among x and the sums,
    /// concatenated (Naumov et al., arXiv 1906.00091, section 2.1.3). Its gradient: (dy, x, sums) →
    /// (dx, d.sums).
    Interact = "interact" {
        /// Number of tables.
        tables: u64,
        /// Width of a vector.
        width: u64,
        /// Number of ranks that sent sums of whole tables, each its own tables for all samples.
        parts: u32,
    } => product(Product::Pairs { vectors: tables + 1, width })
        .gradient(Gradient::NONE.input(&[0, 1], &[Dy, X(0), X(1)]));

    /// (logit, target) → Σ over rows of the binary loss, added to the iteration's loss. The
    /// gradient of the logits is (probability − target)·scale.
    BinaryCrossEntropy = "binary_cross_entropy" {
        /// Weight of one sample's loss.
        scale: f64,
    } => row_wise(RowWise::Short)
        .intensity(10.0)
        .gradient(Gradient::LOSS.input(&[0], &[X(0), X(1)]));

    /// affinities of whole sequences → (choices, their weights, dropped choices[, their number]).
    /// The output rows are this rank's tokens of the sequences. First choices of all tokens take
    /// precedence over second choices, and earlier tokens over later ones. A sigmoid's bias is a
    /// parameter whose gradient is the experts' excess load. The gradient of the affinities
    /// includes that of the balancing loss.
    Route = "route" (routing: Routing)
        => row_wise(RowWise::Short)
            .intensity(4.0)
            .gradient(input(&[Dy, X(0)]).weight(&[Y(0)]).of_output(1))
            .sharding(Sharding::Routed);

    /// (x, choices) → (tokens in expert order, index of each choice among them, counts). Each rank
    /// with experts has a region, filled from its start.
    Dispatch = "dispatch" {
        /// Number of experts to choose from.
        experts: u64,
        /// Number of experts per token.
        topk: u64,
        /// Number of regions, each for an equal number of experts.
        regions: u64,
    } => permute(Permute::ToExperts).gradient(input(&[Dy, Y(1)]));

    /// (tokens in expert order, counts) → product with their expert's matrix, for all local
    /// experts.
    ExpertLinear = "expert_linear" {
        /// Role of the matrix in the expert.
        role: LinearRole,
        /// Number of local experts.
        experts: u64,
        /// Number of token regions: one for each source rank.
        regions: u64,
        /// Number of tokens received under balanced load; used for the cost.
        rows: u64,
    } => product(Product::Grouped { role, experts, regions, rows })
        .gradient(input(&[Dy, X(1)]).weight(&[Dy, X(0), X(1)]));

    /// (tokens in expert order, counts) → plus their expert's bias.
    ExpertBias = "expert_bias" {
        /// Number of local experts.
        experts: u64,
        /// Number of token regions.
        regions: u64,
        /// Number of partial sums whose total gets the bias once: each gets this part of it.
        parts: u64,
    } => element_wise(ElementWise::Bias)
        .intensity(1.0)
        .gradient(weight(&[Dy, X(1)]).passed_to_first());

    /// (tokens in expert order, indices, weights) → weighted sum per token.
    Combine = "combine" {
        /// Number of experts per token.
        topk: u64,
    } => permute(Permute::FromExperts)
        .gradient(Gradient::NONE.input(&[0, 2], &[Dy, X(0), X(1), X(2)]));

    /// (tokens in expert order, indices) → sum per token.
    Return = "return" {
        /// Number of experts per token.
        topk: u64,
    } => permute(Permute::FromExperts).gradient(input(&[Dy, X(1)]));

    /// qkv → (qkv with queries and keys normalised per head, statistics).
    HeadNorm = "head_norm" {
        /// Head counts.
        heads: Heads,
        /// Added to the mean square.
        eps: f64,
        /// Rows that have a root mean square of their own, and their gains.
        norm: HeadNormKind,
    } => row_wise(RowWise::Short)
        .intensity(4.0)
        .gradient(input(&[Dy, X(0), Y(1)]).weight(&[Dy, X(0), Y(1)]))
        .sharding(Sharding::WidthWithPartialGradients);

    /// qkv → sums of squares of all queries and of all keys, for [`OpKind::WholeNorm`].
    WholeSquares = "whole_squares" {
        /// Head counts.
        heads: Heads,
    } => row_wise(RowWise::Short)
        .intensity(2.0)
        .gradient(input(&[Dy, X(0)]))
        .sharding(sharding::WHOLE_SQUARES);

    /// (qkv, their sums of squares) → qkv with all queries normalised together, and all keys, by
    /// their root mean squares. A gain for every element.
    WholeNorm = "whole_norm" {
        /// Head counts.
        heads: Heads,
        /// Width of all queries of the model.
        queries: u64,
        /// Width of all keys of the model.
        keys: u64,
        /// Added to the mean squares.
        eps: f64,
    } => row_wise(RowWise::Short)
        .intensity(4.0)
        .gradient(
            Gradient::NONE.input(&[0, 1], &[Dy, X(0), X(1)]).weight(&[Dy, X(0), X(1)]),
        )
        .sharding(sharding::WHOLE_NORM);

    /// (queries, unrotated parts of the keys and values, rotated parts of the keys) → qkv, with
    /// values zero-padded to the width of keys.
    LatentHeads = "latent_heads" (heads: LatentHeads)
        => permute(Permute::Copy)
            .intensity(4.0)
            .gradient(Gradient::NONE.input(&[0, 1, 2], &[Dy]))
            .sharding(sharding::LATENT_HEADS);

    /// weighted values as wide as keys → without the padding.
    LatentValues = "latent_values" (heads: LatentHeads)
        => permute(Permute::Copy).gradient(input(&[Dy])).sharding(Sharding::Width);

    /// gradient → Σ g² per block of [`BLOCK`](super::BLOCK) elements. The gradient may be one of
    /// several equal shards that the replicas hold; the blocks of the other shards are zero.
    BlockSquares = "block_squares" {
        /// Number of shards of the gradient.
        parts: u32,
        /// True if sharded among the replicas of experts.
        experts: bool,
    } => reduction().intensity(2.0);

    /// sums of blocks → sums of tensors.
    TensorSquares = "tensor_squares" => reduction().intensity(2.0);

    /// sums of tensors → norm of the gradient.
    Norm2 = "norm2" => reduction().intensity(2.0);

    /// numbers, or none → their sum.
    Total = "total" => reduction().intensity(2.0);

    /// One operator of a compressed reduction.
    Compress = "compress" (op: CompressOp)
        => reduction().intensity(op.intensity()), named op.name();

    /// One operator of the outer step of local SGD.
    Outer = "pseudo_gradient" | "outer_step" (op: OuterOp)
        => element_wise(ElementWise::Sum).intensity(2.0), named op.name();
}

impl OpKind {
    /// Class by which cost models tell operators apart.
    pub fn cost_class(&self) -> CostClass {
        self.row().class
    }

    /// Pairs (input, output) of which the output overwrites the input, for in-place operators.
    pub(crate) fn replaces(&self, pass: OpPass) -> &'static [(usize, usize)] {
        let [forward, input] = self.row().in_place;
        match pass {
            OpPass::Forward => forward,
            OpPass::BackwardInput => input,
            OpPass::BackwardWeight => &[],
        }
    }
}
