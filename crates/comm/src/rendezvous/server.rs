//! Rendezvous server: admits the ranks of a job and detects lost ones.
//!
//! It runs on its own thread, in the launcher or in rank 0, and every rank keeps one connection to
//! it. A rank that dies closes that connection; a rank that is stopped or cut off sends no more
//! heartbeats. In both cases the server tells all ranks once, so that all survivors name the same
//! rank, the first. The ranks detect a lost rendezvous server in the same two ways.

use super::control::{Control, ControlConnection, Disconnected, Member};
use super::handshake::{AuthListener, timespec};
use crate::error::CommError;
use crate::secret::{Secret, nonce};
use crate::shared_memory::Few;
use paceline_plan::ids::Rank;
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Settings of a rendezvous server.
#[derive(Clone, Debug)]
pub struct RendezvousOptions {
    /// Address to listen on. Other addresses than loopback are the choice of the user.
    pub listen: SocketAddr,
    /// Secret shared by all ranks.
    pub secret: Secret,
    /// Number of ranks expected.
    pub world: u32,
    /// Rank whose process runs the rendezvous server; `None` in a launcher.
    pub in_rank: Option<Rank>,
    /// Time limit for all ranks to join and to connect to each other.
    pub join: Duration,
    /// Silence after which a rank is declared lost.
    pub heartbeat_timeout: Duration,
}

/// A running rendezvous server. Dropping it stops it.
#[derive(Debug)]
pub struct RendezvousServer {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), CommError>>>,
}

impl RendezvousServer {
    /// Starts to listen, and to serve on its own thread.
    pub fn start(options: RendezvousOptions) -> Result<Self, CommError> {
        let listener = AuthListener::open(options.listen, options.secret.clone(), options.world)?;
        let address = listener.address()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let serve = move || {
            let (lines, seats) = gather(listener, &options, &stopped)?;
            LivenessMonitor::new(&options, lines, seats).run(&stopped)
        };
        let thread =
            std::thread::Builder::new().name("rendezvous".to_owned()).spawn(serve).map_err(
                |error| problem(format!("cannot start the rendezvous server's thread: {error}")),
            )?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    /// Address it listens on; useful if the system chose the port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns true if the job has ended, so that [`join`](Self::join) would not wait.
    pub fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the end of the job: all ranks have left, or the first failure.
    pub fn join(mut self) -> Result<(), CommError> {
        self.end()
    }

    /// Gives the remaining ranks up to `at_most` to leave, then stops.
    pub(crate) fn linger(mut self, at_most: Duration) -> Result<(), CommError> {
        let end = Instant::now() + at_most;
        let running = |rendezvous: &Self| {
            rendezvous.thread.as_ref().is_some_and(|thread| !thread.is_finished())
        };
        while running(&self) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.stop.store(true, Ordering::Release);
        self.end()
    }

    fn end(&mut self) -> Result<(), CommError> {
        let crashed = |_| Err(problem("the rendezvous server's thread panicked".to_owned()));
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap_or_else(crashed))
    }
}

impl Drop for RendezvousServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = self.end();
    }
}

/// Interval at which a rendezvous server checks for its stop flag.
const TICK: Duration = Duration::from_millis(20);

