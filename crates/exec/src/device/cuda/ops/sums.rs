//! Norm of the gradient, and totals.

use crate::device::cuda::bind::{Bound, forward_only, kernel, launch};
use paceline_kernels::Write;
use paceline_plan::graph::OpPass;

pub(in crate::device::cuda) fn block_squares(pass: OpPass) -> Bound {
    forward_only(pass, launch(|gpu, on, _| gpu.block_squares(on.on, on.input(0), on.output(0))))
}

pub(in crate::device::cuda) fn tensor_squares(pass: OpPass) -> Bound {
    let squares = kernel(|cuda, on, _| {
        Ok(cuda.gpu.tensor_squares(on.on, (on.input(0), on.output(0)), &cuda.squares)?)
    });
    forward_only(pass, squares)
}

pub(in crate::device::cuda) fn norm(pass: OpPass) -> Bound {
    forward_only(pass, launch(|gpu, on, _| gpu.root_of_sum(on.on, on.input(0), on.output(0))))
}

pub(in crate::device::cuda) fn total(pass: OpPass) -> Bound {
    let total = launch(|gpu, on, _| match on.inputs() {
        0 => gpu.clear(on.on, on.output(0)),
        _ => gpu.sum(on.on, on.input(0), on.output(0), Write::Overwrite),
    });
    forward_only(pass, total)
}
