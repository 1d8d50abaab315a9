//! Attention of inference: over whole sequences, or over earlier tokens in a KV cache.

use paceline_kernels::pool::Pool;
use paceline_kernels::{attention, linear};

/// Heads and scores of an attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention<'a> {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) scores: attention::Scores,
    /// Score of no key of each head, if there are any.
    pub(super) sinks: Option<&'a [f32]>,
}

impl Attention<'_> {
    /// Width of a row of queries, keys and values.
    fn width(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Attention of one layer, computed by the threads of a pool.
pub(super) trait Attend {
    /// Computes rows of attention outputs from rows of queries, keys and values.
    fn attend(&mut self, layer: usize, on: (Attention<'_>, &Pool), qkv: &[f32], seen: &mut [f32]);
}

/// Whole sequences of one length.
#[derive(Debug)]
pub(super) struct Sequences {
    pub(super) seq: usize,
}

impl Attend for Sequences {
    fn attend(&mut self, _: usize, on: (Attention<'_>, &Pool), qkv: &[f32], seen: &mut [f32]) {
        let (of, pool) = on;
        let Attention { heads, kv_heads, head_dim, scores, sinks } = of;
        let rows = qkv.len() / of.width();
        let batch = rows / self.seq.max(1);
        let shape = attention::Shape { batch, seq: self.seq, heads, kv_heads, head_dim, scores };
        let mut lse = vec![0.0; rows * heads];
        let mut workspace = vec![0.0; pool.threads() * shape.forward_workspace::<f32>()];
        attention::forward(pool, shape, qkv, sinks, seen, &mut lse, &mut workspace);
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
    fn attend(&mut self, layer: usize, on: (Attention<'_>, &Pool), qkv: &[f32], seen: &mut [f32]) {
        let (of, pool) = on;
        let Attention { heads, kv_heads, head_dim, scores, sinks } = of;
        let remembered = &mut self.layers[layer];
        remembered.keys.resize(kv_heads, Vec::new());
        remembered.values.resize(kv_heads, Vec::new());
        let first = remembered.keys.first().is_none_or(Vec::is_empty);
        let rows = qkv.len() / of.width();
        for row in qkv.chunks_exact(of.width()) {
            let (keys, values) = row[heads * head_dim..].split_at(kv_heads * head_dim);
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
        let group = heads / kv_heads;
        let seen = seen.chunks_exact_mut(group * head_dim);
        let queries = qkv.chunks_exact(group * head_dim);
        for (number, ((keys, values), (queries, seen))) in
            remembered.keys.iter().zip(&remembered.values).zip(queries.zip(seen)).enumerate()
        {
            let tokens = keys.len() / head_dim;
            let visible = scores.mask.keys(tokens - 1, tokens);
            let of = visible.start * head_dim..visible.end * head_dim;
            let shape = linear::Shape { rows: group, inputs: head_dim, outputs: visible.len() };
            let mut weights = vec![0.0; group * visible.len()];
            linear::forward(pool, shape, queries, &keys[of.clone()], &mut weights);
            for (head, weights) in weights.chunks_exact_mut(visible.len()).enumerate() {
                let head = number * group + head;
                let sink = sinks.map(|sinks| sinks[head]);
                let at = attention::Query { head, head_dim, position: tokens - 1 };
                scores.soften(at, visible.start, sink, weights);
            }
            // The GEMM of a linear layer's input gradient: attention weights times rows of values.
            linear::input_gradient(pool, shape, &weights, &values[of], seen);
        }
    }
}