/// Admits ranks until all have joined, then sends the member list to all.
fn gather(
    mut listener: AuthListener,
    options: &RendezvousOptions,
    stop: &AtomicBool,
) -> Result<(Vec<ControlConnection>, Vec<Member>), CommError> {
    let deadline = Instant::now() + options.join;
    let mut seats: BTreeMap<Rank, (ControlConnection, Member)> = BTreeMap::new();
    let mut facts: Option<(Rank, String, BTreeMap<String, String>)> = None;
    let refuse = |seats: BTreeMap<Rank, (ControlConnection, Member)>,
                  newcomer: Option<ControlConnection>,
                  text: String| {
        let cause = problem(text);
        tracing::warn!(target: "comm", %cause, "refused");
        let over = Control::Over { cause: cause.clone() };
        for mut line in seats.into_values().map(|(line, _)| line).chain(newcomer) {
            let _ = line.send(&over);
        }
        Err(cause)
    };
    while seats.len() < options.world as usize {
        if stop.load(Ordering::Acquire) {
            return refuse(seats, None, "the job was ended before all ranks had joined".to_owned());
        }
        if Instant::now() >= deadline {
            let missing: Vec<_> =
                (0..options.world).map(Rank).filter(|rank| !seats.contains_key(rank)).collect();
            let text = missing_text(&missing, options);
            return refuse(seats, None, text);
        }
        for (authenticated, body) in listener.attend(TICK) {
            let Some(Control::Join { member, world, facts: said }) = Control::decode(&body) else {
                continue;
            };
            let Ok(line) = ControlConnection::new(authenticated) else { continue };
            let (rank, host) = (member.rank, member.host.clone());
            let wrong = if world != options.world {
                let ours = options.world;
                Some(format!("rank {rank} on {host} has world size {world}, expected {ours}"))
            } else if rank.0 >= world {
                Some(format!("rank {rank} on {host} is not one of {world} ranks"))
            } else if let Some((_, other)) = seats.get(&rank) {
                Some(format!("two processes claim rank {rank}: on {} and on {host}", other.host))
            } else {
                let (first, there, known) =
                    facts.get_or_insert_with(|| (rank, host.clone(), said.clone()));
                difference((*first, there, known), (rank, &host, &said))
            };
            match wrong {
                Some(text) => return refuse(seats, Some(line), text),
                None => {
                    tracing::debug!(target: "comm", %rank, host, "joined");
                    seats.insert(rank, (line, member));
                }
            }
        }
    }
    let (mut lines, members): (Vec<_>, Vec<_>) = seats.into_values().unzip();
    let job = nonce()?;
    let world = Control::World { members: members.clone(), rendezvous: options.in_rank, job };
    for line in &mut lines {
        // A rank that has already gone is detected by the liveness monitor.
        let _ = line.send(&world);
    }
    Ok((lines, members))
}

fn missing_text(missing: &[Rank], options: &RendezvousOptions) -> String {
    let names: Vec<_> = missing.iter().take(16).map(Rank::to_string).collect();
    let more = if missing.len() > 16 { ", …" } else { "" };
    let (of, seconds) = (options.world, options.join.as_secs_f64());
    let plural = if missing.len() == 1 { "" } else { "s" };
    format!(
        "rendezvous timed out after {seconds} s; missing rank{plural} {}{more} of {of}",
        names.join(", ")
    )
}

/// Describes the first fact on which two ranks disagree.
fn difference(
    (a, host_a, facts_a): (Rank, &str, &BTreeMap<String, String>),
    (b, host_b, facts_b): (Rank, &str, &BTreeMap<String, String>),
) -> Option<String> {
    let name = facts_a.keys().chain(facts_b.keys()).find(|k| facts_a.get(*k) != facts_b.get(*k))?;
    let value = |facts: &BTreeMap<String, String>| {
        facts.get(name).map_or("none".to_owned(), |value| format!("'{value}'"))
    };
    Some(format!(
        "ranks disagree about the {name}: rank {a} on {host_a} has {}, rank {b} on {host_b} has {}",
        value(facts_a),
        value(facts_b)
    ))
}

/// The rendezvous server after all ranks have joined.
struct LivenessMonitor<'o> {
    options: &'o RendezvousOptions,
    seats: Vec<MemberState>,
    ready: usize,
    /// Time by which all ranks must be ready.
    deadline: Instant,
}

struct MemberState {
    line: ControlConnection,
    member: Member,
    heard: Instant,
    doing: String,
    left: bool,
}

impl<'o> LivenessMonitor<'o> {
    fn new(
        options: &'o RendezvousOptions,
        lines: Vec<ControlConnection>,
        members: Vec<Member>,
    ) -> Self {
        let now = Instant::now();
        let seat = |(line, member)| MemberState {
            line,
            member,
            heard: now,
            doing: String::new(),
            left: false,
        };
        let seats = lines.into_iter().zip(members).map(seat).collect();
        Self { options, seats, ready: 0, deadline: now + options.join }
    }

    fn run(mut self, stop: &AtomicBool) -> Result<(), CommError> {
        let period = (self.options.heartbeat_timeout / 5).min(Duration::from_secs(1));
        let (mut beat, mut before) = (Instant::now(), Instant::now());
        while self.seats.iter().any(|seat| !seat.left) && !stop.load(Ordering::Acquire) {
            self.sleep(period.min(TICK));
            let now = Instant::now();
            // If this process itself was stopped for a while, the silence is not the ranks' fault.
            if now - before > self.options.heartbeat_timeout / 2 {
                self.seats.iter_mut().for_each(|seat| seat.heard = now);
            }
            before = now;
            if let Some(cause) = self.listen(now) {
                return self.over(cause);
            }
            if now >= beat {
                beat = now + period;
                self.broadcast(&Control::Heartbeat { doing: String::new() });
            }
        }
        self.broadcast(&Control::Goodbye);
        self.drain();
        Ok(())
    }

