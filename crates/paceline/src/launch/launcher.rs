//! Starts the ranks of this machine and supervises them.

use super::rank_identity::{EXPERT_BUFFERS, LAYOUT, RANK, RENDEZVOUS, RESUME, RUN, WORLD};
use super::recovery::RestartState;
use crate::flags::{Launch, SECRET};
use crate::output::StopRequest;
use anyhow::Context;
use paceline_comm::rendezvous::{RendezvousOptions, RendezvousServer};
use paceline_comm::{CommError, Secret};
use paceline_plan::ids::Rank;
use rustix::process::{Pid, Signal, kill_process};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Interval at which the launcher polls its ranks.
const TICK: Duration = Duration::from_millis(5);
/// Time limits for the rendezvous, and for ranks to end once one of them has failed.
const JOIN: Duration = Duration::from_secs(60);
const GRACE: Duration = Duration::from_secs(5);

/// Ranks to start.
pub(super) struct Attempt<'a> {
    /// Number of ranks.
    pub(super) world: u32,
    /// Launch settings.
    pub(super) launch: &'a Launch,
    /// Directory for their files.
    pub(super) directory: &'a Path,
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
}

impl From<anyhow::Error> for End {
    /// Converts an error that prevented ranks from starting.
    fn from(error: anyhow::Error) -> Self {
        let (cause, hint) = (format!("{error:#}"), String::new());
        Self::Failed(RankFailure { cause, hint, self_reported: true, wrong_input: false })
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
    let rendezvous = RendezvousServer::start(RendezvousOptions {
        listen: SocketAddr::new(attempt.launch.bind.unwrap_or(Ipv4Addr::LOCALHOST.into()), 0),
        secret: secret.clone(),
        world: attempt.world,
        in_rank: None,
        join: JOIN,
        heartbeat_timeout: attempt.launch.heartbeat_timeout,
    })
    .map_err(anyhow::Error::from)?;
    let mut ranks = Ranks::default();
    for rank in 0..attempt.world {
        ranks.start(rank, attempt, carried, (&secret, rendezvous.address()))?;
    }
    let mut watch =
        Supervisor { ranks, rendezvous: Some(rendezvous), cause: None, told: 0, deadline: None };
    while !watch.is_over() {
        watch.look(requests.count());
        std::thread::sleep(TICK);
    }
    watch.conclude(attempt.directory)
}

/// The rank processes; those still running are killed on drop.
#[derive(Default)]
struct Ranks(Vec<Started>);

struct Started {
    child: Child,
    ended: Option<ExitStatus>,
}

impl Ranks {
    fn start(
        &mut self,
        rank: u32,
        attempt: &Attempt<'_>,
        carried: &RestartState,
        (secret, rendezvous): (&Secret, SocketAddr),
    ) -> anyhow::Result<()> {
        let program = std::env::current_exe().context("this program cannot find itself")?;
        let mut command = Command::new(program);
        command
            .args(std::env::args_os().skip(1))
            .env(RANK, rank.to_string())
            .env(WORLD, attempt.world.to_string())
            .env(RENDEZVOUS, rendezvous.to_string())
            .env(RUN, attempt.directory)
            .env(SECRET, secret.as_text())
            .envs(attempt.launch.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            // A terminal sends Ctrl-C to the whole process group; here the launcher forwards it.
            .process_group(0);
        if attempt.launch.share_device {
            // NCCL refuses two ranks of one host on one GPU, so each takes itself for a host.
            command.env("NCCL_HOSTID", format!("rank{rank}"));
        }
        if let Some(resume) = &carried.resume {
            command.env(RESUME, resume);
        }
        if let Some(factor) = carried.expert_buffer_factor {
            command.env(EXPERT_BUFFERS, factor.to_string());
        }
        if let Some(layout) = &carried.layout {
            command.env(LAYOUT, serde_json::to_string(layout)?);
        }
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        let child = command.spawn().with_context(|| format!("rank {rank} cannot be started"))?;
        tracing::debug!(target: "launch", rank, process = child.id(), "started");
        self.0.push(Started { child, ended: None });
        Ok(())
    }

    fn interrupt_leader(&self) {
        let Some(leader) = self.0.first().filter(|leader| leader.ended.is_none()) else { return };
        if let Some(pid) = i32::try_from(leader.child.id()).ok().and_then(Pid::from_raw) {
            // The process may have ended since; then there is nothing to interrupt.
            let _ = kill_process(pid, Signal::INT);
        }
    }

    /// Reaps ended processes, so that none is left as a zombie.
    fn reap(&mut self) {
        let running = self.0.iter_mut().enumerate().filter(|(_, started)| started.ended.is_none());
        for (rank, started) in running {
            started.ended = started.child.try_wait().ok().flatten();
            if let Some(status) = started.ended {
                tracing::debug!(target: "launch", rank, "{}", how(status));
            }
        }
    }

    fn kill(&mut self) {
        for started in self.0.iter_mut().filter(|started| started.ended.is_none()) {
            let _ = started.child.kill();
            started.ended = started.child.wait().ok();
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
    }
}

struct Supervisor {
    ranks: Ranks,
    rendezvous: Option<RendezvousServer>,
    /// First error that the rendezvous server reported.
    cause: Option<CommError>,
    /// Number of requests to stop already handled.
    told: u32,
    /// Time at which the remaining ranks are killed.
    deadline: Option<Instant>,
}

impl Supervisor {
    fn is_over(&self) -> bool {
        self.ranks.0.iter().all(|started| started.ended.is_some())
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
        let failed = |started: &Started| started.ended.is_some_and(|status| !status.success());
        if self.ranks.0.iter().any(failed) && self.deadline.is_none() {
            // The rendezvous server will report the cause, unless the rank never connected to it.
            self.deadline = Some(Instant::now() + GRACE);
        }
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            self.ranks.kill();
        }
    }

    fn conclude(mut self, directory: &Path) -> Result<(), End> {
        if let Some(rendezvous) = self.rendezvous.take() {
            // No rank is left that the server could wait for.
            self.cause = if rendezvous.is_over() { rendezvous.join().err() } else { None };
        }
        let statuses = || (0..).map(Rank).zip(self.ranks.0.iter().map(|started| started.ended));
        if self.told > 1 {
            return Err(End::Interrupted);
        }
        let ended_badly = statuses().find_map(|(rank, status)| {
            Some((rank, status?)).filter(|(_, status)| !status.success())
        });
        let wrong_input =
            statuses().any(|(_, status)| status.and_then(|status| status.code()) == Some(2));
        let said_itself = matches!(self.cause, Some(CommError::Failed { .. }));
        let cause = match (&self.cause, ended_badly) {
            (None, None) => return Ok(()),
            (None, Some((rank, status))) => format!("rank {rank} {}", how(status)),
            (Some(CommError::Failed { rank, reason }), _) => {
                // Most reasons begin with the rank's own name.
                if reason.starts_with(&format!("rank {rank}")) {
                    reason.clone()
                } else {
                    format!("rank {rank}: {reason}")
                }
            }
            (Some(cause @ CommError::PeerLost { rank, .. }), _) => {
                let status = statuses().find(|(other, _)| other == rank).and_then(|(_, s)| s);
                let status =
                    status.map_or(String::new(), |status| format!(" (it {})", how(status)));
                format!("{cause}{status}")
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
        Err(End::Failed(RankFailure { cause, hint, self_reported: said_itself, wrong_input }))
    }
}

fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => format!("ended: {status}"),
    }
}
