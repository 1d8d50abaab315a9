//! Transport interface between collectives and the means of communication.

use crate::collective::CollectiveSpec;
use crate::error::CommError;
use crate::shm::window::{Loan, SharedBuffer, Window};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One rank's endpoint for messages to and from all ranks.
///
/// Messages from one rank on one channel arrive in the order in which they were sent. Once any rank
/// has failed, every call of every rank returns [`CommError::Failed`] with that rank's name.
pub trait Transport: Send {
    /// This rank.
    fn rank(&self) -> Rank;

    /// Number of ranks.
    fn world(&self) -> u32;

    /// Sends a message whose bytes are stored in several pieces. Never blocks: the transport copies
    /// data that it cannot send yet.
    fn send(&mut self, to: Rank, header: &Header, data: &[&[u8]]) -> Result<(), CommError>;

    /// Sends as much of a message as possible now, without copying the rest. `gone` is the result
    /// of the last call for this message, `None` before the first. The result is also `None` while
    /// the transport is busy with another message.
    ///
    /// A message that has begun must be sent completely before another to the same rank can begin.
    fn try_send(
        &mut self,
        to: Rank,
        header: &Header,
        data: &[&[u8]],
        gone: Option<usize>,
    ) -> Result<Option<usize>, CommError> {
        debug_assert!(gone.is_none(), "a message that goes at once needs no second call");
        self.send(to, header, data)?;
        Ok(Some(data.iter().map(|piece| piece.len()).sum()))
    }

    /// Like [`try_send`](Self::try_send), for bytes that stay unchanged not only until they are
    /// sent but until the peer has taken them. A transport that supports it saves a copy;
    /// [`zero_copy_receipt`](Self::zero_copy_receipt) tells if it did.
    fn try_send_zero_copy(
        &mut self,
        to: Rank,
        header: &Header,
        data: &[&[u8]],
        gone: Option<usize>,
    ) -> Result<Option<usize>, CommError> {
        self.try_send(to, header, data, gone)
    }

    /// Receipt of the last message to a rank on the tag's channel, just sent completely, if it was
    /// zero-copy. Its bytes must stay unchanged until it [is acked](Self::is_acked).
    fn zero_copy_receipt(&self, _to: Rank, _tag: Tag) -> Option<u64> {
        None
    }

    /// Acks the zero-copy messages taken so far, to all ranks. Every participant of an operation
    /// that may use zero-copy sends calls this at its end.
    fn send_acks(&mut self) -> Result<(), CommError> {
        Ok(())
    }

    /// Returns true if a rank has acked the message with this receipt.
    fn is_acked(&mut self, _by: Rank, _tag: Tag, _receipt: u64) -> Result<bool, CommError> {
        Ok(true)
    }

    /// Passes the data that has arrived of the next message from a rank on the tag's channel to
    /// `visit`. If its sequence number differs from the tag's, the two ranks disagree, and
    /// [`Header::check`] reports the difference.
    ///
    /// Every byte is passed once, in order; an empty message is passed as one empty piece.
    fn try_recv_into(
        &mut self,
        from: Rank,
        tag: Tag,
        visit: &mut dyn MessageSink,
    ) -> Result<RecvStatus, CommError>;

    /// Returns the next message from a rank on the tag's channel once it is complete, for messages
    /// of unknown length.
    fn try_recv(&mut self, from: Rank, tag: Tag) -> Result<Option<(Header, Vec<u8>)>, CommError>;

    /// Parks the thread until requested data may have arrived, a blocked send may proceed, or
    /// `at_most` has passed. May return without any change.
    fn wait(&mut self, at_most: Duration) -> Result<(), CommError>;

    /// Like [`wait`](Self::wait), but blocks from the start: for a thread beside one that computes
    /// and needs the core.
    fn sleep(&mut self, at_most: Duration) -> Result<(), CommError> {
        self.wait(at_most)
    }

    /// Returns a handle that ends a wait of this rank from another thread. With `None`, one thread
    /// has to do all of this rank's work.
    fn waker(&self) -> Option<Waker> {
        None
    }

    /// Tells every rank that this one cannot continue. The first failure counts.
    fn abort(&mut self, reason: &str);

    /// Returns true if ranks can read each other's memory.
    fn shares_memory(&self) -> bool {
        false
    }

