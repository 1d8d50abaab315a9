//! Sending half of a TCP connection to a rank.
//!
//! Large messages whose bytes stay unchanged until the receiver has taken them are sent zero-copy:
//! the socket takes the pages instead of a copy. The frame head marks such a message. The receiver
//! reports how many of them it has taken from its socket. Messages of a connection are taken in the
//! order in which they were sent, so one count identifies them.

use super::link::{Key, SendBacklog, Sending};
use super::lock;
use super::sealed_stream::{BATCH, RECORD};
use crate::rendezvous::handshake::Authenticated;
use crate::session::{Opener, Sealer, Session};
use crate::shm::splice::SplicePipe;
use crate::wire::{self, GRAIN, HEAD, padded};
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Write};
use std::net::TcpStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

/// One of the TCP connections to a rank.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    out: Mutex<ToSocket>,
    /// Opens the peer's records, if payloads are encrypted, until the receiving half takes it.
    opener: Mutex<Option<Opener>>,
    /// Time at which the connection broke, if it has. Nothing can be sent or received after that;
    /// the rendezvous server names the rank at fault.
    broken: OnceLock<Instant>,
    /// True if the peer has said goodbye.
    pub(super) ended: AtomicBool,
}

#[derive(Debug, Default)]
struct ToSocket {
    /// Seals everything that is sent, if payloads are encrypted. Nothing is sent zero-copy then.
    sealer: Option<Sealer>,
    /// Unsent rest of a head or of padding, sent before everything else.
    carry: SendBacklog,
    queue: VecDeque<SendBacklog>,
    begun: Option<Key>,
    /// Pipe for zero-copy sends, created by the first one.
    chute: Option<SplicePipe>,
    /// True if the system has refused to take pages.
    copies_only: bool,
    /// True if the current message is sent zero-copy; after its end, true if it was.
    in_place: bool,
    /// Number of zero-copy messages begun.
    lent: u64,
}

/// Messages of fewer bytes are copied: that is faster than handing over their pages.
const WORTH_LENDING: usize = 64 << 10;

impl Connection {
    pub(super) fn new(authenticated: Authenticated, encrypt: bool) -> Self {
        let Authenticated { stream, session: Session { sealer, opener } } = authenticated;
        let out = ToSocket { sealer: encrypt.then_some(sealer), ..ToSocket::default() };
        Self {
            stream,
            out: Mutex::new(out),
            opener: Mutex::new(encrypt.then_some(opener)),
            broken: OnceLock::new(),
            ended: AtomicBool::new(false),
        }
    }

    /// Hands over the opener of the peer's records, if payloads are encrypted.
    pub(super) fn take_opener(&self) -> Option<Opener> {
        lock(&self.opener).take()
    }

    /// Returns true if payloads are encrypted and the last record has not left completely.
    pub(super) fn has_sealed_backlog(&self) -> bool {
        let out = lock(&self.out);
        out.sealer.is_some() && !out.carry.is_done() && !self.is_broken()
    }

    /// Time at which the connection broke.
    pub(super) fn broken(&self) -> Option<Instant> {
        self.broken.get().copied()
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.get().is_some()
    }

    pub(super) fn mark_broken(&self) {
        let _ = self.broken.set(Instant::now());
    }

    /// Returns true if queued data waits for the socket and for nothing else.
    pub(super) fn has_backlog(&self) -> bool {
        let out = lock(&self.out);
        let ready = !out.carry.is_done() || (out.begun.is_none() && !out.queue.is_empty());
        ready && !self.is_broken()
    }

    /// Sends as much as the socket accepts; returns the bytes of the message sent so far.
    pub(super) fn try_send(&self, message: Sending<'_>) -> Option<usize> {
        let mut out = lock(&self.out);
        let gone = self.go_on(&mut out, message);
        // Frames that had to wait for the end of this message.
        self.empty(&mut out);
        gone
    }

    /// Number of zero-copy messages up to the last message, if that one was zero-copy.
    pub(super) fn lent(&self) -> Option<u64> {
        let out = lock(&self.out);
        out.in_place.then_some(out.lent)
    }

    /// Acks `messages` zero-copy messages of the peer; returns true if data is left in the queue.
    pub(super) fn send_acks(&self, messages: u64) -> bool {
        let mut out = lock(&self.out);
        out.queue.push_back(SendBacklog { bytes: wire::ack(messages).to_vec(), gone: 0 });
        self.empty(&mut out);
        !out.queue.is_empty() || !out.carry.is_done()
    }

