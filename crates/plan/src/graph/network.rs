//! Networks described operator by operator, as operators of the table.
//!
//! A layer has one input and one output. Where several tensors cross a boundary between layers, the
//! layer before it puts them beside each other, and the one behind it takes them apart.

use super::build::{Builder, Sizes};
use super::{
    ActivationKind, Graph, Heads, Init, LayerDecl, LayerGraph, LinearRole, Mask, NormKind, OpKind,
    Scores, TensorClass,
};
use crate::ids::TensorId;
use crate::model::Activation;
use crate::model::network::{
    CONTINUATION, Network, Op, PIXELS, PlainLayer, Shape, TOKENS, roles, window,
};
use std::collections::BTreeMap;

/// Builds the graph for microbatches of `batch` samples over all replicas.
pub(super) fn build(net: &Network, sizes: &Sizes<'_>, batch: u64, seq: u64) -> Graph {
    let plain = net.plain();
    let (mut kinds, mut layers) = (Vec::<LayerGraph>::new(), Vec::new());
    for (at, layer) in plain.iter().enumerate() {
        let name = net.layers[layer.of].name.clone();
        let ends = [at == 0, at + 1 == plain.len()];
        let built = Described { net, seq, layer, tensors: BTreeMap::new() };
        let graph = built.build(Builder::new(&name, sizes), ends);
        // Equal layers share a graph; the first or last of them may differ in what crosses.
        let kind = kinds.iter().position(|known| *known == graph).unwrap_or_else(|| {
            kinds.push(graph);
            kinds.len() - 1
        });
        layers.push(LayerDecl { name: layer.name.clone(), kind });
    }
    name_apart(&mut kinds);
    Graph { kinds, layers, batch, seq }
}

/// Gives kinds that differ names that differ.
fn name_apart(kinds: &mut [LayerGraph]) {
    for at in 0..kinds.len() {
        let same = kinds[..at].iter().filter(|kind| kind.name == kinds[at].name).count();
        if same > 0 {
            kinds[at].name = format!("{}.{same}", kinds[at].name);
        }
    }
}

/// A layer that is being built.
struct Described<'a> {
    net: &'a Network,
    seq: u64,
    layer: &'a PlainLayer<'a>,
    tensors: BTreeMap<&'a str, (TensorId, Shape)>,
}

impl<'a> Described<'a> {
    fn build(mut self, mut to: Builder<'_>, [is_first, is_last]: [bool; 2]) -> LayerGraph {
        let layer = self.layer;
        let input = (!is_first).then(|| self.enter(&mut to));
        let roles = roles(layer.operators, &layer.leaves);
        for (operator, role) in layer.operators.iter().zip(roles) {
            for name in &operator.reads {
                self.given(&mut to, name);
            }
            let reads: Vec<(TensorId, Shape)> =
                operator.reads.iter().map(|name| self.tensors[&**name]).collect();
            let made = self.operator(&mut to, &operator.op, &operator.makes, &reads, role);
            let shapes: Vec<Shape> = reads.iter().map(|&(_, shape)| shape).collect();
            let shape = self.net.shape_of(&operator.op, &shapes);
            if let Some(made) = made.zip(shape) {
                self.tensors.insert(&operator.makes, made);
            }
        }
        let output = (!is_last).then(|| self.leave(&mut to));
        to.finish(input, output)
    }

    /// The tensors that enter, taken apart.
    fn enter(&mut self, to: &mut Builder<'_>) -> TensorId {
        let layer: &'a PlainLayer<'a> = self.layer;
        let widths: Vec<u64> = layer.enters.iter().map(|(_, shape)| shape.width).collect();
        let x = to.activation_of("x", &widths);
        let mut first = 0;
        for (name, shape) in &layer.enters {
            let (one, width) = (layer.enters.len() == 1, shape.width);
            let tensor = if one { x } else { slice(to, name, x, first, width) };
            self.tensors.insert(name, (tensor, *shape));
            first += width;
        }
        x
    }

    /// The tensors that leave, beside each other.
    fn leave(&self, to: &mut Builder<'_>) -> TensorId {
        let leaves = self.layer.leaves.iter().map(|(name, _)| self.tensors[&**name]);
        let leaves: Vec<(TensorId, Shape)> = leaves.collect();
        match leaves[..] {
            [(one, _)] => one,
            _ => concat(to, "y", &leaves),
        }
    }

    /// Adds a tensor that samples give, when it is first read.
    fn given(&mut self, to: &mut Builder<'_>, name: &'a str) {
        if self.tensors.contains_key(name) {
            return;
        }
        let class = match name {
            PIXELS => TensorClass::Features,
            TOKENS => TensorClass::Tokens,
            CONTINUATION => TensorClass::Lookahead(self.seq as u16),
            _ => return,
        };
        let shapes = self.net.input.tensors();
        let Some((_, shape)) = shapes.into_iter().find(|(given, _)| *given == name) else { return };
        let tensor = to.tensor(name, shape.width, class);
        self.tensors.insert(name, (tensor, shape));
    }

