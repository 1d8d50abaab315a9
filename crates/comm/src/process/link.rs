//! The sending half of what joins two ranks.
//!
//! Both kinds of link do the same: what the wire takes now goes straight from where it lies, and
//! only what must be promised and does not fit is copied, to wait in a queue that the rank's second
//! thread empties too.

use super::connection::Connection;
use super::lock;
use crate::error::CommError;
use crate::shm::inbox::{Bell, Outbox};
use crate::transport::{Header, Tag};
use crate::wire::{self, HEAD, padded};
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// How messages get to a rank.
#[derive(Debug)]
pub(super) enum Link {
    /// It is this rank.
    Own,
    /// Through its segment.
    Shared(SharedMemory),
    /// Through sockets. A channel keeps to one of them, so that its order is kept.
    Sockets(Vec<Connection>),
}

/// A message on its way: what it is for, its pieces, and how much of it has gone.
#[derive(Clone, Copy)]
pub(super) struct Sending<'m> {
    pub(super) header: &'m Header,
    pub(super) data: &'m [&'m [u8]],
    pub(super) gone: Option<usize>,
    /// Whether the bytes stay as they are until the peer has taken them.
    pub(super) in_place: bool,
}

impl<'m> Sending<'m> {
    pub(super) fn total(&self) -> usize {
        self.data.iter().map(|piece| piece.len()).sum()
    }

    /// What tells it from other messages to the same rank.
    pub(super) fn key(&self) -> Key {
        (self.header.tag, self.header.round)
    }

    /// The pieces from some byte on.
    pub(super) fn rest(&self, mut skip: usize) -> impl Iterator<Item = &'m [u8]> {
        self.data.iter().filter_map(move |piece| {
            let skipped = skip.min(piece.len());
            skip -= skipped;
            Some(&piece[skipped..]).filter(|rest| !rest.is_empty())
        })
    }

    /// All that is left of it, as one run of bytes.
    pub(super) fn remains(&self) -> Vec<u8> {
        let total = self.total();
        let mut bytes = match self.gone {
            Some(_) => Vec::with_capacity(padded(total)),
            None => wire::encode(self.header, total, false).to_vec(),
        };
        self.rest(self.gone.unwrap_or(0)).for_each(|piece| bytes.extend_from_slice(piece));
        bytes.resize(bytes.len() + padded(total) - total, 0);
        bytes
    }
}

pub(super) type Key = (Tag, u32);

/// Bytes that wait for the wire.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    pub(super) bytes: Vec<u8>,
    pub(super) gone: usize,
}

impl Waiting {
    pub(super) fn is_done(&self) -> bool {
        self.gone == self.bytes.len()
    }
}

/// How a link stands after something was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Change {
    /// Something waits now and nothing did before.
    pub(super) fell_behind: bool,
    /// Nothing waits now and something did before.
    pub(super) caught_up: bool,
}

/// The link to a neighbour.
#[derive(Debug)]
pub(super) struct SharedMemory {
    bell: Bell,
    out: Mutex<ToRing>,
    behind: AtomicBool,
}

#[derive(Debug)]
struct ToRing {
    outbox: Outbox,
    queue: VecDeque<Waiting>,
    /// The message that has begun and not ended.
    begun: Option<Key>,
}

/// How much is put into a ring before the reader is shown it, so that both work at once.
const SHOWN_AT_ONCE: usize = 64 << 10;

impl SharedMemory {
    pub(super) fn new(outbox: Outbox) -> Self {
        let bell = outbox.bell();
        let out = ToRing { outbox, queue: VecDeque::new(), begun: None };
        Self { bell, out: Mutex::new(out), behind: AtomicBool::new(false) }
    }

    /// The neighbour's.
    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Whether something waits.
    pub(super) fn is_behind(&self) -> bool {
        self.behind.load(Ordering::Acquire)
    }

