//! Description of a decoder's layers: what the families of models differ in, besides sizes.
//!
//! A [`Decoder`] and a model's [`ModelDims`](super::ModelDims) are the only description of a
//! transformer that reads tokens and predicts the next one. The graph, the tensors of Hugging Face
//! files and the text of model files all follow from them. The kinds `gpt2`, `llama` and `moe` are
//! short for three such descriptions ([`Decoder::of`]).

use super::{Body, ModelDims, ModelKind, Router};
use crate::graph::{HeadNormKind, Mask, NormKind, Rotary, Scaling};
use serde::Serialize;
use std::fmt;

/// Properties of all layers, with one letter per layer for those in which layers differ.
///
/// Zero is the absence of a factor, a bound or a size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decoder {
    /// Kind of every norm.
    pub norm: NormKind,
    /// Norms of a layer.
    pub norms: Norms,
    /// Composition of attention and feed-forward part.
    pub residual: Residual,
    /// True if the embedding is normalised.
    pub embedding_norm: bool,
    /// True if queries, keys and values have biases.
    pub qkv_bias: bool,
    /// True if the output projection of attention has a bias.
    pub attention_bias: bool,
    /// True if the matrices of feed-forward networks have biases, those of experts included.
    pub ffn_bias: bool,
    /// True if routers have a bias that is part of the scores.
    pub router_bias: bool,
    /// True if the logits have a bias.
    pub head_bias: bool,
    /// Source of a token's position.
    pub position: Position,
    /// Factor of the biases of position `alibi`; 0 for 1.
    pub alibi_scale: f64,
    /// Rotation of layers with letter `f` or `c`.
    pub rotary: Rotary,
    /// Base of the rotation in layers with letter `s`, which is unscaled there; 0 for the same
    /// rotation as elsewhere.
    pub window_theta: f64,
    /// Number of tokens per sequence beyond which the rotation is another one; 0 for none.
    pub long_from: u64,
    /// Scaling of the frequencies of longer sequences.
    pub long_scaling: Scaling,
    /// Factor of the length at which the base of longer sequences grows (dynamic NTK), instead of
    /// another scaling.
    pub long_growth: f64,
    /// Letters of the layers' attention, repeated: `f` full, `s` sliding window, `c` chunks, `n`
    /// full without rotation.
    pub attention: String,
    /// Tokens of a sliding window.
    pub window: u64,
    /// Tokens of a chunk.
    pub chunk: u64,
    /// True if each head has a learned score of no key.
    pub sinks: bool,
    /// Factor of scores; 0 for `1/√head_dim`.
    pub attention_scale: f64,
    /// Bound of scores.
    pub attention_softcap: f64,
    /// Bound of the elements of queries, keys and values.
    pub qkv_clip: f64,
    /// Norm of queries and keys.
    pub qk_norm: Option<QueryKeyNorm>,
    /// True if it comes after the rotation, and only in layers that have one.
    pub qk_norm_last: bool,
    /// Positions over which the factor of queries in layers with letter `n` is constant.
    pub temperature_floor: f64,
    /// Growth of that factor.
    pub temperature_slope: f64,
    /// Factor of embeddings; 0 for 1.
    pub embedding_scale: f64,
    /// Factor of what a half of a layer adds to the residual stream; 0 for 1.
    pub residual_scale: f64,
    /// Factor of logits; 0 for 1.
    pub logit_scale: f64,
    /// Bound of logits.
    pub logit_softcap: f64,
    /// Letters of the layers' feed-forward parts, repeated after the leading dense layers: `e`
    /// experts, `d` one network.
    pub ffn: String,
    /// True if the weights of a token's experts are their scores, not divided by their sum.
    pub raw_gates: bool,
    /// True if a sigmoid router has a bias that affects only the choice.
    pub choice_bias: bool,
    /// True if a group of experts is judged by its best expert instead of its best two.
    pub best_of_group: bool,
    /// True if a token is multiplied by its expert's weight before the expert instead of behind it.
    pub gated_inputs: bool,
    /// Width of the network that all tokens pass besides experts; 0 for that of its experts.
    pub shared_ffn: u64,
    /// True if its output is multiplied by the sigmoid of a projection of the token.
    pub shared_gate: bool,
    /// Epsilon of the norms of latent vectors; 0 for that of other norms.
    pub latent_eps: f64,
}

/// Norms of a layer's halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Norms {
    /// Of their inputs.
    Pre,
    /// Of their outputs.
    Post,
    /// Of both.
    Sandwich,
}

/// Composition of a layer's halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Residual {
    /// The feed-forward part reads the sum of the input and attention's output.
    Sequential,
    /// Both halves read the input through one norm; their outputs are added to it.
    Parallel,
    /// The same, with a norm for each.
    ParallelNorms,
}

/// Norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum QueryKeyNorm {
    /// All query heads together and all key heads together, with a gain for every element.
    Whole,
    /// Head by head.
    #[serde(untagged)]
    Heads(HeadNormKind),
}

/// Source of a token's position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Position {
    /// The causal mask only.
    None,
    /// A table of learned positions.
    Learned,
    /// Biases of scores, linear in the distance.
    Alibi,
    /// Rotation of queries and keys.
    Rotary,
}