    /// Sends as much as possible and queues a copy of the rest; returns true if data is queued.
    pub(super) fn send(&self, message: Sending<'_>) -> bool {
        let mut out = lock(&self.out);
        let gone = self.go_on(&mut out, message);
        if gone.is_none_or(|gone| gone < message.total()) {
            let rest = SendBacklog { bytes: Sending { gone, ..message }.unsent(), gone: 0 };
            if gone.is_some() {
                out.begun = None;
                out.queue.push_front(rest);
            } else {
                out.queue.push_back(rest);
            }
        }
        !out.queue.is_empty() || !out.carry.is_done()
    }

    /// Queues the goodbye frame.
    pub(super) fn say_goodbye(&self) {
        let mut out = lock(&self.out);
        // An unfinished message makes the stream unreadable; no peer waits for the goodbye then.
        if out.begun.is_none() {
            out.queue.push_back(SendBacklog { bytes: wire::goodbye().to_vec(), gone: 0 });
        }
        self.empty(&mut out);
    }

    /// Writes as much queued data as the socket accepts.
    pub(super) fn flush(&self) {
        self.empty(&mut lock(&self.out));
    }

    fn go_on(&self, out: &mut ToSocket, message: Sending<'_>) -> Option<usize> {
        self.empty(out);
        let total = message.total();
        if self.is_broken() {
            return Some(total);
        }
        let others_first = !out.queue.is_empty() || out.begun.is_some();
        if !out.carry.is_done() || (message.gone.is_none() && others_first) {
            return message.gone;
        }
        if out.sealer.is_some() {
            return self.seal(out, message);
        }
        if message.gone.is_none() {
            let worth = message.in_place && total >= WORTH_LENDING;
            out.in_place = worth && out.has_splice_pipe();
        }
        let mut gone = message.gone;
        if out.in_place
            && let ZeroCopyStatus::Over(gone_by_now) = self.lend(out, message, &mut gone)
        {
            return gone_by_now;
        }
        let head = wire::encode(message.header, total, false);
        let filling = [0; GRAIN];
        loop {
            let before: &[u8] = if gone.is_none() { &head } else { &[] };
            let after = &filling[..padded(total) - total];
            let mut slices = [IoSlice::new(&[]); 64];
            let mut used = 1;
            slices[0] = IoSlice::new(before);
            let mut offered = before.len();
            for piece in message.rest(gone.unwrap_or(0)) {
                if used + 1 == slices.len() {
                    break;
                }
                slices[used] = IoSlice::new(piece);
                used += 1;
                offered += piece.len();
            }
            let last = offered - before.len() == total - gone.unwrap_or(0);
            if last {
                slices[used] = IoSlice::new(after);
                used += 1;
            }
            let n = match (&self.stream).write_vectored(&slices[..used]) {
                Ok(n) => n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return gone,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => {
                    self.mark_broken();
                    return Some(total);
                }
            };
            out.begun = Some(message.key());
            let mut keep =
                |bytes: &[u8]| out.carry = SendBacklog { bytes: bytes.to_vec(), gone: 0 };
            if n < before.len() {
                keep(&before[n..]);
                return Some(0);
            }
            let payload = (n - before.len()).min(total - gone.unwrap_or(0));
            gone = Some(gone.unwrap_or(0) + payload);
            if gone == Some(total) {
                let filled = n - before.len() - payload;
                if filled < after.len() {
                    keep(&after[filled..]);
                }
                out.begun = None;
                return gone;
            }
        }
    }

    /// Seals and writes as many records of a message as the socket accepts. A record counts as sent
    /// once it is sealed; `empty` writes the rest of it.
    fn seal(&self, out: &mut ToSocket, message: Sending<'_>) -> Option<usize> {
        let total = message.total();
        let (mut gone, head) = (message.gone, wire::encode(message.header, total, false));
        let filling = [0; GRAIN];
        while gone.is_none_or(|gone| gone < total) && out.may_seal_more() {
            let before: &[u8] = if gone.is_none() { &head } else { &[] };
            let at = gone.unwrap_or(0);
            let mut room = (RECORD - before.len()).min(total - at);
            let last = at + room == total;
            let after = if last { &filling[..padded(total) - total] } else { &[] };
            let payload = message.rest(at).map_while(|piece| {
                let part = &piece[..room.min(piece.len())];
                room -= part.len();
                (!part.is_empty()).then_some(part)
            });
            let record = [before].into_iter().chain(payload).chain([after]);
            let end = at + (RECORD - before.len()).min(total - at);
            out.carry.seal(out.sealer.as_mut(), record);
            out.begun = (!last).then_some(message.key());
            gone = Some(end);
            if last || !out.may_seal_more() {
                self.empty(out);
            }
            if self.is_broken() {
                return Some(total);
            }
        }
        gone
    }

