//! Losses.

use crate::device::cuda::Cuda;
use crate::device::cuda::bind::{Bound, forward_only, kernel};
use paceline_kernels::Rows;
use paceline_kernels::cuda::{LossAt, ShardLossAt};
use paceline_plan::graph::OpPass;

/// Logits of a row that count: the vocabulary without padding.
fn words(cuda: &Cuda, logits: Rows) -> u32 {
    cuda.vocab.min(u32::try_from(logits.width).unwrap_or(u32::MAX))
}

/// Loss of all rows, from logits and targets. If `replaced`, the logits become their gradient.
pub(in crate::device::cuda) fn whole(scale: f32, replaced: bool) -> Bound {
    kernel(move |cuda, on, mode| {
        let (shape, losses) = (on.rows(0), on.output(0));
        let at = LossAt { logits: on.input(0), targets: on.input(1), stats: on.output(1) };
        let scale = replaced.then_some(scale * cuda.pass.loss_scale);
        let of = (shape, words(cuda, shape));
        cuda.gpu.cross_entropy(on.on, cuda.element, of, &at, losses, scale)?;
        Ok(cuda.gpu.sum(on.on, losses, on.output(2), mode)?)
    })
}

/// Largest logits of rows that are shared out over ranks.
pub(in crate::device::cuda) fn row_max(pass: OpPass) -> Bound {
    let max = kernel(|cuda, on, _| {
        let (shape, at) = (on.rows(0), (on.input(0), on.output(0)));
        let words = cuda.columns(shape).valid as u32;
        Ok(cuda.gpu.row_max(on.on, cuda.element, (shape, words), at)?)
    });
    forward_only(pass, max)
}

/// Statistics of such rows.
pub(in crate::device::cuda) fn softmax_stats(pass: OpPass) -> Bound {
    let stats = kernel(|cuda, on, _| {
        let (logits, max, targets) = (on.input(0), on.input(1), on.input(2));
        let (shape, at) = (on.rows(0), ShardLossAt { logits, max, targets, stats: on.output(0) });
        Ok(cuda.gpu.softmax_stats(on.on, cuda.element, (shape, cuda.columns(shape)), &at)?)
    });
    forward_only(pass, stats)
}

/// Loss of such rows, and the gradient of their logits.
pub(in crate::device::cuda) fn sharded(scale: f32, pass: OpPass) -> Bound {
    match pass {
        OpPass::Forward => kernel(|cuda, on, mode| {
            let at = (on.input(0), on.output(0));
            Ok(cuda.gpu.loss_of_stats(on.on, on.rows(0).rows, at, mode)?)
        }),
        OpPass::BackwardInput => kernel(move |cuda, on, _| {
            let (stats, logits, max, targets) =
                (on.input(0), on.input(1), on.input(2), on.input(3));
            let shape = on.rows(1);
            let at = ShardLossAt { logits, max, targets, stats };
            let (of, to) = ((shape, cuda.columns(shape)), on.output(0));
            let to = (to, scale * cuda.pass.loss_scale);
            Ok(cuda.gpu.shard_gradient(on.on, cuda.element, of, &at, to)?)
        }),
        OpPass::BackwardWeight => None,
    }
}

/// Gradient of the logits, unless it has been computed with their loss.
pub(in crate::device::cuda) fn gradient(scale: f32, replaced: bool, pass: OpPass) -> Bound {
    if pass != OpPass::BackwardInput {
        return None;
    }
    kernel(move |cuda, on, _| {
        if replaced {
            return Ok(());
        }
        let shape = on.rows(1);
        let at = LossAt { logits: on.input(1), targets: on.input(3), stats: on.input(0) };
        let (of, scale) = ((shape, words(cuda, shape)), scale * cuda.pass.loss_scale);
        Ok(cuda.gpu.cross_entropy_gradient(on.on, cuda.element, of, &at, on.output(0), scale)?)
    })
}
