//! Hugging Face's `config.json` and tensors: one [`Family`] reads and writes both.
//!
//! Entries that affect neither the dimensions nor the arithmetic of training (token ids, caches, the
//! version that wrote the file, dropout) are ignored. An entry that changes the computation in a
//! way that cannot be represented is an error, also one that only other families have: weights that
//! load but mean something else are worse than none.

mod experts;
mod families;
mod json;
mod rope;
mod sizes;
mod tensors;

pub use tensors::View;

use super::codec::{self, Codec};
use super::decoder;
use super::field::{Field, Words};
use super::fields::Fields;
use super::parse::stem;
use super::{
    Activation, Decoder, Experts, Latent, Model, ModelDims, ModelKind, Mtp, Position, Router,
};
use crate::located::{Entry, Errors, Value, quoted};
use crate::suggest::suggest;
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;
use tensors::Rows;

/// A family of models in `transformers`.
pub struct Family {
    /// Its `model_type`.
    pub name: &'static str,
    /// Its class for language models.
    class: &'static str,
    /// Reads or writes the keys of `config.json`.
    config: fn(&mut Codec<'_>, &mut ModelDims, &mut Decoder),
    /// Tensors outside of layers.
    outside: Rows,
    /// Prefix of a layer's tensors.
    layer: &'static str,
    /// Tensors of a layer.
    tensors: fn(&Decoder) -> Rows,
    /// True if files hold rotary pairs adjacent.
    paired: bool,
}

const LAYER: &str = "model.layers.{}.";
const OLD_LAYER: &str = "transformer.h.{}.";

macro_rules! families {
    ($($name:literal $class:literal $config:path, $outside:ident, $layer:expr, $tensors:expr, $paired:literal;)*) => {
        /// All families. The first that can hold a model writes it.
        static FAMILIES: &[Family] = &[$(Family {
            name: $name,
            class: $class,
            config: $config,
            outside: tensors::$outside,
            layer: $layer,
            tensors: $tensors,
            paired: $paired,
        }),*];
    };
}

families! {
    "gpt2" "GPT2LMHeadModel" families::gpt2, GPT2_OUTSIDE, OLD_LAYER, |_| tensors::GPT2, false;
    "llama" "LlamaForCausalLM" families::llama, OUTSIDE, LAYER, |_| tensors::LLAMA, false;
    "mistral" "MistralForCausalLM" families::mistral, OUTSIDE, LAYER, |_| tensors::LLAMA, false;
    "qwen2" "Qwen2ForCausalLM" families::qwen2, OUTSIDE, LAYER, |_| tensors::LLAMA, false;
    "qwen3" "Qwen3ForCausalLM" families::qwen3, OUTSIDE, LAYER, |_| tensors::LLAMA, false;
    "phi3" "Phi3ForCausalLM" families::phi3, OUTSIDE, LAYER, |_| tensors::PHI3, false;
    "gemma" "GemmaForCausalLM" families::gemma, OUTSIDE, LAYER, |_| tensors::LLAMA, false;
    "gemma2" "Gemma2ForCausalLM" families::gemma2, OUTSIDE, LAYER, |_| tensors::GEMMA2, false;
    "gemma3_text" "Gemma3ForCausalLM" families::gemma3_text, OUTSIDE, LAYER, |_| tensors::GEMMA2, false;
    "olmo2" "Olmo2ForCausalLM" families::olmo2, OUTSIDE, LAYER, |_| tensors::OLMO2, false;
    "granite" "GraniteForCausalLM" families::granite, OUTSIDE, LAYER, |_| tensors::LLAMA, false;
    "smollm3" "SmolLM3ForCausalLM" families::smollm3, OUTSIDE, LAYER, |_| tensors::LLAMA, false;
    "stablelm" "StableLmForCausalLM" families::stablelm, OUTSIDE, LAYER, |_| tensors::LLAMA, false;
    "cohere" "CohereForCausalLM" families::cohere, OUTSIDE, LAYER, |_| tensors::LLAMA, true;
    "glm4" "Glm4ForCausalLM" families::glm4, OUTSIDE, LAYER, |_| tensors::GLM4, true;
    "starcoder2" "Starcoder2ForCausalLM" families::starcoder2, OUTSIDE, LAYER, |_| tensors::STARCODER2, false;
    "phi" "PhiForCausalLM" families::phi, PHI_OUTSIDE, LAYER, |_| tensors::PHI, false;
    "gpt_neox" "GPTNeoXForCausalLM" families::gpt_neox, GPT_NEOX_OUTSIDE, "gpt_neox.layers.{}.",
        |_| tensors::GPT_NEOX, false;
    "gptj" "GPTJForCausalLM" families::gptj, GPT2_OUTSIDE, OLD_LAYER, |_| tensors::GPTJ, true;
    "falcon" "FalconForCausalLM" families::falcon, FALCON_OUTSIDE, OLD_LAYER, falcon, false;
    "bloom" "BloomForCausalLM" families::bloom, FALCON_OUTSIDE, OLD_LAYER, |_| tensors::FALCON, false;
    "opt" "OPTForCausalLM" families::opt, OPT_OUTSIDE, "model.decoder.layers.{}.", |_| tensors::OPT, false;
    "mpt" "MptForCausalLM" families::mpt, MPT_OUTSIDE, "transformer.blocks.{}.", |_| tensors::MPT, false;
    "gpt_bigcode" "GPTBigCodeForCausalLM" families::gpt_bigcode, GPT2_OUTSIDE, OLD_LAYER,
        |_| tensors::GPT_BIGCODE, false;
    "mixtral" "MixtralForCausalLM" experts::mixtral, OUTSIDE, LAYER, |_| tensors::MIXTRAL, false;
    "qwen2_moe" "Qwen2MoeForCausalLM" experts::qwen2_moe, OUTSIDE, LAYER, |_| tensors::QWEN_MOE, false;
    "qwen3_moe" "Qwen3MoeForCausalLM" experts::qwen3_moe, OUTSIDE, LAYER, |_| tensors::QWEN_MOE, false;
    "gpt_oss" "GptOssForCausalLM" experts::gpt_oss, OUTSIDE, LAYER, |_| tensors::GPT_OSS, false;
    "deepseek_v2" "DeepseekV2ForCausalLM" experts::deepseek_v2, OUTSIDE, LAYER, |_| tensors::DEEPSEEK, true;
    "deepseek_v3" "DeepseekV3ForCausalLM" experts::deepseek_v3, OUTSIDE, LAYER, |_| tensors::DEEPSEEK, false;
    "llama4_text" "Llama4ForCausalLM" experts::llama4_text, OUTSIDE, LAYER, |_| tensors::LLAMA4, true;
}

/// Falcon has other names where attention and feed-forward have a norm each.
fn falcon(d: &Decoder) -> Rows {
    match d.residual {
        super::Residual::ParallelNorms => tensors::FALCON_NORMS,
        super::Residual::Parallel | super::Residual::Sequential => tensors::FALCON,
    }
}

/// Every family, in the order in which they are tried for writing.
pub fn families() -> &'static [Family] {
    FAMILIES
}

