//! Fields of a model description, and their names in each source format.

use super::ModelKind;
use std::collections::BTreeMap;
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
    Family "family" Attention 1..=1, "\"llama\"";
    Kind "kind" Every 1..=1, "\"gpt2\"";
    Layers "layers" Every 1..=65_535, "12";
    DModel "d_model" Every 1..=WIDEST, "768";
    Heads "heads" Attention 1..=WIDEST, "12";
    KvHeads "kv_heads" Attention 1..=WIDEST, "768";
    HeadDim "head_dim" Attention 1..=WIDEST, "768";
    // Usually four times the width of the model.
    Ffn "ffn" Every 1..=4 * WIDEST, "3072";
    Seq "seq" Every 1..=1 << 30, "1024";
    Positions "positions" Learned 1..=1 << 30, "768";
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
    QkNorm "qk_norm" MoeOnly 1..=1, "true";
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
    Learned,
    Rotary,
    Moe,
    MoeOnly,
}

impl Field {
    /// Returns true if the field applies to a kind.
    pub(super) const fn applies_to(self, kind: ModelKind) -> bool {
        match self.kinds() {
            Kinds::Every => true,
            Kinds::Attention => kind.has_attention(),
            Kinds::Learned => matches!(kind, ModelKind::Gpt2 | ModelKind::Decoder),
            Kinds::Rotary => kind.is_rotary(),
            Kinds::Moe => matches!(kind, ModelKind::Moe | ModelKind::Decoder),
            Kinds::MoeOnly => matches!(kind, ModelKind::Moe),
        }
    }

    /// Returns true if a decoder may lack the field, which is zero then.
    pub(super) const fn may_lack(self, kind: ModelKind) -> bool {
        matches!(kind, ModelKind::Decoder)
            && matches!(
                self,
                Self::Positions | Self::Experts | Self::Topk | Self::RopeTheta | Self::RouteScale
            )
    }
}

/// Names of fields in a description: those of Paceline's model files, or those of another format as
/// far as they have been read.
#[derive(Clone, Debug, Default)]
pub(super) struct Words(Option<BTreeMap<Field, &'static str>>);

impl Words {
    /// Names of Paceline's model files.
    pub(super) const TOML: Self = Self(None);

    /// Names of another format, none yet.
    pub(super) fn foreign() -> Self {
        Self(Some(BTreeMap::new()))
    }

    /// Declares the name of a field in another format.
    pub(super) fn declare(&mut self, field: Field, word: &'static str) {
        if let Some(words) = &mut self.0 {
            words.insert(field, word);
        }
    }

    /// Returns true for Paceline's model files.
    pub(super) const fn is_toml(&self) -> bool {
        self.0.is_none()
    }

    /// Name of a field, if the format has it.
    pub(super) fn own_word(&self, field: Field) -> Option<&'static str> {
        match &self.0 {
            None => Some(field.word()),
            Some(words) => words.get(&field).copied(),
        }
    }

    /// Name of a field in messages.
    pub(super) fn word(&self, field: Field) -> &'static str {
        self.own_word(field).unwrap_or(field.word())
    }
}
