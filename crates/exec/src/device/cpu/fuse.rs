//! Operator fusion within a segment, so that intermediate results stay in the cache.
//!
//! The bits are those of the separate operators. An intermediate result that no other op reads is
//! not written at all. A template does not show the memory of its operands, so the programs that
//! use it are analysed ([`Uses`]).

use crate::device::uses::{Uses, other};
use paceline_plan::graph::{ActivationKind, NormKind, OpKind, OpPass};
use paceline_plan::program::{LocalOp, Template};
use std::ops::Range;

/// Unit of execution.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// One operator of the template, by index.
    One(usize),
    /// Several fused operators, on the operands of all in the order that [`FusedKernel`] gives.
    Several(FusedKernel, LocalOp),
}

/// Kernel that computes several operators at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum FusedKernel {
    /// A GEMM, then a bias, then the addition of a second input, each if present; and an activation
    /// of the result as a second output.
    Linear { bias: bool, residual: bool, activation: Option<ActivationKind> },
    /// Input gradient of a linear operator, then that of the preceding activation, whose input is
    /// the second one.
    LinearInput(ActivationKind),
    /// A sum and its normalisation: the outputs are the sum, then those of the normalisation.
    AddNorm { norm: NormKind, eps: f32 },
    /// Input gradient of a normalisation, and the addition of a last input to it.
    NormInputAdd { norm: NormKind },
    /// Maximum logit of each row and the sums that need it, while the row is in the cache; the
    /// inputs are logits and targets.
    RowMaxStats,
}

/// Steps of template `number`: its operators, fused if the uses of their operands allow it.
pub(crate) fn fuse(number: usize, template: &Template, uses: &Uses<'_>) -> Vec<Step> {
    let run = OpSequence { ops: &template.ops };
    let mut steps = Vec::new();
    let mut at = 0;
    while at < template.ops.len() {
        // The longest allowed candidate; the remaining operators may fuse again after it.
        let found = run
            .from(at)
            .into_iter()
            .rev()
            .find(|f| uses.allow(number, template, &f.op, &f.skipped));
        match found {
            Some(FusionCandidate { kernel, op, before, count, .. }) => {
                steps.extend(before.map(Step::One));
                steps.push(Step::Several(kernel, op));
                at += count;
            }
            None => {
                steps.push(Step::One(at));
                at += 1;
            }
        }
    }
    steps
}

/// Operators that could be fused.
struct FusionCandidate {
    kernel: FusedKernel,
    op: LocalOp,
    /// Operators among them that run separately, first.
    before: Range<usize>,
    /// Total number of operators.
    count: usize,
    /// Operands that would not be written.
    skipped: Vec<u16>,
}

/// Operators of a template.
struct OpSequence<'a> {
    ops: &'a [LocalOp],
}

