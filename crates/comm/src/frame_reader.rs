//! Decoding of a byte stream into messages, passed to the caller in place or queued in a mailbox if
//! others come first.

use crate::error::CommError;
use crate::mailbox::{Mailbox, QueuedMessage};
use crate::session::Altered;
use crate::transport::{Header, MessageChunk, MessageSink, RecvStatus};
use crate::wire::{self, Frame, GRAIN, HEAD, WireError, padded};

/// Ordered, lossless byte source.
pub(crate) trait Source {
    /// Takes a frame head, if all of it has arrived.
    fn head(&mut self) -> Result<Option<[u8; HEAD]>, StreamError>;

    /// Returns contiguous bytes that have arrived: at least [`GRAIN`] bytes or the number `wanted`,
    /// if that many have arrived.
    fn peek(&mut self, wanted: usize) -> Result<&[u8], StreamError>;

    /// Releases bytes that were peeked at.
    fn consume(&mut self, bytes: usize);

    /// Writes bytes not yet peeked at directly to their destination and returns their number.
    /// Returns `None` if that is impossible or saves nothing; the caller then peeks at them.
    fn read_into(&mut self, _into: &mut [u8]) -> Result<Option<usize>, StreamError> {
        Ok(None)
    }
}

/// Message rests of fewer bytes are read through the buffer, with the bytes that follow.
pub(crate) const WORTH_PLACING: usize = 16 << 10;

/// Receiving end of one stream.
#[derive(Debug, Default)]
pub(crate) struct FrameReader {
    current: Option<Current>,
    /// True if the sender has said goodbye.
    pub(crate) ended: bool,
    /// Number of zero-copy messages taken from the stream, followed by the number acked to the
    /// sender.
    taken: u64,
    acks_sent: u64,
    /// Number of this rank's own zero-copy messages that the peer has acked.
    acks_received: u64,
}

/// The message that is arriving.
#[derive(Debug)]
struct Current {
    header: Header,
    total: usize,
    arrived: usize,
    in_place: bool,
    /// Queued bytes of the message and the offset of the first one.
    kept: Option<(usize, Vec<u8>)>,
}

impl Current {
    /// Reads bytes directly to their destination and returns their number. Returns `None` if they
    /// are to go through the buffer; few bytes are not worth a direct read.
    fn read_into_destination(
        &self,
        source: &mut impl Source,
        visit: &mut dyn MessageSink,
    ) -> Result<Option<usize>, StreamError> {
        let left = self.total - self.arrived;
        if left < WORTH_PLACING {
            return Ok(None);
        }
        let Some(room) = visit.destination(&self.header, self.total, self.arrived)? else {
            return Ok(None);
        };
        let most = room.len().min(left);
        let n = source.read_into(&mut room[..most])?;
        if let Some(n) = n {
            visit.written(n);
        }
        Ok(n)
    }
}

/// Reason why a stream cannot be read further.
#[derive(Debug)]
pub(crate) enum StreamError {
    /// The bytes received are not a valid frame.
    Wire(WireError),
    /// The bytes received are not those sent.
    Altered,
    /// The source or the message sink failed.
    Comm(CommError),
}

impl From<Altered> for StreamError {
    fn from(_: Altered) -> Self {
        Self::Altered
    }
}

impl From<CommError> for StreamError {
    fn from(error: CommError) -> Self {
        Self::Comm(error)
    }
}

impl FrameReader {
    /// Passes available data of a channel's next message to `visit`.
    pub(crate) fn take(
        &mut self,
        source: &mut impl Source,
        mail: &mut Mailbox,
        channel: u32,
        visit: &mut dyn MessageSink,
    ) -> Result<RecvStatus, StreamError> {
        if mail.has(channel) {
            return Ok(mail.deliver(channel, visit)?);
        }
        loop {
            let Some(current) = self.current(source)? else { return Ok(RecvStatus::None) };
            if current.kept.is_some() || current.header.tag.channel() != channel {
                if !self.keep(source, mail)? {
                    return Ok(RecvStatus::None);
                }
                if mail.has(channel) {
                    return Ok(mail.deliver(channel, visit)?);
                }
                continue;
            }
            let before = current.arrived;
            loop {
                let left = current.total - current.arrived;
                let (n, looked_at) = match current.read_into_destination(source, visit)? {
                    Some(n) => (n, 0),
                    None => {
                        let there = source.peek(left)?;
                        let n =
                            if there.len() >= left { left } else { there.len() / GRAIN * GRAIN };
                        let (total, at) = (current.total, current.arrived);
                        if n > 0 || left == 0 {
                            visit.chunk(
                                &current.header,
                                MessageChunk { total, at, bytes: &there[..n] },
                            )?;
                        }
                        (n, n)
                    }
                };
                if n == 0 && left > 0 {
                    let moved = current.arrived > before;
                    return Ok(if moved { RecvStatus::Partial } else { RecvStatus::None });
                }
                current.arrived += n;
                if n == left {
                    source.consume(looked_at + padded(current.total) - current.total);
                    self.taken += u64::from(current.in_place);
                    self.current = None;
                    return Ok(RecvStatus::Complete);
                }
                source.consume(looked_at);
            }
        }
    }

