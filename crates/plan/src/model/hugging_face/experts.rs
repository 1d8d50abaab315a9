//! Keys of families with experts. Each function reads and writes.

use super::super::codec::Codec;
use super::super::field::Field;
use super::super::{Activation, Decoder, Latent, ModelDims, Mtp, QueryKeyNorm, Router};
use super::families::{llama4_attention, one_window, qwen_windows, windows};
use super::rope::{self, Rope, letters, rope, shortest};
use super::sizes::{GATED, HeadDim, LLAMA, Sizes};
use crate::graph::{HeadNormKind, Scaling};
use serde_json::json;

/// The number of experts and of those that a token uses.
fn routed(c: &mut Codec<'_>, s: &mut ModelDims, key: &'static str, other: &'static str) {
    // The writer of the file determines which of two keys it uses.
    let key = if c.entry(key).is_none() && c.entry(other).is_some() { other } else { key };
    c.size(Field::Experts, key, &mut s.experts.experts);
    c.size(Field::Topk, "num_experts_per_tok", &mut s.experts.topk);
    if !c.writes() {
        s.experts.route_scale = 1.0;
    }
}

fn balance(c: &mut Codec<'_>, s: &mut ModelDims) {
    c.real(Field::Balance, "router_aux_loss_coef", &mut s.experts.balance, 0.001);
}

/// Weights as scores or as shares of their sum. A single softmax score is never divided here, and
/// in `transformers` unless the key says no.
fn shares(c: &mut Codec<'_>, s: &ModelDims, d: &mut Decoder, silent: bool) {
    let single = s.experts.topk == 1;
    let mut divided = if c.writes() { !d.raw_gates && !single } else { silent };
    c.flag("norm_topk_prob", &mut divided, silent);
    if c.writes() {
        return;
    }
    d.raw_gates = !divided && !single;
    if single && divided {
        let problem = "`norm_topk_prob` is true for one expert per token".to_owned();
        c.refuse(
            "norm_topk_prob",
            problem,
            "use false: a weight that is always 1 gives the router no gradient",
        );
    }
}

/// Layers without experts: every n-th one, and listed ones.
fn sparse(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    let (mut step, mut listed) = (1, Vec::new());
    if c.writes() {
        let dense: Vec<u64> = (0..s.layers).filter(|at| !d.has_experts(s, *at)).collect();
        c.put("decoder_sparse_step", 1);
        c.put("mlp_only_layers", dense);
    } else {
        c.whole("decoder_sparse_step", &mut step, 1);
        c.numbers("mlp_only_layers", &mut listed);
        let dense =
            |at: u64| listed.contains(&(at as f64)) || !(at + 1).is_multiple_of(step.max(1));
        set_dense(s, d, dense);
    }
    let width = if s.experts.dense_ffn > 0 { s.experts.dense_ffn } else { s.ffn };
    let mut width = width;
    c.size_or(Field::DenseFfn, "intermediate_size", &mut width, s.ffn);
    if !c.writes() {
        let some = (0..s.layers).any(|at| !d.has_experts(s, at));
        s.experts.dense_ffn = if some { width } else { 0 };
    }
}

/// States which layers have no experts: leading ones by their number, others by a pattern.
fn set_dense(s: &mut ModelDims, d: &mut Decoder, dense: impl Fn(u64) -> bool) {
    let leading = (0..s.layers).take_while(|at| dense(*at)).count() as u64;
    if (leading..s.layers).any(&dense) {
        let all: String = (0..s.layers).map(|at| if dense(at) { 'd' } else { 'e' }).collect();
        (s.experts.dense_layers, d.ffn) = (0, shortest(&all));
    } else {
        (s.experts.dense_layers, d.ffn) = (leading, "e".to_owned());
    }
}

