//! Starts the ranks of a job, on this machine or by agents on several, and supervises them.

use super::agent::{how, signal};
use super::fleet::{Fleet, RankNews};
use super::lines::Lines;
use super::rank_identity::{
    EXPERT_BUFFERS, LAYOUT, LOCAL_RANK, LOCAL_WORLD, RANK, RENDEZVOUS, RESUME, RUN, WORLD,
};
use super::recovery::RestartState;
use crate::flags::{Launch, SECRET};
use crate::output::StopRequest;
use anyhow::Context;
use paceline_comm::rendezvous::{RendezvousOptions, RendezvousServer};
use paceline_comm::{CommError, Secret};
use paceline_plan::ids::Rank;
use rustix::process::Signal;
use std::cell::{RefCell, RefMut};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Interval at which the launcher polls its ranks.
const TICK: Duration = Duration::from_millis(5);
/// Time limits for the rendezvous, and for ranks to end once one of them has failed.
const JOIN: Duration = Duration::from_secs(60);
const GRACE: Duration = Duration::from_secs(5);
/// Time limit for the rendezvous server to name a cause once no rank is left.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Ranks to start.
pub(super) struct Attempt<'a> {
    /// Number of ranks.
    pub(super) world: u32,
    /// Launch settings.
    pub(super) launch: &'a Launch,
    /// Directory for their files.
    pub(super) directory: &'a Path,
    /// Agents that start them, if they do not all run as children of this process.
    pub(super) fleet: Option<&'a RefCell<Fleet>>,
}

/// Reason that ranks ended before they were done.
pub(super) enum End {
    /// There was a second request to stop.
    Interrupted,
    /// One of the ranks failed.
    Failed(RankFailure),
}

/// Cause of a failure of ranks.
pub(super) struct RankFailure {
    /// The first cause.
    pub(super) cause: String,
    /// Location of further information.
    pub(super) hint: String,
    /// True if the rank itself reported that it cannot continue.
    pub(super) self_reported: bool,
    /// True if the request is at fault.
    pub(super) wrong_input: bool,
    /// True if a host was lost with its ranks.
    pub(super) lost_host: bool,
}

impl From<anyhow::Error> for End {
    /// Converts an error that prevented ranks from starting.
    fn from(error: anyhow::Error) -> Self {
        let (cause, hint) = (format!("{error:#}"), String::new());
        let (wrong_input, lost_host) = (false, false);
        Self::Failed(RankFailure { cause, hint, self_reported: true, wrong_input, lost_host })
    }
}

/// Runs this same command as one process per rank, until all have ended. Rank 0 prints for all of
/// them; the caller reports a failure once, with its first cause.
///
/// The first request to stop is forwarded to rank 0, which ends the run after an iteration; a second
/// one ends all ranks at once.
pub(super) fn attempt(
    attempt: &Attempt<'_>,
    carried: &RestartState,
    requests: &StopRequest,
) -> Result<(), End> {
    let secret = Secret::random().map_err(anyhow::Error::from)?;
    let listens_on = match attempt.fleet {
        Some(fleet) => fleet.borrow().listens_on(),
        None => attempt.launch.bind.unwrap_or(Ipv4Addr::LOCALHOST.into()),
    };
    let rendezvous = RendezvousServer::start(RendezvousOptions {
        listen: SocketAddr::new(listens_on, 0),
        secret: secret.clone(),
        world: attempt.world,
        in_rank: None,
        join: JOIN,
        heartbeat_timeout: attempt.launch.heartbeat_timeout,
    })
    .map_err(anyhow::Error::from)?;
    let mut ranks = match attempt.fleet {
        Some(fleet) => {
            Ranks::agents(fleet.borrow_mut(), attempt, carried, (&secret, rendezvous.address()))?
        }
        None => Ranks::children(attempt, carried, (&secret, rendezvous.address()))?,
    };
    ranks.reap();
    let mut watch =
        Supervisor { ranks, rendezvous: Some(rendezvous), cause: None, told: 0, deadline: None };
    while !watch.is_over() {
        watch.look(requests.count());
        std::thread::sleep(TICK);
    }
    watch.conclude(attempt.directory)
}

/// End of a rank's process.
#[derive(Clone, Debug)]
struct Ended {
    /// Its exit status, unless a signal ended it.
    code: Option<i32>,
    /// Description of its end.
    how: String,
}

/// The rank processes; those still running are killed on drop.
struct Ranks<'a> {
    by: Starter<'a>,
    ended: Vec<Option<Ended>>,
}

/// Parent of the rank processes.
enum Starter<'a> {
    /// This process.
    Own(Vec<Child>),
    /// Agents on the hosts.
    Agents(RefMut<'a, Fleet>, Lines),
}

