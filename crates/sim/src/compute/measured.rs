//! Keys into the table of measured kernels: kernel name, dtype and shape of an operator.

use super::Roofline;
use paceline_plan::DType;
use paceline_plan::graph::{ActivationKind, NormKind, OpKind, OpPass};
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
    let (shape, work) = match op.kind {
        OpKind::Linear { .. } => {
            let [outputs, inputs] = op.params.first().map_or([1, 1], |i| operand(i).dims);
            (vec![first[0], inputs, outputs], cost.matrix.0)
        }
        OpKind::Conv { window } => {
            let [filters, seen] = op.params.first().map_or([1, 1], |i| operand(i).dims);
            (vec![first[0].saturating_mul(window.places()), seen, filters], cost.matrix.0)
        }
        // As fast as the GEMM of one expert.
        OpKind::ExpertLinear { experts, rows, .. } => {
            let [outputs, inputs] = op.params.first().map_or([1, 1], |i| operand(i).dims);
            let experts = experts.max(1);
            (vec![rows.div_ceil(experts), inputs, outputs / experts], cost.matrix.0)
        }
        OpKind::Attention { heads, seq } => {
            let sequences = first[0] / seq.max(1);
            (vec![sequences.saturating_mul(heads.heads), seq, heads.head_dim], cost.matrix.0)
        }
        OpKind::AttentionBlock { heads, queries, keys, step: _ } => {
            let sequences = first[0] / queries.max(1);
            (vec![sequences.saturating_mul(heads.heads), keys, heads.head_dim], cost.matrix.0)
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
        | OpKind::Interact { .. }
        | OpKind::BinaryCrossEntropy { .. }
        | OpKind::BatchSums { .. }
        | OpKind::BatchNorm { .. }
        | OpKind::MaxPool { .. }
        | OpKind::AveragePool { .. }
        | OpKind::Route(_)
        | OpKind::HeadNorm { .. }
        | OpKind::LatentHeads(_)
        | OpKind::LatentValues(_)
        | OpKind::Dispatch { .. }
        | OpKind::Combine { .. }
        | OpKind::BlockSquares { .. }
        | OpKind::TensorSquares
        | OpKind::Norm2
        | OpKind::Total
        | OpKind::Compress(_)
        | OpKind::Outer(_) => of_memory(),
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
    if let OpKind::Norm { norm, .. } = kind {
        return match norm {
            NormKind::Layer => "norm.layer",
            NormKind::Rms => "norm.rms",
        };
    }
    if let OpKind::Activation { function } = kind {
        return match function {
            ActivationKind::Gelu => "gelu",
            ActivationKind::Relu => "relu",
            ActivationKind::SquaredRelu => "squared_relu",
        };
    }
    let product = matches!(kind, OpKind::Linear { .. } | OpKind::ExpertLinear { .. });
    if product { "linear" } else { kind.name() }
}

impl Roofline<'_> {
    /// Roofline time of a single operator, for use when the table lacks it.
    pub(crate) fn unmeasured(&self, template: &Template, op: &LocalOp) -> Seconds {
        Seconds(self.operator(template, op).device)
    }
}
