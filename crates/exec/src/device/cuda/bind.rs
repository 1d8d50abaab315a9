//! Launches of a GPU, by operator and pass.

use super::fuse::{Fused, Fusion, Step};
use super::operands::Operands;
use super::ops::{activation, attention, embedding, experts, heads, linear, loss, norm, sums};
use super::{Cuda, Kernels, Launch, WORKS, element};
use crate::device::{OpShape, Operator};
use crate::error::{ExecError, Fault};
use crate::types::Types;
use paceline_kernels::Write;
use paceline_kernels::cuda::{CudaError, Device as Gpu, Function};
use paceline_plan::graph::{ActivationKind, HeadNormKind, OpKind, OpPass};
use paceline_plan::program::{LocalOp, Plan, Template};

/// Kernel of an operator's pass; `None` if it cannot be run.
pub(super) type Bound = Option<Box<dyn Operator<Cuda>>>;

/// Finds the launches of every template that some role uses, or fails with the first operator that
/// has none.
pub(super) fn bind(plan: &Plan, types: Types) -> Result<Kernels, ExecError> {
    let fusion = Fusion::of(plan);
    let mut used = vec![false; plan.templates.len()];
    let segments = plan.programs.iter().flat_map(|program| &program.segments);
    segments.for_each(|segment| used[segment.template as usize] = true);
    let of = |(number, template): (usize, &Template)| {
        let steps = if used[number] { fusion.steps(number, template) } else { Vec::new() };
        let launch = |step: Step| {
            let (op, kernel) = match step {
                Step::One(at) => {
                    let op = template.ops[at].clone();
                    let replaced = fusion.replaces(number);
                    let kernel = one(OpShape { template, op: &op }, replaced, fusion.shares_loss);
                    (op, kernel)
                }
                Step::Several(fused, op) => {
                    let kernel = several(fused, OpShape { template, op: &op });
                    (*op, kernel)
                }
            };
            match kernel {
                Some(kernel) => Ok(Launch { kernel, op }),
                None => Err(refused(template, &op, element(types.activation))),
            }
        };
        steps.into_iter().map(launch).collect::<Result<Vec<_>, _>>()
    };
    plan.templates.iter().enumerate().map(of).collect()
}

fn refused(
    template: &Template,
    op: &LocalOp,
    element: paceline_kernels::cuda::ElementType,
) -> ExecError {
    let (name, kind) = (&template.name, op.kind.name());
    let widths = { op.inputs.iter().chain(&op.outputs) }
        .map(|&operand| template.operands[usize::from(operand)].dims[1].to_string());
    let widths = widths.collect::<Vec<_>>().join(", ");
    let what = format!(
        "{name}: the operator {kind} ({:?}) in {element:?} on rows of {widths} elements on a GPU",
        op.pass
    );
    ExecError::Unsupported { what, works: WORKS }
}

/// Function that queues an operator.
struct Kernel<R>(R);

