//! Messages that arrived before they were requested.

use crate::error::CommError;
use crate::transport::{Header, MessageChunk, MessageSink, RecvStatus};
use std::collections::VecDeque;

/// Messages of one sender, by channel, each oldest first.
///
/// There are few channels, and mostly the same one is requested again, so a list is searched.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    channels: Vec<(u32, VecDeque<QueuedMessage>)>,
    spare: Vec<Vec<u8>>,
    /// Total number of messages queued so far.
    put_aside: u64,
}

/// A message, or the end of one whose beginning has already been delivered.
#[derive(Debug)]
pub(crate) struct QueuedMessage {
    pub(crate) header: Header,
    /// Length of the whole message, in bytes.
    pub(crate) total: usize,
    /// Number of bytes already delivered.
    pub(crate) shown: usize,
    pub(crate) data: Vec<u8>,
}

/// Maximum number of spare buffers retained.
const SPARE: usize = 4;

impl Mailbox {
    pub(crate) fn push(&mut self, message: QueuedMessage) {
        self.put_aside += 1;
        let channel = message.header.tag.channel();
        match self.channels.iter_mut().find(|(other, _)| *other == channel) {
            Some((_, queue)) => queue.push_back(message),
            None => self.channels.push((channel, VecDeque::from([message]))),
        }
    }

    pub(crate) fn pop(&mut self, channel: u32) -> Option<QueuedMessage> {
        self.channels.iter_mut().find(|(other, _)| *other == channel)?.1.pop_front()
    }

    /// Total number of messages queued here so far.
    pub(crate) fn put_aside(&self) -> u64 {
        self.put_aside
    }

    /// Returns true if a message is queued on a channel.
    pub(crate) fn has(&self, channel: u32) -> bool {
        self.channels.iter().any(|(other, queue)| *other == channel && !queue.is_empty())
    }

    /// Passes the next message of a channel, if any, to `visit`.
    pub(crate) fn deliver(
        &mut self,
        channel: u32,
        visit: &mut dyn MessageSink,
    ) -> Result<RecvStatus, CommError> {
        let Some(QueuedMessage { header, total, shown, data }) = self.pop(channel) else {
            return Ok(RecvStatus::None);
        };
        visit.chunk(&header, MessageChunk { total, at: shown, bytes: &data })?;
        self.recycle(data);
        Ok(RecvStatus::Complete)
    }

    /// Returns an empty buffer, reusing a spare one if possible.
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
