//! JSON events of a run: one object per iteration, and one for the whole run.

use crate::output::{IterationRecord, RunDir, RunRecord, StalenessRecord, Subject, median};
use paceline_exec::{IterationReport, Staleness};
use paceline_plan::trace::Trace;
use paceline_sim::cluster::Cluster;
use serde::Serialize;

impl From<&IterationReport> for IterationRecord {
    fn from(report: &IterationReport) -> Self {
        let finite = |value: f32| value.is_finite().then_some(value);
        Self {
            loss: finite(report.loss),
            grad_norm: finite(report.grad_norm),
            seconds: report.seconds,
            staleness: report.staleness.map(StalenessRecord::from),
        }
    }
}

impl From<Staleness> for StalenessRecord {
    fn from(Staleness { mean, max, max_lead: ahead, histogram }: Staleness) -> Self {
        Self { mean, max, max_lead: ahead, histogram }
    }
}

/// JSON event of one iteration.
#[derive(Serialize)]
pub(super) struct IterationEvent {
    event: &'static str,
    iteration: u32,
    loss: f32,
    loss_bits: String,
    tokens_per_s: f64,
    iteration_s: f64,
    grad_norm: f32,
    /// Mean loss of the lookahead tokens, for models with multi-token prediction.
    #[serde(skip_serializing_if = "Option::is_none")]
    mtp_loss: Option<f32>,
    /// Loss scale, in f16 runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_scale: Option<f32>,
    /// True if the gradient overflowed f16, so that no weight was updated.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    skipped: bool,
    /// Number of token-to-expert assignments dropped, for models whose experts have a capacity.
    #[serde(skip_serializing_if = "Option::is_none")]
    dropped_tokens: Option<u64>,
    /// Updates by others that the gradients missed, with asynchronous servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    staleness: Option<StalenessRecord>,
}

impl From<&IterationReport> for IterationEvent {
    fn from(report: &IterationReport) -> Self {
        Self {
            event: "iteration",
            iteration: report.iteration,
            loss: report.loss,
            loss_bits: bits(report.loss),
            tokens_per_s: report.tokens_per_s,
            iteration_s: report.seconds,
            grad_norm: report.grad_norm,
            mtp_loss: report.mtp_loss,
            loss_scale: report.loss_scale,
            skipped: report.skipped,
            dropped_tokens: report.dropped_tokens,
            staleness: report.staleness.map(StalenessRecord::from),
        }
    }
}

/// JSON event of the whole run.
#[derive(Serialize)]
pub(super) struct DoneEvent<'a> {
    event: &'static str,
    #[serde(flatten)]
    subject: Subject,
    iterations: usize,
    loss: Option<f32>,
    loss_bits: Option<String>,
    floor: Option<f64>,
    tokens_per_s: Option<f64>,
    predicted_iteration_s: Option<f64>,
    /// Factors on it, of a prediction from a quick profile.
    #[serde(skip_serializing_if = "Option::is_none")]
    predicted_band: Option<[f64; 2]>,
    measured_iteration_s: Option<f64>,
    /// The first and the last iteration of that median.
    measured_iterations: Option<[u32; 2]>,
    /// Exposed communication of steady iterations, averaged over all ranks.
    predicted_exposed_s: Option<f64>,
    measured_exposed_s: Option<f64>,
    peak_bytes: Option<&'a [u64]>,
    planned_peak_bytes: &'a [u64],
    stopped: bool,
    /// Staleness over the whole run.
    #[serde(skip_serializing_if = "Option::is_none")]
    staleness: Option<StalenessRecord>,
    checkpoint: Option<String>,
    run_dir: String,
    /// The command that resumes the run, if it was stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    resume: Option<String>,
}

impl<'a> DoneEvent<'a> {
    pub(super) fn new(
        record: &'a RunRecord,
        cluster: &Cluster,
        directory: &RunDir,
        (predicted, measured): (Option<&Trace>, Option<&Trace>),
        resume: Option<String>,
    ) -> Self {
        let path = |name: &String| directory.file(name).display().to_string();
        let last = record.iterations.last().and_then(|iteration| iteration.loss);
        Self {
            event: "done",
            subject: Subject::named(&record.model.name, &record.strategy, Some(cluster)),
            iterations: record.iterations.len(),
            loss: last,
            loss_bits: last.map(bits),
            floor: record.floor,
            tokens_per_s: record.tokens_per_s,
            predicted_iteration_s: record.predicted_iteration_s,
            predicted_band: record.predicted_band,
            measured_iteration_s: record.measured_iteration_s,
            measured_iterations: record.measured_iterations,
            predicted_exposed_s: predicted.and_then(exposed),
            measured_exposed_s: measured.and_then(exposed),
            peak_bytes: record.peak_bytes.as_deref(),
            planned_peak_bytes: &record.planned_peak_bytes,
            stopped: record.stopped,
            staleness: record.staleness(),
            checkpoint: record.checkpoint.as_ref().map(path),
            run_dir: directory.path().display().to_string(),
            resume,
        }
    }
}

/// Exposed communication, averaged over all ranks: the median of the steady iterations, since it
/// varies more between iterations than their duration does.
fn exposed(trace: &Trace) -> Option<f64> {
    let mut means: Vec<f64> = Vec::new();
    for window in trace.steady_windows() {
        let ranks = trace.breakdowns_in(&window);
        let sum: f64 = ranks.iter().map(|(_, breakdown)| breakdown.exposed_communication.0).sum();
        means.extend((!ranks.is_empty()).then(|| sum / ranks.len() as f64));
    }
    median(means)
}

/// A float's bit pattern, for exact comparison of two runs.
pub(super) fn bits(value: f32) -> String {
    format!("{:08x}", value.to_bits())
}
