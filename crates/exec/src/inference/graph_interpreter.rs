//! Forward pass of networks on images and clicks: the operators of the model's graph in sequence,
//! with the running averages of batch norms instead of batch statistics.

use crate::checkpoint::{Checkpoint, Source};
use crate::data::{Data, DataError};
use crate::device::cpu::ops::images::window_of;
use crate::inference::Evaluation;
use crate::logical;
use crate::run::outcome::Parameters;
use crate::safetensors::SafetensorsError;
use paceline_kernels::embedding_bag::{HeldRows, Lookups, sum_rows};
use paceline_kernels::loss::{self, Columns};
use paceline_kernels::pool::Pool;
use paceline_kernels::{
    Rows, activation, batch_norm, bias, conv, interaction, linear, pooling, reduce,
};
use paceline_plan::graph::{Graph, LayerDecl, LayerGraph, OpKind, Operator, TensorClass, build};
use paceline_plan::model::{Body, Model};
use std::collections::BTreeMap;

/// A network on images or clicks with all its weights.
#[derive(Debug)]
pub struct ImageNetwork {
    model: Model,
    graph: Graph,
    tensors: Parameters,
    pool: Pool,
}

impl ImageNetwork {
    /// Returns true if a model is such a network.
    pub fn is(model: &Model) -> bool {
        match model.body() {
            Body::Tokens {} => false,
            Body::Images(_) | Body::Clicks(_) => true,
        }
    }

    /// Loads the weights of a checkpoint.
    pub fn from_checkpoint(model: &Model, from: &Checkpoint) -> Result<Self, SafetensorsError> {
        let source: &mut dyn Source = &mut from.weights();
        let mut tensors = BTreeMap::new();
        for (name, dims) in logical::tensors(model) {
            let values = source.whole(&name, dims)?;
            tensors.insert(name, values);
        }
        Ok(Self::from_parameters(model, tensors))
    }

