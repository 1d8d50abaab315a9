//! Keys of `config.json`, family by family. Each function reads and writes.

use super::super::codec::Codec;
use super::super::{Activation, Decoder, ModelDims, Norms, Position, QueryKeyNorm, Residual};
use super::rope::{self, Rope, layer_types, rope};
use super::sizes::{GATED, GPT2, HeadDim, LLAMA, PLAIN, Sizes};
use crate::graph::{HeadNormKind, NormKind};
use serde_json::json;

/// Gated networks with Llama's names.
fn gated(c: &mut Codec<'_>, s: &mut ModelDims, sizes: Sizes) {
    sizes.code(c, s);
    c.word("hidden_act", &mut s.activation, &GATED, Activation::SwiGlu);
}

/// Networks without a gate.
fn ungated(c: &mut Codec<'_>, s: &mut ModelDims, key: &'static str, usual: Activation) {
    c.word(key, &mut s.activation, &PLAIN, usual);
}

/// A window in all layers, unless it is null. `silent` is that of files that lack it.
pub(super) fn one_window(c: &mut Codec<'_>, d: &mut Decoder, silent: Option<u64>) {
    const KEY: &str = "sliding_window";
    if c.writes() {
        let window = d.attention.contains('s').then_some(d.window);
        return c.put(KEY, window);
    }
    let silent = if c.is_null(KEY) { 0 } else { silent.unwrap_or(0) };
    c.whole(KEY, &mut d.window, silent);
    d.attention = if d.window > 0 { "s" } else { "f" }.to_owned();
}

/// A window in the layers whose kind says so.
pub(super) fn windows(
    c: &mut Codec<'_>,
    s: &ModelDims,
    d: &mut Decoder,
    silent: u64,
    usual: impl Fn(u64) -> char,
) {
    const KEY: &str = "sliding_window";
    layer_types(c, s, d, usual);
    let has = d.attention.contains('s');
    if c.writes() {
        return c.put(KEY, has.then_some(d.window));
    }
    let silent = if c.is_null(KEY) { 0 } else { silent };
    c.whole(KEY, &mut d.window, silent);
    if d.window == 0 || !has {
        d.window = 0;
        d.attention = rope::shortest(&d.attention.replace('s', "f"));
    }
}

/// Qwen's windows: off unless switched on, and in some layers.
pub(super) fn qwen_windows(
    c: &mut Codec<'_>,
    s: &ModelDims,
    d: &mut Decoder,
    first: impl Fn(u64, u64) -> bool,
) {
    let mut on = d.attention.contains('s');
    c.flag("use_sliding_window", &mut on, false);
    let mut full = if on { 0 } else { s.layers };
    c.whole("max_window_layers", &mut full, 28);
    windows(c, s, d, 4096, |layer| if on && first(layer, full) { 's' } else { 'f' });
    if !on && !c.writes() {
        (d.window, d.attention) = (0, "f".to_owned());
    }
}

pub(super) fn llama(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    gated(c, s, LLAMA);
    rope(c, s, d, rope::PLAIN, s.head_dim);
    c.flag("attention_bias", &mut d.qkv_bias, false);
    d.attention_bias = d.qkv_bias;
    c.flag("mlp_bias", &mut d.ffn_bias, false);
}

pub(super) fn mistral(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    gated(c, s, Sizes { kv_heads: Some(("num_key_value_heads", true)), ..LLAMA });
    rope(c, s, d, rope::PLAIN, s.head_dim);
    one_window(c, d, Some(4096));
}

pub(super) fn qwen2(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    gated(c, s, Sizes { head_dim: HeadDim::Share, ..LLAMA });
    rope(c, s, d, rope::PLAIN, s.head_dim);
    if !c.writes() {
        d.qkv_bias = true;
    }
    qwen_windows(c, s, d, |layer, full| layer >= full);
}

