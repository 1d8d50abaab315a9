//! `paceline launch`: starts ranks on several hosts and watches over them.

use super::{parse_train, train, with_json};
use crate::failure::Failure;
use crate::flags::{Launch, Problems};
use crate::launch::{Fleet, FleetOptions, environment, parse_hosts};
use anyhow::anyhow;
use clap::Args;
use paceline_exec::Device;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// Start ranks on several hosts, and watch over them
///
/// Starts an agent on every host, by ssh or by srun, and lets them start the ranks. Secret and addresses
/// travel over the agents' standard input. The output of ranks is shown here, and each rank's is kept
/// in logs/ of the run's directory. --max-restarts and --elastic of the training run work for lost
/// ranks, agents and hosts. Ctrl-C ends everything everywhere.
///
/// With --on mpi, mpirun starts the ranks, and nothing more is watched than mpirun does.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    /// Engine that reaches the hosts: ssh, slurm (inside an allocation) or mpi
    #[arg(long, value_name = "ENGINE")]
    on: String,
    /// Hosts: a hostfile as of mpirun or DeepSpeed (`host slots=8`), or a list `h1:8,h2:8`; without
    /// slots, one rank per core or GPU [default with slurm and mpi: those of the allocation]
    #[arg(long, value_name = "FILE|LIST")]
    hosts: Option<String>,
    /// Command that runs another on a host [default: ssh -T -o BatchMode=yes]
    #[arg(long, value_name = "COMMAND")]
    ssh: Option<String>,
    /// Path of this program on the hosts [default: its path here]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Print only JSON on standard output, as the training run does
    #[arg(long)]
    json: bool,
    /// The training run: train --model NAME …
    #[arg(last = true, value_name = "train …")]
    arguments: Vec<String>,
}

const EXAMPLES: &str = "\
Examples:
  paceline launch --on ssh --hosts a:4,b:4 -- train --model mini --dp 8 --out /shared/run
  paceline launch --on ssh --hosts hostfile -- train --model mini --dp 8 --elastic --save-every 10
  salloc -N 4 paceline launch --on slurm -- train --model mini --dp 8
  paceline launch --on mpi --hosts a:4,b:4 -- train --model mini --dp 8 --transport mpi";

/// Starts the ranks.
pub(crate) fn run(flags: &Flags) -> Result<(), Failure> {
    let arguments = with_json(&flags.arguments, flags.json);
    let (train, origins) = parse_train(&arguments)?;
    if flags.on == "mpi" {
        let ranks = train::ranks_of(&train, origins)?;
        return flags.by_mpi(ranks, &arguments);
    }
    let (shell, hosts) = flags.engine()?;
    let hosts = parse_hosts(&hosts).map_err(|problem| Failure::flag("--hosts", problem))?;
    let program = match &flags.program {
        Some(program) => program.clone(),
        None => std::env::current_exe()?,
    };
    let interface = train.job.launch.interface.clone();
    train::train_on(&train, origins, &|launch: &Launch| {
        let options = FleetOptions {
            shell: shell.clone(),
            program: program.clone(),
            arguments: arguments.clone(),
            bind: launch.bind,
            interface: interface.clone(),
            timeout: launch.heartbeat_timeout,
            on_gpus: launch.device != Device::Cpu,
        };
        Fleet::start(hosts.clone(), options)
    })
}

