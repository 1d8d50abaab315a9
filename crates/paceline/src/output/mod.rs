//! Output of results: text, JSON lines and files.

mod atomic;
mod escape;
mod journal;
mod lock;
mod progress;
mod run_dir;
mod stop_request;
mod subject;

pub(crate) use atomic::write;
pub(crate) use escape::escaped;
pub(crate) use journal::{EarlierAttempts, Journal};
pub(crate) use progress::Progress;
pub(crate) use run_dir::{
    Existing, IterationRecord, MemoryRecord, ModelRecord, RestartRecord, RunDir, RunRecord,
    StalenessRecord, median,
};
pub(crate) use stop_request::{Second, StopRequest};
pub(crate) use subject::{Place, StrategyRecord, Subject};

use serde::Serialize;
use std::io::{self, Write};

/// Output of a command. With `--json`, standard output has one object per line and nothing else;
/// text for the user then goes to standard error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    /// Creates an output of text, or of JSON.
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Returns true if the output is JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Prints a result as text, with a final newline.
    pub(crate) fn print(&self, text: &str) -> io::Result<()> {
        let text = &escaped(text);
        if self.json { put(&mut io::stderr(), text) } else { put(&mut io::stdout(), text) }
    }

    /// Prints a result that is itself in a text format to standard output.
    pub(crate) fn raw(&self, text: &str) -> io::Result<()> {
        put(&mut io::stdout(), text)
    }

    /// Prints one JSON object; nothing in text mode.
    pub(crate) fn print_json(&self, value: &impl Serialize) -> io::Result<()> {
        if !self.json {
            return Ok(());
        }
        put(&mut io::stdout(), &serde_json::to_string(value)?)
    }

    /// Result of printing, except that a reader that has gone is no failure: a run goes on.
    pub(crate) fn unless_closed(printed: io::Result<()>) -> io::Result<()> {
        printed.or_else(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => Ok(()),
            _ => Err(error),
        })
    }

    /// Prints a note to standard error, separate from the result; it is lost if that is closed.
    pub(crate) fn note(&self, text: &str) {
        let _ = put(&mut io::stderr(), &escaped(text));
    }
}

fn put(stream: &mut dyn Write, text: &str) -> io::Result<()> {
    stream.write_all(text.as_bytes())?;
    if !text.is_empty() && !text.ends_with('\n') {
        stream.write_all(b"\n")?;
    }
    stream.flush()
}