    /// Returns the next message of a channel, once it is complete.
    pub(crate) fn queued_message(
        &mut self,
        source: &mut impl Source,
        mail: &mut Mailbox,
        channel: u32,
    ) -> Result<Option<QueuedMessage>, StreamError> {
        loop {
            if let Some(message) = mail.pop(channel) {
                return Ok(Some(message));
            }
            if self.current(source)?.is_none() || !self.keep(source, mail)? {
                return Ok(None);
            }
        }
    }

    /// Returns the number of zero-copy messages taken, if it is not acked yet; marks it as acked.
    pub(crate) fn untold(&mut self) -> Option<u64> {
        let before = std::mem::replace(&mut self.acks_sent, self.taken);
        (self.taken > before).then_some(self.taken)
    }

    /// Reads until the peer has acked `messages` zero-copy messages; returns true if it has.
    /// Messages that precede the ack are queued.
    pub(crate) fn read_acks(
        &mut self,
        source: &mut impl Source,
        mail: &mut Mailbox,
        messages: u64,
    ) -> Result<bool, StreamError> {
        loop {
            let arriving = self.acks_received < messages && self.current(source)?.is_some();
            if self.acks_received >= messages {
                return Ok(true);
            }
            if !arriving || !self.keep(source, mail)? {
                return Ok(false);
            }
        }
    }

    /// Returns the message that is arriving, if any.
    fn current(&mut self, source: &mut impl Source) -> Result<Option<&mut Current>, StreamError> {
        while self.current.is_none() && !self.ended {
            let Some(head) = source.head()? else { return Ok(None) };
            match wire::decode(&head).map_err(StreamError::Wire)? {
                Frame::Goodbye => self.ended = true,
                Frame::Taken { messages } if messages <= self.acks_received => {
                    return Err(StreamError::Wire(WireError::Field { what: "count" }));
                }
                Frame::Taken { messages } => self.acks_received = messages,
                Frame::Message { header, payload, in_place } => {
                    let (total, arrived, kept) = (payload, 0, None);
                    self.current = Some(Current { header, total, arrived, in_place, kept });
                }
            }
        }
        Ok(self.current.as_mut())
    }

    /// Queues available data of the current message; returns true if the message is complete.
    fn keep(&mut self, source: &mut impl Source, mail: &mut Mailbox) -> Result<bool, StreamError> {
        let Some(current) = &mut self.current else { return Ok(true) };
        let (_, data) = current.kept.get_or_insert_with(|| (current.arrived, mail.buffer()));
        loop {
            let left = current.total - current.arrived;
            let there = source.peek(left)?;
            let n = if there.len() >= left { left } else { there.len() / GRAIN * GRAIN };
            if n == 0 && left > 0 {
                return Ok(false);
            }
            data.extend_from_slice(&there[..n]);
            current.arrived += n;
            if n < left {
                source.consume(n);
                continue;
            }
            source.consume(n + padded(current.total) - current.total);
            self.taken += u64::from(current.in_place);
            if let Some(Current { header, total, kept: Some((shown, data)), .. }) =
                self.current.take()
            {
                mail.push(QueuedMessage { header, total, shown, data });
            }
            return Ok(true);
        }
    }
}

/// Decodes bytes as if received from a peer, until an error or the end; called by a fuzzer.
pub fn drain(bytes: &[u8]) {
    let mut source = Bytes { bytes, there: bytes.len() };
    let (mut inflow, mut mail) = (FrameReader::default(), Mailbox::default());
    while let Ok(Some(message)) = inflow.queued_message(&mut source, &mut mail, 0) {
        drop(message);
    }
}

/// A stream whose first `there` bytes have arrived.
struct Bytes<'b> {
    bytes: &'b [u8],
    there: usize,
}