/// Reads a `config.json` of a known `model_type`.
///
/// `file_name` names the file in errors; its folder names the model.
pub fn parse(text: &str, file_name: &str) -> Result<Model, Errors> {
    let entries = json::entries(text, file_name)?;
    let family = family(&entries, file_name)?;
    family.read(entries, name(file_name).to_owned(), file_name)
}

/// Family that a `config.json` names.
fn family(entries: &BTreeMap<String, Entry>, file_name: &str) -> Result<&'static Family, Errors> {
    let names = || FAMILIES.iter().map(|family| family.name);
    let entry = entries.get("model_type");
    let mut meant = None;
    let problem = match entry.map(|entry| &entry.value) {
        Some(Value::Text(word)) => {
            if let Some(family) = FAMILIES.iter().find(|family| family.name == word) {
                return Ok(family);
            }
            meant = suggest(word, names());
            format!("`model_type` {} is unknown", quoted(word))
        }
        Some(value) => format!("`model_type` is {value}"),
        None => "`model_type` is missing".to_owned(),
    };
    let known = match meant {
        Some(meant) => format!("did you mean \"{meant}\"? Or write a model file in TOML"),
        None => format!(
            "use a config.json with \"model_type\" {}, or write a model file in TOML",
            names().collect::<Vec<_>>().join(", ")
        ),
    };
    let line = entry.map_or(1, |entry| entry.line);
    Err(Errors::one(file_name, line, problem, known))
}

/// Keys that change the computation of some family, and the value that does not. A file of another
/// family that gives one asks for what its class does not do.
const FOREIGN: &[(&str, f64)] = &[
    ("alibi", 0.0),
    ("attention_bias", 0.0),
    ("attention_multiplier", 1.0),
    ("attn_logit_softcapping", 0.0),
    ("clip_qkv", 0.0),
    ("embedding_multiplier", 1.0),
    ("final_logit_softcapping", 0.0),
    ("logit_scale", 1.0),
    ("logits_scaling", 1.0),
    ("mlp_bias", 0.0),
    ("num_experts", 0.0),
    ("num_local_experts", 0.0),
    ("partial_rotary_factor", 1.0),
    ("qk_layernorm", 0.0),
    ("residual_multiplier", 1.0),
    ("use_parallel_residual", 0.0),
    ("use_qk_norm", 0.0),
    ("use_qkv_bias", 0.0),
];

