//! Launcher and transport flags.

use super::{Problems, read_text, real, size, whole, word};
use crate::launch::{AGENT, RANK, environment, interface_address};
use clap::Args;
use paceline_comm::launch::{RankEnv, rank_env};
use paceline_comm::{Secret, TransportKind};
use paceline_exec::Device;
use paceline_plan::collective::Library;
use paceline_plan::units::Bytes;
use serde::Serialize;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Flags for launching ranks.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Ranks")]
pub(crate) struct LaunchFlags {
    /// Transport between ranks: thread (ranks are threads of one process), shm (processes that
    /// share memory), tcp, mpi (messages of the MPI whose mpirun started the ranks), or auto:
    /// processes, with shared memory inside a host and TCP across hosts [default: auto]
    #[arg(long, value_name = "KIND")]
    pub transport: Option<String>,
    /// Launcher of the ranks: local (this command), env (mpirun, srun, torchrun or Kubernetes; rank,
    /// world size and the address of rank 0 come from the environment), or auto: env if such a launcher
    /// has started this process, else local [default: auto]
    #[arg(long, value_name = "HOW")]
    pub launch: Option<String>,
    /// Compute device: cpu, or cuda in a build with the feature cuda; rank k of a host takes its GPU k,
    /// or N + k with cuda:N [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Library for exchanges: nccl on GPUs, mpi on CPUs, or none (all by the plan's steps) [default:
    /// none]
    ///
    /// Sums in canonical order are always the plan's own steps, so that --order free goes with it.
    #[arg(long, value_name = "LIBRARY")]
    pub library: Option<String>,
    /// Several ranks on one GPU, to try layouts on a small machine; their times mean nothing
    #[arg(long)]
    pub share_device: bool,
    /// Address that ranks listen on; 0.0.0.0 is any [default: that of the way to rank 0; 127.0.0.1
    /// for ranks of one host]
    #[arg(long, value_name = "ADDRESS")]
    pub bind: Option<String>,
    /// Network interface that ranks listen on, instead of an address: ib0, eth1
    #[arg(long, value_name = "NAME")]
    pub interface: Option<String>,
    /// File with the job's secret, the same for all ranks; PACELINE_SECRET works too [default: made
    /// for the job by its launcher, or from a file of this user]
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// Encrypt and authenticate all that ranks send over TCP (AES-256-GCM), with keys derived from
    /// the job's secret; without it only control messages and connection set-up are
    #[arg(long)]
    pub encrypt: bool,
    /// Seconds without a heartbeat after which a rank is declared lost; a dead process is noticed
    /// at once [default: 10]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    pub heartbeat_timeout: Option<String>,
    /// Memory limit of a rank, such as 8GiB; a plan that needs more does not start. All ranks
    /// together never get more than this machine or its container has available [default: what is
    /// free]
    #[arg(long, value_name = "SIZE")]
    pub memory_limit: Option<String>,
    /// After a rank has failed, restart all ranks from the newest checkpoint, at most N times
    /// [default: 0]
    ///
    /// Repeated iterations give the same losses, bit for bit. The number of repeated iterations
    /// depends on --save-every.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_restarts: Option<String>,
    /// After a rank has failed, continue without it from the newest checkpoint, with the largest
    /// layout that the remaining ranks can form; as long as there is one, or as often as
    /// --max-restarts allows
    #[arg(long)]
    pub elastic: bool,
    /// True if ranks run on several hosts, whose agents start them.
    #[arg(skip)]
    #[serde(skip)]
    pub spread: bool,
}

/// Validated flags for launching ranks.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    /// Transport between ranks.
    pub transport: TransportKind,
    /// Launcher of the ranks.
    pub by: LaunchMode,
    /// Compute device; that of a host's first rank, if it is a GPU.
    pub device: Device,
    /// Library that carries out exchanges.
    pub library: Option<Library>,
    /// True for several ranks on one GPU.
    pub share_device: bool,
    /// True if agents start the ranks on several hosts.
    pub spread: bool,
    /// Environment of the ranks, for the library.
    pub variables: Vec<(&'static str, String)>,
    /// Rank of this process, if an external launcher has started it.
    pub env: Option<RankEnv>,
    /// Address that ranks listen on, if the user gave one or an interface.
    pub bind: Option<IpAddr>,
    /// The job's secret, if the user gave one.
    pub secret: Option<Secret>,
    /// True to encrypt payloads sent over TCP.
    pub encrypt: bool,
    /// Weaknesses that an attacker could use, for the user to know.
    pub warnings: Vec<String>,
    /// Time without a heartbeat after which a rank is declared lost.
    pub heartbeat_timeout: Duration,
    /// Memory limit of a rank, if the user gave one.
    pub memory_limit: Option<Bytes>,
    /// Recovery after a rank has failed.
    pub recovery: Recovery,
}

