//! The sending half of what joins two ranks.

use super::lock;
use crate::error::CommError;
use crate::shm::inbox::{Bell, Outbox};
use crate::transport::{Payload, Tag};
use crate::wire;
use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// How messages get to a rank.
#[derive(Debug)]
pub(super) enum Link {
    /// It is this rank.
    Own,
    /// Through its segment.
    Shared(SharedMemory),
    /// Through sockets.
    Socket(Socket),
}

impl Link {
    /// Whether the rank has left in peace; what it sent before may still have to be read.
    pub(super) fn departed(&self) -> bool {
        match self {
            Self::Own => false,
            Self::Shared(link) => link.bell.departed(),
            Self::Socket(link) => link.departed(),
        }
    }
}

/// A frame on its way out: its head, its payload, and how much of both has gone.
#[derive(Debug)]
struct Outgoing {
    head: Vec<u8>,
    data: Vec<u8>,
    gone: usize,
}

impl Outgoing {
    fn new(payload: Payload) -> Self {
        let head = wire::encode(&payload.header, payload.data.len());
        Self { head, data: payload.data, gone: 0 }
    }

    /// What is left of the head and of the payload.
    fn rest(&self) -> (&[u8], &[u8]) {
        let head = self.gone.min(self.head.len());
        (&self.head[head..], &self.data[self.gone - head..])
    }

    fn is_done(&self) -> bool {
        self.gone == self.head.len() + self.data.len()
    }
}

/// What became of messages through shared memory.
pub(super) struct Pushed {
    /// The buffers that are free again.
    pub(super) done: Vec<Vec<u8>>,
    /// Something is left over now and nothing was before.
    pub(super) fell_behind: bool,
    /// Nothing is left over now and something was before.
    pub(super) caught_up: bool,
}

/// The link to a neighbour.
#[derive(Debug)]
pub(super) struct SharedMemory {
    bell: Bell,
    out: Mutex<(Outbox, VecDeque<Outgoing>)>,
    behind: AtomicBool,
}

impl SharedMemory {
    pub(super) fn new(outbox: Outbox) -> Self {
        let bell = outbox.bell();
        Self { bell, out: Mutex::new((outbox, VecDeque::new())), behind: AtomicBool::new(false) }
    }

    /// The neighbour's.
    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Whether something did not fit.
    pub(super) fn is_behind(&self) -> bool {
        self.behind.load(Ordering::Acquire)
    }

    /// Sends as much as fits and keeps the rest.
    pub(super) fn send(&self, payload: Payload) -> Result<Pushed, CommError> {
        let mut out = lock(&self.out);
        out.1.push_back(Outgoing::new(payload));
        self.push(&mut out)
    }

    /// Sends more.
    pub(super) fn flush(&self) -> Result<Pushed, CommError> {
        self.push(&mut lock(&self.out))
    }

    fn push(&self, out: &mut (Outbox, VecDeque<Outgoing>)) -> Result<Pushed, CommError> {
        let (outbox, queue) = out;
        let (mut done, mut moved, mut wished) = (Vec::new(), false, false);
        while let Some(frame) = queue.front_mut() {
            let (head, data) = frame.rest();
            let mut put = outbox.push(head)?;
            if put == head.len() {
                put += outbox.push(data)?;
            }
            frame.gone += put;
            moved |= put > 0;
            if frame.is_done() {
                done.extend(queue.pop_front().map(|frame| frame.data));
            } else if put == 0 {
                if wished {
                    break;
                }
                // Room may have come just before the wish was noted: look once more.
                outbox.wish();
                wished = true;
            }
        }
        let behind = !queue.is_empty();
        let before = self.behind.swap(behind, Ordering::AcqRel);
        if moved {
            self.bell.ring();
        }
        Ok(Pushed { done, fell_behind: behind && !before, caught_up: before && !behind })
    }
}

/// The link to a rank elsewhere: one or more connections. A channel keeps to one of them, so that
/// its order is kept.
#[derive(Debug)]
pub(super) struct Socket {
    pub(super) connections: Vec<Connection>,
    /// How many connections have ended with a goodbye.
    pub(super) ended: AtomicUsize,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    out: Mutex<VecDeque<Outgoing>>,
    broken: AtomicBool,
}

/// What became of a message.
pub(super) struct Sent {
    /// Whether nothing is left for the attendant.
    pub(super) complete: bool,
    /// The buffers that are free again.
    pub(super) done: Vec<Vec<u8>>,
}

impl Socket {
    pub(super) fn new(streams: Vec<TcpStream>) -> Self {
        let connection = |stream| Connection {
            stream,
            out: Mutex::new(VecDeque::new()),
            broken: AtomicBool::new(false),
        };
        let connections = streams.into_iter().map(connection).collect();
        Self { connections, ended: AtomicUsize::new(0) }
    }

    pub(super) fn departed(&self) -> bool {
        self.ended.load(Ordering::Acquire) == self.connections.len()
    }

    pub(super) fn send(&self, tag: Tag, payload: Payload) -> Sent {
        let connection = &self.connections[tag.channel() as usize % self.connections.len()];
        connection.send(Outgoing::new(payload))
    }

    /// Queues the last frame of every connection.
    pub(super) fn say_goodbye(&self) {
        for connection in &self.connections {
            connection.send(Outgoing { head: wire::goodbye(), data: Vec::new(), gone: 0 });
        }
    }
}

impl Connection {
    fn send(&self, frame: Outgoing) -> Sent {
        let mut out = lock(&self.out);
        out.push_back(frame);
        if out.len() > 1 {
            return Sent { complete: false, done: Vec::new() };
        }
        self.write(&mut out)
    }

    /// Writes as much as the socket takes.
    pub(super) fn flush(&self) -> Sent {
        self.write(&mut lock(&self.out))
    }

    pub(super) fn is_behind(&self) -> bool {
        !lock(&self.out).is_empty()
    }

    fn write(&self, out: &mut VecDeque<Outgoing>) -> Sent {
        let mut done = Vec::new();
        while let Some(frame) = out.front_mut() {
            // On a broken connection nothing can be sent any more; who is to blame, the hub says.
            if self.broken.load(Ordering::Relaxed) {
                out.clear();
                break;
            }
            let (head, data) = frame.rest();
            match (&self.stream).write_vectored(&[IoSlice::new(head), IoSlice::new(data)]) {
                Ok(n) => frame.gone += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.broken.store(true, Ordering::Relaxed),
            }
            if frame.is_done() {
                done.extend(out.pop_front().map(|frame| frame.data));
            }
        }
        Sent { complete: out.is_empty(), done }
    }
}
