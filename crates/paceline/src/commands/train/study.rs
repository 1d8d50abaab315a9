//! One point of a study of runs: only the numbers of the run are kept.

use super::{Job, JobFlags, Purpose, prepare};
use crate::failure::Failure;
use crate::flags::{Origins, SavePolicy};
use paceline_exec::data::{Data, SampleKind};
use paceline_exec::inference::{ImageNetwork, Network, evaluate, perturbed, trains_only};
use paceline_exec::{Outcome, TrainOptions};
use serde::Serialize;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// Default columns of a study of runs.
pub(crate) const USUAL: [&str; 3] = ["loss", "held_out_loss", "iterations"];

/// Results of a run, all independent of the machine's speed.
#[derive(Serialize)]
struct Found {
    /// The mean loss of the last tenth of the iterations.
    loss: f64,
    /// The loss on held-out samples.
    held_out_loss: f64,
    /// Held-out loss minus training loss.
    gap: f64,
    /// Mean increase of the loss on samples of the training when every tensor moves by a twentieth
    /// of its norm in a random direction.
    sharpness: f64,
    /// The lowest possible loss, if known.
    floor: Option<f64>,
    /// Share of correctly classified held-out images; image networks only.
    #[serde(skip_serializing_if = "Option::is_none")]
    accuracy: Option<f64>,
    /// Number of iterations run.
    iterations: usize,
    /// Number of samples read.
    samples: u64,
}

/// Number of held-out samples: enough to resolve a hundredth of a nat.
const HELD_OUT: u64 = 512;
/// Number of samples of the training on which sharpness is measured.
const SEEN: u64 = 128;
/// Number of random directions in which the weights move.
const DIRECTIONS: u64 = 4;
/// Step in each direction, as a share of every tensor's norm.
const STEP: f64 = 0.05;
/// Number of held-out samples evaluated at once.
const AT_ONCE: u64 = 32;

/// Trains on threads of this process, and evaluates the result.
pub(crate) fn result(flags: &JobFlags, origins: Origins) -> Result<Value, Failure> {
    let mut flags = flags.clone();
    flags.launch.transport.get_or_insert_with(|| "thread".to_owned());
    let mut job = prepare(&flags, Purpose::Measure, origins)?;
    job.keeping.saving = SavePolicy::Never;
    let stop = Arc::default();
    let outcome = loop {
        let options =
            TrainOptions { keep_parameters: true, save: None, ..job.options(&stop, Path::new("")) };
        match paceline_exec::train(&job.plan, &options, &mut |_| {}) {
            Ok(outcome) => break outcome,
            Err(error) => match job.larger_buffers(&error) {
                Some(larger) => job.enlarge(&larger)?,
                None => return Err(error.into()),
            },
        }
    };
    let found = evaluate_outcome(&job, outcome)?;
    serde_json::to_value(found).map_err(|error| Failure::Run(error.into()))
}

fn evaluate_outcome(job: &Job, outcome: Outcome) -> Result<Found, Failure> {
    if let Some(why) = trains_only(&job.model) {
        return Err(Failure::flag("--vary", why));
    }
    let failed = |error: paceline_exec::data::DataError| Failure::Run(error.into());
    let seq = job.plan.strategy.seq;
    let reads = SampleKind::of(&job.model, seq);
    let data = Data::held_out(&job.data.source, reads, job.training.seed).map_err(failed)?;
    let samples = data.samples().unwrap_or(u64::MAX).min(HELD_OUT);
    let parameters = outcome.parameters.unwrap_or_default();
    let loss_of = |parameters, data: &Data, samples| {
        if ImageNetwork::is(&job.model) {
            ImageNetwork::from_parameters(&job.model, parameters).evaluate(data, samples, AT_ONCE)
        } else {
            let network = Network::from_parameters(&job.model, parameters);
            evaluate(&network, data, seq, samples, AT_ONCE, &mut |_| {})
        }
    };
    let reads = SampleKind::of(&job.model, seq);
    let seen = Data::new(&job.data.source, reads, job.training.seed).map_err(failed)?;
    let few = seen.samples().unwrap_or(u64::MAX).min(SEEN);
    let at = loss_of(parameters.clone(), &seen, few).map_err(failed)?.loss;
    let mut rise = 0.0;
    for direction in 0..DIRECTIONS {
        let moved = perturbed(&parameters, STEP, direction);
        rise += loss_of(moved, &seen, few).map_err(failed)?.loss - at;
    }
    let held_out = loss_of(parameters, &data, samples).map_err(failed)?;
    let losses: Vec<f64> = outcome.iterations.iter().map(|i| f64::from(i.loss)).collect();
    let last = &losses[losses.len() - losses.len().div_ceil(10)..];
    let loss = last.iter().sum::<f64>() / last.len().max(1) as f64;
    Ok(Found {
        loss,
        held_out_loss: held_out.loss,
        gap: held_out.loss - loss,
        sharpness: rise / DIRECTIONS as f64,
        floor: held_out.floor,
        accuracy: held_out.accuracy,
        iterations: losses.len(),
        samples: losses.len() as u64 * job.plan.strategy.global_batch,
    })
}
