//! Kernels of the CPU, by operator and pass.

use super::operands::Operands;
use super::ops::{
    activation, attention, clicks, compressed, concat, embedding, experts, heads, images, linear,
    loss, norm, scaling, sums,
};
use super::{Cpu, step};
use crate::device::{OpShape, Operator};
use crate::error::Fault;
use crate::types::{Types, typed};
use paceline_kernels::{Element, Write, activation as kernels};
use paceline_plan::graph::{GateKind, OpKind, OpPass};

/// An operator bound to its kernel.
pub(crate) type Bound = Box<dyn Operator<Cpu>>;

/// Kernel of an operator's pass; `None` if it cannot be run. Anything in a plan without one is
/// refused before the start.
pub(crate) fn bind(kind: OpKind, pass: OpPass, types: Types) -> Option<Bound> {
    typed!(types, <T, G> bind_as::<T, G>(kind, pass))
}

fn bind_as<T: Element, G: Element>(kind: OpKind, pass: OpPass) -> Option<Bound> {
    match kind {
        OpKind::Embedding => embedding::table::<T, G>(pass),
        OpKind::Position => embedding::position::<T, G>(pass),
        OpKind::Norm { norm, eps } => norm::bind::<T, G>(norm, eps as f32, pass),
        OpKind::Linear { role: _ } => linear::bind::<T, G>(pass),
        OpKind::Bias => linear::bias::<T, G>(pass),
        OpKind::Rope { heads, theta, rotary } => attention::rope::<T>(heads, theta, rotary, pass),
        OpKind::Attention { heads, seq, scores } => {
            attention::whole::<T, G>(heads, seq, scores, pass)
        }
        OpKind::Temperature { heads, floor, slope } => {
            scaling::temperature::<T>(heads, (floor, slope), pass)
        }
        OpKind::KeysValues { heads } => attention::keys_values::<T>(heads, pass),
        OpKind::AttentionBlock { heads, queries, keys, step, scores } => match queries == keys {
            true => attention::block::<T>(heads, queries, step, scores, pass),
            false => None,
        },
        OpKind::Activation { function } => activation::bind::<T>(function, pass),
        OpKind::SwiGlu => {
            activation::gated(kernels::swiglu_forward::<T>, kernels::swiglu_input_gradient, pass)
        }
        OpKind::GeGlu => {
            activation::gated(kernels::geglu_forward::<T>, kernels::geglu_input_gradient, pass)
        }
        OpKind::Gated { gate: GateKind::GeluErf } => activation::gated(
            kernels::geglu_erf_forward::<T>,
            kernels::geglu_erf_input_gradient,
            pass,
        ),
        OpKind::Gated { gate: GateKind::ClampedSwiGlu } => activation::gated(
            kernels::clamped_swiglu_forward::<T>,
            kernels::clamped_swiglu_input_gradient,
            pass,
        ),
        OpKind::Scale { factor } => scaling::scale::<T>(factor as f32, pass),
        OpKind::SoftCap { cap } => scaling::softcap::<T>(cap as f32, pass),
        OpKind::Clamp { limit } => scaling::clamp::<T>(limit as f32, pass),
        // Logits are activations; weights of experts are always single precision.
        OpKind::RowScale { sigmoid: true } => scaling::rows::<T, T>(true, pass),
        OpKind::RowScale { sigmoid: false } => scaling::rows::<T, f32>(false, pass),
        OpKind::Add => activation::add::<T>(pass),
        OpKind::Concat { parts } => concat::concat::<T>(parts, pass),
        OpKind::Slice { first, width } => concat::slice::<T>(first, width, pass),
        OpKind::RowMax => loss::row_max::<T>(pass),
        OpKind::SoftmaxStats => loss::softmax_stats::<T>(pass),
        OpKind::CrossEntropy { scale } => loss::cross_entropy::<T>(scale as f32, pass),
        OpKind::BinaryCrossEntropy { scale } => loss::binary::<T>(scale as f32, pass),
        OpKind::Conv { window } => images::conv::<T, G>(window, pass),
        OpKind::BatchSums { channels } => images::batch_sums::<T>(channels as usize, pass),
        OpKind::BatchNorm { channels, eps, pixels, over, share } => {
            let norm = images::BatchNorm::new(channels, eps, pixels, over, share);
            images::batch_norm::<T, G>(norm, pass)
        }
        OpKind::MaxPool { window } => images::max_pool::<T>(window, pass),
        OpKind::AveragePool { channels } => images::average_pool::<T>(channels as usize, pass),
        OpKind::EmbeddingBag { tables, lookups, width } => {
            clicks::embedding_bag::<T, G>(clicks::lookups(tables, lookups, width), pass)
        }
        OpKind::StepRows { tables, lookups, width } => {
            clicks::step_rows::<T>(clicks::lookups(tables, lookups, width), pass)
        }
        OpKind::Interact { tables, width: _, parts } => {
            clicks::interact::<T>(tables as usize, parts, pass)
        }
        OpKind::Route(routing) => experts::route::<T, G>(routing, pass),
        OpKind::Dispatch { experts, topk, regions } => {
            let [experts, topk, regions] = [experts, topk, regions].map(|n| n as usize);
            experts::dispatch::<T>(experts, topk, regions, pass)
        }
        OpKind::ExpertLinear { experts, regions, role: _, rows: _ } => {
            experts::linear::<T, G>(experts as usize, regions as usize, pass)
        }
        OpKind::ExpertBias { experts: _, regions, parts } => {
            experts::bias::<T, G>(regions as usize, parts, pass)
        }
        OpKind::Combine { topk } => experts::combine::<T>(topk as usize, pass),
        OpKind::Return { topk } => experts::give_back::<T>(topk as usize, pass),
        OpKind::HeadNorm { heads, eps, norm } => heads::norm::<T, G>(heads, eps as f32, norm, pass),
        OpKind::WholeSquares { heads } => heads::whole_squares::<T>(heads, pass),
        OpKind::WholeNorm { heads, queries, keys, eps } => {
            heads::whole_norm::<T, G>(heads, [queries, keys], eps as f32, pass)
        }
        OpKind::LatentHeads(heads) => heads::latent::<T>(heads, pass),
        OpKind::LatentValues(heads) => heads::values::<T>(heads, pass),
        OpKind::BlockSquares { parts, experts } => sums::block_squares::<G>(parts, experts, pass),
        OpKind::TensorSquares => sums::tensor_squares(pass),
        OpKind::Norm2 => sums::norm(pass),
        OpKind::Total => sums::total(pass),
        OpKind::Compress(op) => forward_only(
            pass,
            plain(move |cpu, on, _| {
                compressed::run::<G>(&cpu.pool, op, on);
            }),
        ),
        OpKind::Outer(op) => forward_only(
            pass,
            plain(move |cpu, on, _| {
                step::outer(&cpu.pool, op, cpu.pass.share, on);
            }),
        ),
    }
}

