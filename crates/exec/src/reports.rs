//! From what single ranks see to what people are told.

use crate::loss_scale::LossScale;
use crate::options::TrainOptions;
use crate::outcome::IterationReport;
use crate::rank::Sight;
use crate::serve::Staleness;
use paceline_plan::ids::{Rank as RankId, RoleId};
use paceline_plan::program::{Outputs, Plan};
use std::collections::VecDeque;

/// Puts together what each rank sees of an iteration.
pub(crate) struct Reports {
    /// The rank that speaks for the loss, and the one that speaks for the norm.
    loss: Option<RankId>,
    norm: Option<RankId>,
    tokens: u64,
    /// Follows the norms as every rank does.
    scale: LossScale,
    /// What is known of iterations that are not complete.
    open: VecDeque<Open>,
    pub(crate) done: Vec<IterationReport>,
}

struct Open {
    iteration: u32,
    /// The sum of the losses, and how long the iteration took.
    loss: Option<(f32, f64)>,
    norm: Option<f32>,
    /// Told together with the loss.
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
        let served = plan.strategy.sync.is_async().then_some(RankId(plan.mesh.size()));
        Self {
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
        if self.loss != Some(rank) && self.norm != Some(rank) {
            return;
        }
        let known = self.open.iter().position(|open| open.iteration == sight.iteration);
        let at = known.unwrap_or_else(|| {
            // Each speaker tells of one iteration after the other.
            let (iteration, staleness) = (sight.iteration, sight.staleness);
            let (loss, norm, dropped) = (None, None, None);
            self.open.push_back(Open { iteration, loss, norm, dropped, staleness });
            self.open.len() - 1
        });
        let open = &mut self.open[at];
        if self.loss == Some(rank) {
            open.loss = sight.loss.map(|loss| (loss, sight.took.0));
            open.dropped = sight.dropped;
        }
        if self.norm == Some(rank) {
            open.norm = sight.norm;
        }
        while let Some(&Open { iteration, loss: Some((sum, seconds)), norm, dropped, staleness }) =
            self.open.front()
        {
            if norm.is_none() && self.norm.is_some() {
                break;
            }
            self.open.pop_front();
            let norm = norm.unwrap_or(f32::NAN);
            let (grad_norm, loss_scale) = (norm / self.scale.factor(), self.scale.reported());
            let skipped = self.scale.overflows(norm);
            self.scale.conclude(norm);
            let complete = IterationReport {
                iteration: iteration + 1,
                loss: sum / self.tokens as f32,
                grad_norm,
                loss_scale,
                skipped,
                dropped: dropped.map(|dropped| dropped as u64),
                seconds,
                tokens_per_s: self.tokens as f64 / seconds,
                staleness,
            };
            self.done.push(complete);
            report(&complete);
        }
    }
}
