//! From what single ranks see to what people are told.

use crate::loss_scale::LossScale;
use crate::options::TrainOptions;
use crate::outcome::IterationReport;
use crate::rank::Sight;
use paceline_plan::ids::{Rank as RankId, RoleId};
use paceline_plan::program::{Outputs, Plan};
use std::collections::BTreeMap;

/// Puts together what each rank sees of an iteration.
pub(crate) struct Reports {
    /// The rank that speaks for the loss, and the one that speaks for the norm.
    loss: Option<RankId>,
    norm: Option<RankId>,
    tokens: u64,
    /// Follows the norms as every rank does.
    scale: LossScale,
    /// What is known of iterations that are not complete.
    open: BTreeMap<u32, Open>,
    pub(crate) done: Vec<IterationReport>,
}

#[derive(Default)]
struct Open {
    /// The sum of the losses, and how long the iteration took.
    loss: Option<(f32, f64)>,
    norm: Option<f32>,
}

impl Reports {
    pub(crate) fn new(plan: &Plan, options: &TrainOptions) -> Self {
        let first = |has: fn(&Outputs) -> bool| {
            let role = plan.programs.iter().position(|program| has(&program.outputs));
            role.map(|role| plan.representative(RoleId::from(role)))
        };
        Self {
            loss: first(|outputs| outputs.loss.is_some()),
            norm: first(|outputs| outputs.norm.is_some()),
            tokens: plan.strategy.tokens(),
            scale: LossScale::new(&plan.strategy, options),
            open: BTreeMap::new(),
            done: Vec::new(),
        }
    }

    /// The ranks that have something to say.
    pub(crate) fn speakers(&self) -> Vec<RankId> {
        let mut speakers: Vec<RankId> = self.loss.into_iter().chain(self.norm).collect();
        speakers.dedup();
        speakers
    }

    /// Takes in what a rank saw, and gives the iterations that this completes.
    pub(crate) fn hear(&mut self, rank: RankId, sight: Sight) -> Vec<IterationReport> {
        if self.loss != Some(rank) && self.norm != Some(rank) {
            return Vec::new();
        }
        let open = self.open.entry(sight.iteration).or_default();
        if self.loss == Some(rank) {
            open.loss = sight.loss.map(|loss| (loss, sight.took.0));
        }
        if self.norm == Some(rank) {
            open.norm = sight.norm;
        }
        let mut complete = Vec::new();
        while let Some(entry) = self.open.first_entry() {
            let (Some((sum, seconds)), norm) = (entry.get().loss, entry.get().norm) else { break };
            if norm.is_none() && self.norm.is_some() {
                break;
            }
            let iteration = entry.remove_entry().0;
            let norm = norm.unwrap_or(f32::NAN);
            let (grad_norm, loss_scale) = (norm / self.scale.factor(), self.scale.reported());
            let skipped = self.scale.overflows(norm);
            self.scale.conclude(norm);
            complete.push(IterationReport {
                iteration: iteration + 1,
                loss: sum / self.tokens as f32,
                grad_norm,
                loss_scale,
                skipped,
                seconds,
                tokens_per_s: self.tokens as f64 / seconds,
            });
        }
        self.done.extend(&complete);
        complete
    }
}
