//! The second thread of a rank: sockets, signs of life, and what did not fit.

use super::link::{Connection, Link, Socket};
use super::{Common, lock};
use crate::error::CommError;
use crate::rendezvous::control::{Control, Hangup, Line, Member};
use crate::rendezvous::door::timespec;
use crate::wire::{Assembler, Incoming};
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
    pub(super) receivers: Vec<Receiver>,
    /// Whether the hub knows of the failure, because it said so.
    pub(super) told: bool,
}

/// The receiving half of one connection.
pub(super) struct Receiver {
    pub(super) peer: Rank,
    pub(super) index: usize,
    assembler: Assembler,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// The peer said goodbye.
    Ended,
    /// The connection broke, at this time.
    Broken(Instant),
}

impl Receiver {
    pub(super) fn new(peer: Rank, index: usize) -> Self {
        Self { peer, index, assembler: Assembler::default(), state: State::Open }
    }
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
        for receiver in self.receivers.iter() {
            let Some(connection) = connection(&self.common, receiver) else { continue };
            let mut wanted = PollFlags::empty();
            if receiver.state == State::Open {
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
        let _ = rustix::io::read(&self.common.wake, &mut [0u8; 8]);
    }

    /// Reads and writes whatever can be without waiting.
    fn move_data(&mut self) {
        if let Err(cause) = self.common.flush_shared() {
            self.common.fail(cause);
        }
        for receiver in &mut self.receivers {
            let Some(connection) = connection(&self.common, receiver) else { continue };
            for buffer in connection.flush().done {
                self.common.recycle(buffer);
            }
            if receiver.state == State::Open {
                receive(&self.common, connection, receiver);
            }
        }
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
        for receiver in &self.receivers {
            if let State::Broken(since) = receiver.state
                && now - since > self.detection
            {
                let how = format!("is cut off from rank {}", self.common.rank);
                self.common.fail(self.lost(receiver.peer, how, now - since));
            }
        }
    }

    /// Delivers what is left, says goodbye, or why not.
    fn leave(mut self) {
        let end = Instant::now() + self.detection;
        let own_failure = self.common.abort.get().cloned();
        if self.common.failure.get().is_none() {
            sockets(&self.common).for_each(Socket::say_goodbye);
            while self.is_behind() && self.common.failure.get().is_none() && Instant::now() < end {
                let hearing = Hearing { last: Instant::now(), over: true };
                self.sleep(Duration::from_millis(1), &hearing);
                self.move_data();
            }
        }
        // After a failure nobody is told that this rank has left: that would only hide the cause.
        if self.common.failure.get().is_none() {
            self.common.bell.depart();
            let connections = sockets(&self.common).flat_map(|socket| &socket.connections);
            connections.for_each(|connection| drop(connection.stream.shutdown(Shutdown::Write)));
            self.common.shared().for_each(|link| link.bell().ring());
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

    fn is_behind(&self) -> bool {
        self.common.behind.load(Ordering::Acquire) > 0
            || sockets(&self.common)
                .any(|socket| socket.connections.iter().any(Connection::is_behind))
    }
}

fn sockets(common: &Common) -> impl Iterator<Item = &Socket> {
    common.links.iter().filter_map(|link| match link {
        Link::Socket(socket) => Some(socket),
        Link::Own | Link::Shared(_) => None,
    })
}

fn connection<'c>(common: &'c Common, receiver: &Receiver) -> Option<&'c Connection> {
    match common.links.get(receiver.peer.index()) {
        Some(Link::Socket(socket)) => socket.connections.get(receiver.index),
        _ => None,
    }
}

/// Reads what one connection has, up to a bound that lets others have a turn.
fn receive(common: &Common, connection: &Connection, receiver: &mut Receiver) {
    const TURN: usize = 4 << 20;
    let Receiver { peer, assembler, state, .. } = receiver;
    let mut read = 0;
    while read < TURN {
        match (&connection.stream).read(assembler.space()) {
            Ok(0) => {
                *state = State::Broken(Instant::now());
                break;
            }
            Ok(n) => {
                read += n;
                match assembler.advance(n, &mut |bytes| common.spare_buffer(bytes)) {
                    Ok(None) => {}
                    Ok(Some(Incoming::Message(payload))) => {
                        let key = (*peer, payload.header.tag.channel());
                        lock(&common.mail).entry(key).or_default().push_back(payload);
                        common.bell.ring();
                    }
                    Ok(Some(Incoming::Goodbye)) => {
                        *state = State::Ended;
                        if let Some(Link::Socket(socket)) = common.links.get(peer.index()) {
                            socket.ended.fetch_add(1, Ordering::AcqRel);
                        }
                        common.bell.ring();
                        break;
                    }
                    Err(error) => {
                        let reason = format!("rank {} cannot read it: {error}", common.rank);
                        return common.fail(CommError::Failed { rank: *peer, reason });
                    }
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => {
                *state = State::Broken(Instant::now());
                break;
            }
        }
    }
}
