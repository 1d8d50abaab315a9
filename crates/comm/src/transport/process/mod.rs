//! Transport for ranks that are processes: shared memory within an shm domain, TCP otherwise.
//!
//! A transport has two threads. The calling thread moves the data: sends go directly from its
//! buffers, and arriving data is passed to it at once. The service thread writes queued data that
//! did not fit, and keeps the connection to the rendezvous server alive while the first computes.

mod connect;
mod connection;
mod incoming;
mod link;
#[cfg(test)]
mod relay_tests;
mod sealed_stream;
mod service_thread;
mod shared_memory;
mod stream;
mod wait_policy;
mod zero_copy;

pub(crate) use connect::online_cores;
pub use connect::{ProcessOptions, connect};
pub(crate) use incoming::Noting;

use crate::error::CommError;
use crate::mailbox::QueuedMessage;
use crate::recorder::{Direction, FlightRecorder};
use crate::rendezvous::RendezvousServer;
use crate::shared_memory::SharedMemory;
use crate::shm::inbox::{Doorbell, Inbox};
use crate::transport::{Header, MessageSink, RecvStatus, Tag, Transport, Wait, Waker, ZeroCopy};
use incoming::Arrivals;
use link::{Change, Link, RingLink, Sending};
use paceline_plan::ids::Rank;
use rustix::fd::OwnedFd;
use shared_memory::Sharing;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
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
    sharing: Sharing,
    /// True if the shm domain of this rank has others.
    shares_memory: bool,
    service_thread: Option<JoinHandle<()>>,
    rendezvous: Option<RendezvousServer>,
    heartbeat_timeout: Duration,
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

impl ProcessTransport {
    /// Fails if a rank has failed.
    pub(crate) fn check(&self) -> Result<(), CommError> {
        self.common.check()
    }

    /// Records a message that travels by other means.
    pub(crate) fn note(&self, way: Direction, peer: Rank, header: &Header, bytes: usize) {
        self.common.note(way, peer, header, bytes);
    }

    /// Records that this rank waits for a message that travels by other means.
    pub(crate) fn await_message(&self, from: Rank, tag: Tag) {
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
            Link::Outside => return Err(common.outside(to)),
            Link::Shared(link) => link.try_send(message)?,
            Link::Sockets(connections) => {
                let index = header.tag.channel() as usize % connections.len();
                let now = connections[index].try_send(message);
                // The end of a sealed message may still wait for the socket.
                if now == Some(total) && connections[index].has_sealed_backlog() {
                    common.wake();
                }
                now
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
            Link::Outside => return Err(common.outside(to)),
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

    fn try_recv_into(
        &mut self,
        from: Rank,
        tag: Tag,
        visit: &mut dyn MessageSink,
    ) -> Result<RecvStatus, CommError> {
        self.receive_into(from, tag, visit)
    }

    fn try_recv(
        &mut self,
        from: Rank,
        tag: Tag,
        read: &mut dyn FnMut(&Header, &[u8]),
    ) -> Result<bool, CommError> {
        let Some(message) = self.queued_message(from, tag)? else { return Ok(false) };
        read(&message.header, &message.data);
        self.arrivals[from.index()].mail.recycle(message.data);
        Ok(true)
    }

    fn wait(&mut self, how: Wait, at_most: Duration) -> Result<(), CommError> {
        self.common.check()?;
        self.common.flush_shared()?;
        let policy = match how {
            Wait::Spin => self.policy,
            Wait::Block => WaitPolicy::ASLEEP,
        };
        self.wait_for_news(at_most, policy);
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

    fn memory(&mut self) -> Option<&mut dyn SharedMemory> {
        if self.shares_memory { Some(self) } else { None }
    }

    fn zero_copy(&mut self) -> Option<&mut dyn ZeroCopy> {
        Some(self)
    }

    fn flight_record(&self) -> Option<FlightRecorder> {
        Some(lock(&self.common.recorder).clone())
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
            Link::Own | Link::Outside => false,
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

    /// Error of a message to a rank that is reached by other means.
    fn outside(&self, rank: Rank) -> CommError {
        let problem = format!("rank {} has no link of its own to rank {rank}", self.rank);
        CommError::Job { problem }
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

    /// Ends the job because of what this rank found; returns it.
    fn end(&self, cause: CommError) -> CommError {
        self.fail(cause.clone());
        self.wake();
        cause
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

    fn shared(&self) -> impl Iterator<Item = &RingLink> {
        self.links.iter().filter_map(|link| match link {
            Link::Shared(link) => Some(link),
            Link::Own | Link::Outside | Link::Sockets(_) => None,
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
