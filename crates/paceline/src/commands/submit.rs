//! `paceline submit`: writes the job script or the manifest of a training run, and submits it.

mod kubernetes;
mod slurm;

use super::{parse_train, train};
use crate::failure::Failure;
use crate::flags::{Problems, whole};
use clap::Args;
use std::io::Write;
use std::process::{Command, Stdio};

/// Write and submit a training run as a job of Slurm or Kubernetes
///
/// The job saves a checkpoint before its time limit, and continues from it by itself when it is started
/// again. With --dry-run, the script or the manifest is printed and nothing is submitted.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    /// Engine: slurm or kubernetes
    #[arg(long, value_name = "ENGINE")]
    to: String,
    /// Print the script or the manifest, and submit nothing
    #[arg(long)]
    dry_run: bool,
    /// Kind of the manifest: jobset, or trainjob (Kubeflow Trainer) [default: jobset]
    #[arg(long, value_name = "KIND")]
    kind: Option<String>,
    /// Name of the job [default: paceline]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Number of hosts [default: 1]
    #[arg(long, value_name = "N")]
    nodes: Option<String>,
    /// Time limit, as Slurm writes it: 1-12:00:00, 30:00 [default: the partition's]
    #[arg(long, value_name = "TIME")]
    time: Option<String>,
    /// Seconds before the time limit at which training ends with a checkpoint [default: 120]
    #[arg(long, value_name = "SECONDS")]
    signal_before: Option<String>,
    /// Slurm's partition
    #[arg(long, value_name = "NAME")]
    partition: Option<String>,
    /// GPUs on each host [default: 0]
    #[arg(long, value_name = "N")]
    gpus_per_node: Option<String>,
    /// Cores of each rank [default: 1]
    #[arg(long, value_name = "N")]
    cores_per_rank: Option<String>,
    /// Memory of each host, as the engine writes it: 64G for Slurm, 64Gi for Kubernetes
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,
    /// Container image (Kubernetes)
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,
    /// Claim of the volume for checkpoints, mounted where --out lies (Kubernetes)
    #[arg(long, value_name = "CLAIM")]
    volume: Option<String>,
    /// Secret with the key `secret` by which ranks know each other (Kubernetes) [default: NAME-secret]
    #[arg(long, value_name = "NAME")]
    secret: Option<String>,
    /// The training run: train --model NAME …
    #[arg(last = true, value_name = "train …")]
    arguments: Vec<String>,
}

const EXAMPLES: &str = "\
Examples:
  paceline submit --to slurm --nodes 4 --time 12:00:00 -- train --model mini --dp 8 --out run
  paceline submit --to kubernetes --dry-run --image registry/paceline --volume checkpoints \\
         --nodes 2 -- train --model mini --dp 8 --out /checkpoints/run
  paceline submit --to kubernetes --kind trainjob --dry-run --image registry/paceline \\
         --volume checkpoints --nodes 2 -- train --model mini --dp 8 --out /checkpoints/run";

/// A job to write down.
pub(super) struct Job {
    name: String,
    nodes: u32,
    /// Ranks on each host.
    each: u32,
    cores: u32,
    gpus: u32,
    memory: Option<String>,
    arguments: Vec<String>,
    /// Directory of the run.
    out: String,
    /// True if the run asks for restarts, which need a launcher of ours.
    watched: bool,
}

/// Writes the job, and submits it.
pub(crate) fn run(flags: &Flags) -> Result<(), Failure> {
    let (train, origins) = parse_train(&flags.arguments)?;
    let out = train.job.training.out.clone();
    let watched = train.job.launch.elastic || train.job.launch.max_restarts.is_some();
    let ranks = train::ranks_of(&train, origins)?;
    let mut problems = Problems::default();
    let mut number = |name, text: &Option<String>, from| {
        whole(name, text.as_deref(), from..=1 << 20, &mut problems).map(|number| number as u32)
    };
    let nodes = number("--nodes", &flags.nodes, 1).unwrap_or(1);
    let cores = number("--cores-per-rank", &flags.cores_per_rank, 1).unwrap_or(1);
    let gpus = number("--gpus-per-node", &flags.gpus_per_node, 0).unwrap_or(0);
    let before = number("--signal-before", &flags.signal_before, 1).unwrap_or(120);
    if !ranks.is_multiple_of(nodes) {
        problems
            .add("--nodes", format!("{ranks} ranks cannot be shared equally among {nodes} hosts"));
    }
    let name = flags.name.clone().unwrap_or_else(|| "paceline".to_owned());
    let sound = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty()
        || name.len() > 40
        || !name.chars().all(sound)
        || name.starts_with('-')
        || name.ends_with('-')
    {
        problems
            .add("--name", format!("'{name}' is not a name of small letters, digits and hyphens"));
    }
    let text = |out: std::path::PathBuf| out.into_os_string().into_string().ok();
    let out = out.and_then(text).unwrap_or_else(|| {
        problems.add("--out", "is needed: a job that is started again continues the run there");
        String::new()
    });
    let memory = flags.memory.clone();
    let arguments = flags.arguments.clone();
    let each = ranks / nodes.max(1);
    let job = Job { name, nodes, each, cores, gpus, memory, arguments, out, watched };
    let (written, submit): (String, &[&str]) = match flags.to.as_str() {
        "slurm" => (slurm::script(&job, flags, before, &mut problems)?, &["sbatch"]),
        "kubernetes" => {
            (kubernetes::manifest(&job, flags, &mut problems), &["kubectl", "apply", "-f", "-"])
        }
        other => {
            problems.add("--to", format!("'{other}' is neither slurm nor kubernetes"));
            return Err(problems.into());
        }
    };
    if !problems.is_empty() {
        return Err(problems.into());
    }
    if flags.dry_run {
        std::io::stdout().write_all(written.as_bytes())?;
        return Ok(());
    }
    let (program, words) = submit.split_first().unwrap_or((&"", &[]));
    let failed = |error| Failure::flag("--to", format!("{program} cannot be started: {error}"));
    let mut child =
        Command::new(program).args(words).stdin(Stdio::piped()).spawn().map_err(failed)?;
    if let Some(mut to) = child.stdin.take() {
        to.write_all(written.as_bytes())?;
    }
    match child.wait()? {
        status if status.success() => Ok(()),
        status => Err(Failure::Run(anyhow::anyhow!("{program} refused the job: {status}"))),
    }
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}
