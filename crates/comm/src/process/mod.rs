//! Ranks that are processes: neighbours share memory, others speak TCP.
//!
//! A transport has two threads. The one that calls it sends, and takes what comes through shared
//! memory. The other, the attendant, reads the sockets, writes what did not fit at once, and
//! keeps the connection to the hub alive while the first computes. Whatever happens, the bell of
//! the rank's segment rings, and that is what [`wait`](Transport::wait) waits for.

mod attendant;
mod connect;
mod link;

pub use connect::{ProcessOptions, Wires, connect};

use crate::error::CommError;
use crate::recorder::{FlightRecorder, Way};
use crate::rendezvous::Hub;
use crate::shm::inbox::{Bell, Inbox};
use crate::shm::window::{Loan, SharedBuffer, Site, Windows};
use crate::transport::{Header, Lending, Lent, Payload, Tag, Transport};
use crate::wire::{Assembler, Incoming};
use link::{Link, Pushed, SharedMemory};
use paceline_plan::ids::Rank;
use rustix::fd::OwnedFd;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The end of one rank that is a process.
///
/// Dropping it delivers what was sent and tells the others that this rank has left; dropping it
/// while its thread panics tells them that it has failed. Rank 0, if the hub runs in it, then stays
/// for a while until the others have left too.
#[derive(Debug)]
pub struct ProcessTransport {
    common: Arc<Common>,
    inbox: Inbox,
    /// By rank: the frames that come through shared memory.
    assemblers: Vec<Assembler>,
    /// What came through shared memory or from this rank itself.
    arrived: Mail,
    /// How often the bell had rung at the end of the last wait.
    seen: u32,
    /// How long to watch the bell before sleeping on it.
    spin: Duration,
    /// The shared buffers of this rank.
    sites: Vec<Arc<Site>>,
    /// Those of its neighbours.
    windows: Windows,
    attendant: Option<JoinHandle<()>>,
    hub: Option<Hub>,
    detection: Duration,
}

/// By sender and channel, oldest first.
type Mail = HashMap<(Rank, u32), VecDeque<Payload>>;

/// What the two threads of a rank have in common.
#[derive(Debug)]
struct Common {
    rank: Rank,
    /// By rank.
    links: Vec<Link>,
    /// What came through sockets.
    mail: Mutex<Mail>,
    bell: Bell,
    failure: OnceLock<CommError>,
    /// Why this rank gives up, if it does.
    abort: OnceLock<String>,
    leaving: AtomicBool,
    /// An eventfd that the attendant watches.
    wake: OwnedFd,
    /// How many links through shared memory have something that did not fit.
    behind: AtomicUsize,
    recorder: Mutex<FlightRecorder>,
    spare: Mutex<Vec<Vec<u8>>>,
}

/// The last byte of a message that lends says whether it tells where to look or is a copy.
const LOAN: u8 = 1;
const COPY: u8 = 0;

/// How many spare buffers are worth keeping for each rank.
const SPARE: usize = 4;

impl ProcessTransport {
    /// The last messages of this rank, for whoever looks into a failure.
    pub fn flight_record(&self) -> FlightRecorder {
        lock(&self.common.recorder).clone()
    }

    /// Memory for vectors that neighbours can read in place. Read-reduce on vectors elsewhere copies
    /// them once more.
    pub fn shared_buffer(&mut self, bytes: usize) -> Result<SharedBuffer, CommError> {
        let buffer = SharedBuffer::new(bytes)?;
        // Those that only this list still knows have been dropped.
        self.sites.retain(|site| Arc::strong_count(site) > 1);
        self.sites.push(buffer.site());
        Ok(buffer)
    }

    /// Whether messages to a rank go through shared memory.
    pub fn shares_memory_with(&self, rank: Rank) -> bool {
        matches!(self.common.links.get(rank.index()), Some(Link::Shared(_)))
    }

