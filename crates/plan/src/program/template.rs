//! Templates of segments: runs of operators that layers share.

use super::View;
use crate::dtype::DType;
use crate::graph::{OpKind, OpPass};
use crate::ids::LayerId;
use crate::schedule::Pass;
use serde::{Deserialize, Serialize};

/// Pass that a compute op belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ComputePass {
    /// Forward.
    Forward,
    /// Input and weight gradients together.
    Backward,
    /// Input gradients only.
    BackwardInput,
    /// Weight gradients only.
    BackwardWeight,
    /// Forward again, because its results were not saved.
    Recompute,
    /// Optimizer step and its surrounding ops.
    Update,
}

impl From<Pass> for ComputePass {
    fn from(pass: Pass) -> Self {
        match pass {
            Pass::Forward => Self::Forward,
            Pass::Backward => Self::Backward,
            Pass::BackwardInput => Self::BackwardInput,
            Pass::BackwardWeight => Self::BackwardWeight,
        }
    }
}

impl ComputePass {
    /// One letter (`F B I W R U`), as in the schedule's notation.
    pub const fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::BackwardInput => 'I',
            Self::BackwardWeight => 'W',
            Self::Recompute => 'R',
            Self::Update => 'U',
        }
    }
}

/// Access of a segment to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Reads the previous value.
    Read,
    /// Overwrites the previous value.
    Write,
    /// Adds to the value; a *fresh* compute op overwrites it instead.
    Accumulate,
    /// Adds to the value, even if fresh: an earlier op has started the sum.
    Add,
}

/// One operand of a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Local rows and width.
    pub dims: [u64; 2],
    /// Element type.
    pub dtype: DType,
    /// Access of the template to it.
    pub access: Access,
}

impl Operand {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.dims[0] * self.dims[1]
    }
}

/// An operator on operands of its template, with one rank's shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalOp {
    /// Operator with its local sizes, e.g. head counts.
    pub kind: OpKind,
    /// Forward, input gradient or weight gradient.
    pub pass: OpPass,
    /// Operands it reads, in the operator's order.
    pub inputs: Vec<u16>,
    /// Parameters it reads, or whose gradients it adds to.
    pub params: Vec<u16>,
    /// Operands it writes.
    pub outputs: Vec<u16>,
}

impl LocalOp {
    /// Returns true if its gradients are added to the previous value even in a fresh segment.
    pub fn adds(&self, template: &Template) -> bool {
        let adds = |&i: &u16| template.operands[usize::from(i)].access == Access::Add;
        self.pass == OpPass::BackwardWeight && self.params.iter().any(adds)
    }
}

/// Communication-free operator sequence, shared by all layers of equal shape: the unit of
/// execution, costing and tracing.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    /// Name for display and traces: `F.block.0`.
    pub name: String,
    /// Pass that it belongs to.
    pub pass: ComputePass,
    /// Its operands.
    pub operands: Vec<Operand>,
    /// Its operators, in order.
    pub ops: Vec<LocalOp>,
}

/// A template bound to one layer's buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index in [`Plan::templates`](super::Plan::templates).
    pub template: u32,
    /// Layer that it belongs to, if any.
    pub layer: Option<LayerId>,
    /// One view per operand of the template.
    pub operands: Vec<View>,
}
