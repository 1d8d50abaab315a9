//! Keys of model kinds with their own fields, and keys that no kind has.

use super::ModelKind;
use super::check::not_for;
use super::field::Field;
use super::fields::Fields;
use crate::located::{self, Value};
use std::ops::RangeInclusive;

impl Fields {
    /// Reads a size within a range; required unless there is a default.
    pub(super) fn whole(
        &mut self,
        key: &str,
        range: RangeInclusive<u64>,
        example: &str,
        default: Option<u64>,
    ) -> u64 {
        let (first, last) = (*range.start(), *range.end());
        let remedy = || format!("use a whole number from {first} to {last}");
        match (self.read(key, |value| value.whole(range), remedy), default) {
            (Some(Some(size)), _) | (None, Some(size)) => return size,
            (Some(None), _) => {}
            (None, None) => self.missing(key, example),
        }
        first
    }

    /// Reads a list of `count` sizes within a range.
    pub(super) fn list(
        &mut self,
        key: &str,
        count: RangeInclusive<usize>,
        range: RangeInclusive<u64>,
        example: &str,
    ) -> Vec<u64> {
        let (fewest, most, first, last) = (count.start(), count.end(), range.start(), range.end());
        let sizes = |value: &Value| {
            let list = value.list().filter(|list| count.contains(&list.len()))?;
            list.iter().map(|size| size.value.whole(range.clone())).collect()
        };
        let remedy = || {
            format!("use {fewest} to {most} whole numbers from {first} to {last} such as {example}")
        };
        let sizes = self.read(key, sizes, remedy);
        if sizes.is_none() {
            self.missing(key, example);
        }
        sizes.flatten().unwrap_or_else(|| vec![*first; *fewest])
    }

    /// Reads one of several names, if it is given.
    pub(super) fn word(&mut self, key: &str, words: &[&'static str]) -> Option<&'static str> {
        let found = |value: &Value| {
            let text = value.text()?;
            words.iter().copied().find(|word| *word == text)
        };
        let remedy = || {
            let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
            format!("use {}", quoted.join(" or "))
        };
        self.read(key, found, remedy).flatten()
    }

    /// Records every entry of a model file that is not among the known keys of its kind.
    pub(super) fn refuse_unknown(&mut self, kind: ModelKind, known: &[&'static str]) {
        let mut notes = Vec::new();
        for (key, entry) in self.entries() {
            if known.contains(&key.as_str()) {
                continue;
            }
            let named = located::quoted(key);
            let (what, remedy) = match &entry.value {
                _ if Field::ALL.into_iter().any(|field| field.word() == key) => not_for(key, kind),
                Value::Table(_) => (
                    format!("{named} is a section, and a model file has none"),
                    format!("write the keys without `[{}]` above them", key.escape_debug()),
                ),
                _ => {
                    let borrowed = borrowed_word(key).filter(|own| known.contains(own));
                    let remedy = located::meant(borrowed.unwrap_or(key), known);
                    (format!("{named} is not a key of a model file"), remedy)
                }
            };
            notes.push((entry.line, what, remedy));
        }
        for (line, what, remedy) in notes {
            self.note(line, what, remedy);
        }
    }

    fn missing(&mut self, key: &str, example: &str) {
        let remedy = format!("add a line such as `{key} = {example}`");
        self.note(self.anchor(), format!("`{key}` is missing"), remedy);
    }
}

/// Paceline's name for a Hugging Face key.
fn borrowed_word(key: &str) -> Option<&'static str> {
    let field = match key {
        "model_type" => Field::Kind,
        "n_layer" | "num_hidden_layers" => Field::Layers,
        "n_embd" | "hidden_size" => Field::DModel,
        "n_head" | "num_attention_heads" => Field::Heads,
        "num_key_value_heads" => Field::KvHeads,
        "n_inner" | "intermediate_size" => Field::Ffn,
        "n_positions" | "max_position_embeddings" => Field::Seq,
        "vocab_size" => Field::Vocab,
        "tie_word_embeddings" => Field::Tied,
        "activation_function" | "hidden_act" => Field::Activation,
        "layer_norm_epsilon" | "rms_norm_eps" => Field::NormEps,
        "num_local_experts" | "num_experts" => Field::Experts,
        "num_experts_per_tok" => Field::Topk,
        _ => return None,
    };
    Some(field.word())
}
