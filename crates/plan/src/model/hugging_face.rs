//! Hugging Face's `config.json`, for the supported model families.
//!
//! Entries that affect neither the dimensions nor the arithmetic of training (token ids, caches,
//! the version that wrote the file, dropout) are ignored. An entry that would change the
//! computation in a way that cannot be represented is an error: weights that load but mean
//! something else are worse than none.

pub(super) mod experts;

use super::field::{Dialect, Field};
use super::fields::{Fields, Given};
use super::parse::stem;
use super::{Activation, Model, ModelKind};
use crate::located::{Entry, Errors, Value, quoted};
use serde_json::Value as Json;
use std::collections::BTreeMap;

/// Reads a `config.json` with `model_type` `gpt2`, `llama`, `mistral`, `mixtral`, `qwen3_moe` or
/// `deepseek_v3`.
///
/// `file_name` names the file in errors; its folder names the model.
pub fn parse(text: &str, file_name: &str) -> Result<Model, Errors> {
    let mut entries = entries(text, file_name)?;
    let family = family(&entries, file_name)?;
    experts::apply_defaults(family, &mut entries);
    let mut fields = Fields::new(family.dialect(), file_name, entries);
    refuse_the_unrepresentable(&mut fields, family);
    let activation = activation(&mut fields, family);
    let shape = fields.shape(&family.given(activation));
    fields.finish(name(file_name).to_owned(), shape)
}

/// Families whose layers are supported.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    Gpt2,
    Llama,
    /// Llama's layers, and a sliding window that must have no effect.
    Mistral,
    /// Mistral's layers with experts.
    Mixtral,
    /// Experts, and norms on queries and keys.
    Qwen3Moe,
    /// Experts, and latent attention.
    DeepseekV3,
}

impl Family {
    const fn dialect(self) -> Dialect {
        match self {
            Self::Gpt2 => Dialect::HuggingFaceGpt2,
            Self::Llama | Self::Mistral => Dialect::HuggingFaceLlama,
            Self::Mixtral => Dialect::HuggingFaceMixtral,
            Self::Qwen3Moe => Dialect::HuggingFaceQwen3Moe,
            Self::DeepseekV3 => Dialect::HuggingFaceDeepseekV3,
        }
    }

    /// Defaults of the family's configuration class, used for missing entries.
    const fn given(self, activation: Activation) -> Given {
        let (kind, norm_eps) = match self {
            Self::Gpt2 => (ModelKind::Gpt2, 1e-5),
            Self::Llama | Self::Mistral => (ModelKind::Llama, 1e-6),
            Self::Mixtral => (ModelKind::Moe, 1e-5),
            Self::Qwen3Moe | Self::DeepseekV3 => (ModelKind::Moe, 1e-6),
        };
        // Required: its default is a fixed number in these classes, but `heads` in older files.
        let needs_kv_heads = matches!(self, Self::Mistral | Self::Mixtral | Self::Qwen3Moe);
        Given { kind, activation, norm_eps, needs_kv_heads }
    }
}

/// Well-known unsupported families, and the reasons.
const REFUSED: [(&str, &str); 4] = [
    ("qwen2", "it has biases on queries, keys and values only"),
    ("qwen3", "it has norms on queries and keys"),
    ("gemma", "its norms add one to their gain, and its activation is a gated GELU"),
    ("gpt_neox", "its attention and feed-forward run side by side"),
];

fn family(entries: &BTreeMap<String, Entry>, file_name: &str) -> Result<Family, Errors> {
    let known = "use a config.json with \"model_type\" gpt2, llama, mistral, mixtral, qwen3_moe or \
                 deepseek_v3, or write a model file in TOML";
    let entry = entries.get("model_type");
    let problem = match entry.map(|entry| &entry.value) {
        Some(Value::Text(word)) => match word.as_str() {
            "gpt2" => return Ok(Family::Gpt2),
            "llama" => return Ok(Family::Llama),
            "mistral" => return Ok(Family::Mistral),
            "mixtral" => return Ok(Family::Mixtral),
            "qwen3_moe" => return Ok(Family::Qwen3Moe),
            "deepseek_v3" => return Ok(Family::DeepseekV3),
            word => match REFUSED.iter().find(|(refused, _)| *refused == word) {
                Some((_, why)) => {
                    format!("`model_type` \"{word}\" cannot be represented: {why}")
                }
                None => format!("`model_type` {} is unknown", quoted(word)),
            },
        },
        Some(value) => format!("`model_type` is {value}"),
        None => "`model_type` is missing".to_owned(),
    };
    let line = entry.map_or(1, |entry| entry.line);
    Err(Errors::one(file_name, line, problem, known))
}

