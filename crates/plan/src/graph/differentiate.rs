//! Gradients on the graph, as in `tf.gradients`: the input gradient and the weight gradient are
//! separate operators, so that a schedule can place them independently.

use super::{LayerGraph, OpKind, OpPass, Operator, Tensor, TensorClass};
use crate::ids::TensorId;

/// Appends the gradient operators of a layer whose forward operators are complete.
pub(super) fn differentiate(layer: &mut LayerGraph) {
    let mut tape = Tape { gradients: vec![None; layer.tensors.len()], layer };
    if let Some(output) = tape.layer.output {
        let seed = tape.like(output);
        tape.layer.output_grad = Some(seed);
        tape.gradients[output.index()] = Some(seed);
    }
    for at in (0..tape.layer.forward.len()).rev() {
        let op = tape.layer.forward[at].clone();
        tape.operator(&op);
    }
    if let Some(input) = tape.layer.input {
        tape.layer.input_grad = tape.gradients[input.index()];
    }
}

/// Operand of a gradient operator, relative to the forward operator.
#[derive(Clone, Copy)]
pub(crate) enum Of {
    /// The gradient of an output.
    Dy,
    /// An input.
    X(usize),
    /// An output.
    Y(usize),
    /// A tensor that is positive exactly where the first input is: the output, which is often saved
    /// anyway, unless it leaves the layer and may be sent to another stage.
    Sign,
    /// Sums of the output's gradient over the microbatch, which batch norm's gradients need first.
    Sums,
}

/// Rule for an operator's gradient operators.
#[derive(Clone, Copy)]
pub(crate) struct Gradient {
    start: Start,
    /// Inputs whose gradients one operator computes, and its operands.
    input: (&'static [usize], &'static [Of]),
    /// Operands of the operator for the gradients of the parameters.
    weight: Option<&'static [Of]>,
    /// Number of leading inputs of which the gradient is that of the output.
    passed: usize,
}

/// Gradient that an operator's gradients start from.
#[derive(Clone, Copy, PartialEq)]
enum Start {
    /// None: it is a loss.
    Loss,
    /// That of an output. Without one there are no gradients.
    Output(usize),
}

impl Gradient {
    /// No gradient operators.
    pub(super) const NONE: Self =
        Self { start: Start::Output(0), input: (&[], &[]), weight: None, passed: 0 };
    /// The start of the backward pass.
    pub(super) const LOSS: Self = Self { start: Start::Loss, ..Self::NONE };

    /// Adds the gradient of these inputs, computed from these operands.
    pub(super) const fn input(self, of: &'static [usize], reads: &'static [Of]) -> Self {
        Self { input: (of, reads), ..self }
    }

    /// Adds the gradient of the parameters, computed from these operands.
    pub(super) const fn weight(self, reads: &'static [Of]) -> Self {
        Self { weight: Some(reads), ..self }
    }

    /// Passes the gradient of the output to all inputs.
    pub(super) const fn passed(self) -> Self {
        Self { passed: usize::MAX, ..self }
    }

    /// Passes the gradient of the output to the first input.
    pub(super) const fn passed_to_first(self) -> Self {
        Self { passed: 1, ..self }
    }

    /// Starts from the gradient of this output instead of the first.
    pub(super) const fn of_output(self, output: usize) -> Self {
        Self { start: Start::Output(output), ..self }
    }
}

struct Tape<'a> {
    /// Gradient of each tensor accumulated so far.
    gradients: Vec<Option<TensorId>>,
    layer: &'a mut LayerGraph,
}

