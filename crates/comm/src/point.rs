//! Point-to-point messages.

use crate::error::CommError;
use crate::transport::{
    Header, MessageChunk, MessageSink, Progress, Purpose, RecvStatus, Tag, Transport, finish,
};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::time::Duration;

/// A message being sent.
///
/// It is sent directly from the caller's buffer, as fast as the receiver accepts it: a queued copy
/// would be memory that no plan accounts for.
#[derive(Debug)]
pub struct Sending {
    to: Rank,
    tag: Tag,
    /// Number of bytes sent; `None` before the start.
    gone: Option<usize>,
}

impl Sending {
    /// Prepares a send.
    pub const fn start(to: Rank, tag: Tag) -> Self {
        Self { to, tag, gone: None }
    }

    /// Sends as much as the transport accepts. The data must not change until it is done.
    pub fn progress(
        &mut self,
        transport: &mut dyn Transport,
        data: &[f32],
    ) -> Result<Progress, CommError> {
        self.progress_bytes(transport, DType::F32, bytemuck::cast_slice(data))
    }

    /// Like [`progress`](Self::progress), for elements of any dtype.
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

/// A message being received.
#[derive(Debug)]
pub struct Receiving {
    from: Rank,
    tag: Tag,
    arrived: usize,
    received: bool,
}

impl Receiving {
    /// Prepares a receive.
    pub const fn start(from: Rank, tag: Tag) -> Self {
        Self { from, tag, arrived: 0, received: false }
    }

    /// Receives available data of the message; the buffer must have exactly its size.
    pub fn progress(
        &mut self,
        transport: &mut dyn Transport,
        data: &mut [f32],
    ) -> Result<Progress, CommError> {
        self.progress_bytes(transport, DType::F32, bytemuck::cast_slice_mut(data))
    }

    /// Like [`progress`](Self::progress), for elements of any dtype.
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
        let taken = transport.try_recv_into(peer, self.tag, &mut whole)?;
        if taken == RecvStatus::Complete {
            self.received = true;
            return Ok(Progress::Done);
        }
        Ok(Progress::Pending { on: peer, step: 0, moved: self.arrived as u64 })
    }
}

/// Message sink that stores a message unchanged in a buffer.
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

impl MessageSink for Whole<'_> {
    fn chunk(&mut self, header: &Header, piece: MessageChunk<'_>) -> Result<(), CommError> {
        self.check(header, piece.total)?;
        *self.arrived = piece.at + piece.bytes.len();
        self.data[piece.at..*self.arrived].copy_from_slice(piece.bytes);
        Ok(())
    }

    fn destination(
        &mut self,
        header: &Header,
        total: usize,
        at: usize,
    ) -> Result<Option<&mut [u8]>, CommError> {
        self.check(header, total)?;
        Ok(self.data.get_mut(at..))
    }

    fn written(&mut self, bytes: usize) {
        *self.arrived += bytes;
    }
}

/// Sends a message. Never blocks: data that the transport does not accept yet is copied.
pub fn send(
    transport: &mut dyn Transport,
    to: Rank,
    tag: Tag,
    data: &[f32],
) -> Result<(), CommError> {
    let data = bytemuck::cast_slice(data);
    transport.send(to, &header(tag, DType::F32, data.len()), &[data])
}

/// Waits for a message; fails if the sender is silent for `timeout`.
pub fn recv(
    transport: &mut dyn Transport,
    from: Rank,
    tag: Tag,
    data: &mut [f32],
    timeout: Duration,
) -> Result<(), CommError> {
    let mut receiving = Receiving::start(from, tag);
    finish(transport, timeout, |transport| receiving.progress(transport, data))
}

fn header(tag: Tag, dtype: DType, bytes: usize) -> Header {
    let elements = bytes as u64 / dtype.size();
    Header { tag, purpose: Purpose::PointToPoint { elements, dtype }, round: 0 }
}
