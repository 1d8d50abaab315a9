//! Zero-copy sends over TCP; a message through a ring is copied once in any case.

use super::ProcessTransport;
use super::incoming::Incoming;
use super::link::{Link, Sending};
use crate::error::CommError;
use crate::transport::{Header, Tag, ZeroCopy};
use paceline_plan::ids::Rank;

impl ZeroCopy for ProcessTransport {
    fn try_send(
        &mut self,
        to: Rank,
        header: &Header,
        data: &[&[u8]],
        gone: Option<usize>,
    ) -> Result<Option<usize>, CommError> {
        self.send_some(to, Sending { header, data, gone, in_place: true })
    }

    fn receipt(&mut self, to: Rank, tag: Tag) -> Option<u64> {
        match self.common.links.get(to.index()) {
            Some(Link::Sockets(connections)) => {
                connections[tag.channel() as usize % connections.len()].lent()
            }
            Some(Link::Own | Link::Outside | Link::Shared(_)) | None => None,
        }
    }

    fn send_acks(&mut self) -> Result<(), CommError> {
        let Self { common, arrivals, .. } = self;
        common.check()?;
        for (link, arrivals) in common.links.iter().zip(arrivals) {
            let Link::Sockets(connections) = link else { continue };
            for (connection, (inflow, _)) in connections.iter().zip(&mut arrivals.inflows) {
                if let Some(messages) = inflow.untold()
                    && connection.send_acks(messages)
                {
                    common.wake();
                }
            }
        }
        Ok(())
    }

    fn is_acked(&mut self, by: Rank, tag: Tag, receipt: u64) -> Result<bool, CommError> {
        let heard = |incoming: &mut Incoming<'_>| Ok(incoming.read_acks(receipt)?.then_some(()));
        let taken = self.poll_incoming(by, tag.channel(), heard)?.is_some();
        match taken {
            true => self.interest.arrived(by),
            false => self.missing(by, tag),
        }
        Ok(taken)
    }
}