    /// Takes the weights of a finished run.
    pub fn from_parameters(model: &Model, tensors: Parameters) -> Self {
        Self {
            model: model.clone(),
            graph: build(model, 1, 1, 1),
            tensors,
            // If no threads can be started, the calling thread computes alone.
            pool: std::thread::available_parallelism()
                .and_then(Pool::new)
                .unwrap_or_else(|_| Pool::single()),
        }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Evaluates the first `samples` samples, `batch` at a time: the mean loss, and the fraction
    /// whose class or click was predicted correctly.
    pub fn evaluate(&self, data: &Data, samples: u64, batch: u64) -> Result<Evaluation, DataError> {
        let binary = matches!(self.model.body(), Body::Clicks(_));
        let classes = if binary { 1 } else { self.model.vocab as usize };
        let (mut total, mut right, mut done) = (0.0, 0u64, 0);
        while done < samples {
            let count = batch.max(1).min(samples - done);
            let mut targets = vec![0; count as usize];
            for (sample, target) in (done..).zip(targets.chunks_mut(1)) {
                data.fill(sample, 1, target)?;
            }
            let logits = self.logits(data, done, count as usize);
            for (logits, &target) in logits.chunks(classes).zip(&targets) {
                let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let found = match binary {
                    true => (logits[0] > 0.0) == (target == 1),
                    false => logits[target as usize] >= best,
                };
                right += u64::from(found);
            }
            total += if binary {
                let mut losses = vec![0.0; targets.len()];
                loss::binary_cross_entropy(&logits, &targets, &mut losses);
                losses.iter().map(|&loss| f64::from(loss)).sum()
            } else {
                losses(&logits, &targets, classes)
            };
            done += count;
        }
        let mean = |sum: f64| if samples == 0 { f64::NAN } else { sum / samples as f64 };
        let accuracy = Some(mean(right as f64));
        let loss = mean(total);
        Ok(Evaluation { loss, accuracy, tokens: samples, samples, floor: data.floor() })
    }

    /// Logits of consecutive samples: one row each, with one number per class.
    fn logits(&self, data: &Data, first: u64, count: usize) -> Vec<f32> {
        let mut stream = Vec::new();
        for layer in &self.graph.layers {
            let kind = &self.graph.kinds[layer.kind];
            let seen = Seen { data, first, count };
            stream = self.layer(layer, kind, &seen, stream);
        }
        stream
    }

    /// Runs a layer on the output of the previous one; the last layer returns the logits.
    fn layer(
        &self,
        layer: &LayerDecl,
        kind: &LayerGraph,
        seen: &Seen<'_>,
        input: Vec<f32>,
    ) -> Vec<f32> {
        let Seen { data, first, count } = *seen;
        let mut values: Vec<Vec<f32>> = vec![Vec::new(); kind.tensors.len()];
        if let Some(x) = kind.input {
            values[x.index()] = input;
        }
        for (value, tensor) in values.iter_mut().zip(&kind.tensors) {
            if tensor.class == TensorClass::Features {
                value.resize(tensor.dims[1] as usize * count, 0.0);
                for (at, image) in value.chunks_mut(tensor.dims[1] as usize).enumerate() {
                    data.features(first.wrapping_add(at as u64), image);
                }
            }
        }
        let mut last = 0;
        for op in &kind.forward {
            let Some(&output) = op.outputs.first() else { continue };
            let width = kind.tensor(output).dims[1] as usize;
            let mut y = vec![0.0; width * count];
            if !self.operator(layer, kind, op, seen, &values, &mut y) {
                break;
            }
            last = output.index();
            values[last] = y;
        }
        std::mem::take(&mut values[kind.output.map_or(last, |y| y.index())])
    }

    /// Runs an operator; returns false if the loss is reached.
    #[expect(clippy::wildcard_enum_match_arm, reason = "running averages replace a batch's sums")]
    fn operator(
        &self,
        layer: &LayerDecl,
        kind: &LayerGraph,
        op: &Operator,
        seen: &Seen<'_>,
        values: &[Vec<f32>],
        y: &mut [f32],
    ) -> bool {
        let count = seen.count;
        let input = |i: usize| &values[op.inputs[i].index()][..];
        let param = |i: usize| {
            let name = format!("{}.{}", layer.name, kind.param(op.params[i]).name);
            self.tensors.get(&name).map_or(&[][..], Vec::as_slice)
        };
        let rows = |of: &[f32]| Rows { rows: count, width: of.len() / count.max(1) };
        let pool = &self.pool;
        match op.kind {
            OpKind::Conv { window } => {
                let window = window_of(window);
                let filters = kind.param(op.params[0]).dims[0] as usize;
                let shape = conv::Shape { images: count, window, filters };
                let mut room = vec![0.0; conv::workspace::<f32, f32>(shape)];
                conv::forward(pool, shape, input(0), param(0), y, &mut room);
            }
            OpKind::BatchNorm { channels, eps, .. } => {
                let channels = channels as usize;
                let shape = Rows { rows: y.len() / channels, width: channels };
                // Sums of one pixel, a deviation off the running mean, have its moments.
                let mut sums = vec![0.0; channels];
                sums.extend_from_slice(param(3));
                let (params, mut unread) = ((param(0), param(1), param(2)), sums.clone());
                let (eps, x) = (eps as f32, input(0));
                batch_norm::forward(pool, shape, 1.0, eps, x, &sums, params, y, &mut unread);
            }
            OpKind::MaxPool { window } => {
                pooling::max_forward(pool, count, window_of(window), input(0), y);
            }
            OpKind::AveragePool { channels } => {
                let channels = channels as usize;
                let pixels = rows(input(0)).width / channels;
                pooling::mean_forward(pool, (count, pixels, channels), input(0), y);
            }
            OpKind::Linear { .. } => {
                let (inputs, outputs) = (rows(input(0)).width, rows(y).width);
                let shape = linear::Shape { rows: count, inputs, outputs };
                linear::forward(pool, shape, input(0), param(0), y);
            }
            OpKind::Bias => bias::forward(rows(y), input(0), param(0), y),
            OpKind::Activation { .. } => activation::relu_forward(input(0), y),
            OpKind::Add => reduce::add3(input(0), input(1), y),
            OpKind::EmbeddingBag { tables, lookups, width } => {
                let [tables, each, width] = [tables, lookups, width].map(|n| n as usize);
                let mut ids = vec![0; count * tables * each];
                for (at, ids) in ids.chunks_mut(tables * each).enumerate() {
                    // Built-in samples are always available.
                    let _ = seen.data.fill(seen.first.wrapping_add(at as u64), 0, ids);
                }
                let mut start = 0;
                let whole = |(slot, &rows): (usize, &u64)| {
                    start += rows;
                    Some(HeldRows { first: 0, rows, at: start - rows, slot })
                };
                let blocks = &kind.param(op.params[0]).blocks;
                let held: Vec<Option<HeldRows>> = blocks.iter().enumerate().map(whole).collect();
                sum_rows(pool, Lookups { tables, each, width }, &held, &ids, param(0), y);
            }
            OpKind::Interact { tables, width, .. } => {
                let [tables, width] = [tables, width].map(|n| n as usize);
                let shape = interaction::Shape { samples: count, tables, width };
                let place = |sample, table| (sample * tables + table) * width;
                interaction::forward(pool, shape, place, input(0), input(1), y);
            }
            OpKind::RowMax | OpKind::BinaryCrossEntropy { .. } => return false,
            // The running averages replace a batch's own sums.
            _ => {}
        }
        true
    }
}

/// Consecutive samples under evaluation.
struct Seen<'d> {
    data: &'d Data,
    first: u64,
    count: usize,
}

/// Sum of the losses of some rows.
fn losses(logits: &[f32], targets: &[u32], classes: usize) -> f64 {
    let rows = Rows { rows: targets.len(), width: classes };
    let columns = Columns { first: 0, valid: classes };
    let mut max = vec![0.0; rows.rows];
    let mut stats = vec![0.0; 2 * rows.rows];
    let mut losses = vec![0.0; rows.rows];
    loss::row_max(rows, columns, logits, &mut max);
    loss::softmax_stats(rows, columns, logits, &max, targets, &mut stats);
    loss::cross_entropy(&stats, &mut losses);
    losses.iter().map(|&loss| f64::from(loss)).sum()
}
