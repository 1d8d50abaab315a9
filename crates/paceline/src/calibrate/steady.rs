//! Measuring while the machine is as it usually is.
//!
//! The host of a virtual machine moves its cores about. While they do not share a cache, exchanges between them take up
//! to three times as long (ADR 18; computations of one thread do not care), and while they are halves of one core,
//! everything takes longer: a table that mixes them describes a machine that never was. So exchanges that were measured
//! while the cores were not as far apart as they usually are, are measured again.

use super::Request;
use crate::failure::Failure;
use paceline_exec::probe;
use paceline_plan::units::Seconds;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Looks that differ by less than this factor count as the same.
const ALIKE: f64 = 1.25;

/// How long to wait between two looks.
const PAUSE: Duration = Duration::from_millis(20);

/// Watches how far the cores are apart.
pub(super) struct Steady<'a> {
    stop: &'a AtomicBool,
    seen: RefCell<Seen>,
    /// What was usual when somebody last asked.
    asked: Cell<Seconds>,
    /// How much time there is for waiting, and for measuring again.
    patience: Cell<Duration>,
    /// Measurements that were kept although the cores were elsewhere.
    elsewhere: Cell<u32>,
}

/// For how long cores were how far apart.
#[derive(Debug, Default)]
struct Seen {
    /// Seconds, by the logarithm of the distance.
    lasted: BTreeMap<i32, f64>,
    /// The look before.
    last: Option<Instant>,
}

impl Seen {
    /// Takes the cores to have been so far apart since the look before.
    fn add(&mut self, apart: f64, now: Instant) {
        let lasted = self.last.replace(now).map_or(0.0, |last| (now - last).as_secs_f64());
        *self.lasted.entry((apart.ln() / ALIKE.ln()).round() as i32).or_default() += lasted;
    }

    /// How far they were apart half of the time, or less.
    fn usual(&self) -> Option<f64> {
        let half = self.lasted.values().sum::<f64>() / 2.0;
        let mut sum = 0.0;
        let usual = self.lasted.iter().find(|(_, lasted)| {
            sum += *lasted;
            sum >= half
        });
        usual.map(|(&power, _)| ALIKE.powi(power))
    }
}

impl<'a> Steady<'a> {
    /// Looks for a moment.
    pub(super) fn new(request: &Request, stop: &'a AtomicBool) -> Self {
        let looks = if request.quick { 20 } else { 150 };
        let patience = Cell::new(Duration::from_secs(if request.quick { 20 } else { 180 }));
        let (seen, asked, elsewhere) = (RefCell::default(), Cell::new(Seconds::ZERO), Cell::new(0));
        let steady = Self { stop, seen, asked, patience, elsewhere };
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

    /// How long a word usually takes from one core to another and back; none if there is but one.
    pub(super) fn apart(&self) -> Option<Seconds> {
        self.seen.borrow().usual().map(Seconds)
    }

    /// Whether other distances are usual now than in the beginning, or when this was last asked: all that was
    /// measured before is of another machine.
    pub(super) fn has_changed(&self) -> bool {
        let usual = self.apart().unwrap_or(Seconds::ZERO);
        probe::were_moved(usual, self.asked.replace(usual))
    }

    /// How many measurements were kept although the cores were elsewhere: there was no more time to wait.
    pub(super) fn elsewhere(&self) -> u32 {
        self.elsewhere.get()
    }

    /// Measures something, and again if the cores were elsewhere before it or after; in the end, as they are.
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
                self.elsewhere.set(self.elsewhere.get() + u32::from(!usual));
                return Ok(measured);
            }
        }
    }

    fn is_usual(&self) -> bool {
        let Some(now) = probe::apart() else { return true };
        let mut seen = self.seen.borrow_mut();
        seen.add(now.0, Instant::now());
        !probe::were_moved(now, seen.usual().map_or(now, Seconds))
    }

    fn may_spend(&self, time: Duration) -> bool {
        let left = self.patience.get().checked_sub(time);
        self.patience.set(left.unwrap_or(Duration::ZERO));
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
        // Many looks in a moment, and few in a long time.
        let near = [5e-8, 5.2e-8].map(|apart| (apart, 4000));
        let far = (1..=100).map(|at| (3.1e-7, at));
        for (apart, at) in far.chain(near).chain([(2.7e-8, 4001)]) {
            seen.add(apart, start + Duration::from_millis(at));
        }
        let usual = seen.usual().unwrap();
        assert!((usual / 5e-8).ln().abs() < ALIKE.ln() / 2.0, "{usual}");
    }
}
