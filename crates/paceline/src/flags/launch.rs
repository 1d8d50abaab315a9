//! Who starts the ranks, and what carries bytes between them.

use super::{Problems, read_text, real, size, word};
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
        }
    }
}

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
        Launch {
            transport: transport.unwrap_or(default.transport),
            by: by.unwrap_or(default.by),
            device: self.device(problems).unwrap_or(default.device),
            bind: bind.unwrap_or(default.bind),
            secret: self.secret(problems),
            silence: silence.map_or(default.silence, Duration::from_secs_f64),
            memory_limit: size("--memory-limit", self.memory_limit.as_deref(), problems),
        }
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
        })
        .unwrap_err();
        for flag in ["--transport", "--launch", "--bind", "--silence", "--secret-file", "--device"]
        {
            assert!(told.contains(flag), "{flag}: {told}");
        }
    }
}
