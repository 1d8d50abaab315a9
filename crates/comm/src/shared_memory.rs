//! Memory that ranks of one host share: vectors that peers read and write in place.

use crate::error::CommError;
use crate::shm::window::{SharedBuffer, Window};
use crate::transport::{Header, Tag};
use paceline_plan::ids::Rank;
use smallvec::{SmallVec, smallvec};

/// List by member of a group, or by piece of a message: most are short, and allocate nothing.
pub(crate) type Few<T> = SmallVec<[T; 8]>;
/// List by range of a loan, which has mostly one.
pub(crate) type Pieces<T> = SmallVec<[T; 2]>;

/// Memory shared by the ranks of an shm domain, reached through
/// [`Transport::memory`](crate::Transport::memory).
pub trait SharedMemory {
    /// Returns true if this rank and the given one can map each other's [`SharedBuffer`]s. The
    /// relation is transitive.
    fn shares_memory_with(&mut self, rank: Rank) -> bool;

    /// Allocates zeroed memory for vectors that ranks of the shm domain can read in place. Shared
    /// memory on other vectors copies them once more.
    fn alloc_shared(&mut self, bytes: usize) -> Result<SharedBuffer, CommError>;

    /// Returns true if all of these bytes are stored in one such buffer.
    fn holds(&mut self, bytes: &[u8]) -> bool;

    /// Takes a staging buffer of at least `bytes` bytes, reusing a returned one if possible.
    fn take_staging(&mut self, bytes: usize) -> Result<SharedBuffer, CommError>;

    /// Returns a staging buffer.
    fn return_staging(&mut self, staging: SharedBuffer);

    /// Lets a rank read bytes in place if both can reach them; returns false otherwise. Lent bytes
    /// must stay unchanged until the reader reports that it is done, with an empty message of the
    /// same header.
    fn lend(&mut self, to: Rank, header: &Header, bytes: &[&[u8]]) -> Result<bool, CommError>;

    /// Returns the bytes a rank has lent, if its message has arrived.
    fn try_borrow(&mut self, from: Rank, tag: Tag) -> Result<Option<(Header, Lent)>, CommError>;
}

/// Bytes lent by another rank.
#[derive(Debug)]
pub enum Lent {
    /// In the lender's memory.
    InPlace(Window),
    /// A copy.
    Copied(Vec<u8>),
}

impl Lent {
    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::InPlace(window) => window.bytes(),
            Self::Copied(copy) => copy.len(),
        }
    }

    /// The bytes, in order, as contiguous pieces.
    ///
    /// # Safety
    ///
    /// The lender must not have been told that this rank is done with bytes in place: as long as the
    /// result is used, they must stay unchanged.
    #[expect(unsafe_code, reason = "the caller keeps the protocol of loans")]
    pub(crate) unsafe fn pieces(&self) -> Pieces<&[u8]> {
        match self {
            // SAFETY: the caller guarantees it.
            Self::InPlace(window) => unsafe { window.pieces() },
            Self::Copied(copy) => smallvec![copy.as_slice()],
        }
    }
}