impl Family {
    fn read(
        &self,
        entries: BTreeMap<String, Entry>,
        name: String,
        file_name: &str,
    ) -> Result<Model, Errors> {
        let mut words = Words::foreign();
        words.declare(Field::Kind, "model_type");
        let mut fields = Fields::new(words, file_name, entries);
        let (mut shape, mut layers) = (nothing(), Decoder::default());
        let mut codec = Codec::reader(&mut fields);
        (self.config)(&mut codec, &mut shape, &mut layers);
        let known = codec.known().clone();
        let foreign: Vec<(usize, String)> = fields
            .entries()
            .iter()
            .filter_map(|(key, entry)| {
                let (_, neutral) = FOREIGN.iter().find(|(foreign, _)| foreign == key)?;
                let same = match &entry.value {
                    Value::Flag(flag) => !flag && *neutral == 0.0,
                    value if codec::is_null(value) => true,
                    value => value.number() == Some(*neutral),
                };
                let problem =
                    format!("`{key}` is {}: \"{}\" does not have it", entry.value, self.name);
                (!same && !known.contains(&**key)).then_some((entry.line, problem))
            })
            .collect();
        for (line, problem) in foreign {
            fields.note(line, problem, "leave it out, or name the family that has it");
        }
        if layers.position != Position::Rotary {
            shape.rope_theta = 0.0;
        }
        let (shape, body) = decoder::shortest(shape, layers);
        fields.finish(name, shape, body)
    }

    /// `config.json` of a model trained on sequences of `seq` tokens.
    ///
    /// Begin-of-text and end-of-text tokens are unknown, and there is no dropout.
    pub fn write(&self, model: &Model, seq: u64) -> Json {
        let mut codec = Codec::writer();
        let (mut shape, mut layers) = (**model, model.decoder());
        shape.seq = if shape.max_positions > 0 { shape.max_positions } else { seq };
        (self.config)(&mut codec, &mut shape, &mut layers);
        let mut whole = Map::new();
        whole.insert("architectures".to_owned(), json!([self.class]));
        whole.insert("model_type".to_owned(), self.name.into());
        for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            whole.insert(key.to_owned(), Json::Null);
        }
        whole.insert("torch_dtype".to_owned(), "float32".into());
        for key in [
            "attention_dropout",
            "attn_pdrop",
            "dropout",
            "embd_pdrop",
            "hidden_dropout",
            "resid_pdrop",
        ] {
            whole.insert(key.to_owned(), json!(0.0));
        }
        whole.append(&mut codec.written());
        whole.into()
    }

    /// The family that can hold a model, or the reason why none can. Multi-token prediction modules
    /// are left out where the family has none; the model without them is returned then.
    pub fn of(model: &Model) -> Result<(&'static Self, Model), String> {
        if !matches!(
            model.kind,
            ModelKind::Gpt2 | ModelKind::Llama | ModelKind::Moe | ModelKind::Decoder
        ) {
            return Err(match model.kind {
                ModelKind::Mlp => "transformers has no such model as an mlp".to_owned(),
                kind => format!("a {kind}'s weights are not written for transformers"),
            });
        }
        let plain = model.without_mtp();
        let mut nearest: Option<(usize, String)> = None;
        for family in FAMILIES {
            for candidate in [model, &plain] {
                match family.lacks(candidate) {
                    lacks if lacks.is_empty() => return Ok((family, candidate.clone())),
                    lacks if nearest.as_ref().is_none_or(|(fewest, _)| lacks.len() < *fewest) => {
                        let text = format!(
                            "no family of transformers has all of its layers; the nearest, {}, cannot have {}",
                            family.name,
                            lacks.join(", ")
                        );
                        nearest = Some((lacks.len(), text));
                    }
                    _ => {}
                }
            }
        }
        Err(nearest.map_or_else(String::new, |(_, text)| text))
    }

    /// Properties of a model that do not survive writing and reading, as lines of a model file.
    fn lacks(&self, model: &Model) -> Vec<String> {
        let config = self.write(model, model.seq);
        let Json::Object(object) = &config else { return Vec::new() };
        let text = object.to_owned();
        let Ok(entries) = json::entries(&Json::Object(text).to_string(), "config.json") else {
            return vec!["its numbers".to_owned()];
        };
        let Ok(back) = self.read(entries, model.name().to_owned(), "config.json") else {
            return comparable(model).into_iter().take(9).collect();
        };
        let theirs = comparable(&back);
        let mut lacks: Vec<String> =
            comparable(model).into_iter().filter(|line| !theirs.contains(line)).collect();
        if lacks.is_empty() && theirs.len() > comparable(model).len() {
            lacks.push("the absence of what it implies".to_owned());
        }
        if lacks.is_empty()
            && let Err(name) = tensors::views(self, model, false)
        {
            lacks.push(format!("the tensor {name}"));
        }
        lacks
    }

    /// Views of their tensors that form ours, by our names. `paired` overrides whether files hold
    /// rotary pairs adjacent.
    pub fn views(
        &self,
        model: &Model,
        paired: Option<bool>,
    ) -> Result<BTreeMap<String, Vec<View>>, String> {
        tensors::views(self, model, paired.unwrap_or(self.paired))
    }
}

