//! Dimensions of a model: the network to train, before any sharding.
//!
//! A [`Model`] is a checked [`ModelDims`] with a name. It comes from a TOML file
//! ([`Model::parse`]), from a Hugging Face `config.json` ([`hugging_face::parse`]), from the
//! built-in files ([`built_in`]), or from numbers in code ([`Model::new`]). All four go through the
//! same checks, so the numbers of a `Model` are always valid.

mod check;
mod codec;
mod count;
mod decoder;
mod dlrm;
mod experts;
mod features;
mod field;
mod fields;
mod keys;
mod mtp;
pub mod network;
mod parse;
mod resnet;

pub mod built_in;
pub mod hugging_face;

pub use check::MAX_PARAMETERS;
pub(crate) use decoder::LayerForm;
pub use decoder::{Decoder, Norms, Position, QueryKeyNorm, Residual};
pub use dlrm::Dlrm;
pub use experts::{Experts, Latent, Router};
pub use mtp::Mtp;
pub use network::Network;
pub use resnet::{Block, ResNet, Stem};

use crate::located::Errors;
use field::Words;
use serde::Serialize;
use std::fmt;
use std::ops::Deref;

/// A model with checked dimensions.
///
/// The numbers are those of [`ModelDims`] and are read as fields (`model.layers`). They cannot be
/// changed in place: other dimensions are a different model and go through [`Model::new`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    name: String,
    /// Family of Hugging Face's that it came from, in which it is written if it fits.
    #[serde(skip)]
    family: Option<&'static str>,
    #[serde(flatten)]
    shape: ModelDims,
    #[serde(flatten)]
    body: Body,
}

/// Input of a model, with the dimensions specific to such models.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Body {
    /// Tokens: [`ModelDims`] is the complete description.
    Tokens {},
    /// Tokens, by layers that a description of their own states.
    Decoder {
        /// The description.
        decoder: Box<Decoder>,
    },
    /// Images.
    Images(ResNet),
    /// Dense and sparse features of a click.
    Clicks(Dlrm),
    /// Samples of the kind that a description operator by operator names.
    Network(Network),
}

/// Dimensions of a model, not yet checked.
///
/// A number that does not apply to the kind is zero: an `mlp` has no heads and no norm, only `gpt2`
/// has a table of positions, only `llama` and `moe` have a rotary base, and only `moe` has experts.
/// A `resnet` and a `dlrm` have their dimensions in [`Body`]; here are the numbers that generic
/// code needs of any model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ModelDims {
    /// Family; determines the operators and the parameters that have biases.
    pub kind: ModelKind,
    /// Number of transformer layers; for an `mlp`, blocks of two fully connected layers; for a
    /// `resnet`, blocks.
    pub layers: u64,
    /// Width of the residual stream.
    pub d_model: u64,
    /// Number of query heads.
    pub heads: u64,
    /// Number of key and value heads: `heads` for multi-head attention, fewer for grouped queries.
    pub kv_heads: u64,
    /// Width of one head; usually, but not necessarily, `d_model / heads`.
    pub head_dim: u64,
    /// Inner width of the feed-forward network.
    pub ffn: u64,
    /// Number of tokens per sample, unless a run overrides it.
    pub seq: u64,
    /// Number of learned positions, an upper bound of `seq`.
    pub max_positions: u64,
    /// Number of rows of the token embedding, and of logits of the head.
    pub vocab: u64,
    /// True if the head uses the token embedding as its weight.
    pub tied: bool,
    /// Non-linearity between the GEMMs of the feed-forward network.
    pub activation: Activation,
    /// Epsilon that a norm adds to the variance before the root.
    pub norm_eps: f64,
    /// Base of the rotary angles.
    pub rope_theta: f64,
    /// True if queries and keys are normalised per head before they are rotated.
    pub qk_norm: bool,
    /// Experts of a `moe`; `ffn` is the width of one.
    #[serde(flatten, skip_serializing_if = "Experts::is_none")]
    pub experts: Experts,
    /// Latent attention, for a `moe` that has it.
    #[serde(flatten, skip_serializing_if = "Latent::is_none")]
    pub latent: Latent,
    /// Multi-token prediction modules, for a `llama` or a `moe` that has them.
    #[serde(flatten, skip_serializing_if = "Mtp::is_none")]
    pub mtp: Mtp,
}