impl Position {
    /// Name used in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Learned => "learned",
            Self::Alibi => "alibi",
            Self::Rotary => "rotary",
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One layer of a decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LayerForm {
    pub(crate) mask: Mask,
    /// Base and rest of the rotation.
    pub(crate) rotation: Option<(f64, Rotary)>,
    /// True if queries grow with the position.
    pub(crate) temperature: bool,
    pub(crate) experts: bool,
}

impl Decoder {
    /// The description that a kind is short for; of no use for a kind that is no decoder.
    pub fn of(shape: &ModelDims) -> Self {
        let plain = Self::default();
        match shape.kind {
            ModelKind::Mlp => Self { ffn_bias: true, position: Position::None, ..plain },
            ModelKind::Gpt2 => Self {
                norm: NormKind::Layer,
                qkv_bias: true,
                attention_bias: true,
                ffn_bias: true,
                position: Position::Learned,
                ..plain
            },
            ModelKind::Llama
            | ModelKind::Moe
            | ModelKind::Decoder
            | ModelKind::Resnet
            | ModelKind::Dlrm
            | ModelKind::Graph => {
                let qk_norm = shape.qk_norm.then_some(QueryKeyNorm::Heads(HeadNormKind::Head));
                let choice_bias = shape.experts.router == Router::Sigmoid;
                Self { qk_norm, choice_bias, ..plain }
            }
        }
    }

    /// Form of a layer. Windows and chunks that hold a whole sequence of `seq` tokens do not exist.
    pub(crate) fn layer(&self, shape: &ModelDims, number: u64, seq: u64) -> LayerForm {
        let letter = |letters: &str, at: u64| {
            let letters = letters.as_bytes();
            letters.get((at % letters.len().max(1) as u64) as usize).copied()
        };
        let attention = letter(&self.attention, number).unwrap_or(b'f');
        let mask = match attention {
            b's' if self.window < seq => Mask::Window(self.window),
            b'c' if self.chunk < seq => Mask::Chunk(self.chunk),
            _ => Mask::Causal,
        };
        let rotation = match attention {
            _ if self.position != Position::Rotary => None,
            b'n' => None,
            b's' if self.window_theta > 0.0 => {
                let dims = self.rotary.dims;
                Some((self.window_theta, Rotary { dims, ..Rotary::default() }))
            }
            _ => Some(self.rotation(shape, seq)),
        };
        let temperature = attention == b'n' && self.temperature_slope > 0.0;
        LayerForm { mask, rotation, temperature, experts: self.has_experts(shape, number) }
    }

    /// Base and rest of the rotation for sequences of `seq` tokens.
    fn rotation(&self, shape: &ModelDims, seq: u64) -> (f64, Rotary) {
        let (mut theta, mut rotary) = (shape.rope_theta, self.rotary);
        if self.long_from == 0 || seq <= self.long_from {
            return (theta, rotary);
        }
        if self.long_growth > 0.0 {
            let dims = if shape.latent.is_none() { shape.head_dim } else { shape.latent.qk_rope };
            let dims = if rotary.dims > 0 { rotary.dims } else { dims } as f64;
            let longer = seq as f64 / self.long_from as f64;
            let growth = self.long_growth * longer - (self.long_growth - 1.0);
            theta *= growth.powf(dims / (dims - 2.0));
        } else {
            rotary.scaling = self.long_scaling;
        }
        (theta, rotary)
    }

    /// Returns true if a layer has experts.
    pub(crate) fn has_experts(&self, shape: &ModelDims, number: u64) -> bool {
        let letters = self.ffn.as_bytes();
        !shape.experts.is_none()
            && number >= shape.experts.dense_layers
            && letters.get((number % letters.len().max(1) as u64) as usize) != Some(&b'd')
    }
}

/// The shortest form of a description: one of the kinds that are short for some, if it is theirs.
pub(super) fn shortest(shape: ModelDims, decoder: Decoder) -> (ModelDims, Body) {
    for kind in [ModelKind::Gpt2, ModelKind::Llama, ModelKind::Moe] {
        let by_head = Some(QueryKeyNorm::Heads(HeadNormKind::Head));
        let qk_norm = kind == ModelKind::Moe && decoder.qk_norm == by_head;
        let short = ModelDims { kind, qk_norm, ..shape };
        let experts = shape.experts.is_none() != (kind == ModelKind::Moe);
        let known = kind.activations().contains(&shape.activation);
        let latent = shape.latent.is_none() || shape.latent.q_lora > 0;
        if experts && known && latent && Decoder::of(&short) == decoder {
            return (short, Body::Tokens {});
        }
    }
    let shape = ModelDims { kind: ModelKind::Decoder, qk_norm: false, ..shape };
    (shape, Body::Decoder { decoder: Box::new(decoder) })
}

impl Default for Decoder {
    /// Llama's layers.
    fn default() -> Self {
        Self {
            norm: NormKind::Rms,
            norms: Norms::Pre,
            residual: Residual::Sequential,
            embedding_norm: false,
            qkv_bias: false,
            attention_bias: false,
            ffn_bias: false,
            router_bias: false,
            head_bias: false,
            position: Position::Rotary,
            alibi_scale: 0.0,
            rotary: Rotary::default(),
            window_theta: 0.0,
            long_from: 0,
            long_scaling: Scaling::None,
            long_growth: 0.0,
            attention: "f".to_owned(),
            window: 0,
            chunk: 0,
            sinks: false,
            attention_scale: 0.0,
            attention_softcap: 0.0,
            qkv_clip: 0.0,
            qk_norm: None,
            qk_norm_last: false,
            temperature_floor: 0.0,
            temperature_slope: 0.0,
            embedding_scale: 0.0,
            residual_scale: 0.0,
            logit_scale: 0.0,
            logit_softcap: 0.0,
            ffn: "e".to_owned(),
            raw_gates: false,
            choice_bias: false,
            best_of_group: false,
            gated_inputs: false,
            shared_ffn: 0,
            shared_gate: false,
            latent_eps: 0.0,
        }
    }
}