pub(super) fn qwen3(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    gated(c, s, LLAMA);
    rope(c, s, d, rope::PLAIN, s.head_dim);
    if !c.writes() {
        d.qk_norm = Some(QueryKeyNorm::Heads(HeadNormKind::Head));
    }
    c.flag("attention_bias", &mut d.qkv_bias, false);
    d.attention_bias = d.qkv_bias;
    qwen_windows(c, s, d, |layer, full| layer >= full);
}

/// Norms with unit gains, embeddings multiplied by the root of the width.
fn gemmas(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder, activation: &'static str) {
    Sizes { tied: true, ..LLAMA }.code(c, s);
    // The old key names the form with the error function and means the other.
    let words = [
        ("gelu_pytorch_tanh", Activation::GeGlu),
        ("gelu", Activation::GeGlu),
        ("gelu_new", Activation::GeGlu),
        ("silu", Activation::SwiGlu),
    ];
    c.word(activation, &mut s.activation, &words, Activation::GeGlu);
    c.only("attention_bias", false);
    if !c.writes() {
        d.norm = NormKind::RmsUnit;
        d.embedding_scale = (s.d_model as f64).sqrt();
    }
}

pub(super) fn gemma(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    c.ignore(&["hidden_activation"]);
    gemmas(c, s, d, "hidden_act");
    rope(c, s, d, rope::PLAIN, s.head_dim);
    c.only("use_bidirectional_attention", false);
}

/// Keys common to Gemma 2 and 3.
fn late_gemmas(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder, caps: (f64, f64)) {
    c.ignore(&["hidden_act"]);
    gemmas(c, s, d, "hidden_activation");
    c.only("use_bidirectional_attention", false);
    if !c.writes() {
        d.norms = Norms::Sandwich;
    }
    // The class wants a whole number.
    let mut scalar = match d.attention_scale > 0.0 {
        true => d.attention_scale.powi(-2).round() as u64,
        false => s.head_dim,
    };
    c.whole("query_pre_attn_scalar", &mut scalar, 256);
    if !c.writes() {
        let usual = scalar == s.head_dim;
        d.attention_scale = if usual { 0.0 } else { (scalar as f64).powf(-0.5) };
    }
    for (key, at, silent) in [
        ("attn_logit_softcapping", &mut d.attention_softcap, caps.0),
        ("final_logit_softcapping", &mut d.logit_softcap, caps.1),
    ] {
        if c.writes() {
            c.put(key, (*at > 0.0).then_some(*at));
        } else {
            let silent = if c.is_null(key) { 0.0 } else { silent };
            c.number(key, at, silent);
        }
    }
}

pub(super) fn gemma2(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    late_gemmas(c, s, d, (50.0, 30.0));
    rope(c, s, d, rope::PLAIN, s.head_dim);
    windows(c, s, d, 4096, |layer| if layer % 2 == 0 { 's' } else { 'f' });
}

pub(super) fn gemma3_text(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    late_gemmas(c, s, d, (0.0, 0.0));
    if !c.writes() {
        d.qk_norm = Some(QueryKeyNorm::Heads(HeadNormKind::HeadUnit));
    }
    let bases = Rope { theta: 1e6, window: Some(("rope_local_base_freq", 1e4)), ..rope::PLAIN };
    rope(c, s, d, bases, s.head_dim);
    let mut period = 6;
    if !c.writes() {
        c.whole("sliding_window_pattern", &mut period, 6);
    }
    let period = period.max(1);
    windows(c, s, d, 4096, |layer| if (layer + 1) % period == 0 { 'f' } else { 's' });
}

pub(super) fn phi(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    Sizes { head_dim: HeadDim::Share, eps: ("layer_norm_eps", 1e-5), ..LLAMA }.code(c, s);
    ungated(c, s, "hidden_act", Activation::Gelu);
    let partial = Some(("partial_rotary_factor", 0.5));
    rope(c, s, d, Rope { partial, ..rope::PLAIN }, s.head_dim);
    c.only("qk_layernorm", false);
    if !c.writes() {
        (d.norm, d.residual) = (NormKind::Layer, Residual::Parallel);
        (d.qkv_bias, d.attention_bias, d.ffn_bias, d.head_bias) = (true, true, true, true);
    }
}

