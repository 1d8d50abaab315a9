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
mod tables;
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
            outside: tables::$outside,
            layer: $layer,
            tensors: $tensors,
            paired: $paired,
        }),*];
    };
}

families! {
    "gpt2" "GPT2LMHeadModel" families::gpt2, GPT2_OUTSIDE, OLD_LAYER, |_| tables::GPT2, false;
    "llama" "LlamaForCausalLM" families::llama, OUTSIDE, LAYER, |_| tables::LLAMA, false;
    "mistral" "MistralForCausalLM" families::mistral, OUTSIDE, LAYER, |_| tables::LLAMA, false;
    "qwen2" "Qwen2ForCausalLM" families::qwen2, OUTSIDE, LAYER, |_| tables::LLAMA, false;
    "qwen3" "Qwen3ForCausalLM" families::qwen3, OUTSIDE, LAYER, |_| tables::LLAMA, false;
    "phi3" "Phi3ForCausalLM" families::phi3, OUTSIDE, LAYER, |_| tables::PHI3, false;
    "gemma" "GemmaForCausalLM" families::gemma, OUTSIDE, LAYER, |_| tables::LLAMA, false;
    "gemma2" "Gemma2ForCausalLM" families::gemma2, OUTSIDE, LAYER, |_| tables::GEMMA2, false;
    "gemma3_text" "Gemma3ForCausalLM" families::gemma3_text, OUTSIDE, LAYER, |_| tables::GEMMA2, false;
    "olmo2" "Olmo2ForCausalLM" families::olmo2, OUTSIDE, LAYER, |_| tables::OLMO2, false;
    "granite" "GraniteForCausalLM" families::granite, OUTSIDE, LAYER, |_| tables::LLAMA, false;
    "smollm3" "SmolLM3ForCausalLM" families::smollm3, OUTSIDE, LAYER, |_| tables::LLAMA, false;
    "stablelm" "StableLmForCausalLM" families::stablelm, OUTSIDE, LAYER, |_| tables::LLAMA, false;
    "cohere" "CohereForCausalLM" families::cohere, OUTSIDE, LAYER, |_| tables::LLAMA, true;
    "glm4" "Glm4ForCausalLM" families::glm4, OUTSIDE, LAYER, |_| tables::GLM4, true;
    "starcoder2" "Starcoder2ForCausalLM" families::starcoder2, OUTSIDE, LAYER, |_| tables::STARCODER2, false;
    "phi" "PhiForCausalLM" families::phi, PHI_OUTSIDE, LAYER, |_| tables::PHI, false;
    "gpt_neox" "GPTNeoXForCausalLM" families::gpt_neox, GPT_NEOX_OUTSIDE, "gpt_neox.layers.{}.",
        |_| tables::GPT_NEOX, false;
    "gptj" "GPTJForCausalLM" families::gptj, GPT2_OUTSIDE, OLD_LAYER, |_| tables::GPTJ, true;
    "falcon" "FalconForCausalLM" families::falcon, FALCON_OUTSIDE, OLD_LAYER, falcon, false;
    "bloom" "BloomForCausalLM" families::bloom, FALCON_OUTSIDE, OLD_LAYER, |_| tables::FALCON, false;
    "opt" "OPTForCausalLM" families::opt, OPT_OUTSIDE, "model.decoder.layers.{}.", |_| tables::OPT, false;
    "mpt" "MptForCausalLM" families::mpt, MPT_OUTSIDE, "transformer.blocks.{}.", |_| tables::MPT, false;
    "gpt_bigcode" "GPTBigCodeForCausalLM" families::gpt_bigcode, GPT2_OUTSIDE, OLD_LAYER,
        |_| tables::GPT_BIGCODE, false;
    "mixtral" "MixtralForCausalLM" experts::mixtral, OUTSIDE, LAYER, |_| tables::MIXTRAL, false;
    "qwen2_moe" "Qwen2MoeForCausalLM" experts::qwen2_moe, OUTSIDE, LAYER, |_| tables::QWEN_MOE, false;
    "qwen3_moe" "Qwen3MoeForCausalLM" experts::qwen3_moe, OUTSIDE, LAYER, |_| tables::QWEN_MOE, false;
    "gpt_oss" "GptOssForCausalLM" experts::gpt_oss, OUTSIDE, LAYER, |_| tables::GPT_OSS, false;
    "deepseek_v2" "DeepseekV2ForCausalLM" experts::deepseek_v2, OUTSIDE, LAYER, |_| tables::DEEPSEEK, true;
    "deepseek_v3" "DeepseekV3ForCausalLM" experts::deepseek_v3, OUTSIDE, LAYER, |_| tables::DEEPSEEK, true;
    "llama4_text" "Llama4ForCausalLM" experts::llama4_text, OUTSIDE, LAYER, |_| tables::LLAMA4, true;
}

/// Falcon has other names where attention and feed-forward have a norm each.
fn falcon(d: &Decoder) -> Rows {
    match d.residual {
        super::Residual::ParallelNorms => tables::FALCON_NORMS,
        super::Residual::Parallel | super::Residual::Sequential => tables::FALCON,
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
        let model = fields.finish(name, shape, body)?;
        Ok(Model { family: Some(self.name), ..model })
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

    /// The family that writes a model, or the reason why none can: that which it was read from, or
    /// else the first that can hold it. Multi-token prediction modules
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
        let own = FAMILIES.iter().filter(|family| model.family == Some(family.name));
        for family in own.chain(FAMILIES) {
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
        !matches!(key, "name" | "family" | "seq" | "capacity" | "balance" | "mtp_weight" | "gated")
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
mod tests;
