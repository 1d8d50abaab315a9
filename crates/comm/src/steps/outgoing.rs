//! Messages that the transport does not accept at once.
//!
//! They are sent directly from the work buffer while the following steps are executed. A step that
//! is about to overwrite unsent data waits for it, or continues after a copy. Messages with the
//! same data share one copy.

use super::{ActiveCollective, ranges};
use crate::error::CommError;
use crate::shared_memory::Few;
use crate::transport::{Transport, ZeroCopy};
use paceline_plan::collective::{Chunking, Chunks};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;

/// A message not yet fully sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outgoing {
    pub(super) to: Rank,
    pub(super) round: u32,
    pub(super) chunks: Chunks,
    pub(super) gone: Option<usize>,
    /// True if it is sent from a copy, because its data in the work buffer has been overwritten.
    pub(super) copied: bool,
}

/// Data of messages of a round, copied before it was overwritten.
#[derive(Debug)]
pub(super) struct Copied {
    round: u32,
    chunks: Chunks,
    bytes: Vec<u8>,
}

impl Copied {
    fn is_of(&self, message: &Outgoing) -> bool {
        message.copied && (self.round, self.chunks) == (message.round, message.chunks)
    }
}

impl ActiveCollective {
    /// Sends more of the unsent data; returns the destination of the first message left.
    pub(super) fn send_on(
        &mut self,
        transport: &mut dyn Transport,
        cut: &Chunking,
        dtype: DType,
        data: &[u8],
    ) -> Result<Option<Rank>, CommError> {
        let mut at = 0;
        while let Some(message) = self.outgoing.get(at).copied() {
            // Space freed now belongs to an earlier message to the same rank, if any.
            if self.outgoing[..at].iter().any(|earlier| earlier.to == message.to) {
                at += 1;
                continue;
            }
            let header = self.header(message.round, cut.elements, dtype);
            let total = (cut.elements_in(message.chunks) * dtype.size()) as usize;
            let Outgoing { to, chunks, gone: before, .. } = message;
            let gone = match self.copies.iter().find(|copy| copy.is_of(&message)) {
                Some(copy) => transport.try_send(to, &header, &[&copy.bytes], before),
                None => with_pieces(cut, chunks, dtype, data, |pieces| {
                    match self.zero_copy(transport) {
                        Some(zero_copy) => zero_copy.try_send(to, &header, pieces, before),
                        None => transport.try_send(to, &header, pieces, before),
                    }
                }),
            }?;
            self.moved += (gone.unwrap_or(0) - before.unwrap_or(0)) as u64;
            if gone == Some(total) {
                let receipt = |zero_copy: &mut dyn ZeroCopy| zero_copy.receipt(to, self.tag);
                if let Some(receipt) = self.zero_copy(transport).and_then(receipt) {
                    self.in_place.lent(to, receipt);
                }
                self.outgoing.remove(at);
            } else {
                self.outgoing[at].gone = gone;
                at += 1;
            }
        }
        let outgoing = &self.outgoing;
        let done = |copy: &mut Copied| !outgoing.iter().any(|message| copy.is_of(message));
        for Copied { mut bytes, .. } in self.copies.extract_if(.., done) {
            bytes.clear();
            self.spare.push(bytes);
        }
        Ok(self.outgoing.first().map(|message| message.to))
    }

