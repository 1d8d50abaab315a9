//! Where a role's bytes lie, and what they count as.

use crate::dtype::DType;
use crate::units::Bytes;
use serde::{Deserialize, Serialize};

/// What a buffer's bytes count as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// Weights that compute reads.
    Parameters,
    /// Gradients of weights.
    Gradients,
    /// Master weights and moments.
    Optimizer,
    /// Activations, their gradients and scratch.
    Activations,
    /// Buffers that exist only to send, receive, gather or reduce.
    Communication,
    /// What rests outside the arena, in a store behind it, until it is restored.
    Stored,
    /// What all ranks of a process share, in a common beside their arenas: it is there once, however many
    /// they are.
    Shared,
}

impl MemoryKind {
    /// What is in the arena, in its order.
    pub const ARENA: [Self; 5] = [
        Self::Parameters,
        Self::Gradients,
        Self::Optimizer,
        Self::Activations,
        Self::Communication,
    ];

    /// All kinds, in the order of addresses: the arena's, then the store's, then the common.
    pub const ALL: [Self; 7] = [
        Self::Parameters,
        Self::Gradients,
        Self::Optimizer,
        Self::Activations,
        Self::Communication,
        Self::Stored,
        Self::Shared,
    ];

    /// The word used in reports and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Communication => "communication",
            Self::Stored => "stored",
            Self::Shared => "shared",
        }
    }
}

/// Bytes of a role's arena, of its store and of the common. Addresses go on from the one to the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// By kind, in the order of [`MemoryKind::ALL`].
    pub by_kind: [Bytes; 7],
}

impl Memory {
    /// The arena's size.
    pub fn total(&self) -> Bytes {
        let [arena @ .., _stored, _shared] = self.by_kind;
        arena.into_iter().sum()
    }

    /// The store's size; its addresses begin where the arena's end.
    pub fn stored(&self) -> Bytes {
        self.of(MemoryKind::Stored)
    }

    /// The size of what all ranks share; its addresses begin where the store's end.
    pub fn shared(&self) -> Bytes {
        self.of(MemoryKind::Shared)
    }

    /// What the first rank of a process takes, which also counts what all of them share.
    pub fn with_shared(&self) -> Bytes {
        self.total() + self.shared()
    }

    /// Bytes of one kind.
    pub fn of(&self, kind: MemoryKind) -> Bytes {
        self.by_kind[kind as usize]
    }
}

/// A run of elements in a role's arena, `copies` times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// A name for people.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Elements of one copy.
    pub elements: u64,
    /// How many copies there are.
    pub copies: u32,
    /// What it counts as.
    pub kind: MemoryKind,
    /// Where the first copy starts in the arena.
    pub offset: Bytes,
}

/// Every buffer, and every copy of one, starts at a multiple of this many bytes.
pub const ALIGNMENT: u64 = 64;

impl Buffer {
    /// Bytes of one copy, without padding.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.elements * self.dtype.size())
    }

    /// Distance between two copies.
    pub fn stride(&self) -> Bytes {
        self.bytes().round_up(ALIGNMENT)
    }

    /// Bytes from the first copy's start to the last copy's end.
    pub fn extent(&self) -> Bytes {
        self.stride() * u64::from(self.copies)
    }

    /// Where the copy for a running microbatch number starts.
    pub fn copy_offset(&self, running: u64) -> Bytes {
        self.offset + self.stride() * (running % u64::from(self.copies))
    }
}
