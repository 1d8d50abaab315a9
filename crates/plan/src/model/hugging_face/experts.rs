//! Expert entries in files of Mixtral, Qwen3-MoE and DeepSeek-V3, mapped to Paceline's fields.

use super::Family;
use crate::located::{Entry, Value};
use crate::model::fields::Fields;
use std::collections::BTreeMap;

/// Keys for properties that such a file expresses differently, or implies by its family.
pub(in crate::model) const QK_NORM: &str = "qk_norm";
pub(in crate::model) const ROUTER: &str = "router";
pub(in crate::model) const DENSE_LAYERS: &str = "dense_layers";
pub(in crate::model) const HEAD_DIM: &str = "qk_head_dim";

/// Adds the entries that a file's family implies, and the defaults of missing ones.
pub(super) fn apply_defaults(family: Family, entries: &mut BTreeMap<String, Entry>) {
    let line = entries.get("model_type").map_or(1, |entry| entry.line);
    let mut silence = |word: &str, value| {
        entries.entry(word.to_owned()).or_insert(Entry { line, value });
    };
    match family {
        Family::Gpt2 | Family::Llama | Family::Mistral => {}
        Family::Mixtral => {
            silence("rope_theta", Value::Real(1e6));
            silence("router_aux_loss_coef", Value::Real(0.001));
        }
        Family::Qwen3Moe => {
            silence("router_aux_loss_coef", Value::Real(0.001));
            silence("norm_topk_prob", Value::Flag(false));
            silence(QK_NORM, Value::Flag(true));
            // The writer of the file determines which of two keys it uses.
            if !entries.contains_key("num_experts")
                && let Some(entry) = entries.remove("num_local_experts")
            {
                entries.insert("num_experts".to_owned(), entry);
            }
            let listed = entries.get("mlp_only_layers");
            let dense = listed.and_then(|entry| Some((entry.line, leading(&entry.value)?)));
            if let Some((line, layers)) = dense {
                let value = Value::Whole(layers as i128);
                entries.insert(DENSE_LAYERS.to_owned(), Entry { line, value });
            }
            if dense.is_none_or(|(_, layers)| layers == 0) {
                entries.remove("intermediate_size");
            }
        }
        Family::DeepseekV3 => {
            silence("n_shared_experts", Value::Whole(1));
            silence("first_k_dense_replace", Value::Whole(3));
            silence("routed_scaling_factor", Value::Real(2.5));
            silence("norm_topk_prob", Value::Flag(true));
            silence("n_group", Value::Whole(8));
            silence("topk_group", Value::Whole(4));
            silence(ROUTER, Value::Text("sigmoid".to_owned()));
            let [plain, turned, dense] =
                ["qk_nope_head_dim", "qk_rope_head_dim", "first_k_dense_replace"]
                    .map(|word| whole(entries, word));
            if let (Some((line, plain)), Some((_, turned))) = (plain, turned) {
                let value = Value::Whole(plain.saturating_add(turned));
                entries.insert(HEAD_DIM.to_owned(), Entry { line, value });
            }
            // Groups impose no limit if all of them may be chosen.
            let [all, some] = ["n_group", "topk_group"].map(|word| whole(entries, word));
            if let (Some((_, all)), Some((_, some))) = (all, some)
                && all == some
            {
                entries.remove("n_group");
                entries.remove("topk_group");
            }
            if dense.is_some_and(|(_, layers)| layers == 0) {
                entries.remove("intermediate_size");
            }
        }
    }
}

/// An integer entry and its line.
fn whole(entries: &BTreeMap<String, Entry>, word: &str) -> Option<(usize, i128)> {
    match entries.get(word) {
        Some(Entry { line, value: Value::Whole(n) }) => Some((*line, *n)),
        _ => None,
    }
}

/// Number of layers in a list, if they are the first ones.
fn leading(list: &Value) -> Option<usize> {
    let Value::List(layers) = list else { return None };
    let first = layers.iter().zip(0..).all(|(layer, at)| layer.value.whole(at..=at).is_some());
    first.then_some(layers.len())
}

/// Records unsupported entries.
pub(super) fn refuse(fields: &mut Fields, family: Family) {
    match family {
        Family::Gpt2 | Family::Llama | Family::Mistral | Family::Mixtral => {}
        Family::Qwen3Moe => {
            only(fields, "use_sliding_window", &Value::Flag(false), "attention sees all tokens");
            only(fields, "decoder_sparse_step", &Value::Whole(1), "every layer has experts");
            shares(fields);
            if let Some(entry) = fields.entries().get("mlp_only_layers")
                && leading(&entry.value).is_none()
            {
                let problem =
                    "`mlp_only_layers` are not the first layers, which cannot be represented";
                let line = entry.line;
                fields.note(line, problem.to_owned(), "only leading dense layers are supported");
            }
        }
        Family::DeepseekV3 => {
            shares(fields);
            let reason = "latent norms use that epsilon in transformers too";
            only(fields, "rms_norm_eps", &Value::Real(1e-6), reason);
            if fields.entries().get(HEAD_DIM).is_none() {
                let problem = "`qk_nope_head_dim` or `qk_rope_head_dim` is missing".to_owned();
                fields.note(
                    fields.anchor(),
                    problem,
                    "add an entry such as `\"qk_rope_head_dim\": 64`",
                );
            }
        }
    }
}

/// Checks that the weights of several chosen experts are normalised; a single one keeps its score.
fn shares(fields: &mut Fields) {
    let several = !matches!(
        fields.entries().get("num_experts_per_tok"),
        Some(Entry { value: Value::Whole(1), .. })
    );
    let reason = if several { "weights of several experts add up" } else { "one keeps its score" };
    only(fields, "norm_topk_prob", &Value::Flag(several), reason);
}

/// Records an entry whose value differs from the only supported one.
fn only(fields: &mut Fields, word: &str, value: &Value, reason: &str) {
    if let Some(Entry { line, value: found }) = fields.entries().get(word)
        && found.to_string() != value.to_string()
    {
        let (line, problem) = (*line, format!("`{word}` is {found}: it cannot be represented"));
        fields.note(line, problem, format!("only {value} can, because {reason}"));
    }
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
    fn what_cannot_be_represented_is_named() {
        for (text, given, instead, expected) in [
            (QWEN3, "\"norm_topk_prob\": true", "\"norm_topk_prob\": false", "only true can"),
            (QWEN3, "\"decoder_sparse_step\": 1", "\"decoder_sparse_step\": 2", "only 1 can"),
            (QWEN3, "[]", "[3]", "only leading dense layers are supported"),
            (QWEN3, "[]", "7", "only leading dense layers are supported"),
            (MIXTRAL, "\"sliding_window\": null", "\"sliding_window\": 64", "set it to null"),
            (DEEPSEEK, "\"topk_group\": 4", "\"topk_group\": 9", "use 1 to 8"),
            (DEEPSEEK, "1e-06", "1e-05", "only 1e-6 can"),
            (DEEPSEEK, "\"q_lora_rank\": 1536,", "\"q_lora_rank\": null,", "needs `q_lora`"),
            (DEEPSEEK, "\"qk_nope_head_dim\": 128,", "", "`qk_nope_head_dim` or"),
        ] {
            let told = told(&text.replace(given, instead));
            assert!(told.contains(expected), "{given} to {instead}: {told}");
        }
    }
}
