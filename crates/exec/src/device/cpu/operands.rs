//! Operands of an operator, in the arena.

use crate::device::OpShape;
use crate::memory::Memory;
use paceline_kernels::Element;
use paceline_kernels::arena::{Access, ArenaError, Span, Views};
use paceline_plan::graph::OpPass;
use paceline_plan::program::{LocalOp, Program, Segment, Template};
use std::ops::Deref;

/// Operands of one operator: inputs, parameters (or their gradients) and outputs.
pub(crate) struct Operands<'a> {
    views: Views<'a>,
    shape: OpShape<'a>,
    pub(crate) program: &'a Program,
}

impl<'a> Deref for Operands<'a> {
    type Target = OpShape<'a>;

    fn deref(&self) -> &Self::Target {
        &self.shape
    }
}

impl<'a> Operands<'a> {
    pub(super) fn of(
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
        let (views, shape) = (memory.views(&spans[..count])?, OpShape { template, op });
        Ok(Self { views, shape, program: memory.program() })
    }

    pub(crate) fn input<T: Element>(&self, i: usize) -> &[T] {
        self.views.slice(i)
    }

    /// Input of token IDs.
    pub(super) fn ids(&self, i: usize) -> &[u32] {
        self.views.u32(i)
    }

    pub(super) fn param<T: Element>(&self, i: usize) -> &[T] {
        self.views.slice(self.op.inputs.len() + i)
    }

    pub(super) fn gradient<G: Element>(&self, i: usize) -> &mut [G] {
        self.views.take(self.op.inputs.len() + i)
    }

    pub(crate) fn output<T: Element>(&self, i: usize) -> &mut [T] {
        self.views.take(self.op.inputs.len() + self.op.params.len() + i)
    }

    /// Output of 32-bit words.
    pub(super) fn words_out(&self, i: usize) -> &mut [u32] {
        self.views.take_u32(self.op.inputs.len() + self.op.params.len() + i)
    }
}

/// Upper bound of the number of operands of an operator.
const MOST_OPERANDS: usize = 10;
