//! The hub: where the ranks of a job meet, and what notices that one of them is lost.
//!
//! It runs on a thread of its own, in the launcher or in rank 0, and every rank keeps one
//! connection to it. A rank that dies closes that connection, a rank that is stopped or cut off is
//! not heard from any more; either way the hub tells everyone once, so that all survivors name the
//! same rank, the first. A hub that is lost itself is noticed by the ranks in the same two ways.

use super::control::{Control, Hangup, Line, Member};
use super::door::{Door, timespec};
use crate::error::CommError;
use crate::secret::Secret;
use paceline_plan::ids::Rank;
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What a hub needs to know.
#[derive(Clone, Debug)]
pub struct HubOptions {
    /// Where to listen. Anything but loopback is for whoever starts the job to decide.
    pub listen: SocketAddr,
    /// What all ranks know.
    pub secret: Secret,
    /// How many ranks will come.
    pub world: u32,
    /// The rank in whose process the hub runs; none in a launcher.
    pub in_rank: Option<Rank>,
    /// How long all ranks together may take to come and to connect to each other.
    pub join: Duration,
    /// After how long without a sign a rank is given up.
    pub detection: Duration,
}

/// A running hub. Dropping it ends it.
#[derive(Debug)]
pub struct Hub {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), CommError>>>,
}

impl Hub {
    /// Begins to listen, and to serve on a thread of its own.
    pub fn start(options: HubOptions) -> Result<Self, CommError> {
        let door = Door::open(options.listen, options.secret.clone(), options.world)?;
        let address = door.address()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let serve = move || {
            let (lines, seats) = gather(door, &options, &stopped)?;
            Watch::new(&options, lines, seats).run(&stopped)
        };
        let thread = std::thread::Builder::new()
            .name("hub".to_owned())
            .spawn(serve)
            .map_err(|error| problem(format!("cannot start the hub's thread: {error}")))?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    /// Where it listens; of use where the port was left to the system.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether the job has come to its end, so that [`join`](Self::join) would not wait.
    pub fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the end of the job: that all ranks have left, or the first failure.
    pub fn join(mut self) -> Result<(), CommError> {
        self.end()
    }

    /// Gives the ranks that are still there a while to leave, then ends.
    pub(crate) fn linger(mut self, at_most: Duration) -> Result<(), CommError> {
        let end = Instant::now() + at_most;
        let running = |hub: &Self| hub.thread.as_ref().is_some_and(|thread| !thread.is_finished());
        while running(&self) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.stop.store(true, Ordering::Release);
        self.end()
    }

    fn end(&mut self) -> Result<(), CommError> {
        let crashed = |_| Err(problem("the hub's thread panicked".to_owned()));
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap_or_else(crashed))
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = self.end();
    }
}

/// How often a hub looks whether it should end.
const TICK: Duration = Duration::from_millis(20);

/// Lets the ranks in until all are there, and tells everyone who is.
fn gather(
    mut door: Door,
    options: &HubOptions,
    stop: &AtomicBool,
) -> Result<(Vec<Line>, Vec<Member>), CommError> {
    let deadline = Instant::now() + options.join;
    let mut seats: BTreeMap<Rank, (Line, Member)> = BTreeMap::new();
    let mut facts: Option<(Rank, String, BTreeMap<String, String>)> = None;
    let refuse = |seats: BTreeMap<Rank, (Line, Member)>, newcomer: Option<Line>, text: String| {
        let cause = problem(text);
        let over = Control::Over { cause: cause.clone() };
        for mut line in seats.into_values().map(|(line, _)| line).chain(newcomer) {
            let _ = line.say(&over);
        }
        Err(cause)
    };
    while seats.len() < options.world as usize {
        if stop.load(Ordering::Acquire) {
            return refuse(seats, None, "the job was ended before all ranks had come".to_owned());
        }
        if Instant::now() >= deadline {
            let missing: Vec<_> =
                (0..options.world).map(Rank).filter(|rank| !seats.contains_key(rank)).collect();
            let text = missing_text(&missing, options);
            return refuse(seats, None, text);
        }
        for (stream, body) in door.attend(TICK) {
            let Some(Control::Join { member, world, facts: said }) = Control::decode(&body) else {
                continue;
            };
            let Ok(line) = Line::new(stream) else { continue };
            let (rank, host) = (member.rank, member.host.clone());
            let wrong = if world != options.world {
                let ours = options.world;
                Some(format!("rank {rank} on {host} is of a world of {world} ranks, not {ours}"))
            } else if rank.0 >= world {
                Some(format!("rank {rank} on {host} is not one of {world} ranks"))
            } else if let Some((_, other)) = seats.get(&rank) {
                Some(format!("rank {rank} came twice: from {} and from {host}", other.host))
            } else {
                let (first, there, known) =
                    facts.get_or_insert_with(|| (rank, host.clone(), said.clone()));
                difference((*first, there, known), (rank, &host, &said))
            };
            match wrong {
                Some(text) => return refuse(seats, Some(line), text),
                None => drop(seats.insert(rank, (line, member))),
            }
        }
    }
    let (mut lines, members): (Vec<_>, Vec<_>) = seats.into_values().unzip();
    let world = Control::World { members: members.clone(), hub: options.in_rank };
    for line in &mut lines {
        // A rank that is gone already is noticed by the watch.
        let _ = line.say(&world);
    }
    Ok((lines, members))
}

