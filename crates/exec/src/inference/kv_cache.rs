//! Attention of inference: over whole sequences, or over earlier tokens in a KV cache.

use paceline_kernels::pool::Pool;
use paceline_kernels::{attention, linear};

/// Heads of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
}

impl Heads {
    /// Width of a row of queries, keys and values.
    fn width(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Attention of one layer, computed by the threads of a pool.
pub(super) trait Attend {
    /// Computes rows of attention outputs from rows of queries, keys and values.
    fn attend(&mut self, layer: usize, on: (Heads, &Pool), qkv: &[f32], seen: &mut [f32]);
}

/// Whole sequences of one length.
#[derive(Debug)]
pub(super) struct Sequences {
    pub(super) seq: usize,
}

impl Attend for Sequences {
    fn attend(&mut self, _: usize, on: (Heads, &Pool), qkv: &[f32], seen: &mut [f32]) {
        let (heads, pool) = on;
        let Heads { heads: queries, kv_heads, head_dim } = heads;
        let rows = qkv.len() / heads.width();
        let shape = attention::Shape {
            batch: rows / self.seq.max(1),
            seq: self.seq,
            heads: queries,
            kv_heads,
            head_dim,
            causal: true,
        };
        let mut lse = vec![0.0; rows * queries];
        let mut workspace = vec![0.0; pool.threads() * shape.forward_workspace::<f32>()];
        attention::forward(pool, shape, qkv, seen, &mut lse, &mut workspace);
    }
}

/// KV cache of one growing sequence, by layer.
#[derive(Debug, Default)]
pub(super) struct KvCache {
    layers: Vec<CachedLayer>,
}

/// Keys and values of a layer: one row per token for each head.
#[derive(Clone, Debug, Default)]
struct CachedLayer {
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl KvCache {
    pub(super) fn new(layers: usize) -> Self {
        Self { layers: vec![CachedLayer::default(); layers] }
    }
}

impl Attend for KvCache {
    fn attend(&mut self, layer: usize, on: (Heads, &Pool), qkv: &[f32], seen: &mut [f32]) {
        let (heads, pool) = on;
        let Heads { heads: queries, kv_heads, head_dim } = heads;
        let remembered = &mut self.layers[layer];
        remembered.keys.resize(kv_heads, Vec::new());
        remembered.values.resize(kv_heads, Vec::new());
        let first = remembered.keys.first().is_none_or(Vec::is_empty);
        let rows = qkv.len() / heads.width();
        for row in qkv.chunks_exact(heads.width()) {
            let (keys, values) = row[queries * head_dim..].split_at(kv_heads * head_dim);
            for (into, from) in [(&mut remembered.keys, keys), (&mut remembered.values, values)] {
                for (into, from) in into.iter_mut().zip(from.chunks_exact(head_dim)) {
                    into.extend_from_slice(from);
                }
            }
        }
        if first {
            // The cache was empty: process all rows at once, as in training.
            return Sequences { seq: rows }.attend(layer, on, qkv, seen);
        }
        assert_eq!(rows, 1, "a sequence that has begun grows by one token");
        // The queries of a group share a head of keys and values.
        let group = queries / kv_heads;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let seen = seen.chunks_exact_mut(group * head_dim);
        let queries = qkv.chunks_exact(group * head_dim);
        for ((keys, values), (queries, seen)) in
            remembered.keys.iter().zip(&remembered.values).zip(queries.zip(seen))
        {
            let tokens = keys.len() / head_dim;
            let shape = linear::Shape { rows: group, inputs: head_dim, outputs: tokens };
            let mut scores = vec![0.0; group * tokens];
            linear::forward(pool, shape, queries, keys, &mut scores);
            for scores in scores.chunks_exact_mut(tokens) {
                soften(scores, scale);
            }
            // The GEMM of a linear layer's input gradient: attention weights times rows of values.
            linear::input_gradient(pool, shape, &scores, values, seen);
        }
    }
}

/// Converts scores to attention weights: softmax of the scaled scores.
fn soften(scores: &mut [f32], scale: f32) {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|score| *score = ((*score - most) * scale).exp());
    let sum: f32 = scores.iter().sum();
    scores.iter_mut().for_each(|score| *score /= sum);
}