pub(super) fn phi3(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    gated(c, s, Sizes { head_dim: HeadDim::Share, eps: ("rms_norm_eps", 1e-5), ..LLAMA });
    let partial = Some(("partial_rotary_factor", 1.0));
    rope(c, s, d, Rope { partial, ..rope::PLAIN }, s.head_dim);
    if c.writes() && d.long_from > 0 {
        c.put("original_max_position_embeddings", d.long_from);
    }
    one_window(c, d, None);
}

pub(super) fn olmo2(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    gated(c, s, Sizes { head_dim: HeadDim::Share, eps: ("rms_norm_eps", 1e-5), ..LLAMA });
    rope(c, s, d, rope::PLAIN, s.head_dim);
    c.flag("attention_bias", &mut d.qkv_bias, false);
    d.attention_bias = d.qkv_bias;
    if !c.writes() {
        (d.norms, d.qk_norm) = (Norms::Post, Some(QueryKeyNorm::Whole));
    }
}

/// Learned positions, layer norms and biases everywhere.
fn learned(s: &mut ModelDims, d: &mut Decoder) {
    s.max_positions = s.seq;
    d.position = Position::Learned;
    biased(d);
}

fn biased(d: &mut Decoder) {
    d.norm = NormKind::Layer;
    (d.qkv_bias, d.attention_bias, d.ffn_bias) = (true, true, true);
}

pub(super) fn gpt2(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    GPT2.code(c, s);
    ungated(c, s, "activation_function", Activation::Gelu);
    c.only("scale_attn_weights", true);
    c.only("scale_attn_by_inverse_layer_idx", false);
    c.only("add_cross_attention", false);
    if !c.writes() {
        learned(s, d);
    }
}

pub(super) fn gpt_bigcode(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    GPT2.code(c, s);
    ungated(c, s, "activation_function", Activation::Gelu);
    c.only("scale_attn_weights", true);
    c.only("add_cross_attention", false);
    let mut single = s.kv_heads == 1;
    c.flag("multi_query", &mut single, true);
    if !c.writes() {
        s.kv_heads = if single { 1 } else { s.heads };
        learned(s, d);
    }
}

pub(super) fn opt(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    Sizes {
        kv_heads: None,
        head_dim: HeadDim::Share,
        ffn: Some(("ffn_dim", true)),
        tied: true,
        // No key: the class has no other.
        eps: ("layer_norm_eps", 1e-5),
        ..LLAMA
    }
    .code(c, s);
    ungated(c, s, "activation_function", Activation::Relu);
    c.only("do_layer_norm_before", true);
    c.only("_remove_final_layer_norm", false);
    c.only("enable_bias", true);
    c.only("layer_norm_elementwise_affine", true);
    c.only("word_embed_proj_dim", s.d_model);
    if !c.writes() {
        learned(s, d);
    }
}

pub(super) fn gpt_neox(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    Sizes { kv_heads: None, head_dim: HeadDim::Share, eps: ("layer_norm_eps", 1e-5), ..LLAMA }
        .code(c, s);
    ungated(c, s, "hidden_act", Activation::GeluErf);
    // Both keys had names of their own.
    if !c.writes() {
        c.number("rotary_emb_base", &mut s.rope_theta, 1e4);
    }
    let partial = Some(("rotary_pct", 0.25));
    let theta = if c.writes() { 1e4 } else { s.rope_theta };
    rope(c, s, d, Rope { theta, partial, ..rope::PLAIN }, s.head_dim);
    if c.writes() {
        c.put("rotary_emb_base", s.rope_theta);
    }
    let mut parallel = d.residual == Residual::ParallelNorms;
    c.flag("use_parallel_residual", &mut parallel, true);
    let mut bias = d.qkv_bias;
    c.flag("attention_bias", &mut bias, true);
    if !c.writes() {
        biased(d);
        (d.qkv_bias, d.attention_bias) = (bias, bias);
        d.residual = if parallel { Residual::ParallelNorms } else { Residual::Sequential };
    }
}

