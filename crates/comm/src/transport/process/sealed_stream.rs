//! Receiving half of an encrypted TCP connection.
//!
//! Records are opened where they were read. Each holds one frame, or the next part of a long one,
//! in whole multiples of [`GRAIN`], so that neither a head nor an element spans two of them.

use super::connection::Connection;
use crate::frame_reader::{Source, StreamError};
use crate::session::{Opener, RECORD_HEAD, TAG};
use crate::wire::{GRAIN, HEAD, WireError};
use std::io::{ErrorKind, Read};
use std::ops::Range;

/// Plaintext bytes of a long record: a fraction of a core's L2 cache.
pub(super) const RECORD: usize = 64 << 10;
/// Bytes read at once: some records, so that few of them have to be moved to be completed.
const BUFFER: usize = 256 << 10;

/// Bytes of one encrypted connection that have been read but not consumed.
#[derive(Debug)]
pub(super) struct SealedBuffer {
    opener: Opener,
    bytes: Vec<u8>,
    /// Plaintext not consumed yet.
    open: Range<usize>,
    /// Sealed bytes after it.
    sealed: Range<usize>,
    /// Bytes of the record that is arriving, without its head, once that has been checked.
    expected: Option<usize>,
}

impl SealedBuffer {
    pub(super) fn new(opener: Opener) -> Self {
        Self { opener, bytes: Vec::new(), open: 0..0, sealed: 0..0, expected: None }
    }
}

/// An encrypted connection and its receive buffer.
pub(super) struct SealedStream<'s> {
    pub(super) connection: &'s Connection,
    pub(super) buffer: &'s mut SealedBuffer,
}

impl SealedStream<'_> {
    /// Opens the next record, if all plaintext is consumed and all of the record has arrived.
    fn open_next(&mut self) -> Result<(), StreamError> {
        while self.buffer.open.is_empty() {
            let wanted = self.buffer.expected.unwrap_or(RECORD_HEAD);
            if !self.arrived(wanted) {
                return Ok(());
            }
            let SealedBuffer { opener, bytes, open, sealed, expected } = &mut *self.buffer;
            let part = sealed.start..sealed.start + wanted;
            sealed.start = part.end;
            if expected.take().is_some() {
                let plain = opener.body(&mut bytes[part.clone()])?;
                *open = part.start..part.start + plain.len();
            } else if let Some(head) = bytes[part].first_chunk_mut() {
                let length = opener.head(head)?;
                let plain = length.saturating_sub(TAG);
                if plain == 0 || plain > RECORD || !plain.is_multiple_of(GRAIN) {
                    return Err(StreamError::Wire(WireError::Field { what: "record length" }));
                }
                *expected = Some(length);
            }
        }
        Ok(())
    }

    /// Reads until `wanted` sealed bytes are there; returns false if they have not arrived yet.
    fn arrived(&mut self, wanted: usize) -> bool {
        let SealedBuffer { bytes, sealed, .. } = &mut *self.buffer;
        if bytes.is_empty() {
            bytes.resize(BUFFER, 0);
        }
        if sealed.start + wanted > bytes.len() || sealed.start == sealed.end {
            bytes.copy_within(sealed.clone(), 0);
            *sealed = 0..sealed.len();
        }
        while sealed.len() < wanted && !self.connection.is_broken() {
            match (&self.connection.stream).read(&mut bytes[sealed.end..]) {
                Ok(0) => self.connection.mark_broken(),
                Ok(n) => sealed.end += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.connection.mark_broken(),
            }
        }
        sealed.len() >= wanted
    }
}

impl Source for SealedStream<'_> {
    fn head(&mut self) -> Result<Option<[u8; HEAD]>, StreamError> {
        self.open_next()?;
        let SealedBuffer { bytes, open, .. } = &mut *self.buffer;
        match bytes[open.clone()].first_chunk().copied() {
            None if open.start == open.end => Ok(None),
            None => Err(StreamError::Wire(WireError::Field { what: "record" })),
            Some(head) => {
                open.start += HEAD;
                Ok(Some(head))
            }
        }
    }

    fn peek(&mut self, _wanted: usize) -> Result<&[u8], StreamError> {
        self.open_next()?;
        let SealedBuffer { bytes, open, .. } = &*self.buffer;
        Ok(&bytes[open.clone()])
    }

    fn consume(&mut self, bytes: usize) {
        // A frame's padding is in the record of its last bytes.
        let open = &mut self.buffer.open;
        open.start = open.end.min(open.start + bytes);
    }
}
