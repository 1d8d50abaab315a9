//! Operators of a template that one launch, or one call of a library, computes.
//!
//! Fusions follow from what cuBLASLt's epilogues and the kernels can do. An intermediate result that
//! no other op reads is not written, nor rounded to 16 bits.

use crate::device::uses::{Uses, other};
use paceline_plan::DType;
use paceline_plan::graph::{ActivationKind, Heads, NormKind, OpKind, OpPass};
use paceline_plan::ids::BufferId;
use paceline_plan::program::{LocalOp, Plan, Template};
use std::collections::BTreeSet;
use std::ops::Range;

/// Rotary embedding of a projection's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rotation {
    pub(super) heads: Heads,
    pub(super) theta: f64,
}

/// Kernel that computes several operators at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fused {
    /// A GEMM, then a bias, then the addition of a second input, each if present; then GELU as a
    /// second output, or a rotation in place.
    Linear { bias: bool, residual: bool, gelu: bool, rotation: Option<Rotation> },
    /// Input gradient of a linear operator, then GELU's, whose input is the second one.
    LinearInput,
    /// A sum and its norm: the outputs are the sum, then those of the norm.
    AddNorm { norm: NormKind, eps: f32 },
    /// Input gradient of a norm, the addition of a last input to it and the gradients of its
    /// weights, which are the last parameters, each of the latter two if present.
    NormGradient { norm: NormKind, added: bool, weights: bool },
    /// Loss with its statistics: inputs are logits and targets. The outputs are the losses of rows,
    /// where the maxima were to be, the statistics and the sum. If `replaced`, the logits become
    /// their gradient.
    Loss { scale: f64, replaced: bool },
    /// Rows of a table of words and one of positions.
    Embedding,
    /// Gradient of attention, rotated back in place.
    Attention { heads: Heads, seq: u64, theta: f64 },
}

/// Step of a template: one of its operators, or several.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    One(usize),
    Several(Fused, Box<LocalOp>),
}

/// Finds the fusions of a plan's templates.
pub(super) struct Fusion<'p> {
    uses: Uses<'p>,
    /// Templates whose loss replaces the logits by their gradient, and those that find it there.
    replaced: BTreeSet<usize>,
    /// True if the statistics of a loss are reduced over ranks, between its operators.
    pub(super) shares_loss: bool,
}

/// Operators that could be fused.
struct Candidate {
    kernel: Fused,
    op: LocalOp,
    /// Operators among them that run separately, first.
    before: Range<usize>,
    /// Total number of operators.
    count: usize,
    /// Operands that would not be written.
    skipped: Vec<u16>,
}

impl<'p> Fusion<'p> {
    pub(super) fn of(plan: &'p Plan) -> Self {
        let max = |op: &LocalOp| op.kind == OpKind::RowMax;
        let shares = |template: &Template| {
            let at = template.ops.iter().position(max);
            at.is_some_and(|at| OpSequence { template, replaced: false }.loss(at).is_none())
        };
        let shares_loss = plan.templates.iter().any(shares);
        Self { uses: Uses::of(plan), replaced: replaced(plan), shares_loss }
    }

    /// Returns true if the gradient of a template's logits is computed with their loss.
    pub(super) fn replaces(&self, number: usize) -> bool {
        self.replaced.contains(&number)
    }

