//! Lines that ranks of other hosts write: shown with their origin, and kept in a log for each rank.

use super::rank_process::CAUSE;
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Lines of all ranks of an attempt.
pub(super) struct Lines {
    folder: PathBuf,
    logs: Vec<Option<File>>,
    /// True if standard error is a terminal, on which rank 0's progress is one line that changes.
    terminal: bool,
    /// True if that line is shown now.
    live: bool,
}

/// Start of the lines in which rank 0 reports its progress.
const PROGRESS: &str = "iteration ";

impl Lines {
    /// Lines of a run in `directory`, with their logs in `logs`.
    pub(super) fn new(directory: &Path) -> io::Result<Self> {
        let folder = directory.join("logs");
        std::fs::create_dir_all(&folder)?;
        let terminal = io::stderr().is_terminal();
        Ok(Self { folder, logs: Vec::new(), terminal, live: false })
    }

    /// Shows a line: rank 0 speaks for all, the others are named. A log that cannot be written, and a
    /// closed output, do not end the run.
    pub(super) fn show(&mut self, rank: u32, host: &str, error: bool, text: &str) {
        self.log(rank, text);
        match (rank, error) {
            // Every rank gives its cause; the launcher shows the first one.
            (_, true) if text.starts_with(CAUSE) => {}
            (0, false) => drop(writeln!(io::stdout(), "{text}")),
            (0, true) if self.terminal && text.starts_with(PROGRESS) => {
                let _ = write!(io::stderr(), "\r\x1b[2K{text}");
                self.live = true;
            }
            (0, true) => self.tell(text),
            _ => self.tell(&format!("[rank {rank} on {host}] {text}")),
        }
    }

    fn tell(&mut self, text: &str) {
        let clear = if std::mem::take(&mut self.live) { "\r\x1b[2K" } else { "" };
        let _ = writeln!(io::stderr(), "{clear}{text}");
    }

    fn log(&mut self, rank: u32, text: &str) {
        let at = rank as usize;
        if self.logs.len() <= at {
            self.logs.resize_with(at + 1, || None);
        }
        if self.logs[at].is_none() {
            let path = self.folder.join(format!("rank-{rank}.log"));
            self.logs[at] = OpenOptions::new().create(true).append(true).open(path).ok();
        }
        if let Some(log) = &mut self.logs[at] {
            let _ = writeln!(log, "{text}");
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        if self.live {
            let _ = writeln!(io::stderr());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_a_log() {
        let directory = paceline_exec::private::temporary_directory("paceline-lines").unwrap();
        let mut lines = Lines::new(&directory).unwrap();
        lines.log(1, "first");
        lines.log(1, "second");
        let read =
            |rank: u32| std::fs::read_to_string(directory.join(format!("logs/rank-{rank}.log")));
        assert_eq!(read(1).unwrap(), "first\nsecond\n");
        assert!(read(0).is_err());
        std::fs::remove_dir_all(directory).unwrap();
    }
}
