//! A model as a graph of operators with static shapes, for one microbatch.
//!
//! A model is a chain of layers; each layer is a directed acyclic graph of operators. Layers of the
//! same shape share one [`LayerGraph`], so that a hundred equal blocks are described once. Shapes
//! are *logical*: `[tokens, width]` with the tokens of one microbatch over all data-parallel
//! replicas; a rank's shard of a tensor follows from its [`Spec`](crate::spec::Spec).

mod attributes;
mod build;
mod cost;
mod differentiate;
mod dlrm;
mod frequencies;
mod network;
mod operators;
mod resnet;
mod row;
mod sharding;

pub use attributes::{
    ActivationKind, GateKind, HeadNormKind, Heads, LatentHeads, LinearRole, Mask, NormKind, Rotary,
    Routing, Scores, Window,
};
pub use build::build;
pub use cost::{Cost, CostClass, ElementWise, Permute, Product, RowWise};
pub use frequencies::{Factors, Scaling};
pub use operators::OpKind;
pub(crate) use sharding::Sharding;

use crate::ids::{LayerId, ParamId, TensorId};
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

/// Elements per block. Sums of squares are formed per block, and ZeRO and buckets split only at
/// block boundaries, so that the norm is bitwise identical in every layout.
pub const BLOCK: u64 = 1024;
