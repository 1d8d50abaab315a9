//! Vector for collectives, in shared memory if other ranks can read it there.

use crate::error::CommError;
use crate::transport::Transport;
use paceline_kernels::arena::{Access, Arena, Span};

/// Zeroed bytes that a rank passes to collectives. They are reached only while [`Self::with`] runs:
/// a collective that other ranks still write in place must not be left meanwhile.
#[derive(Debug)]
pub struct Vector {
    arena: Arena,
    is_shared: bool,
}

impl Vector {
    /// Allocates a vector: in memory that other ranks can read, if there are some and `shared` is
    /// true, in private memory otherwise.
    pub fn new(
        transport: &mut dyn Transport,
        bytes: usize,
        shared: bool,
    ) -> Result<Self, CommError> {
        let bytes = bytes.next_multiple_of(2);
        let memory = transport.memory().filter(|_| shared);
        let buffer = memory.map(|memory| memory.alloc_shared(bytes)).transpose()?;
        let is_shared = buffer.is_some();
        let arena = match buffer {
            Some(buffer) => Arena::adopt(Box::new(buffer)),
            None => Arena::new(bytes as u64)
                .map_err(|error| CommError::Job { problem: error.to_string() })?,
        };
        Ok(Self { arena, is_shared })
    }

    /// Returns true if other ranks can read it in place.
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Passes the whole vector, with a possible last byte of padding, to `work`.
    pub fn with<R>(&mut self, work: impl FnOnce(&mut [u8]) -> R) -> R {
        let whole = Span { offset: 0, len: self.arena.bytes() };
        let views = self.arena.views(&[(whole, Access::Write)]);
        let views = views.unwrap_or_else(|_| unreachable!("no other view of it is alive"));
        work(views.take_bytes(0))
    }
}
