//! Ranks that are processes: neighbours share memory, others speak TCP.
//!
//! A transport has two threads. The one that calls it moves the data: what is sent goes straight from
//! its buffers, what arrives is shown to it as it comes. The other, the attendant, writes what had to
//! be kept because it did not fit, and keeps the connection to the hub alive while the first
//! computes.

mod attendant;
mod connect;
mod connection;
mod link;
mod stream;
mod waiting;

pub use connect::{ProcessOptions, Wires, connect};

use crate::error::CommError;
use crate::inflow::{Inflow, Trouble};
use crate::mailbox::{Mailbox, Parcel};
use crate::recorder::{FlightRecorder, Way};
use crate::rendezvous::Hub;
use crate::shm::inbox::{Bell, Inbox};
use crate::shm::window::{Loan, SharedBuffer, Site, Window, Windows};
use crate::transport::{Header, Lending, Lent, Piece, Tag, Taken, Transport, Visitor, Waker};
use link::{Change, Link, Sending, SharedMemory};
use paceline_plan::ids::Rank;
use rustix::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use stream::{Backlog, Stream};
use waiting::{Interest, Manners};

/// The end of one rank that is a process.
///
/// Dropping it delivers what was sent and tells the others that this rank has left; dropping it
/// while its thread panics tells them that it has failed. Rank 0, if the hub runs in it, then stays
/// for a while until the others have left too.
#[derive(Debug)]
pub struct ProcessTransport {
    common: Arc<Common>,
    inbox: Inbox,
    /// By rank: what is arriving.
    arrivals: Vec<Arrivals>,
    interest: Interest,
    manners: Manners,
    /// How often the bell had rung at the end of the last wait.
    seen: u32,
    /// Whether a message was put aside since the last wait. Who asked for it before it was found would
    /// wait for nothing: the wires have no news of it any more.
    aside: bool,
    /// The shared buffers of this rank.
    sites: Vec<Arc<Site>>,
    /// Those of its neighbours.
    windows: Windows,
    /// Shared buffers that nobody works in at the moment.
    stages: Vec<SharedBuffer>,
    attendant: Option<JoinHandle<()>>,
    hub: Option<Hub>,
    detection: Duration,
}

/// What comes from one rank.
#[derive(Debug)]
struct Arrivals {
    mail: Mailbox,
    /// One for each stream: the ring, or the connections.
    inflows: Vec<(Inflow, Backlog)>,
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

/// What the two threads of a rank have in common.
#[derive(Debug)]
struct Common {
    rank: Rank,
    /// By rank.
    links: Vec<Link>,
    bell: Bell,
    failure: OnceLock<CommError>,
    /// Why this rank gives up, if it does.
    abort: OnceLock<String>,
    leaving: AtomicBool,
    /// An eventfd that the attendant watches.
    wake: OwnedFd,
    /// An eventfd that is readable from the first failure on.
    alarm: OwnedFd,
    /// An eventfd that ends a sleep at the sockets.
    nudge: OwnedFd,
    /// Whether the transport sleeps there.
    polling: AtomicBool,
    /// Whether the attendant is to ring when something comes through a socket.
    listening: AtomicBool,
    /// How many links through shared memory have something that did not fit.
    behind: AtomicUsize,
    recorder: Mutex<FlightRecorder>,
}

/// The last byte of a message that lends says whether it tells where to look or is a copy.
const LOAN: u8 = 1;
const COPY: u8 = 0;

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