impl OpSequence<'_> {
    /// Fusion candidates starting at an operator, shorter before longer.
    fn from(&self, at: usize) -> Vec<FusionCandidate> {
        use OpPass::{BackwardInput, BackwardWeight, Forward};
        let of = |op: &LocalOp| (op.kind, op.pass);
        match (of(&self.ops[at]), self.ops.get(at + 1).map(of), self.ops.get(at + 2).map(of)) {
            ((OpKind::Linear { .. }, Forward), ..) => self.linear(at),
            (
                (OpKind::Linear { .. }, BackwardInput),
                Some((OpKind::Activation { function }, BackwardInput)),
                _,
            ) => self.through(at, at + 1, function),
            (
                (OpKind::Linear { .. }, BackwardInput),
                Some((OpKind::Linear { .. }, BackwardWeight)),
                Some((OpKind::Activation { function }, BackwardInput)),
            ) => self.through(at, at + 2, function),
            ((OpKind::Add, Forward), Some((OpKind::Norm { norm, eps }, Forward)), _) => {
                let eps = eps as f32;
                let (mut op, norms) = (self.ops[at].clone(), &self.ops[at + 1]);
                if norms.inputs[0] != op.outputs[0] {
                    return Vec::new();
                }
                op.params.clone_from(&norms.params);
                op.outputs.extend(&norms.outputs);
                vec![found(FusedKernel::AddNorm { norm, eps }, op, 2, Vec::new())]
            }
            ((OpKind::Norm { norm, .. }, BackwardInput), Some((OpKind::Add, Forward)), _) => {
                let mut op = self.ops[at].clone();
                let skipped = vec![op.outputs[0]];
                match other(&self.ops[at + 1], skipped[0]) {
                    Some(other) => {
                        op.inputs.push(other);
                        op.outputs.clone_from(&self.ops[at + 1].outputs);
                        vec![found(FusedKernel::NormInputAdd { norm }, op, 2, skipped)]
                    }
                    None => Vec::new(),
                }
            }
            ((OpKind::RowMax, Forward), Some((OpKind::SoftmaxStats, Forward)), _) => {
                let (mut op, stats) = (self.ops[at].clone(), &self.ops[at + 1]);
                if stats.inputs[..2] != [op.inputs[0], op.outputs[0]] {
                    return Vec::new();
                }
                op.inputs.push(stats.inputs[2]);
                op.outputs.extend(&stats.outputs);
                vec![found(FusedKernel::RowMaxStats, op, 2, Vec::new())]
            }
            _ => Vec::new(),
        }
    }

    /// Input gradient of a linear operator and that of the preceding activation. A weight gradient
    /// between them runs first, since they are independent of each other.
    fn through(&self, at: usize, last: usize, function: ActivationKind) -> Vec<FusionCandidate> {
        let (mut op, behind) = (self.ops[at].clone(), &self.ops[last]);
        let skipped = vec![op.outputs[0]];
        if behind.inputs[0] != skipped[0] {
            return Vec::new();
        }
        op.inputs.push(behind.inputs[1]);
        op.outputs.clone_from(&behind.outputs);
        let (kernel, count) = (FusedKernel::LinearInput(function), last + 1 - at);
        vec![FusionCandidate { kernel, op, before: at + 1..last, count, skipped }]
    }

    /// Fusion candidates that start with a GEMM.
    fn linear(&self, at: usize) -> Vec<FusionCandidate> {
        let mut all = Vec::new();
        let mut op = self.ops[at].clone();
        let mut skipped = Vec::new();
        let (mut bias, mut residual) = (false, false);
        for (count, next) in (2..).zip(self.ops.iter().skip(at + 1)) {
            let result = op.outputs[0];
            let activation = match (next.kind, next.pass) {
                (OpKind::Bias, OpPass::Forward)
                    if !bias && !residual && next.inputs[0] == result =>
                {
                    op.params.push(next.params[0]);
                    bias = true;
                    None
                }
                (OpKind::Add, OpPass::Forward) if !residual => match other(next, result) {
                    Some(other) => {
                        op.inputs.push(other);
                        residual = true;
                        None
                    }
                    None => break,
                },
                (OpKind::Activation { function }, OpPass::Forward) if next.inputs[0] == result => {
                    Some(function)
                }
                _ => break,
            };
            if activation.is_some() {
                op.outputs.push(next.outputs[0]);
            } else {
                skipped.push(result);
                op.outputs.clone_from(&next.outputs);
            }
            let kernel = FusedKernel::Linear { bias, residual, activation };
            all.push(found(kernel, op.clone(), count, skipped.clone()));
            if activation.is_some() {
                break;
            }
        }
        all
    }
}

