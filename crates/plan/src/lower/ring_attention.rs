//! Ring attention: attention over a sequence sharded along the context-parallel axis (Liu et al.,
//! arXiv 2310.01889). It is the only composite of messages and compute that replaces one operator.
//!
//! Every rank keeps its queries; keys and values travel around the ring. A rank attends to its own
//! tokens with the operator itself, which is causal within its shard, since a zigzag keeps the
//! order of tokens. Each step then merges the keys and values of the previous rank. While a rank
//! attends to one block, the next one arrives. In the backward pass, the gradients of keys and
//! values travel with them, and one more message returns them to their owner.

use super::shard::{Item, Sharder, Value, ValueId};
use crate::graph::{Heads, OpKind, OpPass, Scores, TensorClass};
use crate::ids::ParamId;

impl Sharder<'_> {
    /// Extends the attention operator added last, which covers this rank's own tokens, to the other
    /// ranks' tokens.
    pub(super) fn ring(&mut self, heads: Heads, tokens: u64, scores: Scores, part: OpPass) {
        let Some(Item::Op { inputs, params, outputs, .. }) = self.items.pop() else {
            unreachable!("the operator was just added")
        };
        let of = Ring { heads, tokens, scores, params };
        match part {
            OpPass::Forward => self.forward_ring(of, &inputs, &outputs),
            OpPass::BackwardInput => self.backward_ring(of, &inputs, &outputs),
            OpPass::BackwardWeight => unreachable!("gradients of scores need no ring"),
        }
    }

    fn forward_ring(&mut self, of: Ring, inputs: &[ValueId], outputs: &[ValueId]) {
        let Ring { heads, .. } = of;
        let qkv = inputs[0];
        let mut kv = self.keys_values(heads, qkv);
        let mut arriving = self.shift(kv, "kv");
        // The layer uses the results of the last step; those of earlier steps share their memory.
        let steps = self.strategy.cp - 1;
        let (mut out, mut lse) = (self.like(outputs[0]), self.like(outputs[1]));
        let rest = outputs[2..].iter().copied();
        self.own(&of, OpPass::Forward, vec![qkv], [out, lse].into_iter().chain(rest).collect());
        for step in 1..=steps {
            kv = arriving;
            if step < steps {
                arriving = self.shift(kv, "kv");
            }
            let (before, last) = ([out, lse], step == steps);
            [out, lse] = if last {
                [outputs[0], outputs[1]]
            } else {
                [self.like(outputs[0]), self.like(outputs[1])]
            };
            let block = of.block(step);
            let reads = vec![qkv, kv, before[0], before[1]];
            self.op(block, OpPass::Forward, reads, vec![out, lse]);
        }
    }

    fn backward_ring(&mut self, of: Ring, inputs: &[ValueId], outputs: &[ValueId]) {
        let Ring { heads, .. } = of;
        let [dout, qkv, out, lse] = inputs[..] else {
            unreachable!("what attention's gradient reads")
        };
        let mut kv = self.keys_values(heads, qkv);
        let mut arriving = self.shift(kv, "kv");
        let steps = self.strategy.cp - 1;
        let mut dqkv = self.like(outputs[0]);
        self.own(&of, OpPass::BackwardInput, inputs.to_vec(), vec![dqkv]);
        let mut dkv = None;
        for step in 1..=steps {
            kv = arriving;
            if step < steps {
                arriving = self.shift(kv, "kv");
            }
            let so_far = dkv.map(|dkv| self.shift(dkv, "d.kv"));
            let reads = [dout, qkv, out, lse, kv, dqkv].into_iter().chain(so_far).collect();
            dqkv = self.like(outputs[0]);
            let made = self.like(kv);
            self.values[made].name = "d.kv".into();
            self.op(of.block(step), OpPass::BackwardInput, reads, vec![dqkv, made]);
            dkv = Some(made);
        }
        let home = dkv.map(|dkv| self.shift(dkv, "d.kv"));
        let reads = home.into_iter().chain([dqkv]).collect();
        self.op(OpKind::KeysValues { heads }, OpPass::BackwardInput, reads, vec![outputs[0]]);
    }

    fn keys_values(&mut self, heads: Heads, qkv: ValueId) -> ValueId {
        let kv = self.like(qkv);
        let value = &mut self.values[kv];
        value.dims[1] = 2 * heads.kv_heads * heads.head_dim;
        (value.name, value.class) = ("kv".into(), TensorClass::Activation);
        self.op(OpKind::KeysValues { heads }, OpPass::Forward, vec![qkv], vec![kv]);
        kv
    }

    /// A value of the same shape.
    fn like(&mut self, of: ValueId) -> ValueId {
        let value: Value = self.values[of].clone();
        self.values.push(value);
        self.values.len() - 1
    }

    fn shift(&mut self, from: ValueId, name: &str) -> ValueId {
        let to = self.like(from);
        self.values[to].name = format!("{name}.next");
        self.items.push(Item::Shift { from, to });
        to
    }

    /// Attention to a rank's own tokens, where a softmax's score of no key is counted.
    fn own(&mut self, of: &Ring, part: OpPass, inputs: Vec<ValueId>, outputs: Vec<ValueId>) {
        let kind = OpKind::Attention { heads: of.heads, seq: of.tokens, scores: of.scores };
        let params = of.params.clone();
        self.items.push(Item::Op { kind, part, inputs, params, outputs });
    }

    fn op(&mut self, kind: OpKind, part: OpPass, inputs: Vec<ValueId>, outputs: Vec<ValueId>) {
        self.items.push(Item::Op { kind, part, inputs, params: Vec::new(), outputs });
    }
}

/// Attention that is extended around the ring.
struct Ring {
    heads: Heads,
    tokens: u64,
    scores: Scores,
    params: Vec<ParamId>,
}

impl Ring {
    fn block(&self, step: u32) -> OpKind {
        let Self { heads, tokens, .. } = *self;
        let scores = Scores { sinks: false, ..self.scores };
        OpKind::AttentionBlock { heads, queries: tokens, keys: tokens, step, scores }
    }
}
