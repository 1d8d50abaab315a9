//! Norm of the gradient, and totals.

use crate::device::cuda::bind::{Bound, forward_only, kernel, launch};
use crate::rank_coords::ShardIndex;
use paceline_kernels::Write;
use paceline_kernels::arena::Span;
use paceline_plan::graph::{BLOCK, OpPass};
use std::ops::Range;

pub(in crate::device::cuda) fn block_squares(parts: u32, experts: bool, pass: OpPass) -> Bound {
    let squares = kernel(move |cuda, on, _| {
        let (grads, sums) = (on.input(0), on.output(0));
        let part = cuda.place.part_of(parts, experts);
        if part == ShardIndex::WHOLE {
            return Ok(cuda.gpu.block_squares(on.on, grads, sums)?);
        }
        // The blocks of other ranks are zero.
        cuda.gpu.clear(on.on, sums)?;
        let float = |range: Range<u64>, of: Span| Span {
            offset: of.offset + 4 * range.start,
            len: 4 * (range.end - range.start),
        };
        let blocks = part.range(sums.len / 4);
        let own = match grads.len == sums.len * BLOCK {
            true => float(blocks.start * BLOCK..blocks.end * BLOCK, grads),
            false => grads,
        };
        Ok(cuda.gpu.block_squares(on.on, own, float(blocks, sums))?)
    });
    forward_only(pass, squares)
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