    fn sleep(&self, at_most: Duration) {
        let watch = |seat: &MemberState| {
            let behind = seat.line.has_backlog();
            if behind { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
        };
        let present = self.seats.iter().filter(|seat| !seat.left);
        let mut watched: Few<_> =
            present.map(|seat| PollFd::new(seat.line.stream(), watch(seat))).collect();
        let _ = poll(&mut watched, Some(&timespec(at_most)));
    }

    /// Receives all control messages; returns the first failure, if any.
    fn listen(&mut self, now: Instant) -> Option<CommError> {
        let all_ready = self.ready == self.seats.len();
        let heartbeat_timeout = self.options.heartbeat_timeout;
        let mut became_ready = 0;
        for seat in self.seats.iter_mut().filter(|seat| !seat.left) {
            let _ = seat.line.flush();
            loop {
                match seat.line.try_recv() {
                    Ok(None) => break,
                    Ok(Some(message)) => {
                        seat.heard = now;
                        match message {
                            Control::Heartbeat { doing } => seat.doing = doing,
                            Control::Ready => became_ready += 1,
                            Control::Goodbye => {
                                tracing::debug!(target: "comm", rank = %seat.member.rank, "left");
                                seat.left = true;
                                break;
                            }
                            Control::Abort { reason } => {
                                return Some(CommError::Failed { rank: seat.member.rank, reason });
                            }
                            // A failure that the rank detected on its own.
                            Control::Over { cause } => return Some(cause),
                            _ => return Some(seat.lost("spoke out of turn".to_owned(), now)),
                        }
                    }
                    Err(Disconnected::Peer(how)) => {
                        return Some(seat.lost(format!("died ({how})"), now));
                    }
                    Err(Disconnected::Altered) => {
                        let Member { rank, host, .. } = &seat.member;
                        let way = format!(
                            "control messages from rank {rank} on {host} to the rendezvous server"
                        );
                        return Some(CommError::Altered { way });
                    }
                }
            }
            if all_ready && !seat.left && now - seat.heard > heartbeat_timeout {
                return Some(seat.lost("stopped answering".to_owned(), now));
            }
        }
        if became_ready > 0 {
            self.ready += became_ready;
            if self.ready == self.seats.len() {
                self.seats.iter_mut().for_each(|seat| seat.heard = now);
                tracing::debug!(target: "comm", ranks = self.ready, "all ranks are connected");
                self.broadcast(&Control::Go);
            }
        }
        let late = self.ready < self.seats.len() && now > self.deadline;
        late.then(|| {
            let seconds = self.options.join.as_secs_f64();
            problem(format!("the ranks did not connect to each other within {seconds} s"))
        })
    }

    fn broadcast(&mut self, message: &Control) {
        for seat in self.seats.iter_mut().filter(|seat| !seat.left) {
            // A rank that cannot be reached is detected by the next receive.
            let _ = seat.line.send(message);
        }
    }

    fn over(mut self, cause: CommError) -> Result<(), CommError> {
        tracing::warn!(target: "comm", %cause, "lost");
        self.broadcast(&Control::Over { cause: cause.clone() });
        self.drain();
        Err(cause)
    }

    /// Keeps the connections open until the ranks close them, so that the last message arrives.
    fn drain(mut self) {
        let end = Instant::now() + Duration::from_secs(1).min(self.options.heartbeat_timeout);
        while !self.seats.is_empty() && Instant::now() < end {
            self.seats.iter_mut().for_each(|seat| seat.left = false);
            self.seats.retain_mut(|seat| {
                seat.line.flush().is_ok()
                    && loop {
                        match seat.line.try_recv() {
                            Ok(Some(_)) => {}
                            Ok(None) => break true,
                            Err(_) => break false,
                        }
                    }
            });
            if !self.seats.is_empty() {
                self.sleep(TICK);
            }
        }
    }
}

impl MemberState {
    fn lost(&self, how: String, now: Instant) -> CommError {
        CommError::PeerLost {
            rank: self.member.rank,
            host: self.member.host.clone(),
            how,
            doing: self.doing.clone(),
            silent: now - self.heard,
        }
    }
}

fn problem(problem: String) -> CommError {
    CommError::Job { problem }
}