/// Recovery after a rank has failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recovery {
    /// Maximum number of restarts.
    pub most: u32,
    /// True if the run continues without failed ranks.
    pub elastic: bool,
}

/// Launcher of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaunchMode {
    /// This command.
    Local,
    /// An external launcher that sets each rank's identity in the environment.
    Environment,
}

impl FromStr for LaunchMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "local" => Ok(Self::Local),
            "env" => Ok(Self::Environment),
            _ => Err(format!("'{text}' is none of auto, local and env")),
        }
    }
}

impl Default for Launch {
    fn default() -> Self {
        Self {
            transport: TransportKind::Auto,
            by: LaunchMode::Local,
            device: Device::Cpu,
            library: None,
            share_device: false,
            spread: false,
            variables: Vec::new(),
            env: None,
            bind: None,
            secret: None,
            encrypt: false,
            warnings: Vec::new(),
            heartbeat_timeout: Duration::from_secs(10),
            memory_limit: None,
            recovery: Recovery::default(),
        }
    }
}

/// Upper limit of --max-restarts.
const MOST: u64 = 1_000_000;

/// Environment variable that can hold the job's secret.
pub(crate) const SECRET: &str = "PACELINE_SECRET";

impl LaunchFlags {
    /// Checks every flag.
    pub(crate) fn check(&self, problems: &mut Problems) -> Launch {
        let default = Launch::default();
        let transport = word("--transport", &self.transport, problems);
        let (by, env) = self.launcher(problems);
        let bind = self.bind.as_deref().and_then(|text| {
            let wrong = || format!("'{text}' is not an address; 127.0.0.1, 10.0.0.7 or 0.0.0.0 is");
            text.parse().map_err(|_| problems.add("--bind", wrong())).ok()
        });
        let silence = real(
            "--heartbeat-timeout",
            self.heartbeat_timeout.as_deref(),
            0.05..=86_400.0,
            problems,
        );
        let bind = bind.or_else(|| self.address_of_interface(problems));
        let transport = transport.unwrap_or(default.transport);
        let device = self.device(problems).unwrap_or(default.device);
        let library = self.library(device, problems);
        let mut warnings = Vec::new();
        let secret = self.secret(problems, &mut warnings);
        self.encryption(transport, library, problems);
        let by_memory = matches!(transport, TransportKind::Thread | TransportKind::Shm);
        if let Some(bind) = bind.filter(|bind| !bind.is_loopback())
            && !self.encrypt
            && !by_memory
        {
            warnings.push(format!(
                "--bind {bind} lets other hosts connect, and payloads are neither encrypted nor \
                 authenticated: who controls the network can read and alter gradients. Add \
                 --encrypt, or keep the network private (docs/security.md)"
            ));
        }
        if by == LaunchMode::Local && !self.spread && std::env::var_os(RANK).is_none() {
            let starts = "needs ranks that MPI starts: mpirun -n N paceline …";
            if transport == TransportKind::Mpi {
                problems.add("--transport", format!("mpi {starts}"));
            }
            if library == Some(Library::Mpi) {
                problems.add("--library", format!("mpi {starts}"));
            }
        }
        Launch {
            transport,
            by,
            recovery: self.recovery(transport, by, problems),
            device,
            library,
            share_device: self.share_device(device, problems),
            spread: self.spread || std::env::var_os(AGENT).is_some(),
            variables: Vec::new(),
            env,
            bind,
            secret,
            encrypt: self.encrypt,
            warnings,
            heartbeat_timeout: silence.map_or(default.heartbeat_timeout, Duration::from_secs_f64),
            memory_limit: size("--memory-limit", self.memory_limit.as_deref(), problems),
        }
    }

    /// The launcher of the ranks, and the rank that an external one gave this process.
    fn launcher(&self, problems: &mut Problems) -> (LaunchMode, Option<RankEnv>) {
        let named = self.launch.clone().filter(|text| text != "auto");
        let named: Option<LaunchMode> = word("--launch", &named, problems);
        // Ranks of this program are told what they are, whatever has started their launcher.
        if named == Some(LaunchMode::Local) || self.spread || std::env::var_os(RANK).is_some() {
            return (LaunchMode::Local, None);
        }
        let mut wrong = |text: String| problems.add("--launch", text);
        match (named, rank_env(&environment())) {
            (_, Err(error)) => wrong(format!("{error}; --launch local reads no such variables")),
            (Some(by), Ok(None)) => {
                wrong(
                    "env finds no rank in the environment: torchrun sets RANK and WORLD_SIZE, Open MPI \
                     OMPI_COMM_WORLD_RANK, other MPIs PMI_RANK, srun SLURM_PROCID"
                        .to_owned(),
                );
                return (by, None);
            }
            (Some(_), Ok(env @ Some(_))) => return (LaunchMode::Environment, env),
            // Alone, a process has no other ranks to join, but may start some.
            (None, Ok(Some(env))) if env.world != Some(1) => {
                return (LaunchMode::Environment, Some(env));
            }
            (None, Ok(_)) => {}
        }
        (LaunchMode::Local, None)
    }

