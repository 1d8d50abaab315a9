//! Agents of a job: how the leader starts them, one per host, and what it hears of them.
//!
//! An agent is started as ssh starts a remote command, and its orders and events are lines on its
//! standard streams: secret and addresses never stand in arguments, and its end is noticed at once.

use super::address::host_address;
use super::agent::{BEAT, facts, signal};
use super::hosts::Host;
use super::protocol::{Event, FileFact, HostFacts, Order, RankOrder, read, write};
use crate::failure::Failure;
use rustix::process::Signal;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Time limit for agents to report.
const START: Duration = Duration::from_secs(60);
/// Largest difference between the clocks of two hosts.
const CLOCKS: f64 = 60.0;
/// Number of last lines of a remote shell that are kept for messages.
const LAST_LINES: usize = 5;

/// Way of starting agents.
#[derive(Clone, Debug)]
pub(crate) struct FleetOptions {
    /// Command that runs another one on a host, as `ssh` does; `{host}` stands for the host.
    pub(crate) shell: Vec<String>,
    /// The program on the hosts.
    pub(crate) program: PathBuf,
    /// Arguments of the ranks.
    pub(crate) arguments: Vec<String>,
    /// Address that the leader and the ranks listen on, if the user gives one.
    pub(crate) bind: Option<IpAddr>,
    /// Interface that ranks listen on, if the user names one.
    pub(crate) interface: Option<String>,
    /// Silence after which an agent is lost.
    pub(crate) timeout: Duration,
    /// True if ranks use GPUs, so that hosts without a given number of slots have one per GPU.
    pub(crate) on_gpus: bool,
}

/// Message from an agent's connection.
enum Inlet {
    Event(Event),
    /// A line that is no event.
    Other(String),
    /// The connection has ended.
    Gone,
}

/// A host and its agent.
struct Agent {
    host: Host,
    local: bool,
    /// Number of the connection: events of earlier ones count no more.
    epoch: u32,
    child: Option<Child>,
    to: Option<ChildStdin>,
    facts: Option<HostFacts>,
    heard: Instant,
    /// Last lines of the remote shell.
    last: VecDeque<String>,
    /// Differences to the leader's files, once compared.
    compared: Option<(Vec<String>, bool)>,
    /// Reason why the agent is lost.
    lost: Option<String>,
}

/// News of a rank.
pub(super) enum RankNews {
    Line { rank: u32, error: bool, text: String },
    Ended { rank: u32, code: Option<i32>, how: String },
}

/// The agents of a job.
pub(crate) struct Fleet {
    options: FleetOptions,
    agents: Vec<Agent>,
    sender: Sender<(usize, u32, Inlet)>,
    events: Receiver<(usize, u32, Inlet)>,
    /// Ranks of the current attempt: their hosts.
    ranks: Vec<usize>,
}

impl Fleet {
    /// Starts an agent on every host and waits until all have reported. Hosts with another program or
    /// another time are refused by name.
    pub(crate) fn start(hosts: Vec<Host>, options: FleetOptions) -> Result<Self, Failure> {
        let (sender, events) = channel();
        let own = facts()?;
        let agents = hosts.into_iter().map(|host| {
            let name = host.name.rsplit('@').next().unwrap_or(&host.name);
            let local = ["localhost", "127.0.0.1", "::1", own.name.as_str()].contains(&name);
            Agent {
                local,
                host,
                epoch: 0,
                child: None,
                to: None,
                facts: None,
                heard: Instant::now(),
                last: VecDeque::new(),
                compared: None,
                lost: None,
            }
        });
        let agents = agents.collect();
        let mut fleet = Self { options, agents, sender, events, ranks: Vec::new() };
        (0..fleet.agents.len()).try_for_each(|at| fleet.connect(at))?;
        fleet.wait(START, |agent| agent.facts.is_some());
        let problems: Vec<String> =
            fleet.agents.iter().filter_map(|agent| agent.unfit(&own)).collect();
        match problems.is_empty() {
            true => Ok(fleet),
            false => Err(Failure::flag("--hosts", problems.join("\n  "))),
        }
    }

