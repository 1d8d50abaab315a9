//! Starts the ranks of this machine and watches over them.

use super::place::{HUB, LAYOUT, RANK, RESUME, RUN, WORLD};
use super::recovery::Carried;
use crate::flags::{Launch, SECRET};
use anyhow::Context;
use paceline_comm::rendezvous::{Hub, HubOptions};
use paceline_comm::{CommError, Secret};
use paceline_plan::ids::Rank;
use rustix::process::{Pid, Signal, kill_process};
use std::net::SocketAddr;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How often the launcher looks at its ranks.
const TICK: Duration = Duration::from_millis(5);
/// How long ranks may take to find each other, and to end once one of them has failed.
const JOIN: Duration = Duration::from_secs(60);
const GRACE: Duration = Duration::from_secs(5);

/// Ranks to be started.
pub(super) struct Attempt<'a> {
    /// How many.
    pub(super) world: u32,
    /// How.
    pub(super) launch: &'a Launch,
    /// Where their files go.
    pub(super) directory: &'a Path,
}

/// How ranks ended that are not done.
pub(super) enum End {
    /// The user wanted it at once.
    Interrupted,
    /// One of them failed.
    Failed(Fall),
}

/// Why ranks failed.
pub(super) struct Fall {
    /// The first cause.
    pub(super) cause: String,
    /// Where there is more to read about it.
    pub(super) hint: String,
    /// Whether the rank has found out itself that it cannot go on.
    pub(super) said_itself: bool,
    /// Whether what was asked for is to blame.
    pub(super) wrong_input: bool,
}

impl From<anyhow::Error> for End {
    /// What keeps ranks from starting.
    fn from(error: anyhow::Error) -> Self {
        let (cause, hint) = (format!("{error:#}"), String::new());
        Self::Failed(Fall { cause, hint, said_itself: true, wrong_input: false })
    }
}

/// Runs this same command as so many processes, one for each rank, until all have ended. Rank 0
/// speaks for all of them; what goes wrong is said by the caller, once, with its first cause.
///
/// Ctrl-C reaches rank 0, which ends the run after an iteration; the second ends all at once.
pub(super) fn attempt(
    attempt: &Attempt<'_>,
    carried: &Carried,
    interrupts: &Interrupts,
) -> Result<(), End> {
    let secret = Secret::random().map_err(anyhow::Error::from)?;
    let hub = Hub::start(HubOptions {
        listen: SocketAddr::new(attempt.launch.bind, 0),
        secret: secret.clone(),
        world: attempt.world,
        in_rank: None,
        join: JOIN,
        detection: attempt.launch.silence,
    })
    .map_err(anyhow::Error::from)?;
    let mut ranks = Ranks::default();
    for rank in 0..attempt.world {
        ranks.start(rank, attempt, carried, (&secret, hub.address()))?;
    }
    let mut watch = Watch { ranks, hub: Some(hub), cause: None, told: 0, deadline: None };
    while !watch.is_over() {
        watch.look(interrupts.0.load(Ordering::Relaxed));
        std::thread::sleep(TICK);
    }
    watch.conclude(attempt.directory)
}

/// How often the user has asked for the end.
pub(super) struct Interrupts(Arc<AtomicU32>);

impl Interrupts {
    /// Counts from now on.
    pub(super) fn count() -> Self {
        let count = Arc::new(AtomicU32::new(0));
        let handled = Arc::clone(&count);
        // Without a handler Ctrl-C ends the launcher, whose hub the ranks then miss.
        let _ = ctrlc::set_handler(move || {
            handled.fetch_add(1, Ordering::Relaxed);
        });
        Self(count)
    }

    /// Whether there was one.
    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

/// The processes. Dropping this ends those that still run.
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
        carried: &Carried,
        (secret, hub): (&Secret, SocketAddr),
    ) -> anyhow::Result<()> {
        let program = std::env::current_exe().context("this program cannot find itself")?;
        let mut command = Command::new(program);
        command
            .args(std::env::args_os().skip(1))
            .env(RANK, rank.to_string())
            .env(WORLD, attempt.world.to_string())
            .env(HUB, hub.to_string())
            .env(RUN, attempt.directory)
            .env(SECRET, secret.as_text())
            .stdin(Stdio::null())
            // Ctrl-C in a terminal goes to a whole group; here it is the launcher's to pass on.
            .process_group(0);
        if let Some(resume) = &carried.resume {
            command.env(RESUME, resume);
        }
        if let Some(layout) = &carried.layout {
            command.env(LAYOUT, serde_json::to_string(layout)?);
        }
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        let child = command.spawn().with_context(|| format!("rank {rank} cannot be started"))?;
        self.0.push(Started { child, ended: None });
        Ok(())
    }

    fn interrupt_leader(&self) {
        let Some(leader) = self.0.first().filter(|leader| leader.ended.is_none()) else { return };
        if let Some(pid) = i32::try_from(leader.child.id()).ok().and_then(Pid::from_raw) {
            // It may have ended since; then there is nothing to interrupt.
            let _ = kill_process(pid, Signal::INT);
        }
    }

    /// Collects those that have ended, so that none is left as a zombie.
    fn reap(&mut self) {
        for started in self.0.iter_mut().filter(|started| started.ended.is_none()) {
            started.ended = started.child.try_wait().ok().flatten();
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

struct Watch {
    ranks: Ranks,
    hub: Option<Hub>,
    /// What the hub found out first.
    cause: Option<CommError>,
    /// How many interrupts were acted upon.
    told: u32,
    /// When those that should have ended are ended.
    deadline: Option<Instant>,
}

impl Watch {
    fn is_over(&self) -> bool {
        self.ranks.0.iter().all(|started| started.ended.is_some())
    }

    fn look(&mut self, interrupts: u32) {
        if self.told < interrupts {
            self.told += 1;
            if self.told == 1 { self.ranks.interrupt_leader() } else { self.ranks.kill() }
        }
        if let Some(hub) = self.hub.take_if(|hub| hub.is_over()) {
            self.cause = hub.join().err();
            self.deadline = Some(Instant::now() + GRACE);
        }
        self.ranks.reap();
        let failed = |started: &Started| started.ended.is_some_and(|status| !status.success());
        if self.ranks.0.iter().any(failed) && self.deadline.is_none() {
            // The hub will say why, unless the rank never came to it.
            self.deadline = Some(Instant::now() + GRACE);
        }
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            self.ranks.kill();
        }
    }

    fn conclude(mut self, directory: &Path) -> Result<(), End> {
        if let Some(hub) = self.hub.take() {
            // No rank is left that it could wait for.
            self.cause = if hub.is_over() { hub.join().err() } else { None };
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
            (Some(cause @ CommError::Lost { rank, .. }), _) => {
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
        Err(End::Failed(Fall { cause, hint, said_itself, wrong_input }))
    }
}

fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => format!("ended: {status}"),
    }
}
