//! Transport for ranks that are processes: shared memory within an shm domain, TCP otherwise.
//!
//! A transport has two threads. The calling thread moves the data: sends go directly from its
//! buffers, and arriving data is passed to it at once. The service thread writes queued data that
//! did not fit, and keeps the connection to the rendezvous server alive while the first computes.

mod connect;
mod connection;
mod link;
mod service_thread;
mod stream;
mod wait_policy;

pub use connect::{ProcessOptions, connect};

use crate::error::CommError;
use crate::frame_reader::{FrameReader, StreamError};
use crate::mailbox::{Mailbox, QueuedMessage};
use crate::recorder::{Direction, FlightRecorder};
use crate::rendezvous::RendezvousServer;
use crate::shm::inbox::{Doorbell, Inbox};
use crate::shm::window::{Loan, SharedBuffer, Site, Window, Windows};
use crate::transport::{
    Header, Lent, MessageChunk, MessageSink, RecvStatus, Tag, Transport, Waker,
};
use link::{Change, Link, Sending, SharedMemory};
use paceline_plan::ids::Rank;
use rustix::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use stream::{RecvBuffer, Stream};
use wait_policy::{Interest, WaitPolicy};

/// Transport endpoint of one rank that is a process.
///
/// Dropping it delivers all sent messages and tells the other ranks that this one has left.
/// Dropping it during a panic tells them that it has failed. Rank 0, if the rendezvous server runs
/// in it, then stays for a while until the others have left too.
#[derive(Debug)]
pub struct ProcessTransport {
    common: Arc<Common>,
    inbox: Inbox,
    /// Arriving data, by rank.
    arrivals: Vec<Arrivals>,
    interest: Interest,
    policy: WaitPolicy,
    /// Doorbell count at the end of the last wait.
    seen: u32,
    /// True if a message was queued in a mailbox since the last wait. A caller that polled for it
    /// too early must not block: the transport will not signal it again.
    aside: bool,
    /// Shared buffers of this rank.
    sites: Vec<Arc<Site>>,
    /// Encoding buffer of loans.
    loan: Vec<u8>,
    /// Mapped shared buffers of the other ranks in the shm domain.
    windows: Windows,
    /// Staging buffers not in use.
    stages: Vec<SharedBuffer>,
    service_thread: Option<JoinHandle<()>>,
    rendezvous: Option<RendezvousServer>,
    heartbeat_timeout: Duration,
}

/// Data arriving from one rank.
#[derive(Debug)]
struct Arrivals {
    mail: Mailbox,
    /// One reader per stream: the ring, or each of the connections.
    inflows: Vec<(FrameReader, RecvBuffer)>,
}

impl Arrivals {
    fn new(link: &Link) -> Self {
        let streams = match link {
            Link::Own => 0,
            Link::Shared(_) => 1,
            Link::Sockets(connections) => connections.len(),
        };
        let inflows = (0..streams).map(|_| Default::default()).collect();
        Self { mail: Mailbox::default(), inflows }
    }
}

/// State shared by the two threads of a rank.
#[derive(Debug)]
struct Common {
    rank: Rank,
    /// Links by rank.
    links: Vec<Link>,
    bell: Doorbell,
    failure: OnceLock<CommError>,
    /// Reason why this rank aborts, if it does.
    abort: OnceLock<String>,
    leaving: AtomicBool,
    /// An eventfd that the service thread polls.
    wake: OwnedFd,
    /// An eventfd that is readable from the first failure on.
    alarm: OwnedFd,
    /// An eventfd that ends a blocking poll of the sockets.
    nudge: OwnedFd,
    /// True while the transport blocks in that poll.
    polling: AtomicBool,
    /// True if the service thread is to ring the doorbell when data arrives on a socket.
    listening: AtomicBool,
    /// Number of shared-memory links with a backlog.
    behind: AtomicUsize,
    recorder: Mutex<FlightRecorder>,
}

/// Last byte of a lending message: the message describes a location, or is a copy.
const LOAN: u8 = 1;

