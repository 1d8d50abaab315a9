//! Networks described operator by operator: layers of operators on named tensors, whose gradients
//! follow from the operators.
//!
//! A tensor is made once and read by later operators, also of later layers; what crosses a boundary
//! between layers follows from that. [`Network::live`] has the tensors that do.

mod read;
mod shapes;
mod tensor_parallel;
mod write;

#[cfg(test)]
mod tests;

pub(super) use read::parse;
pub(crate) use shapes::window;
pub(crate) use tensor_parallel::roles;

use super::{Activation, Body, Experts, Latent, MAX_PARAMETERS, Model, ModelDims, ModelKind};
use crate::located::Errors;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// A network described operator by operator.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Network {
    /// Samples that it reads.
    pub input: Input,
    /// Layers, in forward order. The first one reads samples, the last one has the loss.
    #[serde(rename = "layer")]
    pub layers: Vec<Layer>,
}

/// Samples of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "data", rename_all = "lowercase")]
pub enum Input {
    /// Generated handwritten digits: 28 × 28 pixels of 10 classes, tensor `pixels`.
    Digits,
    /// Images, tensor `pixels`.
    Images {
        /// Pixels along each side.
        side: u64,
        /// Numbers in a pixel.
        channels: u64,
        /// Number of classes.
        classes: u64,
    },
    /// Sequences of tokens, tensor `tokens`, and as many tokens that follow them, tensor
    /// `continuation`. The targets are the tokens after those that are read last.
    Tokens {
        /// Number of different tokens.
        vocab: u64,
        /// Length of a sequence.
        seq: u64,
    },
}

/// One layer, or several equal ones.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Layer {
    /// Its name, the prefix of its parameters' names.
    pub name: String,
    /// Number of equal layers, of which each reads what the one before it made.
    pub repeat: u64,
    /// Operators, in forward order.
    pub operators: Vec<Operator>,
}

/// One operator on named tensors.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Operator {
    /// The operator.
    #[serde(flatten)]
    pub op: Op,
    /// Tensors that it reads.
    pub reads: Vec<String>,
    /// Tensor that it makes; empty for a loss.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub makes: String,
}

/// Operators of a described network.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Op {
    /// x·Wᵀ + b.
    Linear {
        /// Width of the result.
        width: u64,
        /// True if there is a b.
        bias: bool,
        /// Standard deviation of W's initial values; 0 stands for √(2 / width of x).
        init: f64,
    },
    /// Element-wise non-linearity: relu, gelu, gelu-erf or squared-relu.
    Activation {
        /// The function.
        function: Activation,
    },
    /// x normalised over its width.
    Norm {
        /// True for the root mean square alone, without mean and bias.
        rms: bool,
        /// Added to the variance.
        eps: f64,
    },
    /// Sum of two tensors.
    Add,
    /// Tensors beside each other.
    Concat,
    /// Consecutive columns.
    Slice {
        /// First one.
        first: u64,
        /// Number of them.
        width: u64,
    },
    /// x·factor.
    Scale {
        /// The factor.
        factor: f64,
    },
    /// Token ids → rows of a table.
    Embedding {
        /// Width of a row.
        width: u64,
        /// Standard deviation of the initial values.
        init: f64,
    },
    /// x plus a learned row by position.
    Position,
    /// Attention: queries, keys, values → weighted values.
    Attention {
        /// Number of query heads.
        heads: u64,
        /// Number of key and value heads.
        kv_heads: u64,
        /// True if a token sees itself and earlier ones only.
        causal: bool,
    },
    /// Images → at every window position, products with filters.
    Conv {
        /// Number of filters.
        filters: u64,
        /// Pixels along each side of a window.
        kernel: u64,
        /// Pixels from window to window.
        stride: u64,
    },
    /// Images normalised per channel over a microbatch.
    BatchNorm {
        /// Added to the variance.
        eps: f64,
    },
    /// Images → maxima of windows.
    MaxPool {
        /// Pixels along each side of a window.
        kernel: u64,
        /// Pixels from window to window.
        stride: u64,
    },
    /// Images → mean of each channel.
    AveragePool,
    /// Loss of logits against the targets.
    CrossEntropy,
}

/// Shape of a tensor: numbers per token, sample or image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Numbers in a row.
    pub(crate) width: u64,
    /// Pixels along each side and channels, if it is images.
    pub(crate) image: Option<(u64, u64)>,
    /// True for ids of tokens.
    pub(crate) ids: bool,
}

/// Names of the tensors that samples give.
pub(crate) const PIXELS: &str = "pixels";
pub(crate) const TOKENS: &str = "tokens";
pub(crate) const CONTINUATION: &str = "continuation";

