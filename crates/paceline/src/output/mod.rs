//! Where results go: lines for people, lines of JSON, files.

mod atomic;
mod interrupt;
mod journal;
mod progress;
mod run_dir;

pub(crate) use atomic::write;
pub(crate) use interrupt::stop_on_interrupt;
pub(crate) use journal::{Journal, Past};
pub(crate) use progress::Progress;
pub(crate) use run_dir::{
    IterationRecord, MemoryRecord, ModelRecord, RestartRecord, RunDir, RunRecord, StalenessRecord,
};

use serde::Serialize;
use std::io::{self, Write};

/// A command's voice. With `--json`, standard output has one object per line and nothing else; what
/// is for people then goes to standard error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    /// A voice for people, or for programs.
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Whether programs listen.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// A result for people, with its last line ended.
    pub(crate) fn people(&self, text: &str) -> io::Result<()> {
        if self.json { put(&mut io::stderr(), text) } else { put(&mut io::stdout(), text) }
    }

    /// A result that is itself a text format, for whoever asked for it.
    pub(crate) fn raw(&self, text: &str) -> io::Result<()> {
        put(&mut io::stdout(), text)
    }

    /// One object for programs; nothing where people listen.
    pub(crate) fn object(&self, value: &impl Serialize) -> io::Result<()> {
        if !self.json {
            return Ok(());
        }
        put(&mut io::stdout(), &serde_json::to_string(value)?)
    }

    /// Something beside the result: never mixed into it. A closed standard error loses it.
    pub(crate) fn note(&self, text: &str) {
        let _ = put(&mut io::stderr(), text);
    }
}

fn put(stream: &mut dyn Write, text: &str) -> io::Result<()> {
    stream.write_all(text.as_bytes())?;
    if !text.is_empty() && !text.ends_with('\n') {
        stream.write_all(b"\n")?;
    }
    stream.flush()
}
