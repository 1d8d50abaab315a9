//! From a stream of bytes back to messages: shown in place to whoever asks for them, or put into a
//! mailbox where others come first.

use crate::error::CommError;
use crate::mailbox::{Mailbox, Parcel};
use crate::transport::{Header, Piece, Taken, Visitor};
use crate::wire::{self, Frame, GRAIN, HEAD, WireError, padded};

/// Bytes that arrive in order and never go missing.
pub(crate) trait Source {
    /// Takes a head out, if all of it is there.
    fn head(&mut self) -> Result<Option<[u8; HEAD]>, CommError>;

    /// What has arrived and lies together; at least [`GRAIN`] bytes or as many as are `wanted`, if so
    /// many have arrived.
    fn peek(&mut self, wanted: usize) -> Result<&[u8], CommError>;

    /// Lets bytes go that were looked at.
    fn consume(&mut self, bytes: usize);

    /// Writes bytes that nobody has looked at yet straight to where they belong, and how many; none
    /// if that cannot be done or spares nothing, and they are to be looked at.
    fn read_into(&mut self, _into: &mut [u8]) -> Result<Option<usize>, CommError> {
        Ok(None)
    }
}

/// Fewer bytes of a message than this are looked at on their way, with whatever follows them.
pub(crate) const WORTH_PLACING: usize = 16 << 10;

/// The receiving end of one stream.
#[derive(Debug, Default)]
pub(crate) struct Inflow {
    current: Option<Current>,
    /// Whether the sender has said goodbye.
    pub(crate) ended: bool,
    /// How many messages have been taken out of the stream that came in place, and of how many the
    /// sender knows.
    taken: u64,
    told: u64,
    /// How many of those that went the other way the sender has said to have taken.
    heard: u64,
}

/// The message that is arriving.
#[derive(Debug)]
struct Current {
    header: Header,
    total: usize,
    arrived: usize,
    in_place: bool,
    /// What has been put aside, from this byte on.
    kept: Option<(usize, Vec<u8>)>,
}

impl Current {
    /// Has bytes written straight to where they belong, and how many; none if they are to be looked
    /// at on the way. A little is not worth it.
    fn put_in_place(
        &self,
        source: &mut impl Source,
        visit: &mut dyn Visitor,
    ) -> Result<Option<usize>, Trouble> {
        let left = self.total - self.arrived;
        if left < WORTH_PLACING {
            return Ok(None);
        }
        let Some(room) = visit.place(&self.header, self.total, self.arrived)? else {
            return Ok(None);
        };
        let most = room.len().min(left);
        let n = source.read_into(&mut room[..most])?;
        if let Some(n) = n {
            visit.placed(n);
        }
        Ok(n)
    }
}

/// Why a stream cannot be read on.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// What came is no frame.
    Wire(WireError),
    /// The source failed, or the visitor did.
    Comm(CommError),
}

impl From<CommError> for Trouble {
    fn from(error: CommError) -> Self {
        Self::Comm(error)
    }
}

impl Inflow {
    /// Shows what there is of the next message of a channel.
    pub(crate) fn take(
        &mut self,
        source: &mut impl Source,
        mail: &mut Mailbox,
        channel: u32,
        visit: &mut dyn Visitor,
    ) -> Result<Taken, Trouble> {
        if mail.has(channel) {
            return Ok(mail.show(channel, visit)?);
        }
        loop {
            let Some(current) = self.current(source)? else { return Ok(Taken::Nothing) };
            if current.kept.is_some() || current.header.tag.channel() != channel {
                if !self.keep(source, mail)? {
                    return Ok(Taken::Nothing);
                }
                if mail.has(channel) {
                    return Ok(mail.show(channel, visit)?);
                }
                continue;
            }
            let before = current.arrived;
            loop {
                let left = current.total - current.arrived;
                let (n, looked_at) = match current.put_in_place(source, visit)? {
                    Some(n) => (n, 0),
                    None => {
                        let there = source.peek(left)?;
                        let n =
                            if there.len() >= left { left } else { there.len() / GRAIN * GRAIN };
                        let (total, at) = (current.total, current.arrived);
                        if n > 0 || left == 0 {
                            visit.show(&current.header, Piece { total, at, bytes: &there[..n] })?;
                        }
                        (n, n)
                    }
                };
                if n == 0 && left > 0 {
                    let moved = current.arrived > before;
                    return Ok(if moved { Taken::Part } else { Taken::Nothing });
                }
                current.arrived += n;
                if n == left {
                    source.consume(looked_at + padded(current.total) - current.total);
                    self.taken += u64::from(current.in_place);
                    self.current = None;
                    return Ok(Taken::Whole);
                }
                source.consume(looked_at);
            }
        }
    }

    /// The next message of a channel, once all of it is there.
    pub(crate) fn parcel(
        &mut self,
        source: &mut impl Source,
        mail: &mut Mailbox,
        channel: u32,
    ) -> Result<Option<Parcel>, Trouble> {
        loop {
            if let Some(parcel) = mail.pop(channel) {
                return Ok(Some(parcel));
            }
            if self.current(source)?.is_none() || !self.keep(source, mail)? {
                return Ok(None);
            }
        }
    }

    /// How many messages that came in place have been taken, if the sender has not been told; from now on
    /// it has.
    pub(crate) fn untold(&mut self) -> Option<u64> {
        let before = std::mem::replace(&mut self.told, self.taken);
        (self.taken > before).then_some(self.taken)
    }

