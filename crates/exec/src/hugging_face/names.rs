//! Mapping of Hugging Face tensors to ours.
//!
//! GPT-2 stores its matrices as `[inputs, outputs]` (its `Conv1D`); ours are `[outputs, inputs]`.
//! The other families store queries, keys, values, gate and up separately, and each expert's; ours
//! are stacked by rows in one matrix. DeepSeek-V3 stores the keys shared by all heads below the
//! latent vector's matrix; ours are two matrices.
//!
//! Its multi-token prediction module joins its inputs by one matrix. Ours uses two, stored side by
//! side in it. The tables that the module shares are not written again. The other families have no
//! such modules, so ours are omitted for them.
//!
//! Rotary positions rotate element i with element i + half of a head in all families, unless a
//! DeepSeek-V3 file declares adjacent pairs.

use super::family::Family;
use paceline_plan::model::Model;

/// A Hugging Face tensor, or some of its rows, that forms some rows of one of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SourceTensor {
    /// Hugging Face name.
    pub(super) name: String,
    /// Number of our rows that it forms.
    pub(super) rows: u64,
    /// True if it is stored transposed.
    pub(super) transposed: bool,
    /// First row and number of rows in their tensor, if only some are ours.
    pub(super) within: Option<(u64, u64)>,
    /// First column and number of columns in their tensor, if only some are ours.
    pub(super) columns_within: Option<(u64, u64)>,
    /// Number of rows per head, and number of those, the last ones, that are rotated by position.
    /// Set if files may store rotary pairs adjacent.
    pub(super) pairs: Option<(u64, u64)>,
}

/// Parts of one of our tensors, from its first row on. `None` if the name is unknown.
pub(super) fn parts(model: &Model, name: &str, dims: [u64; 2]) -> Option<Vec<SourceTensor>> {
    let [rows, _] = dims;
    let (layer, what) = match name.strip_prefix("blocks.") {
        Some(rest) => {
            let (number, what) = rest.split_once('.')?;
            (Some(number.parse::<u64>().ok()?), what)
        }
        None => (None, name),
    };
    let family = Family::of(model).ok()?;
    if layer.is_some_and(|layer| layer >= model.layers) && family != Family::DeepseekV3 {
        return None;
    }
    let theirs = match family {
        Family::Gpt2 => return gpt2(layer, what, rows),
        Family::Llama | Family::Mixtral | Family::Qwen3Moe | Family::DeepseekV3 => {
            attention(model, layer, what, rows)
                .or_else(|| feed_forward(family, model, what, rows))?
        }
    };
    let prefix = layer.map_or(String::new(), |layer| format!("model.layers.{layer}."));
    Some(
        theirs
            .into_iter()
            .map(|part| SourceTensor { name: format!("{prefix}{}", part.name), ..part })
            .collect(),
    )
}

fn gpt2(layer: Option<u64>, what: &str, rows: u64) -> Option<Vec<SourceTensor>> {
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
    Some(vec![SourceTensor { transposed, ..SourceTensor::new(format!("{theirs}.{kind}"), rows) }])
}

