//! Fields of a model description, and their names in each source format.

use super::ModelKind;
use super::hugging_face::experts::{DENSE_LAYERS, HEAD_DIM, QK_NORM, ROUTER};

/// One entry of a description of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Field {
    Name,
    Kind,
    Layers,
    DModel,
    Heads,
    KvHeads,
    HeadDim,
    Ffn,
    Seq,
    Positions,
    Vocab,
    Tied,
    Gated,
    Activation,
    NormEps,
    RopeTheta,
    Experts,
    Topk,
    SharedExperts,
    DenseLayers,
    DenseFfn,
    Router,
    Groups,
    GroupTopk,
    RouteScale,
    Capacity,
    Balance,
    QkNorm,
    QLora,
    KvLora,
    QkRope,
    VDim,
    MtpDepth,
    MtpWeight,
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

impl Field {
    pub(super) const ALL: [Self; 34] = [
        Self::Name,
        Self::Kind,
        Self::Layers,
        Self::DModel,
        Self::Heads,
        Self::KvHeads,
        Self::HeadDim,
        Self::Ffn,
        Self::Seq,
        Self::Positions,
        Self::Vocab,
        Self::Tied,
        Self::Gated,
        Self::Activation,
        Self::NormEps,
        Self::RopeTheta,
        Self::Experts,
        Self::Topk,
        Self::SharedExperts,
        Self::DenseLayers,
        Self::DenseFfn,
        Self::Router,
        Self::Groups,
        Self::GroupTopk,
        Self::RouteScale,
        Self::Capacity,
        Self::Balance,
        Self::QkNorm,
        Self::QLora,
        Self::KvLora,
        Self::QkRope,
        Self::VDim,
        Self::MtpDepth,
        Self::MtpWeight,
    ];

    /// Name in Paceline's model files; the fallback for error messages.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Kind => "kind",
            Self::Layers => "layers",
            Self::DModel => "d_model",
            Self::Heads => "heads",
            Self::KvHeads => "kv_heads",
            Self::HeadDim => "head_dim",
            Self::Ffn => "ffn",
            Self::Seq => "seq",
            Self::Positions => "positions",
            Self::Vocab => "vocab",
            Self::Tied => "tied",
            Self::Gated => "gated",
            Self::Activation => "activation",
            Self::NormEps => "norm_eps",
            Self::RopeTheta => "rope_theta",
            Self::Experts => "experts",
            Self::Topk => "topk",
            Self::SharedExperts => "shared_experts",
            Self::DenseLayers => "dense_layers",
            Self::DenseFfn => "dense_ffn",
            Self::Router => "router",
            Self::Groups => "groups",
            Self::GroupTopk => "group_topk",
            Self::RouteScale => "route_scale",
            Self::Capacity => "capacity",
            Self::Balance => "balance",
            Self::QkNorm => "qk_norm",
            Self::QLora => "q_lora",
            Self::KvLora => "kv_lora",
            Self::QkRope => "qk_rope",
            Self::VDim => "v_dim",
            Self::MtpDepth => "mtp_depth",
            Self::MtpWeight => "mtp_weight",
        }
    }

    /// Returns true if the field applies to a kind.
    pub(super) const fn applies_to(self, kind: ModelKind) -> bool {
        match self {
            Self::Heads | Self::KvHeads | Self::HeadDim | Self::NormEps => kind.has_attention(),
            Self::Positions => matches!(kind, ModelKind::Gpt2),
            Self::Gated | Self::RopeTheta | Self::MtpDepth | Self::MtpWeight => kind.is_rotary(),
            Self::Experts
            | Self::Topk
            | Self::SharedExperts
            | Self::DenseLayers
            | Self::DenseFfn
            | Self::Router
            | Self::Groups
            | Self::GroupTopk
            | Self::RouteScale
            | Self::Capacity
            | Self::Balance
            | Self::QkNorm
            | Self::QLora
            | Self::KvLora
            | Self::QkRope
            | Self::VDim => matches!(kind, ModelKind::Moe),
            Self::Name
            | Self::Kind
            | Self::Layers
            | Self::DModel
            | Self::Ffn
            | Self::Seq
            | Self::Vocab
            | Self::Tied
            | Self::Activation => true,
        }
    }

    /// Largest plausible size; larger values are rejected as mistakes. The bounds are orders of
    /// magnitude above any trained model, and low enough that products of three fit 128 bits.
    pub(super) const fn limit(self) -> u64 {
        match self {
            Self::Layers
            | Self::DenseLayers
            | Self::Experts
            | Self::Topk
            | Self::Groups
            | Self::GroupTopk => 65_535,
            Self::SharedExperts => 1 << 10,
            Self::MtpDepth => 64,
            Self::Seq | Self::Positions => 1 << 30,
            Self::Vocab => 1 << 31,
            // Usually four times the width of the model.
            Self::Ffn | Self::DenseFfn => 1 << 26,
            _ => 1 << 24,
        }
    }

    /// Smallest size: zero for optional parts of a model.
    pub(super) const fn least(self) -> u64 {
        match self {
            Self::SharedExperts
            | Self::DenseLayers
            | Self::DenseFfn
            | Self::Groups
            | Self::GroupTopk
            | Self::QLora
            | Self::KvLora
            | Self::QkRope
            | Self::VDim
            | Self::MtpDepth => 0,
            _ => 1,
        }
    }

    /// Example value for the remedy of a missing field.
    pub(super) const fn example(self) -> &'static str {
        match self {
            Self::Kind => "\"gpt2\"",
            Self::Layers | Self::Heads => "12",
            Self::Ffn => "3072",
            Self::Seq => "1024",
            Self::Vocab => "50257",
            Self::Experts => "8",
            Self::Topk => "2",
            _ => "768",
        }
    }
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
