//! Service thread of a rank: heartbeats and deferred sends.

use super::Common;
use super::connection::Connection;
use super::link::Link;
use crate::error::CommError;
use crate::rendezvous::control::{Control, ControlConnection, Disconnected, Member};
use crate::rendezvous::handshake::timespec;
use crate::shared_memory::Few;
use paceline_plan::ids::Rank;
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// State of the service thread.
pub(super) struct ServiceThread {
    pub(super) common: Arc<Common>,
    pub(super) control: ControlConnection,
    pub(super) members: Vec<Member>,
    /// Rank whose process runs the rendezvous server.
    pub(super) rendezvous: Option<Rank>,
    pub(super) heartbeat_timeout: Duration,
    /// True if the rendezvous server knows of the failure, because it reported it.
    pub(super) server_knows: bool,
}

/// State of the control connection to the rendezvous server.
struct HeartbeatState {
    last: Instant,
    /// True if the rendezvous server has ended normally; nothing more is expected of it.
    over: bool,
}

impl ServiceThread {
    pub(super) fn run(mut self) {
        let period = (self.heartbeat_timeout / 5).min(Duration::from_secs(1));
        let mut heartbeat = HeartbeatState { last: Instant::now(), over: false };
        let (mut beat, mut before) = (Instant::now(), Instant::now());
        while !self.common.leaving.load(Ordering::Acquire) && self.common.failure.get().is_none() {
            // A peer that frees ring space wakes the calling thread, but that may be computing.
            let behind = self.common.behind.load(Ordering::Acquire) > 0;
            let nap = if behind { Duration::from_micros(500) } else { period };
            self.sleep(nap, &heartbeat);
            let now = Instant::now();
            // If this process was stopped for a while, the silence is not the server's fault.
            if now - before > self.heartbeat_timeout / 2 {
                heartbeat.last = now;
            }
            before = now;
            self.move_data();
            self.receive_control(&mut heartbeat, now);
            if now >= beat {
                beat = now + period;
                let doing = self.common.recorder.try_lock().map(|recorder| recorder.doing());
                if let (Ok(doing), false) = (doing, heartbeat.over) {
                    let _ = self.control.send(&Control::Heartbeat { doing });
                }
            }
            self.check_connections(now);
        }
        self.leave();
    }