pub(super) fn gptj(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    Sizes { tied: false, ..GPT2 }.code(c, s);
    ungated(c, s, "activation_function", Activation::Gelu);
    let mut turned = if d.rotary.dims == 0 { s.head_dim } else { d.rotary.dims };
    c.whole("rotary_dim", &mut turned, 64);
    if !c.writes() {
        d.rotary.dims = if turned == s.head_dim { 0 } else { turned };
        s.rope_theta = 1e4;
        (d.norm, d.residual) = (NormKind::Layer, Residual::Parallel);
        (d.ffn_bias, d.head_bias) = (true, true);
    }
}

pub(super) fn falcon(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    let mut grouped = d.residual == Residual::ParallelNorms;
    c.flag("new_decoder_architecture", &mut grouped, false);
    let kv_heads = grouped.then_some(("num_kv_heads", false));
    c.ignore(&["num_kv_heads"]);
    Sizes {
        kv_heads,
        head_dim: HeadDim::Share,
        ffn: Some(("ffn_hidden_size", false)),
        seq: ("max_position_embeddings", Some(2048)),
        eps: ("layer_norm_epsilon", 1e-5),
        tied: true,
        ..LLAMA
    }
    .code(c, s);
    ungated(c, s, "activation", Activation::GeluErf);
    let mut single = !grouped && s.kv_heads == 1;
    c.flag("multi_query", &mut single, true);
    let mut parallel = d.residual != Residual::Sequential;
    c.flag("parallel_attn", &mut parallel, true);
    let norms = if d.residual == Residual::ParallelNorms { 2 } else { 1 };
    match grouped {
        true => c.only("num_ln_in_parallel_attn", norms.max(2)),
        false => c.ignore(&["num_ln_in_parallel_attn"]),
    }
    c.flag("bias", &mut d.qkv_bias, false);
    let mut alibi = d.position == Position::Alibi;
    c.flag("alibi", &mut alibi, false);
    if !c.writes() {
        if single && !grouped {
            s.kv_heads = 1;
        }
        (d.attention_bias, d.ffn_bias) = (d.qkv_bias, d.qkv_bias);
        d.norm = NormKind::Layer;
        if alibi {
            // The class scales them like the scores.
            (d.position, d.alibi_scale) = (Position::Alibi, (s.head_dim as f64).powf(-0.5));
        }
        d.residual = match (parallel || grouped, grouped) {
            (true, true) => Residual::ParallelNorms,
            (true, false) => Residual::Parallel,
            (false, _) => Residual::Sequential,
        };
    }
    if !alibi {
        rope(c, s, d, rope::PLAIN, s.head_dim);
    }
}

pub(super) fn bloom(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    Sizes {
        layers: "n_layer",
        heads: "n_head",
        kv_heads: None,
        head_dim: HeadDim::Share,
        ffn: None,
        seq: ("seq_length", Some(2048)),
        eps: ("layer_norm_epsilon", 1e-5),
        tied: true,
        ..LLAMA
    }
    .code(c, s);
    c.only("apply_residual_connection_post_layernorm", false);
    if !c.writes() {
        s.activation = Activation::Gelu;
        biased(d);
        (d.position, d.embedding_norm) = (Position::Alibi, true);
    }
}

