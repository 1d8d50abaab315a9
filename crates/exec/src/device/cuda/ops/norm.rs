//! Norms of rows.

use crate::device::OpShape;
use crate::device::cuda::bind::{Bound, kernel};
use paceline_kernels::cuda::{Device as Gpu, NormAt, NormGradientAt};
use paceline_plan::graph::{NormKind, OpPass};

fn fits(norm: NormKind, shape: OpShape<'_>) -> bool {
    let known = match norm {
        NormKind::Layer | NormKind::Rms => true,
        NormKind::LayerGain | NormKind::RmsUnit => false,
    };
    known && Gpu::has_norm(shape.rows(0).width as u64)
}

pub(in crate::device::cuda) fn bind(
    norm: NormKind,
    eps: f32,
    pass: OpPass,
    shape: OpShape<'_>,
) -> Bound {
    if !fits(norm, shape) {
        return None;
    }
    let layer = norm == NormKind::Layer;
    match pass {
        OpPass::Forward => kernel(move |cuda, on, _| {
            let at = NormAt {
                x: on.input(0),
                added: None,
                gain: on.param(0),
                bias: layer.then(|| on.param(1)),
                y: on.output(0),
                stats: on.output(1),
            };
            Ok(cuda.gpu.norm(on.on, cuda.element, on.rows(0), eps, &at)?)
        }),
        OpPass::BackwardInput => gradient(norm, false, false, shape),
        OpPass::BackwardWeight => kernel(move |cuda, on, mode| {
            let at = NormGradientAt {
                layer,
                dy: on.input(0),
                x: on.input(1),
                stats: on.input(2),
                gain: None,
                added: None,
                dx: None,
                weights: Some((on.param(0), layer.then(|| on.param(1)), mode)),
            };
            Ok(cuda.gpu.norm_gradient(on.on, cuda.element, on.rows(0), &at)?)
        }),
    }
}

/// A sum and its norm.
pub(in crate::device::cuda) fn add_norm(norm: NormKind, eps: f32, shape: OpShape<'_>) -> Bound {
    if !fits(norm, shape) {
        return None;
    }
    let layer = norm == NormKind::Layer;
    kernel(move |cuda, on, _| {
        let at = NormAt {
            x: on.input(0),
            added: Some((on.input(1), on.output(0))),
            gain: on.param(0),
            bias: layer.then(|| on.param(1)),
            y: on.output(1),
            stats: on.output(2),
        };
        Ok(cuda.gpu.norm(on.on, cuda.element, on.rows(0), eps, &at)?)
    })
}

/// Gradient of a norm's input, with a sum and the gradients of its weights if asked.
pub(in crate::device::cuda) fn gradient(
    norm: NormKind,
    added: bool,
    weights: bool,
    shape: OpShape<'_>,
) -> Bound {
    if !fits(norm, shape) {
        return None;
    }
    let layer = norm == NormKind::Layer;
    // The parameters that are read, before those whose gradients are written.
    let read = shape.op.params.len() / if weights { 2 } else { 1 };
    kernel(move |cuda, on, mode| {
        let dx = on.output(0);
        let at = NormGradientAt {
            layer,
            dy: on.input(0),
            x: on.input(1),
            stats: on.input(2),
            gain: Some(on.param(0)),
            added: added.then(|| on.input(3)),
            dx: Some(dx),
            weights: weights.then(|| (on.param(read), layer.then(|| on.param(read + 1)), mode)),
        };
        cuda.gpu.norm_gradient(on.on, cuda.element, on.rows(0), &at)?;
        cuda.summed = Some((on.on, dx));
        Ok(())
    })
}
