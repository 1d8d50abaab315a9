//! The receiving half of a connection: a buffer small enough to stay in the nearest caches, from
//! which messages are shown to whoever takes them.

use super::connection::Connection;
use crate::error::CommError;
use crate::inflow::Source;
use crate::wire::{GRAIN, HEAD};
use std::io::{ErrorKind, Read};

/// How much is read at once: a part of what the second-level cache of a core holds.
const BUFFER: usize = 128 << 10;

/// Bytes of one connection that have been read and not been taken.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// How many bytes that have not come yet are to be passed over.
    skip: usize,
    /// Whether the last message was large. The next one is likely to be as well: then only its head
    /// is read, so that the rest can go straight to where it belongs.
    large: bool,
    /// Whether nobody has asked for what follows the last head.
    fresh: bool,
}

impl Backlog {
    /// Notes how much is left of the present message, of which the first to ask tells the size.
    fn expect(&mut self, left: usize) {
        if std::mem::take(&mut self.fresh) {
            self.large = left >= BUFFER / 2;
        }
    }
}

/// A connection and its backlog.
pub(super) struct Stream<'s> {
    pub(super) connection: &'s Connection,
    pub(super) backlog: &'s mut Backlog,
}

impl Stream<'_> {
    /// Reads on if fewer bytes than wanted are there, and no more than so many if that suffices.
    fn fetch(&mut self, wanted: usize, most: usize) {
        let Backlog { bytes, start, end, skip, .. } = &mut *self.backlog;
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
                    // Whether there is more, the next call finds out.
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
    fn head(&mut self) -> Result<Option<[u8; HEAD]>, CommError> {
        self.fetch(HEAD, if self.backlog.large { HEAD } else { BUFFER });
        let Backlog { bytes, start, end, fresh, .. } = &mut *self.backlog;
        let head = bytes[*start..*end].first_chunk().copied();
        if head.is_some() {
            *start += HEAD;
            *fresh = true;
        }
        Ok(head)
    }

    fn peek(&mut self, wanted: usize) -> Result<&[u8], CommError> {
        self.fetch(wanted.min(GRAIN), BUFFER);
        self.backlog.expect(wanted);
        let Backlog { bytes, start, end, .. } = &*self.backlog;
        Ok(&bytes[*start..*end])
    }

    fn consume(&mut self, bytes: usize) {
        let Backlog { start, end, skip, .. } = &mut *self.backlog;
        let there = bytes.min(*end - *start);
        *start += there;
        *skip += bytes - there;
    }

    fn read_into(&mut self, into: &mut [u8]) -> Result<Option<usize>, CommError> {
        self.backlog.expect(into.len());
        let Backlog { start, end, skip, .. } = &mut *self.backlog;
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