fn found(kernel: FusedKernel, op: LocalOp, count: usize, skipped: Vec<u16>) -> FusionCandidate {
    FusionCandidate { kernel, op, before: 0..0, count, skipped }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::device::cpu::Cpu;
    use crate::run::check;
    use paceline_plan::graph::OpKind;
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::program::Access;
    use paceline_plan::strategy::Strategy;

    /// Fused kernels of every template, by its name.
    fn joined(model: &str, strategy: Strategy) -> Vec<(String, Vec<FusedKernel>)> {
        let model = built_in::get(model).expect("a built-in model").expect("a sound one");
        let plan = lower(&model, &strategy).expect("a sound strategy");
        let steps = check::check::<Cpu>(&plan).expect("a plan that runs").steps;
        let several = |step: &Step| match step {
            Step::One(_) => None,
            Step::Several(joined, _) => Some(*joined),
        };
        let names = plan.templates.iter().map(|template| template.name.clone());
        names.zip(steps.iter().map(|steps| steps.iter().filter_map(several).collect())).collect()
    }

    fn of(all: &[(String, Vec<FusedKernel>)], name: &str) -> Vec<FusedKernel> {
        let found = all.iter().find(|(known, _)| known == name);
        found.unwrap_or_else(|| panic!("no {name} in {all:?}")).1.clone()
    }

    fn linear(residual: bool, activation: Option<ActivationKind>) -> FusedKernel {
        FusedKernel::Linear { bias: true, residual, activation }
    }

    #[test]
    fn one_rank_joins_what_follows_a_product() {
        let norm = FusedKernel::NormInputAdd { norm: NormKind::Layer };
        let all = joined("mini", Strategy { seq: 64, ..Strategy::default() });
        let up = linear(false, Some(ActivationKind::Gelu));
        let down = linear(true, None);
        assert_eq!(of(&all, "F.block.0"), [linear(false, None), down, up, down]);
        let through = FusedKernel::LinearInput(ActivationKind::Gelu);
        assert_eq!(of(&all, "B.block.0"), [through, norm, norm]);
        assert_eq!(of(&all, "F.head.0"), [FusedKernel::RowMaxStats]);
    }

    /// An all_reduce separates a sharded GEMM from its bias, so they are not adjacent.
    #[test]
    fn what_other_ranks_need_is_written() {
        let all = joined("mini", Strategy { tp: 2, seq: 64, ..Strategy::default() });
        let forward: Vec<FusedKernel> = all
            .iter()
            .filter(|(name, _)| name.starts_with("F.block"))
            .flat_map(|a| a.1.clone())
            .collect();
        let with_sum = |j: &FusedKernel| matches!(j, FusedKernel::Linear { residual: true, .. });
        assert!(!forward.iter().any(with_sum), "{forward:?}");
        let add_norm = |j: &FusedKernel| matches!(j, FusedKernel::AddNorm { .. });
        assert!(forward.iter().any(add_norm), "{forward:?}");
    }

    #[test]
    fn sixteen_bits_are_joined_as_single_precision_is() {
        let of = |dtype| joined("mini", Strategy { dtype, seq: 64, ..Strategy::default() });
        assert_eq!(of(paceline_plan::DType::Bf16), of(paceline_plan::DType::F32));
    }

    /// A value that another segment reads is still written.
    #[test]
    fn what_is_read_elsewhere_is_not_skipped() {
        let model = built_in::get("mini").expect("a built-in model").expect("a sound one");
        let strategy = Strategy { seq: 64, ..Strategy::default() };
        let mut plan = lower(&model, &strategy).expect("a sound strategy");
        let at = plan.templates.iter().position(|t| t.name == "F.block.0").expect("there");
        let is_linear = |op: &&LocalOp| matches!(op.kind, OpKind::Linear { .. });
        let product = plan.templates[at].ops.iter().find(is_linear);
        let product = product.expect("a block has products").outputs[0];
        let program = &mut plan.programs[0];
        let block = program.segments.iter().position(|s| s.template as usize == at).expect("used");
        let view = program.segments[block].operands[usize::from(product)];
        // Make it the head's first input.
        let head = plan.templates.iter().position(|t| t.name == "F.head.0").expect("there");
        let reads = |operand: &paceline_plan::program::Operand| operand.access == Access::Read;
        let input = plan.templates[head].operands.iter().position(reads).expect("it reads");
        let bound = program.segments.iter().position(|s| s.template as usize == head);
        program.segments[bound.expect("used")].operands[input] = view;
        let types = check::types(&plan).expect("known types");
        let kernels = Cpu::bind(&plan, types).expect("operators that run");
        let first = kernels.steps[at].iter().find(|step| matches!(step, Step::Several(..)));
        let Some(Step::Several(_, op)) = first else { panic!("nothing is joined") };
        assert!(!op.outputs.contains(&product) && kernels.steps[at].contains(&Step::One(1)));
    }
}