/// One of the layers that a network has when equal ones are written out.
#[derive(Clone, Debug)]
pub(crate) struct PlainLayer<'a> {
    pub(crate) name: String,
    /// Index of its description.
    pub(crate) of: usize,
    pub(crate) operators: &'a [Operator],
    /// Tensors that enter it from the layer before it, with their shapes.
    pub(crate) enters: Vec<(String, Shape)>,
    /// Tensors that leave it.
    pub(crate) leaves: Vec<(String, Shape)>,
}

impl Input {
    /// Shapes of the tensors that samples give.
    pub(crate) fn tensors(&self) -> Vec<(&'static str, Shape)> {
        let image = |side: u64, channels: u64| {
            let width = side * side * channels;
            vec![(PIXELS, Shape { width, image: Some((side, channels)), ids: false })]
        };
        match *self {
            Self::Digits => image(28, 1),
            Self::Images { side, channels, .. } => image(side, channels),
            Self::Tokens { .. } => {
                let ids = Shape { width: 1, image: None, ids: true };
                vec![(TOKENS, ids), (CONTINUATION, ids)]
            }
        }
    }

    /// Number of classes, or of different tokens: the width of the logits.
    pub const fn classes(&self) -> u64 {
        match *self {
            Self::Digits => 10,
            Self::Images { classes, .. } => classes,
            Self::Tokens { vocab, .. } => vocab,
        }
    }

    /// Rows of a sample: its tokens, or one.
    pub const fn seq(&self) -> u64 {
        match *self {
            Self::Digits | Self::Images { .. } => 1,
            Self::Tokens { seq, .. } => seq,
        }
    }
}

impl Network {
    /// Returns true if samples are sequences of tokens.
    pub const fn reads_tokens(&self) -> bool {
        matches!(self.input, Input::Tokens { .. })
    }

    /// The same network on samples of another length, if they have one.
    pub(super) fn with_seq(&self, seq: u64) -> Self {
        let input = match self.input {
            Input::Tokens { vocab, .. } => Input::Tokens { vocab, seq },
            other => other,
        };
        Self { input, layers: self.layers.clone() }
    }

    /// Number of tokens beyond the targets of a sequence of `seq` tokens that samples need.
    pub fn lookahead(&self, seq: u64) -> u64 {
        let reads = |operator: &Operator| operator.reads.iter().any(|name| name == CONTINUATION);
        let all = self.layers.iter().flat_map(|layer| &layer.operators);
        if { all }.any(reads) { seq } else { 0 }
    }

    /// Returns true if some operator normalises over a microbatch.
    pub(crate) fn has_batch_norm(&self) -> bool {
        let all = self.layers.iter().flat_map(|layer| &layer.operators);
        { all }.any(|operator| matches!(operator.op, Op::BatchNorm { .. }))
    }