    /// Reads on until the sender has said that it has taken so many messages that went in place; whether it
    /// has. What stands before that is put aside.
    pub(crate) fn hear(
        &mut self,
        source: &mut impl Source,
        mail: &mut Mailbox,
        messages: u64,
    ) -> Result<bool, Trouble> {
        loop {
            let arriving = self.heard < messages && self.current(source)?.is_some();
            if self.heard >= messages {
                return Ok(true);
            }
            if !arriving || !self.keep(source, mail)? {
                return Ok(false);
            }
        }
    }

    /// The message that is arriving, if one is.
    fn current(&mut self, source: &mut impl Source) -> Result<Option<&mut Current>, Trouble> {
        while self.current.is_none() && !self.ended {
            let Some(head) = source.head()? else { return Ok(None) };
            match wire::decode(&head).map_err(Trouble::Wire)? {
                Frame::Goodbye => self.ended = true,
                Frame::Taken { messages } if messages <= self.heard => {
                    return Err(Trouble::Wire(WireError::Field { what: "count" }));
                }
                Frame::Taken { messages } => self.heard = messages,
                Frame::Message { header, payload, in_place } => {
                    let (total, arrived, kept) = (payload, 0, None);
                    self.current = Some(Current { header, total, arrived, in_place, kept });
                }
            }
        }
        Ok(self.current.as_mut())
    }

    /// Puts what there is of the present message aside; whether that was the end of it.
    fn keep(&mut self, source: &mut impl Source, mail: &mut Mailbox) -> Result<bool, Trouble> {
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
                mail.push(Parcel { header, total, shown, data });
            }
            return Ok(true);
        }
    }
}

/// Reads bytes as if they had come over a wire, for as long as they can be read: what a fuzzer calls.
pub fn drain(bytes: &[u8]) {
    let mut source = Bytes { bytes, there: bytes.len() };
    let (mut inflow, mut mail) = (Inflow::default(), Mailbox::default());
    while let Ok(Some(parcel)) = inflow.parcel(&mut source, &mut mail, 0) {
        drop(parcel);
    }
}

/// A stream of which only the beginning has arrived.
struct Bytes<'b> {
    bytes: &'b [u8],
    there: usize,
}

impl Source for Bytes<'_> {
    fn head(&mut self) -> Result<Option<[u8; HEAD]>, CommError> {
        let head = self.bytes[..self.there].first_chunk().copied();
        if head.is_some() {
            self.consume(HEAD);
        }
        Ok(head)
    }

    fn peek(&mut self, _wanted: usize) -> Result<&[u8], CommError> {
        Ok(&self.bytes[..self.there])
    }

    fn consume(&mut self, bytes: usize) {
        // The filling of a frame may not have arrived yet, and that of the last one be missing.
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
            stream.extend(wire::taken(at));
            stream.extend(wire::encode(&header, data.len(), at % 2 == 0));
            stream.extend(&data);
            stream.resize(stream.len().next_multiple_of(GRAIN), 0);
        }
        stream.extend(wire::goodbye());
        stream
    }

    /// What channel 0 and channel 1 carry, with the two asked for in this order while the stream
    /// arrives in these portions.
    fn read(portions: &[usize], picks: &[bool]) -> [Vec<(Header, Vec<u8>)>; 2] {
        let stream = stream();
        let mut source = Bytes { bytes: &stream, there: 0 };
        let (mut inflow, mut mail) = (Inflow::default(), Mailbox::default());
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
                        &mut |found: &Header, piece: Piece<'_>| {
                            assert_eq!(piece.at, current[at].len());
                            current[at].extend_from_slice(piece.bytes);
                            header = Some(*found);
                            Ok(())
                        },
                    )
                    .unwrap();
                if taken == Taken::Whole {
                    found[at].push((header.unwrap(), std::mem::take(&mut current[at])));
                }
            }
        }
        assert!(inflow.ended);
        assert_eq!((inflow.taken, inflow.heard), (2, 4));
        found
    }

    #[test]
    fn what_stands_before_a_count_is_put_aside() {
        let stream = stream();
        let mut source = Bytes { bytes: &stream, there: HEAD };
        let (mut inflow, mut mail) = (Inflow::default(), Mailbox::default());
        assert!(inflow.hear(&mut source, &mut mail, 1).unwrap());
        assert!(!inflow.hear(&mut source, &mut mail, 3).unwrap());
        source.there = source.bytes.len();
        assert!(inflow.hear(&mut source, &mut mail, 3).unwrap());
        assert_eq!((inflow.taken, inflow.heard), (1, 3));
        for (header, data) in messages() {
            let channel = header.tag.channel();
            let parcel = inflow.parcel(&mut source, &mut mail, channel).unwrap().unwrap();
            assert_eq!((parcel.header, parcel.data), (header, data));
        }
        assert!(!inflow.hear(&mut source, &mut mail, 5).unwrap());
        assert_eq!((inflow.untold(), inflow.untold()), (Some(2), None));
    }

    #[test]
    fn counts_only_grow() {
        let stream = [wire::taken(2), wire::taken(2)].concat();
        let mut source = Bytes { bytes: &stream, there: stream.len() };
        let (mut inflow, mut mail) = (Inflow::default(), Mailbox::default());
        let wrong = inflow.parcel(&mut source, &mut mail, 0);
        assert!(matches!(wrong, Err(Trouble::Wire(WireError::Field { what: "count" }))));
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
