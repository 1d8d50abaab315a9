//! From what single ranks see to what people are told.

use crate::loss_scale::LossScale;
use crate::options::TrainOptions;
use crate::outcome::IterationReport;
use crate::rank::Sight;
use crate::staleness::Staleness;
use paceline_plan::ids::{Rank as RankId, RoleId};
use paceline_plan::program::{Outputs, Plan};
use paceline_plan::units::Seconds;
use std::collections::VecDeque;
use std::time::Instant;

/// Puts together what each rank sees of an iteration.
pub(crate) struct Reports {
    /// The rank that speaks for the loss, and the one that speaks for the norm.
    loss: Option<RankId>,
    norm: Option<RankId>,
    tokens: u64,
    /// What replicas tell that wait for nobody, where no server hears of all.
    together: Option<Together>,
    /// Follows the norms as every rank does.
    scale: LossScale,
    /// What is known of iterations that are not complete.
    open: VecDeque<Open>,
    pub(crate) done: Vec<IterationReport>,
}

#[derive(Clone, Copy)]
struct Open {
    iteration: u32,
    /// The sum of the losses, and how long the iteration took.
    loss: Option<(f32, f64)>,
    norm: Option<f32>,
    /// Told together with the loss.
    further: Option<f32>,
    dropped: Option<f32>,
    staleness: Option<Staleness>,
}

impl Reports {
    pub(crate) fn new(plan: &Plan, options: &TrainOptions) -> Self {
        let first = |has: fn(&Outputs) -> bool| {
            let role = plan.programs.iter().position(|program| has(&program.outputs));
            role.map(|role| plan.representative(RoleId::from(role)))
        };
        // Where replicas do not wait for each other, the first server hears of all.
        let first_server = (plan.mesh.servers > 0).then_some(RankId(plan.mesh.size()));
        let unordered = plan.strategy.sync.is_async();
        let served = first_server.filter(|_| unordered);
        Self {
            together: (unordered && served.is_none()).then(|| Together::new(plan.mesh.size())),
            loss: served.or_else(|| first(|outputs| outputs.loss.is_some())),
            norm: served.or_else(|| first(|outputs| outputs.norm.is_some())),
            tokens: plan.strategy.tokens(),
            scale: LossScale::new(&plan.strategy, options),
            // Ranks are seldom far apart; and nobody reads on through millions of reports.
            open: VecDeque::with_capacity(64),
            done: Vec::with_capacity(options.iterations.min(1 << 16) as usize),
        }
    }

    /// The ranks that have something to say.
    pub(crate) fn speakers(&self) -> Vec<RankId> {
        let mut speakers: Vec<RankId> = self.loss.into_iter().chain(self.norm).collect();
        speakers.dedup();
        speakers
    }

    /// Takes in what a rank saw, and reports the iterations that this completes.
    pub(crate) fn hear(
        &mut self,
        rank: RankId,
        sight: Sight,
        report: &mut dyn FnMut(&IterationReport),
    ) {
        if let Some(together) = &mut self.together {
            if let Some(sight) = together.hear(sight) {
                self.complete(&sight, report);
            }
            return;
        }
        if self.loss != Some(rank) && self.norm != Some(rank) {
            return;
        }
        let known = self.open.iter().position(|open| open.iteration == sight.iteration);
        let at = known.unwrap_or_else(|| {
            // Each speaker tells of one iteration after the other.
            let (iteration, staleness) = (sight.iteration, sight.staleness);
            let (loss, norm, further, dropped) = (None, None, None, None);
            self.open.push_back(Open { iteration, loss, norm, further, dropped, staleness });
            self.open.len() - 1
        });
        let open = &mut self.open[at];
        if self.loss == Some(rank) {
            open.loss = sight.loss.map(|loss| (loss, sight.took.0));
            (open.further, open.dropped) = (sight.further, sight.dropped);
        }
        if self.norm == Some(rank) {
            open.norm = sight.norm;
        }
        while let Some(&open) = self.open.front() {
            let Open { iteration, loss: Some((sum, seconds)), norm, further, dropped, staleness } =
                open
            else {
                break;
            };
            if norm.is_none() && self.norm.is_some() {
                break;
            }
            self.open.pop_front();
            let took = Seconds(seconds);
            let loss = Some(sum);
            let sight = Sight { iteration, loss, further, norm, dropped, took, staleness };
            self.complete(&sight, report);
        }
    }

    /// Reports an iteration of which all is known.
    fn complete(&mut self, sight: &Sight, report: &mut dyn FnMut(&IterationReport)) {
        let (loss, norm) = (sight.loss.unwrap_or(f32::NAN), sight.norm.unwrap_or(f32::NAN));
        let (grad_norm, loss_scale) = (norm / self.scale.factor(), self.scale.reported());
        let skipped = self.scale.overflows(norm);
        self.scale.conclude(norm);
        let complete = IterationReport {
            iteration: sight.iteration + 1,
            loss: loss / self.tokens as f32,
            further_loss: sight.further.map(|sum| sum / self.tokens as f32),
            grad_norm,
            loss_scale,
            skipped,
            dropped: sight.dropped.map(|dropped| dropped as u64),
            seconds: sight.took.0,
            tokens_per_s: self.tokens as f64 / sight.took.0,
            staleness: sight.staleness,
        };
        self.done.push(complete);
        report(&complete);
    }
}

/// What replicas tell of iterations of their own: as many of them as there are replicas are one of the run.
struct Together {
    replicas: u32,
    /// What was told since the last one, and how often.
    sum: Option<Sight>,
    told: u32,
    /// When the last one was complete, and its number.
    last: Option<(Instant, u32)>,
}

impl Together {
    fn new(replicas: u32) -> Self {
        Self { replicas, sum: None, told: 0, last: None }
    }

    /// Takes in what a replica saw; an iteration of the run, if that completes one.
    fn hear(&mut self, sight: Sight) -> Option<Sight> {
        let sum = match self.sum.take() {
            None => sight,
            Some(sum) => Sight {
                loss: sum.loss.zip(sight.loss).map(|(a, b)| a + b),
                norm: sum.norm.zip(sight.norm).map(|(a, b)| a + b),
                further: sum.further.zip(sight.further).map(|(a, b)| a + b),
                dropped: sum.dropped.zip(sight.dropped).map(|(a, b)| a + b),
                staleness: sum.staleness.zip(sight.staleness).map(|(a, b)| a.with(b)),
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
        // All begin with the same iteration, whose time is then that of whoever ends it.
        let (took, iteration) = match self.last {
            None => (sight.took, sum.iteration),
            Some((before, number)) => (Seconds((now - before).as_secs_f64()), number + 1),
        };
        self.last = Some((now, iteration));
        let replicas = self.replicas as f32;
        let staleness = sum.staleness.map(|all| all.over(self.replicas));
        Some(Sight { iteration, took, norm: sum.norm.map(|n| n / replicas), staleness, ..sum })
    }
}
