//! How a rank waits: it watches what it asked for, then lets others have the core, then sleeps.
//!
//! Where every rank of the host has its cores to itself, watching is fastest and costs nobody anything.
//! Ranks that train together come to an exchange some milliseconds apart, and whoever finds a sleeper
//! there pays for waking it: some tens of microseconds on a virtual machine, more than the exchange.
//! After that it sleeps at once: on a core that it shares with a stranger,
//! giving its turn away would cost a whole slice of the scheduler's, while a sleeper is woken into
//! the first place. Where there are more ranks than cores, the one that is waited for most likely
//! needs a turn, so a rank that waits gives its own away for a while before it sleeps.

use super::link::Link;
use super::{Common, ProcessTransport};
use crate::rendezvous::door::timespec;
use paceline_plan::ids::Rank;
use rustix::event::{PollFd, PollFlags, poll};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// For how long a rank watches sockets at most: each look is a call of the system, which has packets to
/// carry meanwhile.
const AT_SOCKETS: Duration = Duration::from_micros(20);

/// For how long a rank does what before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manners {
    /// Watching.
    watch: Duration,
    /// Giving its turn away.
    give_way: Duration,
}

impl Manners {
    /// None of it: somebody else needs the core.
    pub(super) const ASLEEP: Self = Self { watch: Duration::ZERO, give_way: Duration::ZERO };

    /// What suits so many threads of one host's ranks on so many cores.
    pub(super) fn among(threads: usize, cores: usize) -> Self {
        if threads <= cores {
            Self { watch: Duration::from_millis(5), give_way: Duration::ZERO }
        } else {
            Self { watch: Duration::ZERO, give_way: Duration::from_micros(200) }
        }
    }
}

/// What a rank waits for: all that it asked for in vain since its last wait.
#[derive(Debug, Default)]
pub(super) struct Interest {
    /// Ranks from which something is missing.
    from: Vec<Rank>,
    /// Ranks to which something could not go.
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
    /// Waits until there may be something to do, or for so long.
    pub(super) fn wait_for_news(&mut self, at_most: Duration, manners: Manners) {
        self.wait_as_asked(at_most, manners);
        // Whoever waits asks again, and what nobody asks for any more must not keep a rank awake.
        self.interest.clear();
    }

    fn wait_as_asked(&mut self, at_most: Duration, manners: Manners) {
        let seen = std::mem::replace(&mut self.seen, self.common.bell.count());
        if std::mem::take(&mut self.aside) || seen != self.seen || self.memory_has_news() {
            return;
        }
        let (by_memory, by_socket) = self.ways();
        let Manners { mut watch, give_way } = manners;
        if by_socket {
            watch = watch.min(AT_SOCKETS);
        }
        let until = (watch + give_way).min(at_most);
        // Most of what comes soon comes before it would be known what time it is.
        if by_memory && !watch.is_zero() && self.watch() {
            return;
        }
        let began = Instant::now();
        loop {
            if self.watch() {
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
            // The second thread watches the sockets and rings.
            self.common.listening.store(true, Ordering::Release);
            self.common.wake();
        }
        self.common.bell.sleep(self.seen, left, || self.memory_has_news());
        self.common.listening.store(false, Ordering::Release);
    }

    /// Looks at memory for some tens of nanoseconds, whether there is something new.
    fn watch(&self) -> bool {
        for _ in 0..32 {
            if self.memory_has_news() || self.common.bell.count() != self.seen {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    /// Whether it waits for neighbours, and for ranks elsewhere.
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

    /// Sleeps until there is news at the sockets or somebody nudges, or for so long.
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

    /// Looks at the sockets, for so long.
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
