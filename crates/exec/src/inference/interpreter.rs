//! Forward pass of any model: the operators of its graph in sequence, on the kernels of training.

use super::kv_cache::{Attend, Attention, Sequences};
use crate::data::Data;
use crate::device::cpu::ops::attention::{frequencies, rotation, scores_of};
use crate::device::cpu::ops::experts::routing_of;
use crate::device::cpu::ops::heads::{head_shape, shape_of, whole_shape};
use crate::device::cpu::ops::images::window_of;
use crate::device::cpu::ops::norm::least;
use crate::rank_coords::ShardIndex;
use crate::run::outcome::Parameters;
use paceline_kernels::embedding_bag::{HeldRows, Lookups, sum_rows};
use paceline_kernels::experts::dispatch::{self, Full};
use paceline_kernels::experts::{bias as expert_bias, product, route};
use paceline_kernels::pool::Pool;
use paceline_kernels::{
    Rows, activation, batch_norm, bias, concat, conv, embedding, head_norm, interaction, latent,
    linear, norm, pooling, reduce, rope, scaling, whole_norm,
};
use paceline_plan::graph::{
    ActivationKind, GateKind, Graph, HeadNormKind, LayerDecl, LayerGraph, LinearRole, NormKind,
    OpKind, Operator, TensorClass,
};
use paceline_plan::ids::TensorId;

/// Weights and threads for the forward passes of a graph.
#[derive(Debug)]
pub(super) struct Interpreter {
    /// Tensors by their logical names.
    pub(super) tensors: Parameters,
    pub(super) pool: Pool,
}

/// Input of a model.
pub(super) enum Input<'a> {
    /// Sequences of `positions.len()` tokens each, at these positions.
    Tokens {
        tokens: &'a [u32],
        positions: &'a [u32],
        attend: &'a mut dyn Attend,
        /// True if only the logits of the last token are wanted.
        last: bool,
    },
    /// Consecutive images or clicks.
    Samples { data: &'a Data, first: u64, count: usize },
}

/// Values of a layer's tensors: numbers, or integers.
struct Values {
    numbers: Vec<Vec<f32>>,
    words: Vec<Vec<u32>>,
}

/// One operator of a layer.
struct At<'a> {
    layer: &'a LayerDecl,
    kind: &'a LayerGraph,
    op: &'a Operator,
    /// Number of the attention in the model.
    attention: usize,
}

impl Interpreter {
    /// Takes weights. If no threads can be started, the calling thread computes alone.
    pub(super) fn new(tensors: Parameters) -> Self {
        let pool = std::thread::available_parallelism()
            .and_then(Pool::new)
            .unwrap_or_else(|_| Pool::single());
        Self { tensors, pool }
    }

    /// Logits, one row per token or sample.
    pub(super) fn logits(&self, graph: &Graph, input: &mut Input<'_>) -> Vec<f32> {
        let (mut stream, mut attention) = (Vec::new(), 0);
        for layer in &graph.layers {
            let kind = &graph.kinds[layer.kind];
            stream = self.layer(layer, kind, &mut attention, input, stream);
        }
        stream
    }

    /// Runs a layer on the output of the previous one; the last layer returns the logits.
    fn layer(
        &self,
        layer: &LayerDecl,
        kind: &LayerGraph,
        attention: &mut usize,
        input: &mut Input<'_>,
        stream: Vec<f32>,
    ) -> Vec<f32> {
        let none = kind.tensors.len();
        let mut values = Values { numbers: vec![Vec::new(); none], words: vec![Vec::new(); none] };
        if let Some(x) = kind.input {
            values.numbers[x.index()] = stream;
        }
        if let Input::Samples { data, first, count } = input {
            for (value, tensor) in values.numbers.iter_mut().zip(&kind.tensors) {
                if tensor.class == TensorClass::Features {
                    value.resize(tensor.dims[1] as usize * *count, 0.0);
                    for (at, image) in value.chunks_mut(tensor.dims[1] as usize).enumerate() {
                        data.features(first.wrapping_add(at as u64), image);
                    }
                }
            }
        }
        let mut last = 0;
        for op in &kind.forward {
            if matches!(op.kind, OpKind::RowMax | OpKind::BinaryCrossEntropy { .. }) {
                break;
            }
            let at = At { layer, kind, op, attention: *attention };
            self.operator(&at, &mut values, input);
            *attention += usize::from(matches!(op.kind, OpKind::Attention { .. }));
            last = op.outputs.first().map_or(last, |y| y.index());
        }
        std::mem::take(&mut values.numbers[kind.output.map_or(last, |y| y.index())])
    }

