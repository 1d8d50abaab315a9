//! Which of Hugging Face's tensors make one of ours.
//!
//! GPT-2 keeps its matrices as `[inputs, outputs]` (its `Conv1D`), ours are `[outputs, inputs]`. Llama
//! keeps queries, keys, values, gate and up apart; ours stand one below the other in one matrix.
//! Rotary positions turn element i with element i + half of a head in both.

use paceline_plan::model::{Activation, Model, ModelKind};

/// A tensor of theirs that is some rows of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Their name.
    pub(super) name: String,
    /// How many rows of ours it is.
    pub(super) rows: u64,
    /// Whether it lies the other way round.
    pub(super) transposed: bool,
}

/// The parts of one of our tensors, from its first row on. None if the name is not of such a model.
pub(super) fn parts(model: &Model, name: &str, dims: [u64; 2]) -> Option<Vec<Part>> {
    let [rows, _] = dims;
    let (layer, what) = match name.strip_prefix("blocks.") {
        Some(rest) => {
            let (number, what) = rest.split_once('.')?;
            (Some(number.parse::<u64>().ok()?), what)
        }
        None => (None, name),
    };
    match model.kind {
        ModelKind::Gpt2 => gpt2(layer, what, rows),
        ModelKind::Llama => llama(model, layer, what, rows),
        ModelKind::Mlp | ModelKind::Resnet | ModelKind::Dlrm | ModelKind::Moe => None,
    }
}

/// Why a model has no such form, if it has none.
pub(super) fn refusal(model: &Model) -> Option<String> {
    match (model.kind, model.activation) {
        (ModelKind::Gpt2, _) | (ModelKind::Llama, Activation::SwiGlu) => None,
        (ModelKind::Llama, other) => Some(format!(
            "transformers' Llama has a gated network, and this model's activation is {other}"
        )),
        (ModelKind::Mlp, _) => Some("transformers has no such model as an mlp".to_owned()),
        (ModelKind::Resnet | ModelKind::Dlrm, _) => {
            Some(format!("a {}'s weights are not written for transformers", model.kind))
        }
        (ModelKind::Moe, _) => {
            Some("the names of experts in transformers are not known here yet".to_owned())
        }
    }
}

fn gpt2(layer: Option<u64>, what: &str, rows: u64) -> Option<Vec<Part>> {
    let (stem, kind) = what.rsplit_once('.')?;
    let (theirs, matrix) = match (layer, stem) {
        (None, "embedding.table") => ("transformer.wte".to_owned(), false),
        (None, "embedding.position") => ("transformer.wpe".to_owned(), false),
        (None, "head.norm") => ("transformer.ln_f".to_owned(), false),
        (None, "head.table") => ("lm_head".to_owned(), false),
        (Some(layer), stem) => {
            let (theirs, matrix) = match stem {
                "norm1" => ("ln_1", false),
                "qkv" => ("attn.c_attn", true),
                "attention_out" => ("attn.c_proj", true),
                "norm2" => ("ln_2", false),
                "up" => ("mlp.c_fc", true),
                "down" => ("mlp.c_proj", true),
                _ => return None,
            };
            (format!("transformer.h.{layer}.{theirs}"), matrix)
        }
        (None, _) => return None,
    };
    let transposed = matrix && kind == "weight";
    Some(vec![Part { name: format!("{theirs}.{kind}"), rows, transposed }])
}

fn llama(model: &Model, layer: Option<u64>, what: &str, rows: u64) -> Option<Vec<Part>> {
    let stem = what.strip_suffix(".weight")?;
    let (queries, keys) = (model.query_width(), model.kv_width());
    let theirs: Vec<(&str, u64)> = match (layer, stem) {
        (None, "embedding.table") => vec![("model.embed_tokens", rows)],
        (None, "head.norm") => vec![("model.norm", rows)],
        (None, "head.table") => vec![("lm_head", rows)],
        (Some(_), "norm1") => vec![("input_layernorm", rows)],
        (Some(_), "qkv") => vec![
            ("self_attn.q_proj", queries),
            ("self_attn.k_proj", keys),
            ("self_attn.v_proj", keys),
        ],
        (Some(_), "attention_out") => vec![("self_attn.o_proj", rows)],
        (Some(_), "norm2") => vec![("post_attention_layernorm", rows)],
        (Some(_), "up") => vec![("mlp.gate_proj", model.ffn), ("mlp.up_proj", model.ffn)],
        (Some(_), "down") => vec![("mlp.down_proj", rows)],
        (None | Some(_), _) => return None,
    };
    let part = |(name, rows): (&str, u64)| {
        let name = match layer {
            Some(layer) => format!("model.layers.{layer}.{name}.weight"),
            None => format!("{name}.weight"),
        };
        Part { name, rows, transposed: false }
    };
    Some(theirs.into_iter().map(part).collect())
}

impl Part {
    /// The shape of their tensor, which has `columns` of ours in a row. One row is a vector of theirs.
    pub(super) fn shape(&self, columns: u64) -> Vec<u64> {
        match (self.rows, self.transposed) {
            (1, false) => vec![columns],
            (rows, false) => vec![rows, columns],
            (rows, true) => vec![columns, rows],
        }
    }

    /// Turns values of theirs into ours, or ours into theirs; `rows` is how many rows those given have.
    pub(super) fn turned(&self, values: Vec<f32>, rows: u64) -> Vec<f32> {
        if !self.transposed {
            return values;
        }
        let rows = rows as usize;
        let columns = values.len() / rows.max(1);
        let mut turned = vec![0.0; values.len()];
        for (row, values) in values.chunks_exact(columns.max(1)).enumerate() {
            for (column, &value) in values.iter().enumerate() {
                turned[column * rows + row] = value;
            }
        }
        turned
    }
}
