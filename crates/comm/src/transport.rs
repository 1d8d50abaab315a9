//! The seam between collectives and wires.

use crate::collective::CollectiveSpec;
use crate::error::CommError;
use crate::shm::window::{Loan, SharedBuffer, Window};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One rank's end of all its wires.
///
/// Messages from one rank on one channel arrive in the order in which they were sent. Once any rank
/// has failed, every call of every rank returns [`CommError::Failed`] with that rank's name.
pub trait Transport: Send {
    /// Who this is.
    fn rank(&self) -> Rank;

    /// How many ranks there are.
    fn world(&self) -> u32;

    /// Hands a message over, whose bytes lie in several pieces. Never blocks: the transport keeps a
    /// copy of what the wire does not take yet.
    fn send(&mut self, to: Rank, header: &Header, data: &[&[u8]]) -> Result<(), CommError>;

    /// Hands over as much of a message as the wire takes now, copying nothing that it does not.
    /// `gone` is what the last call for this message returned, none before the first; it is also
    /// none if the wire is still busy with another message.
    ///
    /// A message that has begun must be gone on with until it has gone, before others to the same
    /// rank can begin.
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

    /// As [`try_send`](Self::try_send), for bytes that stay as they are not only until they have gone but
    /// until the peer has taken them: a wire that can spares them a copy. Whether they have to is what
    /// [`went_in_place`](Self::went_in_place) tells.
    fn try_send_in_place(
        &mut self,
        to: Rank,
        header: &Header,
        data: &[&[u8]],
        gone: Option<usize>,
    ) -> Result<Option<usize>, CommError> {
        self.try_send(to, header, data, gone)
    }

    /// The receipt of the last message to a rank on the tag's channel, which has just gone entirely, if it
    /// went in place. Its bytes have to stay until it [is taken](Self::is_taken).
    fn went_in_place(&self, _to: Rank, _tag: Tag) -> Option<u64> {
        None
    }

    /// Tells all ranks how many of their messages have been taken that came in place. Whoever takes part
    /// in what such messages may belong to says so at its end.
    fn tell_taken(&mut self) -> Result<(), CommError> {
        Ok(())
    }

    /// Whether a rank has said that it has taken the message of this receipt.
    fn is_taken(&mut self, _by: Rank, _tag: Tag, _receipt: u64) -> Result<bool, CommError> {
        Ok(true)
    }

    /// Shows what has arrived of the next message from a rank on the tag's channel. Its sequence
    /// number may be another than the tag's; then the two ranks disagree, and [`Header::check`] says
    /// how.
    ///
    /// Every byte is shown once, in order, and is gone after that; an empty message is shown as one
    /// empty piece.
    fn try_take(
        &mut self,
        from: Rank,
        tag: Tag,
        visit: &mut dyn Visitor,
    ) -> Result<Taken, CommError>;

    /// The next message from a rank on the tag's channel, once all of it is there: for messages whose
    /// length the receiver does not know.
    fn try_recv(&mut self, from: Rank, tag: Tag) -> Result<Option<(Header, Vec<u8>)>, CommError>;

    /// Parks the thread until something may have arrived of what was asked for and not there, or
    /// something may go that did not, or for that long. Returning is no promise that anything did.
    fn wait(&mut self, at_most: Duration) -> Result<(), CommError>;

    /// As [`wait`](Self::wait), but asleep from the start: for a thread beside one that computes and
    /// needs the core.
    fn sleep(&mut self, at_most: Duration) -> Result<(), CommError> {
        self.wait(at_most)
    }

    /// What ends a wait of this rank from another thread. None where nothing can; then one thread has
    /// to do all of this rank's work.
    fn waker(&self) -> Option<Waker> {
        None
    }

    /// Tells every rank that this one cannot go on. The first failure is the one that counts.
    fn abort(&mut self, reason: &str);

    /// Whether ranks can read each other's memory.
    fn shares_memory(&self) -> bool {
        false
    }

    /// Whether this rank and that one can map each other's [`SharedBuffer`]s. Of ranks that can,
    /// any two can.
    fn is_neighbour(&self, _rank: Rank) -> bool {
        false
    }

    /// Memory for vectors that neighbours can read in place, zero at first; none where there are no
    /// such neighbours. Read-reduce on vectors elsewhere copies them once more.
    fn neighbourly_memory(&mut self, _bytes: usize) -> Result<Option<SharedBuffer>, CommError> {
        Ok(None)
    }

    /// Where neighbours find these bytes, if they lie in such memory.
    fn locate(&self, _bytes: &[u8]) -> Option<Loan> {
        None
    }

    /// What a neighbour has located; none if this rank cannot reach any neighbour's memory.
    fn open(&mut self, _loan: &Loan) -> Result<Option<Window>, CommError> {
        Ok(None)
    }

    /// A piece of neighbourly memory of so many bytes to work in for a while; one that was given
    /// back where there is one.
    fn take_stage(&mut self, bytes: usize) -> Result<Option<SharedBuffer>, CommError> {
        self.neighbourly_memory(bytes)
    }

    /// Takes a stage back.
    fn give_stage_back(&mut self, stage: SharedBuffer) {
        drop(stage);
    }

