//! Losses.

use crate::device::cuda::Cuda;
use crate::device::cuda::bind::{Bound, kernel};
use paceline_kernels::Rows;
use paceline_kernels::cuda::LossAt;
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
