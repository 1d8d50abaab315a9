//! What happens after a rank has failed: all ranks start anew from the newest checkpoint, or those
//! that are left go on in a smaller layout.
//!
//! Ranks are processes that begin from files, so nothing of a failed attempt has to be undone: a
//! checkpoint is complete or not there, and what a rank does depends on it and the plan alone. That
//! is why a run that was restarted ends with the same bits as one that was not.

use super::launcher::{Attempt, End, Interrupts, attempt};
use super::layout::Layout;
use super::place::{LAYOUT, RANK, RESUME};
use crate::failure::Failure;
use crate::flags::{Keeping, Launch};
use crate::output::{Journal, Output, RestartRecord, RunDir};
use anyhow::anyhow;
use paceline_exec::checkpoint::Checkpoint;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A run that the launcher sees to its end.
pub(crate) struct Run<'a> {
    /// How many ranks there are.
    pub world: u32,
    /// How they come to life.
    pub launch: &'a Launch,
    /// The run's directory.
    pub directory: &'a Path,
    /// Iterations of the whole run.
    pub iterations: u32,
    /// The largest layout for so many ranks, and how many of them it uses.
    pub replan: &'a dyn Fn(u32) -> Option<(Layout, u32)>,
}

/// What the launcher tells ranks that are not the first of their run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Carried {
    /// Where they go on from.
    pub resume: Option<PathBuf>,
    /// What they form instead of what was asked for.
    pub layout: Option<Layout>,
}

/// What this process was told by its launcher, if it has one.
pub(crate) fn carried() -> Result<Carried, Failure> {
    if std::env::var_os(RANK).is_none() {
        return Ok(Carried::default());
    }
    let layout = match std::env::var(LAYOUT) {
        Ok(text) => Some(serde_json::from_str(&text).map_err(|error| {
            let text = format!("{LAYOUT} is set, but not by a launcher of paceline: {error}");
            Failure::flag("--launch", text)
        })?),
        Err(_) => None,
    };
    Ok(Carried { resume: std::env::var_os(RESUME).map(PathBuf::from), layout })
}

/// Starts the ranks, again and again if that was asked for, until they are done.
pub(crate) fn run(run: &Run<'_>, output: &Output) -> Result<(), Failure> {
    let interrupts = Interrupts::count();
    let written = Written::since_now(&Keeping::folder(run.directory));
    let directory = RunDir::existing(run.directory);
    Journal::clear(&directory);
    let recovery = run.launch.recovery;
    let (mut world, mut left) = (run.world, run.world);
    let mut carried = Carried::default();
    let mut before: Option<String> = None;
    for restart in 1.. {
        let started = Attempt { world, launch: run.launch, directory: run.directory };
        let fall = match attempt(&started, &carried, &interrupts) {
            Ok(()) => return Ok(()),
            Err(End::Interrupted) => return Err(Failure::Interrupted),
            Err(End::Failed(fall)) => fall,
        };
        let again = fall.said_itself && before.as_deref() == Some(whoever(&fall.cause));
        let end = |why: &str| Failure::Run(anyhow!("{}{why}{}", fall.cause, fall.hint));
        if recovery.most == 0 || fall.wrong_input || interrupts.any() {
            return Err(end(""));
        }
        if again {
            // Bits do not change from one time to the next, so neither would this.
            return Err(end("\nit was the same before the restart: another would not help"));
        }
        if restart > recovery.most {
            return Err(end(&format!("\nafter {} restarts", recovery.most)));
        }
        // A rank that says itself why it cannot go on is not lost.
        if recovery.elastic && !fall.said_itself {
            left -= 1;
            let Some((layout, ranks)) = (run.replan)(left) else {
                return Err(end(&format!("\nthe {left} ranks that are left can form no layout")));
            };
            (carried.layout, world) = (Some(layout), ranks);
        }
        let newest = written.newest(run.iterations);
        let from = newest.as_ref().map_or(0, |(iteration, _)| *iteration);
        carried.resume = newest.map(|(_, path)| path);
        Journal::note_restart(
            &directory,
            RestartRecord { after: from, cause: fall.cause.clone() },
        )?;
        tell(&Restart { restart, from, world, left, fall: &fall.cause, carried: &carried }, output);
        before = Some(whoever(&fall.cause).to_owned());
    }
    unreachable!("restarts are bounded")
}

/// A cause without the rank that tells it: several may meet the same one, and any may be the first.
fn whoever(cause: &str) -> &str {
    match cause.strip_prefix("rank ").and_then(|rest| rest.split_once([',', ':'])) {
        Some((_, rest)) => rest,
        None => cause,
    }
}

/// What people and programs hear of a restart.
struct Restart<'a> {
    restart: u32,
    from: u32,
    world: u32,
    left: u32,
    fall: &'a str,
    carried: &'a Carried,
}

fn tell(restart: &Restart<'_>, output: &Output) {
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
    // Whoever has stopped reading is found out by rank 0, which ends the run in good order.
    let _ = output.object(&RestartEvent {
        event: "restart",
        restart: number,
        cause: fall,
        iteration: from,
        ranks: world,
        layout: carried.layout.as_ref(),
    });
}

/// A restart, for programs.
#[derive(Serialize)]
struct RestartEvent<'a> {
    event: &'static str,
    restart: u32,
    cause: &'a str,
    /// Iterations that are behind it.
    iteration: u32,
    ranks: u32,
    /// What replaces the layout that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    layout: Option<&'a Layout>,
}

/// The checkpoints that a run itself has written: a directory may hold those of another.
struct Written {
    folder: PathBuf,
    others: BTreeMap<PathBuf, Option<SystemTime>>,
}

impl Written {
    fn since_now(folder: &Path) -> Self {
        let others = Checkpoint::all(folder).into_iter().map(|(_, path)| {
            let since = made(&path);
            (path, since)
        });
        Self { others: others.collect(), folder: folder.to_owned() }
    }

    /// The newest that leaves something to do.
    fn newest(&self, iterations: u32) -> Option<(u32, PathBuf)> {
        let own = |path: &PathBuf| self.others.get(path).is_none_or(|since| *since != made(path));
        let mut all = Checkpoint::all(&self.folder).into_iter().rev();
        all.find(|(iteration, path)| *iteration < iterations && own(path))
    }
}

/// When a checkpoint got its name.
fn made(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|data| data.modified()).ok()
}