/// Records every entry that changes the model's computation in an unsupported way.
fn refuse_the_unrepresentable(fields: &mut Fields, family: Family) {
    let fixed: &[(&str, bool)] = match family {
        Family::Gpt2 => &[
            ("scale_attn_weights", true),
            ("scale_attn_by_inverse_layer_idx", false),
            ("add_cross_attention", false),
        ],
        Family::Llama
        | Family::Mistral
        | Family::Mixtral
        | Family::Qwen3Moe
        | Family::DeepseekV3 => &[("attention_bias", false), ("mlp_bias", false)],
    };
    for (word, only) in fixed {
        let Some(Entry { line, value }) = fields.entries().get(*word) else { continue };
        if !matches!(value, Value::Flag(flag) if flag == only) {
            let (line, problem) = (*line, format!("`{word}` is {value}: it cannot be represented"));
            fields.note(line, problem, format!("only {only} can; use a model that has it so"));
        }
    }
    if family != Family::Gpt2 {
        refuse_scaled_positions(fields);
    }
    match family {
        // The default of Mistral's configuration class.
        Family::Mistral => refuse_a_window(fields, Some(4096)),
        Family::Mixtral => refuse_a_window(fields, None),
        Family::Gpt2 | Family::Llama | Family::Qwen3Moe | Family::DeepseekV3 => {}
    }
    experts::refuse(fields, family);
}

fn refuse_scaled_positions(fields: &mut Fields) {
    for word in [ROPE_SCALING, ROPE_PARAMETERS] {
        if let Some(Entry { line, value: Value::Text(scaling) }) = fields.entries().get(word) {
            let problem = format!("`{word}` of type {} cannot be represented", quoted(scaling));
            let line = *line;
            fields.note(
                line,
                problem,
                "use weights without it, or set it to null to train anew on plain rotary positions",
            );
        }
    }
    if let Some(Entry { line, value }) = fields.entries().get("partial_rotary_factor")
        && !matches!(value, Value::Whole(1) | Value::Real(1.0))
    {
        let (line, problem) =
            (*line, format!("`partial_rotary_factor` is {value}: it cannot be represented"));
        fields.note(line, problem, "only 1 can; use a model that turns whole heads");
    }
}

/// Rejects a sliding window shorter than the longest sample. A missing entry means a window of
/// `silent` tokens, if any; `null` means no window.
fn refuse_a_window(fields: &mut Fields, silent: Option<i128>) {
    let longest = match fields.entry(Field::Seq).map(|entry| &entry.value) {
        Some(Value::Whole(longest)) => *longest,
        _ => return,
    };
    let (line, window) = match fields.entries().get(SLIDING_WINDOW) {
        Some(Entry { line, value: Value::Whole(window) }) => (*line, *window),
        Some(Entry { value: Value::Other(NULL), .. }) => return,
        Some(Entry { line, value }) => {
            let (line, problem) = (*line, format!("`{SLIDING_WINDOW}` is {value}"));
            return fields.note(line, problem, "use null, for attention to all earlier tokens");
        }
        None => match silent {
            Some(window) => (fields.entry(Field::Kind).map_or(1, |entry| entry.line), window),
            None => return,
        },
    };
    if window < longest {
        fields.note(
            line,
            format!(
                "`{SLIDING_WINDOW}` of {window} tokens cannot be represented for samples of {longest}"
            ),
            format!(
                "set it to null, or `max_position_embeddings` to {window} or less, where the window \
                 does not matter"
            ),
        );
    }
}

