//! Agent: starts and watches the ranks of one host, on the orders of the job's leader.
//!
//! It ends, and all its ranks with it, when the connection to the leader does. Ranks end when their
//! agent does, however that happens.

use super::address::{address_towards, interface_address};
use super::protocol::{Event, FileFact, HostFacts, Order, RankOrder, read, write};
use super::rank_identity::{AGENT, BIND, RENDEZVOUS};
use crate::failure::Failure;
use rustix::process::{Pid, Signal, kill_process};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Interval at which an agent polls its ranks.
const TICK: Duration = Duration::from_millis(5);
/// Interval of its heartbeats.
pub(super) const BEAT: Duration = Duration::from_secs(1);
/// Bytes at each end of a file that are compared.
const COMPARED: u64 = 16 << 20;

type Outlet = Arc<Mutex<Box<dyn Write + Send>>>;

/// A rank that an agent has started.
struct Started {
    rank: u32,
    child: Child,
    readers: Vec<JoinHandle<()>>,
}

/// Serves a leader until the connection to it ends.
pub(crate) fn serve(
    from: impl Read + Send + 'static,
    to: impl Write + Send + 'static,
) -> Result<(), Failure> {
    let outlet: Outlet = Arc::new(Mutex::new(Box::new(to)));
    let (orders, inlet) = channel();
    std::thread::spawn(move || receive(from, &orders));
    say(&outlet, &Event::Here(Box::new(facts()?)))?;
    let mut agent = Agent { ranks: Vec::new(), outlet };
    let ended = agent.run(&inlet);
    agent.kill();
    ended
}

fn receive(from: impl Read, orders: &Sender<Order>) {
    read(from, |order| orders.send(order).is_ok(), |_| {});
}

fn say(outlet: &Outlet, event: &Event) -> io::Result<()> {
    write(&mut **outlet.lock().unwrap_or_else(PoisonError::into_inner), event)
}

struct Agent {
    ranks: Vec<Started>,
    outlet: Outlet,
}

impl Agent {
    fn run(&mut self, orders: &Receiver<Order>) -> Result<(), Failure> {
        let mut beat = Instant::now();
        loop {
            match orders.recv_timeout(TICK) {
                Ok(order) => self.obey(order)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            self.reap()?;
            if Instant::now() >= beat {
                beat = Instant::now() + BEAT;
                say(&self.outlet, &Event::Alive)?;
            }
        }
    }

    fn obey(&mut self, order: Order) -> Result<(), Failure> {
        match order {
            Order::Compare { files, shared } => {
                let differing = files.iter().filter_map(difference).collect();
                let shares_directory = shared.is_none_or(|shared| shared.exists());
                say(&self.outlet, &Event::Compared { differing, shares_directory })?;
            }
            Order::Start(order) => {
                let rank = order.rank;
                if let Err(error) = self.start(*order) {
                    let how = format!("cannot be started: {error}");
                    say(&self.outlet, &Event::Ended { rank, code: Some(1), how })?;
                }
            }
            Order::Interrupt { rank } => {
                if let Some(started) = self.ranks.iter().find(|started| started.rank == rank) {
                    signal(&started.child, Signal::INT);
                }
            }
            Order::Kill => self.kill(),
        }
        Ok(())
    }

    fn start(&mut self, order: RankOrder) -> Result<(), String> {
        let RankOrder { rank, rendezvous: (ip, port), .. } = order;
        let rendezvous = SocketAddr::new(ip, port);
        let bind = match (&order.interface, order.bind) {
            (Some(name), _) => interface_address(name)?,
            (None, Some(bind)) => bind,
            (None, None) => address_towards(rendezvous)?,
        };
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        if !order.directory.is_dir() {
            return Err(format!("this host has no directory {}", order.directory.display()));
        }
        let mut command = Command::new(program);
        command
            .args(&order.arguments)
            .current_dir(&order.directory)
            .envs(&order.variables)
            .env(RENDEZVOUS, rendezvous.to_string())
            .env(BIND, bind.to_string())
            .env(AGENT, std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Signals of a terminal reach the leader, which decides what they mean.
            .process_group(0);
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let mut readers = Vec::new();
        if let Some(lines) = child.stdout.take() {
            readers.push(self.forward(rank, false, lines));
        }
        if let Some(lines) = child.stderr.take() {
            readers.push(self.forward(rank, true, lines));
        }
        self.ranks.push(Started { rank, child, readers });
        Ok(())
    }

    /// Forwards a rank's lines to the leader.
    fn forward(&self, rank: u32, error: bool, from: impl Read + Send + 'static) -> JoinHandle<()> {
        let outlet = Arc::clone(&self.outlet);
        std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut line = Vec::new();
            while from.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                let text = String::from_utf8_lossy(&line).trim_end_matches('\n').to_owned();
                line.clear();
                if say(&outlet, &Event::Line { rank, error, text }).is_err() {
                    return;
                }
            }
        })
    }

    /// Reports the ranks that have ended.
    fn reap(&mut self) -> Result<(), Failure> {
        let mut at = 0;
        while at < self.ranks.len() {
            let Some(status) = self.ranks[at].child.try_wait()? else {
                at += 1;
                continue;
            };
            let Started { rank, readers, .. } = self.ranks.swap_remove(at);
            // The last lines come before the end.
            readers.into_iter().for_each(|reader| drop(reader.join()));
            let (code, how) = (status.code(), how(status));
            say(&self.outlet, &Event::Ended { rank, code, how })?;
        }
        Ok(())
    }

    fn kill(&mut self) {
        self.ranks.iter_mut().for_each(|started| drop(started.child.kill()));
        let _ = self.reap();
        for started in &mut self.ranks {
            let _ = started.child.wait();
        }
    }
}

