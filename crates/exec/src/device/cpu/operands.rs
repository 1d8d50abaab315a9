//! Operands of an operator, in the arena.

use super::ops::experts::expert_shape;
use crate::memory::Memory;
use paceline_kernels::arena::{Access, ArenaError, Span, Views};
use paceline_kernels::experts::product;
use paceline_kernels::{Element, Rows, linear};
use paceline_plan::graph::OpPass;
use paceline_plan::program::{LocalOp, Segment, Template};

/// Operands of one operator: inputs, parameters (or their gradients) and outputs.
pub(crate) struct Operands<'a> {
    views: Views<'a>,
    template: &'a Template,
    op: &'a LocalOp,
}

impl<'a> Operands<'a> {
    pub(in crate::device::cpu) fn of(
        memory: &'a Memory<'_>,
        template: &'a Template,
        segment: &Segment,
        op: &'a LocalOp,
        running: u64,
    ) -> Result<Self, ArenaError> {
        let on_params = match op.pass {
            OpPass::Forward | OpPass::BackwardInput => Access::Read,
            OpPass::BackwardWeight => Access::Write,
        };
        let inputs = op.inputs.iter().map(|i| (i, Access::Read));
        let params = op.params.iter().map(|i| (i, on_params));
        let outputs = op.outputs.iter().map(|i| (i, Access::Write));
        let mut spans = [(Span { offset: 0, len: 0 }, Access::Read); MOST_OPERANDS];
        let mut count = 0;
        for (&operand, access) in inputs.chain(params).chain(outputs) {
            let view = segment.operands[usize::from(operand)];
            let replaces = |o: &u16| segment.operands[usize::from(*o)] == view;
            spans[count] = if access == Access::Read && op.outputs.iter().any(replaces) {
                // The operator works in place: its input is its output buffer.
                (Span { offset: 0, len: 0 }, access)
            } else {
                (memory.span(view, running), access)
            };
            count += 1;
        }
        Ok(Self { views: memory.views(&spans[..count])?, template, op })
    }

    pub(crate) fn input<T: Element>(&self, i: usize) -> &[T] {
        self.views.slice(i)
    }

    /// Returns true if its outputs are accumulated, even in a fresh segment.
    pub(in crate::device::cpu) fn adds(&self) -> bool {
        self.op.adds(self.template)
    }

    /// Input of token IDs.
    pub(in crate::device::cpu) fn ids(&self, i: usize) -> &[u32] {
        self.views.u32(i)
    }

    pub(in crate::device::cpu) fn param<T: Element>(&self, i: usize) -> &[T] {
        self.views.slice(self.op.inputs.len() + i)
    }

    pub(in crate::device::cpu) fn gradient<G: Element>(&self, i: usize) -> &mut [G] {
        self.views.take(self.op.inputs.len() + i)
    }

    pub(crate) fn output<T: Element>(&self, i: usize) -> &mut [T] {
        self.views.take(self.op.inputs.len() + self.op.params.len() + i)
    }

    /// Output of 32-bit words.
    pub(in crate::device::cpu) fn words_out(&self, i: usize) -> &mut [u32] {
        self.views.take_u32(self.op.inputs.len() + self.op.params.len() + i)
    }

    pub(crate) fn dims(&self, operand: u16) -> [u64; 2] {
        self.template.operands[usize::from(operand)].dims
    }

    pub(in crate::device::cpu) fn param_dims(&self, i: usize) -> [u64; 2] {
        self.dims(self.op.params[i])
    }

    /// Number of inputs.
    pub(in crate::device::cpu) fn inputs(&self) -> usize {
        self.op.inputs.len()
    }

    /// Number of outputs.
    pub(crate) fn outputs(&self) -> usize {
        self.op.outputs.len()
    }

    pub(in crate::device::cpu) fn has_param(&self, i: usize) -> bool {
        i < self.op.params.len()
    }

    /// Output of integers.
    pub(in crate::device::cpu) fn output_ids(&self, i: usize) -> &mut [u32] {
        self.views.take_u32(self.op.inputs.len() + self.op.params.len() + i)
    }

    /// Shape of the experts' GEMMs.
    pub(in crate::device::cpu) fn experts(&self, experts: usize, regions: usize) -> product::Shape {
        expert_shape(self.template, self.op, experts, regions)
    }

    /// Shape of an input.
    pub(in crate::device::cpu) fn rows(&self, i: usize) -> Rows {
        let [rows, width] = self.dims(self.op.inputs[i]);
        Rows { rows: rows as usize, width: width as usize }
    }

    /// Shape of an output.
    pub(in crate::device::cpu) fn output_rows(&self, i: usize) -> Rows {
        let [rows, width] = self.dims(self.op.outputs[i]);
        Rows { rows: rows as usize, width: width as usize }
    }

    pub(in crate::device::cpu) fn linear(&self) -> linear::Shape {
        linear_shape(self.template, self.op)
    }
}

/// Shape of a linear operator, whose weight is `[outputs, inputs]`.
pub(in crate::device::cpu) fn linear_shape(template: &Template, op: &LocalOp) -> linear::Shape {
    let dims = |operand: u16| template.operands[usize::from(operand)].dims;
    let ([rows, _], [outputs, inputs]) = (dims(op.inputs[0]), dims(op.params[0]));
    linear::Shape { rows: rows as usize, inputs: inputs as usize, outputs: outputs as usize }
}

/// Upper bound of the number of operands of an operator.
const MOST_OPERANDS: usize = 10;
