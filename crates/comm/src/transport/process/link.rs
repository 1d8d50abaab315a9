//! Sending half of the link between two ranks.
//!
//! Both kinds of link work alike: data that the transport accepts now is sent directly from the
//! caller's buffer. Only data that must be accepted but does not fit is copied to a queue, and the
//! service thread drains that queue too.

use super::connection::Connection;
use super::lock;
use crate::error::CommError;
use crate::session::Sealer;
use crate::shm::inbox::{Doorbell, Outbox};
use crate::transport::{Header, Tag};
use crate::wire::{self, HEAD, padded};
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Path of messages to a rank.
#[derive(Debug)]
pub(super) enum Link {
    /// This rank itself.
    Own,
    /// By means of the transport around this one.
    Outside,
    /// Through the peer's shared-memory segment.
    Shared(RingLink),
    /// Through TCP sockets. Each channel uses one of them, to preserve its message order.
    Sockets(Vec<Connection>),
}

/// A message being sent: its header, its pieces, and the number of bytes sent.
#[derive(Clone, Copy)]
pub(super) struct Sending<'m> {
    pub(super) header: &'m Header,
    pub(super) data: &'m [&'m [u8]],
    pub(super) gone: Option<usize>,
    /// True if the bytes stay unchanged until the peer has taken them.
    pub(super) in_place: bool,
}

impl<'m> Sending<'m> {
    pub(super) fn total(&self) -> usize {
        self.data.iter().map(|piece| piece.len()).sum()
    }

    /// Key that distinguishes it from other messages to the same rank.
    pub(super) fn key(&self) -> Key {
        (self.header.tag, self.header.round)
    }

    /// Pieces without the first `skip` bytes.
    pub(super) fn rest(&self, mut skip: usize) -> impl Iterator<Item = &'m [u8]> {
        self.data.iter().filter_map(move |piece| {
            let skipped = skip.min(piece.len());
            skip -= skipped;
            Some(&piece[skipped..]).filter(|rest| !rest.is_empty())
        })
    }

    /// Unsent rest of the frame as contiguous bytes.
    pub(super) fn unsent(&self) -> Vec<u8> {
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

/// Bytes queued for sending.
#[derive(Debug, Default)]
pub(super) struct SendBacklog {
    pub(super) bytes: Vec<u8>,
    pub(super) gone: usize,
}

impl SendBacklog {
    pub(super) fn is_done(&self) -> bool {
        self.gone == self.bytes.len()
    }

    /// Appends a record of `pieces`, or themselves without a sealer, to what has not been sent.
    pub(super) fn seal<'p>(
        &mut self,
        sealer: Option<&mut Sealer>,
        pieces: impl IntoIterator<Item = &'p [u8]>,
    ) {
        if self.is_done() {
            self.bytes.clear();
            self.gone = 0;
        }
        match sealer {
            Some(sealer) => sealer.seal(pieces, &mut self.bytes),
            None => pieces.into_iter().for_each(|piece| self.bytes.extend_from_slice(piece)),
        }
    }
}

/// Change of a link's backlog after a send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Change {
    /// True if the link has a backlog now and had none before.
    pub(super) fell_behind: bool,
    /// True if the link has no backlog now and had one before.
    pub(super) caught_up: bool,
}

/// Link to a rank of the same shm domain.
#[derive(Debug)]
pub(super) struct RingLink {
    bell: Doorbell,
    out: Mutex<ToRing>,
    behind: AtomicBool,
}

#[derive(Debug)]
struct ToRing {
    outbox: Outbox,
    queue: VecDeque<SendBacklog>,
    /// Message that is partly sent.
    begun: Option<Key>,
}

/// Bytes put into a ring before they are published, so that reader and writer work concurrently.
const SHOWN_AT_ONCE: usize = 64 << 10;

impl RingLink {
    pub(super) fn new(outbox: Outbox) -> Self {
        let bell = outbox.bell();
        let out = ToRing { outbox, queue: VecDeque::new(), begun: None };
        Self { bell, out: Mutex::new(out), behind: AtomicBool::new(false) }
    }

    /// Doorbell of the peer.
    pub(super) fn bell(&self) -> &Doorbell {
        &self.bell
    }

    /// Returns true if data is queued.
    pub(super) fn has_backlog(&self) -> bool {
        self.behind.load(Ordering::Acquire)
    }

    /// Returns true if the ring has space for another frame head.
    pub(super) fn has_room(&self) -> bool {
        lock(&self.out).outbox.room(HEAD).is_ok_and(|room| room >= HEAD)
    }

    /// Sends as much as fits; returns the bytes of the message sent so far.
    pub(super) fn try_send(&self, message: Sending<'_>) -> Result<Option<usize>, CommError> {
        let mut out = lock(&self.out);
        let gone = out.go_on(message)?;
        if gone.is_none_or(|gone| gone < message.total()) {
            // Space may have been freed just before the request was noted: try once more.
            out.outbox.request_space();
            return out.go_on(Sending { gone, ..message });
        }
        Ok(gone)
    }

    /// Sends as much as fits and queues a copy of the rest.
    pub(super) fn send(&self, message: Sending<'_>) -> Result<Change, CommError> {
        let mut out = lock(&self.out);
        let gone = out.go_on(message)?;
        let left = Sending { gone, ..message };
        if gone.is_none_or(|gone| gone < message.total()) {
            let rest = SendBacklog { bytes: left.unsent(), gone: 0 };
            if gone.is_some() {
                // The message has begun, so its rest goes before all others.
                out.begun = None;
                out.queue.push_front(rest);
            } else {
                out.queue.push_back(rest);
            }
        }
        self.empty(&mut out)
    }

    /// Sends more of the queued data.
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
    /// Puts more of a message into the ring, unless other messages come first.
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
            // Publish a head without payload.
            self.outbox.publish();
        }
        Ok(Some(gone))
    }

    /// Puts as much queued data into the ring as fits.
    fn empty(&mut self) -> Result<(), CommError> {
        let mut wished = false;
        while self.begun.is_none()
            && let Some(SendBacklog { bytes, gone }) = self.queue.front_mut()
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
                self.outbox.request_space();
                wished = true;
            }
        }
        Ok(())
    }
}
