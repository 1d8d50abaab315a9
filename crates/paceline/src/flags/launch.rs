//! Who starts the ranks, and what carries bytes between them.

use super::{Problems, read_text, real, size, whole, word};
use clap::Args;
use paceline_comm::Secret;
use paceline_exec::Device;
use paceline_plan::units::Bytes;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// How ranks come to life, as it was written.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Ranks")]
pub(crate) struct LaunchFlags {
    /// What carries bytes between ranks: thread (ranks are threads of one process), shm (processes
    /// that share memory), tcp, or auto: processes, shared memory inside a host and TCP across
    /// [default: auto]
    #[arg(long, value_name = "KIND")]
    pub transport: Option<String>,
    /// Who starts the ranks: local (this command) or env (torchrun, mpirun or srun has, and has put
    /// rank, world size and the address of rank 0 into the environment) [default: local]
    #[arg(long, value_name = "HOW")]
    pub launch: Option<String>,
    /// What computes: cpu, or cuda or cuda:N in a build with the feature cuda [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Address on which ranks may listen; 0.0.0.0 is any [default: 127.0.0.1]
    #[arg(long, value_name = "ADDRESS")]
    pub bind: Option<String>,
    /// File with the job's secret, which all ranks must know; PACELINE_SECRET serves too
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// Seconds without a sign of life after which a rank is given up; death is noticed at once
    /// [default: 10]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    pub silence: Option<String>,
    /// Memory that a rank may have, such as 8GiB; a plan that needs more does not start. In all, ranks
    /// never get more than this machine or its container has to give [default: what is free]
    #[arg(long, value_name = "SIZE")]
    pub memory_limit: Option<String>,
    /// After a rank has failed, start all of them anew from the newest checkpoint, at most N times
    /// [default: 0]
    ///
    /// What is done again gives the same losses, to the bit. --save-every says how much that is.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_restarts: Option<String>,
    /// After a rank has failed, go on without it: with the largest layout that the ranks that are left
    /// can form, from the newest checkpoint; as often as there is one, or as --max-restarts says
    #[arg(long)]
    pub elastic: bool,
}

/// How ranks come to life.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    /// What carries bytes.
    pub transport: Carrier,
    /// Who starts the ranks.
    pub by: Starter,
    /// What computes.
    pub device: Device,
    /// Where ranks may listen.
    pub bind: IpAddr,
    /// The job's secret, if the user has one.
    pub secret: Option<Secret>,
    /// After how long a silent rank is given up.
    pub silence: Duration,
    /// Memory that a rank may have, if the user says so.
    pub memory_limit: Option<Bytes>,
    /// What happens after a rank has failed.
    pub recovery: Recovery,
}

/// What happens after a rank has failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recovery {
    /// How often ranks are started again at most.
    pub most: u32,
    /// Whether those that failed are left out.
    pub elastic: bool,
}

/// What carries bytes between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    /// Shared memory inside a host and TCP across.
    Auto,
    /// Memory of the one process.
    Thread,
    /// Shared memory only.
    SharedMemory,
    /// TCP only.
    Tcp,
}

impl FromStr for Carrier {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "auto" => Self::Auto,
            "thread" => Self::Thread,
            "shm" => Self::SharedMemory,
            "tcp" => Self::Tcp,
            "mpi" => return Err("'mpi' is not available yet; auto, thread, shm and tcp are".into()),
            _ => return Err(format!("'{text}' is none of auto, thread, shm and tcp")),
        })
    }
}

/// Who starts the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Starter {
    /// This command.
    Local,
    /// Something that has told each rank its place through the environment.
    Environment,
}

impl FromStr for Starter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "local" => Ok(Self::Local),
            "env" => Ok(Self::Environment),
            "mpi" => {
                Err("'mpi' is not available yet; env reads what mpirun puts into the environment"
                    .into())
            }
            _ => Err(format!("'{text}' is neither local nor env")),
        }
    }
}

impl Default for Launch {
    fn default() -> Self {
        Self {
            transport: Carrier::Auto,
            by: Starter::Local,
            device: Device::Cpu,
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            secret: None,
            silence: Duration::from_secs(10),
            memory_limit: None,
            recovery: Recovery::default(),
        }
    }
}

/// More restarts than any run needs.
const MOST: u64 = 1_000_000;

/// The variable that can hold the job's secret.
pub(crate) const SECRET: &str = "PACELINE_SECRET";

impl LaunchFlags {
    /// Checks every flag.
    pub(crate) fn check(&self, problems: &mut Problems) -> Launch {
        let default = Launch::default();
        let transport = word("--transport", &self.transport, problems);
        let by = word("--launch", &self.launch, problems);
        let bind = self.bind.as_deref().and_then(|text| {
            let wrong = || format!("'{text}' is not an address; 127.0.0.1, 10.0.0.7 or 0.0.0.0 is");
            text.parse().map_err(|_| problems.say("--bind", wrong())).ok()
        });
        let silence = real("--silence", self.silence.as_deref(), 0.05..=86_400.0, problems);
        let transport = transport.unwrap_or(default.transport);
        let by = by.unwrap_or(default.by);
        Launch {
            transport,
            by,
            recovery: self.recovery(transport, by, problems),
            device: self.device(problems).unwrap_or(default.device),
            bind: bind.unwrap_or(default.bind),
            secret: self.secret(problems),
            silence: silence.map_or(default.silence, Duration::from_secs_f64),
            memory_limit: size("--memory-limit", self.memory_limit.as_deref(), problems),
        }
    }

