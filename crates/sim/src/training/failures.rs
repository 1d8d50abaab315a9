//! Effect of failures and checkpoints on training time.
//!
//! The model is that of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
//! restart dumps", Future Generation Computer Systems 22 (2006), pages 303–312. Failures occur at
//! random with a mean time M between them, independent of what the job is doing. The job computes
//! for τ, then writes a checkpoint for δ, and repeats. A failure sets it back to the last completed
//! checkpoint, after a restart of R that may itself fail. The time in which the job computes for T
//! is then
//!
//! ```text
//! M · e^(R/M) · (e^((τ+δ)/M) − 1) · T/τ
//! ```
//!
//! and *goodput* is T over that.

use paceline_plan::units::Seconds;
use serde::Serialize;

/// Failure rate of the whole job, and its checkpoint and restart times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checkpointing {
    /// Mean time between failures of the job, M: one device's divided by the device count.
    pub mtbf: Seconds,
    /// Time to write a checkpoint, δ, during which nothing is computed.
    pub checkpoint: Seconds,
    /// Time from a failure until compute resumes, R.
    pub restart: Seconds,
}

/// Goodput at a given checkpoint interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Failures {
    /// Compute time between two checkpoints, τ.
    pub interval: Seconds,
    /// Fraction of the time in which the job makes progress.
    pub goodput: f64,
}

impl Checkpointing {
    /// Creates a job on `devices` devices, each of which fails after `mtbf_of_one` on average.
    pub fn of_devices(
        mtbf_of_one: Seconds,
        devices: u64,
        checkpoint: Seconds,
        restart: Seconds,
    ) -> Self {
        Self { mtbf: Seconds(mtbf_of_one.0 / devices.max(1) as f64), checkpoint, restart }
    }

    /// Goodput with a checkpoint after every `interval` of compute.
    pub fn at(&self, interval: Seconds) -> Failures {
        Failures { interval, goodput: self.goodput(interval) }
    }

    /// Returns the best interval in whole iterations, and its goodput.
    ///
    /// Goodput has a single maximum, so only the two integers next to it can be optimal.
    pub fn best_in_iterations(&self, iteration: Seconds) -> (u64, Failures) {
        let ideal = self.best_interval().0 / iteration.0;
        // The cast saturates and maps NaN to zero.
        let below = (ideal.floor() as u64).max(1);
        let at = |iterations: u64| self.at(Seconds(iterations as f64 * iteration.0));
        let above = below.saturating_add(1);
        let (less, more) = (at(below), at(above));
        if more.goodput > less.goodput { (above, more) } else { (below, less) }
    }

    /// Interval with the largest goodput.
    ///
    /// To first order it is √(2δM) (Young, Communications of the ACM 17, 1974). Daly's higher-order
    /// estimate expands the optimum of that cost in √(δ/2M). From there a few Newton steps lead to
    /// the exact optimum, where e^((τ+δ)/M) · (1 − τ/M) = 1. It does not depend on the restart
    /// time.
    pub fn best_interval(&self) -> Seconds {
        let (m, d) = (self.mtbf.0, self.checkpoint.0);
        if !(m > 0.0 && d > 0.0) {
            return Seconds::ZERO;
        }
        let mut tau = daly_37(m, d);
        // In x = τ/M the condition is x + δ/M + ln(1 − x) = 0, with a slope of −x/(1 − x). Since x
        // is below 1, 1 − x is above e^(−1−δ/M).
        let most = -(-1.0 - d / m).exp_m1();
        for _ in 0..8 {
            let x = (tau / m).min(most).max(f64::MIN_POSITIVE);
            let value = x + d / m + (-x).ln_1p();
            let next = x + value * (1.0 - x) / x;
            if !(next > 0.0 && next < 1.0) {
                break;
            }
            tau = next * m;
        }
        Seconds(tau)
    }

    fn goodput(&self, interval: Seconds) -> f64 {
        let (m, tau) = (self.mtbf.0, interval.0);
        let segment = ((tau + self.checkpoint.0) / m).exp_m1();
        let share = tau / (m * (self.restart.0 / m).exp() * segment);
        // A job that fails too often to progress yields infinity over infinity.
        if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 }
    }
}