    /// Lets a rank read bytes where they lie, if both can reach them, and sends them if not. What is
    /// lent must stay as it is until the reader has said that it is done, which it does with an
    /// empty message of the same header; whether that is to come is the result.
    ///
    /// Nothing is done, and nothing is the result, on a transport that shares no memory.
    fn lend(
        &mut self,
        _to: Rank,
        _header: &Header,
        _bytes: &[&[u8]],
    ) -> Result<Option<Lending>, CommError> {
        Ok(None)
    }

    /// What a rank has lent, if the message that says so is there.
    fn try_borrow(&mut self, _from: Rank, _tag: Tag) -> Result<Option<(Header, Lent)>, CommError> {
        Ok(None)
    }
}

/// What looks at a message as it comes in. Every function of a header and a piece is one.
pub trait Visitor {
    /// Takes a piece in.
    fn show(&mut self, header: &Header, piece: Piece<'_>) -> Result<(), CommError>;

    /// Where the bytes of a message of `total` bytes are to lie from byte `at` on, as many as lie
    /// together, if nothing is to be done with them but to put them there. A transport that can
    /// write them there itself spares them a buffer on the way, and tells [`placed`](Self::placed)
    /// of those that it has written instead of showing them.
    fn place(
        &mut self,
        _header: &Header,
        _total: usize,
        _at: usize,
    ) -> Result<Option<&mut [u8]>, CommError> {
        Ok(None)
    }

    /// So many bytes have been written to where they were last said to lie.
    fn placed(&mut self, _bytes: usize) {}
}

impl<F: FnMut(&Header, Piece<'_>) -> Result<(), CommError>> Visitor for F {
    fn show(&mut self, header: &Header, piece: Piece<'_>) -> Result<(), CommError> {
        self(header, piece)
    }
}

/// Ends the wait of a rank that is under way, or else its next one, from any thread.
#[derive(Clone)]
pub struct Waker(Arc<dyn Fn() + Send + Sync>);

impl Waker {
    /// One that calls `wake`.
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

/// A part of a message. All but the last end at a multiple of 64 bytes from the beginning.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'p> {
    /// How many bytes the whole message has.
    pub total: usize,
    /// How many stand before this piece.
    pub at: usize,
    /// The elements, as they lie in the sender's memory. All ranks have the same byte order.
    pub bytes: &'p [u8],
}

/// What was there of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// Nothing new.
    Nothing,
    /// Some of it, and more is to come.
    Part,
    /// All of it, now or in earlier calls.
    Whole,
}

/// How bytes were lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lending {
    /// In place: the reader will say that it is done.
    InPlace,
    /// As a copy: nothing is to be waited for.
    Copied,
}

/// Bytes of another rank.
#[derive(Debug)]
pub enum Lent {
    /// Where the lender has them.
    InPlace(Window),
    /// A copy.
    Copied(Vec<u8>),
}

impl Lent {
    /// How many there are.
    pub fn bytes(&self) -> usize {
        match self {
            Self::InPlace(window) => window.bytes(),
            Self::Copied(copy) => copy.len(),
        }
    }

    /// The bytes, in order, in as many pieces as they lie in.
    pub fn pieces(&self) -> Vec<&[u8]> {
        match self {
            Self::InPlace(window) => window.pieces(),
            Self::Copied(copy) => vec![copy],
        }
    }
}

/// Which conversation a message belongs to, and how far that has got.
///
/// Channels never mix: whoever runs several things at once (the lanes of a program, the groups of a
/// lane) gives each a channel of its own. Within a channel the sequence number counts operations,
/// so that ranks which have lost step notice at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(u64);

impl Tag {
    /// An operation of a channel.
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

/// What a sender is doing, so that a receiver can tell whether it is doing the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Where in its channel the sender is.
    pub tag: Tag,
    /// What it does there.
    pub purpose: Purpose,
    /// The round of the collective.
    pub round: u32,
}

impl Header {
    /// Compares what a peer does with what `rank` does.
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

/// An operation as both ends of a message must see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Part of a collective.
    Collective {
        /// What all members agree on.
        spec: CollectiveSpec,
        /// How many members there are.
        ranks: u32,
        /// Elements of the whole vector.
        elements: u64,
        /// How each of them is stored.
        dtype: DType,
    },
    /// A message by itself.
    PointToPoint {
        /// Its elements.
        elements: u64,
        /// How each of them is stored.
        dtype: DType,
    },
    /// Nothing but a sign of having got there.
    Barrier {
        /// How many ranks meet.
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

/// How far an operation has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing is left to do.
    Done,
    /// A message is not there yet, or not gone. The same value twice means that nothing has moved in between.
    Pending {
        /// Whose message it is.
        on: Rank,
        /// Which of the operation's steps waits for it.
        step: usize,
        /// How many bytes have moved so far.
        moved: u64,
    },
}

/// Drives one operation to its end, and gives up when nothing has moved for as long as `patience`.
pub fn finish(
    transport: &mut dyn Transport,
    patience: Duration,
    mut progress: impl FnMut(&mut dyn Transport) -> Result<Progress, CommError>,
) -> Result<(), CommError> {
    let mut last = Progress::Done;
    let mut since = Instant::now();
    loop {
        let now = progress(transport)?;
        let Progress::Pending { on, .. } = now else { return Ok(()) };
        // Clocks are read as little as possible: a short operation takes less than a few readings.
        let waited = if now == last { since.elapsed() } else { Duration::ZERO };
        if now != last {
            (last, since) = (now, Instant::now());
        }
        if waited >= patience {
            return Err(CommError::Silent { rank: on, after: waited });
        }
        transport.wait(patience - waited)?;
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
