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

/// Plaintext bytes of a long record: a fraction of a core's L1 cache, where it is collected and sealed.
pub(super) const RECORD: usize = 16 << 10;
/// Bytes sealed before they are written, and read at once: some records.
pub(super) const BATCH: usize = 128 << 10;

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
    /// Finds the next record, if all plaintext is consumed and all of the record has arrived; returns
    /// the range of its sealed bytes after the head.
    fn next_record(&mut self) -> Result<Option<Range<usize>>, StreamError> {
        while self.buffer.open.is_empty() {
            let wanted = self.buffer.expected.unwrap_or(RECORD_HEAD);
            if !self.arrived(wanted) {
                return Ok(None);
            }
            let SealedBuffer { opener, bytes, sealed, expected, .. } = &mut *self.buffer;
            let part = sealed.start..sealed.start + wanted;
            if expected.is_some() {
                return Ok(Some(part));
            }
            sealed.start = part.end;
            if let Some(head) = bytes[part].first_chunk_mut() {
                let length = opener.head(head)?;
                let plain = length.saturating_sub(TAG);
                if plain == 0 || plain > RECORD || !plain.is_multiple_of(GRAIN) {
                    return Err(StreamError::Wire(WireError::Field { what: "record length" }));
                }
                *expected = Some(length);
            }
        }
        Ok(None)
    }

    /// Opens the next record where it was read.
    fn open_next(&mut self) -> Result<(), StreamError> {
        if let Some(part) = self.next_record()? {
            let SealedBuffer { opener, bytes, open, sealed, expected } = &mut *self.buffer;
            let plain = opener.body(&mut bytes[part.clone()])?.len();
            (*open, sealed.start, *expected) = (part.start..part.start + plain, part.end, None);
        }
        Ok(())
    }

    /// Reads until `wanted` sealed bytes are there; returns false if they have not arrived yet.
    fn arrived(&mut self, wanted: usize) -> bool {
        let SealedBuffer { bytes, sealed, .. } = &mut *self.buffer;
        if bytes.is_empty() {
            bytes.resize(2 * BATCH, 0);
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

    fn read_into(&mut self, into: &mut [u8]) -> Result<Option<usize>, StreamError> {
        let Some(part) = self.next_record()? else { return Ok(None) };
        let plain = part.len() - TAG;
        let Some(into) = into.get_mut(..plain) else { return Ok(None) };
        let SealedBuffer { opener, bytes, sealed, expected, .. } = &mut *self.buffer;
        opener.body_into(&bytes[part.clone()], into)?;
        (sealed.start, *expected) = (part.end, None);
        Ok(Some(plain))
    }

    fn consume(&mut self, bytes: usize) {
        // A frame's padding is in the record of its last bytes.
        let open = &mut self.buffer.open;
        open.start = open.end.min(open.start + bytes);
    }
}