    /// Ensures that `chunks` may be overwritten in `round`; otherwise returns the rank to wait for.
    ///
    /// Messages of an earlier round drain without help: the peer receives them before it reaches
    /// this round, and nothing in this round can prevent that. Waiting for messages of this same
    /// round could deadlock, so they are copied.
    pub(super) fn let_go(
        &mut self,
        transport: &mut dyn Transport,
        cut: &Chunking,
        dtype: DType,
        data: &[u8],
        (round, chunks): (u32, Chunks),
    ) -> Result<Option<Rank>, CommError> {
        let overlap = |message: &Outgoing| {
            let written = || ranges(cut, chunks, 1);
            !message.copied
                && ranges(cut, message.chunks, 1)
                    .any(|a| written().any(|b| a.start < b.end && b.start < a.end))
        };
        if !self.outgoing.iter().any(overlap) {
            return Ok(None);
        }
        self.send_on(transport, cut, dtype, data)?;
        let in_the_way = || self.outgoing.iter().filter(|message| overlap(message));
        if let Some(earlier) = in_the_way().find(|message| message.round < round) {
            return Ok(Some(earlier.to));
        }
        for message in self.outgoing.iter_mut().filter(|message| overlap(message)) {
            message.copied = true;
            if self.copies.iter().any(|copy| copy.is_of(message)) {
                continue;
            }
            let mut bytes = self.spare.pop().unwrap_or_default();
            let pieces = ranges(cut, message.chunks, dtype.size() as usize);
            pieces.for_each(|range| bytes.extend_from_slice(&data[range]));
            self.copies.push(Copied { round: message.round, chunks: message.chunks, bytes });
        }
        Ok(None)
    }
}

/// Calls `call` with the pieces of a message, of which there are few.
fn with_pieces<R>(
    cut: &Chunking,
    chunks: Chunks,
    dtype: DType,
    data: &[u8],
    call: impl FnOnce(&[&[u8]]) -> R,
) -> R {
    let pieces = ranges(cut, chunks, dtype.size() as usize).map(|range| &data[range]);
    call(&pieces.collect::<Few<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::{CollectiveSpec, run};
    use crate::transport::thread::{ThreadTransport, world};
    use crate::transport::{Header, MessageSink, RecvStatus, Tag, Wait};
    use paceline_plan::collective::{Algorithm, CollectiveKind, Reduction, SummationOrder};
    use std::time::Duration;

    /// Transport that at first refuses every other send, as if space came at the worst moment.
    struct Fickle {
        wires: ThreadTransport,
        asked: u32,
    }

    impl Transport for Fickle {
        fn rank(&self) -> Rank {
            self.wires.rank()
        }

        fn world(&self) -> u32 {
            self.wires.world()
        }

        fn send(&mut self, to: Rank, header: &Header, data: &[&[u8]]) -> Result<(), CommError> {
            self.wires.send(to, header, data)
        }

        fn try_send(
            &mut self,
            to: Rank,
            header: &Header,
            data: &[&[u8]],
            gone: Option<usize>,
        ) -> Result<Option<usize>, CommError> {
            self.asked += 1;
            if self.asked % 2 == 1 { Ok(None) } else { self.wires.try_send(to, header, data, gone) }
        }

        fn try_recv_into(
            &mut self,
            from: Rank,
            tag: Tag,
            visitor: &mut dyn MessageSink,
        ) -> Result<RecvStatus, CommError> {
            self.wires.try_recv_into(from, tag, visitor)
        }

        fn try_recv(
            &mut self,
            from: Rank,
            tag: Tag,
            read: &mut dyn FnMut(&Header, &[u8]),
        ) -> Result<bool, CommError> {
            self.wires.try_recv(from, tag, read)
        }

        fn wait(&mut self, how: Wait, _: Duration) -> Result<(), CommError> {
            self.wires.wait(how, Duration::from_millis(1))
        }

        fn abort(&mut self, reason: &str) {
            self.wires.abort(reason);
        }
    }

    #[test]
    fn messages_to_one_rank_never_overtake_each_other() {
        let spec = CollectiveSpec {
            kind: CollectiveKind::AllReduce,
            algorithm: Algorithm::HalvingDoubling,
            order: SummationOrder::Canonical,
            reduction: Reduction::Sum,
            root: 0,
            block: 1,
        };
        let members = [Rank(0), Rank(1)];
        std::thread::scope(|scope| {
            for wires in world(2) {
                scope.spawn(move || {
                    let mut wires = Fickle { wires, asked: 0 };
                    let (tag, timeout) = (Tag::new(0, 0), Duration::from_secs(20));
                    let mut data = vec![1.5f32; 2 << 20];
                    run(&mut wires, &spec, &members, tag, &mut data, None, timeout).unwrap();
                    assert!(data.iter().all(|sum| *sum == 3.0));
                    wires
                });
            }
        });
    }
}