pub(super) fn signal(child: &Child, signal: Signal) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // The process may have ended since; then there is nothing to signal.
        let _ = kill_process(pid, signal);
    }
}

/// Description of a process's end.
pub(super) fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => format!("ended: {status}"),
    }
}

/// Facts about this host.
pub(super) fn facts() -> Result<HostFacts, Failure> {
    let program = std::fs::read("/proc/self/exe")?;
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let gpus = paceline_exec::gpus().map_or(0, |gpus| gpus.len());
    // Of the client and of the server: address and port of each.
    let ssh = std::env::var("SSH_CONNECTION").unwrap_or_default();
    let addresses: Vec<Option<IpAddr>> =
        ssh.split_whitespace().step_by(2).map(|address| address.parse().ok()).collect();
    Ok(HostFacts {
        name,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        program: hex(&Sha256::digest(&program)),
        clock,
        cores: cores as u32,
        gpus: gpus as u32,
        leader: addresses.first().copied().flatten(),
        own: addresses.get(1).copied().flatten(),
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file for comparison with other hosts.
pub(crate) fn file_fact(path: &Path) -> io::Result<FileFact> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let mut digest = Sha256::new();
    let mut part = Vec::new();
    (&mut file).take(COMPARED).read_to_end(&mut part)?;
    digest.update(&part);
    if bytes > COMPARED {
        part.clear();
        file.seek(SeekFrom::Start(bytes - COMPARED.min(bytes - COMPARED)))?;
        (&mut file).take(COMPARED).read_to_end(&mut part)?;
        digest.update(&part);
    }
    let path = std::path::absolute(path)?;
    Ok(FileFact { path, bytes, digest: hex(&digest.finalize()) })
}

/// Describes how this host's file differs from the leader's.
fn difference(wanted: &FileFact) -> Option<String> {
    let path = wanted.path.display();
    match file_fact(&wanted.path) {
        Err(error) => Some(format!("{path}: {error}")),
        Ok(found) if found.bytes != wanted.bytes => {
            Some(format!("{path} has {} bytes instead of {}", found.bytes, wanted.bytes))
        }
        Ok(found) if found.digest != wanted.digest => Some(format!("{path} has other contents")),
        Ok(_) => None,
    }
}

/// Makes this process end with its agent, if an agent has started it.
pub(crate) fn end_with_agent() {
    let Ok(agent) = std::env::var(AGENT) else { return };
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    if agent != parent.to_string() {
        // The agent ended before this process could ask to hear of it.
        std::process::exit(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_compared_by_length_and_contents() {
        let directory = paceline_exec::private::temporary_directory("paceline-agent").unwrap();
        let path = directory.join("data.txt");
        std::fs::write(&path, "some text").unwrap();
        let fact = file_fact(&path).unwrap();
        assert_eq!(difference(&fact), None);
        std::fs::write(&path, "some texT").unwrap();
        assert!(difference(&fact).unwrap().ends_with("has other contents"));
        std::fs::write(&path, "more text than before").unwrap();
        assert!(difference(&fact).unwrap().ends_with("has 21 bytes instead of 9"));
        std::fs::remove_dir_all(&directory).unwrap();
        assert!(difference(&fact).is_some());
    }
}