    /// Starts an agent and the threads that listen to it.
    fn connect(&mut self, at: usize) -> Result<(), Failure> {
        let agent = &mut self.agents[at];
        let program = self.options.program.as_os_str();
        let mut command = match agent.local {
            true => Command::new(std::env::current_exe()?),
            false => {
                let words = &self.options.shell;
                let name = |word: &String| word.replace("{host}", &agent.host.name);
                let mut command = Command::new(name(&words[0]));
                command.args(words[1..].iter().map(name)).arg(program);
                command
            }
        };
        // That of the user's own session would be taken for the way to this host; ssh sets it anew.
        command.args(["agent", "--stdio"]).env_remove("SSH_CONNECTION");
        // A terminal's Ctrl-C reaches the leader alone, which tells the agents what it means.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let name = agent.host.name.clone();
        let mut child = command.spawn().map_err(|error| {
            Failure::flag("--hosts", format!("{name}: {:?}: {error}", command.get_program()))
        })?;
        agent.epoch += 1;
        (agent.heard, agent.facts, agent.lost) = (Instant::now(), None, None);
        agent.to = child.stdin.take();
        let epoch = agent.epoch;
        let told = child.stderr.take().map(|err| {
            let sender = self.sender.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(err).lines().map_while(Result::ok) {
                    let _ = sender.send((at, epoch, Inlet::Other(line)));
                }
            })
        });
        if let Some(out) = child.stdout.take() {
            let sender = self.sender.clone();
            std::thread::spawn(move || {
                let event = |event| sender.send((at, epoch, Inlet::Event(event))).is_ok();
                let other = |line| drop(sender.send((at, epoch, Inlet::Other(line))));
                read(out, event, other);
                // The shell's last words tell why.
                told.map(std::thread::JoinHandle::join);
                let _ = sender.send((at, epoch, Inlet::Gone));
            });
        }
        agent.child = Some(child);
        Ok(())
    }

    /// Waits until every agent that is not lost satisfies `done`.
    fn wait(&mut self, at_most: Duration, done: impl Fn(&Agent) -> bool) {
        let end = Instant::now() + at_most;
        while Instant::now() < end
            && !self.agents.iter().all(|agent| agent.lost.is_some() || done(agent))
        {
            self.poll();
            std::thread::sleep(Duration::from_millis(2));
        }
        for agent in &mut self.agents {
            if agent.lost.is_none() && !done(agent) {
                let seconds = at_most.as_secs();
                agent.lose(format!("its agent has not answered within {seconds} s"));
            }
        }
    }

    /// Hears of all agents; returns news of ranks.
    pub(super) fn poll(&mut self) -> Vec<RankNews> {
        let mut news = Vec::new();
        while let Ok((at, epoch, inlet)) = self.events.try_recv() {
            let agent = &mut self.agents[at];
            if epoch != agent.epoch {
                continue;
            }
            agent.heard = Instant::now();
            match inlet {
                Inlet::Event(Event::Here(facts)) => agent.facts = Some(*facts),
                Inlet::Event(Event::Compared { differing, shares_directory }) => {
                    agent.compared = Some((differing, shares_directory));
                }
                Inlet::Event(Event::Line { rank, error, text }) => {
                    news.push(RankNews::Line { rank, error, text });
                }
                Inlet::Event(Event::Ended { rank, code, how }) => {
                    news.push(RankNews::Ended { rank, code, how });
                }
                Inlet::Event(Event::Alive) => {}
                Inlet::Other(line) => {
                    if agent.last.len() == LAST_LINES {
                        agent.last.pop_front();
                    }
                    agent.last.push_back(line);
                }
                Inlet::Gone => {
                    let said: Vec<_> = agent.last.iter().map(String::as_str).collect();
                    let said = if said.is_empty() {
                        String::new()
                    } else {
                        format!(": {}", said.join("; "))
                    };
                    agent.lose(format!("its agent has ended{said}"));
                }
            }
        }
        let timeout = self.options.timeout.max(3 * BEAT);
        for agent in self.agents.iter_mut().filter(|agent| agent.facts.is_some()) {
            if agent.lost.is_none() && agent.heard.elapsed() > timeout {
                agent.lose(format!("its agent has been silent for {} s", timeout.as_secs()));
            }
        }
        for (rank, at) in (0..).zip(&self.ranks) {
            if let Some(lost) = &self.agents[*at].lost {
                let how = format!("was on {}, which is lost: {lost}", self.agents[*at].host.name);
                news.push(RankNews::Ended { rank, code: None, how });
            }
        }
        news
    }

    /// Fails if a host's files differ from the leader's, or if checkpoints need a directory that a host
    /// does not share.
    pub(crate) fn compare(
        &mut self,
        files: Vec<FileFact>,
        (directory, saves): (&Path, bool),
    ) -> Result<(), Failure> {
        let name = format!(".shared-{}-{:x}", std::process::id(), self.agents.len());
        let probe = std::path::absolute(directory)?.join(name);
        std::fs::write(&probe, b"a probe for hosts that share this directory\n")?;
        for agent in &mut self.agents {
            agent.send(&Order::Compare { files: files.clone(), shared: Some(probe.clone()) });
        }
        self.wait(START, |agent| agent.compared.is_some());
        let _ = std::fs::remove_file(&probe);
        let mut problems = Vec::new();
        for agent in &self.agents {
            let name = &agent.host.name;
            match (&agent.lost, &agent.compared) {
                (Some(lost), _) => problems.push(format!("{name} is lost: {lost}")),
                (None, Some((differing, shares))) => {
                    problems.extend(differing.iter().map(|text| format!("{name}: {text}")));
                    if !shares && saves {
                        problems.push(format!(
                            "{name} does not see {}, and ranks save their parts of a checkpoint \
                             there: give --out on a file system that all hosts share, or --save-every 0",
                            directory.display()
                        ));
                    }
                }
                (None, None) => {}
            }
        }
        match problems.is_empty() {
            true => Ok(()),
            false => Err(Failure::flag("--hosts", problems.join("\n  "))),
        }
    }

    /// Starts agents again on hosts whose agent is lost; hosts that do not answer stay lost.
    pub(super) fn revive(&mut self) -> Result<(), Failure> {
        self.ranks.clear();
        self.poll();
        let own = facts()?;
        for at in 0..self.agents.len() {
            if self.agents[at].lost.is_some() && self.connect(at).is_err() {
                self.agents[at].lose("its agent cannot be started".to_owned());
            }
        }
        self.wait(self.options.timeout, |agent| agent.facts.is_some());
        for agent in &mut self.agents {
            if let (None, Some(problem)) = (&agent.lost, agent.unfit(&own)) {
                agent.lose(problem);
            }
        }
        Ok(())
    }

    /// Arguments of the ranks.
    pub(crate) fn arguments(&self) -> &[String] {
        &self.options.arguments
    }

    /// Number of ranks that the remaining hosts take.
    pub(crate) fn capacity(&self) -> u32 {
        self.agents.iter().map(|agent| self.slots(agent)).sum()
    }

    fn slots(&self, agent: &Agent) -> u32 {
        match (&agent.lost, &agent.facts) {
            (Some(_), _) | (_, None) => 0,
            (None, Some(facts)) => {
                let own = if self.options.on_gpus { facts.gpus } else { facts.cores };
                agent.host.slots.unwrap_or(own)
            }
        }
    }

    /// Hosts of `world` ranks: each takes as many consecutive ranks as it has slots. `None` if there are
    /// too few.
    fn place(&self, world: u32) -> Option<Vec<usize>> {
        let slots = self.agents.iter().map(|agent| self.slots(agent) as usize);
        let all = slots.enumerate().flat_map(|(at, slots)| std::iter::repeat_n(at, slots));
        let placed: Vec<usize> = all.take(world as usize).collect();
        (placed.len() == world as usize).then_some(placed)
    }

    /// Text of what is missing for `world` ranks.
    pub(crate) fn shortage(&self, world: u32) -> Option<String> {
        let capacity = self.capacity();
        (capacity < world).then(|| {
            let of = |agent: &Agent| match &agent.lost {
                None => format!("{} takes {}", agent.host.name, self.slots(agent)),
                Some(lost) => format!("{} is lost ({lost})", agent.host.name),
            };
            let hosts: Vec<_> = self.agents.iter().map(of).collect();
            format!(
                "{world} ranks need {world} slots, and the hosts have {capacity}: {}",
                hosts.join(", ")
            )
        })
    }

    /// Returns true if ranks run on other hosts than the leader's.
    pub(crate) fn is_remote(&self) -> bool {
        !self.agents.iter().all(|agent| agent.local)
    }

    /// Address that the rendezvous server listens on.
    pub(super) fn listens_on(&self) -> IpAddr {
        let any = if self.is_remote() { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST };
        self.options.bind.unwrap_or(any.into())
    }

    /// Orders the start of all ranks.
    pub(super) fn start_ranks(
        &mut self,
        world: u32,
        port: u16,
        variables: &dyn Fn(u32, (u32, u32)) -> Vec<(String, String)>,
    ) -> Result<(), String> {
        let placed = self.place(world).ok_or_else(|| {
            self.shortage(world).unwrap_or_else(|| "there are too few hosts".to_owned())
        })?;
        let directory = std::env::current_dir().map_err(|error| error.to_string())?;
        let far = match (self.options.bind, self.is_remote()) {
            (Some(bind), _) if !bind.is_unspecified() => Some(bind),
            (_, false) => None,
            (_, true) => Some(host_address().unwrap_or(Ipv4Addr::LOCALHOST.into())),
        };
        for (rank, at) in (0..).zip(placed.iter().copied()) {
            let first = placed.iter().position(|other| *other == at).unwrap_or(0) as u32;
            let here = placed.iter().filter(|other| **other == at).count() as u32;
            let agent = &mut self.agents[at];
            let facts = agent.facts.as_ref();
            // The leader's own ranks use the address that others reach it by.
            let leader =
                match (agent.local, self.options.bind, facts.and_then(|facts| facts.leader)) {
                    (false, None, Some(leader)) => leader,
                    _ => far.unwrap_or(Ipv4Addr::LOCALHOST.into()),
                };
            let bind = match agent.local {
                true => Some(far.unwrap_or(Ipv4Addr::LOCALHOST.into())),
                false => facts.and_then(|facts| facts.own),
            };
            agent.send(&Order::Start(Box::new(RankOrder {
                rank,
                directory: directory.clone(),
                arguments: self.options.arguments.clone(),
                variables: variables(rank, (rank - first, here)).into_iter().collect(),
                rendezvous: (leader, port),
                bind,
                interface: self.options.interface.clone(),
            })));
        }
        self.ranks = placed;
        Ok(())
    }

    /// Name of a rank's host.
    pub(super) fn host_of(&self, rank: u32) -> &str {
        self.ranks.get(rank as usize).map_or("", |at| &self.agents[*at].host.name)
    }

    /// The host that was lost while it had ranks, with the reason.
    pub(super) fn lost_host(&self) -> Option<String> {
        let lost = |at: &usize| {
            let agent = &self.agents[*at];
            agent.lost.as_ref().map(|lost| format!("{} is lost: {lost}", agent.host.name))
        };
        self.ranks.iter().find_map(lost)
    }

    pub(super) fn interrupt_leader(&mut self) {
        if let Some(at) = self.ranks.first() {
            self.agents[*at].send(&Order::Interrupt { rank: 0 });
        }
    }

    pub(super) fn kill(&mut self) {
        self.agents.iter_mut().for_each(|agent| agent.send(&Order::Kill));
    }
}

