//! The second thread of a rank: signs of life, and what did not fit.

use super::Common;
use super::connection::Connection;
use super::link::Link;
use crate::error::CommError;
use crate::rendezvous::control::{Control, Hangup, Line, Member};
use crate::rendezvous::door::timespec;
use paceline_plan::ids::Rank;
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The state of the thread.
pub(super) struct Attendant {
    pub(super) common: Arc<Common>,
    pub(super) line: Line,
    pub(super) members: Vec<Member>,
    /// The rank in whose process the hub runs.
    pub(super) hub: Option<Rank>,
    pub(super) detection: Duration,
    /// Whether the hub knows of the failure, because it said so.
    pub(super) told: bool,
}

/// The state of the line to the hub.
struct Hearing {
    last: Instant,
    /// The hub has ended in peace; nothing more is expected of it.
    over: bool,
}

impl Attendant {
    pub(super) fn run(mut self) {
        let period = (self.detection / 5).min(Duration::from_secs(1));
        let mut hearing = Hearing { last: Instant::now(), over: false };
        let (mut beat, mut before) = (Instant::now(), Instant::now());
        while !self.common.leaving.load(Ordering::Acquire) && self.common.failure.get().is_none() {
            // Whoever makes room in shared memory wakes the other thread, which may be computing.
            let behind = self.common.behind.load(Ordering::Acquire) > 0;
            let nap = if behind { Duration::from_micros(500) } else { period };
            self.sleep(nap, &hearing);
            let now = Instant::now();
            // If this process itself was stopped for a while, silence is nobody else's fault.
            if now - before > self.detection / 2 {
                hearing.last = now;
            }
            before = now;
            self.move_data();
            self.hear(&mut hearing, now);
            if now >= beat {
                beat = now + period;
                let doing = self.common.recorder.try_lock().map(|recorder| recorder.doing());
                if let (Ok(doing), false) = (doing, hearing.over) {
                    let _ = self.line.say(&Control::Heartbeat { doing });
                }
            }
            self.look_for_broken_connections(now);
        }
        self.leave();
    }