/// Variables that tell a rank what it is.
fn variables(
    rank: u32,
    (local_rank, local_world): (u32, u32),
    attempt: &Attempt<'_>,
    (carried, secret): (&RestartState, &Secret),
) -> anyhow::Result<Vec<(String, String)>> {
    let mut variables: Vec<(String, String)> = [
        (RANK, rank.to_string()),
        (WORLD, attempt.world.to_string()),
        (LOCAL_RANK, local_rank.to_string()),
        (LOCAL_WORLD, local_world.to_string()),
        (RUN, attempt.directory.to_str().context("the run's directory is no text")?.to_owned()),
        (SECRET, secret.as_text().to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    let own = attempt.launch.variables.iter();
    variables.extend(own.map(|(name, value)| ((*name).to_owned(), value.clone())));
    if attempt.launch.share_device {
        // NCCL refuses two ranks of one host on one GPU, so each takes itself for a host.
        variables.push(("NCCL_HOSTID".to_owned(), format!("rank{rank}")));
    }
    if let Some(resume) = &carried.resume {
        let resume = resume.to_str().context("the checkpoint's path is no text")?;
        variables.push((RESUME.to_owned(), resume.to_owned()));
    }
    if let Some(factor) = carried.expert_buffer_factor {
        variables.push((EXPERT_BUFFERS.to_owned(), factor.to_string()));
    }
    if let Some(layout) = &carried.layout {
        variables.push((LAYOUT.to_owned(), serde_json::to_string(layout)?));
    }
    Ok(variables)
}

impl<'a> Ranks<'a> {
    /// Starts the ranks as children of this process.
    fn children(
        attempt: &Attempt<'_>,
        carried: &RestartState,
        (secret, rendezvous): (&Secret, SocketAddr),
    ) -> anyhow::Result<Self> {
        let mut ranks = Self { by: Starter::Own(Vec::new()), ended: Vec::new() };
        for rank in 0..attempt.world {
            let program = std::env::current_exe().context("this program cannot find itself")?;
            let mut command = Command::new(program);
            command
                .args(std::env::args_os().skip(1))
                .envs(variables(rank, (rank, attempt.world), attempt, (carried, secret))?)
                .env(RENDEZVOUS, rendezvous.to_string())
                .stdin(Stdio::null())
                // A terminal sends Ctrl-C to the whole process group; here the launcher forwards it.
                .process_group(0);
            if rank > 0 {
                command.stdout(Stdio::null());
            }
            let child =
                command.spawn().with_context(|| format!("rank {rank} cannot be started"))?;
            tracing::debug!(target: "launch", rank, process = child.id(), "started");
            let Starter::Own(children) = &mut ranks.by else { continue };
            children.push(child);
            ranks.ended.push(None);
        }
        Ok(ranks)
    }

    /// Starts the ranks by agents.
    fn agents(
        mut fleet: RefMut<'a, Fleet>,
        attempt: &Attempt<'_>,
        carried: &RestartState,
        (secret, rendezvous): (&Secret, SocketAddr),
    ) -> anyhow::Result<Self> {
        // A path that agents can use from another directory.
        let directory = std::path::absolute(attempt.directory)?;
        let attempt = Attempt { directory: &directory, ..*attempt };
        let of =
            |rank, local| variables(rank, local, &attempt, (carried, secret)).unwrap_or_default();
        fleet.start_ranks(attempt.world, rendezvous.port(), &of).map_err(anyhow::Error::msg)?;
        let lines = Lines::new(&directory)?;
        let ended = vec![None; attempt.world as usize];
        Ok(Self { by: Starter::Agents(fleet, lines), ended })
    }

    fn interrupt_leader(&mut self) {
        if self.ended.first().is_some_and(Option::is_some) {
            return;
        }
        match &mut self.by {
            Starter::Own(children) => children.iter().take(1).for_each(|c| signal(c, Signal::INT)),
            Starter::Agents(fleet, _) => fleet.interrupt_leader(),
        }
    }

    /// Reaps ended processes, so that none is left as a zombie.
    fn reap(&mut self) {
        match &mut self.by {
            Starter::Own(children) => {
                let running = children.iter_mut().zip(&mut self.ended).enumerate();
                for (rank, (child, ended)) in running.filter(|(_, (_, ended))| ended.is_none()) {
                    if let Ok(Some(status)) = child.try_wait() {
                        let (code, how) = (status.code(), how(status));
                        tracing::debug!(target: "launch", rank, "{how}");
                        *ended = Some(Ended { code, how });
                    }
                }
            }
            Starter::Agents(fleet, lines) => {
                for news in fleet.poll() {
                    match news {
                        RankNews::Line { rank, error, text } => {
                            lines.show(rank, fleet.host_of(rank), error, &text);
                        }
                        RankNews::Ended { rank, code, how } => {
                            if let Some(ended @ None) = self.ended.get_mut(rank as usize) {
                                tracing::debug!(target: "launch", rank, "{how}");
                                *ended = Some(Ended { code, how });
                            }
                        }
                    }
                }
            }
        }
    }

    fn kill(&mut self) {
        match &mut self.by {
            Starter::Own(children) => {
                let running = children.iter_mut().zip(&mut self.ended);
                for (child, ended) in running.filter(|(_, ended)| ended.is_none()) {
                    let _ = child.kill();
                    let status = child.wait().ok();
                    *ended = status.map(|status| Ended { code: status.code(), how: how(status) });
                }
            }
            Starter::Agents(fleet, _) => {
                fleet.kill();
                // An agent that is stuck would keep its ranks; it is lost, and they with it.
                let end = Instant::now() + GRACE;
                while self.ended.iter().any(Option::is_none) && Instant::now() < end {
                    std::thread::sleep(TICK);
                    self.reap();
                }
                for ended in self.ended.iter_mut().filter(|ended| ended.is_none()) {
                    *ended = Some(Ended { code: None, how: "did not end when told to".into() });
                }
            }
        }
    }

    fn lost_host(&self) -> Option<String> {
        match &self.by {
            Starter::Own(_) => None,
            Starter::Agents(fleet, _) => fleet.lost_host(),
        }
    }
}

impl Drop for Ranks<'_> {
    fn drop(&mut self) {
        if self.ended.iter().any(Option::is_none) {
            self.kill();
        }
    }
}

struct Supervisor<'a> {
    ranks: Ranks<'a>,
    rendezvous: Option<RendezvousServer>,
    /// First error that the rendezvous server reported.
    cause: Option<CommError>,
    /// Number of requests to stop already handled.
    told: u32,
    /// Time at which the remaining ranks are killed.
    deadline: Option<Instant>,
}

