//! Recovery after a rank has failed: all ranks restart from the newest checkpoint, or the remaining
//! ones continue in a smaller layout.
//!
//! Ranks are processes that start from files, so nothing of a failed attempt has to be undone. A
//! checkpoint is either complete or absent, and a rank depends only on it and on the plan. A
//! restarted run therefore ends with the same bits as an uninterrupted one.

use super::expert_buffers::LargerBuffers;
use super::fleet::Fleet;
use super::launcher::{Attempt, End, attempt};
use super::layout::Layout;
use super::rank_identity::{EXPERT_BUFFERS, LAYOUT, RANK, RESUME};
use crate::failure::Failure;
use crate::flags::Launch;
use crate::output::{Journal, Output, RestartRecord, RunDir, Second, StopRequest};
use anyhow::anyhow;
use paceline_exec::checkpoint::Checkpoint;
use serde::Serialize;
use std::cell::RefCell;
use std::path::{Path, PathBuf};

/// A run that the launcher supervises until its end.
pub(crate) struct SupervisedRun<'a> {
    /// Number of ranks.
    pub world: u32,
    /// Launch settings.
    pub launch: &'a Launch,
    /// The run's directory.
    pub directory: &'a Path,
    /// Folders for its checkpoints.
    pub checkpoints: &'a [PathBuf],
    /// Checkpoint to start from, if the run is resumed.
    pub resume: Option<&'a Checkpoint>,
    /// Number of iterations of the whole run.
    pub iterations: u32,
    /// Agents that start the ranks, if they run on several hosts.
    pub fleet: Option<&'a RefCell<Fleet>>,
    /// Returns the largest layout for at most the given ranks, and the number of ranks it uses.
    pub replan: &'a dyn Fn(u32) -> Option<(Layout, u32)>,
}

/// State that the launcher passes to restarted ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct RestartState {
    /// Checkpoint to resume from.
    pub resume: Option<PathBuf>,
    /// Layout that replaces the requested one.
    pub layout: Option<Layout>,
    /// Size of the experts' buffers that replaces the requested one.
    pub expert_buffer_factor: Option<f64>,
}

/// Reads the state that the launcher passed to this process, if it has one.
pub(crate) fn restart_state() -> Result<RestartState, Failure> {
    if std::env::var_os(RANK).is_none() {
        return Ok(RestartState::default());
    }
    let layout = match std::env::var(LAYOUT) {
        Ok(text) => Some(serde_json::from_str(&text).map_err(|error| {
            let text = format!("{LAYOUT} is set, but not by a launcher of paceline: {error}");
            Failure::flag("--launch", text)
        })?),
        Err(_) => None,
    };
    let expert_buffer_factor =
        std::env::var(EXPERT_BUFFERS).ok().and_then(|text| text.parse().ok());
    let resume = std::env::var_os(RESUME).map(PathBuf::from);
    Ok(RestartState { resume, layout, expert_buffer_factor })
}

