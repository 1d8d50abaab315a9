//! Memory layout of a role: buffers, their addresses and their accounting by kind.

use crate::dtype::DType;
use crate::units::Bytes;
use serde::{Deserialize, Serialize};

/// Category under which a buffer's bytes are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// Weights read by compute ops.
    Parameters,
    /// Weight gradients.
    Gradients,
    /// Master weights and moments.
    Optimizer,
    /// Activations, their gradients and scratch.
    Activations,
    /// Buffers used only to send, receive, gather or reduce.
    Communication,
    /// State in the offload store, outside the arena, until it is restored.
    Offloaded,
    /// Memory shared by all ranks of a process, outside their arenas. It exists once, independent
    /// of the number of ranks.
    Shared,
}

impl MemoryKind {
    /// Kinds stored in the arena, in address order.
    pub const ARENA: [Self; 5] = [
        Self::Parameters,
        Self::Gradients,
        Self::Optimizer,
        Self::Activations,
        Self::Communication,
    ];

    /// All kinds in address order: the arena, then the offload store, then shared memory.
    pub const ALL: [Self; 7] = [
        Self::Parameters,
        Self::Gradients,
        Self::Optimizer,
        Self::Activations,
        Self::Communication,
        Self::Offloaded,
        Self::Shared,
    ];

    /// Name used in reports and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Communication => "communication",
            Self::Offloaded => "offloaded",
            Self::Shared => "shared",
        }
    }
}

/// Bytes of a role's arena, offload store and shared memory, at consecutive addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Bytes by kind, in the order of [`MemoryKind::ALL`].
    pub by_kind: [Bytes; 7],
}

impl Memory {
    /// Size of the arena.
    pub fn total(&self) -> Bytes {
        let [arena @ .., _stored, _shared] = self.by_kind;
        arena.into_iter().sum()
    }

    /// Size of the offload store; its addresses begin at the end of the arena.
    pub fn stored(&self) -> Bytes {
        self.of(MemoryKind::Offloaded)
    }

    /// Size of the shared memory; its addresses begin at the end of the offload store.
    pub fn shared(&self) -> Bytes {
        self.of(MemoryKind::Shared)
    }

    /// Arena plus shared memory: the footprint of the first rank of a process.
    pub fn with_shared(&self) -> Bytes {
        self.total() + self.shared()
    }

    /// Bytes of one kind.
    pub fn of(&self, kind: MemoryKind) -> Bytes {
        self.by_kind[kind as usize]
    }
}

/// A contiguous range of elements in a role's arena, in `copies` instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Human-readable name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Number of elements of one copy.
    pub elements: u64,
    /// Number of copies.
    pub copies: u32,
    /// Category under which its bytes are counted.
    pub kind: MemoryKind,
    /// Offset of the first copy in the arena.
    pub offset: Bytes,
}

/// Alignment in bytes of every buffer and of every copy.
pub const ALIGNMENT: u64 = 64;

impl Buffer {
    /// Bytes of one copy, without padding.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.elements * self.dtype.size())
    }

    /// Distance between the starts of two consecutive copies.
    pub fn stride(&self) -> Bytes {
        self.bytes().round_up(ALIGNMENT)
    }

    /// Bytes from the start of the first copy to the end of the last.
    pub fn extent(&self) -> Bytes {
        self.stride() * u64::from(self.copies)
    }

    /// Offset of the copy used by running microbatch number `running`.
    pub fn copy_offset(&self, running: u64) -> Bytes {
        self.offset + self.stride() * (running % u64::from(self.copies))
    }
}
