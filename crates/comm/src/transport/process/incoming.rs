//! Receiving half of a rank: arriving data, passed to the caller or queued.

use super::connection::Connection;
use super::link::Link;
use super::sealed_stream::{SealedBuffer, SealedStream};
use super::stream::{RecvBuffer, Stream};
use super::{ProcessTransport, lock};
use crate::error::CommError;
use crate::frame_reader::{FrameReader, StreamError};
use crate::mailbox::{Mailbox, QueuedMessage};
use crate::recorder::Direction;
use crate::shm::inbox::Inbox;
use crate::transport::{Header, MessageChunk, MessageSink, RecvStatus, Tag};
use paceline_plan::ids::Rank;
use std::sync::atomic::Ordering;

/// Data arriving from one rank.
#[derive(Debug)]
pub(super) struct Arrivals {
    pub(super) mail: Mailbox,
    /// One reader per stream: the ring, or each of the connections.
    pub(super) inflows: Vec<(FrameReader, Buffer)>,
}

/// Receive buffer of a stream.
#[derive(Debug)]
pub(super) enum Buffer {
    /// Of a plain connection; unused by a ring.
    Plain(RecvBuffer),
    /// Of an encrypted connection.
    Sealed(Box<SealedBuffer>),
}

impl Arrivals {
    pub(super) fn new(link: &Link) -> Self {
        let plain = || Buffer::Plain(RecvBuffer::default());
        let buffer = |connection: &Connection| {
            connection
                .take_opener()
                .map_or_else(plain, |opener| Buffer::Sealed(Box::new(SealedBuffer::new(opener))))
        };
        let buffers = match link {
            Link::Own | Link::Outside => Vec::new(),
            Link::Shared(_) => vec![plain()],
            Link::Sockets(connections) => connections.iter().map(buffer).collect(),
        };
        let inflows = buffers.into_iter().map(|buffer| (FrameReader::default(), buffer)).collect();
        Self { mail: Mailbox::default(), inflows }
    }
}

impl ProcessTransport {
    /// Polls the data that has arrived from a rank on a channel.
    pub(super) fn poll_incoming<R>(
        &mut self,
        from: Rank,
        channel: u32,
        look: impl FnOnce(&mut Incoming<'_>) -> Result<Option<R>, StreamError>,
    ) -> Result<Option<R>, CommError> {
        let Self { common, inbox, arrivals, aside, .. } = self;
        common.check()?;
        let link = common.link(from)?;
        if common.behind.load(Ordering::Acquire) > 0 {
            common.flush_shared()?;
        }
        let Arrivals { mail, inflows } = &mut arrivals[from.index()];
        let before = mail.put_aside();
        let (outcome, departed) = match link {
            Link::Own | Link::Outside => {
                (look(&mut Incoming { mail, stream: Origin::Nothing }), false)
            }
            Link::Shared(link) => {
                // Checked before the ring: all messages sent before the departure are visible.
                let departed = link.bell().departed();
                let before = inbox.taken(from.0);
                let (inflow, _) = &mut inflows[0];
                let outcome =
                    look(&mut Incoming { mail, stream: Origin::Ring(inflow, inbox, from.0) });
                if inbox.taken(from.0) != before && inbox.take_space_request(from.0) {
                    link.bell().notify();
                }
                (outcome, departed)
            }
            Link::Sockets(connections) => {
                let index = channel as usize % connections.len();
                let connection = &connections[index];
                let (inflow, backlog) = &mut inflows[index];
                let stream = match backlog {
                    Buffer::Plain(backlog) => {
                        Origin::Socket(inflow, Stream { connection, backlog })
                    }
                    Buffer::Sealed(buffer) => {
                        Origin::Sealed(inflow, SealedStream { connection, buffer })
                    }
                };
                let outcome = look(&mut Incoming { mail, stream });
                let ended = inflows[index].0.ended;
                connection.ended.store(ended, Ordering::Release);
                (outcome, ended)
            }
        };
        *aside |= mail.put_aside() != before;
        match outcome {
            Ok(None) if departed => Err(CommError::PeerClosed { rank: common.rank, peer: from }),
            Ok(found) => Ok(found),
            Err(StreamError::Comm(error)) => Err(error),
            // Nothing that follows can be read either: the world cannot continue.
            Err(StreamError::Wire(error)) => {
                let reason = format!("rank {} cannot read it: {error}", common.rank);
                Err(common.end(CommError::Failed { rank: from, reason }))
            }
            Err(StreamError::Altered) => {
                let way = format!("messages from rank {from} to rank {}", common.rank);
                Err(common.end(CommError::Altered { way }))
            }
        }
    }

    /// Returns the next message of a channel, once it is complete.
    pub(super) fn queued_message(
        &mut self,
        from: Rank,
        tag: Tag,
    ) -> Result<Option<QueuedMessage>, CommError> {
        let channel = tag.channel();
        let message =
            self.poll_incoming(from, channel, |incoming| incoming.queued_message(channel))?;
        match &message {
            Some(QueuedMessage { header, total, .. }) => {
                self.interest.arrived(from);
                self.common.note(Direction::Received, from, header, *total);
            }
            None => self.missing(from, tag),
        }
        Ok(message)
    }

    /// Passes available data of the next message of a channel to `visit`.
    pub(super) fn receive_into(
        &mut self,
        from: Rank,
        tag: Tag,
        visit: &mut dyn MessageSink,
    ) -> Result<RecvStatus, CommError> {
        let mut noting = Noting::new(visit);
        let channel = tag.channel();
        let taken = self.poll_incoming(from, channel, |incoming| {
            let taken = incoming.take(channel, &mut noting)?;
            Ok(Some(taken).filter(|taken| *taken != RecvStatus::None))
        })?;
        match (taken, noting.last) {
            (Some(RecvStatus::Complete), Some((header, total))) => {
                self.interest.arrived(from);
                self.common.note(Direction::Received, from, &header, total);
            }
            _ => self.missing(from, tag),
        }
        Ok(taken.unwrap_or(RecvStatus::None))
    }

    pub(super) fn missing(&mut self, from: Rank, tag: Tag) {
        self.interest.expect(from);
        lock(&self.common.recorder).awaiting(from, tag);
    }
}

/// Message sink that records the completed message.
pub(crate) struct Noting<'v> {
    visit: &'v mut dyn MessageSink,
    /// Last request for a destination: the message, its length, and the offset.
    place: Option<(Header, usize, usize)>,
    pub(crate) last: Option<(Header, usize)>,
}

