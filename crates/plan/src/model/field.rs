//! Fields of a model description, and their names in each source format.

use super::ModelKind;
use super::hugging_face::experts::{DENSE_LAYERS, HEAD_DIM, QK_NORM, ROUTER};
use std::ops::RangeInclusive;

/// Generates [`Field`] from one row per field: name in Paceline's model files, kinds that have it,
/// plausible sizes (1 for a field that is none) and an example.
macro_rules! fields {
    ($($name:ident $word:literal $kinds:ident $least:literal..=$most:expr, $example:literal;)*) => {
        /// One entry of a description of a model.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(super) enum Field {
            $($name,)*
        }

        impl Field {
            pub(super) const ALL: [Self; [$($word),*].len()] = [$(Self::$name),*];

            /// Name in Paceline's model files; the fallback for error messages.
            pub(super) const fn word(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }

            const fn kinds(self) -> Kinds {
                match self { $(Self::$name => Kinds::$kinds,)* }
            }

            /// Plausible sizes; others are rejected as mistakes. The bounds are orders of magnitude
            /// above any trained model, and low enough that products of three fit 128 bits. Zero is
            /// for optional parts of a model.
            pub(super) const fn range(self) -> RangeInclusive<u64> {
                match self { $(Self::$name => $least..=$most,)* }
            }

            /// Example value for the remedy of a missing field.
            pub(super) const fn example(self) -> &'static str {
                match self { $(Self::$name => $example,)* }
            }
        }
    };
}

/// Widest plausible dimension.
const WIDEST: u64 = 1 << 24;

fields! {
    Name "name" Every 1..=1, "\"mini\"";
    Kind "kind" Every 1..=1, "\"gpt2\"";
    Layers "layers" Every 1..=65_535, "12";
    DModel "d_model" Every 1..=WIDEST, "768";
    Heads "heads" Attention 1..=WIDEST, "12";
    KvHeads "kv_heads" Attention 1..=WIDEST, "768";
    HeadDim "head_dim" Attention 1..=WIDEST, "768";
    // Usually four times the width of the model.
    Ffn "ffn" Every 1..=4 * WIDEST, "3072";
    Seq "seq" Every 1..=1 << 30, "1024";
    Positions "positions" Gpt2 1..=1 << 30, "768";
    Vocab "vocab" Every 1..=1 << 31, "50257";
    Tied "tied" Every 1..=1, "true";
    Gated "gated" Rotary 1..=1, "true";
    Activation "activation" Every 1..=1, "\"gelu\"";
    NormEps "norm_eps" Attention 1..=1, "1e-5";
    RopeTheta "rope_theta" Rotary 1..=1, "1e4";
    Experts "experts" Moe 1..=65_535, "8";
    Topk "topk" Moe 1..=65_535, "2";
    SharedExperts "shared_experts" Moe 0..=1 << 10, "1";
    DenseLayers "dense_layers" Moe 0..=65_535, "1";
    DenseFfn "dense_ffn" Moe 0..=4 * WIDEST, "3072";
    Router "router" Moe 1..=1, "\"softmax\"";
    Groups "groups" Moe 0..=65_535, "8";
    GroupTopk "group_topk" Moe 0..=65_535, "4";
    RouteScale "route_scale" Moe 1..=1, "1.0";
    Capacity "capacity" Moe 1..=1, "1.25";
    Balance "balance" Moe 1..=1, "0.001";
    QkNorm "qk_norm" Moe 1..=1, "true";
    QLora "q_lora" Moe 0..=WIDEST, "768";
    KvLora "kv_lora" Moe 0..=WIDEST, "768";
    QkRope "qk_rope" Moe 0..=WIDEST, "64";
    VDim "v_dim" Moe 0..=WIDEST, "128";
    MtpDepth "mtp_depth" Rotary 0..=64, "1";
    MtpWeight "mtp_weight" Rotary 1..=1, "0.3";
}

/// Kinds of models that have a field.
enum Kinds {
    Every,
    Attention,
    Gpt2,
    Rotary,
    Moe,
}

impl Field {
    /// Returns true if the field applies to a kind.
    pub(super) const fn applies_to(self, kind: ModelKind) -> bool {
        match self.kinds() {
            Kinds::Every => true,
            Kinds::Attention => kind.has_attention(),
            Kinds::Gpt2 => matches!(kind, ModelKind::Gpt2),
            Kinds::Rotary => kind.is_rotary(),
            Kinds::Moe => matches!(kind, ModelKind::Moe),
        }
    }
}