    /// Only processes can be lost, and only who started them can start them again.
    fn recovery(&self, transport: Carrier, by: Starter, problems: &mut Problems) -> Recovery {
        let most = whole("--max-restarts", self.max_restarts.as_deref(), 0..=MOST, problems);
        let most = most.and_then(|most| u32::try_from(most).ok());
        let unless = if self.elastic { MOST as u32 } else { 0 };
        let recovery = Recovery { most: most.unwrap_or(unless), elastic: self.elastic };
        let flag = if self.elastic { "--elastic" } else { "--max-restarts" };
        if recovery.most > 0 && transport == Carrier::Thread {
            problems
                .say(flag, "threads are lost together; --transport auto, shm or tcp has processes");
        }
        if recovery.most > 0 && by == Starter::Environment {
            problems
                .say(flag, "is for ranks that this command starts; who started them must do it");
        }
        recovery
    }

    fn device(&self, problems: &mut Problems) -> Option<Device> {
        let text = self.device.as_deref()?;
        let found = match text.split_once(':') {
            None if text == "cpu" => Some(Device::Cpu),
            None if text == "cuda" => Some(Device::Cuda(0)),
            Some(("cuda", number)) => number.parse().ok().map(Device::Cuda),
            None | Some(_) => None,
        };
        if found.is_none() {
            problems.say("--device", format!("'{text}' is none of cpu, cuda and cuda:N"));
        }
        found
    }

    fn secret(&self, problems: &mut Problems) -> Option<Secret> {
        let (flag, text) = match &self.secret_file {
            Some(file) => {
                let wrong =
                    |error| problems.say("--secret-file", format!("{} {error}", file.display()));
                ("--secret-file", read_text(file).map_err(wrong).ok()?)
            }
            None => (SECRET, std::env::var(SECRET).ok()?),
        };
        Secret::from_text(&text).map_err(|error| problems.say(flag, error.to_string())).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(change: impl FnOnce(&mut LaunchFlags)) -> Result<Launch, String> {
        let mut flags = LaunchFlags::default();
        change(&mut flags);
        let mut problems = Problems::default();
        let launch = flags.check(&mut problems);
        if problems.is_empty() { Ok(launch) } else { Err(problems.to_string()) }
    }

    fn text(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn silence_means_loopback_and_ten_seconds() {
        let launch = checked(|_| {}).unwrap();
        assert!(launch.bind.is_loopback() && launch.by == Starter::Local);
        assert_eq!((launch.transport, launch.silence.as_secs()), (Carrier::Auto, 10));
        let launch = checked(|flags| {
            flags.transport = text("tcp");
            flags.bind = text("0.0.0.0");
            flags.silence = text("0.5");
            flags.device = text("cuda:3");
            flags.memory_limit = text("2GiB");
        });
        let launch = launch.unwrap();
        assert!(launch.bind.is_unspecified() && launch.device == Device::Cuda(3));
        assert_eq!((launch.transport, launch.silence.as_millis()), (Carrier::Tcp, 500));
        assert_eq!(launch.memory_limit, Some(Bytes(2 << 30)));
    }

    #[test]
    fn everything_that_is_wrong_is_named() {
        let told = checked(|flags| {
            flags.transport = text("pigeon");
            flags.launch = text("mpi");
            flags.bind = text("here");
            flags.silence = text("0");
            flags.device = text("cuda:x");
            flags.secret_file = Some("no-such-file".into());
            flags.max_restarts = text("-1");
        })
        .unwrap_err();
        let all = ["--transport", "--launch", "--bind", "--silence", "--secret-file", "--device"];
        for flag in all.into_iter().chain(["--max-restarts"]) {
            assert!(told.contains(flag), "{flag}: {told}");
        }
    }

    #[test]
    fn only_processes_of_our_own_are_started_again() {
        let restarts = |transport: &str, by: &str| {
            checked(|flags| {
                flags.transport = text(transport);
                flags.launch = text(by);
                flags.max_restarts = text("2");
            })
        };
        let recovery = restarts("tcp", "local").unwrap().recovery;
        assert_eq!(recovery, Recovery { most: 2, elastic: false });
        assert!(restarts("thread", "local").unwrap_err().contains("threads are lost together"));
        assert!(restarts("auto", "env").unwrap_err().contains("--max-restarts"));
        let elastic = checked(|flags| flags.elastic = true).unwrap().recovery;
        assert!(elastic.elastic && elastic.most > 1000);
        let at_most = checked(|flags| {
            flags.elastic = true;
            flags.max_restarts = text("0");
        });
        assert_eq!(at_most.unwrap().recovery.most, 0);
    }
}