/// A family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// A token-wise network: embedding, blocks of two fully connected layers with bias and ReLU
    /// after each, and a head without bias. Tokens do not interact.
    Mlp,
    /// GPT-2: learned positions, layer norm before each half of a layer, biases on every linear
    /// layer but the head.
    Gpt2,
    /// Llama: rotary positions, RMS norm, no biases, usually a gated feed-forward network.
    Llama,
    /// A residual network on images: convolutions, each with a batch norm.
    Resnet,
    /// Llama's layers with experts instead of the feed-forward network.
    Moe,
    /// A recommendation model: embedding tables, and networks around the products of their rows.
    Dlrm,
    /// A transformer whose layers are described by a [`Decoder`].
    Decoder,
    /// A network described operator by operator.
    Graph,
}

/// The non-linearity of the feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// GELU in the tanh form, as used to train GPT-2.
    Gelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)²`.
    SquaredRelu,
    /// `silu(gate) · up`: has two input GEMMs, so the feed-forward network has three.
    #[serde(rename = "swiglu")]
    SwiGlu,
    /// GELU by the error function.
    GeluErf,
    /// `gelu(gate) · up`, with the tanh form.
    #[serde(rename = "geglu")]
    GeGlu,
    /// `gelu(gate) · up`, with the error function.
    #[serde(rename = "geglu-erf")]
    GeGluErf,
    /// `gate · sigmoid(1.702 gate) · (up + 1)` with gate at most 7 and up within ±7 (gpt-oss).
    #[serde(rename = "clamped-swiglu")]
    ClampedSwiGlu,
}

impl Model {
    /// Checks dimensions given in code; errors name the model instead of a file.
    pub fn new(name: impl Into<String>, shape: ModelDims) -> Result<Self, Errors> {
        let name = name.into();
        if matches!(shape.kind, ModelKind::Resnet | ModelKind::Dlrm | ModelKind::Graph) {
            let problem = "such a model is not described by widths and heads".to_owned();
            let remedy =
                "make it with `Model::resnet`, `Model::dlrm` or `Model::network`".to_owned();
            return Err(Errors::one(name, None, problem, remedy));
        }
        match shape.kind {
            ModelKind::Decoder => Self::from_decoder(name, shape, Decoder::default()),
            _ => Self::checked(name, shape, Body::Tokens {}),
        }
    }

    /// Checks dimensions and a description of layers given in code. If they are those of kind
    /// `gpt2`, `llama` or `moe`, so is the model.
    pub fn from_decoder(
        name: impl Into<String>,
        shape: ModelDims,
        decoder: Decoder,
    ) -> Result<Self, Errors> {
        let (shape, body) = decoder::shortest(shape, decoder);
        Self::checked(name.into(), shape, body)
    }

    fn checked(name: String, shape: ModelDims, body: Body) -> Result<Self, Errors> {
        let violations = check::violations(&shape, &body, &Words::TOML, &mut Default::default());
        if violations.is_empty() {
            return Ok(Self { name, family: None, shape, body });
        }
        let mut errors = Errors::new(name);
        violations.into_iter().for_each(|v| errors.add(None, v.problem, v.remedy));
        Err(errors.sorted())
    }

    /// Builds a model whose dimensions are in its body.
    fn from_body(name: String, body: Body) -> Result<Self, Errors> {
        let (problem, shape) = match &body {
            Body::Images(net) => (resnet::too_large(net), resnet::shape(net)),
            Body::Clicks(net) => (dlrm::too_large(net), dlrm::shape(net)),
            Body::Network(net) => (network::too_large(net), network::shape(net)),
            Body::Tokens {} | Body::Decoder { .. } => {
                unreachable!("models of tokens have a shape")
            }
        };
        match problem {
            None => Ok(Self { name, family: None, shape, body }),
            Some((problem, remedy)) => Err(Errors::one(name, None, problem, remedy)),
        }
    }

    /// Input of the model, with its specific dimensions.
    pub fn body(&self) -> &Body {
        &self.body
    }

    /// Name of the model in reports and on the command line.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same model on samples of another length; learned positions limit it.
    pub fn with_seq(&self, seq: u64) -> Result<Self, Errors> {
        match &self.body {
            Body::Tokens {} | Body::Decoder { .. } => {
                let shape = ModelDims { seq, ..self.shape };
                let model = Self::checked(self.name.clone(), shape, self.body.clone())?;
                Ok(Self { family: self.family, ..model })
            }
            Body::Images(_) | Body::Clicks(_) => Ok(self.clone()),
            Body::Network(net) => Self::network(self.name.clone(), net.with_seq(seq)),
        }
    }

    /// The same model without multi-token prediction modules, which only training needs.
    pub fn without_mtp(&self) -> Self {
        let mut plain = self.clone();
        plain.shape.mtp = Mtp::default();
        plain
    }

    /// Width of all query heads; without latent vectors, also of attention's result.
    pub fn query_width(&self) -> u64 {
        self.shape.heads * self.shape.head_dim
    }

    /// Width of all key heads; without latent vectors, also of all value heads.
    pub fn kv_width(&self) -> u64 {
        self.shape.kv_heads * self.shape.head_dim
    }

    /// Number of layers with experts, including those of multi-token prediction modules.
    pub fn expert_layers(&self) -> u64 {
        if self.shape.experts.is_none() {
            return 0;
        }
        let decoder = self.decoder();
        let has = |number: u64| u64::from(decoder.has_experts(&self.shape, number));
        let last = has(self.shape.layers.saturating_sub(1));
        (0..self.shape.layers).map(has).sum::<u64>() + self.shape.mtp.depth * last
    }

    /// Widths of the feed-forward networks that all tokens pass, which tensor parallelism divides.
    pub fn shared_widths(&self) -> [u64; 2] {
        let experts = &self.shape.experts;
        match (experts.is_none(), self.decoder().shared_ffn) {
            (true, _) => [self.shape.ffn, 0],
            (false, 0) => {
                [experts.dense_ffn, experts.shared_experts.saturating_mul(self.shape.ffn)]
            }
            (false, shared) => [experts.dense_ffn, shared],
        }
    }

    /// Returns true if attention depends on distances within sequences of `seq` tokens: by a window,
    /// by chunks, or by ALiBi.
    pub fn depends_on_distance(&self, seq: u64) -> bool {
        let decoder = self.decoder();
        let masked = |letter: char, size: u64| decoder.attention.contains(letter) && size < seq;
        masked('s', decoder.window)
            || masked('c', decoder.chunk)
            || decoder.position == Position::Alibi
    }

    /// Description of the layers; of no use for a network that is no decoder.
    pub fn decoder(&self) -> Decoder {
        match &self.body {
            Body::Decoder { decoder } => (**decoder).clone(),
            Body::Tokens {} | Body::Images(_) | Body::Clicks(_) | Body::Network(_) => {
                Decoder::of(&self.shape)
            }
        }
    }
}

impl Deref for Model {
    type Target = ModelDims;

    fn deref(&self) -> &ModelDims {
        &self.shape
    }
}

impl ModelDims {
    /// Returns true if the feed-forward network has a gate, and so three GEMMs instead of two.
    pub const fn gated(&self) -> bool {
        self.activation.gated()
    }
}

impl ModelKind {
    /// All kinds that can be built.
    pub const ALL: [Self; 8] = [
        Self::Mlp,
        Self::Gpt2,
        Self::Llama,
        Self::Moe,
        Self::Resnet,
        Self::Dlrm,
        Self::Decoder,
        Self::Graph,
    ];

    /// Name used in files and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mlp => "mlp",
            Self::Gpt2 => "gpt2",
            Self::Llama => "llama",
            Self::Resnet => "resnet",
            Self::Moe => "moe",
            Self::Dlrm => "dlrm",
            Self::Decoder => "decoder",
            Self::Graph => "graph",
        }
    }

    /// Returns true if the kind has attention.
    pub const fn has_attention(self) -> bool {
        match self {
            Self::Mlp | Self::Resnet | Self::Dlrm | Self::Graph => false,
            Self::Gpt2 | Self::Llama | Self::Moe | Self::Decoder => true,
        }
    }

    /// Returns true if linear layers inside the model's layers have biases.
    pub const fn has_biases(self) -> bool {
        match self {
            Self::Mlp | Self::Gpt2 => true,
            Self::Llama | Self::Moe | Self::Resnet | Self::Dlrm | Self::Decoder | Self::Graph => {
                false
            }
        }
    }

    /// Returns true if positions are rotary and norms use the root mean square.
    pub const fn is_rotary(self) -> bool {
        match self {
            Self::Mlp | Self::Gpt2 | Self::Resnet | Self::Dlrm | Self::Graph => false,
            Self::Llama | Self::Moe | Self::Decoder => true,
        }
    }

    /// Activations that the kind supports, its default first.
    pub const fn activations(self) -> &'static [Activation] {
        match self {
            Self::Mlp => &[Activation::Relu, Activation::Gelu, Activation::SquaredRelu],
            Self::Gpt2 => &[Activation::Gelu, Activation::Relu, Activation::SquaredRelu],
            Self::Resnet | Self::Dlrm | Self::Graph => &[Activation::Relu],
            Self::Decoder => &Activation::ALL,
            Self::Llama | Self::Moe => {
                &[Activation::SwiGlu, Activation::Gelu, Activation::Relu, Activation::SquaredRelu]
            }
        }
    }
}

impl fmt::Display for ModelKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Activation {
    /// All activations.
    pub const ALL: [Self; 8] = [
        Self::SwiGlu,
        Self::Gelu,
        Self::Relu,
        Self::SquaredRelu,
        Self::GeluErf,
        Self::GeGlu,
        Self::GeGluErf,
        Self::ClampedSwiGlu,
    ];

    /// Returns true if the first half of the inner width is a gate for the second.
    pub const fn gated(self) -> bool {
        match self {
            Self::SwiGlu | Self::GeGlu | Self::GeGluErf | Self::ClampedSwiGlu => true,
            Self::Gelu | Self::Relu | Self::SquaredRelu | Self::GeluErf => false,
        }
    }

    /// Name used in files and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gelu => "gelu",
            Self::Relu => "relu",
            Self::SquaredRelu => "squared-relu",
            Self::SwiGlu => "swiglu",
            Self::GeluErf => "gelu-erf",
            Self::GeGlu => "geglu",
            Self::GeGluErf => "geglu-erf",
            Self::ClampedSwiGlu => "clamped-swiglu",
        }
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mini() -> Model {
        built_in::get("mini").expect("built in").expect("sound")
    }

    #[test]
    fn a_shape_made_in_code_is_checked_and_all_problems_are_told() {
        let shape = ModelDims { layers: 0, kv_heads: 3, norm_eps: f64::NAN, ..*mini() };
        let told = Model::new("broken", shape).unwrap_err().to_string();
        assert_eq!(told.lines().count(), 3, "{told}");
        assert!(told.contains("broken: `layers` is 0; use a whole number from 1 to"), "{told}");
        assert!(told.contains("`kv_heads` is 3, which does not divide `heads` = 4"), "{told}");
        assert!(told.contains("`norm_eps` is NaN"), "{told}");
    }

    #[test]
    fn learned_positions_bound_the_sequence() {
        assert_eq!(mini().with_seq(32).expect("shorter").seq, 32);
        let told = mini().with_seq(65).unwrap_err().to_string();
        assert!(told.contains("`seq` is 65") && told.contains("at most 64"), "{told}");
    }

    #[test]
    fn rotary_positions_do_not_bound_the_sequence() {
        let llama = built_in::get("llama3-8b").expect("built in").expect("sound");
        assert_eq!(llama.with_seq(262_144).expect("any length").seq, 262_144);
    }

    #[test]
    fn numbers_without_meaning_for_the_kind_are_refused() {
        let mlp = built_in::get("mlp").expect("built in").expect("sound");
        let told = Model::new("m", ModelDims { heads: 4, ..*mlp }).unwrap_err().to_string();
        assert!(told.contains("`heads` does not apply to kind \"mlp\"; leave it out"), "{told}");
    }

    #[test]
    fn a_model_serialises_flat_with_the_words_of_the_files() {
        let json = serde_json::to_value(mini()).expect("serialises");
        assert_eq!(json["name"], "mini");
        assert_eq!(json["kind"], "gpt2");
        assert_eq!(json["layers"], 4);
        assert_eq!(json["activation"], "gelu");
        for activation in Activation::ALL {
            assert_eq!(serde_json::to_value(activation).expect("serialises"), activation.name());
        }
        for kind in ModelKind::ALL {
            assert_eq!(serde_json::to_value(kind).expect("serialises"), kind.name());
        }
    }
}