/// Naming convention of a description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// Paceline's model files.
    Toml,
    /// `config.json` with `"model_type": "gpt2"`.
    HuggingFaceGpt2,
    /// `config.json` of Llama and of the families that share its fields.
    HuggingFaceLlama,
    /// `config.json` of Mixtral.
    HuggingFaceMixtral,
    /// `config.json` of Qwen3 with experts.
    HuggingFaceQwen3Moe,
    /// `config.json` of DeepSeek-V3.
    HuggingFaceDeepseekV3,
}

impl Dialect {
    /// Name of a field in the dialect, if it has the field.
    pub(super) const fn own_word(self, field: Field) -> Option<&'static str> {
        match self {
            Self::Toml => Some(field.word()),
            Self::HuggingFaceGpt2 => gpt2_word(field),
            Self::HuggingFaceLlama => llama_word(field),
            Self::HuggingFaceMixtral => mixtral_word(field),
            Self::HuggingFaceQwen3Moe => qwen3_moe_word(field),
            Self::HuggingFaceDeepseekV3 => deepseek_v3_word(field),
        }
    }

    /// Name of a field in messages about a description in this dialect.
    pub(super) fn word(self, field: Field) -> &'static str {
        self.own_word(field).unwrap_or(field.word())
    }
}

const fn gpt2_word(field: Field) -> Option<&'static str> {
    Some(match field {
        Field::Kind => "model_type",
        Field::Layers => "n_layer",
        Field::DModel => "n_embd",
        Field::Heads => "n_head",
        Field::Ffn => "n_inner",
        Field::Seq | Field::Positions => "n_positions",
        Field::Vocab => "vocab_size",
        Field::Tied => "tie_word_embeddings",
        Field::Activation => "activation_function",
        Field::NormEps => "layer_norm_epsilon",
        _ => return None,
    })
}

const fn llama_word(field: Field) -> Option<&'static str> {
    Some(match field {
        Field::Kind => "model_type",
        Field::Layers => "num_hidden_layers",
        Field::DModel => "hidden_size",
        Field::Heads => "num_attention_heads",
        Field::KvHeads => "num_key_value_heads",
        Field::HeadDim => "head_dim",
        Field::Ffn => "intermediate_size",
        Field::Seq => "max_position_embeddings",
        Field::Vocab => "vocab_size",
        Field::Tied => "tie_word_embeddings",
        Field::Activation => "hidden_act",
        Field::NormEps => "rms_norm_eps",
        Field::RopeTheta => "rope_theta",
        _ => return None,
    })
}

const fn mixtral_word(field: Field) -> Option<&'static str> {
    Some(match field {
        Field::Experts => "num_local_experts",
        Field::Topk => "num_experts_per_tok",
        Field::Balance => "router_aux_loss_coef",
        _ => return llama_word(field),
    })
}

const fn qwen3_moe_word(field: Field) -> Option<&'static str> {
    Some(match field {
        Field::Experts => "num_experts",
        Field::Topk => "num_experts_per_tok",
        Field::Balance => "router_aux_loss_coef",
        Field::Ffn => "moe_intermediate_size",
        Field::DenseFfn => "intermediate_size",
        Field::DenseLayers => DENSE_LAYERS,
        Field::QkNorm => QK_NORM,
        _ => return llama_word(field),
    })
}

const fn deepseek_v3_word(field: Field) -> Option<&'static str> {
    Some(match field {
        Field::Experts => "n_routed_experts",
        Field::Topk => "num_experts_per_tok",
        Field::SharedExperts => "n_shared_experts",
        Field::Ffn => "moe_intermediate_size",
        Field::DenseFfn => "intermediate_size",
        Field::DenseLayers => "first_k_dense_replace",
        Field::RouteScale => "routed_scaling_factor",
        Field::Router => ROUTER,
        Field::Groups => "n_group",
        Field::GroupTopk => "topk_group",
        Field::QLora => "q_lora_rank",
        Field::KvLora => "kv_lora_rank",
        Field::QkRope => "qk_rope_head_dim",
        Field::VDim => "v_head_dim",
        Field::MtpDepth => "num_nextn_predict_layers",
        Field::HeadDim => HEAD_DIM,
        _ => return llama_word(field),
    })
}