pub(super) fn mixtral(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    Sizes { kv_heads: Some(("num_key_value_heads", true)), eps: ("rms_norm_eps", 1e-5), ..LLAMA }
        .code(c, s);
    c.word("hidden_act", &mut s.activation, &GATED, Activation::SwiGlu);
    rope(c, s, d, Rope { theta: 1e6, ..rope::PLAIN }, s.head_dim);
    one_window(c, d, None);
    routed(c, s, "num_local_experts", "num_experts");
    balance(c, s);
    c.only("router_jitter_noise", 0.0);
    if s.experts.topk == 1 {
        // Its class divides by the sum of the chosen scores even for a single expert.
        let problem = "`num_experts_per_tok` is 1".to_owned();
        c.refuse("num_experts_per_tok", problem, "use 2 or more: the weight of one is always 1");
    }
}

pub(super) fn qwen2_moe(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    let ffn = Some(("moe_intermediate_size", true));
    Sizes { head_dim: HeadDim::Share, ffn, ..LLAMA }.code(c, s);
    c.word("hidden_act", &mut s.activation, &GATED, Activation::SwiGlu);
    rope(c, s, d, rope::PLAIN, s.head_dim);
    c.flag("qkv_bias", &mut d.qkv_bias, true);
    qwen_windows(c, s, d, |layer, full| layer % 2 == 0 && layer < full);
    routed(c, s, "num_experts", "num_local_experts");
    balance(c, s);
    shares(c, s, d, false);
    sparse(c, s, d);
    c.whole("shared_expert_intermediate_size", &mut d.shared_ffn, 5632);
    if !c.writes() {
        (s.experts.shared_experts, d.shared_gate) = (1, true);
    }
}

pub(super) fn qwen3_moe(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    Sizes {
        kv_heads: Some(("num_key_value_heads", true)),
        ffn: Some(("moe_intermediate_size", true)),
        ..LLAMA
    }
    .code(c, s);
    c.word("hidden_act", &mut s.activation, &GATED, Activation::SwiGlu);
    rope(c, s, d, rope::PLAIN, s.head_dim);
    c.flag("attention_bias", &mut d.qkv_bias, false);
    d.attention_bias = d.qkv_bias;
    let mut on = d.attention.contains('s');
    c.flag("use_sliding_window", &mut on, false);
    match on {
        true => one_window(c, d, Some(4096)),
        false => c.ignore(&["sliding_window"]),
    }
    c.ignore(&["max_window_layers"]);
    routed(c, s, "num_experts", "num_local_experts");
    balance(c, s);
    shares(c, s, d, false);
    sparse(c, s, d);
    if !c.writes() {
        d.qk_norm = Some(QueryKeyNorm::Heads(HeadNormKind::Head));
    }
}

pub(super) fn gpt_oss(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    Sizes { eps: ("rms_norm_eps", 1e-5), ..LLAMA }.code(c, s);
    c.only("hidden_act", "silu");
    c.only("swiglu_alpha", 1.702);
    c.only("swiglu_limit", 7.0);
    c.ignore(&["initial_context_length", "experts_per_token"]);
    rope(c, s, d, Rope { theta: 150_000.0, ..rope::PLAIN }, s.head_dim);
    windows(c, s, d, 128, |layer| if layer % 2 == 0 { 's' } else { 'f' });
    c.flag("attention_bias", &mut d.qkv_bias, true);
    d.attention_bias = d.qkv_bias;
    routed(c, s, "num_local_experts", "num_experts");
    balance(c, s);
    if !c.writes() {
        s.activation = Activation::ClampedSwiGlu;
        (d.ffn_bias, d.router_bias, d.sinks) = (true, true, true);
    }
}

