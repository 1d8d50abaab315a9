//! Projection of tokens to queries, keys and values, and of attention outputs back to the stream.

use super::affine::Affine;
use super::kv_cache::Heads;
use crate::run::outcome::Parameters;
use paceline_kernels::pool::Pool;
use paceline_kernels::{head_norm, latent, rope};
use paceline_plan::model::Model;

/// Projection of a token to a row of queries, keys and values.
#[derive(Debug)]
pub(super) enum Qkv {
    /// One GEMM, with norms of queries and keys if the model has them.
    Whole { qkv: Affine, gains: Option<[Vec<f32>; 2]> },
    /// GEMMs with latent vectors between them (DeepSeek-V2, arXiv 2405.04434, eq. 9 to 19).
    Latent(Box<Latent>),
}

/// Matrices of latent attention.
#[derive(Debug)]
pub(super) struct Latent {
    q_down: Affine,
    q_norm: Affine,
    q_up: Affine,
    kv_down: Affine,
    kv_norm: Affine,
    kv_up: Affine,
    k_rope: Affine,
}

impl Qkv {
    /// Takes the tensors of the layer `name`.
    pub(super) fn take(model: &Model, tensors: &mut Parameters, name: &str) -> Self {
        let mut of = |what: &str| Affine::take(tensors, &format!("{name}.{what}"));
        if model.latent.is_none() {
            let gains = model.qk_norm.then(|| ["q_norm", "k_norm"].map(|gain| of(gain).weight));
            return Self::Whole { qkv: of("qkv"), gains };
        }
        Self::Latent(Box::new(Latent {
            q_down: of("q_down"),
            q_norm: of("q_norm"),
            q_up: of("q_up"),
            kv_down: of("kv_down"),
            kv_norm: of("kv_norm"),
            kv_up: of("kv_up"),
            k_rope: of("k_rope"),
        }))
    }

    /// Heads of a row.
    pub(super) fn heads(model: &Model) -> Heads {
        let [heads, kv_heads, head_dim] =
            [model.heads, model.kv_heads, model.head_dim].map(|n| n as usize);
        // In latent attention every head has its own keys.
        let kv_heads = if model.latent.is_none() { kv_heads } else { heads };
        Heads { heads, kv_heads, head_dim }
    }

    /// Rows of queries, keys and values from normalised rows of the stream; token i has the
    /// position with index i mod `positions.len()`.
    pub(super) fn rows(
        &self,
        model: &Model,
        pool: &Pool,
        positions: &[u32],
        (rows, x): (usize, &[f32]),
    ) -> Vec<f32> {
        let Heads { heads, kv_heads, head_dim } = Self::heads(model);
        match self {
            Self::Whole { qkv, gains } => {
                let mut qkv = qkv.product(pool, rows, x);
                if let Some([queries, keys]) = gains {
                    let shape = head_norm::Shape { heads, kv_heads, head_dim };
                    let raw = qkv.clone();
                    let mut stats = vec![0.0; rows * shape.stats()];
                    let eps = model.norm_eps as f32;
                    head_norm::forward(shape, eps, &raw, [queries, keys], &mut qkv, &mut stats);
                }
                if model.kind.is_rotary() {
                    let theta = model.rope_theta;
                    let rotation = rope::Rotation { heads, kv_heads, head_dim, theta };
                    rope::forward_in_place(rotation, positions, &mut qkv);
                }
                qkv
            }
            Self::Latent(latent) => latent.rows(model, pool, positions, (rows, x)),
        }
    }

    /// Attention output as the output projection reads it: without the padding of latent values.
    pub(super) fn seen(&self, model: &Model, seen: Vec<f32>) -> Vec<f32> {
        match self {
            Self::Whole { .. } => seen,
            Self::Latent(_) => {
                let shape = latent_shape(model);
                let mut values = vec![0.0; seen.len() / shape.head_dim * shape.v_dim];
                let rows = seen.chunks_exact(shape.width());
                for (seen, values) in rows.zip(values.chunks_exact_mut(shape.heads * shape.v_dim)) {
                    latent::values(shape, seen, values);
                }
                values
            }
        }
    }
}

impl Latent {
    fn rows(
        &self,
        model: &Model,
        pool: &Pool,
        positions: &[u32],
        (rows, x): (usize, &[f32]),
    ) -> Vec<f32> {
        let shape = latent_shape(model);
        let through = |down: &Affine, norm: &Affine, up: &Affine| {
            let narrow = norm.normed(model.norm_eps, &down.product(pool, rows, x));
            up.product(pool, rows, &narrow)
        };
        let q = through(&self.q_down, &self.q_norm, &self.q_up);
        let kv = through(&self.kv_down, &self.kv_norm, &self.kv_up);
        let turned = self.k_rope.product(pool, rows, x);
        let mut qkv = vec![0.0; rows * 3 * shape.width()];
        let parts = q
            .chunks_exact(shape.width())
            .zip(kv.chunks_exact(kv.len() / rows.max(1)))
            .zip(turned.chunks_exact(shape.rope))
            .zip(positions.iter().cycle());
        for ((((q, kv), turned), &position), qkv) in
            parts.zip(qkv.chunks_exact_mut(3 * shape.width()))
        {
            latent::heads(shape, position, q, kv, turned, qkv);
        }
        qkv
    }
}

fn latent_shape(model: &Model) -> latent::Shape {
    let [heads, head_dim, rope, v_dim] =
        [model.heads, model.head_dim, model.latent.qk_rope, model.latent.v_dim].map(|n| n as usize);
    latent::Shape { heads, head_dim, rope, v_dim, theta: model.rope_theta }
}
