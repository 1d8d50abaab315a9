//! Sizes of a model in `config.json`: the same numbers under several names.

use super::super::codec::Codec;
use super::super::field::Field;
use super::super::{Activation, ModelDims};

/// Names of sizes, and defaults of a family.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) layers: &'static str,
    pub(super) d_model: &'static str,
    pub(super) heads: &'static str,
    /// Name of the number of key heads, and true if it must be given; `None` if it is that of heads.
    pub(super) kv_heads: Option<(&'static str, bool)>,
    pub(super) head_dim: HeadDim,
    /// Name of the inner width, and true if it must be given; four times the width otherwise.
    pub(super) ffn: Option<(&'static str, bool)>,
    /// Name of the context, and its value in files that lack it.
    pub(super) seq: (&'static str, Option<u64>),
    pub(super) eps: (&'static str, f64),
    pub(super) tied: bool,
}

/// Source of the width of a head.
#[derive(Clone, Copy)]
pub(super) enum HeadDim {
    /// An equal share of the model's width.
    Share,
    /// A key; an equal share without it.
    Key(&'static str),
    /// Keys of latent attention.
    Latent,
}

/// Llama's names, which most families share.
pub(super) const LLAMA: Sizes = Sizes {
    layers: "num_hidden_layers",
    d_model: "hidden_size",
    heads: "num_attention_heads",
    kv_heads: Some(("num_key_value_heads", false)),
    head_dim: HeadDim::Key("head_dim"),
    ffn: Some(("intermediate_size", true)),
    seq: ("max_position_embeddings", None),
    eps: ("rms_norm_eps", 1e-6),
    tied: false,
};

/// GPT-2's names.
pub(super) const GPT2: Sizes = Sizes {
    layers: "n_layer",
    d_model: "n_embd",
    heads: "n_head",
    kv_heads: None,
    head_dim: HeadDim::Share,
    ffn: Some(("n_inner", false)),
    seq: ("n_positions", None),
    eps: ("layer_norm_epsilon", 1e-5),
    tied: true,
};

impl Sizes {
    /// Reads or writes the sizes.
    pub(super) fn code(self, c: &mut Codec<'_>, s: &mut ModelDims) {
        c.size(Field::DModel, self.d_model, &mut s.d_model);
        c.size(Field::Layers, self.layers, &mut s.layers);
        c.size(Field::Heads, self.heads, &mut s.heads);
        match self.kv_heads {
            Some((key, true)) => c.size(Field::KvHeads, key, &mut s.kv_heads),
            Some((key, false)) => c.size_or(Field::KvHeads, key, &mut s.kv_heads, s.heads),
            None if !c.writes() => s.kv_heads = s.heads,
            None => {}
        }
        let sizes = (s.d_model, s.heads);
        match self.head_dim {
            HeadDim::Share => c.head_dim(None, sizes, &mut s.head_dim),
            HeadDim::Key(key) => c.head_dim(Some(key), sizes, &mut s.head_dim),
            HeadDim::Latent => {}
        }
        match self.ffn {
            Some((key, true)) => c.size(Field::Ffn, key, &mut s.ffn),
            Some((key, false)) => {
                c.size_or(Field::Ffn, key, &mut s.ffn, s.d_model.saturating_mul(4));
            }
            None if !c.writes() => s.ffn = s.d_model.saturating_mul(4),
            None => {}
        }
        match self.seq {
            (key, None) => c.size(Field::Seq, key, &mut s.seq),
            (key, Some(usual)) => c.size_or(Field::Seq, key, &mut s.seq, usual),
        }
        c.size(Field::Vocab, "vocab_size", &mut s.vocab);
        c.flag("tie_word_embeddings", &mut s.tied, self.tied);
        c.real(Field::NormEps, self.eps.0, &mut s.norm_eps, self.eps.1);
    }
}

/// Activations of gated networks.
pub(super) const GATED: [(&str, Activation); 5] = [
    ("silu", Activation::SwiGlu),
    ("swish", Activation::SwiGlu),
    ("gelu_pytorch_tanh", Activation::GeGlu),
    ("gelu_new", Activation::GeGlu),
    ("gelu", Activation::GeGluErf),
];

/// Activations of networks without a gate.
pub(super) const PLAIN: [(&str, Activation); 6] = [
    ("gelu_new", Activation::Gelu),
    ("gelu_pytorch_tanh", Activation::Gelu),
    ("gelu_fast", Activation::Gelu),
    ("gelu", Activation::GeluErf),
    ("relu", Activation::Relu),
    ("relu2", Activation::SquaredRelu),
];
