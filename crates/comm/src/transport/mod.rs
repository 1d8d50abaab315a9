//! Transports: the means by which the ranks of a world exchange messages.

mod kind;
mod local;
mod message;
pub mod mpi;
pub mod process;
pub mod thread;

pub use kind::TransportKind;
pub use local::LocalWorld;
pub use message::{Header, MessageChunk, Purpose, RecvStatus, Tag};

use crate::error::CommError;
use crate::recorder::FlightRecorder;
use crate::shared_memory::SharedMemory;
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

    /// Passes the next message from a rank on the tag's channel to `read` once it is complete, for
    /// messages of unknown length; returns false if it is not.
    fn try_recv(
        &mut self,
        from: Rank,
        tag: Tag,
        read: &mut dyn FnMut(&Header, &[u8]),
    ) -> Result<bool, CommError>;

    /// Parks the thread until requested data may have arrived, a blocked send may proceed, or
    /// `at_most` has passed. May return without any change.
    fn wait(&mut self, how: Wait, at_most: Duration) -> Result<(), CommError>;

    /// Returns a handle that ends a wait of this rank from another thread. With `None`, one thread
    /// has to do all of this rank's work.
    fn waker(&self) -> Option<Waker> {
        None
    }

    /// Tells every rank that this one cannot continue. The first failure counts.
    fn abort(&mut self, reason: &str);

    /// Returns the memory that this rank shares with others, if it shares any.
    fn memory(&mut self) -> Option<&mut dyn SharedMemory> {
        None
    }

    /// Returns the zero-copy sends of this transport, if it has any.
    fn zero_copy(&mut self) -> Option<&mut dyn ZeroCopy> {
        None
    }

    /// Returns the last messages of this rank for failure analysis, if the transport records them.
    fn flight_record(&self) -> Option<FlightRecorder> {
        None
    }
}

/// Sends that take no copy: the bytes stay unchanged not only until they are sent but until the
/// peer has taken them.
pub trait ZeroCopy {
    /// Least bytes of a vector whose messages are worth it; the same on all ranks. By default below
    /// it the acks cost more than the copies.
    fn least(&self) -> u64 {
        4 << 20
    }

    /// Like [`Transport::try_send`], for such bytes. The transport may copy them nevertheless;
    /// [`receipt`](Self::receipt) tells if it did.
    fn try_send(
        &mut self,
        to: Rank,
        header: &Header,
        data: &[&[u8]],
        gone: Option<usize>,
    ) -> Result<Option<usize>, CommError>;

    /// Receipt of the last message to a rank on the tag's channel, just sent completely, if it was
    /// zero-copy. Its bytes must stay unchanged until it [is acked](Self::is_acked).
    fn receipt(&mut self, to: Rank, tag: Tag) -> Option<u64>;

    /// Acks the zero-copy messages taken so far, to all ranks. Every participant of an operation
    /// that may use zero-copy sends calls this at its end.
    fn send_acks(&mut self) -> Result<(), CommError>;

    /// Returns true if a rank has acked the message with this receipt.
    fn is_acked(&mut self, by: Rank, tag: Tag, receipt: u64) -> Result<bool, CommError>;
}

/// Behaviour of a waiting thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Spins, yields and then blocks, as suits the number of ranks and cores.
    Spin,
    /// Blocks from the start: for a thread beside one that computes and needs the core.
    Block,
}

/// Consumer of a message as it arrives. Every function of a header and a chunk is one.
pub trait MessageSink {
    /// Consumes a chunk.
    fn chunk(&mut self, header: &Header, piece: MessageChunk<'_>) -> Result<(), CommError>;

    /// Contiguous memory for the bytes of a message of `total` bytes from byte `at` on, if they are
    /// only to be stored. A transport that can write there directly saves a buffer on the way. It
    /// reports such bytes to [`written`](Self::written) instead of passing them to
    /// [`chunk`](Self::chunk). The memory stays in place, and nothing else touches it, until the
    /// message is complete or the world has failed.
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
        transport.wait(Wait::Spin, timeout - waited)?;
    }
}