    /// Takes what has come from a neighbour through shared memory.
    fn pump(&mut self, from: Rank) -> Result<(), CommError> {
        let Some(Link::Shared(link)) = self.common.links.get(from.index()) else { return Ok(()) };
        let assembler = &mut self.assemblers[from.index()];
        loop {
            let n = self.inbox.pull(from.0, assembler.space())?;
            if n == 0 {
                return Ok(());
            }
            if self.inbox.take_wish(from.0) {
                link.bell().ring();
            }
            let mut spare = |bytes| self.common.spare_buffer(bytes);
            let frame = assembler.advance(n, &mut spare).map_err(|error| CommError::Failed {
                rank: from,
                reason: format!("rank {} cannot read it: {error}", self.common.rank),
            })?;
            if let Some(Incoming::Message(payload)) = frame {
                let channel = payload.header.tag.channel();
                self.arrived.entry((from, channel)).or_default().push_back(payload);
            }
        }
    }
}

impl Transport for ProcessTransport {
    fn rank(&self) -> Rank {
        self.common.rank
    }

    fn world(&self) -> u32 {
        self.common.links.len() as u32
    }

    fn send(&mut self, to: Rank, tag: Tag, payload: Payload) -> Result<(), CommError> {
        let common = &self.common;
        common.check()?;
        let link = common.link(to)?;
        if link.departed() {
            return Err(CommError::Departed { rank: common.rank, peer: to });
        }
        lock(&common.recorder).record(Way::Sent, to, payload.header, payload.data.len());
        match link {
            Link::Own => {
                self.arrived.entry((to, tag.channel())).or_default().push_back(payload);
                common.bell.ring();
                return Ok(());
            }
            Link::Shared(link) => {
                let pushed = link.send(payload)?;
                if pushed.fell_behind {
                    common.wake();
                }
                common.account(pushed);
            }
            Link::Socket(link) => {
                let sent = link.send(tag, payload);
                if !sent.complete {
                    common.wake();
                }
                sent.done.into_iter().for_each(|buffer| common.recycle(buffer));
            }
        }
        Ok(())
    }

    fn try_recv(&mut self, from: Rank, tag: Tag) -> Result<Option<Payload>, CommError> {
        self.common.check()?;
        // Read before the queues: whatever the sender sent before it left is in them by then.
        let departed = self.common.link(from)?.departed();
        let common = Arc::clone(&self.common);
        common.flush_shared()?;
        let key = (from, tag.channel());
        let payload = match common.link(from)? {
            Link::Own => self.arrived.get_mut(&key).and_then(VecDeque::pop_front),
            Link::Socket(_) => lock(&common.mail).get_mut(&key).and_then(VecDeque::pop_front),
            Link::Shared(_) => {
                self.pump(from)?;
                self.arrived.get_mut(&key).and_then(VecDeque::pop_front)
            }
        };
        match &payload {
            Some(Payload { header, data }) => {
                lock(&common.recorder).record(Way::Received, from, *header, data.len());
            }
            None if departed => return Err(CommError::Departed { rank: common.rank, peer: from }),
            None => lock(&common.recorder).awaiting(from, tag),
        }
        Ok(payload)
    }

    fn wait(&mut self, at_most: Duration) -> Result<(), CommError> {
        self.common.check()?;
        self.common.flush_shared()?;
        self.common.bell.wait(self.seen, self.spin, at_most);
        self.seen = self.common.bell.count();
        self.common.check()
    }

    fn abort(&mut self, reason: &str) {
        let _ = self.common.abort.set(reason.to_owned());
        self.common.fail(CommError::Failed { rank: self.common.rank, reason: reason.to_owned() });
        self.common.wake();
    }

    fn shares_memory(&self) -> bool {
        true
    }

    fn neighbourly_memory(&mut self, bytes: usize) -> Result<Option<SharedBuffer>, CommError> {
        let has_neighbours = self.common.shared().next().is_some();
        has_neighbours.then(|| self.shared_buffer(bytes)).transpose()
    }

