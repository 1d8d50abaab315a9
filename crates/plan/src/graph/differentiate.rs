//! Gradients on the graph, as `tf.gradients` made them: the gradient for the input and the one for the
//! weight are operators of their own, so that a schedule may place them apart.

use super::{ActivationKind, LayerGraph, OpKind, Operator, Part, Tensor, TensorClass};
use crate::ids::{ParamId, TensorId};

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

struct Tape<'a> {
    /// The gradient of each tensor so far.
    gradients: Vec<Option<TensorId>>,
    layer: &'a mut LayerGraph,
}

impl Tape<'_> {
    fn operator(&mut self, op: &Operator) {
        let dy = op.outputs.first().and_then(|y| self.gradients[y.index()]);
        match op.kind {
            OpKind::CrossEntropy { .. } => {
                let [_, logits, max, targets] = op.inputs[..] else { return };
                let dlogits = self.like(logits);
                let stats = op.inputs[0];
                self.push(op, Part::InputGradient, &[stats, logits, max, targets], &[], &[dlogits]);
                self.contribute(logits, dlogits);
            }
            OpKind::BinaryCrossEntropy { .. } => {
                let [logits, targets] = op.inputs[..] else { return };
                let dlogits = self.like(logits);
                self.push(op, Part::InputGradient, &[logits, targets], &[], &[dlogits]);
                self.contribute(logits, dlogits);
            }
            OpKind::Interact { .. } => {
                if let Some(dy) = dy {
                    let [x, sums] = op.inputs[..] else { return };
                    let (dx, dsums) = (self.like(x), self.like(sums));
                    self.push(op, Part::InputGradient, &[dy, x, sums], &[], &[dx, dsums]);
                    self.contribute(x, dx);
                    self.contribute(sums, dsums);
                }
            }
            // The loss's gradient already accounts for these.
            OpKind::RowMax | OpKind::SoftmaxStats => {}
            // The norm behind them accounts for these.
            OpKind::BatchSums { .. } => {}
            OpKind::Add => {
                if let Some(dy) = dy {
                    for &input in &op.inputs {
                        self.contribute(input, dy);
                    }
                }
            }
            OpKind::Bias | OpKind::Position => {
                if let Some(dy) = dy {
                    self.push(op, Part::WeightGradient, &[dy], &op.params, &[]);
                    self.contribute(op.inputs[0], dy);
                }
            }
            OpKind::Embedding | OpKind::EmbeddingBag { .. } => {
                if let Some(dy) = dy {
                    self.push(op, Part::WeightGradient, &[dy, op.inputs[0]], &op.params, &[]);
                }
            }
            OpKind::Linear { .. } | OpKind::Conv { .. } => {
                if let Some(dy) = dy {
                    if !self.is_given(op.inputs[0]) {
                        self.input_gradient(op, &[dy]);
                    }
                    self.push(op, Part::WeightGradient, &[dy, op.inputs[0]], &op.params, &[]);
                }
            }
            OpKind::ExpertLinear { .. } => {
                let [x, counts] = op.inputs[..] else { return };
                if let Some(dy) = dy {
                    self.input_gradient(op, &[dy, counts]);
                    self.push(op, Part::WeightGradient, &[dy, x, counts], &op.params, &[]);
                }
            }
            OpKind::Route(_) => {
                let [choices, gates, ..] = op.outputs[..] else { return };
                if let Some(dgates) = self.gradients[gates.index()] {
                    self.input_gradient(op, &[dgates, op.inputs[0]]);
                    if !op.params.is_empty() {
                        self.push(op, Part::WeightGradient, &[choices], &op.params, &[]);
                    }
                }
            }
            OpKind::Dispatch { .. } => {
                if let Some(dy) = dy {
                    self.input_gradient(op, &[dy, op.outputs[1]]);
                }
            }
            OpKind::Combine { .. } => {
                let [rows, slots, gates] = op.inputs[..] else { return };
                if let Some(dy) = dy {
                    let (drows, dgates) = (self.like(rows), self.like(gates));
                    let reads = [dy, rows, slots, gates];
                    self.push(op, Part::InputGradient, &reads, &[], &[drows, dgates]);
                    self.contribute(rows, drows);
                    self.contribute(gates, dgates);
                }
            }
            OpKind::LatentHeads(_) => {
                let [q, kv, turned] = op.inputs[..] else { return };
                if let Some(dy) = dy {
                    let made = [q, kv, turned].map(|t| self.like(t));
                    self.push(op, Part::InputGradient, &[dy], &[], &made);
                    for (of, share) in [q, kv, turned].into_iter().zip(made) {
                        self.contribute(of, share);
                    }
                }
            }
            OpKind::Norm { .. } | OpKind::HeadNorm { .. } => {
                if let Some(dy) = dy {
                    let reads = [dy, op.inputs[0], op.outputs[1]];
                    self.input_gradient(op, &reads);
                    self.push(op, Part::WeightGradient, &reads, &op.params, &[]);
                }
            }
            OpKind::BatchNorm { channels, .. } => {
                if let Some(dy) = dy {
                    self.batch_norm(op, dy, channels);
                }
            }
            OpKind::Attention { .. } | OpKind::AttentionBlock { .. } => {
                if let Some(dy) = dy {
                    self.input_gradient(op, &[dy, op.inputs[0], op.outputs[0], op.outputs[1]]);
                }
            }
            // It is positive exactly where its argument is, and its value is often kept anyway. What a
            // layer puts out is not: it may go to another stage.
            OpKind::Activation { function: ActivationKind::Relu } => {
                if let Some(dy) = dy {
                    let kept = op.outputs[0];
                    let leaves = self.layer.output == Some(kept);
                    self.input_gradient(op, &[dy, if leaves { op.inputs[0] } else { kept }]);
                }
            }
            OpKind::Activation { .. } | OpKind::SwiGlu | OpKind::MaxPool { .. } => {
                if let Some(dy) = dy {
                    self.input_gradient(op, &[dy, op.inputs[0]]);
                }
            }
            OpKind::Rope { .. } | OpKind::AveragePool { .. } | OpKind::LatentValues(_) => {
                if let Some(dy) = dy {
                    self.input_gradient(op, &[dy]);
                }
            }
            // Made by the cut along the sequence, of both attention and its gradient.
            OpKind::KeysValues { .. } => {}
            // Around the optimizer step; nothing flows back.
            OpKind::StepRows { .. }
            | OpKind::BlockSquares { .. }
            | OpKind::TensorSquares
            | OpKind::Norm2
            | OpKind::Total
            | OpKind::Compress(_)
            | OpKind::Outer(_) => {}
        }
    }

    /// The gradient for the operator's first input.
    fn input_gradient(&mut self, op: &Operator, reads: &[TensorId]) {
        let x = op.inputs[0];
        let dx = self.like(x);
        self.push(op, Part::InputGradient, reads, &op.params, &[dx]);
        self.contribute(x, dx);
    }

    /// The gradients of a batch norm: sums over the microbatch first, which both of them need.
    fn batch_norm(&mut self, op: &Operator, dy: TensorId, channels: u64) {
        let (x, statistics) = (op.inputs[0], op.outputs[1]);
        let sums = self.like(statistics);
        let tensor = &mut self.layer.tensors[sums.index()];
        tensor.class = TensorClass::Statistic;
        self.layer.backward.push(Operator {
            kind: OpKind::BatchSums { channels },
            part: Part::InputGradient,
            inputs: vec![dy, x, statistics],
            params: Vec::new(),
            outputs: vec![sums],
        });
        self.input_gradient(op, &[dy, x, statistics, sums]);
        self.push(op, Part::WeightGradient, &[sums, statistics], &op.params, &[]);
    }

    /// Whether a tensor comes from outside the model: nothing flows back to it.
    fn is_given(&self, tensor: TensorId) -> bool {
        match self.layer.tensor(tensor).class {
            TensorClass::Tokens
            | TensorClass::Features
            | TensorClass::Targets
            | TensorClass::Further(_) => true,
            TensorClass::Activation
            | TensorClass::Statistic
            | TensorClass::Loss
            | TensorClass::Index
            | TensorClass::Dispatched
            | TensorClass::Counts
            | TensorClass::Dropped => false,
        }
    }

    /// Adds a consumer's share to a tensor's gradient.
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
            part: Part::Forward,
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

    fn push(
        &mut self,
        op: &Operator,
        part: Part,
        inputs: &[TensorId],
        params: &[ParamId],
        outputs: &[TensorId],
    ) {
        self.layer.backward.push(Operator {
            kind: op.kind,
            part,
            inputs: inputs.to_vec(),
            params: params.to_vec(),
            outputs: outputs.to_vec(),
        });
    }
}
