//! Journal of a run in progress, so that nothing is lost if rank 0 dies.
//!
//! `run.json` is written when ranks end. Killed ranks write nothing, and restarted ones know only
//! their own iterations. Each iteration and each restart is therefore a line of a file that
//! outlives them. It is removed once `run.json` contains all of it.

use super::run_dir::{IterationRecord, RestartRecord, RunDir};
use super::write;
use paceline_exec::regular;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};

/// Name of the file in the run's directory.
const NAME: &str = "iterations.jsonl";

/// Maximum size: a hundred million iterations.
const LARGEST: u64 = 16 << 30;

/// The journal of a run in progress.
#[derive(Debug)]
pub(crate) struct Journal(File);

/// Earlier attempts at the same run, as recorded in the journal.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct EarlierAttempts {
    /// Number of iterations done before the run began.
    pub before: u32,
    /// All later iterations that still count.
    pub iterations: Vec<IterationRecord>,
    /// Causes that ended the attempts, oldest first.
    pub restarts: Vec<RestartRecord>,
}

/// A line of the file.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    Iteration {
        iteration: u32,
        #[serde(flatten)]
        record: IterationRecord,
    },
    Restart(RestartRecord),
}

impl Journal {
    /// Removes the journal of a run whose `run.json` is written.
    pub(crate) fn clear(directory: &RunDir) {
        directory.remove(NAME);
    }

    /// Begins the journal of a run that continues after iteration `done` in the directory of its
    /// first part: it has that part's iterations up to there, from the journal of a run that was
    /// killed, or from the `run.json` of one that ended.
    pub(crate) fn resume(directory: &RunDir, done: u32) -> io::Result<()> {
        let mut past = Self::go_on(directory, done)?.1;
        if let (true, Some(record)) = (past.iterations.is_empty(), directory.past_record()) {
            past = EarlierAttempts {
                before: record.iterations_before,
                iterations: record.iterations,
                restarts: record.restarts,
            };
            past.forget_after(done);
        }
        if past.done() != done {
            // Iterations in between are unknown.
            past = EarlierAttempts { before: done, ..EarlierAttempts::default() };
        }
        let mut lines = Vec::new();
        let restarts = |after: u32| past.restarts.iter().filter(move |r| r.after == after);
        for (iteration, record) in (past.before + 1..).zip(&past.iterations) {
            lines.extend(restarts(iteration - 1).cloned().map(Line::Restart));
            lines.push(Line::Iteration { iteration, record: *record });
        }
        lines.extend(restarts(done).cloned().map(Line::Restart));
        let text = lines.iter().map(|line| Ok(serde_json::to_string(line)? + "\n"));
        let text = text.collect::<serde_json::Result<String>>()?;
        write(&directory.file(NAME), text.as_bytes())
    }

    /// Continues the journal of a run whose state is that after iteration `done`; also returns its
    /// contents up to there.
    pub(crate) fn go_on(directory: &RunDir, done: u32) -> io::Result<(Self, EarlierAttempts)> {
        let path = directory.file(NAME);
        let text = match regular::read(&path, LARGEST) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        if !text.is_empty() && !text.ends_with('\n') {
            // The writer was killed in the middle of a line.
            file.write_all(b"\n")?;
        }
        Ok((Self(file), EarlierAttempts::read(&text, done)))
    }

    /// Records an iteration. A full disk is reported only when the run's files are written; until
    /// then, training continues.
    pub(crate) fn note(&mut self, iteration: u32, record: &IterationRecord) {
        let _ = put(&mut self.0, &Line::Iteration { iteration, record: *record });
    }

    /// Records a restart, while no rank is running.
    pub(crate) fn note_restart(directory: &RunDir, restart: RestartRecord) -> io::Result<()> {
        let Self(mut file) = Self::go_on(directory, 0)?.0;
        put(&mut file, &Line::Restart(restart))
    }
}

/// Writes each line with one call, so that only the last can be torn.
fn put(file: &mut File, line: &Line) -> io::Result<()> {
    file.write_all(format!("{}\n", serde_json::to_string(line)?).as_bytes())
}

impl EarlierAttempts {
    fn read(text: &str, done: u32) -> Self {
        let mut past = Self { before: done, ..Self::default() };
        let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        for line in lines {
            match line {
                Line::Iteration { iteration, record } => {
                    if past.iterations.is_empty() {
                        past.before = iteration.saturating_sub(1);
                    }
                    if iteration == past.done() + 1 {
                        past.iterations.push(record);
                    }
                }
                Line::Restart(restart) => {
                    past.forget_after(restart.after);
                    past.restarts.push(restart);
                }
            }
        }
        past.forget_after(done);
        if past.iterations.is_empty() {
            past.before = done;
        }
        past
    }

    /// The last known iteration.
    pub(crate) fn done(&self) -> u32 {
        self.before + self.iterations.len() as u32
    }

    fn forget_after(&mut self, done: u32) {
        self.iterations.truncate(done.saturating_sub(self.before) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn iteration(number: u32) -> IterationRecord {
        let loss = Some(number as f32);
        IterationRecord { loss, grad_norm: None, seconds: 0.5, staleness: None }
    }

    fn restart(after: u32) -> RestartRecord {
        RestartRecord { after, cause: format!("rank 1 fell after {after}") }
    }

    #[test]
    fn what_was_done_again_counts_once_and_torn_lines_do_not() {
        let path = std::env::temp_dir().join(format!("paceline-journal-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        let directory = RunDir::existing(&path);
        Journal::clear(&directory);
        let (mut journal, past) = Journal::go_on(&directory, 4).unwrap();
        assert_eq!(past, EarlierAttempts { before: 4, ..EarlierAttempts::default() });
        (5..=9).for_each(|number| journal.note(number, &iteration(number)));
        journal.0.write_all(b"{\"iteration\":10,\"lo").unwrap();
        Journal::note_restart(&directory, restart(7)).unwrap();
        let (mut journal, past) = Journal::go_on(&directory, 7).unwrap();
        let expected = EarlierAttempts {
            before: 4,
            iterations: (5..=7).map(iteration).collect(),
            restarts: vec![restart(7)],
        };
        assert_eq!((&past, past.done()), (&expected, 7));
        (8..=12).for_each(|number| journal.note(number, &iteration(number)));
        let (_, past) = Journal::go_on(&directory, 12).unwrap();
        assert_eq!(past.iterations, (5..=12).map(iteration).collect::<Vec<_>>());

        // After a restart from the beginning no iteration counts, but the restart is recorded.
        Journal::note_restart(&directory, restart(0)).unwrap();
        let (_, past) = Journal::go_on(&directory, 4).unwrap();
        let restarts = vec![restart(7), restart(0)];
        assert_eq!(past, EarlierAttempts { before: 4, iterations: Vec::new(), restarts });
        fs::remove_dir_all(&path).unwrap();
    }
}