/// Tensors outside the layers, and those in a layer before the feed-forward part. All families but
/// GPT-2 have the same names.
fn attention(
    model: &Model,
    layer: Option<u64>,
    what: &str,
    rows: u64,
) -> Option<Vec<SourceTensor>> {
    let stem = what.strip_suffix(".weight")?;
    let part = |name: &str, rows| SourceTensor::new(format!("{name}.weight"), rows);
    let (queries, keys) = (model.query_width(), model.kv_width());
    let (turned, latent) = (model.latent.qk_rope, model.latent.kv_lora);
    let down = |first, pairs| SourceTensor {
        within: Some((first, latent + turned)),
        pairs,
        ..part("self_attn.kv_a_proj_with_mqa", rows)
    };
    let all = |name: &str| vec![part(name, rows)];
    let columns_from = |first| {
        vec![SourceTensor { columns_within: Some((first, 2 * rows)), ..part("eh_proj", rows) }]
    };
    Some(match (layer, stem) {
        (None, "embedding.table") => all("model.embed_tokens"),
        (None, "head.norm") => all("model.norm"),
        (None, "head.table") => all("lm_head"),
        (Some(_), "norm1") => all("input_layernorm"),
        (Some(_), "qkv") => vec![
            part("self_attn.q_proj", queries),
            part("self_attn.k_proj", keys),
            part("self_attn.v_proj", keys),
        ],
        (Some(_), "q_norm") if model.qk_norm => all("self_attn.q_norm"),
        (Some(_), "k_norm") => all("self_attn.k_norm"),
        (Some(_), "q_down") => all("self_attn.q_a_proj"),
        (Some(_), "q_norm") => all("self_attn.q_a_layernorm"),
        (Some(_), "q_up") => {
            let pairs = Some((model.head_dim, turned));
            vec![SourceTensor { pairs, ..part("self_attn.q_b_proj", rows) }]
        }
        (Some(_), "kv_down") => vec![down(0, None)],
        (Some(_), "k_rope") => vec![down(latent, Some((turned, turned)))],
        (Some(_), "kv_norm") => all("self_attn.kv_a_layernorm"),
        (Some(_), "kv_up") => all("self_attn.kv_b_proj"),
        (Some(_), "attention_out") => all("self_attn.o_proj"),
        (Some(_), "norm2") => all("post_attention_layernorm"),
        (Some(_), "join.token_norm") => all("enorm"),
        (Some(_), "join.hidden_norm") => all("hnorm"),
        (Some(_), "join.token") => columns_from(0),
        (Some(_), "join.hidden") => columns_from(rows),
        (Some(_), "head.norm") => all("shared_head.norm"),
        (None | Some(_), _) => return None,
    })
}

/// Feed-forward network of a layer, or its router and experts.
fn feed_forward(family: Family, model: &Model, what: &str, rows: u64) -> Option<Vec<SourceTensor>> {
    let part = |name: String, rows| SourceTensor::new(format!("{name}.weight"), rows);
    let gated = |prefix: &str| {
        let half = |name| part(format!("{prefix}.{name}"), rows / 2);
        vec![half("gate_proj"), half("up_proj")]
    };
    let (layer, [gate, up, down]) = match family {
        Family::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
        Family::Gpt2 | Family::Llama | Family::Qwen3Moe | Family::DeepseekV3 => {
            ("mlp", ["gate_proj", "up_proj", "down_proj"])
        }
    };
    let experts = model.experts.experts;
    let each = |names: &[&str]| {
        let rows = rows / experts.max(1) / names.len() as u64;
        let of = |expert, name: &&str| part(format!("{layer}.experts.{expert}.{name}"), rows);
        (0..experts).flat_map(|expert| names.iter().map(move |name| of(expert, name))).collect()
    };
    Some(match what {
        "up.weight" => gated("mlp"),
        "down.weight" => vec![part("mlp.down_proj".to_owned(), rows)],
        "router.weight" => vec![part(format!("{layer}.gate"), rows)],
        "router.bias" => {
            vec![SourceTensor::new(format!("{layer}.gate.e_score_correction_bias"), rows)]
        }
        "experts.up.weight" => each(&[gate, up]),
        "experts.down.weight" => each(&[down]),
        "shared.up.weight" => gated("mlp.shared_experts"),
        "shared.down.weight" => vec![part("mlp.shared_experts.down_proj".to_owned(), rows)],
        _ => return None,
    })
}

impl SourceTensor {
    fn new(name: String, rows: u64) -> Self {
        Self { name, rows, transposed: false, within: None, columns_within: None, pairs: None }
    }

