//! Measures while the host places the cores as usual.
//!
//! The host of a virtual machine migrates its cores. Exchanges between cores that do not share a
//! cache take up to three times as long (ADR 18); single-threaded computations are unaffected.
//! While two cores are hyperthreads of one physical core, everything is slower. A table that mixes
//! these states describes no real machine. Exchanges measured while the core round trip was unusual
//! are therefore measured again.

use super::Request;
use crate::failure::Failure;
use paceline_exec::probe;
use paceline_plan::units::Seconds;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Core round trips within this factor count as the same placement.
const SAME_PLACEMENT: f64 = 1.25;

/// Time between two samples of the core round trip.
const PAUSE: Duration = Duration::from_millis(20);

/// Monitors the core round trip.
pub(super) struct PlacementMonitor<'a> {
    stop: &'a AtomicBool,
    seen: RefCell<Seen>,
    /// The usual core round trip at the last call of `has_changed`.
    asked: Cell<Seconds>,
    /// Time left for waiting and for repeating measurements.
    timeout: Cell<Duration>,
    /// Number of measurements kept although the cores were placed unusually.
    off_placement: Cell<u32>,
}

/// Histogram of the core round trip, weighted by time.
#[derive(Debug, Default)]
struct Seen {
    /// Seconds, by the logarithm of the core round trip.
    lasted: BTreeMap<i32, f64>,
    /// Time of the previous sample.
    last: Option<Instant>,
}

impl Seen {
    /// Adds a sample: the core round trip was `apart` since the previous sample.
    fn add(&mut self, apart: f64, now: Instant) {
        let lasted = self.last.replace(now).map_or(0.0, |last| (now - last).as_secs_f64());
        *self.lasted.entry((apart.ln() / SAME_PLACEMENT.ln()).round() as i32).or_default() +=
            lasted;
    }

    /// The time-weighted median of the core round trip.
    fn usual(&self) -> Option<f64> {
        let half = self.lasted.values().sum::<f64>() / 2.0;
        let mut sum = 0.0;
        let usual = self.lasted.iter().find(|(_, lasted)| {
            sum += *lasted;
            sum >= half
        });
        usual.map(|(&power, _)| SAME_PLACEMENT.powi(power))
    }
}

impl<'a> PlacementMonitor<'a> {
    /// Starts monitoring with a short series of samples.
    pub(super) fn new(request: &Request, stop: &'a AtomicBool) -> Self {
        let looks = if request.quick { 20 } else { 150 };
        let timeout = Cell::new(Duration::from_secs(if request.quick { 20 } else { 180 }));
        let (seen, asked, elsewhere) = (RefCell::default(), Cell::new(Seconds::ZERO), Cell::new(0));
        let steady = Self { stop, seen, asked, timeout, off_placement: elsewhere };
        for _ in 0..looks {
            steady.is_usual();
            if stop.load(Ordering::Relaxed) {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        steady.has_changed();
        steady
    }

    /// The usual core round trip; `None` if there is only one core.
    pub(super) fn core_round_trip(&self) -> Option<Seconds> {
        self.seen.borrow().usual().map(Seconds)
    }

    /// Returns true if the usual core round trip has changed since the start or since the last
    /// call. All earlier measurements then describe another placement.
    pub(super) fn has_changed(&self) -> bool {
        let usual = self.core_round_trip().unwrap_or(Seconds::ZERO);
        probe::cores_migrated(usual, self.asked.replace(usual))
    }

    /// Number of measurements kept with unusual core placement because no time was left to wait.
    pub(super) fn off_placement(&self) -> u32 {
        self.off_placement.get()
    }

    /// Runs `measure`, and repeats it while the core placement is unusual and time is left.
    pub(super) fn measure<T>(
        &self,
        mut measure: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        loop {
            let mut usual = self.is_usual();
            while !usual && self.may_spend(PAUSE) {
                std::thread::sleep(PAUSE);
                usual = self.is_usual();
            }
            let began = Instant::now();
            let measured = measure()?;
            usual &= self.is_usual();
            if usual || !self.may_spend(began.elapsed()) {
                self.off_placement.set(self.off_placement.get() + u32::from(!usual));
                return Ok(measured);
            }
        }
    }

    fn is_usual(&self) -> bool {
        let Some(now) = probe::core_round_trip() else { return true };
        let mut seen = self.seen.borrow_mut();
        seen.add(now.0, Instant::now());
        !probe::cores_migrated(now, seen.usual().map_or(now, Seconds))
    }

    fn may_spend(&self, time: Duration) -> bool {
        let left = self.timeout.get().checked_sub(time);
        self.timeout.set(left.unwrap_or(Duration::ZERO));
        left.is_some() && !self.stop.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lasts_is_usual() {
        let (mut seen, start) = (Seen::default(), Instant::now());
        assert_eq!(seen.usual(), None);
        // Many samples in a short time, and few in a long time.
        let near = [5e-8, 5.2e-8].map(|apart| (apart, 4000));
        let far = (1..=100).map(|at| (3.1e-7, at));
        for (apart, at) in far.chain(near).chain([(2.7e-8, 4001)]) {
            seen.add(apart, start + Duration::from_millis(at));
        }
        let usual = seen.usual().unwrap();
        assert!((usual / 5e-8).ln().abs() < SAME_PLACEMENT.ln() / 2.0, "{usual}");
    }
}
