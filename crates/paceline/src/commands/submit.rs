//! `paceline submit`: writes the job script or the manifest of a training run, and submits it.

mod kubernetes;
mod slurm;

use super::{parse_train, train};
use crate::failure::Failure;
use crate::flags::{Problems, ResumedRun, whole};
use crate::output::Output;
use clap::Args;
use serde::Serialize;
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
    /// Print only JSON on standard output: the job as `document`, the engine's answer as `answer`
    #[arg(long)]
    json: bool,
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
    let continues = train.job.checkpoints.resume.is_some() || train.job.training.overwrite;
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
    if let Some(out) = out.as_deref().filter(|_| !continues)
        && flags.to == "slurm"
        && ResumedRun::find(out).settings.is_some()
    {
        let out = out.display();
        problems.add(
            "--out",
            format!(
                "{out} has a run already: --resume {out} goes on with it, --overwrite replaces it"
            ),
        );
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
    for (flag, value) in [
        ("--partition", &flags.partition),
        ("--image", &flags.image),
        ("--volume", &flags.volume),
        ("--secret", &flags.secret),
    ] {
        one_word(flag, value.as_ref(), &mut problems);
    }
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
    let output = Output::new(flags.json);
    if flags.dry_run {
        output.print(&written)?;
        let answer = None;
        return Ok(output.print_json(&Submission {
            engine: &flags.to,
            document: &written,
            answer,
        })?);
    }
    let (program, words) = submit.split_first().unwrap_or((&"", &[]));
    let failed = |error| Failure::flag("--to", format!("{program} cannot be started: {error}"));
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    if let Some(mut to) = child.stdin.take() {
        // A program that has ended without reading tells why by its status.
        let _ = to.write_all(written.as_bytes());
    }
    let ended = child.wait_with_output()?;
    if !ended.status.success() {
        let status = ended.status;
        return Err(Failure::Run(anyhow::anyhow!("{program} refused the job: {status}")));
    }
    let answer = String::from_utf8_lossy(&ended.stdout);
    output.print(&answer)?;
    let answer = Some(answer.trim());
    Ok(output.print_json(&Submission { engine: &flags.to, document: &written, answer })?)
}

/// A job as JSON.
#[derive(Serialize)]
struct Submission<'a> {
    engine: &'a str,
    /// The batch script or the manifest.
    document: &'a str,
    /// The engine's answer; absent with `--dry-run`.
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<&'a str>,
}

/// Adds a problem if a value could not stand in one line of a script or manifest.
fn one_word(flag: &str, value: Option<&String>, problems: &mut Problems) {
    let broken = |text: &&String| {
        text.is_empty() || text.contains(|c: char| c.is_whitespace() || c.is_control())
    };
    if let Some(text) = value.filter(broken) {
        problems.add(flag, format!("{text:?} is empty or has blanks"));
    }
}

/// Returns true for a time as Slurm writes it: `minutes`, `hours:minutes:seconds`, `days-hours` and so on.
fn is_time(text: &str) -> bool {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let (days, rest) = text.split_once('-').map_or((None, text), |(days, rest)| (Some(days), rest));
    let parts = rest.split(':').count();
    days.is_none_or(number) && (1..=3).contains(&parts) && rest.split(':').all(number)
}

/// Returns true for a size as an engine writes it: a number, and one of the units.
fn is_size(text: &str, units: &[&str]) -> bool {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    digits > 0 && (digits == text.len() || units.contains(&&text[digits..]))
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_of_engines_are_known() {
        for time in ["30", "30:00", "12:00:00", "1-12", "1-12:30", "1-12:30:00"] {
            assert!(is_time(time), "{time}");
        }
        for time in ["", "soon", "1h", "1:2:3:4", "-1", "1-", "12:", "1-2-3"] {
            assert!(!is_time(time), "{time}");
        }
        assert!(is_size("64G", &["K", "M", "G", "T"]) && is_size("512", &[]));
        assert!(!is_size("64Gi", &["G"]) && !is_size("G", &["G"]) && !is_size("", &["G"]));
    }

    #[test]
    fn words_of_a_shell_are_quoted() {
        assert_eq!(quoted("plain-1.x"), "plain-1.x");
        assert_eq!(quoted("it's $HOME"), "'it'\\''s $HOME'");
        assert_eq!(quoted(""), "''");
    }
}
