//! Attention of a layer: of heads, and latent.

use super::Builder;
use crate::graph::{
    HeadNormKind, Heads, Init, LatentHeads, LinearRole, OpKind, Rotary, Scores, Tensor, TensorClass,
};
use crate::ids::TensorId;
use crate::model::{Latent, LayerForm, Position, QueryKeyNorm};

impl Builder<'_> {
    /// Attention of all heads on the output of a norm.
    pub(super) fn attention(&mut self, x: TensorId, form: LayerForm) -> TensorId {
        let (m, d) = (self.sizes.model, &self.sizes.decoder);
        let heads = Heads { heads: m.heads, kv_heads: m.kv_heads, head_dim: m.head_dim };
        let blocks = [m.query_width(), m.kv_width(), m.kv_width()];
        let mut qkv = self.linear("qkv", x, &blocks, LinearRole::Qkv);
        if d.qkv_clip > 0.0 {
            let clipped = self.activation_of("qkv.clipped", &blocks);
            self.op(OpKind::Clamp { limit: d.qkv_clip }, &[qkv], &[], &[clipped]);
            qkv = clipped;
        }
        if !d.qk_norm_last {
            qkv = self.head_norm(qkv, heads, &blocks);
        }
        if let Some((theta, rotary)) = form.rotation {
            let rotated = self.activation_of("qkv.rotated", &blocks);
            self.op(OpKind::Rope { heads, theta, rotary }, &[qkv], &[], &[rotated]);
            qkv = rotated;
        }
        if d.qk_norm_last && form.rotation.is_some() {
            qkv = self.head_norm(qkv, heads, &blocks);
        }
        if form.temperature {
            let (floor, slope) = (d.temperature_floor, d.temperature_slope);
            let grown = self.activation_of("qkv.grown", &blocks);
            self.op(OpKind::Temperature { heads, floor, slope }, &[qkv], &[], &[grown]);
            qkv = grown;
        }
        self.attend(qkv, heads, form)
    }

    /// Queries and keys normalised, if the model does.
    fn head_norm(&mut self, qkv: TensorId, heads: Heads, blocks: &[u64; 3]) -> TensorId {
        let m = self.sizes.model;
        let norm = match self.sizes.decoder.qk_norm {
            None => return qkv,
            Some(QueryKeyNorm::Whole) => return self.whole_norm(qkv, heads, blocks),
            Some(QueryKeyNorm::Heads(norm)) => norm,
        };
        let (one, gains) = match norm {
            HeadNormKind::Head => (Init::One, [m.head_dim; 2]),
            HeadNormKind::HeadUnit => (Init::Zero, [m.head_dim; 2]),
            HeadNormKind::Bare => (Init::One, [0; 2]),
        };
        let stats = [m.heads, m.kv_heads];
        let mut params = Vec::new();
        for (name, width) in ["q_norm.weight", "k_norm.weight"].into_iter().zip(gains) {
            if width > 0 {
                params.push(self.param(name, [1, width], one, false));
            }
        }
        let normed = self.activation_of("qkv.normed", blocks);
        let width = stats.iter().sum();
        let statistics = self.tensor("qkv.stats", width, TensorClass::Statistic);
        self.graph.tensors[statistics.index()].blocks = stats.to_vec();
        let kind = OpKind::HeadNorm { heads, eps: m.norm_eps, norm };
        self.op(kind, &[qkv], &params, &[normed, statistics]);
        normed
    }

    /// All queries normalised together, and all keys.
    fn whole_norm(&mut self, qkv: TensorId, heads: Heads, blocks: &[u64; 3]) -> TensorId {
        let m = self.sizes.model;
        let (queries, keys) = (m.query_width(), m.kv_width());
        let squares = self.tensor("qkv.squares", 2, TensorClass::Statistic);
        self.op(OpKind::WholeSquares { heads }, &[qkv], &[], &[squares]);
        let params = [("q_norm.weight", queries), ("k_norm.weight", keys)]
            .map(|(name, width)| self.param(name, [1, width], Init::One, false));
        let normed = self.activation_of("qkv.normed", blocks);
        let kind = OpKind::WholeNorm { heads, queries, keys, eps: m.norm_eps };
        self.op(kind, &[qkv, squares], &params, &[normed]);
        normed
    }

    fn attend(&mut self, qkv: TensorId, heads: Heads, form: LayerForm) -> TensorId {
        let d = &self.sizes.decoder;
        let scores = Scores {
            mask: form.mask,
            scale: d.attention_scale,
            softcap: d.attention_softcap,
            alibi: if d.position == Position::Alibi { heads.heads } else { 0 },
            alibi_scale: d.alibi_scale,
            sinks: d.sinks,
        };
        let sinks = d.sinks.then(|| self.param("sinks", [1, heads.heads], Init::Zero, false));
        let attended = self.activation("attended", heads.heads * heads.head_dim);
        let lse = self.tensor("lse", heads.heads, TensorClass::Statistic);
        let kind = OpKind::Attention { heads, seq: self.sizes.seq, scores };
        let mut outputs = vec![attended, lse];
        if sinks.is_some() {
            outputs.push(self.push(Tensor {
                name: "sinks.copy".into(),
                dims: [1, heads.heads],
                class: TensorClass::Statistic,
                blocks: Vec::new(),
            }));
        }
        self.op(kind, &[qkv], sinks.as_slice(), &outputs);
        attended
    }

    /// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, eq. 9 to 19).
    pub(super) fn latent(&mut self, x: TensorId, form: LayerForm) -> TensorId {
        let (m, d) = (self.sizes.model, &self.sizes.decoder);
        let eps = if d.latent_eps > 0.0 { d.latent_eps } else { m.norm_eps };
        let (theta, rotary) = form.rotation.unwrap_or((m.rope_theta, Rotary::default()));
        let Latent { q_lora, kv_lora, qk_rope, v_dim } = m.latent;
        let (heads, head_dim) = (m.heads, m.head_dim);
        let shape = LatentHeads { heads, head_dim, rope: qk_rope, v_dim, theta, rotary };
        let mut of = x;
        if q_lora > 0 {
            let down = self.linear("q_down", x, &[q_lora], LinearRole::Latent);
            of = self.norm_with("q_norm", down, eps);
        }
        let q = self.linear("q_up", of, &[heads * head_dim], LinearRole::Qkv);
        let down = self.linear("kv_down", x, &[kv_lora], LinearRole::Latent);
        let down = self.norm_with("kv_norm", down, eps);
        let own = head_dim - qk_rope + v_dim;
        let kv = self.linear("kv_up", down, &[heads * own], LinearRole::Qkv);
        let turned = self.linear("k_rope", x, &[qk_rope], LinearRole::Latent);
        let qkv = self.activation_of("qkv", &[heads * head_dim; 3]);
        self.op(OpKind::LatentHeads(shape), &[q, kv, turned], &[], &[qkv]);
        let padded = self.attend(qkv, Heads { heads, kv_heads: heads, head_dim }, form);
        let values = self.activation("values", heads * v_dim);
        self.op(OpKind::LatentValues(shape), &[padded], &[], &[values]);
        values
    }
}
