//! Messages from one rank to another, outside any collective.

use crate::error::CommError;
use crate::transport::{Header, Payload, Progress, Purpose, Tag, Transport, finish};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::time::Duration;

/// A message on its way out.
#[derive(Debug)]
pub struct Sending {
    to: Rank,
    tag: Tag,
    sent: bool,
}

impl Sending {
    /// Prepares a message.
    pub const fn start(to: Rank, tag: Tag) -> Self {
        Self { to, tag, sent: false }
    }

    /// Sends the message, if that has not been done; transports buffer, so it is done at once.
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
        if !self.sent {
            let mut buffer = transport.take_buffer(data.len());
            buffer.extend_from_slice(data);
            let header = header(self.tag, dtype, data.len());
            transport.send(self.to, self.tag, Payload { header, data: buffer })?;
            self.sent = true;
        }
        Ok(Progress::Done)
    }
}

/// A message on its way in.
#[derive(Debug)]
pub struct Receiving {
    from: Rank,
    tag: Tag,
    received: bool,
}

impl Receiving {
    /// Expects a message.
    pub const fn start(from: Rank, tag: Tag) -> Self {
        Self { from, tag, received: false }
    }

    /// Takes the message in if it is there; the buffer must have exactly its size.
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
        let Some(payload) = transport.try_recv(self.from, self.tag)? else {
            return Ok(Progress::Pending { on: self.from, step: 0 });
        };
        let (rank, peer) = (transport.rank(), self.from);
        header(self.tag, dtype, data.len()).check(rank, peer, &payload.header)?;
        if payload.data.len() != data.len() {
            let (expected, found) = (data.len() as u64, payload.data.len() as u64);
            return Err(CommError::Length { rank, peer, expected, found });
        }
        data.copy_from_slice(&payload.data);
        transport.recycle(payload.data);
        self.received = true;
        Ok(Progress::Done)
    }
}

/// Sends a message.
pub fn send(
    transport: &mut dyn Transport,
    to: Rank,
    tag: Tag,
    data: &[f32],
) -> Result<(), CommError> {
    Sending::start(to, tag).progress(transport, data).map(|_| ())
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
