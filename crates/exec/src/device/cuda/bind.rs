//! Kernels of a GPU, by operator and pass.

use super::Cuda;
use super::operands::Operands;
use crate::device::{OpShape, Operator};
use crate::error::Fault;
use crate::memory::within;
use paceline_kernels::Write;
use paceline_kernels::cuda::{CudaError, Device as Gpu, Function};
use paceline_plan::DType;
use paceline_plan::graph::{ActivationKind, BLOCK, NormKind, OpKind, OpPass};

type Bound = Option<Box<dyn Operator<Cuda>>>;

/// Function that queues an operator.
struct Kernel<R>(R);

impl<R> Operator<Cuda> for Kernel<R>
where
    R: Fn(&Gpu, &Operands<'_>, Write) -> Result<(), CudaError> + Send + Sync,
{
    fn workspace(&self, _: &OpShape<'_>, _: usize) -> usize {
        0
    }

    fn run(&self, cuda: &mut Cuda, on: &Operands<'_>, mode: Write) -> Result<(), Fault> {
        Ok((self.0)(&cuda.gpu, on, mode)?)
    }
}

fn kernel(
    run: impl Fn(&Gpu, &Operands<'_>, Write) -> Result<(), CudaError> + Send + Sync + 'static,
) -> Bound {
    Some(Box::new(Kernel(run)))
}

/// Kernel of an operator's pass in f32; `None` if it cannot be run.
pub(super) fn bind(kind: OpKind, pass: OpPass) -> Bound {
    match kind {
        OpKind::Embedding => embedding(pass),
        OpKind::Norm { norm, eps } => norms(norm == NormKind::Layer, eps as f32, pass),
        OpKind::Linear { role: _ } => linear(pass),
        OpKind::Bias => bias(pass),
        OpKind::Activation { function } => activation(function, pass),
        OpKind::SwiGlu => swiglu(pass),
        OpKind::Add => {
            forward_only(pass, |gpu, on, _| gpu.add3(on.on, on.input(0), on.input(1), on.output(0)))
        }
        OpKind::RowMax => forward_only(pass, |gpu, on, _| {
            gpu.row_max(on.on, on.rows(0), on.input(0), on.output(0))
        }),
        OpKind::SoftmaxStats => forward_only(pass, |gpu, on, _| {
            let (logits, max, targets) = (on.input(0), on.input(1), on.input(2));
            gpu.softmax_stats(on.on, on.rows(0), logits, max, targets, on.output(0))
        }),
        OpKind::CrossEntropy { scale } => cross_entropy(scale as f32, pass),
        OpKind::BlockSquares { .. } => forward_only(pass, |gpu, on, _| {
            gpu.block_squares(on.on, on.input(0), BLOCK, on.output(0))
        }),
        OpKind::TensorSquares => forward_only(pass, |gpu, on, _| tensor_squares(gpu, on)),
        OpKind::Norm2 => {
            forward_only(pass, |gpu, on, _| gpu.sum(on.on, on.input(0), on.output(0), true))
        }
        OpKind::Position
        | OpKind::GeGlu
        | OpKind::Rope { .. }
        | OpKind::Attention { .. }
        | OpKind::KeysValues { .. }
        | OpKind::AttentionBlock { .. }
        | OpKind::Conv { .. }
        | OpKind::BatchSums { .. }
        | OpKind::BatchNorm { .. }
        | OpKind::MaxPool { .. }
        | OpKind::AveragePool { .. }
        | OpKind::EmbeddingBag { .. }
        | OpKind::StepRows { .. }
        | OpKind::Interact { .. }
        | OpKind::BinaryCrossEntropy { .. }
        | OpKind::Route(_)
        | OpKind::Dispatch { .. }
        | OpKind::ExpertLinear { .. }
        | OpKind::Combine { .. }
        | OpKind::HeadNorm { .. }
        | OpKind::LatentHeads(_)
        | OpKind::LatentValues(_)
        | OpKind::Total
        | OpKind::Compress(_)
        | OpKind::Outer(_) => None,
    }
}

/// Kernel of an operator without gradients.
fn forward_only(
    pass: OpPass,
    run: impl Fn(&Gpu, &Operands<'_>, Write) -> Result<(), CudaError> + Send + Sync + 'static,
) -> Bound {
    match pass {
        OpPass::Forward => kernel(run),
        OpPass::BackwardInput | OpPass::BackwardWeight => None,
    }
}

fn embedding(pass: OpPass) -> Bound {
    match pass {
        OpPass::Forward => kernel(|gpu, on, _| {
            gpu.embedding(on.on, on.output_rows(0), on.input(0), on.param(0), on.output(0))
        }),
        OpPass::BackwardInput => None,
        OpPass::BackwardWeight => kernel(|gpu, on, mode| {
            let (dy, ids) = (on.input(0), on.input(1));
            gpu.embedding_weight(on.on, on.rows(0), ids, dy, on.param(0), mode)
        }),
    }
}

fn norms(layer: bool, eps: f32, pass: OpPass) -> Bound {
    match pass {
        OpPass::Forward => kernel(move |gpu, on, _| {
            let beta = layer.then(|| on.param(1));
            let (x, gamma, y) = (on.input(0), on.param(0), on.output(0));
            gpu.norm(on.on, on.rows(0), eps, x, gamma, beta, y, on.output(1))
        }),
        OpPass::BackwardInput => kernel(move |gpu, on, _| {
            let (dy, x) = (on.input(0), on.input(1));
            let (gamma, stats, dx) = (on.param(0), on.input(2), on.output(0));
            gpu.norm_input(on.on, on.rows(0), layer, dy, x, gamma, stats, dx)
        }),
        OpPass::BackwardWeight => kernel(move |gpu, on, mode| {
            let dbeta = layer.then(|| on.param(1));
            let (dy, x, stats) = (on.input(0), on.input(1), on.input(2));
            gpu.norm_weight(on.on, on.rows(0), dy, x, stats, on.param(0), dbeta, mode)
        }),
    }
}

fn linear(pass: OpPass) -> Bound {
    match pass {
        OpPass::Forward => kernel(|gpu, on, _| {
            gpu.linear(on.on, on.linear(), on.input(0), on.param(0), on.output(0))
        }),
        OpPass::BackwardInput => kernel(|gpu, on, _| {
            gpu.linear_input(on.on, on.linear(), on.input(0), on.param(0), on.output(0))
        }),
        OpPass::BackwardWeight => kernel(|gpu, on, mode| {
            gpu.linear_weight(on.on, on.linear(), on.input(0), on.input(1), on.param(0), mode)
        }),
    }
}

fn bias(pass: OpPass) -> Bound {
    match pass {
        OpPass::Forward => {
            kernel(|gpu, on, _| gpu.bias(on.on, on.rows(0), on.input(0), on.param(0), on.output(0)))
        }
        OpPass::BackwardInput => None,
        OpPass::BackwardWeight => kernel(|gpu, on, mode| {
            gpu.bias_weight(on.on, on.rows(0), on.input(0), on.param(0), mode)
        }),
    }
}

fn activation(kind: ActivationKind, pass: OpPass) -> Bound {
    let function = match kind {
        ActivationKind::Gelu => Function::Gelu,
        ActivationKind::Relu => Function::Relu,
        ActivationKind::SquaredRelu => Function::SquaredRelu,
    };
    match pass {
        OpPass::Forward => {
            kernel(move |gpu, on, _| gpu.activation(on.on, function, on.input(0), on.output(0)))
        }
        OpPass::BackwardInput => kernel(move |gpu, on, _| {
            gpu.activation_input(on.on, function, on.input(0), on.input(1), on.output(0))
        }),
        OpPass::BackwardWeight => None,
    }
}

fn swiglu(pass: OpPass) -> Bound {
    match pass {
        OpPass::Forward => {
            kernel(|gpu, on, _| gpu.swiglu(on.on, on.output_rows(0), on.input(0), on.output(0)))
        }
        OpPass::BackwardInput => kernel(|gpu, on, _| {
            gpu.swiglu_input(on.on, on.rows(0), on.input(0), on.input(1), on.output(0))
        }),
        OpPass::BackwardWeight => None,
    }
}

fn cross_entropy(scale: f32, pass: OpPass) -> Bound {
    match pass {
        OpPass::Forward => kernel(|gpu, on, mode| {
            gpu.cross_entropy(on.on, on.rows(0).rows, on.input(0), on.output(0), mode)
        }),
        OpPass::BackwardInput => kernel(move |gpu, on, _| {
            let (stats, max, targets) = (on.input(0), on.input(2), on.input(3));
            let (shape, dlogits) = (on.rows(1), on.output(0));
            // If the gradient replaces the logits in place, they are stored there already.
            let logits = if on.input(1).len == 0 { dlogits } else { on.input(1) };
            gpu.cross_entropy_input(on.on, shape, scale, stats, logits, max, targets, dlogits)
        }),
        OpPass::BackwardWeight => None,
    }
}

/// Like [`crate::device::cpu::step::tensor_squares`], for a single rank.
fn tensor_squares(gpu: &Gpu, on: &Operands<'_>) -> Result<(), CudaError> {
    let (blocks, sums) = (on.input(0), on.output(0));
    gpu.fill(on.on, sums, 0.0)?;
    let mut before = 0;
    for bucket in &on.program().buckets {
        for entry in bucket.entries.iter().filter(|entry| entry.counted) {
            let first = before + entry.offset / BLOCK;
            let count = entry.elements().div_ceil(BLOCK);
            let from = within(blocks, DType::F32, first..first + count);
            let slot = u64::from(entry.norm_entry);
            gpu.sum(on.on, from, within(sums, DType::F32, slot..slot + 1), false)?;
        }
        before += bucket.elements / BLOCK;
    }
    Ok(())
}
