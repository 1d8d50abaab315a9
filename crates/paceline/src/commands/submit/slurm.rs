//! Batch script for Slurm.

use super::{Flags, Job, is_size, is_time, quoted};
use crate::failure::Failure;
use crate::flags::Problems;
use std::fmt::Write;

/// The script: it passes the announcement of the time limit to the ranks, which save a checkpoint, and
/// requeues the job; a requeued job resumes by itself.
pub(super) fn script(
    job: &Job,
    flags: &Flags,
    before: u32,
    problems: &mut Problems,
) -> Result<String, Failure> {
    for (flag, given) in [
        ("--image", &flags.image),
        ("--volume", &flags.volume),
        ("--secret", &flags.secret),
        ("--kind", &flags.kind),
    ] {
        if given.is_some() {
            problems.add(flag, "goes with --to kubernetes");
        }
    }
    if let Some(time) = flags.time.as_ref().filter(|time| !is_time(time)) {
        problems.add(
            "--time",
            format!("'{time}' is none of Slurm's times, such as 30:00 or 1-12:00:00"),
        );
    }
    if let Some(memory) = job.memory.as_ref().filter(|text| !is_size(text, &["K", "M", "G", "T"])) {
        problems.add("--memory", format!("'{memory}' is none of Slurm's sizes, such as 64G"));
    }
    let Job { name, nodes, each, cores, gpus, memory, arguments, out, watched } = job;
    let mut options = vec![
        format!("--job-name={name}"),
        format!("--nodes={nodes}"),
        format!("--ntasks-per-node={each}"),
        format!("--cpus-per-task={cores}"),
        "--requeue".to_owned(),
        "--open-mode=append".to_owned(),
        format!("--signal=B:USR1@{before}"),
    ];
    if *watched {
        // A lost node does not end the job; the launcher goes on or ends it.
        options.push("--no-kill".to_owned());
    }
    let more = [("time", &flags.time), ("partition", &flags.partition), ("mem", memory)];
    for (option, value) in more {
        options.extend(value.as_ref().map(|value| format!("--{option}={}", quoted(value))));
    }
    if *gpus > 0 {
        options.push(format!("--gpus-per-node={gpus}"));
    }
    let program = std::env::current_exe()?.display().to_string();
    let words = arguments.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
    let program = quoted(&program);
    let command = match watched {
        true => format!("{program} launch --on slurm -- {words}"),
        false => format!("srun --kill-on-bad-exit=0 {program} {words}"),
    };
    let mut text = String::from("#!/bin/bash\n");
    for option in options {
        let _ = writeln!(text, "#SBATCH {option}");
    }
    let checkpoints = quoted(&format!("{out}/{}", paceline_exec::checkpoint::FOLDER));
    let _ = write!(
        text,
        r#"
# Slurm announces the time limit to this script, which passes it on: the ranks finish the iteration, save a
# checkpoint and end with status 138. The job is then requeued, and resumes from there. After a failure, such as a
# lost node, it is requeued too, if it has a new checkpoint to resume from: what fails again at once ends it.
announced= cancelled=
newest() {{ ls {checkpoints} 2> /dev/null | tail -1; }}
trap 'announced=1; kill -USR1 "$ranks"' USR1
trap 'cancelled=1; kill -USR1 "$ranks"' TERM

before="$(newest)"
{command} &
ranks=$!
status=0
while :; do
    wait "$ranks"; status=$?
    kill -0 "$ranks" 2> /dev/null || break
done
requeue=
case "$status" in
    0 | 2) ;;
    138) requeue="$announced" ;;
    *) [ "$(newest)" = "$before" ] || requeue=1 ;;
esac
if [ -n "$requeue" ] && [ -z "$cancelled" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"#
    );
    Ok(text)
}