/// Latent attention.
fn latent(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    let Latent { q_lora, kv_lora, qk_rope, v_dim } = &mut s.latent;
    if c.writes() {
        c.put("q_lora_rank", (*q_lora > 0).then_some(*q_lora));
        c.put("qk_nope_head_dim", s.head_dim - *qk_rope);
    } else {
        let silent = if c.is_null("q_lora_rank") { 0 } else { 1536 };
        c.whole("q_lora_rank", q_lora, silent);
    }
    c.whole("kv_lora_rank", kv_lora, 512);
    c.whole("qk_rope_head_dim", qk_rope, 64);
    c.whole("v_head_dim", v_dim, 128);
    let turned = *qk_rope;
    if !c.writes() {
        let mut plain = 0;
        c.whole("qk_nope_head_dim", &mut plain, 128);
        s.head_dim = plain.saturating_add(turned);
        s.kv_heads = s.heads;
    }
    rope(c, s, d, rope::PLAIN, turned);
    c.only("attention_bias", false);
    if c.writes() {
        return;
    }
    d.latent_eps = if s.norm_eps == LATENT_EPS { 0.0 } else { LATENT_EPS };
    let all = ["rope_scaling", "rope_parameters"].map(|key| c.value(key));
    let all = all.iter().flatten().find_map(|value| {
        value.table()?.entries.get("mscale_all_dim")?.value.number().filter(|m| *m != 0.0)
    });
    if let (Some(all), Scaling::Yarn { factor, .. }) = (all, d.rotary.scaling) {
        let grown = if factor <= 1.0 { 1.0 } else { 0.1 * all * factor.ln() + 1.0 };
        d.attention_scale = grown * grown / (s.head_dim as f64).sqrt();
    }
}

/// Epsilon of the norms of latent vectors in DeepSeek's classes, whatever the file says.
const LATENT_EPS: f64 = 1e-6;

/// Keys common to DeepSeek-V2 and V3.
fn deepseek(c: &mut Codec<'_>, s: &mut ModelDims, dense: u64, shared: u64) {
    c.word("hidden_act", &mut s.activation, &GATED, Activation::SwiGlu);
    routed(c, s, "n_routed_experts", "num_experts");
    c.whole("n_shared_experts", &mut s.experts.shared_experts, shared);
    c.whole("first_k_dense_replace", &mut s.experts.dense_layers, dense);
    let mut width = if s.experts.dense_ffn > 0 { s.experts.dense_ffn } else { s.ffn };
    c.size_or(Field::DenseFfn, "intermediate_size", &mut width, s.ffn);
    if !c.writes() {
        s.experts.dense_ffn = if s.experts.dense_layers > 0 { width } else { 0 };
    }
    c.only("moe_layer_freq", 1);
}

fn groups(c: &mut Codec<'_>, s: &mut ModelDims, (all, kept): (u64, u64)) {
    if c.writes() {
        c.put("n_group", s.experts.groups.max(1));
        return c.put("topk_group", s.experts.group_topk.max(1));
    }
    c.whole("n_group", &mut s.experts.groups, all);
    c.whole("topk_group", &mut s.experts.group_topk, kept);
    // Groups impose no limit if all of them may be chosen.
    if s.experts.groups == s.experts.group_topk {
        (s.experts.groups, s.experts.group_topk) = (0, 0);
    }
}

const DEEPSEEK: Sizes =
    Sizes { head_dim: HeadDim::Latent, ffn: Some(("moe_intermediate_size", true)), ..LLAMA };

pub(super) fn deepseek_v2(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    DEEPSEEK.code(c, s);
    latent(c, s, d);
    deepseek(c, s, 0, 2);
    c.only("mlp_bias", false);
    c.real(Field::RouteScale, "routed_scaling_factor", &mut s.experts.route_scale, 1.0);
    c.ignore(&["norm_topk_prob", "scoring_func", "seq_aux", "aux_loss_alpha", "ep_size"]);
    let mut limited = s.experts.groups > 0;
    let words = [("greedy", false), ("group_limited_greedy", true)];
    c.word("topk_method", &mut limited, &words, false);
    match limited {
        true => groups(c, s, (0, 0)),
        false => c.ignore(&["n_group", "topk_group"]),
    }
    if !c.writes() {
        (d.raw_gates, d.best_of_group) = (s.experts.topk > 1, s.experts.groups > 0);
    }
}