/// Starts the ranks, and restarts them if requested, until they are done.
pub(crate) fn run(run: &SupervisedRun<'_>, output: &Output) -> Result<(), Failure> {
    // Without a handler Ctrl-C ends the launcher; the ranks then lose the rendezvous server.
    let requests = StopRequest::listen(Second::Counts).unwrap_or_default();
    let run_dir = RunDir::existing(run.directory);
    let recovery = run.launch.recovery;
    let (mut world, mut left) = (run.world, run.world);
    let mut from = run.resume.map_or(0, |resume| resume.state().iteration);
    let resume = run.resume.map(|resume| resume.path().to_owned());
    let mut carried = RestartState { resume, ..RestartState::default() };
    let mut before: Option<String> = None;
    let mut restart = 0;
    // Left by a run that was killed.
    LargerBuffers::take(run.directory);
    loop {
        let (launch, directory, fleet) = (run.launch, run.directory, run.fleet);
        let started = Attempt { world, launch, directory, fleet };
        let ended = attempt(&started, &carried, &requests);
        if let (Err(End::Failed(_)), Some(larger)) = (&ended, LargerBuffers::take(run.directory))
            && !requests.is_made()
        {
            // Not a failure: no rank is lost, and the same cannot happen again.
            carried.expert_buffer_factor = Some(larger.factor);
            from = rewind(run, &mut carried, from, output);
            let record = RestartRecord { after: from, cause: larger.cause() };
            Journal::note_restart(&run_dir, record)?;
            larger.report(from, output);
            continue;
        }
        let fall = match ended {
            Ok(()) => return requests.status(),
            Err(End::Interrupted) => return Err(requests.ended_early()),
            Err(End::Failed(fall)) => fall,
        };
        restart += 1;
        let repeated =
            fall.self_reported && before.as_deref() == Some(without_reporter(&fall.cause));
        let end = |why: &str| Failure::Run(anyhow!("{}{why}{}", fall.cause, fall.hint));
        if recovery.most == 0 || fall.wrong_input || requests.is_made() {
            return Err(end(""));
        }
        if repeated {
            // Runs are deterministic, so the same failure would recur.
            return Err(end("\nit was the same before the restart: another would not help"));
        }
        if restart > recovery.most {
            return Err(end(&format!("\nafter {} restarts", recovery.most)));
        }
        let shortage = match run.fleet {
            Some(fleet) => {
                let mut fleet = fleet.borrow_mut();
                if fall.lost_host {
                    // It takes a while to find out that a host does not answer.
                    output.note(&format!("failed: {}", fall.cause));
                }
                fleet.revive()?;
                if fall.lost_host {
                    left = left.min(fleet.capacity());
                }
                fleet.shortage(world)
            }
            None => None,
        };
        // Ranks of a host whose agent could be started again are not lost, nor is a rank that reported
        // its own failure.
        let lost = if fall.lost_host { shortage.is_some() } else { !fall.self_reported };
        if let Some(shortage) = shortage.filter(|_| !recovery.elastic) {
            return Err(end(&format!("\n{shortage}; --elastic goes on with fewer ranks")));
        }
        if recovery.elastic && lost {
            if !fall.lost_host {
                left -= 1;
            }
            let Some((layout, ranks)) = (run.replan)(left) else {
                return Err(end(&format!("\nthe {left} ranks that are left can form no layout")));
            };
            (carried.layout, world) = (Some(layout), ranks);
        }
        from = rewind(run, &mut carried, from, output);
        tracing::info!(target: "launch", restart, world, from, cause = %fall.cause, "restarting");
        Journal::note_restart(&run_dir, RestartRecord { after: from, cause: fall.cause.clone() })?;
        report(
            &Restart { restart, from, world, left, fall: &fall.cause, carried: &carried },
            output,
        );
        before = Some(without_reporter(&fall.cause).to_owned());
    }
}

/// Makes restarted ranks resume from the newest whole checkpoint; returns its iteration. Without one
/// the run starts where it started before, `from`.
fn rewind(run: &SupervisedRun<'_>, carried: &mut RestartState, from: u32, output: &Output) -> u32 {
    let mut newest = None;
    for folder in run.checkpoints {
        let Ok((found, skipped)) = Checkpoint::newest_whole(folder, run.iterations) else {
            continue;
        };
        for skipped in skipped {
            output.note(&format!("{} is left out: {}", skipped.path.display(), skipped.problem));
        }
        let later = |newest: &Checkpoint| newest.state().iteration < found.state().iteration;
        if newest.as_ref().is_none_or(later) {
            newest = Some(found);
        }
    }
    let Some(newest) = newest else { return from };
    carried.resume = Some(newest.path().to_owned());
    newest.state().iteration
}

/// A cause without the rank that reports it: several ranks may hit it, and any may report first.
fn without_reporter(cause: &str) -> &str {
    match cause.strip_prefix("rank ").and_then(|rest| rest.split_once([',', ':'])) {
        Some((_, rest)) => rest,
        None => cause,
    }
}

/// A restart to report.
struct Restart<'a> {
    restart: u32,
    from: u32,
    world: u32,
    left: u32,
    fall: &'a str,
    carried: &'a RestartState,
}

fn report(restart: &Restart<'_>, output: &Output) {
    let Restart { restart: number, from, world, left, fall, carried } = *restart;
    let since = match from {
        0 => "from where it began: it has no checkpoint yet".to_owned(),
        from => format!("after iteration {from}"),
    };
    let who = match &carried.layout {
        None => format!("all {world} ranks go on"),
        Some(layout) => format!("{left} ranks are left, {world} of them go on as {layout},"),
    };
    output.note(&format!("restart {number}: {fall}\n{who} {since}"));
    // Rank 0 notices closed output, and ends the run in good order.
    let _ = output.print_json(&RestartEvent {
        event: "restart",
        restart: number,
        cause: fall,
        iteration: from,
        ranks: world,
        layout: carried.layout.as_ref(),
    });
}

/// JSON event of a restart.
#[derive(Serialize)]
struct RestartEvent<'a> {
    event: &'static str,
    restart: u32,
    cause: &'a str,
    /// Number of iterations already done.
    iteration: u32,
    ranks: u32,
    /// Layout that replaces the requested one.
    #[serde(skip_serializing_if = "Option::is_none")]
    layout: Option<&'a Layout>,
}