pub(super) fn mpt(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    Sizes {
        layers: "n_layers",
        d_model: "d_model",
        heads: "n_heads",
        kv_heads: None,
        head_dim: HeadDim::Share,
        ffn: None,
        seq: ("max_seq_len", None),
        eps: ("layer_norm_epsilon", 1e-5),
        tied: true,
    }
    .code(c, s);
    c.only("expansion_ratio", 4);
    c.only("no_bias", true);
    c.ignore(&["norm_type", "learned_pos_emb", "embedding_fraction"]);
    if c.value("logit_scale").is_some() {
        let problem = "`logit_scale` is given, which transformers' class ignores".to_owned();
        c.refuse("logit_scale", problem, "use null");
    }
    const KEY: &str = "attn_config";
    if c.writes() {
        let clip = (d.qkv_clip > 0.0).then_some(d.qkv_clip);
        let scale = (d.attention_scale > 0.0).then_some(d.attention_scale);
        let alibi = d.position == Position::Alibi;
        let attention = json!({"alibi": alibi, "clip_qkv": clip, "softmax_scale": scale});
        return c.put(KEY, attention);
    }
    let object = c.value(KEY);
    let value =
        |key: &str| object.as_ref()?.table()?.entries.get(key).map(|entry| entry.value.clone());
    let number = |key: &str| value(key).and_then(|value| value.number()).unwrap_or(0.0);
    (d.qkv_clip, d.attention_scale) = (number("clip_qkv"), number("softmax_scale"));
    for (key, only) in [("prefix_lm", false), ("qk_ln", false), ("alibi", true)] {
        if value(key).is_some_and(|value| value.flag() != Some(only)) {
            let problem = format!("`{KEY}.{key}` cannot be represented");
            c.refuse(KEY, problem, format!("only {only} can"));
        }
    }
    s.activation = Activation::GeluErf;
    (d.norm, d.position) = (NormKind::LayerGain, Position::Alibi);
}

pub(super) fn starcoder2(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    Sizes { head_dim: HeadDim::Share, eps: ("norm_epsilon", 1e-5), tied: true, ..LLAMA }.code(c, s);
    let words = [("gelu_pytorch_tanh", Activation::Gelu), ("gelu", Activation::GeluErf)];
    c.word("hidden_act", &mut s.activation, &words, Activation::Gelu);
    rope(c, s, d, rope::PLAIN, s.head_dim);
    one_window(c, d, None);
    c.flag("use_bias", &mut d.qkv_bias, true);
    (d.attention_bias, d.ffn_bias) = (d.qkv_bias, d.qkv_bias);
    if !c.writes() {
        d.norm = NormKind::Layer;
    }
}

pub(super) fn cohere(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    gated(
        c,
        s,
        Sizes { head_dim: HeadDim::Share, eps: ("layer_norm_eps", 1e-5), tied: true, ..LLAMA },
    );
    rope(c, s, d, Rope { theta: 5e5, ..rope::PLAIN }, s.head_dim);
    c.flag("attention_bias", &mut d.qkv_bias, false);
    d.attention_bias = d.qkv_bias;
    c.only("use_qk_norm", false);
    c.number("logit_scale", &mut d.logit_scale, 0.0625);
    if !c.writes() {
        (d.norm, d.residual) = (NormKind::LayerGain, Residual::Parallel);
    }
}

pub(super) fn glm4(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    gated(c, s, Sizes { eps: ("rms_norm_eps", 1.5625e-7), ..LLAMA });
    let partial = Some(("partial_rotary_factor", 0.5));
    rope(c, s, d, Rope { partial, ..rope::PLAIN }, s.head_dim);
    c.flag("attention_bias", &mut d.qkv_bias, true);
    if !c.writes() {
        d.norms = Norms::Sandwich;
    }
}

pub(super) fn granite(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    gated(c, s, Sizes { head_dim: HeadDim::Share, ..LLAMA });
    rope(c, s, d, rope::PLAIN, s.head_dim);
    c.flag("attention_bias", &mut d.qkv_bias, false);
    d.attention_bias = d.qkv_bias;
    c.flag("mlp_bias", &mut d.ffn_bias, false);
    c.number("embedding_multiplier", &mut d.embedding_scale, 1.0);
    c.number("residual_multiplier", &mut d.residual_scale, 1.0);
    c.number("attention_multiplier", &mut d.attention_scale, 1.0);
    let mut divisor = if d.logit_scale > 0.0 { 1.0 / d.logit_scale } else { 1.0 };
    c.number("logits_scaling", &mut divisor, 1.0);
    if !c.writes() {
        d.logit_scale = if divisor > 0.0 { 1.0 / divisor } else { 1.0 };
    }
}