    fn lend(
        &mut self,
        to: Rank,
        header: &Header,
        bytes: &[&[u8]],
    ) -> Result<Option<Lending>, CommError> {
        let neighbour = matches!(self.common.link(to)?, Link::Shared(_));
        let loan = if neighbour { Loan::of(&self.sites, bytes) } else { None };
        let mut data = self.take_buffer(1 + bytes.iter().map(|bytes| bytes.len()).sum::<usize>());
        let lending = match loan {
            Some(loan) => {
                loan.encode(&mut data);
                data.push(LOAN);
                Lending::InPlace
            }
            None => {
                bytes.iter().for_each(|bytes| data.extend_from_slice(bytes));
                data.push(COPY);
                Lending::Copied
            }
        };
        self.send(to, header.tag, Payload { header: *header, data })?;
        Ok(Some(lending))
    }

    fn try_borrow(&mut self, from: Rank, tag: Tag) -> Result<Option<(Header, Lent)>, CommError> {
        let Some(Payload { header, mut data }) = self.try_recv(from, tag)? else { return Ok(None) };
        // What is neither belongs to another operation, as its header shows.
        let lent = match (data.pop(), Loan::decode(&data)) {
            (Some(LOAN), Some(loan)) => Lent::InPlace(self.windows.open(loan)?),
            _ => Lent::Copied(data),
        };
        Ok(Some((header, lent)))
    }

    fn take_buffer(&mut self, bytes: usize) -> Vec<u8> {
        let mut buffer = self.common.spare_buffer(bytes);
        buffer.clear();
        buffer.reserve_exact(bytes);
        buffer
    }

    fn recycle(&mut self, buffer: Vec<u8>) {
        self.common.recycle(buffer);
    }
}

impl Drop for ProcessTransport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort("its thread panicked");
        }
        self.common.leaving.store(true, Ordering::Release);
        self.common.wake();
        if let Some(attendant) = self.attendant.take() {
            let _ = attendant.join();
        }
        if let Some(hub) = self.hub.take() {
            let _ = hub.linger(self.detection);
        }
    }
}

impl Common {
    fn check(&self) -> Result<(), CommError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    fn link(&self, rank: Rank) -> Result<&Link, CommError> {
        let world = self.links.len() as u32;
        self.links.get(rank.index()).ok_or(CommError::NoSuchRank { rank, world })
    }

    /// The first failure is the one that counts.
    fn fail(&self, cause: CommError) {
        let _ = self.failure.set(cause);
        self.bell.ring();
    }

    /// Makes the attendant look around.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn shared(&self) -> impl Iterator<Item = &SharedMemory> {
        self.links.iter().filter_map(|link| match link {
            Link::Shared(link) => Some(link),
            Link::Own | Link::Socket(_) => None,
        })
    }

    /// Sends more of what did not fit into shared memory.
    fn flush_shared(&self) -> Result<(), CommError> {
        if self.behind.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        for link in self.shared().filter(|link| link.is_behind()) {
            self.account(link.flush()?);
        }
        Ok(())
    }

    /// Keeps count of the links that are behind. The count may lag, but never stays wrong.
    fn account(&self, pushed: Pushed) {
        if pushed.fell_behind {
            self.behind.fetch_add(1, Ordering::AcqRel);
        }
        if pushed.caught_up {
            self.behind.fetch_sub(1, Ordering::AcqRel);
        }
        pushed.done.into_iter().for_each(|buffer| self.recycle(buffer));
    }

    /// A used buffer with whatever is in it: the smallest that suffices, or else the largest.
    fn spare_buffer(&self, bytes: usize) -> Vec<u8> {
        let mut spare = lock(&self.spare);
        let fitting = |(_, buffer): &(usize, &Vec<u8>)| {
            let capacity = buffer.capacity();
            if capacity >= bytes { (0, capacity) } else { (1, usize::MAX - capacity) }
        };
        let index = spare.iter().enumerate().min_by_key(fitting).map(|(index, _)| index);
        index.map(|index| spare.swap_remove(index)).unwrap_or_default()
    }

    fn recycle(&self, buffer: Vec<u8>) {
        let mut spare = lock(&self.spare);
        if buffer.capacity() > 0 && spare.len() < SPARE * self.links.len() {
            spare.push(buffer);
        }
    }
}

/// A lock whose holder panicked still guards consistent data: no panic can happen in the middle of
/// an update here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