    /// Returns true if this rank and the given one can map each other's [`SharedBuffer`]s. The
    /// relation is transitive.
    fn shares_memory_with(&self, _rank: Rank) -> bool {
        false
    }

    /// Allocates zeroed memory for vectors that ranks of the shm domain can read in place; `None`
    /// if there are no such ranks. Shared memory on other vectors copies them once more.
    fn alloc_shared(&mut self, _bytes: usize) -> Result<Option<SharedBuffer>, CommError> {
        Ok(None)
    }

    /// Returns the location of these bytes for other ranks, if they are stored in such memory.
    fn locate(&self, _bytes: &[u8]) -> Option<Loan> {
        None
    }

    /// Opens memory located by a peer; `None` if this rank can reach no peer's memory.
    fn open(&mut self, _loan: &Loan) -> Result<Option<Window>, CommError> {
        Ok(None)
    }

    /// Takes a staging buffer of `bytes` bytes in shared memory, reusing a returned one if
    /// possible.
    fn take_staging(&mut self, bytes: usize) -> Result<Option<SharedBuffer>, CommError> {
        self.alloc_shared(bytes)
    }

    /// Returns a staging buffer.
    fn return_staging(&mut self, stage: SharedBuffer) {
        drop(stage);
    }

    /// Lets a rank read bytes in place if both can reach them, and sends a copy otherwise. Lent
    /// bytes must stay unchanged until the reader reports that it is done, with an empty message of
    /// the same header. The result tells if that message will follow.
    ///
    /// Does nothing and returns `None` on a transport without shared memory.
    fn lend(&mut self, _to: Rank, _header: &Header, _bytes: &[&[u8]]) -> Result<bool, CommError> {
        Ok(false)
    }

    /// Returns the bytes a rank has lent, if its message has arrived.
    fn try_borrow(&mut self, _from: Rank, _tag: Tag) -> Result<Option<(Header, Lent)>, CommError> {
        Ok(None)
    }
}

/// Consumer of a message as it arrives. Every function of a header and a chunk is one.
pub trait MessageSink {
    /// Consumes a chunk.
    fn chunk(&mut self, header: &Header, piece: MessageChunk<'_>) -> Result<(), CommError>;

    /// Contiguous memory for the bytes of a message of `total` bytes from byte `at` on, if they are
    /// only to be stored. A transport that can write there directly saves a buffer on the way. It
    /// reports such bytes to [`written`](Self::written) instead of passing them to
    /// [`chunk`](Self::chunk).
    fn destination(
        &mut self,
        _header: &Header,
        _total: usize,
        _at: usize,
    ) -> Result<Option<&mut [u8]>, CommError> {
        Ok(None)
    }

    /// Reports that `bytes` bytes have been written to the last destination.
    fn written(&mut self, _bytes: usize) {}
}

impl<F: FnMut(&Header, MessageChunk<'_>) -> Result<(), CommError>> MessageSink for F {
    fn chunk(&mut self, header: &Header, piece: MessageChunk<'_>) -> Result<(), CommError> {
        self(header, piece)
    }
}

/// Ends a rank's current wait, or else its next one, from any thread.
#[derive(Clone)]
pub struct Waker(Arc<dyn Fn() + Send + Sync>);

impl Waker {
    /// Creates a waker that calls `wake`.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(wake))
    }

    /// Ends the wait.
    pub fn wake(&self) {
        (self.0)();
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waker").finish_non_exhaustive()
    }
}

/// Part of a message. All but the last end at a multiple of 64 bytes from the beginning.
#[derive(Clone, Copy, Debug)]
pub struct MessageChunk<'p> {
    /// Length of the whole message, in bytes.
    pub total: usize,
    /// Number of bytes before this chunk.
    pub at: usize,
    /// Elements in the sender's memory representation. All ranks have the same byte order.
    pub bytes: &'p [u8],
}

/// Amount of a message received by a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecvStatus {
    /// Nothing new.
    None,
    /// Part of it; more will follow.
    Partial,
    /// All of it, in this or earlier calls.
    Complete,
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
    pub fn pieces(&self) -> Vec<&[u8]> {
        match self {
            Self::InPlace(window) => window.pieces(),
            Self::Copied(copy) => vec![copy],
        }
    }
}

