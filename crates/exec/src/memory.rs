//! Where a rank's buffers lie.

use crate::commons::Commons;
use crate::error::Fault;
use crate::store::{Store, StoreError};
use paceline_comm::Transport;
use paceline_kernels::arena::{Access, Arena, ArenaError, Span, Views};
use paceline_kernels::element::Plain;
use paceline_plan::DType;
use paceline_plan::ids::BufferId;
use paceline_plan::program::{Program, View};
use paceline_plan::strategy;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

/// A rank's arena, its store if anything is offloaded, and what it shares with others if it does, addressed by
/// the plan's views.
#[derive(Debug)]
pub(crate) struct Memory<'p> {
    program: &'p Program,
    arena: Arena,
    store: Option<Store>,
    commons: Option<Arc<Commons>>,
}

/// Why memory could not be had or used.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The arena.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
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
        Ok(Self { program, arena, store: None, commons: None })
    }

    /// The same with the store that the plan asks for, if it does.
    pub(crate) fn with_store(
        self,
        kind: strategy::Store,
        folder: &Path,
    ) -> Result<Self, StoreError> {
        let memory = self.program.memory;
        let bytes = memory.stored().0;
        let open = || Store::open(memory.total().0, bytes, kind, folder);
        Ok(Self { store: (bytes > 0).then(open).transpose()?, ..self })
    }

    /// The same with what all ranks share, if they do.
    pub(crate) fn with_commons(self, commons: Option<Arc<Commons>>) -> Self {
        Self { commons, ..self }
    }

    /// What all ranks share, if a view is of that.
    pub(crate) fn commons(&self, view: View) -> Option<&Commons> {
        let span = self.span(view, 0);
        self.commons.as_deref().filter(|commons| commons.holds(span))
    }

    /// The arena's size.
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

/// What is slow, because it may be in the store or shared: for what is done now and then.
impl Memory<'_> {
    fn is_stored(&self, span: Span) -> bool {
        span.offset >= self.program.memory.total().0 && span.len > 0
    }

    fn shared(&self, span: Span) -> Option<&Commons> {
        self.commons.as_deref().filter(|commons| commons.holds(span))
    }

    fn store(&self) -> Result<&Store, StoreError> {
        self.store.as_ref().ok_or(StoreError::None)
    }

    /// As [`edit`](Self::edit), wherever the span lies.
    pub(crate) fn edit_anywhere<T: Plain, R>(
        &self,
        span: Span,
        body: impl FnOnce(&mut [T]) -> R,
    ) -> Result<R, MemoryError> {
        if !self.is_stored(span) {
            return Ok(self.edit(span, body)?);
        }
        let (copy, whole) = self.copied(span)?;
        let edited = body(copy.views(&[(whole, Access::Write)])?.take(0));
        let views = copy.views(&[(whole, Access::Read)])?;
        match self.shared(span) {
            Some(commons) => commons.words(span)?.write(views.f32(0)),
            None => self.store()?.write(span.offset, views.bytes(0))?,
        }
        Ok(edited)
    }

    /// As [`read`](Self::read), wherever the span lies.
    pub(crate) fn read_anywhere<T: Plain, R>(
        &self,
        span: Span,
        body: impl FnOnce(&[T]) -> R,
    ) -> Result<R, MemoryError> {
        if !self.is_stored(span) {
            return Ok(self.read(span, body)?);
        }
        let (copy, whole) = self.copied(span)?;
        Ok(body(copy.views(&[(whole, Access::Read)])?.slice(0)))
    }

    fn copied(&self, span: Span) -> Result<(Arena, Span), MemoryError> {
        let (copy, whole) = (Arena::new(span.len)?, Span { offset: 0, len: span.len });
        {
            let views = copy.views(&[(whole, Access::Write)])?;
            match self.shared(span) {
                Some(commons) => commons.words(span)?.read(views.take_f32(0)),
                None => self.store()?.read(span.offset, views.take_bytes(0))?,
            }
        }
        Ok((copy, whole))
    }

    /// Copies one span to another of the same length, one of which is in the store.
    pub(crate) fn transfer(&self, from: Span, to: Span) -> Result<(), MemoryError> {
        match (self.is_stored(from), self.is_stored(to)) {
            (false, true) => {
                let views = self.views(&[(from, Access::Read)])?;
                self.store()?.write(to.offset, views.bytes(0))?;
            }
            (true, false) => {
                let views = self.views(&[(to, Access::Write)])?;
                self.store()?.read(from.offset, views.take_bytes(0))?;
            }
            (false, false) | (true, true) => self.copy(from, to)?,
        }
        Ok(())
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