impl Tape<'_> {
    fn operator(&mut self, op: &Operator) {
        let Gradient { start, input: (of, reads), weight, passed } = op.kind.row().gradient;
        let dy = match start {
            Start::Loss => None,
            Start::Output(at) => match op.outputs.get(at).and_then(|y| self.gradients[y.index()]) {
                Some(dy) => Some(dy),
                None => return,
            },
        };
        let mut sums = None;
        let given = op.inputs.first().is_some_and(|&x| self.is_given(x));
        if !of.is_empty() && !given {
            let reads = self.operands(op, dy, reads, &mut sums);
            let wanted: Vec<TensorId> = of.iter().map(|&at| op.inputs[at]).collect();
            let made: Vec<TensorId> = wanted.iter().map(|&x| self.like(x)).collect();
            self.push(op, OpPass::BackwardInput, reads, made.clone());
            for (x, dx) in wanted.into_iter().zip(made) {
                self.contribute(x, dx);
            }
        }
        if let Some(reads) = weight.filter(|_| !op.params.is_empty()) {
            let reads = self.operands(op, dy, reads, &mut sums);
            self.push(op, OpPass::BackwardWeight, reads, Vec::new());
        }
        if let Some(dy) = dy {
            op.inputs.iter().take(passed).for_each(|&input| self.contribute(input, dy));
        }
    }

    /// Tensors that a gradient operator reads.
    fn operands(
        &mut self,
        op: &Operator,
        dy: Option<TensorId>,
        reads: &[Of],
        sums: &mut Option<TensorId>,
    ) -> Vec<TensorId> {
        let mut operand = |of: &Of| match *of {
            Of::Dy => dy,
            Of::X(at) => op.inputs.get(at).copied(),
            Of::Y(at) => op.outputs.get(at).copied(),
            Of::Sign if self.layer.output == Some(op.outputs[0]) => Some(op.inputs[0]),
            Of::Sign => Some(op.outputs[0]),
            Of::Sums => {
                *sums = sums.or_else(|| self.batch_sums(op, dy?));
                *sums
            }
        };
        reads.iter().filter_map(&mut operand).collect()
    }

    /// Adds the sums over the microbatch that both gradients of a batch norm read.
    fn batch_sums(&mut self, op: &Operator, dy: TensorId) -> Option<TensorId> {
        let OpKind::BatchNorm { channels, .. } = op.kind else { return None };
        let (x, statistics) = (op.inputs[0], op.outputs[1]);
        let sums = self.like(statistics);
        self.layer.tensors[sums.index()].class = TensorClass::Statistic;
        self.layer.backward.push(Operator {
            kind: OpKind::BatchSums { channels },
            pass: OpPass::BackwardInput,
            inputs: vec![dy, x, statistics],
            params: Vec::new(),
            outputs: vec![sums],
        });
        Some(sums)
    }

    /// Returns true if a tensor is an input of the model; no gradient flows back to it.
    fn is_given(&self, tensor: TensorId) -> bool {
        match self.layer.tensor(tensor).class {
            TensorClass::Tokens
            | TensorClass::Features
            | TensorClass::Targets
            | TensorClass::Lookahead(_) => true,
            TensorClass::Activation
            | TensorClass::Statistic
            | TensorClass::Loss
            | TensorClass::Index
            | TensorClass::Dispatched
            | TensorClass::Counts
            | TensorClass::Dropped => false,
        }
    }

    /// Adds a consumer's contribution to a tensor's gradient.
    fn contribute(&mut self, tensor: TensorId, share: TensorId) {
        let Some(so_far) = self.gradients[tensor.index()] else {
            self.gradients[tensor.index()] = Some(share);
            return;
        };
        let sum = self.like(tensor);
        let name = &mut self.layer.tensors[sum.index()].name;
        name.push_str(".sum");
        self.layer.backward.push(Operator {
            kind: OpKind::Add,
            pass: OpPass::Forward,
            inputs: vec![so_far, share],
            params: Vec::new(),
            outputs: vec![sum],
        });
        self.gradients[tensor.index()] = Some(sum);
    }

    /// A new tensor for the gradient of another.
    fn like(&mut self, of: TensorId) -> TensorId {
        let source = self.layer.tensor(of);
        let tensor = Tensor {
            name: format!("d.{}", source.name),
            dims: source.dims,
            class: match source.class {
                kept @ (TensorClass::Dispatched | TensorClass::Statistic) => kept,
                _ => TensorClass::Activation,
            },
            blocks: source.blocks.clone(),
        };
        self.layer.tensors.push(tensor);
        self.gradients.push(None);
        TensorId::from(self.layer.tensors.len() - 1)
    }

    fn push(&mut self, op: &Operator, pass: OpPass, inputs: Vec<TensorId>, outputs: Vec<TensorId>) {
        let (kind, params) = (op.kind, op.params.clone());
        self.layer.backward.push(Operator { kind, pass, inputs, params, outputs });
    }
}
