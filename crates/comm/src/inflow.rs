//! From a stream of bytes back to messages: shown in place to whoever asks for them, or put into a
//! mailbox where others come first.

use crate::error::CommError;
use crate::mailbox::{Mailbox, Parcel};
use crate::transport::{Header, Piece, Taken, Visit};
use crate::wire::{self, Frame, GRAIN, HEAD, WireError, padded};

/// Bytes that arrive in order and never go missing.
pub(crate) trait Source {
    /// Takes a head out, if all of it is there.
    fn head(&mut self) -> Result<Option<[u8; HEAD]>, CommError>;

    /// What has arrived and lies together; at least [`GRAIN`] bytes or as many as are `wanted`, if so
    /// many have arrived.
    fn peek(&mut self, wanted: usize) -> Result<&[u8], CommError>;

    /// Lets bytes go that were looked at.
    fn consume(&mut self, bytes: usize);
}

/// The receiving end of one stream.
#[derive(Debug, Default)]
pub(crate) struct Inflow {
    current: Option<Current>,
    /// Whether the sender has said goodbye.
    pub(crate) ended: bool,
}

/// The message that is arriving.
#[derive(Debug)]
struct Current {
    header: Header,
    total: usize,
    arrived: usize,
    /// What has been put aside, from this byte on.
    kept: Option<(usize, Vec<u8>)>,
}

/// Why a stream cannot be read on.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// What came is no frame.
    Wire(WireError),
    /// The source failed, or the visitor did.
    Comm(CommError),
}

impl From<CommError> for Trouble {
    fn from(error: CommError) -> Self {
        Self::Comm(error)
    }
}

impl Inflow {
    /// Shows what there is of the next message of a channel.
    pub(crate) fn take(
        &mut self,
        source: &mut impl Source,
        mail: &mut Mailbox,
        channel: u32,
        visit: &mut Visit<'_>,
    ) -> Result<Taken, Trouble> {
        if mail.has(channel) {
            return Ok(mail.show(channel, visit)?);
        }
        loop {
            let Some(current) = self.current(source)? else { return Ok(Taken::Nothing) };
            if current.kept.is_some() || current.header.tag.channel() != channel {
                if !self.keep(source, mail)? {
                    return Ok(Taken::Nothing);
                }
                if mail.has(channel) {
                    return Ok(mail.show(channel, visit)?);
                }
                continue;
            }
            let before = current.arrived;
            loop {
                let left = current.total - current.arrived;
                let there = source.peek(left)?;
                let n = if there.len() >= left { left } else { there.len() / GRAIN * GRAIN };
                if n == 0 && left > 0 {
                    let moved = current.arrived > before;
                    return Ok(if moved { Taken::Part } else { Taken::Nothing });
                }
                let piece = Piece { total: current.total, at: current.arrived, bytes: &there[..n] };
                visit(&current.header, piece)?;
                current.arrived += n;
                if n == left {
                    source.consume(padded(n));
                    self.current = None;
                    return Ok(Taken::Whole);
                }
                source.consume(n);
            }
        }
    }

    /// The next message of a channel, once all of it is there.
    pub(crate) fn parcel(
        &mut self,
        source: &mut impl Source,
        mail: &mut Mailbox,
        channel: u32,
    ) -> Result<Option<Parcel>, Trouble> {
        loop {
            if let Some(parcel) = mail.pop(channel) {
                return Ok(Some(parcel));
            }
            if self.current(source)?.is_none() || !self.keep(source, mail)? {
                return Ok(None);
            }
        }
    }

    /// The message that is arriving, if one is.
    fn current(&mut self, source: &mut impl Source) -> Result<Option<&mut Current>, Trouble> {
        if self.current.is_none() && !self.ended {
            let Some(head) = source.head()? else { return Ok(None) };
            match wire::decode(&head).map_err(Trouble::Wire)? {
                Frame::Goodbye => self.ended = true,
                Frame::Message { header, payload } => {
                    self.current = Some(Current { header, total: payload, arrived: 0, kept: None });
                }
            }
        }
        Ok(self.current.as_mut())
    }

    /// Puts what there is of the present message aside; whether that was the end of it.
    fn keep(&mut self, source: &mut impl Source, mail: &mut Mailbox) -> Result<bool, Trouble> {
        let Some(current) = &mut self.current else { return Ok(true) };
        let (_, data) = current.kept.get_or_insert_with(|| (current.arrived, mail.buffer()));
        loop {
            let left = current.total - current.arrived;
            let there = source.peek(left)?;
            let n = if there.len() >= left { left } else { there.len() / GRAIN * GRAIN };
            if n == 0 && left > 0 {
                return Ok(false);
            }
            data.extend_from_slice(&there[..n]);
            current.arrived += n;
            if n < left {
                source.consume(n);
                continue;
            }
            source.consume(padded(n));
            if let Some(Current { header, total, kept: Some((shown, data)), .. }) =
                self.current.take()
            {
                mail.push(Parcel { header, total, shown, data });
            }
            return Ok(true);
        }
    }
}
