//! Progress display of a run.

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// Progress of a run on standard error: a bar that is redrawn on a terminal, a few plain lines
/// elsewhere.
pub(crate) struct Progress {
    bar: ProgressBar,
    terminal: bool,
    total: u32,
    floor: Option<f64>,
    unit: &'static str,
    before: u32,
    started: Instant,
    /// End of the first iteration, which also pays for the start.
    first_end: Cell<Option<Instant>>,
    /// Time of the last plain line.
    told: Cell<Instant>,
}

/// Minimum number of plain lines for a whole run.
const PLAIN_LINES: u32 = 10;

/// Maximum time between two plain lines.
const PLAIN_EVERY: Duration = Duration::from_secs(10);

impl Progress {
    /// Progress of a run of `total` iterations, of which `before` are done. The loss cannot fall
    /// below `floor`, and rates are in `unit` per second.
    pub(crate) fn new(before: u32, total: u32, floor: Option<f64>, unit: &'static str) -> Self {
        let terminal = io::stderr().is_terminal();
        let bar = if terminal { ProgressBar::new(total.into()) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{pos}/{len} {bar:16} {msg}");
        if let Ok(style) = style {
            bar.set_style(style.progress_chars("━╸─"));
        }
        bar.set_position(before.into());
        let now = Instant::now();
        let (first_end, told) = (Cell::new(None), Cell::new(now));
        Self { bar, terminal, total, floor, unit, before, started: now, first_end, told }
    }

    /// Shows a finished iteration, and the tokens that experts dropped in it.
    pub(crate) fn advance(
        &self,
        iteration: u32,
        loss: f32,
        tokens_per_s: f64,
        dropped: Option<u64>,
    ) {
        let floor = match self.floor {
            Some(floor) => format!(" (floor {floor:.3})"),
            None => String::new(),
        };
        let rate = thousands(tokens_per_s);
        let mut message = format!("loss {loss:.4}{floor}  {rate} {}/s", self.unit);
        if let Some(dropped) = dropped {
            message += &format!("  {dropped} dropped");
        }
        let (done, rest) = (iteration - self.before, self.total.saturating_sub(iteration));
        let first_end = self.first_end.get().unwrap_or_else(|| {
            self.first_end.set(Some(Instant::now()));
            Instant::now()
        });
        let left = time_left(done, self.started.elapsed(), first_end.elapsed(), rest);
        let left = HumanDuration(Duration::from_secs(left.as_secs()));
        message += &format!("  {left:#} left");
        if self.terminal {
            self.bar.set_position(iteration.into());
            self.bar.set_message(message);
            return;
        }
        let every = self.total.div_ceil(PLAIN_LINES).max(1);
        if iteration == self.before + 1
            || self.told.get().elapsed() >= PLAIN_EVERY
            || iteration.is_multiple_of(every)
            || iteration == self.total
        {
            let total = self.total;
            self.told.set(Instant::now());
            let _ = writeln!(io::stderr(), "iteration {iteration}/{total}  {message}");
        }
    }

    /// Clears the bar at the end of the run.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Estimated time for `rest` iterations after `done`, of which all but the first took
/// `since_first`: the first also pays for the start of ranks and for cold caches.
fn time_left(done: u32, since_start: Duration, since_first: Duration, rest: u32) -> Duration {
    match done {
        0 | 1 => since_start * rest,
        more => since_first * rest / (more - 1),
    }
}

/// Formats a rate with about three digits: 941, 12.3k, 4.56M.
pub(crate) fn thousands(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{:.2}M", v / 1e6),
        v if v >= 1e4 => format!("{:.1}k", v / 1e3),
        v => format!("{v:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After a twentieth of a run the estimate is right although the start took as long as ten
    /// iterations.
    #[test]
    fn the_start_does_not_count_for_every_iteration() {
        let (start, each) = (Duration::from_millis(1000), Duration::from_millis(100));
        let left = |done: u32| {
            let since_first = each * (done - 1);
            time_left(done, start + since_first, since_first, 100 - done)
        };
        assert_eq!(left(5), each * 95);
        assert_eq!(left(50), each * 50);
        assert_eq!(left(1), start * 99);
    }
}