impl<R> Operator<Cuda> for Kernel<R>
where
    R: Fn(&mut Cuda, &Operands<'_>, Write) -> Result<(), Fault> + Send + Sync,
{
    fn workspace(&self, _: &OpShape<'_>, _: usize) -> usize {
        0
    }

    fn run(&self, cuda: &mut Cuda, on: &Operands<'_>, mode: Write) -> Result<(), Fault> {
        (self.0)(cuda, on, mode)
    }
}

/// Kernel that needs state of the device.
pub(super) fn kernel(
    run: impl Fn(&mut Cuda, &Operands<'_>, Write) -> Result<(), Fault> + Send + Sync + 'static,
) -> Bound {
    Some(Box::new(Kernel(run)))
}

/// Kernel that only launches.
pub(super) fn launch(
    run: impl Fn(&mut Gpu, &Operands<'_>, Write) -> Result<(), CudaError> + Send + Sync + 'static,
) -> Bound {
    kernel(move |cuda, on, mode| Ok(run(&mut cuda.gpu, on, mode)?))
}

/// Kernel of an operator without gradients.
pub(super) fn forward_only(pass: OpPass, kernel: Bound) -> Bound {
    kernel.filter(|_| pass == OpPass::Forward)
}

/// Kernel of several operators.
fn several(fused: Fused, shape: OpShape<'_>) -> Bound {
    match fused {
        Fused::Linear { bias, residual, gelu, rotation } => {
            linear::fused(bias, residual, gelu, rotation)
        }
        Fused::LinearInput => linear::through_gelu(),
        Fused::AddNorm { norm, eps } => norm::add_norm(norm, eps, shape),
        Fused::NormGradient { norm, added, weights } => norm::gradient(norm, added, weights, shape),
        Fused::Loss { scale, replaced } => loss::whole(scale as f32, replaced),
        Fused::Embedding => embedding::with_positions(),
        Fused::Attention { heads, seq, theta } => attention::gradient(heads, seq, Some(theta)),
    }
}

/// Kernel of one operator. If `replaced`, the gradient of logits has been computed with their loss; if
/// `shared`, ranks share the vocabulary.
fn one(shape: OpShape<'_>, replaced: bool, shared: bool) -> Bound {
    let (kind, pass) = (shape.op.kind, shape.op.pass);
    match kind {
        OpKind::Embedding => embedding::table(pass),
        OpKind::Position => embedding::position(pass),
        OpKind::Norm { norm, eps } => norm::bind(norm, eps as f32, pass, shape),
        OpKind::Linear { role: _ } => linear::bind(pass),
        OpKind::Bias => linear::bias(pass),
        OpKind::Rope { heads, theta, rotary } if rotary.is_plain() => {
            attention::rope(heads, theta, pass)
        }
        OpKind::Attention { heads, seq, scores } if scores.is_plain() => {
            attention::bind(heads, seq, pass)
        }
        OpKind::Activation { function } => {
            let function = match function {
                ActivationKind::Gelu => Function::Gelu,
                ActivationKind::Relu => Function::Relu,
                ActivationKind::SquaredRelu => Function::SquaredRelu,
                ActivationKind::GeluErf => return None,
            };
            activation::bind(function, pass)
        }
        OpKind::SwiGlu => activation::bind(Function::SwiGlu, pass),
        OpKind::GeGlu => activation::bind(Function::GeGlu, pass),
        OpKind::Add => activation::add(pass),
        OpKind::RowMax if shared => loss::row_max(pass),
        OpKind::SoftmaxStats if shared => loss::softmax_stats(pass),
        OpKind::CrossEntropy { scale } if shared => loss::sharded(scale as f32, pass),
        OpKind::CrossEntropy { scale } => loss::gradient(scale as f32, replaced, pass),
        OpKind::BlockSquares { parts, experts } => sums::block_squares(parts, experts, pass),
        OpKind::TensorSquares => sums::tensor_squares(pass),
        OpKind::Norm2 => sums::norm(pass),
        OpKind::Total => sums::total(pass),
        OpKind::Route(routing) if !routing.raw && !routing.best_of_group => {
            experts::route(routing, pass)
        }
        OpKind::Dispatch { experts, topk, regions } => {
            experts::dispatch((experts, topk, regions), pass, shape)
        }
        OpKind::ExpertLinear { experts, regions, role: _, rows: _ } => {
            experts::linear(experts, regions, pass)
        }
        OpKind::Combine { topk } => experts::combine(topk, pass, shape),
        OpKind::HeadNorm { heads, eps, norm: HeadNormKind::Head } => {
            heads::norm(heads, eps as f32, pass)
        }
        OpKind::LatentHeads(latent) if latent.rotary.is_plain() => heads::latent(latent, pass),
        OpKind::LatentValues(latent) => heads::values(latent, pass),
        OpKind::KeysValues { .. } => attention::keys_values(pass),
        OpKind::AttentionBlock { heads, queries, keys, step, scores }
            if queries == keys && scores.is_plain() =>
        {
            attention::block(heads, queries, step, pass)
        }
        OpKind::Rope { .. }
        | OpKind::Attention { .. }
        | OpKind::Temperature { .. }
        | OpKind::Gated { .. }
        | OpKind::Scale { .. }
        | OpKind::SoftCap { .. }
        | OpKind::Clamp { .. }
        | OpKind::RowScale { .. }
        | OpKind::Route(_)
        | OpKind::ExpertBias { .. }
        | OpKind::Return { .. }
        | OpKind::HeadNorm { .. }
        | OpKind::WholeSquares { .. }
        | OpKind::WholeNorm { .. }
        | OpKind::LatentHeads(_)
        | OpKind::RowMax
        | OpKind::SoftmaxStats
        | OpKind::AttentionBlock { .. }
        | OpKind::Concat { .. }
        | OpKind::Slice { .. }
        | OpKind::Conv { .. }
        | OpKind::BatchSums { .. }
        | OpKind::BatchNorm { .. }
        | OpKind::MaxPool { .. }
        | OpKind::AveragePool { .. }
        | OpKind::EmbeddingBag { .. }
        | OpKind::StepRows { .. }
        | OpKind::Interact { .. }
        | OpKind::BinaryCrossEntropy { .. }
        | OpKind::Compress(_)
        | OpKind::Outer(_) => None,
    }
}
