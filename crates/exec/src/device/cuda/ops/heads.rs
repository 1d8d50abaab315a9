//! Operators that prepare heads for attention: their norms, and heads from latent vectors.

use crate::device::cuda::bind::{Bound, kernel};
use paceline_kernels::cuda::{Device as Gpu, HeadNormGradientAt, LatentAt};
use paceline_kernels::{head_norm, latent as kernels};
use paceline_plan::graph::{Heads, LatentHeads, OpPass};

pub(in crate::device::cuda) fn norm(heads: Heads, eps: f32, pass: OpPass) -> Bound {
    if !Gpu::has_head_norm(heads.head_dim) {
        return None;
    }
    let [heads, kv_heads, head_dim] =
        [heads.heads, heads.kv_heads, heads.head_dim].map(|n| n as usize);
    let shape = head_norm::Shape { heads, kv_heads, head_dim, least: 0.0 };
    match pass {
        OpPass::Forward => kernel(move |cuda, on, _| {
            let of = (shape, on.rows(0).rows, eps);
            let gains = [on.param(0), on.param(1)];
            let at = (on.input(0), gains, on.output(0), on.output(1));
            Ok(cuda.gpu.head_norm(on.on, cuda.element, of, at)?)
        }),
        OpPass::BackwardInput | OpPass::BackwardWeight => kernel(move |cuda, on, mode| {
            let (input, params) = (pass == OpPass::BackwardInput, [on.param(0), on.param(1)]);
            let at = HeadNormGradientAt {
                dy: on.input(0),
                x: on.input(1),
                stats: on.input(2),
                gains: input.then_some(params),
                dx: input.then(|| on.output(0)),
                dgains: (!input).then_some((params, mode)),
            };
            Ok(cuda.gpu.head_norm_gradient(on.on, cuda.element, (shape, on.rows(0).rows), &at)?)
        }),
    }
}

fn shape_of(heads: LatentHeads) -> kernels::Shape<'static> {
    kernels::Shape {
        heads: heads.heads as usize,
        head_dim: heads.head_dim as usize,
        rope: heads.rope as usize,
        v_dim: heads.v_dim as usize,
        theta: heads.theta,
        magnitude: 1.0,
        frequencies: &[],
    }
}

pub(in crate::device::cuda) fn latent(heads: LatentHeads, pass: OpPass) -> Bound {
    if pass == OpPass::BackwardWeight {
        return None;
    }
    let (shape, forward) = (shape_of(heads), pass == OpPass::Forward);
    kernel(move |cuda, on, _| {
        let (table, seq) = (cuda.rotation(heads.theta, heads.rope)?, cuda.seq);
        let at = match forward {
            true => {
                let (q, kv, turned) = (on.input(0), on.input(1), on.input(2));
                LatentAt { q, kv, turned, qkv: on.output(0), table, seq }
            }
            false => {
                let (q, kv, turned) = (on.output(0), on.output(1), on.output(2));
                LatentAt { q, kv, turned, qkv: on.input(0), table, seq }
            }
        };
        let of = (shape, on.rows(0).rows);
        Ok(cuda.gpu.latent_heads(on.on, cuda.element, of, &at, forward)?)
    })
}

pub(in crate::device::cuda) fn values(heads: LatentHeads, pass: OpPass) -> Bound {
    if pass == OpPass::BackwardWeight {
        return None;
    }
    let (shape, back) = (shape_of(heads), pass == OpPass::BackwardInput);
    kernel(move |cuda, on, _| {
        let (of, at) = ((shape, on.rows(0).rows), (on.input(0), on.output(0)));
        Ok(cuda.gpu.latent_values(on.on, cuda.element, of, at, back)?)
    })
}
