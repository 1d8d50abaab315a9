//! Memory of a rank's buffers.

pub(crate) mod offload_thread;
pub(crate) mod shared_weights;
pub(crate) mod store;

use crate::error::Fault;
use crate::memory::shared_weights::SharedWeights;
use crate::memory::store::{OffloadStore, StoreError};
use paceline_comm::Transport;
use paceline_kernels::arena::{Access, Arena, ArenaError, HostBytes, Span, Views};
use paceline_kernels::element::Plain;
use paceline_plan::DType;
use paceline_plan::ids::BufferId;
use paceline_plan::program::{MemoryKind, Program, View};
use paceline_plan::strategy;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

/// Arena of a rank, its offload store if state is offloaded, and its shared weights if there are
/// any, addressed by the plan's views.
#[derive(Debug)]
pub(crate) struct Memory<'p> {
    program: &'p Program,
    arena: Arena,
    store: Option<OffloadStore>,
    shared_weights: Option<Arc<SharedWeights>>,
}

/// Reason why memory could not be allocated or used.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// Error of the arena.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// Error of the offload store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl<'p> Memory<'p> {
    /// Allocates the address space of the plan's arena beside a device that has its own: little of
    /// it is touched.
    pub(crate) fn beside_device(program: &'p Program) -> Result<Self, Fault> {
        let arena = Arena::sparse(program.memory.total().0)?;
        Ok(Self { program, arena, store: None, shared_weights: None })
    }

    /// Allocates the plan's arena, all zero; in shared memory if other ranks can read it.
    pub(crate) fn new(program: &'p Program, transport: &mut dyn Transport) -> Result<Self, Fault> {
        let bytes = program.memory.total().0;
        let shared = match (transport.memory(), usize::try_from(bytes)) {
            (Some(memory), Ok(bytes)) => Some(memory.alloc_shared(bytes)?),
            (None, _) | (_, Err(_)) => None,
        };
        let arena = match shared {
            Some(shared) => Arena::adopt(Box::new(shared)),
            None => Arena::new(bytes)?,
        };
        Ok(Self { program, arena, store: None, shared_weights: None })
    }

    /// Adds the offload store, if the plan needs one.
    pub(crate) fn with_store(
        self,
        kind: strategy::Store,
        folder: &Path,
    ) -> Result<Self, StoreError> {
        let memory = self.program.memory;
        let bytes = memory.stored().0;
        let open = || OffloadStore::open(memory.total().0, bytes, kind, folder);
        Ok(Self { store: (bytes > 0).then(open).transpose()?, ..self })
    }

    /// Adds the weights shared by all ranks, if any.
    pub(crate) fn with_shared_weights(self, shared_weights: Option<Arc<SharedWeights>>) -> Self {
        Self { shared_weights, ..self }
    }

    /// Returns the shared weights, if they hold the view.
    pub(crate) fn shared_weights(&self, view: View) -> Option<&SharedWeights> {
        let span = self.span(view, 0);
        self.shared_weights.as_deref().filter(|shared_weights| shared_weights.holds(span))
    }

    /// Program whose buffers these are.
    pub(crate) fn program(&self) -> &'p Program {
        self.program
    }

    /// Bytes of the arena.
    pub(crate) fn bytes(&self) -> u64 {
        self.arena.bytes()
    }

    /// Weights and optimizer state: what an iteration leaves for the next.
    pub(crate) fn kept(&self) -> [Span; 2] {
        let memory = self.program.memory;
        let [parameters, gradients, optimizer] =
            [MemoryKind::Parameters, MemoryKind::Gradients, MemoryKind::Optimizer]
                .map(|kind| memory.of(kind).0);
        [
            Span { offset: 0, len: parameters },
            Span { offset: parameters + gradients, len: optimizer },
        ]
    }

    /// Span of a view, in the buffer copy of microbatch number `running`.
    pub(crate) fn span(&self, view: View, running: u64) -> Span {
        let buffer = self.program.buffer(view.buffer);
        let size = buffer.dtype.size();
        let offset = buffer.copy_offset(running).0 + view.offset * size;
        Span { offset, len: view.len * size }
    }

    /// Span of a whole buffer's copy.
    pub(crate) fn whole(&self, buffer: BufferId, running: u64) -> Span {
        let len = self.program.buffer(buffer).elements;
        self.span(View { buffer, offset: 0, len }, running)
    }

    /// Gives access to several spans at once.
    pub(crate) fn views(&self, spans: &[(Span, Access)]) -> Result<Views<'_>, ArenaError> {
        self.arena.views(spans)
    }

    /// Gives a span to a library, for an operation that the plan orders among all others.
    pub(crate) fn lend(&self, span: Span) -> Result<HostBytes, ArenaError> {
        self.arena.lend(span)
    }

    /// Dtype of a buffer.
    pub(crate) fn dtype(&self, buffer: BufferId) -> DType {
        self.program.buffer(buffer).dtype
    }

    /// Runs `body` on one mutable span.
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

    /// Copies one span to another of the same length; does nothing if they are the same.
    pub(crate) fn copy(&self, from: Span, to: Span) -> Result<(), ArenaError> {
        if from == to { Ok(()) } else { self.arena.copy(from, to) }
    }
}

/// Slow accesses to spans that may be offloaded or shared, for infrequent operations.
impl Memory<'_> {
    fn is_stored(&self, span: Span) -> bool {
        span.offset >= self.program.memory.total().0 && span.len > 0
    }

    /// Returns the shared weights, if they hold the span.
    pub(crate) fn shared(&self, span: Span) -> Option<&SharedWeights> {
        self.shared_weights.as_deref().filter(|shared_weights| shared_weights.holds(span))
    }

    fn store(&self) -> Result<&OffloadStore, StoreError> {
        self.store.as_ref().ok_or(StoreError::None)
    }

    /// Like [`edit`](Self::edit), for a span in the arena, the store or shared weights.
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
            Some(shared_weights) => shared_weights.words(span)?.write(views.f32(0)),
            None => self.store()?.write(span.offset, views.bytes(0))?,
        }
        Ok(edited)
    }

    /// Like [`read`](Self::read), for a span in the arena, the store or shared weights.
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
                Some(shared_weights) => shared_weights.words(span)?.read(views.take_f32(0)),
                None => self.store()?.read(span.offset, views.take_bytes(0))?,
            }
        }
        Ok((copy, whole))
    }

    /// Copies one span to another of the same length; one of them is in the store.
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

/// Part of a span, given as a range of elements of `dtype`.
pub(crate) fn within(span: Span, dtype: DType, elements: Range<u64>) -> Span {
    let size = dtype.size();
    Span {
        offset: span.offset + elements.start * size,
        len: (elements.end - elements.start) * size,
    }
}