    /// Hands over as many pages of a message as the socket accepts.
    fn lend(
        &self,
        out: &mut ToSocket,
        message: Sending<'_>,
        gone: &mut Option<usize>,
    ) -> ZeroCopyStatus {
        let total = message.total();
        if gone.is_none() {
            let head = wire::encode(message.header, total, true);
            // The first pages are to be sent along with the head.
            let flags = SendFlags::MORE | SendFlags::NOSIGNAL;
            let n = match rustix::net::send(&self.stream, &head, flags) {
                Ok(n) => n,
                Err(Errno::AGAIN | Errno::INTR) => return ZeroCopyStatus::Over(None),
                Err(_) => return self.broke(total),
            };
            out.begun = Some(message.key());
            out.lent += 1;
            *gone = Some(0);
            if n < HEAD {
                out.carry = SendBacklog { bytes: head[n..].to_vec(), gone: 0 };
                return ZeroCopyStatus::Over(*gone);
            }
        }
        let mut at = gone.unwrap_or(0);
        while let Some(chute) = &mut out.chute {
            if chute.inside() == 0 {
                if !message.in_place {
                    break;
                }
                if chute.put(message.rest(at)).is_err() {
                    (out.copies_only, out.chute) = (true, None);
                    break;
                }
            }
            match chute.pass(&self.stream, at + chute.inside() < total) {
                Ok(0) | Err(Errno::AGAIN) => return ZeroCopyStatus::Over(Some(at)),
                Ok(n) => at += n,
                Err(Errno::INTR) => {}
                Err(_) => return self.broke(total),
            }
            if at == total {
                let filling = vec![0; padded(total) - total];
                out.carry = SendBacklog { bytes: filling, gone: 0 };
                out.begun = None;
                return ZeroCopyStatus::Over(Some(at));
            }
        }
        // The rest is copied. The receiver acks it like every message that began zero-copy.
        *gone = Some(at);
        ZeroCopyStatus::Stopped
    }

    fn broke(&self, total: usize) -> ZeroCopyStatus {
        self.mark_broken();
        ZeroCopyStatus::Over(Some(total))
    }

    /// Writes queued data, unless a message that has begun comes first.
    fn empty(&self, out: &mut ToSocket) {
        loop {
            let sealed = out.sealer.is_some();
            let waiting = if !out.carry.is_done() {
                &mut out.carry
            } else if let (None, Some(first)) = (out.begun, out.queue.front_mut()) {
                if sealed {
                    let end = first.bytes.len().min(first.gone + RECORD);
                    out.carry.seal(out.sealer.as_mut(), [&first.bytes[first.gone..end]]);
                    first.gone = end;
                    &mut out.carry
                } else {
                    first
                }
            } else {
                break;
            };
            if self.is_broken() {
                *out = ToSocket::default();
                break;
            }
            match (&self.stream).write(&waiting.bytes[waiting.gone..]) {
                Ok(n) => waiting.gone += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.mark_broken(),
            }
            if out.carry.is_done() && out.queue.front().is_some_and(SendBacklog::is_done) {
                out.queue.pop_front();
            }
        }
    }
}

impl ToSocket {
    /// Returns true if another record can be sealed before the sealed ones are written.
    fn may_seal_more(&self) -> bool {
        self.carry.is_done() || (self.carry.gone == 0 && self.carry.bytes.len() < BATCH)
    }

    /// Returns true if pages can be handed over; creates the pipe if needed.
    fn has_splice_pipe(&mut self) -> bool {
        if self.chute.is_none() && !self.copies_only {
            self.chute = SplicePipe::new();
            self.copies_only = self.chute.is_none();
        }
        self.chute.is_some()
    }
}

/// Result of a zero-copy send attempt.
enum ZeroCopyStatus {
    /// Bytes of the message sent so far; no more can be sent now.
    Over(Option<usize>),
    /// The system takes no pages, or the bytes no longer stay in place.
    Stopped,
}