    /// Whether there is room for more.
    pub(super) fn has_room(&self) -> bool {
        lock(&self.out).outbox.room(HEAD).is_ok_and(|room| room >= HEAD)
    }

    /// Sends what fits; how much of the message has gone.
    pub(super) fn try_send(&self, message: Sending<'_>) -> Result<Option<usize>, CommError> {
        let mut out = lock(&self.out);
        let gone = out.go_on(message)?;
        if gone.is_none_or(|gone| gone < message.total()) {
            // Room may have come just before the wish was noted: look once more.
            out.outbox.wish();
            return out.go_on(Sending { gone, ..message });
        }
        Ok(gone)
    }

    /// Sends what fits and keeps a copy of the rest.
    pub(super) fn send(&self, message: Sending<'_>) -> Result<Change, CommError> {
        let mut out = lock(&self.out);
        let gone = out.go_on(message)?;
        let left = Sending { gone, ..message };
        if gone.is_none_or(|gone| gone < message.total()) {
            let rest = Waiting { bytes: left.remains(), gone: 0 };
            if gone.is_some() {
                // It has begun, so it goes on before all others.
                out.begun = None;
                out.queue.push_front(rest);
            } else {
                out.queue.push_back(rest);
            }
        }
        self.empty(&mut out)
    }

    /// Sends more of what waits.
    pub(super) fn flush(&self) -> Result<Change, CommError> {
        self.empty(&mut lock(&self.out))
    }

    fn empty(&self, out: &mut ToRing) -> Result<Change, CommError> {
        out.empty()?;
        let behind = !out.queue.is_empty();
        let before = self.behind.swap(behind, Ordering::AcqRel);
        Ok(Change { fell_behind: behind && !before, caught_up: before && !behind })
    }
}

impl ToRing {
    /// Puts more of a message into the ring, unless others come first.
    fn go_on(&mut self, message: Sending<'_>) -> Result<Option<usize>, CommError> {
        let total = message.total();
        let mut gone = match message.gone {
            Some(gone) => gone,
            None if !self.queue.is_empty() || self.begun.is_some() => return Ok(None),
            None if self.outbox.room(HEAD + padded(total))? < HEAD => return Ok(None),
            None => {
                self.outbox.put(&wire::encode(message.header, total, false));
                self.begun = Some(message.key());
                0
            }
        };
        let mut shown = false;
        let mut pieces = message.rest(gone);
        let mut piece: &[u8] = &[];
        loop {
            let left = total - gone;
            let mut room = self.outbox.room(left.min(SHOWN_AT_ONCE))?.min(SHOWN_AT_ONCE);
            if left > 0 && room == 0 {
                break;
            }
            while room > 0 {
                if piece.is_empty() {
                    let Some(next) = pieces.next() else { break };
                    piece = next;
                }
                let (now, later) = piece.split_at(piece.len().min(room));
                self.outbox.put(now);
                (piece, room, gone) = (later, room - now.len(), gone + now.len());
            }
            if gone == total {
                self.outbox.pad();
                self.begun = None;
            }
            self.outbox.publish();
            shown = true;
            if gone == total {
                break;
            }
        }
        if !shown {
            // A head that stands alone.
            self.outbox.publish();
        }
        Ok(Some(gone))
    }

    /// Puts what waits into the ring, as much as fits.
    fn empty(&mut self) -> Result<(), CommError> {
        let mut wished = false;
        while self.begun.is_none()
            && let Some(Waiting { bytes, gone }) = self.queue.front_mut()
        {
            let left = bytes.len() - *gone;
            let put = self.outbox.room(left.min(SHOWN_AT_ONCE))?.min(left).min(SHOWN_AT_ONCE);
            self.outbox.put(&bytes[*gone..*gone + put]);
            *gone += put;
            self.outbox.publish();
            if *gone == bytes.len() {
                self.queue.pop_front();
            } else if put == 0 {
                if wished {
                    break;
                }
                self.outbox.wish();
                wished = true;
            }
        }
        Ok(())
    }
}