/// Kernel of an operator without gradients.
pub(super) fn forward_only(pass: OpPass, forward: Bound) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(forward),
        OpPass::BackwardInput | OpPass::BackwardWeight => None,
    }
}

/// Function that computes an operator, and one for the workspace that it needs.
struct Kernel<N, R> {
    need: N,
    run: R,
}

impl<N, R> Operator<Cpu> for Kernel<N, R>
where
    N: Fn(&OpShape<'_>, usize) -> usize + Send + Sync,
    R: Fn(&mut Cpu, &Operands<'_>, Write) -> Result<(), Fault> + Send + Sync,
{
    fn workspace(&self, shape: &OpShape<'_>, threads: usize) -> usize {
        (self.need)(shape, threads)
    }

    fn run(&self, cpu: &mut Cpu, on: &Operands<'_>, mode: Write) -> Result<(), Fault> {
        (self.run)(cpu, on, mode)
    }
}

/// Kernel that needs no workspace.
pub(super) fn plain(run: impl Fn(&mut Cpu, &Operands<'_>, Write) + Send + Sync + 'static) -> Bound {
    with_workspace(|_, _| 0, run)
}

/// Kernel that needs as many elements of workspace as `need` says.
pub(super) fn with_workspace(
    need: impl Fn(&OpShape<'_>, usize) -> usize + Send + Sync + 'static,
    run: impl Fn(&mut Cpu, &Operands<'_>, Write) + Send + Sync + 'static,
) -> Bound {
    let run = move |cpu: &mut Cpu, on: &Operands<'_>, mode: Write| {
        run(cpu, on, mode);
        Ok(())
    };
    Box::new(Kernel { need, run })
}

/// Kernel that may fail.
pub(super) fn fallible(
    run: impl Fn(&mut Cpu, &Operands<'_>, Write) -> Result<(), Fault> + Send + Sync + 'static,
) -> Bound {
    Box::new(Kernel { need: |_: &OpShape<'_>, _: usize| 0, run })
}