    /// Shape of their tensor, with `columns` of our columns per row. A single row is a vector.
    pub(super) fn shape(&self, columns: u64) -> Vec<u64> {
        let rows = self.within.map_or(self.rows, |(_, rows)| rows);
        let columns = self.columns_within.map_or(columns, |(_, columns)| columns);
        match (rows, self.transposed) {
            (1, false) => vec![columns],
            (rows, false) => vec![rows, columns],
            (rows, true) => vec![columns, rows],
        }
    }

    /// Runs of their elements that are ours, each by its start and length, in our order.
    pub(super) fn runs(&self, columns: u64) -> impl Iterator<Item = (u64, u64)> + use<> {
        let start = self.within.map_or(0, |(first, _)| first * columns);
        let (count, len, first, stride) = match self.columns_within {
            None => (1, self.rows * columns, start, 0),
            Some((first, all)) => (self.rows, columns, first, all),
        };
        (0..count).map(move |run| (first + run * stride, len))
    }

    /// Transposes values to our layout or to theirs, if needed; `values` has `rows` rows.
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

    /// Separates adjacent pairs of rows: the first of each, then the second of each.
    pub(super) fn unpaired(&self, values: Vec<f32>, columns: u64) -> Vec<f32> {
        let Some((head, turned)) = self.pairs else { return values };
        let [head, turned, columns] = [head, turned, columns].map(|n| n as usize);
        let mut split = values.clone();
        let plain = (head - turned) * columns;
        let heads = values.chunks_exact(head * columns).zip(split.chunks_exact_mut(head * columns));
        for (from, to) in heads {
            let to = to[plain..].chunks_exact_mut(columns);
            let order = (0..turned).map(|row| row % (turned / 2) * 2 + row / (turned / 2));
            for (to, row) in to.zip(order) {
                to.copy_from_slice(&from[plain + row * columns..][..columns]);
            }
        }
        split
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::model::built_in;

    #[test]
    fn pairs_come_apart_behind_what_is_not_turned() {
        let pairs = Some((5, 4));
        let part = SourceTensor { pairs, ..SourceTensor::new("q".to_owned(), 10) };
        let rows: Vec<f32> = (0..10u8).map(f32::from).collect();
        let expected = [0.0, 1.0, 3.0, 2.0, 4.0, 5.0, 6.0, 8.0, 7.0, 9.0];
        assert_eq!(part.unpaired(rows, 1), expected);
    }

    #[test]
    fn rows_of_their_tensors_add_up_to_ours() {
        let names = ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3-mtp", "llama3-8b", "gpt2-124m"];
        for name in names {
            let model = built_in::get(name).unwrap().unwrap();
            for (name, dims) in crate::logical::tensors(&model) {
                let parts = parts(&model, &name, dims).unwrap_or_else(|| panic!("{name}"));
                assert_eq!(parts.iter().map(|part| part.rows).sum::<u64>(), dims[0], "{name}");
            }
        }
    }

    #[test]
    fn halves_of_a_matrix_that_joins_stand_side_by_side() {
        let model = built_in::get("deepseek-v3-mtp").unwrap().unwrap();
        let of = |name: &str| parts(&model, name, [7168, 7168]).unwrap().remove(0);
        let [token, hidden] =
            ["token", "hidden"].map(|half| of(&format!("blocks.61.join.{half}.weight")));
        for part in [&token, &hidden] {
            assert_eq!(part.name, "model.layers.61.eh_proj.weight");
            assert_eq!(part.shape(7168), [7168, 2 * 7168]);
            assert_eq!(part.runs(7168).count(), 7168);
        }
        assert_eq!(token.runs(7168).nth(1), Some((2 * 7168, 7168)));
        assert_eq!(hidden.runs(7168).nth(1), Some((3 * 7168, 7168)));
        let norm = parts(&model, "blocks.61.head.norm.weight", [1, 7168]).unwrap().remove(0);
        assert_eq!(norm.name, "model.layers.61.shared_head.norm.weight");
    }
}