pub(super) fn deepseek_v3(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    DEEPSEEK.code(c, s);
    // Weights are written with adjacent pairs, which is what other software expects of them.
    let mut paired = true;
    c.flag("rope_interleave", &mut paired, true);
    latent(c, s, d);
    deepseek(c, s, 3, 1);
    c.real(Field::RouteScale, "routed_scaling_factor", &mut s.experts.route_scale, 2.5);
    groups(c, s, (8, 4));
    let single = s.experts.topk == 1;
    let mut divided = if c.writes() { !d.raw_gates && !single } else { true };
    c.flag("norm_topk_prob", &mut divided, true);
    c.ignore(&["scoring_func", "topk_method", "seq_aux", "aux_loss_alpha", "ep_size"]);
    let key = match c.entry("num_nextn_predict_layers").is_none()
        && c.entry("num_mtp_layers").is_some()
    {
        true => "num_mtp_layers",
        false => "num_nextn_predict_layers",
    };
    c.whole(key, &mut s.mtp.depth, 0);
    if !c.writes() {
        s.mtp.weight = if s.mtp.depth > 0 { Mtp::WEIGHT } else { 0.0 };
        s.experts.router = Router::Sigmoid;
        d.choice_bias = true;
        d.raw_gates = !divided && !single;
        if single && divided {
            let problem = "`norm_topk_prob` is true for one expert per token".to_owned();
            c.refuse("norm_topk_prob", problem, "use false: one keeps its score");
        }
    }
}

pub(super) fn llama4_text(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder) {
    Sizes { eps: ("rms_norm_eps", 1e-5), ..LLAMA }.code(c, s);
    c.word("hidden_act", &mut s.activation, &GATED, Activation::SwiGlu);
    llama4_attention(c, s, d);
    routed(c, s, "num_local_experts", "num_experts");
    balance(c, s);
    c.only("router_jitter_noise", 0.0);
    let mut width = if s.experts.dense_ffn > 0 { s.experts.dense_ffn } else { 2 * s.ffn };
    c.size_or(Field::DenseFfn, "intermediate_size_mlp", &mut width, 16_384);
    if c.writes() {
        let all = (0..s.layers).filter(|at| d.has_experts(s, *at)).collect::<Vec<_>>();
        c.put("moe_layers", json!(all));
        return;
    }
    let (mut step, mut listed) = (1, Vec::new());
    c.whole("interleave_moe_layer_step", &mut step, 1);
    c.numbers("moe_layers", &mut listed);
    let given = c.entry("moe_layers").is_some();
    set_dense(s, d, |at| match given {
        true => !listed.contains(&(at as f64)),
        false => !(at + 1).is_multiple_of(step.max(1)),
    });
    let some = letters(&d.ffn, s.layers).contains('d') || s.experts.dense_layers > 0;
    s.experts.dense_ffn = if some { width } else { 0 };
    s.experts.router = Router::Sigmoid;
    s.experts.shared_experts = 1;
    d.gated_inputs = true;
}

#[cfg(test)]
mod tests {
    use crate::model::{Model, built_in, hugging_face};