impl<'v> Noting<'v> {
    pub(crate) fn new(visit: &'v mut dyn MessageSink) -> Self {
        Self { visit, place: None, last: None }
    }
}

impl MessageSink for Noting<'_> {
    fn chunk(&mut self, header: &Header, piece: MessageChunk<'_>) -> Result<(), CommError> {
        if piece.at + piece.bytes.len() == piece.total {
            self.last = Some((*header, piece.total));
        }
        self.visit.chunk(header, piece)
    }

    fn destination(
        &mut self,
        header: &Header,
        total: usize,
        at: usize,
    ) -> Result<Option<&mut [u8]>, CommError> {
        self.place = Some((*header, total, at));
        self.visit.destination(header, total, at)
    }

    fn written(&mut self, bytes: usize) {
        if let Some((header, total, at)) = self.place
            && at + bytes == total
        {
            self.last = Some((header, total));
        }
        self.visit.written(bytes);
    }
}

/// Readable data from one rank.
pub(super) struct Incoming<'i> {
    mail: &'i mut Mailbox,
    stream: Origin<'i>,
}

enum Origin<'i> {
    Nothing,
    Ring(&'i mut FrameReader, &'i mut Inbox, u32),
    Socket(&'i mut FrameReader, Stream<'i>),
    Sealed(&'i mut FrameReader, SealedStream<'i>),
}

impl Incoming<'_> {
    fn take(
        &mut self,
        channel: u32,
        visit: &mut dyn MessageSink,
    ) -> Result<RecvStatus, StreamError> {
        match &mut self.stream {
            Origin::Nothing => Ok(self.mail.deliver(channel, visit)?),
            Origin::Ring(inflow, inbox, sender) => {
                inflow.take(&mut inbox.ring(*sender), self.mail, channel, visit)
            }
            Origin::Socket(inflow, stream) => inflow.take(stream, self.mail, channel, visit),
            Origin::Sealed(inflow, stream) => inflow.take(stream, self.mail, channel, visit),
        }
    }

    fn queued_message(&mut self, channel: u32) -> Result<Option<QueuedMessage>, StreamError> {
        match &mut self.stream {
            Origin::Nothing => Ok(self.mail.pop(channel)),
            Origin::Ring(inflow, inbox, sender) => {
                inflow.queued_message(&mut inbox.ring(*sender), self.mail, channel)
            }
            Origin::Socket(inflow, stream) => inflow.queued_message(stream, self.mail, channel),
            Origin::Sealed(inflow, stream) => inflow.queued_message(stream, self.mail, channel),
        }
    }

    /// Returns true if the peer has acked `messages` zero-copy messages.
    pub(super) fn read_acks(&mut self, messages: u64) -> Result<bool, StreamError> {
        match &mut self.stream {
            Origin::Nothing | Origin::Ring(..) => Ok(true),
            Origin::Socket(inflow, stream) => inflow.read_acks(stream, self.mail, messages),
            Origin::Sealed(inflow, stream) => inflow.read_acks(stream, self.mail, messages),
        }
    }
}
