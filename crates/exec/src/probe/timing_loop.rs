//! Repetition of a timed computation, alone or synchronised with other ranks.

use super::{CachePrep, Conditions};
use crate::error::ExecError;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Keeps ranks busy together: all begin at once, and none stops while another still measures.
pub(super) struct TimingLoop {
    begin: Barrier,
    ranks: u32,
    done: AtomicU32,
}

/// Length of a batch, long compared with reading a clock.
const BATCH: Duration = Duration::from_micros(30);

/// Minimum number of batches for a median.
const FEWEST: usize = 3;

impl TimingLoop {
    pub(super) fn new(ranks: u32) -> Self {
        let begin = Barrier::new(ranks.max(1) as usize);
        Self { begin, ranks: ranks.max(1), done: AtomicU32::new(0) }
    }

    /// Median time of one run.
    pub(super) fn median(
        &self,
        conditions: &Conditions<'_>,
        mut before: impl FnMut(),
        mut run: impl FnMut() -> Result<(), ExecError>,
    ) -> Result<f64, ExecError> {
        // The first run pays for page faults, instruction misses and branch mispredictions; the
        // second determines the batch size.
        let ready = run();
        let (began, ready) = (Instant::now(), ready.and_then(|()| run()));
        let once = began.elapsed().max(Duration::from_nanos(1));
        self.begin.wait();
        let measured = match conditions.before {
            CachePrep::Warm => self.batches(conditions, once, &mut run),
            CachePrep::Flush(_) | CachePrep::Layers(..) => {
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

    /// Times runs one by one, each after its cache preparation. All ranks prepare at once and then
    /// run at once: a run during another rank's cache flush would not be representative. Every rank
    /// reaches the barrier equally often, whatever its runs return, so that none waits for a rank
    /// that has left.
    fn one_by_one(
        &self,
        what: CachePrep<'_>,
        before: &mut impl FnMut(),
        run: &mut impl FnMut() -> Result<(), ExecError>,
    ) -> Result<f64, ExecError> {
        let mut times = Vec::new();
        let mut well = Ok(());
        for number in 0..what.warmup_runs() + what.timed_runs() {
            before();
            self.begin.wait();
            let start = Instant::now();
            well = well.and_then(|()| run());
            if number >= what.warmup_runs() {
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