fn missing_text(missing: &[Rank], options: &HubOptions) -> String {
    let names: Vec<_> = missing.iter().take(16).map(Rank::to_string).collect();
    let more = if missing.len() > 16 { ", …" } else { "" };
    let (of, seconds) = (options.world, options.join.as_secs_f64());
    let plural = if missing.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}{more} of {of} did not come within {seconds} s", names.join(", "))
}

/// The first thing on which two ranks do not agree, in words.
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

/// The hub after all ranks have come.
struct Watch<'o> {
    options: &'o HubOptions,
    seats: Vec<Seat>,
    ready: usize,
    /// Until when all must be ready.
    deadline: Instant,
}

struct Seat {
    line: Line,
    member: Member,
    heard: Instant,
    doing: String,
    left: bool,
}

impl<'o> Watch<'o> {
    fn new(options: &'o HubOptions, lines: Vec<Line>, members: Vec<Member>) -> Self {
        let now = Instant::now();
        let seat =
            |(line, member)| Seat { line, member, heard: now, doing: String::new(), left: false };
        let seats = lines.into_iter().zip(members).map(seat).collect();
        Self { options, seats, ready: 0, deadline: now + options.join }
    }

    fn run(mut self, stop: &AtomicBool) -> Result<(), CommError> {
        let period = (self.options.detection / 5).min(Duration::from_secs(1));
        let (mut beat, mut before) = (Instant::now(), Instant::now());
        while self.seats.iter().any(|seat| !seat.left) && !stop.load(Ordering::Acquire) {
            self.sleep(period.min(TICK));
            let now = Instant::now();
            // If this process itself was stopped for a while, silence is nobody else's fault.
            if now - before > self.options.detection / 2 {
                self.seats.iter_mut().for_each(|seat| seat.heard = now);
            }
            before = now;
            if let Some(cause) = self.listen(now) {
                return self.over(cause);
            }
            if now >= beat {
                beat = now + period;
                self.tell(&Control::Heartbeat { doing: String::new() });
            }
        }
        self.tell(&Control::Goodbye);
        self.drain();
        Ok(())
    }

    fn sleep(&self, at_most: Duration) {
        let watch = |seat: &Seat| {
            let behind = seat.line.is_behind();
            if behind { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
        };
        let present = self.seats.iter().filter(|seat| !seat.left);
        let mut watched: Vec<_> =
            present.map(|seat| PollFd::new(seat.line.stream(), watch(seat))).collect();
        let _ = poll(&mut watched, Some(&timespec(at_most)));
    }

    /// Hears everyone out; the first failure, if there is one.
    fn listen(&mut self, now: Instant) -> Option<CommError> {
        let all_ready = self.ready == self.seats.len();
        let detection = self.options.detection;
        let mut became_ready = 0;
        for seat in self.seats.iter_mut().filter(|seat| !seat.left) {
            let _ = seat.line.flush();
            loop {
                match seat.line.hear() {
                    Ok(None) => break,
                    Ok(Some(message)) => {
                        seat.heard = now;
                        match message {
                            Control::Heartbeat { doing } => seat.doing = doing,
                            Control::Ready => became_ready += 1,
                            Control::Goodbye => {
                                seat.left = true;
                                break;
                            }
                            Control::Abort { reason } => {
                                return Some(CommError::Failed { rank: seat.member.rank, reason });
                            }
                            // What the rank found out by itself.
                            Control::Over { cause } => return Some(cause),
                            _ => return Some(seat.lost("spoke out of turn".to_owned(), now)),
                        }
                    }
                    Err(Hangup(how)) => return Some(seat.lost(format!("died ({how})"), now)),
                }
            }
            if all_ready && !seat.left && now - seat.heard > detection {
                return Some(seat.lost("stopped answering".to_owned(), now));
            }
        }
        if became_ready > 0 {
            self.ready += became_ready;
            if self.ready == self.seats.len() {
                self.seats.iter_mut().for_each(|seat| seat.heard = now);
                self.tell(&Control::Go);
            }
        }
        let late = self.ready < self.seats.len() && now > self.deadline;
        late.then(|| {
            let seconds = self.options.join.as_secs_f64();
            problem(format!("the ranks did not connect to each other within {seconds} s"))
        })
    }

    fn tell(&mut self, message: &Control) {
        for seat in self.seats.iter_mut().filter(|seat| !seat.left) {
            // Whoever cannot be told is noticed when it is next listened to.
            let _ = seat.line.say(message);
        }
    }

    fn over(mut self, cause: CommError) -> Result<(), CommError> {
        self.tell(&Control::Over { cause: cause.clone() });
        self.drain();
        Err(cause)
    }

    /// Keeps the lines open until their ranks have hung up, so that the last word arrives.
    fn drain(mut self) {
        let end = Instant::now() + Duration::from_secs(1).min(self.options.detection);
        while !self.seats.is_empty() && Instant::now() < end {
            self.seats.iter_mut().for_each(|seat| seat.left = false);
            self.seats.retain_mut(|seat| {
                seat.line.flush().is_ok()
                    && loop {
                        match seat.line.hear() {
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

impl Seat {
    fn lost(&self, how: String, now: Instant) -> CommError {
        CommError::Lost {
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