fn activation(fields: &mut Fields, family: Family) -> Activation {
    let (own, known): (_, &[_]) = match family {
        // "gelu" is the form with the error function, which differs from the supported tanh form.
        Family::Gpt2 => (
            Activation::Gelu,
            &[
                ("gelu_new", Activation::Gelu),
                ("gelu_pytorch_tanh", Activation::Gelu),
                ("relu", Activation::Relu),
                ("relu2", Activation::SquaredRelu),
            ],
        ),
        Family::Llama
        | Family::Mistral
        | Family::Mixtral
        | Family::Qwen3Moe
        | Family::DeepseekV3 => {
            (Activation::SwiGlu, &[("silu", Activation::SwiGlu), ("swish", Activation::SwiGlu)])
        }
    };
    let Some(word) = fields.text(Field::Activation) else { return own };
    if let Some((_, activation)) = known.iter().find(|(name, _)| *name == word) {
        return *activation;
    }
    let names: Vec<_> = known.iter().map(|(name, _)| format!("\"{name}\"")).collect();
    fields.blame(
        Field::Activation,
        format!(
            "`{}` is {}, which cannot be represented",
            family.dialect().word(Field::Activation),
            quoted(&word)
        ),
        format!("use a model with {}", names.join(" or ")),
    );
    own
}

/// Name of the folder, because every such file is called `config.json`.
fn name(file_name: &str) -> &str {
    let stem = stem(file_name);
    if stem != "config" {
        return stem;
    }
    let mut parts = file_name.rsplit(['/', '\\']).skip(1);
    parts.find(|part| !part.is_empty() && *part != ".").unwrap_or(stem)
}

const ROPE_SCALING: &str = "rope_scaling";
const ROPE_PARAMETERS: &str = "rope_parameters";
const SLIDING_WINDOW: &str = "sliding_window";

/// Representation of an explicit null, for keys where it differs from a missing entry.
const NULL: &str = "null";

fn entries(text: &str, file_name: &str) -> Result<BTreeMap<String, Entry>, Errors> {
    let json: Json = serde_json::from_str(text).map_err(|error| {
        let problem = format!("this is not JSON: {error}");
        Errors::one(file_name, error.line().max(1), problem, "give a model's config.json")
    })?;
    let Json::Object(object) = json else {
        let problem = "this is JSON, but not an object".to_owned();
        return Err(Errors::one(file_name, 1, problem, "give a model's config.json"));
    };
    let lines = key_lines(text);
    let mut entries = BTreeMap::new();
    for (key, value) in &object {
        let line = lines.get(key.as_str()).copied().unwrap_or(1);
        let mut put = |key: &str, value| {
            entries.insert(key.to_owned(), Entry { line, value });
        };
        match (key.as_str(), value) {
            (SLIDING_WINDOW, Json::Null) => put(key, Value::Other(NULL)),
            // For other keys a null is the same as a missing entry.
            (_, Json::Null) => {}
            (ROPE_SCALING | ROPE_PARAMETERS, Json::Object(rope)) => {
                if let Some(scaling) = scaling(rope) {
                    put(key, Value::Text(scaling.to_owned()));
                }
                if let Some(theta) = rope.get("rope_theta")
                    && !object.contains_key("rope_theta")
                {
                    put("rope_theta", value_of(theta, line));
                }
            }
            _ => put(key, value_of(value, line)),
        }
    }
    Ok(entries)
}

/// Kind of scaling that a rope object requests, if any.
fn scaling(rope: &serde_json::Map<String, Json>) -> Option<&str> {
    match rope.get("rope_type").or_else(|| rope.get("type")) {
        Some(Json::String(kind)) if kind == "default" => None,
        Some(Json::String(kind)) => Some(kind),
        Some(_) => Some("unknown"),
        None => rope.contains_key("factor").then_some("unknown"),
    }
}