impl Flags {
    /// The remote shell of the engine, and the hosts.
    fn engine(&self) -> Result<(Vec<String>, String), Failure> {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        match self.on.as_str() {
            "ssh" => {
                let shell = self.ssh.as_deref().unwrap_or("ssh -T -o BatchMode=yes");
                let mut shell = words(shell);
                if shell.is_empty() {
                    return Err(Failure::flag("--ssh", "is empty; ssh -p 2222 is a command"));
                }
                if !shell.iter().any(|word| word.contains("{host}")) {
                    shell.push("{host}".to_owned());
                }
                let missing = "is needed with --on ssh: a hostfile, or h1:8,h2:8";
                let hosts = self.hosts.clone();
                Ok((shell, hosts.ok_or_else(|| Failure::flag("--hosts", missing))?))
            }
            "slurm" => {
                let mut problems = Problems::default();
                if self.ssh.is_some() {
                    problems.add("--ssh", "goes with --on ssh; slurm uses srun");
                    return Err(problems.into());
                }
                let hosts = match &self.hosts {
                    Some(hosts) => hosts.clone(),
                    None => allocation().map_err(|text| Failure::flag("--on", text))?,
                };
                let srun = "srun --nodelist={host} --nodes=1 --ntasks=1 --overlap --quiet \
                            --export=ALL --unbuffered";
                Ok((words(srun), hosts))
            }
            other => Err(Failure::flag("--on", format!("'{other}' is none of ssh, slurm and mpi"))),
        }
    }

    /// Lets mpirun start the ranks, in place of this process.
    fn by_mpi(&self, ranks: u32, arguments: &[String]) -> Result<(), Failure> {
        let mut problems = Problems::default();
        if self.ssh.is_some() {
            problems.add("--ssh", "goes with --on ssh; mpirun has a shell of its own");
            return Err(problems.into());
        }
        let told = Command::new("mpirun").arg("--version").output().map_err(|error| {
            Failure::flag("--on", format!("mpirun cannot be started: {error}; install an MPI"))
        })?;
        let told = String::from_utf8_lossy(&told.stdout).into_owned();
        let hydra = told.contains("HYDRA") || told.contains("Intel");
        let mut command = Command::new("mpirun");
        command.args(["-n", &ranks.to_string()]);
        if let Some(hosts) = &self.hosts {
            let hosts = parse_hosts(hosts).map_err(|text| Failure::flag("--hosts", text))?;
            let of = |host: &crate::launch::Host| match host.slots {
                Some(slots) => format!("{}:{slots}", host.name),
                None => host.name.clone(),
            };
            let list = hosts.iter().map(of).collect::<Vec<_>>().join(",");
            command.args([if hydra { "-hosts" } else { "--host" }, &list]);
        }
        let program = match &self.program {
            Some(program) => program.clone(),
            None => std::env::current_exe()?,
        };
        let error = command.arg(program).args(arguments).exec();
        Err(Failure::Run(anyhow!("mpirun cannot be started: {error}")))
    }
}

/// Hosts and slots of the Slurm allocation around this process.
fn allocation() -> Result<String, String> {
    let variables = environment();
    let list = variables.get("SLURM_JOB_NODELIST").ok_or(
        "slurm needs an allocation: start inside sbatch or salloc, or use paceline submit --to slurm",
    )?;
    let names = Command::new("scontrol").args(["show", "hostnames", list]).output();
    let names = names.map_err(|error| format!("scontrol cannot be started: {error}"))?;
    let names = String::from_utf8_lossy(&names.stdout).into_owned();
    let names: Vec<&str> = names.split_whitespace().collect();
    let tasks = variables.get("SLURM_TASKS_PER_NODE").map(String::as_str);
    let slots = tasks.map(expand).unwrap_or_default();
    let host = |(at, name): (usize, &&str)| match slots.get(at) {
        Some(slots) => format!("{name}:{slots}"),
        None => (*name).to_owned(),
    };
    match names.is_empty() {
        true => Err(format!("scontrol knows no hosts of '{list}'")),
        false => Ok(names.iter().enumerate().map(host).collect::<Vec<_>>().join(",")),
    }
}

/// Expands Slurm's `2(x3),1`.
fn expand(tasks: &str) -> Vec<u32> {
    let part = |part: &str| {
        let (count, times) = part.split_once("(x").unwrap_or((part, "1)"));
        let times = times.trim_end_matches(')').parse().unwrap_or(1);
        count.trim().parse().ok().map(|count: u32| vec![count; times])
    };
    tasks.split(',').filter_map(part).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_slurm_are_expanded() {
        assert_eq!(expand("2(x3),1"), [2, 2, 2, 1]);
        assert_eq!(expand("4"), [4]);
    }
}