    /// Adds an operator; returns what it makes.
    fn operator(
        &self,
        to: &mut Builder<'_>,
        op: &Op,
        name: &str,
        reads: &[(TensorId, Shape)],
        role: LinearRole,
    ) -> Option<TensorId> {
        let (x, shape) = reads[0];
        let image = shape.image.unwrap_or((1, shape.width));
        let (side, channels) = image;
        // An operator without parameters.
        let plain = |to: &mut Builder<'_>, kind: OpKind, width: u64| {
            let y = to.activation(name, width);
            to.op(kind, &[x], &[], &[y]);
            y
        };
        Some(match *op {
            Op::Linear { width, bias, init } => {
                linear(to, name, (x, shape.width), (width, bias, init), role)
            }
            Op::Activation { function } => {
                plain(to, OpKind::Activation { function: of(function) }, shape.width)
            }
            Op::Norm { rms, eps } => {
                to.norm_of(name, x, if rms { NormKind::Rms } else { NormKind::Layer }, eps)
            }
            Op::Add => to.add(name, x, reads[1].0),
            Op::Concat => concat(to, name, reads),
            Op::Slice { first, width } => slice(to, name, x, first, width),
            Op::Scale { factor } => plain(to, OpKind::Scale { factor }, shape.width),
            Op::Embedding { width, init } => {
                let dims = [self.net.input.classes(), width];
                let table = to.param(&format!("{name}.weight"), dims, Init::Normal(init), true);
                let y = to.activation(name, width);
                to.op(OpKind::Embedding, &[x], &[table], &[y]);
                y
            }
            Op::Position => {
                let dims = [self.net.input.seq(), shape.width];
                let table = to.param(&format!("{name}.weight"), dims, Init::Normal(0.02), true);
                let y = to.activation(name, shape.width);
                to.op(OpKind::Position, &[x], &[table], &[y]);
                y
            }
            Op::Attention { heads, kv_heads, causal } => {
                let heads = Heads { heads, kv_heads, head_dim: shape.width / heads };
                self.attention(to, name, reads, heads, causal)
            }
            Op::Conv { filters, kernel, stride } => {
                let window = window(image, kernel, stride);
                // He et al. (arXiv 1502.01852, equation 14), by fan-out.
                let spread = Init::Normal((2.0 / (kernel * kernel * filters) as f64).sqrt());
                let dims = [filters, kernel * kernel * channels];
                let weight = to.param(&format!("{name}.weight"), dims, spread, true);
                let y = to.activation(name, window.places() * filters);
                to.op(OpKind::Conv { window }, &[x], &[weight], &[y]);
                y
            }
            Op::BatchNorm { eps } => to.batch_norm_of(name, (x, side, channels), eps),
            Op::MaxPool { kernel, stride } => {
                let window = window(image, kernel, stride);
                plain(to, OpKind::MaxPool { window }, window.places() * channels)
            }
            Op::AveragePool => plain(to, OpKind::AveragePool { channels }, channels),
            Op::CrossEntropy => {
                // The targets follow the tokens that are read last.
                let class = match self.net.lookahead(self.seq) {
                    0 => TensorClass::Targets,
                    ahead => TensorClass::Lookahead(ahead as u16 + 1),
                };
                let targets = to.tensor("targets", 1, class);
                to.loss(x, targets, 1.0);
                return None;
            }
        })
    }

    fn attention(
        &self,
        to: &mut Builder<'_>,
        name: &str,
        reads: &[(TensorId, Shape)],
        heads: Heads,
        causal: bool,
    ) -> TensorId {
        let qkv = concat(to, &format!("{name}.qkv"), reads);
        let mask = if causal { Mask::Causal } else { Mask::Full };
        let scores = Scores { mask, ..Scores::default() };
        let attended = to.activation(name, heads.heads * heads.head_dim);
        let sums = to.tensor(&format!("{name}.lse"), heads.heads, TensorClass::Statistic);
        let kind = OpKind::Attention { heads, seq: self.seq, scores };
        to.op(kind, &[qkv], &[], &[attended, sums]);
        attended
    }
}

/// x·Wᵀ, plus b if there is one.
fn linear(
    to: &mut Builder<'_>,
    name: &str,
    (x, inner): (TensorId, u64),
    (width, bias, init): (u64, bool, f64),
    role: LinearRole,
) -> TensorId {
    // He et al. (arXiv 1502.01852, equation 10), by fan-in.
    let spread = if init > 0.0 { init } else { (2.0 / inner as f64).sqrt() };
    let weight = to.param(&format!("{name}.weight"), [width, inner], Init::Normal(spread), true);
    let product = if bias { format!("{name}.product") } else { name.to_owned() };
    let y = to.activation(&product, width);
    to.op(OpKind::Linear { role }, &[x], &[weight], &[y]);
    if bias { to.biased(name, &format!("{name}.bias"), y, &[width]) } else { y }
}

fn concat(to: &mut Builder<'_>, name: &str, parts: &[(TensorId, Shape)]) -> TensorId {
    let widths: Vec<u64> = parts.iter().map(|(_, shape)| shape.width).collect();
    let tensors: Vec<TensorId> = parts.iter().map(|&(tensor, _)| tensor).collect();
    let y = to.activation_of(name, &widths);
    to.op(OpKind::Concat { parts: tensors.len() as u64 }, &tensors, &[], &[y]);
    y
}

fn slice(to: &mut Builder<'_>, name: &str, x: TensorId, first: u64, width: u64) -> TensorId {
    let y = to.activation(name, width);
    to.op(OpKind::Slice { first, width }, &[x], &[], &[y]);
    y
}

fn of(function: Activation) -> ActivationKind {
    match function {
        Activation::Gelu => ActivationKind::Gelu,
        Activation::GeluErf => ActivationKind::GeluErf,
        Activation::SquaredRelu => ActivationKind::SquaredRelu,
        // Descriptions name no gated function.
        _ => ActivationKind::Relu,
    }
}