    /// The address of the interface that the user names.
    fn address_of_interface(&self, problems: &mut Problems) -> Option<IpAddr> {
        let name = self.interface.as_deref()?;
        if self.bind.is_some() {
            problems.add("--interface", "stands for --bind: use one of the two");
            return None;
        }
        let found = interface_address(name);
        found.map_err(|error| problems.add("--interface", error)).ok()
    }

    /// Checks the recovery flags: only processes can fail, and only their launcher restarts them.
    fn recovery(
        &self,
        transport: TransportKind,
        by: LaunchMode,
        problems: &mut Problems,
    ) -> Recovery {
        let most = whole("--max-restarts", self.max_restarts.as_deref(), 0..=MOST, problems);
        let most = most.and_then(|most| u32::try_from(most).ok());
        let unless = if self.elastic { MOST as u32 } else { 0 };
        let recovery = Recovery { most: most.unwrap_or(unless), elastic: self.elastic };
        let flag = if self.elastic { "--elastic" } else { "--max-restarts" };
        if recovery.most > 0 && transport == TransportKind::Thread {
            problems.add(
                flag,
                "ranks that are threads fail together; use --transport auto, shm or tcp",
            );
        }
        if recovery.most > 0 && by == LaunchMode::Environment {
            problems.add(
                flag,
                "only works for ranks that this command starts; the launcher must restart them",
            );
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
            problems.add("--device", format!("'{text}' is none of cpu, cuda and cuda:N"));
        }
        found
    }

    fn library(&self, device: Device, problems: &mut Problems) -> Option<Library> {
        let on_gpu = device != Device::Cpu;
        let text = self.library.as_deref()?;
        match (text, text.parse()) {
            ("none", _) => None,
            (_, Ok(Library::Nccl)) if on_gpu => Some(Library::Nccl),
            (_, Ok(Library::Nccl)) => {
                problems.add("--library", "nccl works on GPUs; use --device cuda, or none");
                None
            }
            (_, Ok(Library::Mpi)) if on_gpu => {
                problems
                    .add("--library", "mpi works in the hosts' memory; use nccl on GPUs, or none");
                None
            }
            (_, Ok(Library::Mpi)) => Some(Library::Mpi),
            (_, Err(_)) => {
                problems.add("--library", format!("'{text}' is none of none, nccl and mpi"));
                None
            }
        }
    }

    /// Refuses --encrypt where it would have no effect.
    fn encryption(
        &self,
        transport: TransportKind,
        library: Option<Library>,
        problems: &mut Problems,
    ) {
        if self.encrypt && matches!(transport, TransportKind::Thread | TransportKind::Shm) {
            let text = format!(
                "is about TCP, and ranks of --transport {transport} share memory; use auto or tcp"
            );
            problems.add("--encrypt", text);
        }
        if self.encrypt && (transport == TransportKind::Mpi || library == Some(Library::Mpi)) {
            let text =
                "MPI sends its messages itself, unencrypted; use --transport tcp and no --library";
            problems.add("--encrypt", text);
        }
        if self.encrypt && library == Some(Library::Nccl) {
            let text = "nccl sends what GPUs exchange itself, unencrypted; use --library none";
            problems.add("--encrypt", text);
        }
    }

    fn share_device(&self, device: Device, problems: &mut Problems) -> bool {
        if self.share_device && device == Device::Cpu {
            problems.add("--share-device", "is about ranks on GPUs; use --device cuda with it");
        }
        self.share_device
    }

    fn secret(&self, problems: &mut Problems, warnings: &mut Vec<String>) -> Option<Secret> {
        let (flag, text) = match &self.secret_file {
            Some(file) => {
                let wrong = |error: String| {
                    problems.add("--secret-file", format!("{} {error}", file.display()));
                };
                let read =
                    owned_by_friends(file).and_then(|readable| Ok((readable, read_text(file)?)));
                let (readable, text) = read.map_err(wrong).ok()?;
                if readable {
                    let file = file.display();
                    warnings.push(format!(
                        "every user of this host can read the secret in {file}: chmod 600 {file}"
                    ));
                }
                ("--secret-file", text)
            }
            None => (SECRET, std::env::var(SECRET).ok()?),
        };
        Secret::from_text(&text).map_err(|error| problems.add(flag, error.to_string())).ok()
    }
}

