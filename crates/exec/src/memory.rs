//! Where a rank's buffers lie.

use crate::error::Fault;
use paceline_comm::Transport;
use paceline_kernels::arena::{Access, Arena, ArenaError, Span, Views};
use paceline_kernels::element::Plain;
use paceline_plan::DType;
use paceline_plan::ids::BufferId;
use paceline_plan::program::{Program, View};
use std::ops::Range;

/// A rank's arena, addressed by the plan's views.
#[derive(Debug)]
pub(crate) struct Memory<'p> {
    program: &'p Program,
    arena: Arena,
}

impl<'p> Memory<'p> {
    /// Allocates what the plan asks for, all zero; where neighbours can read it, if there are any.
    pub(crate) fn new(program: &'p Program, transport: &mut dyn Transport) -> Result<Self, Fault> {
        let bytes = program.memory.total().0;
        let shared = match usize::try_from(bytes) {
            Ok(bytes) => transport.neighbourly_memory(bytes)?,
            Err(_) => None,
        };
        let arena = match shared {
            Some(shared) => Arena::adopt(Box::new(shared)),
            None => Arena::new(bytes)?,
        };
        Ok(Self { program, arena })
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> u64 {
        self.arena.bytes()
    }

    /// The bytes of a view, in the copy for a running microbatch number.
    pub(crate) fn span(&self, view: View, running: u64) -> Span {
        let buffer = self.program.buffer(view.buffer);
        let size = buffer.dtype.size();
        let offset = buffer.copy_offset(running).0 + view.offset * size;
        Span { offset, len: view.len * size }
    }

    /// The bytes of a whole buffer's copy.
    pub(crate) fn whole(&self, buffer: BufferId, running: u64) -> Span {
        let len = self.program.buffer(buffer).elements;
        self.span(View { buffer, offset: 0, len }, running)
    }

    /// Gives access to several spans at once.
    pub(crate) fn views(&self, spans: &[(Span, Access)]) -> Result<Views<'_>, ArenaError> {
        self.arena.views(spans)
    }

    /// The type of a buffer's elements.
    pub(crate) fn dtype(&self, buffer: BufferId) -> DType {
        self.program.buffer(buffer).dtype
    }

    /// Runs `body` on one span that it may change.
    pub(crate) fn edit<T: Plain, R>(
        &self,
        span: Span,
        body: impl FnOnce(&mut [T]) -> R,
    ) -> Result<R, ArenaError> {
        let views = self.views(&[(span, Access::Write)])?;
        Ok(body(views.take(0)))
    }

    /// Runs `body` on one span.
    pub(crate) fn read<T: Plain, R>(
        &self,
        span: Span,
        body: impl FnOnce(&[T]) -> R,
    ) -> Result<R, ArenaError> {
        let views = self.views(&[(span, Access::Read)])?;
        Ok(body(views.slice(0)))
    }

    /// Copies one span to another of the same length; onto itself is nothing to do.
    pub(crate) fn copy(&self, from: Span, to: Span) -> Result<(), ArenaError> {
        if from == to { Ok(()) } else { self.arena.copy(from, to) }
    }
}

/// A part of a span, counted in elements of a type.
pub(crate) fn within(span: Span, dtype: DType, elements: Range<u64>) -> Span {
    let size = dtype.size();
    Span {
        offset: span.offset + elements.start * size,
        len: (elements.end - elements.start) * size,
    }
}
