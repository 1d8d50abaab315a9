//! Keys into the table of measured kernels: kernel name, dtype and shape of an operator.

use super::Roofline;
use paceline_plan::DType;
use paceline_plan::graph::{CostClass, NormKind, OpKind, OpPass, Product, RowWise};
use paceline_plan::program::{AccumulateMode, LocalOp, StepPhase, Template};
use paceline_plan::strategy::OptimizerKind;
use paceline_plan::units::Seconds;

/// One use of a kernel: its name, shape and amount of work.
///
/// Calibration and table lookup both build their keys here, so the keys agree.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelUse {
    /// Operator and pass, for example `linear.forward` or `norm.layer.weight`.
    pub name: String,
    /// Element dtype.
    pub dtype: DType,
    /// Dimensions that determine the time per unit of work. GEMM: tokens, inputs, outputs.
    /// Attention: heads over all sequences, tokens of one sequence, head size. Everything else is
    /// memory-bound: rows and width of its largest operand.
    pub shape: Vec<u64>,
    /// Operations of a GEMM or of attention, bytes of everything else.
    pub work: f64,
}

/// Returns the kernel that an operator of a template runs.
pub fn kernel(template: &Template, op: &LocalOp) -> KernelUse {
    let operand = |&i: &u16| &template.operands[usize::from(i)];
    let operands = || op.inputs.iter().chain(&op.params).chain(&op.outputs).map(operand);
    let cost = template.cost(op);
    let first = op.inputs.first().map_or([1, 1], |i| operand(i).dims);
    let of_memory = || {
        let largest = operands().max_by_key(|operand| operand.elements());
        (largest.map_or_else(|| vec![1, 1], |operand| operand.dims.to_vec()), cost.bytes.as_f64())
    };
    let weight = op.params.first().map_or([1, 1], |i| operand(i).dims);
    let (shape, work) = match op.kind.cost_class() {
        CostClass::Product(Product::Dense { .. }) => {
            (vec![first[0], weight[1], weight[0]], cost.matrix.0)
        }
        CostClass::Product(Product::Windows(window)) => {
            (vec![first[0].saturating_mul(window.places()), weight[1], weight[0]], cost.matrix.0)
        }
        // As fast as the GEMM of one expert.
        CostClass::Product(Product::Grouped { experts, rows, .. }) => {
            let experts = experts.max(1);
            (vec![rows.div_ceil(experts), weight[1], weight[0] / experts], cost.matrix.0)
        }
        CostClass::Attention { .. } if op.pass == OpPass::BackwardWeight => of_memory(),
        CostClass::Attention { heads, queries, keys, .. } => {
            let sequences = first[0] / queries.max(1);
            (vec![sequences.saturating_mul(heads.heads), keys, heads.head_dim], cost.matrix.0)
        }
        CostClass::Product(Product::Pairs { .. })
        | CostClass::RowWise(_)
        | CostClass::ElementWise(_)
        | CostClass::Lookup { .. }
        | CostClass::Permute(_)
        | CostClass::Reduction => of_memory(),
    };
    let part = match op.pass {
        OpPass::Forward => "forward",
        OpPass::BackwardInput => "input",
        OpPass::BackwardWeight => "weight",
    };
    let float = operands().map(|operand| operand.dtype).find(|&dtype| dtype != DType::U32);
    KernelUse {
        name: format!("{}.{part}", name(&op.kind)),
        dtype: float.unwrap_or(DType::F32),
        shape,
        work: work.max(1.0),
    }
}

/// Returns the kernel of an optimizer step phase on `elements` elements.
pub fn step_kernel(
    optimizer: OptimizerKind,
    phase: StepPhase,
    dtype: DType,
    elements: u64,
) -> KernelUse {
    let (name, work) = (format!("{}.{optimizer}", phase.word()), elements.max(1) as f64);
    KernelUse { name, dtype, shape: vec![elements], work }
}

/// Returns the kernel of a sum or copy of `elements` elements.
pub fn accumulate_kernel(mode: AccumulateMode, dtype: DType, elements: u64) -> KernelUse {
    let name = match mode {
        AccumulateMode::Add => "accumulate.add",
        AccumulateMode::Move => "accumulate.move",
    };
    KernelUse { name: name.into(), dtype, shape: vec![elements], work: elements.max(1) as f64 }
}

/// Kernel name: the operator's name, unless operators share a kernel or one operator has several.
fn name(kind: &OpKind) -> &'static str {
    match kind.cost_class() {
        CostClass::RowWise(RowWise::Norm(NormKind::Layer)) => "norm.layer",
        CostClass::RowWise(RowWise::Norm(NormKind::Rms)) => "norm.rms",
        CostClass::Product(Product::Dense { .. } | Product::Grouped { .. }) => "linear",
        CostClass::Product(Product::Windows(_) | Product::Pairs { .. })
        | CostClass::RowWise(_)
        | CostClass::Attention { .. }
        | CostClass::ElementWise(_)
        | CostClass::Lookup { .. }
        | CostClass::Permute(_)
        | CostClass::Reduction => kind.name(),
    }
}

impl Roofline<'_> {
    /// Roofline time of a single operator, for use when the table lacks it.
    pub(crate) fn unmeasured(&self, template: &Template, op: &LocalOp) -> Seconds {
        Seconds(self.operator(template, op).device)
    }
}