/// Refuses a secret that other users could have chosen; returns true if all of them can read it.
fn owned_by_friends(file: &Path) -> Result<bool, String> {
    let found = std::fs::metadata(file).map_err(|error| format!("cannot be read: {error}"))?;
    let own = rustix::process::geteuid().as_raw();
    if found.uid() != own && found.uid() != 0 {
        return Err("belongs to another user, who could replace the secret".to_owned());
    }
    if found.mode() & 0o022 != 0 {
        let file = file.display();
        return Err(format!("can be written by other users: chmod 600 {file}, with a new secret"));
    }
    Ok(found.mode() & 0o004 != 0)
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
        assert!(launch.bind.is_none() && launch.by == LaunchMode::Local);
        assert_eq!(
            (launch.transport, launch.heartbeat_timeout.as_secs()),
            (TransportKind::Auto, 10)
        );
        let launch = checked(|flags| {
            flags.transport = text("tcp");
            flags.bind = text("0.0.0.0");
            flags.heartbeat_timeout = text("0.5");
            flags.device = text("cuda:3");
            flags.memory_limit = text("2GiB");
        });
        let launch = launch.unwrap();
        assert!(launch.bind.unwrap().is_unspecified() && launch.device == Device::Cuda(3));
        assert_eq!(
            (launch.transport, launch.heartbeat_timeout.as_millis()),
            (TransportKind::Tcp, 500)
        );
        assert_eq!(launch.memory_limit, Some(Bytes(2 << 30)));
    }

    #[test]
    fn encryption_is_refused_where_nothing_is_sent_over_tcp() {
        let told = |transport: &str| {
            checked(|flags| {
                flags.transport = text(transport);
                flags.encrypt = true;
            })
        };
        for transport in ["thread", "shm"] {
            assert!(told(transport).unwrap_err().contains("--encrypt"));
        }
        for transport in ["auto", "tcp"] {
            assert!(told(transport).unwrap().encrypt);
        }
    }

    #[test]
    fn plain_payloads_beyond_loopback_are_warned_of() {
        let warnings = |bind: &str, encrypt: bool, transport: &str| {
            let launch = checked(|flags| {
                flags.bind = text(bind);
                flags.transport = text(transport);
                flags.encrypt = encrypt;
            });
            launch.unwrap().warnings.concat()
        };
        assert!(warnings("0.0.0.0", false, "auto").contains("--encrypt"));
        assert!(warnings("10.1.2.3", false, "tcp").contains("docs/security.md"));
        assert!(warnings("::", false, "tcp").contains("--bind ::"));
        assert_eq!(warnings("0.0.0.0", true, "tcp"), "");
        assert_eq!(warnings("0.0.0.0", false, "shm"), "");
        assert_eq!(warnings("127.0.0.1", false, "tcp"), "");
        assert_eq!(warnings("::1", false, "tcp"), "");
    }

    #[test]
    fn a_secret_that_others_can_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let path = std::env::temp_dir().join(format!("paceline-secret-{}", std::process::id()));
        std::fs::write(&path, "a secret of good length").unwrap();
        let with = |mode: u32| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            checked(|flags| flags.secret_file = Some(path.clone()))
        };
        for mode in [0o666, 0o622, 0o660, 0o602] {
            assert!(with(mode).unwrap_err().contains("can be written by other users"), "{mode:o}");
        }
        assert_eq!(with(0o600).unwrap().warnings, [""; 0]);
        assert_eq!(with(0o640).unwrap().warnings, [""; 0]);
        assert!(with(0o644).unwrap().warnings.concat().contains("chmod 600"));
        std::fs::remove_file(&path).unwrap();
        let fifo = checked(|flags| flags.secret_file = Some("/dev/zero".into()));
        assert!(fifo.unwrap_err().contains("--secret-file"));
    }

    #[test]
    fn everything_that_is_wrong_is_named() {
        let told = checked(|flags| {
            flags.transport = text("pigeon");
            flags.launch = text("mpi");
            flags.bind = text("here");
            flags.interface = text("nowhere0");
            flags.heartbeat_timeout = text("0");
            flags.device = text("cuda:x");
            flags.secret_file = Some("no-such-file".into());
            flags.max_restarts = text("-1");
        })
        .unwrap_err();
        let all = [
            "--transport",
            "--launch",
            "--bind",
            "--interface",
            "--heartbeat-timeout",
            "--secret-file",
            "--device",
        ];
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
        assert!(restarts("thread", "local").unwrap_err().contains("threads fail together"));
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
