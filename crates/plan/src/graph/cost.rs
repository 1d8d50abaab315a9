//! Cost of an operator: floating-point operations and memory traffic, from shapes alone.

use super::attributes::{Heads, LinearRole, NormKind, Window};
use super::{LayerGraph, OpPass, Operator};
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

/// Class by which cost models tell operators apart, with the sizes that its cost depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CostClass {
    /// GEMMs.
    Product(Product),
    /// Scores, softmax and weighted values.
    Attention {
        /// Head counts.
        heads: Heads,
        /// Query tokens of one sequence.
        queries: u64,
        /// Key tokens of one sequence.
        keys: u64,
        /// True if the result is merged into that of other keys.
        merged: bool,
    },
    /// Statistics over each row.
    RowWise(RowWise),
    /// Each element on its own.
    ElementWise(ElementWise),
    /// Reads only some rows of its parameter.
    Lookup {
        /// Number of rows per row of the first input.
        rows: u64,
    },
    /// Moves rows or columns without arithmetic worth counting.
    Permute(Permute),
    /// Fewer results than inputs.
    Reduction,
}

/// Kinds of GEMM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Product {
    /// One GEMM.
    Dense {
        /// Role of the matrix in its layer.
        role: LinearRole,
    },
    /// One GEMM per expert, each on its own tokens.
    Grouped {
        /// Role of the matrix in the expert.
        role: LinearRole,
        /// Number of local experts.
        experts: u64,
        /// Number of token regions: one for each source rank.
        regions: u64,
        /// Number of tokens under balanced load.
        rows: u64,
    },
    /// One GEMM whose rows are window positions.
    Windows(Window),
    /// Per sample the dot products of all pairs of vectors.
    Pairs {
        /// Number of vectors.
        vectors: u64,
        /// Width of a vector.
        width: u64,
    },
}

/// Kinds of row-wise operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowWise {
    /// Rows are read completely before they are written.
    Norm(NormKind),
    /// Columns are; sums over the batch are operators of their own.
    BatchNorm,
    /// Intermediate results of the loss, which software other than ours computes with it.
    LossPart,
    /// The loss of logits.
    Loss,
    /// Rows that fit in registers.
    Short,
}

/// Kinds of element-wise operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementWise {
    /// Sum of an activation and a bias.
    Bias,
    /// Sum of an activation and a row by position, where dropout follows.
    Position,
    /// Sum of activations, or a few operations on them.
    Sum,
    /// Rotation by position.
    Rotation,
    /// An activation function.
    Function,
    /// An activation function of one half of a row times the other half.
    Gated,
}

/// Kinds of permutations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permute {
    /// Columns are copied.
    Copy,
    /// Tokens into the order of their experts.
    ToExperts,
    /// Tokens back, weighted and summed.
    FromExperts,
}

impl LayerGraph {
    /// GEMM operations of an operator on logical shapes. Attention counts full squares, like
    /// Narayanan et al. (arXiv 2104.04473, eq. 3), without halving for causality.
    pub fn matrix_flops(&self, op: &Operator) -> Flops {
        let first = op.inputs.first().map_or([0, 0], |&t| self.tensor(t).dims);
        let weight = op.params.first().map_or([0, 0], |&p| self.param(p).dims);
        matrix_flops(op.kind.cost_class(), op.pass, first[0], weight)
    }
}

impl Template {
    /// Cost of one operator of the template.
    pub fn cost(&self, op: &LocalOp) -> Cost {
        let dims = |i: &u16| self.operands[usize::from(*i)].dims;
        let first = op.inputs.first().map_or([0, 0], dims);
        let weight = op.params.first().map_or([0, 0], dims);
        let row = op.kind.row();
        let matrix = matrix_flops(row.class, op.pass, first[0], weight);
        let all = op.inputs.iter().chain(&op.params).chain(&op.outputs);
        let bytes = all.map(|&i| {
            let operand = &self.operands[usize::from(i)];
            let size = operand.dtype.size();
            let once = match row.class {
                // Only the occupied token rows count.
                CostClass::Product(Product::Grouped { rows, .. })
                    if operand.dims[0] == first[0] =>
                {
                    rows.min(first[0]) * operand.dims[1] * size
                }
                _ => operand.elements() * size,
            };
            let times = match operand.access {
                Access::Read | Access::Write => 1,
                Access::Accumulate | Access::Add => 2,
            };
            match row.class {
                // A lookup touches only the rows it reads, not the whole table.
                CostClass::Lookup { rows } if op.params.contains(&i) => {
                    first[0] * rows * operand.dims[1] * size * times
                }
                CostClass::ElementWise(ElementWise::Position) if op.params.contains(&i) => {
                    once.min(first[0] * 4)
                }
                _ => once * times,
            }
        });
        let bytes = Bytes(bytes.sum());
        let elements: u64 = op.outputs.iter().map(|i| dims(i)[0] * dims(i)[1]).sum::<u64>()
            + op.inputs.iter().map(|i| dims(i)[0] * dims(i)[1]).sum::<u64>();
        Cost { matrix, vector: Flops(elements as f64 * row.intensity), bytes }
    }
}

/// 2·m·n·k for each GEMM.
fn matrix_flops(class: CostClass, pass: OpPass, tokens: u64, weight: [u64; 2]) -> Flops {
    let tokens = tokens as f64;
    let times = if pass == OpPass::BackwardInput { 2.0 } else { 1.0 };
    let [rows, columns] = weight.map(|side| side as f64);
    Flops(match class {
        CostClass::Product(Product::Dense { .. }) => 2.0 * tokens * rows * columns,
        CostClass::Product(Product::Windows(window)) => {
            2.0 * (tokens * window.places() as f64) * rows * columns
        }
        CostClass::Product(Product::Grouped { experts, rows: tokens, .. }) => {
            2.0 * tokens as f64 * (rows / experts.max(1) as f64) * columns
        }
        // All pairs of vectors, although half of the products are discarded.
        CostClass::Product(Product::Pairs { vectors, width }) => {
            let vectors = vectors as f64;
            times * (2.0 * tokens * vectors * vectors * width as f64)
        }
        // The gradient of scores of no key is a sum over rows.
        CostClass::Attention { .. } if pass == OpPass::BackwardWeight => 0.0,
        CostClass::Attention { heads, keys, .. } => {
            let width = (heads.heads * heads.head_dim) as f64;
            times * (4.0 * tokens * keys as f64 * width)
        }
        CostClass::RowWise(_)
        | CostClass::ElementWise(_)
        | CostClass::Lookup { .. }
        | CostClass::Permute(_)
        | CostClass::Reduction => 0.0,
    })
}
