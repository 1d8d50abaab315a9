//! One point of a study of runs: a run of which only numbers stay.

use super::{Job, JobFlags, Purpose, prepare};
use crate::failure::Failure;
use crate::flags::{Origins, Saving};
use paceline_exec::data::{Data, Reads};
use paceline_exec::inference::{ImageNetwork, Network, evaluate};
use paceline_exec::{Outcome, TrainOptions};
use serde::Serialize;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// What a study shows of runs unless told otherwise.
pub(crate) const USUAL: [&str; 3] = ["loss", "held_out_loss", "iterations"];

/// What came of a run. Nothing of it depends on the machine's speed.
#[derive(Serialize)]
struct Found {
    /// The mean loss of the last tenth of the iterations.
    loss: f64,
    /// The loss on samples that the run never saw.
    held_out_loss: f64,
    /// How much lower the one is than the other.
    gap: f64,
    /// The loss that no model can stay below, where that is known.
    floor: Option<f64>,
    /// Of a network on images, the share of held-out images that it found the right class of.
    #[serde(skip_serializing_if = "Option::is_none")]
    accuracy: Option<f64>,
    /// Iterations run.
    iterations: usize,
    /// Samples read.
    samples: u64,
}

/// Samples on which a trained model is looked at: enough to tell a hundredth of a nat.
const HELD_OUT: u64 = 512;
/// Of those, how many at once.
const AT_ONCE: u64 = 32;

/// Trains on threads of this process, and looks at what was learnt.
pub(crate) fn result(flags: &JobFlags, origins: Origins) -> Result<Value, Failure> {
    let mut job = prepare(flags, Purpose::Measure, origins)?;
    job.keeping.saving = Saving::Never;
    let stop = Arc::default();
    let options = TrainOptions { keep_parameters: true, ..job.options(&stop, Path::new("")) };
    let outcome = paceline_exec::train(&job.plan, &options, &mut |_| {})?;
    let found = look(&job, outcome)?;
    serde_json::to_value(found).map_err(|error| Failure::Run(error.into()))
}

fn look(job: &Job, outcome: Outcome) -> Result<Found, Failure> {
    let failed = |error: paceline_exec::data::DataError| Failure::Run(error.into());
    let seq = job.plan.strategy.seq;
    let reads = Reads::of(&job.model, seq);
    let data = Data::held_out(&job.data.source, reads, job.training.seed).map_err(failed)?;
    let samples = data.samples().unwrap_or(u64::MAX).min(HELD_OUT);
    let parameters = outcome.parameters.unwrap_or_default();
    let held_out = if ImageNetwork::is(&job.model) {
        ImageNetwork::from_parameters(&job.model, parameters).evaluate(&data, samples, AT_ONCE)
    } else {
        let network = Network::from_parameters(&job.model, parameters);
        evaluate(&network, &data, seq, samples, AT_ONCE, &mut |_| {})
    };
    let held_out = held_out.map_err(failed)?;
    let losses: Vec<f64> = outcome.iterations.iter().map(|i| f64::from(i.loss)).collect();
    let last = &losses[losses.len() - losses.len().div_ceil(10)..];
    let loss = last.iter().sum::<f64>() / last.len().max(1) as f64;
    Ok(Found {
        loss,
        held_out_loss: held_out.loss,
        gap: held_out.loss - loss,
        floor: held_out.floor,
        accuracy: held_out.accuracy,
        iterations: losses.len(),
        samples: losses.len() as u64 * job.plan.strategy.global_batch,
    })
}