impl Supervisor<'_> {
    fn is_over(&self) -> bool {
        self.ranks.ended.iter().all(Option::is_some)
    }

    fn look(&mut self, requests: u32) {
        if self.told < requests {
            self.told += 1;
            if self.told == 1 { self.ranks.interrupt_leader() } else { self.ranks.kill() }
        }
        if let Some(rendezvous) = self.rendezvous.take_if(|rendezvous| rendezvous.is_over()) {
            self.cause = rendezvous.join().err();
            self.deadline = Some(Instant::now() + GRACE);
        }
        self.ranks.reap();
        let failed = |ended: &Ended| ended.code != Some(0);
        if self.ranks.ended.iter().flatten().any(failed) && self.deadline.is_none() {
            // The rendezvous server will report the cause, unless the rank never connected to it.
            self.deadline = Some(Instant::now() + GRACE);
        }
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            self.ranks.kill();
        }
    }

    fn conclude(mut self, directory: &Path) -> Result<(), End> {
        if let Some(rendezvous) = self.rendezvous.take() {
            // No rank is left that the server could wait for; it may be about to name the first cause.
            let bad = self.ranks.ended.iter().flatten().any(|ended| ended.code != Some(0));
            let end = Instant::now() + LAST_WORDS;
            while bad && !rendezvous.is_over() && Instant::now() < end {
                std::thread::sleep(TICK);
            }
            self.cause = if rendezvous.is_over() { rendezvous.join().err() } else { None };
        }
        let statuses = || (0..).map(Rank).zip(&self.ranks.ended);
        if self.told > 1 {
            return Err(End::Interrupted);
        }
        let bad = |only_killed: bool| {
            let found = statuses().filter_map(|(rank, status)| Some((rank, status.as_ref()?)));
            found
                .filter(|(_, ended)| ended.code != Some(0))
                .find(move |(_, ended)| !only_killed || ended.code.is_none())
        };
        // A rank that was killed, or lost with its host, is a cause; others end because of it.
        let ended_badly = bad(true).or_else(|| bad(false));
        let wrong_input =
            statuses().any(|(_, ended)| ended.as_ref().and_then(|ended| ended.code) == Some(2));
        let cause = match (&self.cause, ended_badly) {
            (None, None) => return Ok(()),
            (None, Some((rank, ended))) => format!("rank {rank} {}", ended.how),
            (Some(CommError::Failed { rank, reason }), _) => {
                // Most reasons begin with the rank's own name.
                if reason.starts_with(&format!("rank {rank}")) {
                    reason.clone()
                } else {
                    format!("rank {rank}: {reason}")
                }
            }
            (Some(cause @ CommError::PeerLost { rank, .. }), _) => {
                let ended = statuses().find(|(other, _)| other == rank);
                let ended = ended.and_then(|(_, ended)| ended.as_ref());
                let ended = ended.map_or(String::new(), |ended| format!(" (it {})", ended.how));
                format!("{cause}{ended}")
            }
            (Some(cause), _) => cause.to_string(),
        };
        let records = std::fs::read_dir(directory).into_iter().flatten().flatten();
        let flown = records.filter(|f| f.file_name().to_string_lossy().starts_with("flight-"));
        let hint = match flown.count() {
            0 => String::new(),
            _ => format!(
                "\nwhat each rank did last stands in {}",
                directory.join("flight-*.txt").display()
            ),
        };
        let self_reported = matches!(self.cause, Some(CommError::Failed { .. }));
        let lost_host = self.ranks.lost_host().is_some();
        Err(End::Failed(RankFailure { cause, hint, self_reported, wrong_input, lost_host }))
    }
}
