//! Wait policy of a rank: spin, then yield, then block.
//!
//! If every rank of the host has dedicated cores, spinning is fastest and costs the others nothing.
//! Ranks that train together reach an exchange some milliseconds apart. A rank that finds its peer
//! blocked there pays for the wake-up: some tens of microseconds on a virtual machine, more than
//! the exchange. After spinning, a rank blocks at once. On a core shared with an unrelated process,
//! a yield would cost a whole time slice, while a woken thread is scheduled first. With more ranks
//! than cores, the awaited rank most likely needs a core, so a waiting rank yields for a while
//! before it blocks.

use super::link::Link;
use super::{Common, ProcessTransport};
use crate::rendezvous::handshake::timespec;
use paceline_plan::ids::Rank;
use rustix::event::{PollFd, PollFlags, poll};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// Maximum time to spin on sockets: each poll is a system call, and the kernel has packets to
/// process meanwhile.
const AT_SOCKETS: Duration = Duration::from_micros(20);

/// Durations of the phases before a rank blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitPolicy {
    /// Time to spin.
    spin: Duration,
    /// Time to yield the core.
    yield_for: Duration,
}

impl WaitPolicy {
    /// Blocks at once: another thread needs the core.
    pub(super) const ASLEEP: Self = Self { spin: Duration::ZERO, yield_for: Duration::ZERO };

    /// Policy for `threads` threads of one host's ranks on `cores` cores.
    pub(super) fn among(threads: usize, cores: usize) -> Self {
        if threads <= cores {
            Self { spin: Duration::from_millis(5), yield_for: Duration::ZERO }
        } else {
            Self { spin: Duration::ZERO, yield_for: Duration::from_micros(200) }
        }
    }
}

/// Unfulfilled requests since the last wait.
#[derive(Debug, Default)]
pub(super) struct Interest {
    /// Ranks from which data is missing.
    from: Vec<Rank>,
    /// Ranks to which a send is blocked.
    to: Vec<Rank>,
}

impl Interest {
    pub(super) fn expect(&mut self, from: Rank) {
        note(&mut self.from, from);
    }

    pub(super) fn arrived(&mut self, from: Rank) {
        self.from.retain(|rank| *rank != from);
    }

    pub(super) fn blocked(&mut self, to: Rank) {
        note(&mut self.to, to);
    }

    pub(super) fn gone(&mut self, to: Rank) {
        self.to.retain(|rank| *rank != to);
    }

    fn clear(&mut self) {
        self.from.clear();
        self.to.clear();
    }
}

fn note(ranks: &mut Vec<Rank>, rank: Rank) {
    if !ranks.contains(&rank) {
        ranks.push(rank);
    }
}

impl ProcessTransport {
    /// Waits until there may be something to do, at most `at_most`.
    pub(super) fn wait_for_news(&mut self, at_most: Duration, policy: WaitPolicy) {
        self.wait_as_asked(at_most, policy);
        // A waiting caller polls again; requests no longer polled must not keep a rank awake.
        self.interest.clear();
    }

    fn wait_as_asked(&mut self, at_most: Duration, policy: WaitPolicy) {
        let seen = std::mem::replace(&mut self.seen, self.common.bell.count());
        if std::mem::take(&mut self.aside) || seen != self.seen || self.memory_has_news() {
            return;
        }
        let (by_memory, by_socket) = self.ways();
        let WaitPolicy { spin: mut watch, yield_for: give_way } = policy;
        if by_socket {
            watch = watch.min(AT_SOCKETS);
        }
        let until = (watch + give_way).min(at_most);
        // Data that arrives soon mostly arrives before the clock could be read.
        if by_memory && !watch.is_zero() && self.spin_once() {
            return;
        }
        let began = Instant::now();
        loop {
            if self.spin_once() {
                return;
            }
            if by_socket && self.sockets_have_news(Duration::ZERO) {
                return;
            }
            let waited = began.elapsed();
            if waited >= until {
                break;
            }
            if waited >= watch {
                std::thread::yield_now();
            }
        }
        let left = at_most.saturating_sub(began.elapsed());
        if by_socket && !by_memory {
            self.sleep_at_sockets(left);
            return;
        }
        if by_socket {
            // The service thread polls the sockets and rings the doorbell.
            self.common.listening.store(true, Ordering::Release);
            self.common.wake();
        }
        self.common.bell.sleep(self.seen, left, || self.memory_has_news());
        self.common.listening.store(false, Ordering::Release);
    }

    /// Polls shared memory for some tens of nanoseconds; returns true if there is news.
    fn spin_once(&self) -> bool {
        for _ in 0..32 {
            if self.memory_has_news() || self.common.bell.count() != self.seen {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    /// Returns two flags: it waits for ranks by shared memory, and for ranks by sockets.
    fn ways(&self) -> (bool, bool) {
        let by_socket =
            |rank: &Rank| matches!(self.common.links.get(rank.index()), Some(Link::Sockets(_)));
        let Interest { from, to } = &self.interest;
        let sockets = from.iter().chain(to).filter(|rank| by_socket(rank)).count();
        (sockets < from.len() + to.len(), sockets > 0)
    }

    fn memory_has_news(&self) -> bool {
        let Interest { from, to } = &self.interest;
        from.iter().any(|rank| self.inbox.has_news(rank.0))
            || to.iter().any(|rank| match self.common.links.get(rank.index()) {
                Some(Link::Shared(link)) => link.has_room(),
                _ => false,
            })
    }

    /// Blocks until there is news on the sockets or a nudge, at most `at_most`.
    fn sleep_at_sockets(&self, at_most: Duration) {
        let Common { polling, nudge, bell, .. } = &*self.common;
        polling.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if bell.count() == self.seen {
            self.sockets_have_news(at_most);
        }
        polling.store(false, Ordering::SeqCst);
        let _ = rustix::io::read(nudge, &mut [0u8; 8]);
    }

    /// Polls the sockets for up to `at_most`.
    fn sockets_have_news(&self, at_most: Duration) -> bool {
        let Common { links, alarm, nudge, .. } = &*self.common;
        let mut watched =
            vec![PollFd::new(alarm, PollFlags::IN), PollFd::new(nudge, PollFlags::IN)];
        let Interest { from, to } = &self.interest;
        let wanted = from.iter().map(|rank| (rank, PollFlags::IN));
        for (rank, flags) in wanted.chain(to.iter().map(|rank| (rank, PollFlags::OUT))) {
            let Some(Link::Sockets(connections)) = links.get(rank.index()) else { continue };
            let open = connections.iter().filter(|connection| !connection.is_broken());
            watched.extend(open.map(|connection| PollFd::new(&connection.stream, flags)));
        }
        poll(&mut watched, Some(&timespec(at_most))).is_ok_and(|ready| ready > 0)
    }
}