impl std::fmt::Debug for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Lines of a model file about what a `config.json` can hold, numbers rounded.
fn comparable(model: &Model) -> Vec<String> {
    let kept = |line: &&str| {
        let key = line.split(' ').next().unwrap_or_default();
        !matches!(key, "name" | "seq" | "capacity" | "balance" | "mtp_weight" | "gated")
    };
    let rounded = |line: &str| match line.split_once(" = ") {
        Some((
            key @ ("alibi_scale" | "attention_scale" | "logit_scale" | "residual_scale"),
            value,
        )) => {
            format!("{key} = {:.6e}", value.parse::<f64>().unwrap_or_default())
        }
        _ => line.to_owned(),
    };
    model.to_toml().lines().filter(kept).map(rounded).collect()
}

/// Family and layout of the directory that a `config.json` lies in.
///
/// The second value tells whether rotary pairs are adjacent in its files.
pub fn storage(text: &str) -> Option<(&'static Family, Option<bool>)> {
    let json: Json = serde_json::from_str(text).ok()?;
    let family = FAMILIES.iter().find(|family| json["model_type"] == family.name)?;
    // DeepSeek-V3's class has adjacent pairs by default; the others have no option.
    let option = family.name == "deepseek_v3";
    Some((family, option.then(|| json["rope_interleave"] != Json::Bool(false))))
}

