//! Elementwise operators.

use crate::device::cuda::bind::{Bound, forward_only, kernel};
use paceline_kernels::cuda::Function;
use paceline_plan::graph::OpPass;

pub(in crate::device::cuda) fn bind(function: Function, pass: OpPass) -> Bound {
    match pass {
        OpPass::Forward => kernel(move |cuda, on, _| {
            let of = (function, on.output_rows(0));
            Ok(cuda.gpu.activation(on.on, cuda.element, of, (on.input(0), on.output(0)))?)
        }),
        OpPass::BackwardInput => kernel(move |cuda, on, _| {
            let of = (function, on.rows(0));
            let at = (on.input(0), on.input(1), on.output(0));
            Ok(cuda.gpu.activation_gradient(on.on, cuda.element, of, at)?)
        }),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cuda) fn add(pass: OpPass) -> Bound {
    let add = kernel(|cuda, on, _| {
        Ok(cuda.gpu.add(on.on, cuda.element, on.input(0), on.input(1), on.output(0))?)
    });
    forward_only(pass, add)
}
