//! The layers of a model, forward.

use super::attend::{Attend, Heads};
use crate::checkpoint::{Checkpoint, Source};
use crate::hugging_face::{Pretrained, Whole};
use crate::logical;
use crate::outcome::Parameters;
use crate::safetensors::SafetensorsError;
use paceline_kernels::Rows;
use paceline_kernels::pool::Pool;
use paceline_kernels::{activation, bias, embedding, linear, norm, reduce, rope};
use paceline_plan::model::{Activation, Model};
use std::collections::BTreeMap;

/// A model with its weights, whole.
#[derive(Debug)]
pub struct Network {
    model: Model,
    table: Vec<f32>,
    /// The head's own table, if it has one.
    head: Option<Vec<f32>>,
    positions: Option<Vec<f32>>,
    blocks: Vec<Block>,
    norm: Option<Affine>,
    pool: Pool,
}

/// A gain or a matrix, and a bias where the model has one.
#[derive(Debug)]
struct Affine {
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

#[derive(Debug)]
struct Block {
    /// None for a network whose tokens do not see each other.
    attention: Option<Attention>,
    up: Affine,
    down: Affine,
}

#[derive(Debug)]
struct Attention {
    norm1: Affine,
    qkv: Affine,
    out: Affine,
    norm2: Affine,
}

impl Network {
    /// The weights of a checkpoint.
    pub fn from_checkpoint(model: &Model, from: &Checkpoint) -> Result<Self, SafetensorsError> {
        Self::load(model, &mut from.weights())
    }

    /// The weights of a run that has just ended.
    pub fn from_parameters(model: &Model, tensors: Parameters) -> Self {
        Self::of(model, tensors)
    }

    /// The weights of a Hugging Face directory.
    pub fn from_pretrained(from: &Pretrained) -> Result<Self, SafetensorsError> {
        Self::load(from.model(), &mut Whole::new(from))
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    fn load(model: &Model, source: &mut dyn Source) -> Result<Self, SafetensorsError> {
        let mut tensors = BTreeMap::new();
        for (name, dims) in logical::tensors(model) {
            let mut values = vec![0.0; (dims[0] * dims[1]) as usize];
            source.read(&name, dims, 0, &mut values)?;
            tensors.insert(name, values);
        }
        Ok(Self::of(model, tensors))
    }

    fn of(model: &Model, mut tensors: Parameters) -> Self {
        // Every name below is the model's own, so that it is there.
        let mut take = |name: &str| tensors.remove(name);
        let mut affine = |name: &str| Affine {
            weight: take(&format!("{name}.weight")).unwrap_or_default(),
            bias: take(&format!("{name}.bias")),
        };
        let mut blocks = Vec::new();
        for layer in 0..model.layers {
            let mut of = |what: &str| affine(&format!("blocks.{layer}.{what}"));
            let attention = model.kind.has_attention().then(|| Attention {
                norm1: of("norm1"),
                qkv: of("qkv"),
                out: of("attention_out"),
                norm2: of("norm2"),
            });
            blocks.push(Block { attention, up: of("up"), down: of("down") });
        }
        let norm = model.kind.has_attention().then(|| affine("head.norm"));
        Self {
            model: model.clone(),
            table: take("embedding.table.weight").unwrap_or_default(),
            head: take("head.table.weight"),
            positions: take("embedding.position.weight"),
            blocks,
            norm,
            // Without threads of its own, the calling one does it all.
            pool: std::thread::available_parallelism()
                .and_then(Pool::new)
                .unwrap_or_else(|_| Pool::single()),
        }
    }

    /// The residual stream behind the last layer, normed: one row per token.
    ///
    /// `tokens` are sequences of `positions.len()` tokens each, which stand at these positions;
    /// `attend` decides what a token sees.
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
                    let normed = self.normed(rows, &attention.norm1, &x);
                    let mut qkv = self.linear(rows.rows, &attention.qkv, &normed);
                    if self.model.kind.is_rotary() {
                        rope::forward_in_place(self.rotation(), positions, &mut qkv);
                    }
                    let mut seen = vec![0.0; rows.rows * self.model.query_width() as usize];
                    attend.attend(layer, (self.heads(), &self.pool), &qkv, &mut seen);
                    self.add(&mut x, &self.linear(rows.rows, &attention.out, &seen));
                    let normed = self.normed(rows, &attention.norm2, &x);
                    let y = self.feed_forward(rows.rows, block, &normed);
                    self.add(&mut x, &y);
                }
                None => {
                    let y = self.feed_forward(rows.rows, block, &x);
                    activation::relu_forward(&y, &mut x);
                }
            }
        }
        match &self.norm {
            Some(norm) => self.normed(rows, norm, &x),
            None => x,
        }
    }

    /// The logits of rows of the stream.
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

    pub(super) fn heads(&self) -> Heads {
        let [heads, kv_heads, head_dim] =
            [self.model.heads, self.model.kv_heads, self.model.head_dim].map(|n| n as usize);
        Heads { heads, kv_heads, head_dim }
    }

    fn rotation(&self) -> rope::Rotation {
        let Heads { heads, kv_heads, head_dim } = self.heads();
        rope::Rotation { heads, kv_heads, head_dim, theta: self.model.rope_theta }
    }

    fn normed(&self, rows: Rows, affine: &Affine, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len()];
        let mut stats = vec![0.0; 2 * rows.rows];
        let (epsilon, gain) = (self.model.norm_eps as f32, &affine.weight);
        match &affine.bias {
            Some(bias) => {
                norm::layer_norm_forward(rows, epsilon, x, gain, bias, &mut y, &mut stats);
            }
            None => {
                let stats = &mut stats[..rows.rows];
                norm::rms_norm_forward(rows, epsilon, x, gain, &mut y, stats);
            }
        }
        y
    }

    fn linear(&self, rows: usize, affine: &Affine, x: &[f32]) -> Vec<f32> {
        let inputs = x.len() / rows.max(1);
        let outputs = affine.weight.len() / inputs.max(1);
        let mut y = vec![0.0; rows * outputs];
        linear::forward(
            &self.pool,
            linear::Shape { rows, inputs, outputs },
            x,
            &affine.weight,
            &mut y,
        );
        if let Some(added) = &affine.bias {
            let product = y.clone();
            bias::forward(Rows { rows, width: outputs }, &product, added, &mut y);
        }
        y
    }

    fn feed_forward(&self, rows: usize, block: &Block, x: &[f32]) -> Vec<f32> {
        let up = self.linear(rows, &block.up, x);
        let width = self.model.ffn as usize;
        let mut active = vec![0.0; rows * width];
        match self.model.activation {
            Activation::Gelu => activation::gelu_tanh_forward(&up, &mut active),
            Activation::Relu => activation::relu_forward(&up, &mut active),
            Activation::SquaredRelu => activation::squared_relu_forward(&up, &mut active),
            Activation::SwiGlu => {
                activation::swiglu_forward(Rows { rows, width }, &up, &mut active)
            }
        }
        self.linear(rows, &block.down, &active)
    }

    fn add(&self, x: &mut [f32], y: &[f32]) {
        reduce::add(y, x);
    }
}
