//! Agent without a leader: an engine starts one on every host, and their ranks meet at the first host.

use super::agent::{how, signal};
use super::meeting::resolve;
use super::rank_identity::AGENT;
use crate::failure::Failure;
use crate::flags::CONTINUE;
use crate::output::{Second, StopRequest};
use anyhow::{Context, anyhow};
use rustix::process::Signal;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(5);
/// Time for the name of the first host to appear.
const NAMES: Duration = Duration::from_secs(60);
/// Exit status of a rank that has stopped because of SIGUSR1.
const STOPPED: i32 = 128 + signal_hook::consts::SIGUSR1;
/// Time for the other ranks to end by themselves once one has failed: they name the cause.
const GRACE: Duration = Duration::from_secs(15);

/// The ranks of one of several equal hosts.
#[derive(Debug)]
pub(crate) struct StaticAgent {
    /// Number of this host.
    pub(crate) index: u32,
    /// Number of hosts.
    pub(crate) nodes: u32,
    /// Number of ranks on each.
    pub(crate) each: u32,
    /// First host.
    pub(crate) address: String,
    /// Port there.
    pub(crate) port: u16,
    /// Number of times that failed ranks are started again.
    pub(crate) restarts: u32,
    /// Arguments of the ranks.
    pub(crate) arguments: Vec<String>,
}

impl StaticAgent {
    /// Starts the ranks, and again if they fail, until they are done.
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let requests = StopRequest::listen(Second::Counts).unwrap_or_default();
        self.await_name();
        for restart in 0.. {
            let cause = match self.attempt(&requests)? {
                None => return Ok(()),
                Some(cause) => cause,
            };
            match cause.code {
                // The rank has stopped in good order.
                Some(STOPPED) if requests.is_made() => return requests.status(),
                // The rank has said what is wrong.
                Some(2) => return Err(Failure::flag("--", cause.text)),
                _ if requests.count() > 1 => return Err(requests.ended_early()),
                _ if requests.is_made() || restart == self.restarts => {
                    return Err(Failure::Run(anyhow!("{}", cause.text)));
                }
                _ => {}
            }
            eprintln!("restart {} of {}: {}", restart + 1, self.restarts, cause.text);
        }
        Ok(())
    }

    /// Waits until the first host has a name that can be found: that of a pod appears after the pod. Ranks
    /// report a name that never does.
    fn await_name(&self) {
        let end = Instant::now() + NAMES;
        while resolve(&self.address, self.port).is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn attempt(&self, requests: &StopRequest) -> Result<Option<Cause>, Failure> {
        let mut ranks = Ranks(Vec::new());
        for local in 0..self.each {
            ranks.0.push((self.index * self.each + local, self.start(local)?, None));
        }
        let (mut told, mut cause, mut deadline) = (0, None, None);
        loop {
            let now = requests.count();
            if now > told {
                // The first request is passed on, a second one ends all at once.
                let how = if now > 1 { Signal::KILL } else { Signal::USR1 };
                if told == 0 || how == Signal::KILL {
                    ranks.0.iter().for_each(|(_, child, _)| signal(child, how));
                }
                told = now;
            }
            for (rank, child, ended) in &mut ranks.0 {
                if ended.is_none() {
                    *ended = child.try_wait().map_err(anyhow::Error::from).map_err(Failure::Run)?;
                    if let Some(status) = ended.filter(|status| !status.success()) {
                        let text = format!("rank {rank} {}", how(status));
                        cause.get_or_insert(Cause { text, code: status.code() });
                        deadline.get_or_insert(Instant::now() + GRACE);
                    }
                }
            }
            if ranks.0.iter().all(|(_, _, ended)| ended.is_some()) {
                return Ok(cause);
            }
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                ranks.0.iter().for_each(|(_, child, _)| signal(child, Signal::KILL));
            }
            std::thread::sleep(TICK);
        }
    }

    fn start(&self, local: u32) -> Result<Child, Failure> {
        let rank = self.index * self.each + local;
        let program = std::env::current_exe().context("this program cannot find itself");
        let mut command = Command::new(program.map_err(Failure::Run)?);
        command
            .args(&self.arguments)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", (self.nodes * self.each).to_string())
            .env("LOCAL_RANK", local.to_string())
            .env("LOCAL_WORLD_SIZE", self.each.to_string())
            .env("MASTER_ADDR", &self.address)
            .env("MASTER_PORT", self.port.to_string())
            .env(CONTINUE, "1")
            .env(AGENT, std::process::id().to_string())
            .stdin(Stdio::null())
            // Signals reach the agent, which passes them on once.
            .process_group(0);
        let child = command.spawn().with_context(|| format!("rank {rank} cannot be started"));
        child.map_err(Failure::Run)
    }
}

/// First cause of a failure on this host.
struct Cause {
    text: String,
    /// Exit status of the rank, unless a signal ended it.
    code: Option<i32>,
}

/// Ranks of this host; those still running are killed on drop.
struct Ranks(Vec<(u32, Child, Option<std::process::ExitStatus>)>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for (_, child, _) in self.0.iter_mut().filter(|(_, _, ended)| ended.is_none()) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