impl ProcessTransport {
    /// Last messages of this rank, for failure analysis.
    pub fn flight_record(&self) -> FlightRecorder {
        lock(&self.common.recorder).clone()
    }

    /// Allocates memory for vectors that ranks of the shm domain can read in place. Shared memory on
    /// other vectors copies them once more.
    pub fn shared_buffer(&mut self, bytes: usize) -> Result<SharedBuffer, CommError> {
        let buffer = SharedBuffer::new(bytes)?;
        // Buffers referenced only by this list have been dropped.
        self.sites.retain(|site| Arc::strong_count(site) > 1);
        self.sites.push(buffer.site());
        Ok(buffer)
    }

    /// Polls the data that has arrived from a rank on a channel.
    fn poll_incoming<R>(
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
            Link::Own => (look(&mut Incoming { mail, stream: Origin::Nothing }), false),
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
                let stream = Stream { connection, backlog };
                let outcome = look(&mut Incoming { mail, stream: Origin::Socket(inflow, stream) });
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
            Err(StreamError::Wire(error)) => {
                // Nothing that follows can be read either: the world cannot continue.
                let reason = format!("rank {} cannot read it: {error}", common.rank);
                let cause = CommError::Failed { rank: from, reason };
                common.fail(cause.clone());
                common.wake();
                Err(cause)
            }
        }
    }

    /// Returns the next message of a channel, once it is complete.
    fn queued_message(&mut self, from: Rank, tag: Tag) -> Result<Option<QueuedMessage>, CommError> {
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

    fn missing(&mut self, from: Rank, tag: Tag) {
        self.interest.expect(from);
        lock(&self.common.recorder).awaiting(from, tag);
    }

    /// Sends as much as the link accepts; returns the bytes of the message sent so far.
    fn send_some(&mut self, to: Rank, message: Sending<'_>) -> Result<Option<usize>, CommError> {
        let Sending { header, gone, .. } = message;
        let common = &self.common;
        common.check()?;
        let total = message.total();
        let link = common.link(to)?;
        common.check_presence(to, link)?;
        let now = match link {
            Link::Own => {
                self.send_all(to, message)?;
                Some(total)
            }
            Link::Shared(link) => link.try_send(message)?,
            Link::Sockets(connections) => {
                let index = header.tag.channel() as usize % connections.len();
                connections[index].try_send(message)
            }
        };
        if gone.is_none() && now.is_some() {
            self.common.note(Direction::Sent, to, header, total);
        }
        match now {
            Some(now) if now == total => self.interest.gone(to),
            _ => self.interest.blocked(to),
        }
        Ok(now)
    }

    /// Sends a message, queueing a copy of the part that does not fit.
    fn send_all(&mut self, to: Rank, message: Sending<'_>) -> Result<(), CommError> {
        let Self { common, arrivals, .. } = self;
        match common.link(to)? {
            Link::Own => {
                let data = message.data.concat();
                let (header, total) = (*message.header, data.len());
                arrivals[to.index()].mail.push(QueuedMessage { header, total, shown: 0, data });
            }
            Link::Shared(link) => {
                let change = link.send(message)?;
                common.account(change);
                if change.fell_behind {
                    common.wake();
                }
            }
            Link::Sockets(connections) => {
                let index = message.header.tag.channel() as usize % connections.len();
                if connections[index].send(message) {
                    common.wake();
                }
            }
        }
        Ok(())
    }
}

/// Message sink that records the completed message.
struct Noting<'v> {
    visit: &'v mut dyn MessageSink,
    /// Last request for a destination: the message, its length, and the offset.
    place: Option<(Header, usize, usize)>,
    last: Option<(Header, usize)>,
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
struct Incoming<'i> {
    mail: &'i mut Mailbox,
    stream: Origin<'i>,
}

