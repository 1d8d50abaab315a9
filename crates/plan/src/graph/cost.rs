//! Cost of an operator: floating-point operations and memory traffic, from shapes alone.

use super::{LayerGraph, OpKind, OpPass, Operator};
use crate::program::{Access, LocalOp, Template};
use crate::units::{Bytes, Flops};

/// The work of one operator on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// GEMM operations (tensor cores).
    pub matrix: Flops,
    /// All other operations.
    pub vector: Flops,
    /// Bytes read and written, each operand once.
    pub bytes: Bytes,
}

impl LayerGraph {
    /// GEMM operations of an operator on logical shapes. Attention counts full squares, like
    /// Narayanan et al. (arXiv 2104.04473, eq. 3), without halving for causality.
    pub fn matrix_flops(&self, op: &Operator) -> Flops {
        let first = op.inputs.first().map_or([0, 0], |&t| self.tensor(t).dims);
        let weight = op.params.first().map_or([0, 0], |&p| self.param(p).dims);
        matrix_flops(&op.kind, op.pass, first[0], weight)
    }
}

impl Template {
    /// Cost of one operator of the template.
    pub fn cost(&self, op: &LocalOp) -> Cost {
        let dims = |i: &u16| self.operands[usize::from(*i)].dims;
        let first = op.inputs.first().map_or([0, 0], dims);
        let weight = op.params.first().map_or([0, 0], dims);
        let matrix = matrix_flops(&op.kind, op.pass, first[0], weight);
        let all = op.inputs.iter().chain(&op.params).chain(&op.outputs);
        let bytes = all.map(|&i| {
            let operand = &self.operands[usize::from(i)];
            let once = operand.elements() * operand.dtype.size();
            let once = match op.kind {
                // Only the occupied token rows count.
                OpKind::ExpertLinear { rows, .. } if operand.dims[0] == first[0] => {
                    rows.min(first[0]) * operand.dims[1] * operand.dtype.size()
                }
                _ => once,
            };
            let times = match operand.access {
                Access::Read | Access::Write => 1,
                Access::Accumulate | Access::Add => 2,
            };
            match op.kind {
                // A lookup touches only the rows it reads, not the whole table.
                OpKind::Embedding if op.params.contains(&i) => {
                    first[0] * operand.dims[1] * operand.dtype.size() * times
                }
                OpKind::EmbeddingBag { tables, lookups, .. }
                | OpKind::StepRows { tables, lookups, .. }
                    if op.params.contains(&i) =>
                {
                    first[0] * tables * lookups * operand.dims[1] * operand.dtype.size() * times
                }
                OpKind::Position if op.params.contains(&i) => once.min(first[0] * 4),
                _ => once * times,
            }
        });
        let bytes = Bytes(bytes.sum());
        let elements: u64 = op.outputs.iter().map(|i| dims(i)[0] * dims(i)[1]).sum::<u64>()
            + op.inputs.iter().map(|i| dims(i)[0] * dims(i)[1]).sum::<u64>();
        Cost { matrix, vector: Flops(elements as f64 * vector_intensity(&op.kind)), bytes }
    }
}

/// 2·m·n·k for each GEMM.
fn matrix_flops(kind: &OpKind, part: OpPass, tokens: u64, weight: [u64; 2]) -> Flops {
    let tokens = tokens as f64;
    match *kind {
        OpKind::Linear { .. } => Flops(2.0 * tokens * weight[0] as f64 * weight[1] as f64),
        OpKind::Conv { window } => {
            let places = tokens * window.places() as f64;
            Flops(2.0 * places * weight[0] as f64 * weight[1] as f64)
        }
        OpKind::Interact { tables, width, .. } => {
            // All pairs of vectors, although half of the products are discarded.
            let vectors = (tables + 1) as f64;
            let forward = 2.0 * tokens * vectors * vectors * width as f64;
            Flops(if part == OpPass::BackwardInput { 2.0 * forward } else { forward })
        }
        OpKind::ExpertLinear { experts, rows, .. } => {
            let outputs = weight[0] as f64 / experts.max(1) as f64;
            Flops(2.0 * rows as f64 * outputs * weight[1] as f64)
        }
        OpKind::Attention { heads, seq } => {
            let width = (heads.heads * heads.head_dim) as f64;
            let forward = 4.0 * tokens * seq as f64 * width;
            Flops(if part == OpPass::BackwardInput { 2.0 * forward } else { forward })
        }
        OpKind::AttentionBlock { heads, keys, .. } => {
            let width = (heads.heads * heads.head_dim) as f64;
            let forward = 4.0 * tokens * keys as f64 * width;
            Flops(if part == OpPass::BackwardInput { 2.0 * forward } else { forward })
        }
        OpKind::Embedding
        | OpKind::Position
        | OpKind::Norm { .. }
        | OpKind::Bias
        | OpKind::Rope { .. }
        | OpKind::KeysValues { .. }
        | OpKind::Activation { .. }
        | OpKind::SwiGlu
        | OpKind::Add
        | OpKind::RowMax
        | OpKind::SoftmaxStats
        | OpKind::CrossEntropy { .. }
        | OpKind::EmbeddingBag { .. }
        | OpKind::StepRows { .. }
        | OpKind::BinaryCrossEntropy { .. }
        | OpKind::BatchSums { .. }
        | OpKind::BatchNorm { .. }
        | OpKind::MaxPool { .. }
        | OpKind::AveragePool { .. }
        | OpKind::Route(_)
        | OpKind::Dispatch { .. }
        | OpKind::Combine { .. }
        | OpKind::HeadNorm { .. }
        | OpKind::LatentHeads(_)
        | OpKind::LatentValues(_)
        | OpKind::BlockSquares { .. }
        | OpKind::TensorSquares
        | OpKind::Norm2
        | OpKind::Total
        | OpKind::Compress(_)
        | OpKind::Outer(_) => Flops(0.0),
    }
}

/// Approximate operations per element of operators other than GEMMs; these are memory-bound.
fn vector_intensity(kind: &OpKind) -> f64 {
    match kind {
        OpKind::Linear { .. }
        | OpKind::ExpertLinear { .. }
        | OpKind::Conv { .. }
        | OpKind::Interact { .. }
        | OpKind::Embedding
        | OpKind::KeysValues { .. }
        | OpKind::Dispatch { .. }
        | OpKind::LatentValues(_)
        | OpKind::Combine { .. } => 0.0,
        OpKind::Position | OpKind::Bias | OpKind::Add | OpKind::RowMax => 1.0,
        OpKind::AveragePool { .. } | OpKind::EmbeddingBag { .. } | OpKind::StepRows { .. } => 1.0,
        OpKind::BinaryCrossEntropy { .. } => 10.0,
        OpKind::BatchSums { .. } | OpKind::BatchNorm { .. } => 4.0,
        // One maximum per pixel of the window.
        OpKind::MaxPool { window } => (window.kernel * window.kernel) as f64,
        OpKind::BlockSquares { .. } | OpKind::TensorSquares | OpKind::Norm2 | OpKind::Total => 2.0,
        OpKind::Rope { .. }
        | OpKind::Norm { .. }
        | OpKind::HeadNorm { .. }
        | OpKind::LatentHeads(_)
        | OpKind::Route(_) => 4.0,
        OpKind::SoftmaxStats | OpKind::CrossEntropy { .. } => 8.0,
        OpKind::Activation { .. } | OpKind::SwiGlu => 10.0,
        OpKind::Attention { .. } | OpKind::AttentionBlock { .. } => 0.0,
        OpKind::Compress(op) => op.intensity(),
        OpKind::Outer(_) => 2.0,
    }
}
