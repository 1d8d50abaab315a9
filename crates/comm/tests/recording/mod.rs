//! A transport that records the messages and memory accesses of the one it wraps.

use paceline_comm::{
    CommError, Header, Lent, MessageChunk, MessageSink, RecvStatus, SharedBuffer, SharedMemory,
    Tag, Transport, Wait, Waker,
};
use paceline_plan::ids::Rank;
use std::time::Duration;

/// A complete message, or an access to the memory of another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    Sent,
    Received,
    Lent,
    Read,
}

/// One record.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Record {
    pub(crate) way: Way,
    pub(crate) peer: Rank,
    pub(crate) header: Header,
    pub(crate) bytes: u64,
}

/// The wrapped transport and its records, oldest first.
pub(crate) struct Recording {
    inner: Box<dyn Transport>,
    pub(crate) records: Vec<Record>,
}

impl Recording {
    pub(crate) fn new(inner: Box<dyn Transport>) -> Self {
        Self { inner, records: Vec::new() }
    }

    fn note(&mut self, way: Way, peer: Rank, header: &Header, bytes: usize) {
        self.records.push(Record { way, peer, header: *header, bytes: bytes as u64 });
    }
}

fn total(data: &[&[u8]]) -> usize {
    data.iter().map(|piece| piece.len()).sum()
}

/// Sink that remembers the last message.
struct Noting<'v> {
    visit: &'v mut dyn MessageSink,
    last: Option<(Header, usize)>,
}

impl MessageSink for Noting<'_> {
    fn chunk(&mut self, header: &Header, piece: MessageChunk<'_>) -> Result<(), CommError> {
        self.last = Some((*header, piece.total));
        self.visit.chunk(header, piece)
    }

    fn destination(
        &mut self,
        header: &Header,
        total: usize,
        at: usize,
    ) -> Result<Option<&mut [u8]>, CommError> {
        self.last = Some((*header, total));
        self.visit.destination(header, total, at)
    }

    fn written(&mut self, bytes: usize) {
        self.visit.written(bytes);
    }
}

impl Transport for Recording {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world(&self) -> u32 {
        self.inner.world()
    }

    fn send(&mut self, to: Rank, header: &Header, data: &[&[u8]]) -> Result<(), CommError> {
        self.note(Way::Sent, to, header, total(data));
        self.inner.send(to, header, data)
    }

    fn try_send(
        &mut self,
        to: Rank,
        header: &Header,
        data: &[&[u8]],
        gone: Option<usize>,
    ) -> Result<Option<usize>, CommError> {
        let gone = self.inner.try_send(to, header, data, gone)?;
        if gone == Some(total(data)) {
            self.note(Way::Sent, to, header, total(data));
        }
        Ok(gone)
    }

    fn try_recv_into(
        &mut self,
        from: Rank,
        tag: Tag,
        visit: &mut dyn MessageSink,
    ) -> Result<RecvStatus, CommError> {
        let mut noting = Noting { visit, last: None };
        let status = self.inner.try_recv_into(from, tag, &mut noting)?;
        if let (RecvStatus::Complete, Some((header, bytes))) = (status, noting.last) {
            self.note(Way::Received, from, &header, bytes);
        }
        Ok(status)
    }

    fn try_recv(
        &mut self,
        from: Rank,
        tag: Tag,
        read: &mut dyn FnMut(&Header, &[u8]),
    ) -> Result<bool, CommError> {
        let mut last = None;
        let there = self.inner.try_recv(from, tag, &mut |header, data| {
            last = Some((*header, data.len()));
            read(header, data);
        })?;
        if let Some((header, bytes)) = last {
            self.note(Way::Received, from, &header, bytes);
        }
        Ok(there)
    }

    fn wait(&mut self, how: Wait, at_most: Duration) -> Result<(), CommError> {
        self.inner.wait(how, at_most)
    }

    fn waker(&self) -> Option<Waker> {
        self.inner.waker()
    }

    fn abort(&mut self, reason: &str) {
        self.inner.abort(reason);
    }

    fn memory(&mut self) -> Option<&mut dyn SharedMemory> {
        if self.inner.memory().is_some() { Some(self) } else { None }
    }
}

impl Recording {
    fn shared(&mut self) -> &mut dyn SharedMemory {
        self.inner.memory().expect("memory() was asked before")
    }
}

impl SharedMemory for Recording {
    fn shares_memory_with(&mut self, rank: Rank) -> bool {
        self.shared().shares_memory_with(rank)
    }

    fn alloc_shared(&mut self, bytes: usize) -> Result<SharedBuffer, CommError> {
        self.shared().alloc_shared(bytes)
    }

    fn holds(&mut self, bytes: &[u8]) -> bool {
        self.shared().holds(bytes)
    }

    fn take_staging(&mut self, bytes: usize) -> Result<SharedBuffer, CommError> {
        self.shared().take_staging(bytes)
    }

    fn return_staging(&mut self, staging: SharedBuffer) {
        self.shared().return_staging(staging);
    }

    fn lend(&mut self, to: Rank, header: &Header, bytes: &[&[u8]]) -> Result<bool, CommError> {
        let lent = self.shared().lend(to, header, bytes)?;
        if lent {
            self.note(Way::Lent, to, header, total(bytes));
        }
        Ok(lent)
    }

    fn try_borrow(&mut self, from: Rank, tag: Tag) -> Result<Option<(Header, Lent)>, CommError> {
        let found = self.shared().try_borrow(from, tag)?;
        if let Some((header, lent)) = &found {
            assert!(matches!(lent, Lent::InPlace(_)), "a copy was sent");
            self.note(Way::Read, from, header, lent.bytes());
        }
        Ok(found)
    }
}