impl Agent {
    fn send(&mut self, order: &Order) {
        let Some(to) = &mut self.to else { return };
        if let Err(error) = write(to, order) {
            self.lose(format!("its agent takes no orders: {error}"));
        }
    }

    /// Declares the agent lost, and ends what is left of it: closing its input ends its ranks.
    fn lose(&mut self, why: String) {
        self.lost.get_or_insert(why);
        self.to = None;
        if let Some(mut child) = self.child.take() {
            signal(&child, Signal::TERM);
            std::thread::spawn(move || child.wait());
        }
    }

    /// Reason why a host cannot take part.
    fn unfit(&self, own: &HostFacts) -> Option<String> {
        let name = &self.host.name;
        if let Some(lost) = &self.lost {
            return Some(format!("{name}: {lost}"));
        }
        let found = self.facts.as_ref()?;
        if found.program != own.program {
            let (theirs, ours) = (&found.version, &own.version);
            return Some(format!(
                "{name} has another build of paceline (version {theirs}; here {ours}): install the same \
                 program on all hosts"
            ));
        }
        // Facts of the leader are a little older than those of an agent that started after it.
        let apart = found.clock - own.clock;
        (apart.abs() > CLOCKS).then(|| {
            format!(
                "{name}: its clock is {apart:+.0} s from this host's; files and logs need one time"
            )
        })
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        let children: Vec<_> = self
            .agents
            .iter_mut()
            .filter_map(|agent| {
                agent.to = None;
                agent.child.take()
            })
            .collect();
        // Without input agents end by themselves; remote shells may hang.
        let end = Instant::now() + Duration::from_secs(3);
        for mut child in children {
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