    fn sleep(&self, at_most: Duration, heartbeat: &HeartbeatState) {
        let mut watched = Few::new();
        watched.push(PollFd::new(&self.common.wake, PollFlags::IN));
        if !heartbeat.over {
            let out = if self.control.has_backlog() { PollFlags::OUT } else { PollFlags::empty() };
            watched.push(PollFd::new(self.control.stream(), PollFlags::IN | out));
        }
        let others = watched.len();
        let listening = self.common.listening.load(Ordering::Acquire);
        for (_, connection) in connections(&self.common) {
            let mut wanted = PollFlags::empty();
            if listening && !connection.is_broken() && !connection.ended.load(Ordering::Acquire) {
                wanted |= PollFlags::IN;
            }
            if connection.has_backlog() {
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

    /// Writes as much as possible without blocking.
    fn move_data(&mut self) {
        if let Err(cause) = self.common.flush_shared() {
            self.common.fail(cause);
        }
        connections(&self.common).for_each(|(_, connection)| connection.flush());
    }

    fn receive_control(&mut self, heartbeat: &mut HeartbeatState, now: Instant) {
        let _ = self.control.flush();
        while !heartbeat.over {
            match self.control.try_recv() {
                Ok(None) => break,
                Ok(Some(Control::Over { cause })) => {
                    self.server_knows = true;
                    return self.common.fail(cause);
                }
                Ok(Some(Control::Goodbye)) => heartbeat.over = true,
                Ok(Some(_)) => heartbeat.last = now,
                Err(Disconnected::Altered) => {
                    let way = format!(
                        "control messages from the rendezvous server to rank {}",
                        self.common.rank
                    );
                    return self.common.fail(CommError::Altered { way });
                }
                Err(Disconnected::Peer(how)) => {
                    let cause =
                        self.rendezvous_lost(&format!("died ({how})"), now - heartbeat.last);
                    return self.common.fail(cause);
                }
            }
        }
        let silent = now - heartbeat.last;
        if !heartbeat.over && silent > self.heartbeat_timeout {
            self.common.fail(self.rendezvous_lost("stopped answering", silent));
        }
    }

    fn rendezvous_lost(&self, how: &str, silent: Duration) -> CommError {
        match self.rendezvous {
            Some(rank) => self.lost(rank, how.to_owned(), silent),
            None => CommError::Job { problem: format!("the launcher {how}") },
        }
    }

    fn lost(&self, rank: Rank, how: String, silent: Duration) -> CommError {
        let host = self.members.get(rank.index()).map(|member| member.host.clone());
        CommError::PeerLost {
            rank,
            host: host.unwrap_or_default(),
            how,
            doing: String::new(),
            silent,
        }
    }

    /// Checks for broken connections. The rendezvous server knows if the peer is dead and normally
    /// reports the cause. This rank reports its own only if none arrives within the heartbeat
    /// timeout.
    fn check_connections(&self, now: Instant) {
        for (peer, connection) in connections(&self.common) {
            if let Some(since) = connection.broken()
                && !connection.ended.load(Ordering::Acquire)
                && now.saturating_duration_since(since) > self.heartbeat_timeout
            {
                let how = format!("is cut off from rank {}", self.common.rank);
                self.common.fail(self.lost(peer, how, now - since));
            }
        }
    }

    /// Delivers the remaining data and says goodbye, or reports the failure.
    fn leave(mut self) {
        let end = Instant::now() + self.heartbeat_timeout;
        let own_failure = self.common.abort.get().cloned();
        if self.common.failure.get().is_none() {
            connections(&self.common).for_each(|(_, connection)| connection.say_goodbye());
            while self.has_backlog() && self.common.failure.get().is_none() && Instant::now() < end
            {
                let heartbeat = HeartbeatState { last: Instant::now(), over: true };
                self.sleep(Duration::from_millis(1), &heartbeat);
                self.move_data();
            }
        }
        // After a failure, telling peers that this rank has left would only hide the cause.
        if self.common.failure.get().is_none() {
            self.common.bell.depart();
            self.common.shared().for_each(|link| link.bell().ring());
            self.part();
        }
        let _ = match (own_failure, self.common.failure.get().filter(|_| !self.server_knows)) {
            (Some(reason), _) => self.control.send(&Control::Abort { reason }),
            (None, Some(cause)) => self.control.send(&Control::Over { cause: cause.clone() }),
            (None, None) => self.control.send(&Control::Goodbye),
        };
        while self.control.has_backlog() && Instant::now() < end {
            if self.control.recv_until(Instant::now() + Duration::from_millis(1)).is_err() {
                break;
            }
        }
        // Once this thread has ended the failure is final, and no thread waits for more.
        self.common.bell.ring();
    }

    /// Closes the connections. Closing a socket with unread data discards sent data that the peer
    /// has not read. So everything is read first, while peers remain that may be about to leave
    /// too.
    fn part(&self) {
        let open = |connection: &Connection| !connection.is_broken();
        for (_, connection) in connections(&self.common) {
            let _ = connection.stream.shutdown(Shutdown::Write);
        }
        let end = Instant::now() + self.heartbeat_timeout.min(Duration::from_secs(1));
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

    fn has_backlog(&self) -> bool {
        self.common.behind.load(Ordering::Acquire) > 0
            || connections(&self.common).any(|(_, connection)| connection.has_backlog())
    }
}

/// All connections, each with its peer's rank.
fn connections(common: &Common) -> impl Iterator<Item = (Rank, &Connection)> {
    (0..).map(Rank).zip(&common.links).flat_map(|(peer, link)| {
        let connections = match link {
            Link::Sockets(connections) => connections.as_slice(),
            Link::Own | Link::Outside | Link::Shared(_) => &[],
        };
        connections.iter().map(move |connection| (peer, connection))
    })
}