    fn sleep(&self, at_most: Duration, hearing: &Hearing) {
        let mut watched = vec![PollFd::new(&self.common.wake, PollFlags::IN)];
        if !hearing.over {
            let out = if self.line.is_behind() { PollFlags::OUT } else { PollFlags::empty() };
            watched.push(PollFd::new(self.line.stream(), PollFlags::IN | out));
        }
        let others = watched.len();
        let listening = self.common.listening.load(Ordering::Acquire);
        for (_, connection) in connections(&self.common) {
            let mut wanted = PollFlags::empty();
            if listening && !connection.is_broken() && !connection.ended.load(Ordering::Acquire) {
                wanted |= PollFlags::IN;
            }
            if connection.is_behind() {
                wanted |= PollFlags::OUT;
            }
            if !wanted.is_empty() {
                watched.push(PollFd::new(&connection.stream, wanted));
            }
        }
        let _ = poll(&mut watched, Some(&timespec(at_most)));
        let arrived = |fd: &PollFd<'_>| {
            fd.revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR)
        };
        if listening && watched[others..].iter().any(arrived) {
            self.common.listening.store(false, Ordering::Release);
            self.common.bell.ring();
        }
        let _ = rustix::io::read(&self.common.wake, &mut [0u8; 8]);
    }

    /// Writes whatever can be without waiting.
    fn move_data(&mut self) {
        if let Err(cause) = self.common.flush_shared() {
            self.common.fail(cause);
        }
        connections(&self.common).for_each(|(_, connection)| connection.flush());
    }

    fn hear(&mut self, hearing: &mut Hearing, now: Instant) {
        let _ = self.line.flush();
        while !hearing.over {
            match self.line.hear() {
                Ok(None) => break,
                Ok(Some(Control::Over { cause })) => {
                    self.told = true;
                    return self.common.fail(cause);
                }
                Ok(Some(Control::Goodbye)) => hearing.over = true,
                Ok(Some(_)) => hearing.last = now,
                Err(Hangup(how)) => {
                    let cause = self.hub_lost(&format!("died ({how})"), now - hearing.last);
                    return self.common.fail(cause);
                }
            }
        }
        let silent = now - hearing.last;
        if !hearing.over && silent > self.detection {
            self.common.fail(self.hub_lost("stopped answering", silent));
        }
    }

    fn hub_lost(&self, how: &str, silent: Duration) -> CommError {
        match self.hub {
            Some(rank) => self.lost(rank, how.to_owned(), silent),
            None => CommError::Job { problem: format!("the launcher {how}") },
        }
    }

    fn lost(&self, rank: Rank, how: String, silent: Duration) -> CommError {
        let host = self.members.get(rank.index()).map(|member| member.host.clone());
        CommError::Lost { rank, host: host.unwrap_or_default(), how, doing: String::new(), silent }
    }

    /// A connection that breaks is the hub's to explain, which knows whether the rank is dead; only
    /// if it has no explanation in time, this rank finds its own.
    fn look_for_broken_connections(&self, now: Instant) {
        for (peer, connection) in connections(&self.common) {
            if let Some(since) = connection.broken()
                && !connection.ended.load(Ordering::Acquire)
                && now.saturating_duration_since(since) > self.detection
            {
                let how = format!("is cut off from rank {}", self.common.rank);
                self.common.fail(self.lost(peer, how, now - since));
            }
        }
    }

    /// Delivers what is left, says goodbye, or why not.
    fn leave(mut self) {
        let end = Instant::now() + self.detection;
        let own_failure = self.common.abort.get().cloned();
        if self.common.failure.get().is_none() {
            connections(&self.common).for_each(|(_, connection)| connection.say_goodbye());
            while self.is_behind() && self.common.failure.get().is_none() && Instant::now() < end {
                let hearing = Hearing { last: Instant::now(), over: true };
                self.sleep(Duration::from_millis(1), &hearing);
                self.move_data();
            }
        }
        // After a failure nobody is told that this rank has left: that would only hide the cause.
        if self.common.failure.get().is_none() {
            self.common.bell.depart();
            self.common.shared().for_each(|link| link.bell().ring());
            self.part();
        }
        let _ = match (own_failure, self.common.failure.get().filter(|_| !self.told)) {
            (Some(reason), _) => self.line.say(&Control::Abort { reason }),
            (None, Some(cause)) => self.line.say(&Control::Over { cause: cause.clone() }),
            (None, None) => self.line.say(&Control::Goodbye),
        };
        while self.line.is_behind() && Instant::now() < end {
            if self.line.hear_until(Instant::now() + Duration::from_millis(1)).is_err() {
                break;
            }
        }
        // Once this thread is gone the failure stays what it is, and nobody waits for more.
        self.common.bell.ring();
    }

    /// Ends the connections. A socket that is closed with something unread in it takes back what it
    /// sent and the peer has not read, so everything is read first, for as long as peers stay that
    /// may be about to leave too.
    fn part(&self) {
        let open = |connection: &Connection| !connection.is_broken();
        for (_, connection) in connections(&self.common) {
            let _ = connection.stream.shutdown(Shutdown::Write);
        }
        let end = Instant::now() + self.detection.min(Duration::from_secs(1));
        let mut rest = vec![0; 64 << 10];
        while Instant::now() < end {
            let mut watched = Vec::new();
            for (_, connection) in connections(&self.common).filter(|(_, c)| open(c)) {
                match (&connection.stream).read(&mut rest) {
                    Ok(0) => connection.mark_broken(),
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(_) => connection.mark_broken(),
                }
                watched.push(PollFd::new(&connection.stream, PollFlags::IN));
            }
            if watched.is_empty() {
                break;
            }
            let left = end.saturating_duration_since(Instant::now());
            let _ = poll(&mut watched, Some(&timespec(left)));
        }
    }

    fn is_behind(&self) -> bool {
        self.common.behind.load(Ordering::Acquire) > 0
            || connections(&self.common).any(|(_, connection)| connection.is_behind())
    }
}

/// All connections, each with the rank at its other end.
fn connections(common: &Common) -> impl Iterator<Item = (Rank, &Connection)> {
    (0..).map(Rank).zip(&common.links).flat_map(|(peer, link)| {
        let connections = match link {
            Link::Sockets(connections) => connections.as_slice(),
            Link::Own | Link::Shared(_) => &[],
        };
        connections.iter().map(move |connection| (peer, connection))
    })
}
