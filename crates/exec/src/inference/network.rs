//! Models with all their weights.

use super::Evaluation;
use super::interpreter::{Input, Interpreter};
use super::kv_cache::KvCache;
use crate::checkpoint::{Checkpoint, Source};
use crate::data::{Data, DataError};
use crate::hugging_face::{Pretrained, Whole};
use crate::logical;
use crate::run::outcome::Parameters;
use crate::safetensors::SafetensorsError;
use paceline_kernels::Rows;
use paceline_kernels::loss::{self, Columns};
use paceline_plan::graph::{Graph, build};
use paceline_plan::model::{Body, Model};
use std::collections::BTreeMap;

/// A model of tokens with all its weights.
#[derive(Debug)]
pub struct Network {
    model: Model,
    interpreter: Interpreter,
}

impl Network {
    /// Loads the weights of a checkpoint.
    pub fn from_checkpoint(model: &Model, from: &Checkpoint) -> Result<Self, SafetensorsError> {
        Self::load(model, &mut from.weights())
    }

    /// Takes the weights of a finished run.
    pub fn from_parameters(model: &Model, tensors: Parameters) -> Self {
        Self { model: model.without_mtp(), interpreter: Interpreter::new(tensors) }
    }

    /// Loads the weights of a Hugging Face directory.
    pub fn from_pretrained(from: &Pretrained) -> Result<Self, SafetensorsError> {
        Self::load(from.model(), &mut Whole::new(from))
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Reads the weights for the next token; multi-token prediction modules are left out.
    fn load(model: &Model, source: &mut dyn Source) -> Result<Self, SafetensorsError> {
        let tensors = read(&model.without_mtp(), source)?;
        Ok(Self::from_parameters(model, tensors))
    }

    /// Operators for sequences of up to `seq` tokens: rotations and masks may depend on it.
    pub(super) fn graph(&self, seq: u64) -> Graph {
        build(&self.model, 1, seq.max(1), 1)
    }

    /// Logits of sequences of `positions.len()` tokens each, at these positions.
    pub fn logits(&self, tokens: &[u32], positions: &[u32]) -> Vec<f32> {
        let graph = self.graph(positions.len() as u64);
        super::interpreter::of_sequences(&self.interpreter, &graph, tokens, positions)
    }

    /// Logits of the token after the given ones, which follow those in the cache.
    pub(super) fn next(
        &self,
        graph: &Graph,
        tokens: &[u32],
        positions: &[u32],
        attend: &mut KvCache,
    ) -> Vec<f32> {
        let mut input = Input::Tokens { tokens, positions, attend, last: true };
        self.interpreter.logits(graph, &mut input)
    }
}

/// Reason that a model can be trained but not evaluated, if there is one.
pub fn trains_only(model: &Model) -> Option<String> {
    let Body::Network(net) = model.body() else { return None };
    net.reads_tokens().then(|| {
        format!(
            "{}: a graph on tokens is trained only, not evaluated, and writes no text",
            model.name()
        )
    })
}

fn read(model: &Model, source: &mut dyn Source) -> Result<Parameters, SafetensorsError> {
    let mut tensors = BTreeMap::new();
    for (name, dims) in logical::tensors(model) {
        let values = source.whole(&name, dims)?;
        tensors.insert(name, values);
    }
    Ok(tensors)
}

/// A network on images or clicks with all its weights.
#[derive(Debug)]
pub struct ImageNetwork {
    model: Model,
    graph: Graph,
    interpreter: Interpreter,
}

impl ImageNetwork {
    /// Returns true if a model is such a network.
    pub fn is(model: &Model) -> bool {
        match model.body() {
            Body::Tokens {} | Body::Decoder { .. } => false,
            Body::Images(_) | Body::Clicks(_) => true,
            Body::Network(net) => !net.reads_tokens(),
        }
    }

    /// Loads the weights of a checkpoint.
    pub fn from_checkpoint(model: &Model, from: &Checkpoint) -> Result<Self, SafetensorsError> {
        Ok(Self::from_parameters(model, read(model, &mut from.weights())?))
    }

    /// Takes the weights of a finished run.
    pub fn from_parameters(model: &Model, tensors: Parameters) -> Self {
        let (model, graph) = (model.clone(), build(model, 1, 1, 1));
        Self { model, graph, interpreter: Interpreter::new(tensors) }
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
            let mut seen = Input::Samples { data, first: done, count: count as usize };
            let logits = self.interpreter.logits(&self.graph, &mut seen);
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
}

/// Sum of the losses of some rows.
pub(super) fn losses(logits: &[f32], targets: &[u32], classes: usize) -> f64 {
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
