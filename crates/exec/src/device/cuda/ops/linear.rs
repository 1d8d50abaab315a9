//! Linear operators and biases.

use super::attention::rotate;
use crate::device::cuda::bind::{Bound, kernel};
use crate::device::cuda::fuse::Rotation;
use paceline_kernels::cuda::{InputGradientAt, LinearAt};
use paceline_plan::graph::OpPass;

pub(in crate::device::cuda) fn bind(pass: OpPass) -> Bound {
    match pass {
        OpPass::Forward => fused(false, false, false, None),
        OpPass::BackwardInput => kernel(|cuda, on, _| {
            let (dy, w, dx) = (on.input(0), on.param(0), on.output(0));
            let at = InputGradientAt { dy, w, kept: None, dx };
            Ok(cuda.gpu.linear_input(on.on, cuda.element, on.linear(), &at)?)
        }),
        OpPass::BackwardWeight => kernel(|cuda, on, mode| {
            let at = (on.input(0), on.input(1), on.param(0));
            Ok(cuda.gpu.linear_weight(on.on, cuda.element, on.linear(), at, mode)?)
        }),
    }
}

/// A GEMM and what its epilogue does.
pub(in crate::device::cuda) fn fused(
    bias: bool,
    residual: bool,
    gelu: bool,
    rotation: Option<Rotation>,
) -> Bound {
    kernel(move |cuda, on, _| {
        let y = on.output(usize::from(gelu));
        let at = LinearAt {
            x: on.input(0),
            w: on.param(0),
            bias: bias.then(|| on.param(1)),
            residual: residual.then(|| on.input(1)),
            kept: gelu.then(|| on.output(0)),
            y,
        };
        cuda.gpu.linear(on.on, cuda.element, on.linear(), &at)?;
        match rotation {
            Some(Rotation { heads, theta }) => {
                rotate(cuda, on.on, on.output_rows(0), heads, theta, y, false)
            }
            None => Ok(()),
        }
    })
}

/// Input gradient, then that of the preceding GELU.
pub(in crate::device::cuda) fn through_gelu() -> Bound {
    kernel(|cuda, on, _| {
        let (dy, w, dx) = (on.input(0), on.param(0), on.output(0));
        let at = InputGradientAt { dy, w, kept: Some(on.input(1)), dx };
        Ok(cuda.gpu.linear_input(on.on, cuda.element, on.linear(), &at)?)
    })
}

pub(in crate::device::cuda) fn bias(pass: OpPass) -> Bound {
    match pass {
        OpPass::Forward => kernel(|cuda, on, _| {
            let at = (on.input(0), on.param(0), on.output(0));
            Ok(cuda.gpu.bias(on.on, cuda.element, on.rows(0), at)?)
        }),
        OpPass::BackwardInput => None,
        OpPass::BackwardWeight => kernel(|cuda, on, mode| {
            let (dy, db) = (on.input(0), on.param(0));
            if cuda.summed == Some((on.on, dy)) {
                // The gradient of a norm that wrote these rows has summed their columns, too.
                return Ok(cuda.gpu.column_sums(on.on, cuda.element, db, mode)?);
            }
            Ok(cuda.gpu.bias_weight(on.on, cuda.element, on.rows(0), (dy, db), mode)?)
        }),
    }
}
