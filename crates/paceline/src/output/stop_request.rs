//! Requests to stop: Ctrl-C (SIGINT), SIGTERM and SIGHUP.

use super::Output;
use crate::failure::Failure;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

/// Effect of a second request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Second {
    /// The process exits at once.
    Exits,
    /// It is counted; the caller decides.
    Counts,
}

/// Requests to stop that this process has received.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopRequest {
    flag: Arc<AtomicBool>,
    count: Arc<AtomicU32>,
    signal: Arc<AtomicI32>,
}

impl StopRequest {
    /// Starts to listen for requests.
    pub(crate) fn listen(second: Second) -> io::Result<Self> {
        let request = Self::default();
        let Self { flag, count, signal } = request.clone();
        let heeded = [SIGINT, SIGTERM, SIGHUP].into_iter();
        // `nohup` makes its command ignore the end of the terminal.
        let mut signals = Signals::new(heeded.filter(|s| *s != SIGHUP || !is_ignored(SIGHUP)))?;
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            for received in signals.forever() {
                signal.store(received, Ordering::Relaxed);
                let earlier = count.fetch_add(1, Ordering::Relaxed);
                flag.store(true, Ordering::Release);
                if earlier > 0 && second == Second::Exits {
                    std::process::exit(128 + received);
                }
            }
        })?;
        Ok(request)
    }

    /// Listens for requests, of which the second exits at once. If that is impossible, prints a note
    /// with the effect of Ctrl-C, `unheard`.
    pub(crate) fn listen_or_note(output: &Output, unheard: &str) -> Self {
        Self::listen(Second::Exits).unwrap_or_else(|error| {
            output.note(&format!("note: Ctrl-C will {unheard} ({error})"));
            Self::default()
        })
    }

    /// Flag that the first request sets.
    pub(crate) fn flag(&self) -> &Arc<AtomicBool> {
        &self.flag
    }

    /// Returns true if there was a request.
    pub(crate) fn is_made(&self) -> bool {
        self.flag.load(Ordering::Acquire)
    }

    /// Number of requests.
    pub(crate) fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// Failure of a command that the last request ended early.
    pub(crate) fn ended_early(&self) -> Failure {
        Failure::Signalled(self.signal.load(Ordering::Relaxed))
    }

    /// Failure of a command that has stopped in good order because of SIGTERM or SIGHUP, whose
    /// sender learns from the status that the command did not run to its end. After Ctrl-C the user
    /// knows.
    pub(crate) fn status(&self) -> Result<(), Failure> {
        match self.signal.load(Ordering::Relaxed) {
            0 | SIGINT => Ok(()),
            signal => Err(Failure::Signalled(signal)),
        }
    }
}

/// Returns true if this process was started with a signal ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}
