//! Keys of a model file of kind `decoder` that describe its layers.

use super::codec::Codec;
use super::{Decoder, Norms, Position, QueryKeyNorm, Residual};
use crate::graph::{Factors, HeadNormKind, NormKind, Scaling};

const NORM: [(&str, NormKind); 4] = [
    ("rms", NormKind::Rms),
    ("rms-unit", NormKind::RmsUnit),
    ("layer", NormKind::Layer),
    ("layer-gain", NormKind::LayerGain),
];

const NORMS: [(&str, Norms); 3] =
    [("pre", Norms::Pre), ("post", Norms::Post), ("sandwich", Norms::Sandwich)];

const RESIDUAL: [(&str, Residual); 3] = [
    ("sequential", Residual::Sequential),
    ("parallel", Residual::Parallel),
    ("parallel-norms", Residual::ParallelNorms),
];

const POSITION: [(&str, Position); 4] = [
    ("rotary", Position::Rotary),
    ("learned", Position::Learned),
    ("alibi", Position::Alibi),
    ("none", Position::None),
];

const QK_NORM: [(&str, Option<QueryKeyNorm>); 5] = [
    ("none", None),
    ("head", Some(QueryKeyNorm::Heads(HeadNormKind::Head))),
    ("head-unit", Some(QueryKeyNorm::Heads(HeadNormKind::HeadUnit))),
    ("whole", Some(QueryKeyNorm::Whole)),
    ("bare", Some(QueryKeyNorm::Heads(HeadNormKind::Bare))),
];

/// Reads or writes a description of layers.
pub(super) fn features(c: &mut Codec<'_>, d: &mut Decoder) {
    let plain = Decoder::default();
    c.word("norm", &mut d.norm, &NORM, plain.norm);
    c.word("norms", &mut d.norms, &NORMS, plain.norms);
    c.word("residual", &mut d.residual, &RESIDUAL, plain.residual);
    c.flag("embedding_norm", &mut d.embedding_norm, false);
    c.flag("qkv_bias", &mut d.qkv_bias, false);
    c.flag("attention_bias", &mut d.attention_bias, false);
    c.flag("ffn_bias", &mut d.ffn_bias, false);
    c.flag("router_bias", &mut d.router_bias, false);
    c.flag("head_bias", &mut d.head_bias, false);
    c.word("position", &mut d.position, &POSITION, plain.position);
    c.number("alibi_scale", &mut d.alibi_scale, 0.0);
    c.whole("rotary_dims", &mut d.rotary.dims, 0);
    c.number("rotary_magnitude", &mut d.rotary.magnitude, 1.0);
    scaling(c, &ROPE, &mut d.rotary.scaling);
    c.whole("long_from", &mut d.long_from, 0);
    c.number("long_growth", &mut d.long_growth, 0.0);
    scaling(c, &LONG, &mut d.long_scaling);
    c.number("window_theta", &mut d.window_theta, 0.0);
    c.text("attention_pattern", &mut d.attention, &plain.attention);
    c.whole("window", &mut d.window, 0);
    c.whole("chunk", &mut d.chunk, 0);
    c.flag("sinks", &mut d.sinks, false);
    c.number("attention_scale", &mut d.attention_scale, 0.0);
    c.number("attention_softcap", &mut d.attention_softcap, 0.0);
    c.number("qkv_clip", &mut d.qkv_clip, 0.0);
    c.word("query_key_norm", &mut d.qk_norm, &QK_NORM, None);
    c.flag("query_key_norm_last", &mut d.qk_norm_last, false);
    c.number("temperature_floor", &mut d.temperature_floor, 0.0);
    c.number("temperature_slope", &mut d.temperature_slope, 0.0);
    c.number("embedding_scale", &mut d.embedding_scale, 0.0);
    c.number("residual_scale", &mut d.residual_scale, 0.0);
    c.number("logit_scale", &mut d.logit_scale, 0.0);
    c.number("logit_softcap", &mut d.logit_softcap, 0.0);
    c.text("ffn_pattern", &mut d.ffn, &plain.ffn);
    c.flag("raw_gates", &mut d.raw_gates, false);
    c.flag("choice_bias", &mut d.choice_bias, false);
    c.flag("best_of_group", &mut d.best_of_group, false);
    c.flag("gated_inputs", &mut d.gated_inputs, false);
    c.whole("shared_ffn", &mut d.shared_ffn, 0);
    c.flag("shared_gate", &mut d.shared_gate, false);
    c.number("latent_eps", &mut d.latent_eps, 0.0);
}

/// Keys of a scaling: its kind and numbers.
struct Keys {
    kind: &'static str,
    factor: &'static str,
    low: &'static str,
    high: &'static str,
    original: &'static str,
    exact: &'static str,
    factors: &'static str,
}

const ROPE: Keys = Keys {
    kind: "rope_scaling",
    factor: "rope_factor",
    low: "rope_low",
    high: "rope_high",
    original: "rope_original",
    exact: "rope_exact",
    factors: "rope_factors",
};

const LONG: Keys = Keys {
    kind: "long_scaling",
    factor: "long_factor",
    low: "long_low",
    high: "long_high",
    original: "long_original",
    exact: "long_exact",
    factors: "long_factors",
};

fn scaling(c: &mut Codec<'_>, keys: &Keys, at: &mut Scaling) {
    let words = [("none", 0), ("linear", 1), ("llama3", 2), ("yarn", 3), ("each", 4)];
    let (mut factor, mut low, mut high, mut original) = (1.0, 0.0, 0.0, 0);
    let (mut exact, mut factors) = (false, Vec::new());
    let mut kind = match *at {
        Scaling::None => 0,
        Scaling::Linear { factor: f } => {
            factor = f;
            1
        }
        Scaling::Llama3 { factor: f, low: l, high: h, original: o } => {
            (factor, low, high, original) = (f, l, h, o);
            2
        }
        Scaling::Yarn { factor: f, fast, slow, original: o, exact: e } => {
            (factor, low, high, original, exact) = (f, slow, fast, o, e);
            3
        }
        Scaling::Each(list) => {
            factors = list.list().to_vec();
            4
        }
    };
    c.word(keys.kind, &mut kind, &words, 0);
    c.number(keys.factor, &mut factor, 1.0);
    c.number(keys.low, &mut low, 0.0);
    c.number(keys.high, &mut high, 0.0);
    c.whole(keys.original, &mut original, 0);
    c.flag(keys.exact, &mut exact, false);
    c.numbers(keys.factors, &mut factors);
    let between = matches!(kind, 2 | 3);
    if (1..=3).contains(&kind) && factor < 1.0 || between && (original == 0 || low > high) {
        c.refuse(
            keys.kind,
            format!("`{}` lacks numbers", keys.kind),
            format!(
                "give a `{}` of at least 1 and, except for \"linear\", `{}`, a `{}` that is not smaller, and `{}`",
                keys.factor, keys.low, keys.high, keys.original
            ),
        );
    }
    *at = match kind {
        1 => Scaling::Linear { factor },
        2 => Scaling::Llama3 { factor, low, high, original },
        3 => Scaling::Yarn { factor, fast: high, slow: low, original, exact },
        4 => Scaling::Each(Factors::new(&factors)),
        _ => Scaling::None,
    };
}