    /// The dimensions of the published files, with the sequence lengths of the built-in models.
    const MIXTRAL: &str = r#"{
  "model_type": "mixtral",
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "max_position_embeddings": 4096,
  "num_attention_heads": 32,
  "num_experts_per_tok": 2,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "num_local_experts": 8,
  "rms_norm_eps": 1e-05,
  "rope_theta": 1000000.0,
  "router_aux_loss_coef": 0.02,
  "sliding_window": null,
  "tie_word_embeddings": false,
  "vocab_size": 32000
}"#;

    const QWEN3: &str = r#"{
  "model_type": "qwen3_moe",
  "attention_bias": false,
  "decoder_sparse_step": 1,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 2048,
  "intermediate_size": 6144,
  "max_position_embeddings": 4096,
  "mlp_only_layers": [],
  "moe_intermediate_size": 768,
  "norm_topk_prob": true,
  "num_attention_heads": 32,
  "num_experts": 128,
  "num_experts_per_tok": 8,
  "num_hidden_layers": 48,
  "num_key_value_heads": 4,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "router_aux_loss_coef": 0.001,
  "sliding_window": null,
  "tie_word_embeddings": false,
  "use_sliding_window": false,
  "vocab_size": 151936
}"#;

    const DEEPSEEK: &str = r#"{
  "model_type": "deepseek_v3",
  "first_k_dense_replace": 3,
  "hidden_act": "silu",
  "hidden_size": 7168,
  "intermediate_size": 18432,
  "kv_lora_rank": 512,
  "max_position_embeddings": 4096,
  "moe_intermediate_size": 2048,
  "n_group": 8,
  "n_routed_experts": 256,
  "n_shared_experts": 1,
  "norm_topk_prob": true,
  "num_attention_heads": 128,
  "num_experts_per_tok": 8,
  "num_hidden_layers": 61,
  "num_key_value_heads": 128,
  "q_lora_rank": 1536,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-06,
  "rope_theta": 10000,
  "routed_scaling_factor": 2.5,
  "topk_group": 4,
  "v_head_dim": 128,
  "vocab_size": 129280
}"#;

    fn sound(text: &str) -> Model {
        let parsed = hugging_face::parse(text, "hub/tiny/config.json");
        parsed.unwrap_or_else(|errors| panic!("{errors}"))
    }

    fn told(text: &str) -> String {
        hugging_face::parse(text, "config.json").expect_err("the text is wrong").to_string()
    }

    #[test]
    fn published_files_give_the_built_in_shapes() {
        for (text, name) in [(MIXTRAL, "mixtral-8x7b"), (QWEN3, "qwen3-30b-a3b")] {
            assert_eq!(*sound(text), *built_in::get(name).unwrap().unwrap(), "{name}");
        }
        let mut deepseek = *built_in::get("deepseek-v3").unwrap().unwrap();
        // The file has no key for the balancing loss.
        deepseek.experts.balance = 0.0;
        assert_eq!(*sound(DEEPSEEK), deepseek);
    }

    #[test]
    fn silence_means_the_default_of_the_class() {
        let without = |text: &str, key: &str| {
            let lines = text.lines().filter(|line| !line.contains(&format!("\"{key}\"")));
            sound(&lines.collect::<Vec<_>>().join("\n"))
        };
        assert_eq!(without(MIXTRAL, "rope_theta").rope_theta, 1e6);
        assert_eq!(without(MIXTRAL, "router_aux_loss_coef").experts.balance, 0.001);
        assert_eq!(*without(MIXTRAL, "sliding_window"), *sound(MIXTRAL));
        assert_eq!(without(DEEPSEEK, "routed_scaling_factor").experts.route_scale, 2.5);
        assert_eq!(without(DEEPSEEK, "n_shared_experts").experts.shared_experts, 1);
    }

    #[test]
    fn newer_files_of_qwen_say_the_same_in_another_word() {
        let newer = QWEN3.replace("\"num_experts\"", "\"num_local_experts\"");
        assert_eq!(*sound(&newer), *sound(QWEN3));
        let dense = sound(&QWEN3.replace("[]", "[0, 1]"));
        assert_eq!((dense.experts.dense_layers, dense.experts.dense_ffn), (2, 6144));
    }

    #[test]
    fn dense_layers_and_raw_weights_are_kept() {
        let raw = sound(&QWEN3.replace("\"norm_topk_prob\": true", "\"norm_topk_prob\": false"));
        assert!(raw.decoder().raw_gates);
        let alternating = sound(&QWEN3.replace("_step\": 1", "_step\": 2"));
        assert_eq!((&*alternating.decoder().ffn, alternating.expert_layers()), ("de", 24));
        let later = sound(&QWEN3.replace("[]", "[3]"));
        assert_eq!((later.expert_layers(), later.experts.dense_ffn), (47, 6144));
    }

    #[test]
    fn what_cannot_be_represented_is_named() {
        for (text, given, instead, expected) in [
            (QWEN3, "[]", "7", "use a list of numbers"),
            (QWEN3, "tok\": 8", "tok\": 1", "`norm_topk_prob` is true for one expert"),
            (MIXTRAL, "tok\": 2", "tok\": 1", "use 2 or more"),
            (DEEPSEEK, "\"topk_group\": 4", "\"topk_group\": 9", "use 1 to 8"),
            (DEEPSEEK, "\"qk_rope_head_dim\": 64", "\"qk_rope_head_dim\": 63", "an even number"),
        ] {
            let told = told(&text.replace(given, instead));
            assert!(told.contains(expected), "{given} to {instead}: {told}");
        }
    }
}
