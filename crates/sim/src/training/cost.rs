//! Time and cost of training on a given number of tokens.

use super::failures::Failures;
use paceline_plan::units::Seconds;
use serde::Serialize;

/// Parameters of a whole training run beyond one iteration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainingRun {
    /// Tokens to train on.
    pub tokens: u64,
    /// Tokens of one iteration; at least one.
    pub tokens_per_iteration: u64,
    /// Time of one iteration.
    pub iteration: Seconds,
    /// Number of warm-up iterations and their iteration time, if it differs.
    pub warm_up: Option<(u64, Seconds)>,
    /// Number of devices held, and paid for, from the first iteration to the last.
    pub devices: u64,
    /// Price of one device per hour, in any currency.
    pub price_per_device_hour: Option<f64>,
}

/// Time and cost of a training run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TrainingCost {
    /// Requested tokens.
    pub tokens: u64,
    /// Number of iterations; the last one may be only partly filled.
    pub iterations: u64,
    /// Total time, including failures and checkpoints if they are known.
    pub wall: Seconds,
    /// Devices times hours.
    pub device_hours: f64,
    /// Total price, if a price per hour was given.
    pub cost: Option<f64>,
}

impl TrainingRun {
    /// Number of iterations; the last one may be only partly filled.
    pub fn iterations(&self) -> u64 {
        self.tokens.div_ceil(self.tokens_per_iteration.max(1))
    }

    /// Computes the totals. With `failures`, only the goodput fraction of the time trains.
    pub fn cost(&self, failures: Option<&Failures>) -> TrainingCost {
        let iterations = self.iterations();
        let goodput = failures.map_or(1.0, |failures| failures.goodput);
        let (first, each) = self.warm_up.unwrap_or((0, self.iteration));
        let first = first.min(iterations);
        let rest = (iterations - first) as f64 * self.iteration.0;
        let wall = Seconds((first as f64 * each.0 + rest) / goodput);
        let device_hours = self.devices as f64 * wall.0 / 3600.0;
        let cost = self.price_per_device_hour.map(|price| price * device_hours);
        TrainingCost { tokens: self.tokens, iterations, wall, device_hours, cost }
    }
}

#[cfg(test)]
mod tests {
    use super::super::failures::Checkpointing;
    use super::*;

    const RUN: TrainingRun = TrainingRun {
        tokens: 1_000_001,
        tokens_per_iteration: 1000,
        iteration: Seconds(3.6),
        warm_up: None,
        devices: 16,
        price_per_device_hour: Some(2.5),
    };

    #[test]
    fn iterations_hours_and_money_follow_from_tokens() {
        let cost = RUN.cost(None);
        assert_eq!(cost.iterations, 1001, "the last iteration is begun for one token");
        assert!((cost.wall.0 - 3603.6).abs() < 1e-9);
        assert!((cost.device_hours - 16.016).abs() < 1e-9);
        assert!((cost.cost.unwrap() - 40.04).abs() < 1e-9);
        assert_eq!(TrainingRun { price_per_device_hour: None, ..RUN }.cost(None).cost, None);
    }

    /// Narayanan et al. (arXiv 2104.04473), section 5.1: 175 billion parameters, 300 billion
    /// tokens, 1024 GPUs at 140 TFLOP/s each take 34 days (eq. 4, 8TP/(nX)).
    #[test]
    fn gpt_3_takes_a_month_on_a_thousand_gpus() {
        let tokens_per_iteration = 1536 * 2048;
        let operations = 8.0 * 175e9 * tokens_per_iteration as f64;
        let run = TrainingRun {
            tokens: 300_000_000_000,
            tokens_per_iteration,
            iteration: Seconds(operations / (1024.0 * 140e12)),
            warm_up: None,
            devices: 1024,
            price_per_device_hour: None,
        };
        let days = run.cost(None).wall.0 / 86_400.0;
        assert!((days - 34.0).abs() < 0.5, "{days}");
    }

    /// Brown et al. (2020): 6 operations per parameter and token. One H100 takes about 150 years at its
    /// peak in f32, and about 10 in bf16.
    #[test]
    fn gpt_3_takes_one_device_a_century_and_a_half() {
        let device = crate::cluster::preset::get("dgx-h100").unwrap().device;
        let model = paceline_plan::model::built_in::get("gpt3-175b").unwrap().unwrap();
        let operations = 6.0 * model.parameters() as f64 * 300e9;
        let years = |dtype| operations / device.rate(dtype).0 / (365.25 * 86_400.0);
        assert!((years(paceline_plan::DType::F32) - 150.0).abs() < 3.0);
        assert!((years(paceline_plan::DType::Bf16) - 10.0).abs() < 0.2);
    }

    #[test]
    fn what_failures_take_is_paid_for() {
        let failures = Checkpointing {
            mtbf: Seconds(3600.0),
            checkpoint: Seconds(60.0),
            restart: Seconds(120.0),
        }
        .at(Seconds(600.0));
        let (alone, failing) = (RUN.cost(None), RUN.cost(Some(&failures)));
        assert!(failures.goodput < 0.9);
        assert!((failing.wall.0 * failures.goodput / alone.wall.0 - 1.0).abs() < 1e-12);
        assert!(
            (failing.cost.unwrap() / alone.cost.unwrap() * failures.goodput - 1.0).abs() < 1e-12
        );
    }

    #[test]
    fn a_warm_up_takes_its_own_time() {
        let slow = |first| TrainingRun { warm_up: Some((first, Seconds(7.2))), ..RUN };
        let wall = |first| slow(first).cost(None).wall.0;
        assert!((wall(200) - (200.0 * 7.2 + 801.0 * 3.6)).abs() < 1e-9);
        assert!((wall(5000) - 1001.0 * 7.2).abs() < 1e-9, "all of it");
    }

    #[test]
    fn absurd_numbers_stay_numbers() {
        for tokens in [0, 1, u64::MAX] {
            for tokens_per_iteration in [0, 1, u64::MAX] {
                let run = TrainingRun { tokens, tokens_per_iteration, devices: u64::MAX, ..RUN };
                let cost = run.cost(None);
                assert!(cost.wall.0.is_finite() && cost.device_hours.is_finite());
                assert_eq!(cost.iterations == 0, tokens == 0);
            }
        }
    }
}