    /// The layers with equal ones written out, and what enters and leaves each.
    pub(crate) fn plain(&self) -> Vec<PlainLayer<'_>> {
        let mut plain = Vec::new();
        for (of, layer) in self.layers.iter().enumerate() {
            for number in 0..layer.repeat {
                let name = match layer.repeat {
                    1 => layer.name.clone(),
                    _ => format!("{}.{number}", layer.name),
                };
                let (enters, leaves) = (Vec::new(), Vec::new());
                plain.push(PlainLayer { name, of, operators: &layer.operators, enters, leaves });
            }
        }
        // From the end: what a layer must be given is what it or a later layer reads and did not
        // make.
        let given: BTreeSet<&str> =
            self.input.tensors().into_iter().map(|(name, _)| name).collect();
        let mut wanted: Vec<BTreeSet<&str>> = vec![BTreeSet::new()];
        for layer in plain.iter().rev() {
            let mut live = wanted.last().cloned().unwrap_or_default();
            for operator in layer.operators.iter().rev() {
                live.remove(&*operator.makes);
                let reads = operator.reads.iter().map(String::as_str);
                live.extend(reads.filter(|name| !given.contains(name)));
            }
            wanted.push(live);
        }
        wanted.reverse();
        let mut shapes: BTreeMap<&str, Shape> = self.input.tensors().into_iter().collect();
        for (at, layer) in plain.iter_mut().enumerate() {
            let with_shapes = |names: &BTreeSet<&str>, shapes: &BTreeMap<&str, Shape>| {
                let one = |&name: &&str| shapes.get(name).map(|&shape| (name.to_owned(), shape));
                names.iter().filter_map(one).collect::<Vec<_>>()
            };
            layer.enters = with_shapes(&wanted[at], &shapes);
            for operator in layer.operators {
                let reads: Vec<Shape> =
                    operator.reads.iter().filter_map(|name| shapes.get(&**name).copied()).collect();
                if let Ok(Some(shape)) = shapes::of(&operator.op, &reads, &self.input) {
                    shapes.insert(&operator.makes, shape);
                }
            }
            layer.leaves = with_shapes(&wanted[at + 1], &shapes);
        }
        plain
    }

    /// Adds the shape of what a sound operator makes.
    fn result<'a>(&self, operator: &'a Operator, shapes: &mut BTreeMap<&'a str, Shape>) {
        let known = operator.reads.iter().filter_map(|name| shapes.get(&**name).copied());
        let reads: Vec<Shape> = known.collect();
        if let Some(shape) = self.shape_of(&operator.op, &reads) {
            shapes.insert(&operator.makes, shape);
        }
    }

    /// Shape of what a sound operator makes of operands of these shapes; `None` for a loss.
    pub(crate) fn shape_of(&self, op: &Op, reads: &[Shape]) -> Option<Shape> {
        shapes::of(op, reads, &self.input).ok().flatten()
    }

    /// Largest number of values between two layers, or of an operator's result, per row.
    pub(crate) fn widest(&self) -> u64 {
        let width = |tensors: &[(String, Shape)]| tensors.iter().map(|(_, s)| s.width).sum::<u64>();
        self.plain().iter().map(|layer| width(&layer.leaves)).max().unwrap_or(1).max(1)
    }

    /// Largest activation of one row, in values.
    pub(crate) fn largest_activation(&self) -> u64 {
        let mut shapes: BTreeMap<&str, Shape> = self.input.tensors().into_iter().collect();
        let mut largest = self.widest();
        for operator in self.layers.iter().flat_map(|layer| &layer.operators) {
            self.result(operator, &mut shapes);
            largest = largest.max(shapes.get(&*operator.makes).map_or(0, |shape| shape.width));
        }
        largest
    }

    /// Trained parameters.
    pub(super) fn count(&self) -> u128 {
        let mut shapes: BTreeMap<&str, Shape> = self.input.tensors().into_iter().collect();
        let mut count = 0;
        for layer in &self.layers {
            let mut once = 0;
            for operator in &layer.operators {
                let first = operator.reads.first().and_then(|name| shapes.get(&**name).copied());
                let wide = |f: fn(Shape) -> u64| first.map_or(0, |shape| u128::from(f(shape)));
                let (inner, channels) =
                    (wide(|s| s.width), wide(|s| s.image.map_or(0, |(_, channels)| channels)));
                once += match operator.op {
                    Op::Linear { width, bias, .. } => {
                        u128::from(width) * (inner + u128::from(bias))
                    }
                    Op::Norm { rms, .. } => inner * if rms { 1 } else { 2 },
                    Op::Embedding { width, .. } => {
                        u128::from(width) * u128::from(self.input.classes())
                    }
                    Op::Position => inner * u128::from(self.input.seq()),
                    Op::Conv { filters, kernel, .. } => {
                        u128::from(filters) * u128::from(kernel * kernel) * channels
                    }
                    Op::BatchNorm { .. } => 2 * channels,
                    _ => 0,
                };
                self.result(operator, &mut shapes);
            }
            count += once * u128::from(layer.repeat);
        }
        count
    }
}

impl Model {
    /// Checks a network described in code; errors name the model instead of a file.
    pub fn network(name: impl Into<String>, network: Network) -> Result<Self, Errors> {
        let name = name.into();
        let problems = read::problems(&network, &|_, _| None);
        if problems.is_empty() {
            return Self::from_body(name, Body::Network(network));
        }
        let mut errors = Errors::new(name);
        problems.into_iter().for_each(|(line, what, remedy)| errors.add(line, what, remedy));
        Err(errors.sorted())
    }
}

/// Generic dimensions of a described network.
pub(super) fn shape(network: &Network) -> ModelDims {
    let layers: u64 = network.layers.iter().map(|layer| layer.repeat).sum();
    ModelDims {
        kind: ModelKind::Graph,
        layers: layers.saturating_sub(2),
        d_model: network.widest(),
        heads: 0,
        kv_heads: 0,
        head_dim: 0,
        ffn: 0,
        seq: network.input.seq(),
        max_positions: 0,
        vocab: network.input.classes(),
        tied: false,
        qk_norm: false,
        experts: Experts::default(),
        latent: Latent::default(),
        mtp: Default::default(),
        activation: Activation::Relu,
        norm_eps: 1e-5,
        rope_theta: 0.0,
    }
}

/// Problem and remedy if the network has too many parameters.
pub(super) fn too_large(network: &Network) -> Option<(String, String)> {
    let count = network.count();
    (count > u128::from(MAX_PARAMETERS)).then(|| {
        (
            format!("the model would have {:.1e} parameters", count as f64),
            "lower a `width` or `repeat`".to_owned(),
        )
    })
}
