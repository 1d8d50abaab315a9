//! Requests to stop: Ctrl-C (SIGINT), SIGTERM, SIGHUP, and SIGUSR1 by which schedulers announce a time
//! limit.

use super::Output;
use crate::failure::Failure;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

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
    /// The first signal, which is why the run stops.
    first: Arc<AtomicI32>,
    /// The last one.
    last: Arc<AtomicI32>,
}

impl StopRequest {
    /// Starts to listen for requests.
    pub(crate) fn listen(second: Second) -> io::Result<Self> {
        let request = Self::default();
        let Self { flag, count, first, last } = request.clone();
        let heeded = [SIGINT, SIGTERM, SIGHUP, SIGUSR1].into_iter();
        // `nohup` makes its command ignore the end of the terminal.
        let mut signals = Signals::new(heeded.filter(|s| *s != SIGHUP || !is_ignored(SIGHUP)))?;
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            let mut requests = Requests::default();
            for received in signals.forever() {
                last.store(received, Ordering::Relaxed);
                let _ = first.compare_exchange(0, received, Ordering::Relaxed, Ordering::Relaxed);
                let made = requests.with(received, Instant::now());
                count.store(made, Ordering::Relaxed);
                flag.store(true, Ordering::Release);
                if made > 1 && second == Second::Exits {
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
        Failure::Signalled(self.last.load(Ordering::Relaxed))
    }

    /// Failure of a command that has stopped in good order because of SIGTERM, SIGHUP or SIGUSR1,
    /// whose sender learns from the status that the command did not run to its end. After Ctrl-C the
    /// user knows.
    pub(crate) fn status(&self) -> Result<(), Failure> {
        match self.first.load(Ordering::Relaxed) {
            0 | SIGINT => Ok(()),
            signal => Err(Failure::Signalled(signal)),
        }
    }
}

/// Time within which SIGTERM and SIGHUP repeat one request: a scheduler signals a launcher and its
/// ranks, and the launcher passes the signal on.
const ONE_REQUEST: Duration = Duration::from_secs(1);

/// Signals counted as requests.
#[derive(Default)]
struct Requests {
    made: u32,
    /// Time of the first signal that is more than an announcement.
    urgent: Option<Instant>,
}

impl Requests {
    /// Number of requests once `signal` has come. SIGUSR1 announces an end that SIGTERM may repeat
    /// later; every Ctrl-C after the first is a further request.
    fn with(&mut self, signal: i32, now: Instant) -> u32 {
        let is_further = match (signal, self.urgent) {
            (SIGUSR1, _) => false,
            (SIGINT, _) => true,
            (_, None) => false,
            (_, Some(first)) => now.duration_since(first) >= ONE_REQUEST,
        };
        if signal != SIGUSR1 {
            self.urgent.get_or_insert(now);
        }
        self.made = if is_further { self.made + 1 } else { self.made.max(1) };
        self.made
    }
}

/// Returns true if this process was started with a signal ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of requests after each of the signals, at the given times in milliseconds.
    fn counted(signals: &[(i32, u64)]) -> Vec<u32> {
        let began = Instant::now();
        let mut requests = Requests::default();
        let count =
            |(signal, at): &(i32, u64)| requests.with(*signal, began + Duration::from_millis(*at));
        signals.iter().map(count).collect()
    }

    #[test]
    fn schedulers_may_repeat_a_request_and_users_mean_a_second_one() {
        assert_eq!(counted(&[(SIGINT, 0), (SIGINT, 1)]), [1, 2]);
        assert_eq!(counted(&[(SIGTERM, 0), (SIGHUP, 5), (SIGTERM, 999)]), [1, 1, 1]);
        assert_eq!(counted(&[(SIGTERM, 0), (SIGTERM, 1000)]), [1, 2]);
        assert_eq!(counted(&[(SIGUSR1, 0), (SIGUSR1, 5000), (SIGTERM, 9000)]), [1, 1, 1]);
        assert_eq!(counted(&[(SIGUSR1, 0), (SIGINT, 5000)]), [1, 2]);
        assert_eq!(counted(&[(SIGINT, 0), (SIGTERM, 2000)]), [1, 2]);
    }
}