fn value_of(value: &Json, line: usize) -> Value {
    match value {
        Json::Null => Value::Other(NULL),
        Json::Bool(flag) => Value::Flag(*flag),
        Json::Number(number) => match number.to_string().parse() {
            Ok(whole) => Value::Whole(whole),
            Err(_) => Value::Real(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::Text(text.clone()),
        Json::Array(list) => {
            let entry = |item| Entry { line, value: value_of(item, line) };
            Value::List(list.iter().map(entry).collect())
        }
        Json::Object(_) => Value::Other("an object"),
    }
}

/// Line numbers of the outermost object's keys. The text is known to be valid JSON, so only strings
/// and brackets matter.
fn key_lines(text: &str) -> BTreeMap<&str, usize> {
    let (mut lines, mut line, mut depth) = (BTreeMap::new(), 1, 0);
    let mut last_text = ("", 1);
    let mut bytes = text.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'\n' => line += 1,
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            b':' if depth == 1 => {
                lines.insert(last_text.0, last_text.1);
            }
            b'"' => {
                let mut escaped = false;
                let end = bytes.find(|(_, byte)| {
                    let closes = *byte == b'"' && !escaped;
                    escaped = *byte == b'\\' && !escaped;
                    closes
                });
                last_text = (&text[at + 1..end.map_or(at + 1, |(end, _)| end)], line);
            }
            _ => {}
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::built_in;

    /// The dimensions of GPT-2 small's published file, with some surrounding entries.
    const GPT2: &str = r#"{
  "activation_function": "gelu_new",
  "architectures": ["GPT2LMHeadModel"],
  "attn_pdrop": 0.1,
  "layer_norm_epsilon": 1e-05,
  "model_type": "gpt2",
  "n_ctx": 1024,
  "n_embd": 768,
  "n_head": 12,
  "n_inner": null,
  "n_layer": 12,
  "n_positions": 1024,
  "task_specific_params": { "text-generation": { "n_layer": 3, "max_length": 50 } },
  "vocab_size": 50257
}"#;

    const LLAMA: &str = r#"{
  "attention_bias": false,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "max_position_embeddings": 8192,
  "mlp_bias": false,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05,
  "rope_scaling": null,
  "rope_theta": 500000.0,
  "tie_word_embeddings": false,
  "vocab_size": 128256
}"#;

    fn shape_of(name: &str) -> crate::model::ModelDims {
        *built_in::get(name).expect("built in").expect("sound")
    }

    fn sound(text: &str) -> Model {
        parse(text, "hub/tiny/config.json").unwrap_or_else(|errors| panic!("{errors}"))
    }

    fn told(text: &str) -> String {
        parse(text, "config.json").expect_err("the text is wrong").to_string()
    }

    #[test]
    fn published_files_give_the_built_in_shapes() {
        let gpt2 = sound(GPT2);
        assert_eq!(*gpt2, shape_of("gpt2-124m"));
        assert_eq!(gpt2.name(), "tiny");
        assert_eq!(*sound(LLAMA), shape_of("llama3-8b"));
    }

    #[test]
    fn silence_means_the_default_of_the_class() {
        let without = |key: &str| {
            let lines = LLAMA.lines().filter(|line| !line.contains(&format!("\"{key}\"")));
            sound(&lines.collect::<Vec<_>>().join("\n"))
        };
        assert_eq!(without("num_key_value_heads").kv_heads, 32);
        assert_eq!(without("rms_norm_eps").norm_eps, 1e-6);
        assert_eq!(without("rope_theta").rope_theta, 10_000.0);
        assert!(!without("tie_word_embeddings").tied);
        assert!(without("hidden_act").gated());
    }

    #[test]
    fn newer_files_keep_the_rotary_base_in_an_object() {
        let newer = LLAMA.replace(
            r#""rope_theta": 500000.0"#,
            r#""rope_parameters": {"rope_theta": 250000.0, "rope_type": "default"}"#,
        );
        assert_eq!(sound(&newer).rope_theta, 250_000.0);
    }

    #[test]
    fn head_dim_may_differ_from_the_share() {
        let model = sound(&LLAMA.replace(r#""mlp_bias": false"#, r#""head_dim": 64"#));
        assert_eq!((model.head_dim, model.query_width()), (64, 2048));
    }

    #[test]
    fn what_cannot_be_represented_is_named() {
        for (given, instead, expected) in [
            (
                r#""rope_scaling": null"#,
                r#""rope_scaling": {"factor": 8.0, "rope_type": "llama3"}"#,
                "config.json:13: `rope_scaling` of type \"llama3\" cannot be represented; use weights",
            ),
            (
                r#""rope_scaling": null"#,
                r#""rope_scaling": {"factor": 4.0, "type": "linear"}"#,
                "config.json:13: `rope_scaling` of type \"linear\" cannot be represented; use weights",
            ),
            (
                r#""attention_bias": false"#,
                r#""attention_bias": true"#,
                "config.json:2: `attention_bias` is true: it cannot be represented; only false can",
            ),
            (
                r#""silu""#,
                r#""gelu""#,
                "config.json:3: `hidden_act` is \"gelu\", which cannot be represented; use a model with",
            ),
        ] {
            let told = told(&LLAMA.replace(given, instead));
            assert!(told.starts_with(expected) && told.lines().count() == 1, "{told}");
        }
        let told = told(&GPT2.replace("gelu_new", "gelu"));
        assert!(told.starts_with("config.json:2: `activation_function` is \"gelu\""), "{told}");
    }

    #[test]
    fn mistral_is_a_llama_unless_its_window_bites() {
        let mistral = LLAMA.replace(r#""model_type": "llama""#, r#""model_type": "mistral""#);
        let with_window = |window: &str| {
            mistral.replace(r#""mlp_bias": false"#, &format!("\"sliding_window\": {window}"))
        };
        assert_eq!(*sound(&with_window("null")), shape_of("llama3-8b"));
        assert_eq!(*sound(&with_window("8192")), shape_of("llama3-8b"));
        let bites = told(&with_window("4096"));
        assert!(bites.starts_with("config.json:7: `sliding_window` of 4096 tokens"), "{bites}");
        assert!(bites.contains("set it to null"), "{bites}");
        assert!(told(&mistral).starts_with("config.json:8: `sliding_window` of 4096"));
    }

    #[test]
    fn sizes_are_checked_in_the_words_of_the_file() {
        let text = GPT2.replace(r#""n_head": 12"#, r#""n_head": 7"#);
        assert_eq!(
            told(&text),
            "config.json:9: `n_head` is 7, which does not divide `n_embd` = 768; use 6 or 8"
        );
        // The nested "n_layer" on a later line must not be reported.
        for absurd in ["0", "-1", "1e30", "123456789012345678901234567890", "\"12\""] {
            let told = told(&GPT2.replace(r#""n_layer": 12"#, &format!("\"n_layer\": {absurd}")));
            assert!(told.starts_with("config.json:11: `n_layer` is"), "{told}");
            assert!(told.ends_with("use a whole number from 1 to 65535"), "{told}");
        }
        let told = told(&LLAMA.replace(r#""hidden_size": 4096,"#, ""));
        assert_eq!(
            told,
            "config.json:8: `hidden_size` is missing; add an entry such as `\"hidden_size\": 768`"
        );
    }

    #[test]
    fn other_families_are_refused_with_the_reason() {
        for (family, why) in
            [("qwen2", "biases"), ("qwen3", "norms on queries"), ("bert", "is unknown")]
        {
            let told = told(&GPT2.replace(r#"": "gpt2""#, &format!("\": \"{family}\"")));
            assert!(told.starts_with("config.json:6: `model_type`"), "{told}");
            assert!(told.contains(why) && told.contains("gpt2, llama, mistral,"), "{told}");
        }
        assert!(told("{}").starts_with("config.json:1: `model_type` is missing"));
    }

    #[test]
    fn what_is_no_config_is_told_with_its_line() {
        assert!(told("{\n\"a\": 1,\n}").starts_with("config.json:3: this is not JSON"));
        assert!(told("[]").starts_with("config.json:1: this is JSON, but not an object"));
        assert!(told("").starts_with("config.json:1: this is not JSON"));
    }

    #[test]
    fn lines_of_keys_are_found_past_strings_and_brackets() {
        let text = "{\"a\": \"}{\\\"b\\\": \",\n\"b\": {\n\"a\": 1}, \"c\"\n:2}";
        let lines = key_lines(text);
        assert_eq!(lines.into_iter().collect::<Vec<_>>(), [("a", 1), ("b", 2), ("c", 3)]);
    }

    #[test]
    fn the_folder_names_the_model() {
        assert_eq!(name("hub/llama/config.json"), "llama");
        assert_eq!(name("./config.json"), "config");
        assert_eq!(name("my-gpt2.json"), "my-gpt2");
    }
}
