//! Tables of tokens and positions.

use crate::device::cuda::bind::{Bound, kernel};
use crate::device::cuda::{Cuda, Operands};
use paceline_kernels::arena::Access;
use paceline_kernels::cuda::Words;
use paceline_plan::graph::OpPass;

/// Table of words, or this rank's shard of it.
fn words(cuda: &Cuda, on: &Operands<'_>) -> Words {
    Words { table: on.param(0), first: cuda.first(on.param_dims(0)[0]) }
}

pub(in crate::device::cuda) fn table(pass: OpPass) -> Bound {
    match pass {
        OpPass::Forward => kernel(|cuda, on, _| {
            let at = (on.input(0), words(cuda, on), on.output(0));
            Ok(cuda.gpu.embedding(on.on, cuda.element, on.output_rows(0), at, None)?)
        }),
        OpPass::BackwardInput => None,
        OpPass::BackwardWeight => kernel(|cuda, on, mode| {
            let (shape, at) = (on.rows(0), (on.input(0), words(cuda, on)));
            let (element, gpu) = (cuda.element, &mut cuda.gpu);
            // The host has loaded the ids, and keeps them until the next load into their buffer.
            let views = on.memory.views(&[(on.input(1), Access::Read)])?;
            Ok(gpu.embedding_weight(on.on, element, shape, at, views.u32(0), mode)?)
        }),
    }
}

pub(in crate::device::cuda) fn position(pass: OpPass) -> Bound {
    match pass {
        OpPass::Forward => kernel(|cuda, on, _| {
            let at = (on.input(0), on.param(0), on.output(0));
            let places = cuda.places(on.rows(0).rows);
            Ok(cuda.gpu.position(on.on, cuda.element, on.rows(0), at, &places)?)
        }),
        OpPass::BackwardInput => None,
        OpPass::BackwardWeight => kernel(|cuda, on, mode| {
            let at = (on.input(0), on.param(0));
            let places = cuda.places(on.rows(0).rows);
            let of = (&places, mode);
            Ok(cuda.gpu.position_weight(on.on, cuda.element, on.rows(0), at, of)?)
        }),
    }
}

/// Rows of a table of words plus those of positions.
pub(in crate::device::cuda) fn with_positions() -> Bound {
    kernel(|cuda, on, _| {
        let at = (on.input(0), words(cuda, on), on.output(0));
        let positions = Some((on.param(1), cuda.places(on.output_rows(0).rows)));
        Ok(cuda.gpu.embedding(on.on, cuda.element, on.output_rows(0), at, positions)?)
    })
}
