//! Gradients on the graph, as in `tf.gradients`: the input gradient and the weight gradient are
//! separate operators, so that a schedule can place them independently.

use super::{ActivationKind, LayerGraph, OpKind, OpPass, Operator, Tensor, TensorClass};
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
    /// Gradient of each tensor accumulated so far.
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
                self.push(
                    op,
                    OpPass::BackwardInput,
                    &[stats, logits, max, targets],
                    &[],
                    &[dlogits],
                );
                self.contribute(logits, dlogits);
            }
            OpKind::BinaryCrossEntropy { .. } => {
                let [logits, targets] = op.inputs[..] else { return };
                let dlogits = self.like(logits);
                self.push(op, OpPass::BackwardInput, &[logits, targets], &[], &[dlogits]);
                self.contribute(logits, dlogits);
            }
            OpKind::Interact { .. } => {
                if let Some(dy) = dy {
                    let [x, sums] = op.inputs[..] else { return };
                    let (dx, dsums) = (self.like(x), self.like(sums));
                    self.push(op, OpPass::BackwardInput, &[dy, x, sums], &[], &[dx, dsums]);
                    self.contribute(x, dx);
                    self.contribute(sums, dsums);
                }
            }
            // Covered by the loss's gradient.
            OpKind::RowMax | OpKind::SoftmaxStats => {}
            // Covered by the gradient of the norm that follows.
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
                    self.push(op, OpPass::BackwardWeight, &[dy], &op.params, &[]);
                    self.contribute(op.inputs[0], dy);
                }
            }
            OpKind::Embedding | OpKind::EmbeddingBag { .. } => {
                if let Some(dy) = dy {
                    self.push(op, OpPass::BackwardWeight, &[dy, op.inputs[0]], &op.params, &[]);
                }
            }
            OpKind::Linear { .. } | OpKind::Conv { .. } => {
                if let Some(dy) = dy {
                    if !self.is_given(op.inputs[0]) {
                        self.input_gradient(op, &[dy]);
                    }
                    self.push(op, OpPass::BackwardWeight, &[dy, op.inputs[0]], &op.params, &[]);
                }
            }
            OpKind::ExpertLinear { .. } => {
                let [x, counts] = op.inputs[..] else { return };
                if let Some(dy) = dy {
                    self.input_gradient(op, &[dy, counts]);
                    self.push(op, OpPass::BackwardWeight, &[dy, x, counts], &op.params, &[]);
                }
            }
            OpKind::Route(_) => {
                let [choices, gates, ..] = op.outputs[..] else { return };
                if let Some(dgates) = self.gradients[gates.index()] {
                    self.input_gradient(op, &[dgates, op.inputs[0]]);
                    if !op.params.is_empty() {
                        self.push(op, OpPass::BackwardWeight, &[choices], &op.params, &[]);
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
                    self.push(op, OpPass::BackwardInput, &reads, &[], &[drows, dgates]);
                    self.contribute(rows, drows);
                    self.contribute(gates, dgates);
                }
            }
            OpKind::LatentHeads(_) => {
                let [q, kv, turned] = op.inputs[..] else { return };
                if let Some(dy) = dy {
                    let made = [q, kv, turned].map(|t| self.like(t));
                    self.push(op, OpPass::BackwardInput, &[dy], &[], &made);
                    for (of, share) in [q, kv, turned].into_iter().zip(made) {
                        self.contribute(of, share);
                    }
                }
            }
            OpKind::Norm { .. } | OpKind::HeadNorm { .. } => {
                if let Some(dy) = dy {
                    let reads = [dy, op.inputs[0], op.outputs[1]];
                    self.input_gradient(op, &reads);
                    self.push(op, OpPass::BackwardWeight, &reads, &op.params, &[]);
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
            // The output is positive exactly where the argument is, and is often saved anyway. The
            // layer's output is an exception: it may be sent to another stage.
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
            // Inserted by sharding along the sequence, for both attention and its gradient.
            OpKind::KeysValues { .. } => {}
            // Part of the optimizer step; no gradient flows back.
            OpKind::StepRows { .. }
            | OpKind::BlockSquares { .. }
            | OpKind::TensorSquares
            | OpKind::Norm2
            | OpKind::Total
            | OpKind::Compress(_)
            | OpKind::Outer(_) => {}
        }
    }

    /// Adds the gradient of the operator's first input.
    fn input_gradient(&mut self, op: &Operator, reads: &[TensorId]) {
        let x = op.inputs[0];
        let dx = self.like(x);
        self.push(op, OpPass::BackwardInput, reads, &op.params, &[dx]);
        self.contribute(x, dx);
    }

    /// Adds the gradients of a batch norm, after the sums over the microbatch that both need.
    fn batch_norm(&mut self, op: &Operator, dy: TensorId, channels: u64) {
        let (x, statistics) = (op.inputs[0], op.outputs[1]);
        let sums = self.like(statistics);
        let tensor = &mut self.layer.tensors[sums.index()];
        tensor.class = TensorClass::Statistic;
        self.layer.backward.push(Operator {
            kind: OpKind::BatchSums { channels },
            pass: OpPass::BackwardInput,
            inputs: vec![dy, x, statistics],
            params: Vec::new(),
            outputs: vec![sums],
        });
        self.input_gradient(op, &[dy, x, statistics, sums]);
        self.push(op, OpPass::BackwardWeight, &[sums, statistics], &op.params, &[]);
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

    fn push(
        &mut self,
        op: &Operator,
        part: OpPass,
        inputs: &[TensorId],
        params: &[ParamId],
        outputs: &[TensorId],
    ) {
        self.layer.backward.push(Operator {
            kind: op.kind,
            pass: part,
            inputs: inputs.to_vec(),
            params: params.to_vec(),
            outputs: outputs.to_vec(),
        });
    }
}