/// Dimensions before anything has been read.
const fn nothing() -> ModelDims {
    ModelDims {
        kind: ModelKind::Decoder,
        layers: 0,
        d_model: 0,
        heads: 0,
        kv_heads: 0,
        head_dim: 0,
        ffn: 0,
        seq: 0,
        max_positions: 0,
        vocab: 0,
        tied: false,
        activation: Activation::SwiGlu,
        norm_eps: 0.0,
        rope_theta: 0.0,
        qk_norm: false,
        experts: Experts {
            experts: 0,
            topk: 0,
            shared_experts: 0,
            dense_layers: 0,
            dense_ffn: 0,
            router: Router::Softmax,
            groups: 0,
            group_topk: 0,
            route_scale: 0.0,
            capacity: 0.0,
            balance: 0.0,
        },
        latent: Latent { q_lora: 0, kv_lora: 0, qk_rope: 0, v_dim: 0 },
        mtp: Mtp { depth: 0, weight: 0.0 },
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Scaling;
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
                r#""rope_scaling": {"factor": 8.0, "rope_type": "spiral"}"#,
                "config.json:13: rope scaling of type \"spiral\" is unknown; use linear,",
            ),
            (
                r#""rope_scaling": null"#,
                r#""rope_scaling": {"rope_type": "yarn", "type": "yarn"}, "use_qk_norm": true"#,
                "config.json:13: `use_qk_norm` is true: \"llama\" does not have it; leave it out",
            ),
            (
                r#""rope_scaling": null"#,
                r#""final_logit_softcapping": 30.0"#,
                "config.json:13: `final_logit_softcapping` is 30.0: \"llama\" does not have it",
            ),
            (
                r#""silu""#,
                r#""tanhshrink""#,
                "config.json:3: `hidden_act` is \"tanhshrink\"; use \"silu\" or",
            ),
        ] {
            let told = told(&LLAMA.replace(given, instead));
            assert!(told.starts_with(expected) && told.lines().count() == 1, "{told}");
        }
        let told = told(&GPT2.replace("\"n_ctx\": 1024", "\"scale_attn_weights\": false"));
        assert!(told.contains("`scale_attn_weights` is false: it cannot be represented"), "{told}");
    }

    #[test]
    fn keys_without_effect_are_ignored() {
        let more = LLAMA.replace(
            r#""mlp_bias": false"#,
            r#""logit_scale": 1.0, "partial_rotary_factor": null, "my_favourite_colour": "blue""#,
        );
        assert_eq!(sound(&more), sound(LLAMA));
    }

    #[test]
    fn positions_are_scaled_as_the_file_says() {
        let llama3 = sound(&LLAMA.replace(
            r#""rope_scaling": null"#,
            r#""rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
               "original_max_position_embeddings": 8192, "rope_type": "llama3"}"#,
        ));
        let scaling = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 };
        assert_eq!(llama3.decoder().rotary.scaling, scaling);
        assert_eq!((llama3.kind, llama3.parameters()), (ModelKind::Decoder, 8_030_261_248));
        let dynamic = sound(&LLAMA.replace(
            r#""rope_scaling": null"#,
            r#""rope_scaling": {"factor": 2.0, "type": "dynamic"}"#,
        ));
        assert_eq!((dynamic.decoder().long_from, dynamic.decoder().long_growth), (8192, 2.0));
    }

    #[test]
    fn a_window_is_kept_unless_it_is_null() {
        let mistral = LLAMA.replace(r#""model_type": "llama""#, r#""model_type": "mistral""#);
        let with_window = |window: &str| {
            sound(
                &mistral.replace(r#""mlp_bias": false"#, &format!("\"sliding_window\": {window}")),
            )
        };
        assert_eq!(*with_window("null"), shape_of("llama3-8b"));
        let bites = with_window("4096").decoder();
        assert_eq!((bites.window, &*bites.attention), (4096, "s"));
        assert_eq!(sound(&mistral).decoder().window, 4096, "the default of its class");
    }

    /// Every family's fixture survives writing and reading, and its file is accepted as it is.
    #[test]
    fn families_write_what_they_read() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../exec/tests/fixtures/families");
        let mut seen = 0;
        #[expect(clippy::disallowed_methods, reason = "a test reads its fixtures")]
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            let fixture: Json = serde_json::from_str(&text).unwrap();
            let config = fixture["config"].to_string();
            let model = sound(&config);
            let (family, plain) = Family::of(&model).unwrap_or_else(|e| panic!("{path:?}: {e}"));
            let written = family.write(&plain, plain.seq).to_string();
            let back = sound(&written);
            let (same, _) = Family::of(&back).unwrap();
            assert_eq!(same.name, family.name, "{path:?}");
            assert_eq!(same.write(&back, back.seq).to_string(), written, "{path:?}");
            let reread = Model::parse(&model.to_toml(), "m.toml").unwrap();
            assert_eq!(reread.to_toml(), model.to_toml(), "{path:?}");
            seen += 1;
        }
        assert!(seen > 30, "{seen} fixtures");
    }

    #[test]
    fn a_model_that_no_family_covers_is_refused_with_what_is_too_much() {
        let text = "kind = \"decoder\"\nlayers = 2\nd_model = 64\nheads = 4\nffn = 96\nseq = 16\n\
                    vocab = 256\nqkv_bias = true\nqkv_clip = 4.0\n";
        let model = Model::parse(text, "m.toml").unwrap();
        let told = Family::of(&model).unwrap_err();
        assert!(told.contains("cannot have qkv_clip = 4.0"), "{told}");
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
    fn unknown_families_get_the_nearest() {
        let told = |family: &str| told(&GPT2.replace(r#"": "gpt2""#, &format!("\": \"{family}\"")));
        assert!(told("qwen33").contains("did you mean \"qwen3\"?"), "{}", told("qwen33"));
        let unlike = told("mamba-state-space");
        assert!(unlike.starts_with("config.json:6: `model_type` \"mamba-state-space\" is unknown"));
        assert!(unlike.contains("gpt2, llama, mistral,"), "{unlike}");
        assert!(self::told("{}").starts_with("config.json:1: `model_type` is missing"));
    }

    #[test]
    fn what_is_no_config_is_told_with_its_line() {
        assert!(told("{\n\"a\": 1,\n}").starts_with("config.json:3: this is not JSON"));
        assert!(told("[]").starts_with("config.json:1: this is JSON, but not an object"));
        assert!(told("").starts_with("config.json:1: this is not JSON"));
    }

    #[test]
    fn the_folder_names_the_model() {
        assert_eq!(name("hub/llama/config.json"), "llama");
        assert_eq!(name("./config.json"), "config");
        assert_eq!(name("my-gpt2.json"), "my-gpt2");
    }
}