    fn param(&self, at: &At<'_>, i: usize) -> &[f32] {
        let Some(&id) = at.op.params.get(i) else { return &[] };
        let param = at.kind.param(id);
        let name = match (param.tied, param.borrowed) {
            (true, _) => "embedding.table.weight".to_owned(),
            (false, true) => format!("head.{}", param.name),
            (false, false) => format!("{}.{}", at.layer.name, param.name),
        };
        self.tensors.get(&name).map_or(&[][..], Vec::as_slice)
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "the rest is row-wise")]
    fn operator(&self, at: &At<'_>, values: &mut Values, input: &mut Input<'_>) {
        match at.op.kind {
            OpKind::Route(_)
            | OpKind::Dispatch { .. }
            | OpKind::ExpertLinear { .. }
            | OpKind::ExpertBias { .. }
            | OpKind::Combine { .. }
            | OpKind::Return { .. } => self.experts(at, values),
            OpKind::Conv { .. }
            | OpKind::BatchNorm { .. }
            | OpKind::MaxPool { .. }
            | OpKind::AveragePool { .. }
            | OpKind::EmbeddingBag { .. }
            | OpKind::Interact { .. } => self.sample(at, values, input),
            OpKind::Embedding
            | OpKind::Position
            | OpKind::Rope { .. }
            | OpKind::Temperature { .. }
            | OpKind::Attention { .. }
            | OpKind::LatentHeads(_) => self.positioned(at, values, input),
            _ => {
                let last = matches!(input, Input::Tokens { last: true, .. });
                self.row_wise(at, values, last);
            }
        }
    }

    /// Operators on rows that know nothing of their positions.
    #[expect(clippy::wildcard_enum_match_arm, reason = "the rest only matters in training")]
    fn row_wise(&self, at: &At<'_>, values: &mut Values, last: bool) {
        let (pool, op) = (&self.pool, at.op);
        let Some(&output) = op.outputs.first() else { return };
        let width = at.kind.tensor(output).dims[1] as usize;
        let number = |i: usize| &values.numbers[op.inputs[i].index()][..];
        let inner = |i: usize| at.kind.tensor(op.inputs[i]).dims[1] as usize;
        let rows_of = |i: usize| number(i).len() / inner(i).max(1);
        let mut rows = if op.inputs.is_empty() { 0 } else { rows_of(0) };
        let mut y;
        match op.kind {
            OpKind::Linear { role } => {
                let (mut x, inputs) = (number(0), inner(0));
                if role == LinearRole::Head && last {
                    (x, rows) = (&x[x.len() - inputs..], 1);
                }
                y = vec![0.0; rows * width];
                let shape = linear::Shape { rows, inputs, outputs: width };
                linear::forward(pool, shape, x, self.param(at, 0), &mut y);
            }
            OpKind::Bias => {
                y = vec![0.0; rows * width];
                bias::forward(Rows { rows, width }, number(0), self.param(at, 0), &mut y);
            }
            OpKind::Norm { norm: kind, eps } => {
                y = vec![0.0; rows * width];
                let (shape, eps, gain) = (Rows { rows, width }, eps as f32, self.param(at, 0));
                let mut stats = vec![0.0; 2 * rows];
                match kind {
                    NormKind::Layer | NormKind::LayerGain => {
                        let beta = self.param(at, 1);
                        norm::layer_norm_forward(
                            shape,
                            eps,
                            number(0),
                            gain,
                            beta,
                            &mut y,
                            &mut stats,
                        );
                    }
                    NormKind::Rms | NormKind::RmsUnit => {
                        let (least, stats) = (least(kind), &mut stats[..rows]);
                        norm::rms_norm_forward_from(
                            shape,
                            eps,
                            least,
                            number(0),
                            gain,
                            &mut y,
                            stats,
                        );
                    }
                }
            }
            OpKind::HeadNorm { heads, eps, norm } => {
                y = vec![0.0; rows * width];
                let shape = head_shape(heads, norm);
                let none = vec![0.0; shape.head_dim];
                let gains = match norm {
                    HeadNormKind::Bare => [&none[..], &none[..]],
                    _ => [self.param(at, 0), self.param(at, 1)],
                };
                let mut stats = vec![0.0; rows * shape.stats()];
                head_norm::forward(shape, eps as f32, number(0), gains, &mut y, &mut stats);
            }
            OpKind::WholeSquares { heads } => {
                y = vec![0.0; rows * 2];
                whole_norm::squares(whole_shape(heads), number(0), &mut y);
            }
            OpKind::WholeNorm { heads, queries, keys, eps } => {
                y = vec![0.0; rows * width];
                let whole = [queries, keys].map(|width| width as usize);
                let norm = whole_norm::Norm { whole, eps: eps as f32 };
                let gains = [self.param(at, 0), self.param(at, 1)];
                whole_norm::forward(whole_shape(heads), norm, number(0), number(1), gains, &mut y);
            }
            OpKind::LatentValues(heads) => {
                y = vec![0.0; rows * width];
                let (shape, padded) = (shape_of(heads, &[]), number(0));
                let of = padded.chunks_exact(shape.width()).zip(y.chunks_exact_mut(width));
                of.for_each(|(padded, y)| latent::values(shape, padded, y));
            }
            OpKind::Activation { function } => {
                y = vec![0.0; rows * width];
                let forward = match function {
                    ActivationKind::Gelu => activation::gelu_tanh_forward,
                    ActivationKind::GeluErf => activation::gelu_erf_forward,
                    ActivationKind::Relu => activation::relu_forward,
                    ActivationKind::SquaredRelu => activation::squared_relu_forward,
                };
                forward(number(0), &mut y);
            }
            OpKind::SwiGlu | OpKind::GeGlu | OpKind::Gated { .. } => {
                y = vec![0.0; rows * width];
                let forward = match op.kind {
                    OpKind::GeGlu => activation::geglu_forward,
                    OpKind::Gated { gate: GateKind::GeluErf } => activation::geglu_erf_forward,
                    OpKind::Gated { gate: GateKind::ClampedSwiGlu } => {
                        activation::clamped_swiglu_forward
                    }
                    _ => activation::swiglu_forward,
                };
                forward(Rows { rows, width }, number(0), &mut y);
            }
            OpKind::Scale { factor } => {
                y = vec![0.0; number(0).len()];
                scaling::scale(factor as f32, number(0), &mut y);
            }
            OpKind::SoftCap { cap } => {
                y = vec![0.0; number(0).len()];
                scaling::softcap(cap as f32, number(0), &mut y);
            }
            OpKind::Clamp { limit } => {
                y = vec![0.0; number(0).len()];
                scaling::clamp(limit as f32, number(0), &mut y);
            }
            OpKind::RowScale { sigmoid } => {
                y = vec![0.0; rows * width];
                scaling::rows(Rows { rows, width }, sigmoid, number(0), number(1), &mut y);
            }
            OpKind::Concat { .. } => {
                y = vec![0.0; rows * width];
                let parts: Vec<(&[f32], usize)> =
                    (0..op.inputs.len()).map(|i| (number(i), inner(i))).collect();
                concat::concat(rows, &parts, &mut y);
            }
            OpKind::Slice { first, .. } => {
                y = vec![0.0; rows * width];
                let (x, at) = (Rows { rows, width: inner(0) }, first as usize);
                concat::slice(x, at, width, number(0), &mut y);
            }
            OpKind::Add => {
                y = vec![0.0; number(0).len()];
                reduce::add3(number(0), number(1), &mut y);
            }
            // Sums of a batch, which running averages replace.
            _ => return,
        }
        values.numbers[output.index()] = y;
    }

    /// Operators that depend on the tokens, or on their positions.
    #[expect(clippy::wildcard_enum_match_arm, reason = "the rest has other functions")]
    fn positioned(&self, at: &At<'_>, values: &mut Values, input: &mut Input<'_>) {
        let Input::Tokens { tokens, positions, attend, .. } = input else { return };
        let (op, rows) = (at.op, tokens.len());
        let output = op.outputs[0];
        let width = at.kind.tensor(output).dims[1] as usize;
        let shape = Rows { rows, width };
        let number = |i: usize| &values.numbers[op.inputs[i].index()][..];
        let mut y = vec![0.0; rows * width];
        match op.kind {
            OpKind::Embedding => embedding::forward(shape, 0, tokens, self.param(at, 0), &mut y),
            OpKind::Position => {
                let table = self.param(at, 0);
                embedding::position_forward(shape, positions, number(0), table, &mut y);
            }
            OpKind::Rope { heads, theta, rotary } => {
                y.copy_from_slice(number(0));
                let frequencies = frequencies(heads.head_dim, theta, rotary);
                let rotation = rotation(heads, theta, rotary, &frequencies);
                rope::forward_in_place(rotation, positions, &mut y);
            }
            OpKind::Temperature { heads, floor, slope } => {
                let queries = (heads.heads * heads.head_dim) as usize;
                let growth = (floor, slope);
                scaling::temperature(shape, queries, growth, positions, number(0), &mut y);
            }
            OpKind::Attention { heads, scores, .. } => {
                let [queries, kv_heads, head_dim] =
                    [heads.heads, heads.kv_heads, heads.head_dim].map(|n| n as usize);
                let sinks = (!op.params.is_empty()).then(|| self.param(at, 0));
                let scores = scores_of(scores, heads, ShardIndex::WHOLE);
                let of = Attention { heads: queries, kv_heads, head_dim, scores, sinks };
                attend.attend(at.attention, (of, &self.pool), number(0), &mut y);
            }
            OpKind::LatentHeads(heads) => {
                let frequencies = frequencies(heads.rope, heads.theta, heads.rotary);
                let shape = shape_of(heads, &frequencies);
                let each = |i: usize| number(i).chunks_exact(number(i).len() / rows.max(1));
                let parts = each(0).zip(each(1)).zip(each(2)).zip(positions.iter().cycle());
                for ((((q, kv), turned), &position), qkv) in parts.zip(y.chunks_exact_mut(width)) {
                    latent::heads(shape, position, q, kv, turned, qkv);
                }
            }
            _ => return,
        }
        values.numbers[output.index()] = y;
    }

    /// Operators on tokens in expert order. No token is dropped: a capacity bounds the memory of
    /// training, and what it drops depends on later tokens, which a text being generated lacks.
    #[expect(clippy::wildcard_enum_match_arm, reason = "the rest has other functions")]
    fn experts(&self, at: &At<'_>, values: &mut Values) {
        let (pool, op) = (&self.pool, at.op);
        let dims = |id: TensorId| at.kind.tensor(id).dims[1] as usize;
        let (id, out) = (|i: usize| op.inputs[i].index(), |i: usize| op.outputs[i].index());
        let width = dims(op.outputs[0]);
        let inner = dims(op.inputs[0]);
        let rows = values.numbers[id(0)].len() / inner.max(1);
        match op.kind {
            OpKind::Route(routing) => {
                let routing = route::Routing {
                    seq: rows,
                    capacity: None,
                    balance: 0.0,
                    parts: 1,
                    ..routing_of(routing)
                };
                let (whole, floats) = routing.room();
                let (mut whole, mut floats) = (vec![0; whole], vec![0.0; floats]);
                let room = route::Room { whole: &mut whole, floats: &mut floats };
                let bias = (!op.params.is_empty()).then(|| self.param(at, 0));
                let count = rows * routing.topk;
                let (mut choices, mut gates) = (vec![0; count], vec![0.0; count]);
                let logits = &values.numbers[id(0)];
                route::forward(routing, 0..rows, logits, bias, &mut choices, &mut gates, room);
                values.words[out(0)] = choices;
                values.numbers[out(1)] = gates;
            }
            OpKind::Dispatch { experts, topk, .. } => {
                let [experts, topk] = [experts, topk].map(|n| n as usize);
                let tokens = Rows { rows, width: inner };
                let region_rows = rows * topk;
                let shape = dispatch::Shape { tokens, topk, experts, regions: 1, region_rows };
                let (mut slots, mut counts) = (vec![0; region_rows], vec![0; experts]);
                let choices = &values.words[id(1)];
                let mut starts = vec![0; experts];
                let placed = dispatch::places(shape, choices, &mut slots, &mut counts, &mut starts);
                if let Err(Full { tokens, rows, .. }) = placed {
                    unreachable!("{tokens} choices have {rows} places, one for each");
                }
                let mut sorted = vec![0.0; region_rows * inner];
                dispatch::scatter(pool, shape, &values.numbers[id(0)], &slots, &mut sorted);
                values.numbers[out(0)] = sorted;
                (values.words[out(1)], values.words[out(2)]) = (slots, counts);
            }
            OpKind::ExpertLinear { experts, .. } => {
                let (experts, x) = (experts as usize, &values.numbers[id(0)]);
                let shape = product::Shape {
                    experts,
                    regions: 1,
                    region_rows: rows,
                    inputs: inner,
                    outputs: width,
                };
                let mut workspace = vec![0.0; shape.workspace::<f32, f32>()];
                let mut y = vec![0.0; rows * width];
                let (counts, w) = (&values.words[id(1)], self.param(at, 0));
                product::forward(pool, shape, x, counts, w, &mut y, &mut workspace);
                values.numbers[out(0)] = y;
            }
            OpKind::ExpertBias { .. } => {
                let (shape, x) = (Rows { rows, width }, &values.numbers[id(0)]);
                let mut y = vec![0.0; x.len()];
                let (counts, biases) = (&values.words[id(1)], self.param(at, 0));
                expert_bias::forward(shape, 1, (counts, biases), 1.0, x, &mut y);
                values.numbers[out(0)] = y;
            }
            OpKind::Combine { topk } | OpKind::Return { topk } => {
                let slots = &values.words[id(1)];
                let tokens = Rows { rows: slots.len() / topk.max(1) as usize, width };
                let topk = topk as usize;
                let shape =
                    dispatch::Shape { tokens, topk, experts: 1, regions: 1, region_rows: rows };
                let (made, mut y) = (&values.numbers[id(0)], vec![0.0; tokens.rows * width]);
                match op.inputs.get(2) {
                    Some(gates) => {
                        let gates = &values.numbers[gates.index()];
                        dispatch::combine(pool, shape, made, slots, gates, &mut y);
                    }
                    None => dispatch::gather(pool, shape, made, slots, &mut y),
                }
                values.numbers[out(0)] = y;
            }
            _ => {}
        }
    }

    /// Operators on images and clicks, with the running averages of batch norms instead of batch
    /// statistics.
    #[expect(clippy::wildcard_enum_match_arm, reason = "the rest has other functions")]
    fn sample(&self, at: &At<'_>, values: &mut Values, input: &Input<'_>) {
        let Input::Samples { data, first, count } = *input else { return };
        let (pool, op) = (&self.pool, at.op);
        let output = op.outputs[0];
        let mut y = vec![0.0; at.kind.tensor(output).dims[1] as usize * count];
        let input = |i: usize| &values.numbers[op.inputs[i].index()][..];
        let param = |i: usize| self.param(at, i);
        match op.kind {
            OpKind::Conv { window } => {
                let window = window_of(window);
                let filters = at.kind.param(op.params[0]).dims[0] as usize;
                let shape = conv::Shape { images: count, window, filters };
                let mut room = vec![0.0; conv::workspace::<f32, f32>(shape)];
                conv::forward(pool, shape, input(0), param(0), &mut y, &mut room);
            }
            OpKind::BatchNorm { channels, eps, .. } => {
                let channels = channels as usize;
                let shape = Rows { rows: y.len() / channels, width: channels };
                // Sums of one pixel, a deviation off the running mean, have its moments.
                let mut sums = vec![0.0; channels];
                sums.extend_from_slice(param(3));
                let (params, mut unread) = ((param(0), param(1), param(2)), sums.clone());
                let (eps, x) = (eps as f32, input(0));
                batch_norm::forward(pool, shape, 1.0, eps, x, &sums, params, &mut y, &mut unread);
            }
            OpKind::MaxPool { window } => {
                pooling::max_forward(pool, count, window_of(window), input(0), &mut y);
            }
            OpKind::AveragePool { channels } => {
                let channels = channels as usize;
                let pixels = input(0).len() / count.max(1) / channels;
                pooling::mean_forward(pool, (count, pixels, channels), input(0), &mut y);
            }
            OpKind::EmbeddingBag { tables, lookups, width } => {
                let [tables, each, width] = [tables, lookups, width].map(|n| n as usize);
                let mut ids = vec![0; count * tables * each];
                for (at, ids) in ids.chunks_mut(tables * each).enumerate() {
                    // Built-in samples are always available.
                    let _ = data.fill(first.wrapping_add(at as u64), 0, ids);
                }
                let mut start = 0;
                let whole = |(slot, &rows): (usize, &u64)| {
                    start += rows;
                    Some(HeldRows { first: 0, rows, at: start - rows, slot })
                };
                let blocks = &at.kind.param(op.params[0]).blocks;
                let held: Vec<Option<HeldRows>> = blocks.iter().enumerate().map(whole).collect();
                let lookups = Lookups { tables, each, width };
                sum_rows(pool, lookups, &held, &ids, param(0), &mut y);
            }
            OpKind::Interact { tables, width, .. } => {
                let [tables, width] = [tables, width].map(|n| n as usize);
                let shape = interaction::Shape { samples: count, tables, width };
                let place = |sample, table| (sample * tables + table) * width;
                interaction::forward(pool, shape, place, input(0), input(1), &mut y);
            }
            _ => return,
        }
        values.numbers[output.index()] = y;
    }
}

/// Logits of whole sequences of tokens.
pub(super) fn of_sequences(
    interpreter: &Interpreter,
    graph: &Graph,
    tokens: &[u32],
    positions: &[u32],
) -> Vec<f32> {
    let attend = &mut Sequences { seq: positions.len() };
    interpreter.logits(graph, &mut Input::Tokens { tokens, positions, attend, last: false })
}
