//! Shared vectors of a rank, and its view of those of its peers.

use super::ProcessTransport;
use super::link::Link;
use crate::error::CommError;
use crate::mailbox::QueuedMessage;
use crate::shared_memory::{Lent, SharedMemory};
use crate::shm::window::{Loan, SharedBuffer, Site, Windows};
use crate::transport::{Header, Tag, Transport};
use paceline_plan::ids::Rank;
use std::sync::Arc;

/// Shared buffers that a rank owns or has mapped.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    /// Buffers of this rank.
    sites: Vec<Arc<Site>>,
    /// Encoding buffer of loans.
    loan: Vec<u8>,
    /// Mapped buffers of the other ranks in the shm domain.
    windows: Windows,
    /// Staging buffers not in use.
    staging: Vec<SharedBuffer>,
}

/// Last byte of a lending message: the message describes a location.
const LOAN: u8 = 1;

impl SharedMemory for ProcessTransport {
    fn shares_memory_with(&mut self, rank: Rank) -> bool {
        matches!(self.common.links.get(rank.index()), Some(Link::Shared(_)))
    }

    fn alloc_shared(&mut self, bytes: usize) -> Result<SharedBuffer, CommError> {
        let buffer = SharedBuffer::new(bytes)?;
        // Buffers referenced only by this list have been dropped.
        self.sharing.sites.retain(|site| Arc::strong_count(site) > 1);
        self.sharing.sites.push(buffer.site());
        Ok(buffer)
    }

    fn holds(&mut self, bytes: &[u8]) -> bool {
        Loan::of(&self.sharing.sites, &[bytes]).is_some()
    }

    fn take_staging(&mut self, bytes: usize) -> Result<SharedBuffer, CommError> {
        let staging = &mut self.sharing.staging;
        match staging.iter().position(|buffer| buffer.size() >= bytes) {
            Some(at) => Ok(staging.swap_remove(at)),
            None => self.alloc_shared(bytes),
        }
    }

    fn return_staging(&mut self, staging: SharedBuffer) {
        self.sharing.staging.push(staging);
    }

    fn lend(&mut self, to: Rank, header: &Header, bytes: &[&[u8]]) -> Result<bool, CommError> {
        let shared = self.shares_memory_with(to);
        let loan = shared.then(|| Loan::of(&self.sharing.sites, bytes)).flatten();
        let Some(loan) = loan else { return Ok(false) };
        let mut data = std::mem::take(&mut self.sharing.loan);
        data.clear();
        loan.encode(&mut data);
        data.push(LOAN);
        let sent = self.send(to, header, &[&data]);
        self.sharing.loan = data;
        sent.map(|()| true)
    }

    fn try_borrow(&mut self, from: Rank, tag: Tag) -> Result<Option<(Header, Lent)>, CommError> {
        let Some(QueuedMessage { header, mut data, .. }) = self.queued_message(from, tag)? else {
            return Ok(None);
        };
        // Anything else belongs to another operation, as its header shows.
        let lent = match data.pop() {
            Some(LOAN) => match Loan::decode(&data) {
                Some(loan) => {
                    self.arrivals[from.index()].mail.recycle(data);
                    Lent::InPlace(self.sharing.windows.open(&loan)?)
                }
                None => Lent::Copied(data),
            },
            _ => Lent::Copied(data),
        };
        Ok(Some((header, lent)))
    }
}
