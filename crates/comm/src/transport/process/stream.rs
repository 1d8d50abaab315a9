//! Receiving half of a TCP connection: a buffer that stays in the nearest caches and passes
//! messages to the caller.

use super::connection::Connection;
use crate::frame_reader::{Source, StreamError};
use crate::wire::{GRAIN, HEAD};
use std::io::{ErrorKind, Read};

/// Bytes read at once: a fraction of a core's L2 cache.
const BUFFER: usize = 128 << 10;

/// Bytes of one connection that have been read but not consumed.
#[derive(Debug, Default)]
pub(super) struct RecvBuffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// Number of bytes to skip that have not arrived yet.
    skip: usize,
    /// True if the last message was large. The next one is likely large too: then only its head is
    /// read, so that the rest can be read directly to its destination.
    large: bool,
    /// True if the bytes after the last head have not been requested yet.
    fresh: bool,
}

impl RecvBuffer {
    /// Records the size of the current message, given by the first request after a head.
    fn expect(&mut self, left: usize) {
        if std::mem::take(&mut self.fresh) {
            self.large = left >= BUFFER / 2;
        }
    }
}

/// A connection and its receive buffer.
pub(super) struct Stream<'s> {
    pub(super) connection: &'s Connection,
    pub(super) backlog: &'s mut RecvBuffer,
}

impl Stream<'_> {
    /// Reads from the socket if fewer than `wanted` bytes are buffered, up to `most` bytes.
    fn fetch(&mut self, wanted: usize, most: usize) {
        let RecvBuffer { bytes, start, end, skip, .. } = &mut *self.backlog;
        if *end - *start >= wanted || self.connection.is_broken() {
            return;
        }
        if bytes.is_empty() {
            bytes.resize(BUFFER, 0);
        }
        bytes.copy_within(*start..*end, 0);
        (*end, *start) = (*end - *start, 0);
        let most = most.saturating_add(*skip).clamp(*end + 1, BUFFER);
        loop {
            match (&self.connection.stream).read(&mut bytes[*end..most]) {
                Ok(0) => return self.connection.mark_broken(),
                Ok(n) => {
                    *end += n;
                    let skipped = (*skip).min(*end - *start);
                    (*start, *skip) = (*start + skipped, *skip - skipped);
                    // The next call finds out if there is more.
                    return;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.connection.mark_broken(),
            }
        }
    }
}

impl Source for Stream<'_> {
    fn head(&mut self) -> Result<Option<[u8; HEAD]>, StreamError> {
        self.fetch(HEAD, if self.backlog.large { HEAD } else { BUFFER });
        let RecvBuffer { bytes, start, end, fresh, .. } = &mut *self.backlog;
        let head = bytes[*start..*end].first_chunk().copied();
        if head.is_some() {
            *start += HEAD;
            *fresh = true;
        }
        Ok(head)
    }

    fn peek(&mut self, wanted: usize) -> Result<&[u8], StreamError> {
        self.fetch(wanted.min(GRAIN), BUFFER);
        self.backlog.expect(wanted);
        let RecvBuffer { bytes, start, end, .. } = &*self.backlog;
        Ok(&bytes[*start..*end])
    }

    fn consume(&mut self, bytes: usize) {
        let RecvBuffer { start, end, skip, .. } = &mut *self.backlog;
        let there = bytes.min(*end - *start);
        *start += there;
        *skip += bytes - there;
    }

    fn read_into(&mut self, into: &mut [u8]) -> Result<Option<usize>, StreamError> {
        self.backlog.expect(into.len());
        let RecvBuffer { start, end, skip, .. } = &mut *self.backlog;
        if start != end || *skip > 0 || self.connection.is_broken() {
            return Ok(None);
        }
        loop {
            match (&self.connection.stream).read(into) {
                Ok(0) => self.connection.mark_broken(),
                Ok(n) => return Ok(Some(n)),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => self.connection.mark_broken(),
            }
            return Ok(Some(0));
        }
    }
}
