//! Throughput of a run, for `paceline bench train`.

use super::Job;
use super::events::bits;
use crate::output::{RunRecord, Subject};
use crate::overview::count;
use paceline_plan::units::{Bytes, Seconds};
use serde::Serialize;
use std::fmt;

/// Throughput, loss and memory of a run.
#[derive(Debug, Serialize)]
pub(super) struct Throughput {
    #[serde(flatten)]
    subject: Subject,
    ranks: u32,
    threads_per_rank: usize,
    /// Number of iterations that count.
    iterations: usize,
    /// Number of iterations before them, to warm up caches and threads.
    left_out: usize,
    tokens_per_iteration: u64,
    measured_iteration_s: f64,
    /// The 10th and 90th percentile of the iteration time.
    p10_s: f64,
    p90_s: f64,
    min_s: f64,
    max_s: f64,
    tokens_per_s: f64,
    predicted_iteration_s: Option<f64>,
    loss: Option<f32>,
    loss_bits: Option<String>,
    peak_bytes: Option<Vec<u64>>,
    planned_peak_bytes: Vec<u64>,
    /// What `tokens_per_s` counts.
    #[serde(skip)]
    unit: &'static str,
}

impl Throughput {
    /// The throughput of a run; `None` if it has no iteration.
    pub(super) fn of(job: &Job, record: &RunRecord) -> Option<Self> {
        let (_, steady) = record.steady();
        let mut times: Vec<f64> = steady.iter().map(|iteration| iteration.seconds).collect();
        let left_out = record.iterations.len() - times.len();
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times.get(((times.len() as f64 - 1.0) * share).round() as usize);
        let measured_iteration_s = record.measured_iteration_s?;
        let tokens = job.plan.strategy.tokens();
        let loss = record.iterations.last().and_then(|iteration| iteration.loss);
        Some(Self {
            subject: Subject::named(&record.model.name, &record.strategy, Some(&job.cluster)),
            ranks: job.plan.mesh.world(),
            threads_per_rank: job.threads_per_rank().get(),
            iterations: times.len(),
            left_out,
            tokens_per_iteration: tokens,
            measured_iteration_s,
            p10_s: *at(0.1)?,
            p90_s: *at(0.9)?,
            min_s: *at(0.0)?,
            max_s: *at(1.0)?,
            tokens_per_s: tokens as f64 / measured_iteration_s.max(1e-12),
            predicted_iteration_s: record.predicted_iteration_s,
            loss,
            loss_bits: loss.map(bits),
            peak_bytes: record.peak_bytes.clone(),
            planned_peak_bytes: record.planned_peak_bytes.clone(),
            unit: record.model.unit(),
        })
    }
}

impl fmt::Display for Throughput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |seconds: f64| Seconds(seconds).to_string();
        let mut line = |name: &str, text: String| writeln!(f, "{name:<12} {text}");
        let [ranks, threads] = [u64::from(self.ranks), self.threads_per_rank as u64].map(count);
        let (iterations, left_out) = (self.iterations, self.left_out);
        line("measured", format!("{iterations} iterations after {left_out} that are left out"))?;
        line("ranks", format!("{ranks}, each with {threads} threads"))?;
        let (p10, p90) = (time(self.p10_s), time(self.p90_s));
        line(
            "iteration",
            format!("{} (8 of 10 from {p10} to {p90})", time(self.measured_iteration_s)),
        )?;
        line("range", format!("{} to {}", time(self.min_s), time(self.max_s)))?;
        line(&format!("{}/s", self.unit), format!("{:.0} at the median", self.tokens_per_s))?;
        if let Some(predicted) = self.predicted_iteration_s {
            let off = 100.0 * (predicted / self.measured_iteration_s - 1.0);
            line("predicted", format!("{} ({off:+.1} %)", time(predicted)))?;
        }
        let planned = &self.planned_peak_bytes;
        for (rank, planned) in planned.iter().enumerate() {
            let measured = self.peak_bytes.as_ref().and_then(|peak| peak.get(rank));
            let measured = measured.map(|bytes| format!(", {} measured", Bytes(*bytes)));
            let text = format!("{} planned{}", Bytes(*planned), measured.unwrap_or_default());
            line(&format!("rank {rank}"), text)?;
        }
        Ok(())
    }
}