/// Layers without rotation, marked by zeros in a list.
fn unrotated(c: &mut Codec<'_>, s: &ModelDims, plain: char, d: &mut Decoder) {
    const KEY: &str = "no_rope_layers";
    let letters = rope::letters(&d.attention, s.layers);
    if c.writes() {
        let marks: Vec<u8> = letters.chars().map(|letter| u8::from(letter != 'n')).collect();
        return c.put(KEY, marks);
    }
    let (mut every, mut marks) = (4, Vec::new());
    c.whole("no_rope_layer_interval", &mut every, 4);
    c.numbers(KEY, &mut marks);
    let rotated = |layer: u64| match marks.get(layer as usize) {
        Some(mark) => *mark != 0.0,
        None => !(layer + 1).is_multiple_of(every.max(1)),
    };
    let letter = |layer: u64| if rotated(layer) { plain } else { 'n' };
    d.attention = rope::shortest(&(0..s.layers).map(letter).collect::<String>());
}

pub(super) fn smollm3(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    gated(c, s, Sizes { head_dim: HeadDim::Share, tied: true, ..LLAMA });
    rope(c, s, d, Rope { theta: 2e6, ..rope::PLAIN }, s.head_dim);
    c.flag("attention_bias", &mut d.qkv_bias, false);
    d.attention_bias = d.qkv_bias;
    c.flag("mlp_bias", &mut d.ffn_bias, false);
    c.only("use_sliding_window", false);
    c.ignore(&["layer_types", "sliding_window", "max_window_layers"]);
    unrotated(c, s, 'f', d);
}

pub(super) fn stablelm(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    gated(c, s, Sizes { head_dim: HeadDim::Share, eps: ("layer_norm_eps", 1e-5), ..LLAMA });
    let partial = Some(("partial_rotary_factor", 0.25));
    rope(c, s, d, Rope { partial, ..rope::PLAIN }, s.head_dim);
    c.flag("use_qkv_bias", &mut d.qkv_bias, false);
    c.only("qk_layernorm", false);
    let mut parallel = d.residual == Residual::Parallel;
    c.flag("use_parallel_residual", &mut parallel, false);
    if !c.writes() {
        d.norm = NormKind::Layer;
        d.residual = if parallel { Residual::Parallel } else { Residual::Sequential };
    }
}

/// Layers in chunks and layers without rotation, of Llama 4.
pub(super) fn llama4_attention(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    rope(c, s, d, Rope { theta: 5e5, ..rope::PLAIN }, s.head_dim);
    c.flag("attention_bias", &mut d.qkv_bias, false);
    d.attention_bias = d.qkv_bias;
    let mut norm = d.qk_norm == Some(QueryKeyNorm::Heads(HeadNormKind::Bare));
    c.flag("use_qk_norm", &mut norm, true);
    unrotated(c, s, 'c', d);
    c.ignore(&["layer_types"]);
    c.whole("attention_chunk_size", &mut d.chunk, 8192);
    let mut tuned = d.temperature_slope > 0.0;
    c.flag("attn_temperature_tuning", &mut tuned, true);
    // The class wants a whole number.
    let mut floor = d.temperature_floor as u64;
    c.whole("floor_scale", &mut floor, 8192);
    c.number("attn_scale", &mut d.temperature_slope, 0.1);
    if !c.writes() {
        d.qk_norm = norm.then_some(QueryKeyNorm::Heads(HeadNormKind::Bare));
        d.qk_norm_last = norm;
        d.temperature_floor = floor as f64;
        if !tuned {
            (d.temperature_floor, d.temperature_slope) = (0.0, 0.0);
        }
        if d.chunk == 0 {
            d.attention = rope::shortest(&d.attention.replace('c', "f"));
        }
    }
}
