//! Estimates a whole training run from one predicted iteration.

use crate::flags::WholeRun;
use paceline_plan::program::Plan;
use paceline_plan::units::Seconds;
use paceline_sim::Outcome;
use paceline_sim::training::{Checkpointing, Failures, TrainingCost, TrainingRun};

/// The requested estimates of a whole run.
pub(crate) struct Estimate {
    /// Present with `--tokens`.
    pub cost: Option<TrainingCost>,
    /// Present with `--mtbf-hours`.
    pub failures: Option<FailureEstimate>,
    /// Present if the cluster states its devices' power.
    pub energy: Option<EnergyEstimate>,
}

/// Energy and emissions of an iteration, and of a run if its length is given.
#[derive(Clone, Copy)]
pub(crate) struct EnergyEstimate {
    /// Joules of an iteration, of the devices alone.
    pub joules: f64,
    /// Mean power of the devices together, in watts.
    pub watts: f64,
    /// Grams of CO2 of an iteration in the facility, with `--carbon-intensity`.
    pub co2_g: Option<f64>,
    /// Kilowatt-hours of the run in the facility, with `--tokens`.
    pub run_kwh: Option<f64>,
    /// Kilograms of CO2 of the run, with both.
    pub run_co2_kg: Option<f64>,
}

/// Goodput under failures.
pub(crate) struct FailureEstimate {
    /// Mean time between failures of the whole job.
    pub mtbf: Seconds,
    /// Number of ranks that may fail.
    pub devices: u64,
    /// Iterations between checkpoints, as requested or else the best number.
    pub every: u64,
    /// Goodput with that number.
    pub chosen: Failures,
    /// The best number of iterations between checkpoints.
    pub best_every: u64,
    /// Goodput with the best number.
    pub best: Failures,
    /// The best time between checkpoints if iterations were divisible.
    pub best_interval: Seconds,
}

impl Estimate {
    /// Estimates a run with the simulated iteration times, including any compression warm-up.
    pub(crate) fn new(run: &WholeRun, plan: &Plan, outcome: &Outcome) -> Self {
        let iteration = outcome.iteration;
        let devices = u64::from(plan.mesh.world());
        let failures = run.failures.map(|flags| {
            let job =
                Checkpointing::of_devices(flags.mtbf, devices, flags.checkpoint, flags.restart);
            let (best_every, best) = job.best_in_iterations(iteration);
            let every = flags.every.unwrap_or(best_every);
            FailureEstimate {
                mtbf: job.mtbf,
                devices,
                every,
                chosen: job.at(iteration * every as f64),
                best_every,
                best,
                best_interval: job.best_interval(),
            }
        });
        let cost = run.tokens.map(|tokens| {
            let mut training = TrainingRun {
                tokens,
                tokens_per_iteration: plan.strategy.tokens(),
                iteration,
                warm_up: None,
                devices,
                price_per_device_hour: run.price_per_device_hour,
            };
            let all = u32::try_from(training.iterations()).unwrap_or(u32::MAX);
            let first = u64::from(plan.strategy.compress_warmup(all));
            training.warm_up = outcome.warm_up.map(|each| (first, each));
            training.cost(failures.as_ref().map(|failures| &failures.chosen))
        });
        let energy = outcome.energy.map(|energy| {
            let power = &run.power;
            // While a job writes checkpoints or restarts, its devices draw the same on average.
            let run_kwh =
                cost.as_ref().map(|cost: &TrainingCost| power.kwh(energy.watts * cost.wall.0));
            EnergyEstimate {
                joules: energy.joules,
                watts: energy.watts,
                co2_g: power.co2_g(power.kwh(energy.joules)),
                run_kwh,
                run_co2_kg: run_kwh.and_then(|kwh| power.co2_g(kwh)).map(|grams| grams / 1000.0),
            }
        });
        Self { cost, failures, energy }
    }
}
