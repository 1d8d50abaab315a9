//! Messages that have arrived before anybody asked for them.

use crate::error::CommError;
use crate::transport::{Header, Piece, Taken, Visitor};
use std::collections::VecDeque;

/// One sender's messages, by channel, each oldest first.
///
/// Channels are few and the one that is asked for is mostly the one of last time, so they stand in a
/// list that is searched.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    channels: Vec<(u32, VecDeque<Parcel>)>,
    spare: Vec<Vec<u8>>,
    /// How many messages have ever been put aside.
    put_aside: u64,
}

/// A message, or the end of one whose beginning has been shown already.
#[derive(Debug)]
pub(crate) struct Parcel {
    pub(crate) header: Header,
    /// How many bytes the whole message has.
    pub(crate) total: usize,
    /// How many of them are not here any more.
    pub(crate) shown: usize,
    pub(crate) data: Vec<u8>,
}

/// How many spare buffers are worth keeping.
const SPARE: usize = 4;

impl Mailbox {
    pub(crate) fn push(&mut self, parcel: Parcel) {
        self.put_aside += 1;
        let channel = parcel.header.tag.channel();
        match self.channels.iter_mut().find(|(other, _)| *other == channel) {
            Some((_, queue)) => queue.push_back(parcel),
            None => self.channels.push((channel, VecDeque::from([parcel]))),
        }
    }

    pub(crate) fn pop(&mut self, channel: u32) -> Option<Parcel> {
        self.channels.iter_mut().find(|(other, _)| *other == channel)?.1.pop_front()
    }

    /// How many messages have ever been put aside here.
    pub(crate) fn put_aside(&self) -> u64 {
        self.put_aside
    }

    /// Whether something waits on a channel.
    pub(crate) fn has(&self, channel: u32) -> bool {
        self.channels.iter().any(|(other, queue)| *other == channel && !queue.is_empty())
    }

    /// Shows the next message of a channel, if there is one.
    pub(crate) fn show(
        &mut self,
        channel: u32,
        visit: &mut dyn Visitor,
    ) -> Result<Taken, CommError> {
        let Some(Parcel { header, total, shown, data }) = self.pop(channel) else {
            return Ok(Taken::Nothing);
        };
        visit.show(&header, Piece { total, at: shown, bytes: &data })?;
        self.recycle(data);
        Ok(Taken::Whole)
    }

    /// An empty buffer, a used one where there is one.
    pub(crate) fn buffer(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_default()
    }

    pub(crate) fn recycle(&mut self, mut buffer: Vec<u8>) {
        if buffer.capacity() > 0 && self.spare.len() < SPARE {
            buffer.clear();
            self.spare.push(buffer);
        }
    }
}
