//! Messages from one rank to another, outside any collective.

use crate::error::CommError;
use crate::transport::{Header, Piece, Progress, Purpose, Tag, Taken, Transport, Visitor, finish};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::time::Duration;

/// A message on its way out.
///
/// It goes straight from where it lies, as fast as the receiver takes it in: a copy that waited for
/// the wire would be memory that no plan knows of.
#[derive(Debug)]
pub struct Sending {
    to: Rank,
    tag: Tag,
    /// How many bytes have gone, once it has begun.
    gone: Option<usize>,
}

impl Sending {
    /// Prepares a message.
    pub const fn start(to: Rank, tag: Tag) -> Self {
        Self { to, tag, gone: None }
    }

    /// Sends as much of the message as the wire takes. Until it is done, the data must stay as it is.
    pub fn progress(
        &mut self,
        transport: &mut dyn Transport,
        data: &[f32],
    ) -> Result<Progress, CommError> {
        self.progress_bytes(transport, DType::F32, bytemuck::cast_slice(data))
    }

    /// As [`progress`](Self::progress), for elements of any type.
    pub fn progress_bytes(
        &mut self,
        transport: &mut dyn Transport,
        dtype: DType,
        data: &[u8],
    ) -> Result<Progress, CommError> {
        if self.gone != Some(data.len()) {
            let header = header(self.tag, dtype, data.len());
            self.gone = transport.try_send(self.to, &header, &[data], self.gone)?;
        }
        Ok(match self.gone {
            Some(gone) if gone == data.len() => Progress::Done,
            gone => Progress::Pending { on: self.to, step: 0, moved: gone.unwrap_or(0) as u64 },
        })
    }
}

/// A message on its way in.
#[derive(Debug)]
pub struct Receiving {
    from: Rank,
    tag: Tag,
    arrived: usize,
    received: bool,
}

impl Receiving {
    /// Expects a message.
    pub const fn start(from: Rank, tag: Tag) -> Self {
        Self { from, tag, arrived: 0, received: false }
    }

    /// Takes in what is there of the message; the buffer must have exactly its size.
    pub fn progress(
        &mut self,
        transport: &mut dyn Transport,
        data: &mut [f32],
    ) -> Result<Progress, CommError> {
        self.progress_bytes(transport, DType::F32, bytemuck::cast_slice_mut(data))
    }

    /// As [`progress`](Self::progress), for elements of any type.
    pub fn progress_bytes(
        &mut self,
        transport: &mut dyn Transport,
        dtype: DType,
        data: &mut [u8],
    ) -> Result<Progress, CommError> {
        if self.received {
            return Ok(Progress::Done);
        }
        let (rank, peer) = (transport.rank(), self.from);
        let expected = header(self.tag, dtype, data.len());
        let arrived = &mut self.arrived;
        let mut whole = Whole { rank, peer, expected, arrived, data };
        let taken = transport.try_take(peer, self.tag, &mut whole)?;
        if taken == Taken::Whole {
            self.received = true;
            return Ok(Progress::Done);
        }
        Ok(Progress::Pending { on: peer, step: 0, moved: self.arrived as u64 })
    }
}

/// A message that is put into a buffer as it is.
struct Whole<'m> {
    rank: Rank,
    peer: Rank,
    expected: Header,
    arrived: &'m mut usize,
    data: &'m mut [u8],
}

impl Whole<'_> {
    fn check(&self, found: &Header, total: usize) -> Result<(), CommError> {
        let Self { rank, peer, .. } = *self;
        self.expected.check(rank, peer, found)?;
        if total != self.data.len() {
            let (expected, found) = (self.data.len() as u64, total as u64);
            return Err(CommError::Length { rank, peer, expected, found });
        }
        Ok(())
    }
}

impl Visitor for Whole<'_> {
    fn show(&mut self, header: &Header, piece: Piece<'_>) -> Result<(), CommError> {
        self.check(header, piece.total)?;
        *self.arrived = piece.at + piece.bytes.len();
        self.data[piece.at..*self.arrived].copy_from_slice(piece.bytes);
        Ok(())
    }

    fn place(
        &mut self,
        header: &Header,
        total: usize,
        at: usize,
    ) -> Result<Option<&mut [u8]>, CommError> {
        self.check(header, total)?;
        Ok(self.data.get_mut(at..))
    }

    fn placed(&mut self, bytes: usize) {
        *self.arrived += bytes;
    }
}

/// Sends a message. Never waits: what the wire does not take yet is copied.
pub fn send(
    transport: &mut dyn Transport,
    to: Rank,
    tag: Tag,
    data: &[f32],
) -> Result<(), CommError> {
    let data = bytemuck::cast_slice(data);
    transport.send(to, &header(tag, DType::F32, data.len()), &[data])
}

/// Waits for a message, giving up on a sender that is silent for as long as `patience`.
pub fn recv(
    transport: &mut dyn Transport,
    from: Rank,
    tag: Tag,
    data: &mut [f32],
    patience: Duration,
) -> Result<(), CommError> {
    let mut receiving = Receiving::start(from, tag);
    finish(transport, patience, |transport| receiving.progress(transport, data))
}

fn header(tag: Tag, dtype: DType, bytes: usize) -> Header {
    let elements = bytes as u64 / dtype.size();
    Header { tag, purpose: Purpose::PointToPoint { elements, dtype }, round: 0 }
}