    /// Looks at what has come from a rank on a channel.
    fn look<R>(
        &mut self,
        from: Rank,
        channel: u32,
        look: impl FnOnce(&mut Incoming<'_>) -> Result<Option<R>, Trouble>,
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
                // Read before the ring: whatever the sender sent before it left is there by then.
                let departed = link.bell().departed();
                let before = inbox.taken(from.0);
                let (inflow, _) = &mut inflows[0];
                let outcome =
                    look(&mut Incoming { mail, stream: Origin::Ring(inflow, inbox, from.0) });
                if inbox.taken(from.0) != before && inbox.take_wish(from.0) {
                    link.bell().knock();
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
            Ok(None) if departed => Err(CommError::Departed { rank: common.rank, peer: from }),
            Ok(found) => Ok(found),
            Err(Trouble::Comm(error)) => Err(error),
            Err(Trouble::Wire(error)) => {
                // Nothing that follows can be read either: the world cannot go on.
                let reason = format!("rank {} cannot read it: {error}", common.rank);
                let cause = CommError::Failed { rank: from, reason };
                common.fail(cause.clone());
                common.wake();
                Err(cause)
            }
        }
    }

    /// The next message of a channel, once all of it is there.
    fn parcel(&mut self, from: Rank, tag: Tag) -> Result<Option<Parcel>, CommError> {
        let channel = tag.channel();
        let parcel = self.look(from, channel, |incoming| incoming.parcel(channel))?;
        match &parcel {
            Some(Parcel { header, total, .. }) => {
                self.interest.arrived(from);
                self.common.note(Way::Received, from, header, *total);
            }
            None => self.missing(from, tag),
        }
        Ok(parcel)
    }

    fn missing(&mut self, from: Rank, tag: Tag) {
        self.interest.expect(from);
        lock(&self.common.recorder).awaiting(from, tag);
    }

    /// Sends what the wire takes; how much has gone.
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
            self.common.note(Way::Sent, to, header, total);
        }
        match now {
            Some(now) if now == total => self.interest.gone(to),
            _ => self.interest.blocked(to),
        }
        Ok(now)
    }

    /// Sends, keeping a copy of what does not fit.
    fn send_all(&mut self, to: Rank, message: Sending<'_>) -> Result<(), CommError> {
        let Self { common, arrivals, .. } = self;
        match common.link(to)? {
            Link::Own => {
                let data = message.data.concat();
                let (header, total) = (*message.header, data.len());
                arrivals[to.index()].mail.push(Parcel { header, total, shown: 0, data });
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

/// Notes which message has come to its end.
struct Noting<'v> {
    visit: &'v mut dyn Visitor,
    /// What was last asked to be put in place: the message, its length, and from which byte on.
    place: Option<(Header, usize, usize)>,
    last: Option<(Header, usize)>,
}

impl Visitor for Noting<'_> {
    fn show(&mut self, header: &Header, piece: Piece<'_>) -> Result<(), CommError> {
        if piece.at + piece.bytes.len() == piece.total {
            self.last = Some((*header, piece.total));
        }
        self.visit.show(header, piece)
    }

    fn place(
        &mut self,
        header: &Header,
        total: usize,
        at: usize,
    ) -> Result<Option<&mut [u8]>, CommError> {
        self.place = Some((*header, total, at));
        self.visit.place(header, total, at)
    }

    fn placed(&mut self, bytes: usize) {
        if let Some((header, total, at)) = self.place
            && at + bytes == total
        {
            self.last = Some((header, total));
        }
        self.visit.placed(bytes);
    }
}

/// What has come from one rank and can be looked at.
struct Incoming<'i> {
    mail: &'i mut Mailbox,
    stream: Origin<'i>,
}

enum Origin<'i> {
    Nothing,
    Ring(&'i mut Inflow, &'i mut Inbox, u32),
    Socket(&'i mut Inflow, Stream<'i>),
}