/// Channel of a message and its operation number.
///
/// Channels never mix: concurrent activities (the lanes of a program, the groups of a lane) each
/// use their own channel. Within a channel the sequence number counts operations, so that ranks out
/// of step are detected at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(u64);

impl Tag {
    /// Creates the tag of an operation of a channel.
    pub const fn new(channel: u32, sequence: u32) -> Self {
        Self((channel as u64) << 32 | sequence as u64)
    }

    /// The channel.
    pub const fn channel(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The operation's number within the channel.
    pub const fn sequence(self) -> u32 {
        self.0 as u32
    }

    /// The next operation of the same channel.
    pub const fn next(self) -> Self {
        Self::new(self.channel(), self.sequence().wrapping_add(1))
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "channel {}, operation {}", self.channel(), self.sequence())
    }
}

/// Description of a sender's operation, by which a receiver checks that it does the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Channel and operation number.
    pub tag: Tag,
    /// Operation of the sender.
    pub purpose: Purpose,
    /// Round of the collective.
    pub round: u32,
}

impl Header {
    /// Compares the header `found` from a peer with that of `rank`.
    pub fn check(&self, rank: Rank, peer: Rank, found: &Self) -> Result<(), CommError> {
        if self == found {
            return Ok(());
        }
        Err(CommError::Mismatch { rank, peer, expected: Box::new(*self), found: Box::new(*found) })
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, round {})", self.purpose, self.tag, self.round)
    }
}

/// Operation, which must be equal at both ends of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Part of a collective.
    Collective {
        /// Parameters that all members agree on.
        spec: CollectiveSpec,
        /// Number of members.
        ranks: u32,
        /// Number of elements of the whole vector.
        elements: u64,
        /// Dtype of the elements.
        dtype: DType,
    },
    /// A single message.
    PointToPoint {
        /// Number of elements.
        elements: u64,
        /// Dtype of the elements.
        dtype: DType,
    },
    /// A barrier message without payload.
    Barrier {
        /// Number of ranks that synchronise.
        ranks: u32,
    },
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Collective { spec, ranks, elements, dtype } => {
                let CollectiveSpec { kind, algorithm, .. } = spec;
                write!(f, "{kind} of {elements} {dtype} elements by {algorithm}")?;
                write!(f, " among {ranks} ranks")?;
                if spec.kind.reduces() {
                    write!(f, ", {} in {} order", spec.reduction, spec.order)?;
                }
                if spec.kind.has_root() {
                    write!(f, ", root {}", spec.root)?;
                }
                match spec.block {
                    0 | 1 => Ok(()),
                    block => write!(f, ", blocks of {block}"),
                }
            }
            Self::PointToPoint { elements, dtype } => {
                write!(f, "a message of {elements} {dtype} elements")
            }
            Self::Barrier { ranks } => write!(f, "a barrier of {ranks} ranks"),
        }
    }
}

/// Progress of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing is left to do.
    Done,
    /// A message is missing or not fully sent. Equal values mean that nothing has moved.
    Pending {
        /// Rank at the other end of that message.
        on: Rank,
        /// Index of the operation's waiting step.
        step: usize,
        /// Number of bytes moved so far.
        moved: u64,
    },
}

/// Drives one operation to its end; fails if nothing has moved for `timeout`.
pub fn finish(
    transport: &mut dyn Transport,
    timeout: Duration,
    mut progress: impl FnMut(&mut dyn Transport) -> Result<Progress, CommError>,
) -> Result<(), CommError> {
    let mut last = Progress::Done;
    let mut since = Instant::now();
    loop {
        let now = progress(transport)?;
        let Progress::Pending { on, .. } = now else { return Ok(()) };
        // Read the clock rarely: a short operation takes less time than a few readings.
        let waited = if now == last { since.elapsed() } else { Duration::ZERO };
        if now != last {
            (last, since) = (now, Instant::now());
        }
        if waited >= timeout {
            return Err(CommError::Timeout { rank: on, after: waited });
        }
        transport.wait(timeout - waited)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_keep_channel_and_sequence_apart() {
        let tag = Tag::new(7, u32::MAX);
        assert_eq!((tag.channel(), tag.sequence()), (7, u32::MAX));
        assert_eq!(tag.next(), Tag::new(7, 0));
    }
}