impl Source for Bytes<'_> {
    fn head(&mut self) -> Result<Option<[u8; HEAD]>, StreamError> {
        let head = self.bytes[..self.there].first_chunk().copied();
        if head.is_some() {
            self.consume(HEAD);
        }
        Ok(head)
    }

    fn peek(&mut self, _wanted: usize) -> Result<&[u8], StreamError> {
        Ok(&self.bytes[..self.there])
    }

    fn consume(&mut self, bytes: usize) {
        // A frame's padding may not have arrived yet; that of the last frame may be missing.
        let there = self.there.saturating_sub(bytes);
        (self.bytes, self.there) = (&self.bytes[bytes.min(self.bytes.len())..], there);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::tests::messages;
    use proptest::prelude::*;

    fn stream() -> Vec<u8> {
        let mut stream = Vec::new();
        for (at, (header, data)) in (1..).zip(messages()) {
            stream.extend(wire::ack(at));
            stream.extend(wire::encode(&header, data.len(), at % 2 == 0));
            stream.extend(&data);
            stream.resize(stream.len().next_multiple_of(GRAIN), 0);
        }
        stream.extend(wire::goodbye());
        stream
    }

    /// Messages of channels 0 and 1, requested in the order `picks` while the stream arrives in
    /// `portions`.
    fn read(portions: &[usize], picks: &[bool]) -> [Vec<(Header, Vec<u8>)>; 2] {
        let stream = stream();
        let mut source = Bytes { bytes: &stream, there: 0 };
        let (mut inflow, mut mail) = (FrameReader::default(), Mailbox::default());
        let mut found = [Vec::new(), Vec::new()];
        let mut current = [Vec::new(), Vec::new()];
        let portions = portions.iter().copied().chain([usize::MAX; 20]);
        for (portion, pick) in portions.zip(picks.iter().copied().cycle()) {
            source.there = source.bytes.len().min(source.there.saturating_add(portion));
            let channels = if portion == usize::MAX { vec![0, 1] } else { vec![u32::from(pick)] };
            for channel in channels {
                let at = channel as usize;
                let mut header = None;
                let taken = inflow
                    .take(
                        &mut source,
                        &mut mail,
                        channel,
                        &mut |found: &Header, piece: MessageChunk<'_>| {
                            assert_eq!(piece.at, current[at].len());
                            current[at].extend_from_slice(piece.bytes);
                            header = Some(*found);
                            Ok(())
                        },
                    )
                    .unwrap();
                if taken == RecvStatus::Complete {
                    found[at].push((header.unwrap(), std::mem::take(&mut current[at])));
                }
            }
        }
        assert!(inflow.ended);
        assert_eq!((inflow.taken, inflow.acks_received), (2, 4));
        found
    }

    #[test]
    fn what_stands_before_a_count_is_put_aside() {
        let stream = stream();
        let mut source = Bytes { bytes: &stream, there: HEAD };
        let (mut inflow, mut mail) = (FrameReader::default(), Mailbox::default());
        assert!(inflow.read_acks(&mut source, &mut mail, 1).unwrap());
        assert!(!inflow.read_acks(&mut source, &mut mail, 3).unwrap());
        source.there = source.bytes.len();
        assert!(inflow.read_acks(&mut source, &mut mail, 3).unwrap());
        assert_eq!((inflow.taken, inflow.acks_received), (1, 3));
        for (header, data) in messages() {
            let channel = header.tag.channel();
            let message = inflow.queued_message(&mut source, &mut mail, channel).unwrap().unwrap();
            assert_eq!((message.header, message.data), (header, data));
        }
        assert!(!inflow.read_acks(&mut source, &mut mail, 5).unwrap());
        assert_eq!((inflow.untold(), inflow.untold()), (Some(2), None));
    }

    #[test]
    fn counts_only_grow() {
        let stream = [wire::ack(2), wire::ack(2)].concat();
        let mut source = Bytes { bytes: &stream, there: stream.len() };
        let (mut inflow, mut mail) = (FrameReader::default(), Mailbox::default());
        let wrong = inflow.queued_message(&mut source, &mut mail, 0);
        assert!(matches!(wrong, Err(StreamError::Wire(WireError::Field { what: "count" }))));
    }

    proptest! {
        #[test]
        fn messages_survive_any_portions_and_any_order_of_asking(
            portions in prop::collection::vec(0usize..900, 0..60),
            picks in prop::collection::vec(any::<bool>(), 1..60),
        ) {
            let of = |channel| -> Vec<_> {
                messages().into_iter().filter(|(h, _)| h.tag.channel() == channel).collect()
            };
            prop_assert_eq!(read(&portions, &picks), [of(0), of(1)]);
        }

        #[test]
        fn damaged_streams_never_panic(
            at in 0usize..8000,
            bit in 0u8..8,
            garbage in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let mut stream = stream();
            let at = at % stream.len();
            stream[at] ^= 1 << bit;
            drain(&stream);
            drain(&garbage);
        }
    }
}
