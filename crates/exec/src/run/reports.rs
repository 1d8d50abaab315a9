//! Aggregates the statistics of single ranks into iteration reports.

use crate::interpreter::IterationStats;
use crate::run::loss_scale::LossScale;
use crate::run::options::TrainOptions;
use crate::run::outcome::IterationReport;
use paceline_plan::ids::Rank as RankId;
use paceline_plan::program::{Facts, Pacing, Plan};
use paceline_plan::staleness::Staleness;
use paceline_plan::units::Seconds;
use std::collections::VecDeque;
use std::time::Instant;

/// Merges the statistics of each rank by iteration.
pub(crate) struct ReportAggregator {
    /// Rank that reports the loss, and rank that reports the norm.
    loss: Option<RankId>,
    norm: Option<RankId>,
    tokens: u64,
    /// Aggregate of asynchronous replicas, where no server receives the reports of all.
    async_aggregate: Option<AsyncAggregate>,
    /// Loss scale, which follows the norms as on every rank.
    scale: LossScale,
    /// Incomplete iterations.
    open: VecDeque<Open>,
    pub(crate) done: Vec<IterationReport>,
}

#[derive(Clone, Copy)]
struct Open {
    iteration: u32,
    /// Sum of the losses and duration of the iteration.
    loss: Option<(f32, f64)>,
    norm: Option<f32>,
    /// Reported together with the loss.
    mtp_loss: Option<f32>,
    dropped: Option<f32>,
    staleness: Option<Staleness>,
}

impl ReportAggregator {
    pub(crate) fn new(plan: &Plan, options: &TrainOptions) -> Self {
        let Facts { pacing, loss, norm, .. } = plan.facts();
        let async_aggregate = match pacing {
            Pacing::Pool { replicas } => Some(AsyncAggregate::new(replicas)),
            Pacing::Lockstep | Pacing::Granted { .. } => None,
        };
        Self {
            async_aggregate,
            loss,
            norm,
            tokens: plan.strategy.tokens(),
            scale: LossScale::new(&plan.strategy, options),
            // Ranks are seldom many iterations apart, and millions of reports are not read anyway.
            open: VecDeque::with_capacity(64),
            done: Vec::with_capacity(options.iterations.min(1 << 16) as usize),
        }
    }

    /// Ranks that report statistics.
    pub(crate) fn reporting_ranks(&self) -> Vec<RankId> {
        let mut speakers: Vec<RankId> = self.loss.into_iter().chain(self.norm).collect();
        speakers.dedup();
        speakers
    }

    /// Adds a rank's statistics, and reports the iterations that this completes.
    pub(crate) fn add(
        &mut self,
        rank: RankId,
        stats: IterationStats,
        report: &mut dyn FnMut(&IterationReport),
    ) {
        if let Some(together) = &mut self.async_aggregate {
            if let Some(stats) = together.add(stats) {
                self.complete(&stats, report);
            }
            return;
        }
        if self.loss != Some(rank) && self.norm != Some(rank) {
            return;
        }
        let known = self.open.iter().position(|open| open.iteration == stats.iteration);
        let at = known.unwrap_or_else(|| {
            // Each rank reports its iterations in order.
            let (iteration, staleness) = (stats.iteration, stats.staleness);
            let (loss, norm, further, dropped) = (None, None, None, None);
            self.open.push_back(Open {
                iteration,
                loss,
                norm,
                mtp_loss: further,
                dropped,
                staleness,
            });
            self.open.len() - 1
        });
        let open = &mut self.open[at];
        if self.loss == Some(rank) {
            open.loss = stats.loss.map(|loss| (loss, stats.took.0));
            (open.mtp_loss, open.dropped) = (stats.mtp_loss, stats.dropped);
        }
        if self.norm == Some(rank) {
            open.norm = stats.norm;
        }
        while let Some(&open) = self.open.front() {
            let Open {
                iteration,
                loss: Some((sum, seconds)),
                norm,
                mtp_loss: further,
                dropped,
                staleness,
            } = open
            else {
                break;
            };
            if norm.is_none() && self.norm.is_some() {
                break;
            }
            self.open.pop_front();
            let took = Seconds(seconds);
            let loss = Some(sum);
            let stats = IterationStats {
                iteration,
                loss,
                mtp_loss: further,
                norm,
                dropped,
                took,
                staleness,
            };
            self.complete(&stats, report);
        }
    }

    /// Reports a complete iteration.
    fn complete(&mut self, stats: &IterationStats, report: &mut dyn FnMut(&IterationReport)) {
        let (loss, norm) = (stats.loss.unwrap_or(f32::NAN), stats.norm.unwrap_or(f32::NAN));
        let (grad_norm, loss_scale) = (norm / self.scale.factor(), self.scale.reported());
        let skipped = self.scale.overflows(norm);
        self.scale.conclude(norm);
        let complete = IterationReport {
            iteration: stats.iteration + 1,
            loss: loss / self.tokens as f32,
            mtp_loss: stats.mtp_loss.map(|sum| sum / self.tokens as f32),
            grad_norm,
            loss_scale,
            skipped,
            dropped_tokens: stats.dropped.map(|dropped| dropped as u64),
            seconds: stats.took.0,
            tokens_per_s: self.tokens as f64 / stats.took.0,
            staleness: stats.staleness,
        };
        self.done.push(complete);
        report(&complete);
    }
}

/// Aggregate of asynchronous replicas: `replicas` of their iterations are one of the run.
struct AsyncAggregate {
    replicas: u32,
    /// Sum of the reports since the last complete iteration, and their number.
    sum: Option<IterationStats>,
    told: u32,
    /// Completion time and number of the last iteration.
    last: Option<(Instant, u32)>,
}

impl AsyncAggregate {
    fn new(replicas: u32) -> Self {
        Self { replicas, sum: None, told: 0, last: None }
    }

    /// Adds a replica's statistics. Returns an iteration of the run, if this completes one.
    fn add(&mut self, stats: IterationStats) -> Option<IterationStats> {
        let sum = match self.sum.take() {
            None => stats,
            Some(sum) => IterationStats {
                loss: sum.loss.zip(stats.loss).map(|(a, b)| a + b),
                norm: sum.norm.zip(stats.norm).map(|(a, b)| a + b),
                mtp_loss: sum.mtp_loss.zip(stats.mtp_loss).map(|(a, b)| a + b),
                dropped: sum.dropped.zip(stats.dropped).map(|(a, b)| a + b),
                staleness: sum.staleness.zip(stats.staleness).map(|(a, b)| a.with(b)),
                ..sum
            },
        };
        self.told += 1;
        if self.told < self.replicas {
            self.sum = Some(sum);
            return None;
        }
        self.told = 0;
        let now = Instant::now();
        // All begin with the same iteration; its time is that of the last replica.
        let (took, iteration) = match self.last {
            None => (stats.took, sum.iteration),
            Some((before, number)) => (Seconds((now - before).as_secs_f64()), number + 1),
        };
        self.last = Some((now, iteration));
        let replicas = self.replicas as f32;
        let staleness = sum.staleness.map(|all| all.over(self.replicas));
        Some(IterationStats {
            iteration,
            took,
            norm: sum.norm.map(|n| n / replicas),
            staleness,
            ..sum
        })
    }
}