impl Incoming<'_> {
    fn take(&mut self, channel: u32, visit: &mut dyn Visitor) -> Result<Taken, Trouble> {
        match &mut self.stream {
            Origin::Nothing => Ok(self.mail.show(channel, visit)?),
            Origin::Ring(inflow, inbox, sender) => {
                inflow.take(&mut inbox.ring(*sender), self.mail, channel, visit)
            }
            Origin::Socket(inflow, stream) => inflow.take(stream, self.mail, channel, visit),
        }
    }

    fn parcel(&mut self, channel: u32) -> Result<Option<Parcel>, Trouble> {
        match &mut self.stream {
            Origin::Nothing => Ok(self.mail.pop(channel)),
            Origin::Ring(inflow, inbox, sender) => {
                inflow.parcel(&mut inbox.ring(*sender), self.mail, channel)
            }
            Origin::Socket(inflow, stream) => inflow.parcel(stream, self.mail, channel),
        }
    }

    /// Whether the peer has said that it has taken so many messages that went in place.
    fn hear(&mut self, messages: u64) -> Result<bool, Trouble> {
        match &mut self.stream {
            Origin::Nothing | Origin::Ring(..) => Ok(true),
            Origin::Socket(inflow, stream) => inflow.hear(stream, self.mail, messages),
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
        self.common.note(Way::Sent, to, header, total);
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

    fn try_send_in_place(
        &mut self,
        to: Rank,
        header: &Header,
        data: &[&[u8]],
        gone: Option<usize>,
    ) -> Result<Option<usize>, CommError> {
        self.send_some(to, Sending { header, data, gone, in_place: true })
    }

    fn went_in_place(&self, to: Rank, tag: Tag) -> Option<u64> {
        match self.common.links.get(to.index()) {
            Some(Link::Sockets(connections)) => {
                connections[tag.channel() as usize % connections.len()].lent()
            }
            Some(Link::Own | Link::Shared(_)) | None => None,
        }
    }

    fn tell_taken(&mut self) -> Result<(), CommError> {
        let Self { common, arrivals, .. } = self;
        common.check()?;
        for (link, arrivals) in common.links.iter().zip(arrivals) {
            let Link::Sockets(connections) = link else { continue };
            for (connection, (inflow, _)) in connections.iter().zip(&mut arrivals.inflows) {
                if let Some(messages) = inflow.untold()
                    && connection.tell_taken(messages)
                {
                    common.wake();
                }
            }
        }
        Ok(())
    }

    fn is_taken(&mut self, by: Rank, tag: Tag, receipt: u64) -> Result<bool, CommError> {
        let heard = |incoming: &mut Incoming<'_>| Ok(incoming.hear(receipt)?.then_some(()));
        let taken = self.look(by, tag.channel(), heard)?.is_some();
        match taken {
            true => self.interest.arrived(by),
            false => self.missing(by, tag),
        }
        Ok(taken)
    }

    fn try_take(
        &mut self,
        from: Rank,
        tag: Tag,
        visit: &mut dyn Visitor,
    ) -> Result<Taken, CommError> {
        let mut noting = Noting { visit, place: None, last: None };
        let channel = tag.channel();
        let taken = self.look(from, channel, |incoming| {
            let taken = incoming.take(channel, &mut noting)?;
            Ok(Some(taken).filter(|taken| *taken != Taken::Nothing))
        })?;
        match (taken, noting.last) {
            (Some(Taken::Whole), Some((header, total))) => {
                self.interest.arrived(from);
                self.common.note(Way::Received, from, &header, total);
            }
            _ => self.missing(from, tag),
        }
        Ok(taken.unwrap_or(Taken::Nothing))
    }

    fn try_recv(&mut self, from: Rank, tag: Tag) -> Result<Option<(Header, Vec<u8>)>, CommError> {
        Ok(self.parcel(from, tag)?.map(|Parcel { header, data, .. }| (header, data)))
    }

    fn wait(&mut self, at_most: Duration) -> Result<(), CommError> {
        self.common.check()?;
        self.common.flush_shared()?;
        self.wait_for_news(at_most, self.manners);
        self.common.check()
    }

    fn sleep(&mut self, at_most: Duration) -> Result<(), CommError> {
        self.common.check()?;
        self.common.flush_shared()?;
        self.wait_for_news(at_most, Manners::ASLEEP);
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

    fn is_neighbour(&self, rank: Rank) -> bool {
        matches!(self.common.links.get(rank.index()), Some(Link::Shared(_)))
    }

    fn neighbourly_memory(&mut self, bytes: usize) -> Result<Option<SharedBuffer>, CommError> {
        let has_neighbours = self.common.shared().next().is_some();
        has_neighbours.then(|| self.shared_buffer(bytes)).transpose()
    }

    fn locate(&self, bytes: &[u8]) -> Option<Loan> {
        Loan::of(&self.sites, &[bytes])
    }

    fn open(&mut self, loan: &Loan) -> Result<Option<Window>, CommError> {
        self.windows.open(loan).map(Some)
    }

    fn take_stage(&mut self, bytes: usize) -> Result<Option<SharedBuffer>, CommError> {
        match self.stages.iter().position(|stage| stage.len() >= bytes) {
            Some(at) => Ok(Some(self.stages.swap_remove(at))),
            None => self.neighbourly_memory(bytes),
        }
    }

    fn give_stage_back(&mut self, stage: SharedBuffer) {
        self.stages.push(stage);
    }

    fn lend(
        &mut self,
        to: Rank,
        header: &Header,
        bytes: &[&[u8]],
    ) -> Result<Option<Lending>, CommError> {
        let loan = self.is_neighbour(to).then(|| Loan::of(&self.sites, bytes)).flatten();
        match loan {
            Some(loan) => {
                let mut data = Vec::with_capacity(128);
                loan.encode(&mut data);
                data.push(LOAN);
                self.send(to, header, &[&data])?;
                Ok(Some(Lending::InPlace))
            }
            None => {
                let data: Vec<&[u8]> = bytes.iter().copied().chain([&[COPY][..]]).collect();
                self.send(to, header, &data)?;
                Ok(Some(Lending::Copied))
            }
        }
    }

    fn try_borrow(&mut self, from: Rank, tag: Tag) -> Result<Option<(Header, Lent)>, CommError> {
        let Some(Parcel { header, mut data, .. }) = self.parcel(from, tag)? else {
            return Ok(None);
        };
        // What is neither belongs to another operation, as its header shows.
        let lent = match data.pop() {
            Some(LOAN) => match Loan::decode(&data) {
                Some(loan) => Lent::InPlace(self.windows.open(&loan)?),
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

    /// Refuses to send to a rank that has left.
    fn check_presence(&self, to: Rank, link: &Link) -> Result<(), CommError> {
        let departed = match link {
            Link::Own => false,
            Link::Shared(link) => link.bell().departed(),
            Link::Sockets(connections) => {
                connections.iter().any(|connection| connection.ended.load(Ordering::Acquire))
            }
        };
        if departed {
            return Err(CommError::Departed { rank: self.rank, peer: to });
        }
        Ok(())
    }

    fn note(&self, way: Way, peer: Rank, header: &Header, bytes: usize) {
        lock(&self.recorder).record(way, peer, header, bytes);
    }

    /// The first failure is the one that counts.
    fn fail(&self, cause: CommError) {
        let _ = self.failure.set(cause);
        self.bell.ring();
        let _ = rustix::io::write(&self.alarm, &1u64.to_ne_bytes());
    }

    /// Makes the thread that waits look around.
    fn nudge(&self) {
        self.bell.ring();
        // The count of the bell is up before this look, as the sleeper's note is before its look at
        // the bell: one of the two sees the other.
        if self.polling.load(Ordering::SeqCst) {
            let _ = rustix::io::write(&self.nudge, &1u64.to_ne_bytes());
        }
    }

    /// Makes the attendant look around.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn shared(&self) -> impl Iterator<Item = &SharedMemory> {
        self.links.iter().filter_map(|link| match link {
            Link::Shared(link) => Some(link),
            Link::Own | Link::Sockets(_) => None,
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
    fn account(&self, change: Change) {
        if change.fell_behind {
            self.behind.fetch_add(1, Ordering::AcqRel);
        }
        if change.caught_up {
            self.behind.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// A lock whose holder panicked still guards consistent data: no panic can happen in the middle of
/// an update here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