    /// Steps of template `number`, fused as far as the uses of its operands allow.
    pub(super) fn steps(&self, number: usize, template: &Template) -> Vec<Step> {
        let run = OpSequence { template, replaced: self.replaces(number) };
        let mut steps = Vec::new();
        let mut at = 0;
        while at < template.ops.len() {
            // The longest allowed candidate; the remaining operators may fuse again after it.
            let allowed = |f: &Candidate| self.uses.allow(number, template, &f.op, &f.skipped);
            match run.from(at).into_iter().rev().find(allowed) {
                Some(Candidate { kernel, op, before, count, .. }) => {
                    steps.extend(before.map(Step::One));
                    steps.push(Step::Several(kernel, Box::new(op)));
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
}

/// Operators of a template.
struct OpSequence<'a> {
    template: &'a Template,
    replaced: bool,
}

fn found(kernel: Fused, op: LocalOp, count: usize, skipped: Vec<u16>) -> Candidate {
    Candidate { kernel, op, before: 0..0, count, skipped }
}

impl OpSequence<'_> {
    fn op(&self, at: usize) -> Option<&LocalOp> {
        self.template.ops.get(at)
    }

    /// Returns true if epilogues on rows of an operand keep to the library's alignment.
    fn is_aligned(&self, operand: u16) -> bool {
        let operand = &self.template.operands[usize::from(operand)];
        operand.dtype == DType::F32 || operand.dims[1].is_multiple_of(8)
    }

    /// Returns true if GELU may be fused: in f32 the library's is not exact enough.
    fn fuses_gelu(&self, operand: u16) -> bool {
        let dtype = self.template.operands[usize::from(operand)].dtype;
        dtype != DType::F32 && self.is_aligned(operand)
    }

    /// Fusion candidates starting at an operator, shorter before longer.
    fn from(&self, at: usize) -> Vec<Candidate> {
        use OpPass::{BackwardInput, Forward};
        let Some(op) = self.op(at) else { return Vec::new() };
        let found = match (op.kind, op.pass) {
            (OpKind::Linear { .. }, Forward) => return self.linear(at),
            (OpKind::Linear { .. }, BackwardInput) => self.through(at),
            (OpKind::Add, Forward) => self.add_norm(at),
            (OpKind::Norm { norm, .. }, BackwardInput) => return self.norm_gradient(at, norm),
            (OpKind::RowMax, Forward) => self.loss(at),
            (OpKind::Embedding, Forward) => self.embedding(at),
            (OpKind::Attention { heads, seq, scores }, BackwardInput) if scores.is_plain() => {
                self.attention(at, heads, seq)
            }
            _ => None,
        };
        found.into_iter().collect()
    }

    /// Fusion candidates that start with a GEMM.
    fn linear(&self, at: usize) -> Vec<Candidate> {
        let mut all = Vec::new();
        let mut op = self.template.ops[at].clone();
        let mut skipped = Vec::new();
        let (mut bias, mut residual, mut gelu, mut rotation) = (false, false, false, None);
        for (count, next) in (2..).zip(self.template.ops.iter().skip(at + 1)) {
            let result = op.outputs[0];
            match (next.kind, next.pass) {
                (OpKind::Bias, OpPass::Forward)
                    if !bias
                        && !residual
                        && next.inputs[0] == result
                        && self.is_aligned(result) =>
                {
                    op.params.push(next.params[0]);
                    bias = true;
                }
                (OpKind::Add, OpPass::Forward) if !residual => match other(next, result) {
                    Some(other) => {
                        op.inputs.push(other);
                        residual = true;
                    }
                    None => break,
                },
                (OpKind::Activation { function: ActivationKind::Gelu }, OpPass::Forward)
                    if next.inputs[0] == result && bias && !residual && self.fuses_gelu(result) =>
                {
                    gelu = true;
                }
                (OpKind::Rope { heads, theta, rotary }, OpPass::Forward)
                    if next.inputs[0] == result && !residual && rotary.is_plain() =>
                {
                    rotation = Some(Rotation { heads, theta });
                }
                _ => break,
            }
            if gelu {
                op.outputs.push(next.outputs[0]);
            } else {
                skipped.push(result);
                op.outputs.clone_from(&next.outputs);
            }
            let kernel = Fused::Linear { bias, residual, gelu, rotation };
            all.push(found(kernel, op.clone(), count, skipped.clone()));
            if gelu || rotation.is_some() {
                break;
            }
        }
        all
    }

    /// Input gradient of a linear operator and that of the preceding GELU. A weight gradient between
    /// them runs first, since they are independent of each other.
    fn through(&self, at: usize) -> Option<Candidate> {
        let mut op = self.op(at)?.clone();
        let next = self.op(at + 1)?;
        let between =
            matches!((next.kind, next.pass), (OpKind::Linear { .. }, OpPass::BackwardWeight));
        let last = at + 1 + usize::from(between);
        let behind = self.op(last)?;
        let gelu = OpKind::Activation { function: ActivationKind::Gelu };
        let skipped = vec![op.outputs[0]];
        let fits = (behind.kind, behind.pass) == (gelu, OpPass::BackwardInput)
            && behind.inputs[0] == skipped[0]
            && self.fuses_gelu(skipped[0]);
        if !fits {
            return None;
        }
        op.inputs.push(behind.inputs[1]);
        op.outputs.clone_from(&behind.outputs);
        let (kernel, count) = (Fused::LinearInput, last + 1 - at);
        Some(Candidate { kernel, op, before: at + 1..last, count, skipped })
    }

    fn add_norm(&self, at: usize) -> Option<Candidate> {
        let (mut op, next) = (self.op(at)?.clone(), self.op(at + 1)?);
        let (OpKind::Norm { norm, eps }, OpPass::Forward) = (next.kind, next.pass) else {
            return None;
        };
        if next.inputs[0] != op.outputs[0] {
            return None;
        }
        op.params.clone_from(&next.params);
        op.outputs.extend(&next.outputs);
        Some(found(Fused::AddNorm { norm, eps: eps as f32 }, op, 2, Vec::new()))
    }

    /// Gradients of a norm, with the sum that follows that of the input.
    fn norm_gradient(&self, at: usize, norm: NormKind) -> Vec<Candidate> {
        let mut all = Vec::new();
        let mut op = self.template.ops[at].clone();
        let inputs = op.inputs.clone();
        let mut skipped = Vec::new();
        let (mut added, mut weights) = (false, false);
        for (count, next) in (2..).zip(self.template.ops.iter().skip(at + 1)) {
            match (next.kind, next.pass) {
                (OpKind::Add, OpPass::Forward) if !added => match other(next, op.outputs[0]) {
                    Some(other) => {
                        skipped.push(op.outputs[0]);
                        op.inputs.push(other);
                        op.outputs.clone_from(&next.outputs);
                        added = true;
                    }
                    None => break,
                },
                (OpKind::Norm { .. }, OpPass::BackwardWeight)
                    if !weights && next.inputs == inputs =>
                {
                    op.params.extend(&next.params);
                    op.pass = OpPass::BackwardWeight;
                    weights = true;
                }
                _ => break,
            }
            let kernel = Fused::NormGradient { norm, added, weights };
            all.push(found(kernel, op.clone(), count, skipped.clone()));
        }
        all
    }

    fn loss(&self, at: usize) -> Option<Candidate> {
        let (max, stats, loss) = (self.op(at)?, self.op(at + 1)?, self.op(at + 2)?);
        let OpKind::CrossEntropy { scale } = loss.kind else { return None };
        let logits = max.inputs[0];
        let fits = (stats.kind, loss.pass) == (OpKind::SoftmaxStats, OpPass::Forward)
            && stats.inputs[..2] == [logits, max.outputs[0]]
            && loss.inputs[0] == stats.outputs[0];
        if !fits {
            return None;
        }
        let mut op = max.clone();
        op.inputs.push(stats.inputs[2]);
        op.outputs.extend([stats.outputs[0], loss.outputs[0]]);
        let kernel = Fused::Loss { scale, replaced: self.replaced };
        Some(found(kernel, op, 3, Vec::new()))
    }

    fn embedding(&self, at: usize) -> Option<Candidate> {
        let (mut op, next) = (self.op(at)?.clone(), self.op(at + 1)?);
        let skipped = vec![op.outputs[0]];
        if (next.kind, next.pass) != (OpKind::Position, OpPass::Forward)
            || next.inputs[0] != skipped[0]
        {
            return None;
        }
        op.params.extend(&next.params);
        op.outputs.clone_from(&next.outputs);
        Some(found(Fused::Embedding, op, 2, skipped))
    }

    fn attention(&self, at: usize, heads: Heads, seq: u64) -> Option<Candidate> {
        let (mut op, next) = (self.op(at)?.clone(), self.op(at + 1)?);
        let (OpKind::Rope { theta, rotary, .. }, OpPass::BackwardInput) = (next.kind, next.pass)
        else {
            return None;
        };
        if !rotary.is_plain() {
            return None;
        }
        let skipped = vec![op.outputs[0]];
        if next.inputs[0] != skipped[0] {
            return None;
        }
        op.outputs.clone_from(&next.outputs);
        Some(found(Fused::Attention { heads, seq, theta }, op, 2, skipped))
    }
}

/// Templates whose loss may replace the logits by their gradient, and those that find it there: the
/// gradient is to replace the logits anyway, and no other segment uses them.
fn replaced(plan: &Plan) -> BTreeSet<usize> {
    let of = |template: usize, kind: fn(OpKind) -> bool, pass: OpPass| {
        plan.templates[template].ops.iter().find(move |op| kind(op.kind) && op.pass == pass)
    };
    let is_loss = |kind| matches!(kind, OpKind::CrossEntropy { .. });
    let mut templates = BTreeSet::new();
    for program in &plan.programs {
        let views = |at: usize| &program.segments[at].operands;
        let users = |buffer: BufferId| -> Vec<usize> {
            let uses = |at: &usize| views(*at).iter().any(|view| view.buffer == buffer);
            (0..program.segments.len()).filter(uses).collect()
        };
        for (at, segment) in program.segments.iter().enumerate() {
            let template = segment.template as usize;
            let forward = of(template, |kind| kind == OpKind::RowMax, OpPass::Forward)
                .filter(|_| of(template, is_loss, OpPass::Forward).is_some());
            let backward = of(template, is_loss, OpPass::BackwardInput);
            let logits = match (forward, backward) {
                (Some(max), None) => max.inputs[0],
                (None, Some(gradient)) => gradient.inputs[1],
                (None, None) => continue,
                // A segment that does both is as good without.
                (Some(_), Some(_)) => return BTreeSet::new(),
            };
            let view = views(at)[usize::from(logits)];
            let both = users(view.buffer);
            let pairs = both.iter().filter(|&&user| {
                let template = program.segments[user].template as usize;
                let gradient = of(template, is_loss, OpPass::BackwardInput);
                gradient.is_some_and(|op| {
                    let views = views(user);
                    views[usize::from(op.inputs[1])] == view
                        && views[usize::from(op.outputs[0])] == view
                })
            });
            if both.len() != 2 || pairs.count() != 1 {
                return BTreeSet::new();
            }
            templates.insert(template);
        }
    }
    templates
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::Strategy;

    fn steps(model: &str, dtype: DType, template: &str) -> (Vec<Fused>, usize) {
        let model = built_in::get(model).expect("a built-in model").expect("a sound one");
        let strategy = Strategy { dtype, seq: 64, ..Strategy::default() };
        let plan = lower(&model, &strategy).expect("a sound strategy");
        let fusion = Fusion::of(&plan);
        let at = plan.templates.iter().position(|known| known.name == template);
        let at = at.expect("a template of this name");
        let steps = fusion.steps(at, &plan.templates[at]);
        let several = |step: &Step| match step {
            Step::One(_) => None,
            Step::Several(fused, _) => Some(*fused),
        };
        (steps.iter().filter_map(several).collect(), steps.len())
    }

    #[test]
    fn a_gpt_block_is_seven_launches() {
        let linear = |residual, gelu| Fused::Linear { bias: true, residual, gelu, rotation: None };
        let (qkv, sum) = (linear(false, false), linear(true, false));
        let found = steps("mini", DType::Bf16, "F.block.0");
        assert_eq!(found, (vec![qkv, sum, linear(false, true), sum], 7));
        // In f32 the library's GELU is not exact enough.
        let found = steps("mini", DType::F32, "F.block.0");
        assert_eq!(found, (vec![qkv, sum, qkv, sum], 8));
        let norm = Fused::NormGradient { norm: NormKind::Layer, added: true, weights: true };
        let (found, launches) = steps("mini", DType::Bf16, "B.block.0");
        assert_eq!(found, [Fused::LinearInput, norm, norm]);
        assert_eq!(launches, 14);
    }

    #[test]
    fn rotations_and_losses_are_computed_in_place() {
        let (found, _) = steps("mini-llama", DType::Bf16, "F.block.0");
        let rotated = |fused: &Fused| matches!(fused, Fused::Linear { rotation: Some(_), .. });
        assert!(found.iter().any(rotated), "{found:?}");
        let (found, _) = steps("mini-llama", DType::Bf16, "B.block.0");
        assert!(found.iter().any(|fused| matches!(fused, Fused::Attention { .. })), "{found:?}");
        let (found, _) = steps("mini-llama", DType::Bf16, "F.head.0");
        let replaced = |fused: &Fused| matches!(fused, Fused::Loss { replaced: true, .. });
        assert!(found.iter().any(replaced), "{found:?}");
        assert_eq!(steps("mini", DType::Bf16, "F.embedding.0"), (vec![Fused::Embedding], 1));
    }
}
