//! Forward pass of a model's layers.

use super::affine::Affine;
use super::ffn::Ffn;
use super::kv_cache::Attend;
use super::qkv::Qkv;
use crate::checkpoint::{Checkpoint, Source};
use crate::hugging_face::{Pretrained, Whole};
use crate::logical;
use crate::run::outcome::Parameters;
use crate::safetensors::SafetensorsError;
use paceline_kernels::Rows;
use paceline_kernels::pool::Pool;
use paceline_kernels::{activation, embedding, linear, reduce};
use paceline_plan::model::Model;
use std::collections::BTreeMap;

/// A model with all its weights.
#[derive(Debug)]
pub struct Network {
    model: Model,
    table: Vec<f32>,
    /// Separate table of the head, if it has one.
    head: Option<Vec<f32>>,
    positions: Option<Vec<f32>>,
    blocks: Vec<Block>,
    norm: Option<Affine>,
    pool: Pool,
}

#[derive(Debug)]
struct Block {
    /// `None` for a network without attention.
    attention: Option<Attention>,
    feed: Ffn,
}

#[derive(Debug)]
struct Attention {
    norm1: Affine,
    project: Qkv,
    out: Affine,
    norm2: Affine,
}

impl Network {
    /// Loads the weights of a checkpoint.
    pub fn from_checkpoint(model: &Model, from: &Checkpoint) -> Result<Self, SafetensorsError> {
        Self::load(model, &mut from.weights())
    }

    /// Takes the weights of a finished run.
    pub fn from_parameters(model: &Model, tensors: Parameters) -> Self {
        Self::of(model, tensors)
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
        let mut tensors = BTreeMap::new();
        for (name, dims) in logical::tensors(&model.without_mtp()) {
            let values = source.whole(&name, dims)?;
            tensors.insert(name, values);
        }
        Ok(Self::of(model, tensors))
    }

    fn of(model: &Model, mut tensors: Parameters) -> Self {
        let mut blocks = Vec::new();
        for layer in 0..model.layers {
            let name = format!("blocks.{layer}");
            let attention = model.kind.has_attention().then(|| Attention {
                norm1: Affine::take(&mut tensors, &format!("{name}.norm1")),
                project: Qkv::take(model, &mut tensors, &name),
                out: Affine::take(&mut tensors, &format!("{name}.attention_out")),
                norm2: Affine::take(&mut tensors, &format!("{name}.norm2")),
            });
            let feed = Ffn::take(model, &mut tensors, layer, &name);
            blocks.push(Block { attention, feed });
        }
        let norm = model.kind.has_attention().then(|| Affine::take(&mut tensors, "head.norm"));
        Self {
            model: model.clone(),
            table: tensors.remove("embedding.table.weight").unwrap_or_default(),
            head: tensors.remove("head.table.weight"),
            positions: tensors.remove("embedding.position.weight"),
            blocks,
            norm,
            // If no threads can be started, the calling thread computes alone.
            pool: std::thread::available_parallelism()
                .and_then(Pool::new)
                .unwrap_or_else(|_| Pool::single()),
        }
    }

    /// Residual stream after the last layer, normalised: one row per token.
    ///
    /// `tokens` are sequences of `positions.len()` tokens each, at these positions; `attend`
    /// computes the attention.
    pub(super) fn hidden(
        &self,
        tokens: &[u32],
        positions: &[u32],
        attend: &mut dyn Attend,
    ) -> Vec<f32> {
        let width = self.model.d_model as usize;
        let rows = Rows { rows: tokens.len(), width };
        let mut x = vec![0.0; rows.rows * width];
        embedding::forward(rows, 0, tokens, &self.table, &mut x);
        if let Some(table) = &self.positions {
            let embedded = x.clone();
            embedding::position_forward(rows, positions, &embedded, table, &mut x);
        }
        for (layer, block) in self.blocks.iter().enumerate() {
            match &block.attention {
                Some(attention) => {
                    let y = self.attended(attention, layer, positions, attend, &x);
                    reduce::add(&y, &mut x);
                    let normed = attention.norm2.normed(self.model.norm_eps, &x);
                    let y = block.feed.forward(&self.model, &self.pool, rows.rows, &normed);
                    reduce::add(&y, &mut x);
                }
                None => {
                    let y = block.feed.forward(&self.model, &self.pool, rows.rows, &x);
                    activation::relu_forward(&y, &mut x);
                }
            }
        }
        match &self.norm {
            Some(norm) => norm.normed(self.model.norm_eps, &x),
            None => x,
        }
    }

    /// Contribution of attention to the residual stream.
    fn attended(
        &self,
        attention: &Attention,
        layer: usize,
        positions: &[u32],
        attend: &mut dyn Attend,
        x: &[f32],
    ) -> Vec<f32> {
        let (model, pool) = (&self.model, &self.pool);
        let rows = x.len() / model.d_model.max(1) as usize;
        let normed = attention.norm1.normed(model.norm_eps, x);
        let qkv = attention.project.rows(model, pool, positions, (rows, &normed));
        let mut seen = vec![0.0; rows * model.query_width() as usize];
        attend.attend(layer, (Qkv::heads(model), pool), &qkv, &mut seen);
        attention.out.product(pool, rows, &attention.project.seen(model, seen))
    }

    /// Logits of rows of the residual stream.
    pub(super) fn logits(&self, hidden: &[f32]) -> Vec<f32> {
        let (width, vocab) = (self.model.d_model as usize, self.model.vocab as usize);
        let rows = hidden.len() / width;
        let mut logits = vec![0.0; rows * vocab];
        let shape = linear::Shape { rows, inputs: width, outputs: vocab };
        linear::forward(
            &self.pool,
            shape,
            hidden,
            self.head.as_ref().unwrap_or(&self.table),
            &mut logits,
        );
        logits
    }
}
