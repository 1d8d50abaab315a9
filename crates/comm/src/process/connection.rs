//! The sending half of a connection to a rank elsewhere.
//!
//! A message whose bytes stay as they are until its receiver has taken them goes in place, where it is
//! large: the socket takes the pages instead of a copy. Its head says so, and the receiver says in turn how
//! many of them it has taken out of its socket. Messages of a connection are taken in the order in which
//! they went, so that one number says which.

use super::link::{Key, Sending, Waiting};
use super::lock;
use crate::shm::chute::Chute;
use crate::wire::{self, GRAIN, HEAD, padded};
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Write};
use std::net::TcpStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

/// One of the connections to a rank elsewhere.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    out: Mutex<ToSocket>,
    /// When it broke, if it has. On a broken connection nothing can be sent any more, and nothing
    /// comes; who is to blame, the hub says.
    broken: OnceLock<Instant>,
    /// Whether the peer has said goodbye.
    pub(super) ended: AtomicBool,
}

#[derive(Debug, Default)]
struct ToSocket {
    /// The rest of a head or of a filling, which comes before everything else.
    carry: Waiting,
    queue: VecDeque<Waiting>,
    begun: Option<Key>,
    /// How messages go in place, once one has.
    chute: Option<Chute>,
    /// Whether the system has refused to take pages.
    copies_only: bool,
    /// Whether the message that has begun goes in place; when it has ended, whether it went so.
    in_place: bool,
    /// How many messages have begun to go in place.
    lent: u64,
}

/// Fewer bytes are copied sooner than their pages are handed over.
const WORTH_LENDING: usize = 64 << 10;

impl Connection {
    pub(super) fn new(stream: TcpStream) -> Self {
        let (out, ended) = (Mutex::default(), AtomicBool::new(false));
        Self { stream, out, broken: OnceLock::new(), ended }
    }

    /// Since when it has been broken.
    pub(super) fn broken(&self) -> Option<Instant> {
        self.broken.get().copied()
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.get().is_some()
    }

    pub(super) fn mark_broken(&self) {
        let _ = self.broken.set(Instant::now());
    }

    /// Whether something waits for the socket and for nothing else.
    pub(super) fn is_behind(&self) -> bool {
        let out = lock(&self.out);
        let ready = !out.carry.is_done() || (out.begun.is_none() && !out.queue.is_empty());
        ready && !self.is_broken()
    }

    /// Sends what the socket takes; how much of the message has gone.
    pub(super) fn try_send(&self, message: Sending<'_>) -> Option<usize> {
        let mut out = lock(&self.out);
        let gone = self.go_on(&mut out, message);
        // What had to wait for the end of this message.
        self.empty(&mut out);
        gone
    }

    /// How many messages had gone in place when the last one ended, if that did.
    pub(super) fn lent(&self) -> Option<u64> {
        let out = lock(&self.out);
        out.in_place.then_some(out.lent)
    }

    /// Tells the peer how many of its messages that came in place have been taken; whether that has to wait.
    pub(super) fn tell_taken(&self, messages: u64) -> bool {
        let mut out = lock(&self.out);
        out.queue.push_back(Waiting { bytes: wire::taken(messages).to_vec(), gone: 0 });
        self.empty(&mut out);
        !out.queue.is_empty() || !out.carry.is_done()
    }

    /// Sends what the socket takes and keeps a copy of the rest; whether there is one.
    pub(super) fn send(&self, message: Sending<'_>) -> bool {
        let mut out = lock(&self.out);
        let gone = self.go_on(&mut out, message);
        if gone.is_none_or(|gone| gone < message.total()) {
            let rest = Waiting { bytes: Sending { gone, ..message }.remains(), gone: 0 };
            if gone.is_some() {
                out.begun = None;
                out.queue.push_front(rest);
            } else {
                out.queue.push_back(rest);
            }
        }
        !out.queue.is_empty() || !out.carry.is_done()
    }

    /// Queues the last frame.
    pub(super) fn say_goodbye(&self) {
        let mut out = lock(&self.out);
        // What was never finished makes the stream unreadable; nobody waits for it then.
        if out.begun.is_none() {
            out.queue.push_back(Waiting { bytes: wire::goodbye().to_vec(), gone: 0 });
        }
        self.empty(&mut out);
    }

    /// Writes as much of what waits as the socket takes.
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
        if message.gone.is_none() {
            let worth = message.in_place && total >= WORTH_LENDING;
            out.in_place = worth && out.has_chute();
        }
        let mut gone = message.gone;
        if out.in_place
            && let Lending::Over(gone_by_now) = self.lend(out, message, &mut gone)
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
            let mut keep = |bytes: &[u8]| out.carry = Waiting { bytes: bytes.to_vec(), gone: 0 };
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

    /// Hands over as many pages of a message as the socket takes.
    fn lend(&self, out: &mut ToSocket, message: Sending<'_>, gone: &mut Option<usize>) -> Lending {
        let total = message.total();
        if gone.is_none() {
            let head = wire::encode(message.header, total, true);
            // The first pages are to travel with it.
            let flags = SendFlags::MORE | SendFlags::NOSIGNAL;
            let n = match rustix::net::send(&self.stream, &head, flags) {
                Ok(n) => n,
                Err(Errno::AGAIN | Errno::INTR) => return Lending::Over(None),
                Err(_) => return self.broke(total),
            };
            out.begun = Some(message.key());
            out.lent += 1;
            *gone = Some(0);
            if n < HEAD {
                out.carry = Waiting { bytes: head[n..].to_vec(), gone: 0 };
                return Lending::Over(*gone);
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
                Ok(0) | Err(Errno::AGAIN) => return Lending::Over(Some(at)),
                Ok(n) => at += n,
                Err(Errno::INTR) => {}
                Err(_) => return self.broke(total),
            }
            if at == total {
                let filling = vec![0; padded(total) - total];
                out.carry = Waiting { bytes: filling, gone: 0 };
                out.begun = None;
                return Lending::Over(Some(at));
            }
        }
        // The rest is copied. Its receiver answers as it does to all that began in place.
        *gone = Some(at);
        Lending::Stopped
    }

    fn broke(&self, total: usize) -> Lending {
        self.mark_broken();
        Lending::Over(Some(total))
    }

    /// Writes what waits, unless a message that has begun comes first.
    fn empty(&self, out: &mut ToSocket) {
        loop {
            let waiting = if !out.carry.is_done() {
                &mut out.carry
            } else if let (None, Some(first)) = (out.begun, out.queue.front_mut()) {
                first
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
            if out.carry.is_done() && out.queue.front().is_some_and(Waiting::is_done) {
                out.queue.pop_front();
            }
        }
    }
}

impl ToSocket {
    /// Whether pages can be handed over.
    fn has_chute(&mut self) -> bool {
        if self.chute.is_none() && !self.copies_only {
            self.chute = Chute::new();
            self.copies_only = self.chute.is_none();
        }
        self.chute.is_some()
    }
}

/// How far handing over pages has got.
enum Lending {
    /// So much of the message has gone, and no more goes now.
    Over(Option<usize>),
    /// The system takes no pages, or they are no longer in place.
    Stopped,
}