enum Origin<'i> {
    Nothing,
    Ring(&'i mut FrameReader, &'i mut Inbox, u32),
    Socket(&'i mut FrameReader, Stream<'i>),
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
        }
    }

    fn queued_message(&mut self, channel: u32) -> Result<Option<QueuedMessage>, StreamError> {
        match &mut self.stream {
            Origin::Nothing => Ok(self.mail.pop(channel)),
            Origin::Ring(inflow, inbox, sender) => {
                inflow.queued_message(&mut inbox.ring(*sender), self.mail, channel)
            }
            Origin::Socket(inflow, stream) => inflow.queued_message(stream, self.mail, channel),
        }
    }

    /// Returns true if the peer has acked `messages` zero-copy messages.
    fn read_acks(&mut self, messages: u64) -> Result<bool, StreamError> {
        match &mut self.stream {
            Origin::Nothing | Origin::Ring(..) => Ok(true),
            Origin::Socket(inflow, stream) => inflow.read_acks(stream, self.mail, messages),
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

    fn send(&mut self, to: Rank, header: &Header, data: &[&[u8]]) -> Result<(), CommError> {
        self.common.check()?;
        self.common.check_presence(to, self.common.link(to)?)?;
        let total = data.iter().map(|piece| piece.len()).sum();
        self.common.note(Direction::Sent, to, header, total);
        self.send_all(to, Sending { header, data, gone: None, in_place: false })?;
        self.interest.gone(to);
        Ok(())
    }

    fn try_send(
        &mut self,
        to: Rank,
        header: &Header,
        data: &[&[u8]],
        gone: Option<usize>,
    ) -> Result<Option<usize>, CommError> {
        self.send_some(to, Sending { header, data, gone, in_place: false })
    }

    fn try_send_zero_copy(
        &mut self,
        to: Rank,
        header: &Header,
        data: &[&[u8]],
        gone: Option<usize>,
    ) -> Result<Option<usize>, CommError> {
        self.send_some(to, Sending { header, data, gone, in_place: true })
    }

    fn zero_copy_receipt(&self, to: Rank, tag: Tag) -> Option<u64> {
        match self.common.links.get(to.index()) {
            Some(Link::Sockets(connections)) => {
                connections[tag.channel() as usize % connections.len()].lent()
            }
            Some(Link::Own | Link::Shared(_)) | None => None,
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

    fn try_recv_into(
        &mut self,
        from: Rank,
        tag: Tag,
        visit: &mut dyn MessageSink,
    ) -> Result<RecvStatus, CommError> {
        let mut noting = Noting { visit, place: None, last: None };
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

    fn try_recv(&mut self, from: Rank, tag: Tag) -> Result<Option<(Header, Vec<u8>)>, CommError> {
        Ok(self.queued_message(from, tag)?.map(|QueuedMessage { header, data, .. }| (header, data)))
    }

    fn wait(&mut self, at_most: Duration) -> Result<(), CommError> {
        self.common.check()?;
        self.common.flush_shared()?;
        self.wait_for_news(at_most, self.policy);
        self.common.check()
    }

    fn sleep(&mut self, at_most: Duration) -> Result<(), CommError> {
        self.common.check()?;
        self.common.flush_shared()?;
        self.wait_for_news(at_most, WaitPolicy::ASLEEP);
        self.common.check()
    }

    fn waker(&self) -> Option<Waker> {
        let common = Arc::clone(&self.common);
        Some(Waker::new(move || common.nudge()))
    }

    fn abort(&mut self, reason: &str) {
        let _ = self.common.abort.set(reason.to_owned());
        self.common.fail(CommError::Failed { rank: self.common.rank, reason: reason.to_owned() });
        self.common.wake();
    }

    fn shares_memory(&self) -> bool {
        true
    }

    fn shares_memory_with(&self, rank: Rank) -> bool {
        matches!(self.common.links.get(rank.index()), Some(Link::Shared(_)))
    }

    fn alloc_shared(&mut self, bytes: usize) -> Result<Option<SharedBuffer>, CommError> {
        let has_neighbours = self.common.shared().next().is_some();
        has_neighbours.then(|| self.shared_buffer(bytes)).transpose()
    }

    fn locate(&self, bytes: &[u8]) -> Option<Loan> {
        Loan::of(&self.sites, &[bytes])
    }

    fn open(&mut self, loan: &Loan) -> Result<Option<Window>, CommError> {
        self.windows.open(loan).map(Some)
    }

    fn take_staging(&mut self, bytes: usize) -> Result<Option<SharedBuffer>, CommError> {
        match self.stages.iter().position(|stage| stage.len() >= bytes) {
            Some(at) => Ok(Some(self.stages.swap_remove(at))),
            None => self.alloc_shared(bytes),
        }
    }

    fn return_staging(&mut self, stage: SharedBuffer) {
        self.stages.push(stage);
    }

    fn lend(&mut self, to: Rank, header: &Header, bytes: &[&[u8]]) -> Result<bool, CommError> {
        let loan = self.shares_memory_with(to).then(|| Loan::of(&self.sites, bytes)).flatten();
        let Some(loan) = loan else { return Ok(false) };
        let mut data = std::mem::take(&mut self.loan);
        data.clear();
        loan.encode(&mut data);
        data.push(LOAN);
        let sent = self.send(to, header, &[&data]);
        self.loan = data;
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
                    Lent::InPlace(self.windows.open(&loan)?)
                }
                None => Lent::Copied(data),
            },
            _ => Lent::Copied(data),
        };
        Ok(Some((header, lent)))
    }
}

impl Drop for ProcessTransport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort("its thread panicked");
        }
        self.common.leaving.store(true, Ordering::Release);
        self.common.wake();
        if let Some(attendant) = self.service_thread.take() {
            let _ = attendant.join();
        }
        if let Some(rendezvous) = self.rendezvous.take() {
            let _ = rendezvous.linger(self.heartbeat_timeout);
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

    /// Rejects a send to a rank that has left.
    fn check_presence(&self, to: Rank, link: &Link) -> Result<(), CommError> {
        let departed = match link {
            Link::Own => false,
            Link::Shared(link) => link.bell().departed(),
            Link::Sockets(connections) => {
                connections.iter().any(|connection| connection.ended.load(Ordering::Acquire))
            }
        };
        if departed {
            return Err(CommError::PeerClosed { rank: self.rank, peer: to });
        }
        Ok(())
    }

    fn note(&self, way: Direction, peer: Rank, header: &Header, bytes: usize) {
        lock(&self.recorder).record(way, peer, header, bytes);
    }

    /// Records a failure and wakes the waiting thread; the first failure counts.
    fn fail(&self, cause: CommError) {
        let _ = self.failure.set(cause);
        self.bell.ring();
        let _ = rustix::io::write(&self.alarm, &1u64.to_ne_bytes());
    }

    /// Wakes the waiting thread.
    fn nudge(&self) {
        self.bell.ring();
        // The doorbell count is raised before this load, and the sleeper sets `polling` before it
        // reads the doorbell: one of the two sees the other.
        if self.polling.load(Ordering::SeqCst) {
            let _ = rustix::io::write(&self.nudge, &1u64.to_ne_bytes());
        }
    }

    /// Wakes the service thread.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn shared(&self) -> impl Iterator<Item = &SharedMemory> {
        self.links.iter().filter_map(|link| match link {
            Link::Shared(link) => Some(link),
            Link::Own | Link::Sockets(_) => None,
        })
    }

    /// Sends more of the backlog of shared-memory links.
    fn flush_shared(&self) -> Result<(), CommError> {
        if self.behind.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        for link in self.shared().filter(|link| link.has_backlog()) {
            self.account(link.flush()?);
        }
        Ok(())
    }

    /// Updates the count of links with a backlog. The count may lag, but never stays wrong.
    fn account(&self, change: Change) {
        if change.fell_behind {
            self.behind.fetch_add(1, Ordering::AcqRel);
        }
        if change.caught_up {
            self.behind.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Locks a mutex, ignoring poison: no panic can happen in the middle of an update here, so the data
/// stays consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
