//! Operands of an operator, as spans of the device's arena.

use crate::device::{OpShape, Stream};
use crate::memory::Memory;
use paceline_kernels::arena::Span;
use paceline_plan::program::{LocalOp, Segment, Template};
use std::ops::Deref;

/// Operands of one operator on a stream.
pub(crate) struct Operands<'a> {
    pub(super) on: Stream,
    pub(super) memory: &'a Memory<'a>,
    shape: OpShape<'a>,
    segment: &'a Segment,
    running: u64,
}

impl<'a> Deref for Operands<'a> {
    type Target = OpShape<'a>;

    fn deref(&self) -> &Self::Target {
        &self.shape
    }
}

impl<'a> Operands<'a> {
    pub(super) fn of(
        on: Stream,
        memory: &'a Memory<'a>,
        (template, segment): (&'a Template, &'a Segment),
        op: &'a LocalOp,
        running: u64,
    ) -> Self {
        Self { on, memory, shape: OpShape { template, op }, segment, running }
    }

    fn span(&self, operand: u16) -> Span {
        self.memory.span(self.segment.operands[usize::from(operand)], self.running)
    }

    pub(super) fn input(&self, i: usize) -> Span {
        self.span(self.op.inputs[i])
    }

    pub(super) fn param(&self, i: usize) -> Span {
        self.span(self.op.params[i])
    }

    pub(super) fn output(&self, i: usize) -> Span {
        self.span(self.op.outputs[i])
    }

    /// Spans that the operator writes: outputs, and whatever stands for gradients of parameters.
    pub(super) fn written(&self) -> impl Iterator<Item = Span> {
        self.op.outputs.iter().map(|&operand| self.span(operand))
    }
}