/// Daly's higher-order estimate of the optimum; M if a checkpoint takes at least 2M.
fn daly_37(m: f64, d: f64) -> f64 {
    if d >= 2.0 * m {
        return m;
    }
    let small = d / (2.0 * m);
    (2.0 * d * m).sqrt() * (1.0 + small.sqrt() / 3.0 + small / 9.0) - d
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn minutes(mtbf: f64, checkpoint: f64, restart: f64) -> Checkpointing {
        let [mtbf, checkpoint, restart] =
            [mtbf, checkpoint, restart].map(|minutes| Seconds(60.0 * minutes));
        Checkpointing { mtbf, checkpoint, restart }
    }

    /// Captions of Daly's figures 3, 4 and 5.
    #[test]
    fn the_published_optima_come_out() {
        for (mtbf, optimum, digits) in
            [(24.0 * 60.0, 117.0, 0.5), (6.0 * 60.0, 57.0, 0.5), (15.0, 9.1, 0.05)]
        {
            let found = daly_37(60.0 * mtbf, 300.0) / 60.0;
            assert!((found - optimum).abs() <= digits, "M = {mtbf} min: {found} min");
            let refined = minutes(mtbf, 5.0, 10.0).best_interval().0 / 60.0;
            assert!((refined / found - 1.0).abs() < 1e-2, "{refined} {found}");
        }
    }

    /// A job that never fails, with one hour of compute per one-hour checkpoint.
    #[test]
    fn without_failures_only_checkpoints_cost() {
        let never = minutes(1e12, 60.0, 60.0);
        let half = never.at(Seconds(3600.0)).goodput;
        assert!((half - 0.5).abs() < 1e-6, "{half}");
        let all = Checkpointing { checkpoint: Seconds::ZERO, ..never }.at(Seconds(1.0)).goodput;
        assert!((all - 1.0).abs() < 1e-9, "{all}");
    }

    /// Uniform value in (0, 1] from a counter: splitmix64 (Steele et al., "Fast splittable
    /// pseudorandom number generators", 2014).
    fn uniform(counter: u64) -> f64 {
        let mut z = counter.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        ((z >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Goodput of a job simulated failure by failure until `segments` segments are done.
    fn played(job: &Checkpointing, interval: f64, segments: u32) -> f64 {
        let mut counter = 0;
        let mut next_failure = || {
            counter += 1;
            -job.mtbf.0 * uniform(counter).ln()
        };
        let mut now = 0.0;
        for _ in 0..segments {
            loop {
                let (failure, need) = (next_failure(), interval + job.checkpoint.0);
                if failure >= need {
                    now += need;
                    break;
                }
                now += failure;
                // Restarts may fail too and are repeated.
                loop {
                    let failure = next_failure();
                    now += failure.min(job.restart.0);
                    if failure >= job.restart.0 {
                        break;
                    }
                }
            }
        }
        interval * f64::from(segments) / now
    }

    #[test]
    fn a_job_played_through_gets_the_goodput_that_is_predicted() {
        for (mtbf, checkpoint, restart) in
            [(1440.0, 5.0, 10.0), (360.0, 5.0, 10.0), (15.0, 5.0, 10.0)]
        {
            let job = minutes(mtbf, checkpoint, restart);
            let best = job.best_interval().0;
            for interval in [best / 3.0, best, best * 3.0] {
                let (seen, said) =
                    (played(&job, interval, 200_000), job.at(Seconds(interval)).goodput);
                assert!((seen / said - 1.0).abs() < 0.01, "{mtbf} {interval}: {seen} {said}");
            }
        }
    }

    #[test]
    fn the_best_number_of_iterations_beats_its_neighbours() {
        let job = minutes(360.0, 5.0, 10.0);
        let iteration = Seconds(100.0);
        let (best, failures) = job.best_in_iterations(iteration);
        assert_eq!(best, (failures.interval.0 / 100.0) as u64);
        for other in [best - 1, best + 1, best / 2, best * 2] {
            let other = job.at(Seconds(other as f64 * 100.0));
            assert!(other.goodput < failures.goodput, "{other:?} {failures:?}");
        }
        // An iteration far longer than the best interval leaves only one choice.
        assert_eq!(job.best_in_iterations(Seconds(1e6)).0, 1);
    }

    #[test]
    fn a_thousand_devices_fail_a_thousand_times_as_often() {
        let (year, minute) = (Seconds(365.25 * 86_400.0), Seconds(60.0));
        let job = Checkpointing::of_devices(year, 1000, minute, minute);
        assert!((job.mtbf.0 - 31_557.6).abs() < 1e-6);
        assert_eq!(Checkpointing::of_devices(year, 0, minute, minute).mtbf, year);
    }

    #[test]
    fn absurd_numbers_stay_numbers() {
        let absurd = [0.0, -1.0, 1e-300, 1e300, f64::NAN, f64::INFINITY];
        for mtbf in absurd {
            for other in absurd {
                for interval in absurd {
                    let (checkpoint, restart) = (Seconds(other), Seconds(other));
                    let job = Checkpointing { mtbf: Seconds(mtbf), checkpoint, restart };
                    let goodput = job.at(Seconds(interval)).goodput;
                    assert!((0.0..=1.0).contains(&goodput), "{job:?} {interval}: {goodput}");
                    let (_, best) = job.best_in_iterations(Seconds(interval));
                    assert!((0.0..=1.0).contains(&best.goodput), "{job:?} {interval}: {best:?}");
                }
            }
        }
    }

    proptest! {
        /// No interval beats the best one, for jobs that rarely fail up to jobs that barely run.
        #[test]
        fn no_interval_beats_the_best(
            mtbf in 1.0f64..1e7,
            checkpoint in 1e-3f64..1e4,
            restart in 0.0f64..1e3,
            factor in 0.01f64..100.0,
        ) {
            let job = Checkpointing {
                mtbf: Seconds(mtbf),
                checkpoint: Seconds(checkpoint),
                restart: Seconds(restart),
            };
            let best = job.best_interval();
            let (at_best, other) = (job.at(best).goodput, job.at(best * factor).goodput);
            prop_assert!(other <= at_best * (1.0 + 1e-9), "{other} at {factor} of {best:?}, {at_best}");
        }
    }
}
