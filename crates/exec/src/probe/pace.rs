//! How often to repeat a computation, alone or in step with others.

use super::{Before, Conditions};
use crate::error::ExecError;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Keeps ranks at work together: all begin at once, and none stops while another still measures.
pub(super) struct Pace {
    begin: Barrier,
    ranks: u32,
    done: AtomicU32,
}

/// A batch is long against what reading a clock takes.
const BATCH: Duration = Duration::from_micros(30);

/// Batches without which there is no median.
const FEWEST: usize = 3;

impl Pace {
    pub(super) fn new(ranks: u32) -> Self {
        let begin = Barrier::new(ranks.max(1) as usize);
        Self { begin, ranks: ranks.max(1), done: AtomicU32::new(0) }
    }

    /// The median time of one run.
    pub(super) fn median(
        &self,
        conditions: &Conditions<'_>,
        mut before: impl FnMut(),
        mut run: impl FnMut() -> Result<(), ExecError>,
    ) -> Result<f64, ExecError> {
        // The first run pays for pages, instructions and branches that no later one pays for; the
        // second says how many make a batch.
        let ready = run();
        let (began, ready) = (Instant::now(), ready.and_then(|()| run()));
        let once = began.elapsed().max(Duration::from_nanos(1));
        self.begin.wait();
        let measured = match conditions.before {
            Before::Nothing => self.batches(conditions, once, &mut run),
            Before::Sweep(_) | Before::Layers(..) => {
                self.one_by_one(conditions.before, &mut before, &mut run)
            }
        };
        let measured = ready.and(measured);
        self.done.fetch_add(1, Ordering::Relaxed);
        while measured.is_ok() && self.done.load(Ordering::Relaxed) < self.ranks {
            run()?;
        }
        measured
    }

    /// Runs one by one, each after what comes before it. All ranks do that at once and then run at once: a
    /// run beside another rank's sweep would be that of a stranger machine. So that none waits for one
    /// that has left, every rank meets the others as often, whatever its runs say.
    fn one_by_one(
        &self,
        what: Before<'_>,
        before: &mut impl FnMut(),
        run: &mut impl FnMut() -> Result<(), ExecError>,
    ) -> Result<f64, ExecError> {
        let mut times = Vec::new();
        let mut well = Ok(());
        for number in 0..what.settles() + what.runs() {
            before();
            self.begin.wait();
            let start = Instant::now();
            well = well.and_then(|()| run());
            if number >= what.settles() {
                times.push(start.elapsed().as_secs_f64());
            }
        }
        times.sort_unstable_by(f64::total_cmp);
        well.map(|()| times[times.len() / 2])
    }

    fn batches(
        &self,
        conditions: &Conditions<'_>,
        once: Duration,
        run: &mut impl FnMut() -> Result<(), ExecError>,
    ) -> Result<f64, ExecError> {
        let batch = BATCH.as_nanos().div_ceil(once.as_nanos()).clamp(1, 1000) as u32;
        let mut times = Vec::new();
        let began = Instant::now();
        while times.len() < FEWEST || began.elapsed() < conditions.effort {
            let start = Instant::now();
            for _ in 0..batch {
                run()?;
            }
            times.push(start.elapsed().as_secs_f64() / f64::from(batch));
            if conditions.stop.load(Ordering::Relaxed) {
                break;
            }
        }
        times.sort_unstable_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}
