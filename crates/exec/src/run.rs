//! What all ranks of a run share, and where it begins.

use crate::check::Kernels;
use crate::checkpoint::Shared;
use crate::commons::Commons;
use crate::data::Data;
use crate::horizon::Horizon;
use crate::options::TrainOptions;
use paceline_plan::program::Plan;
use std::sync::Arc;
use std::time::Instant;

/// What all ranks of a run share.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) options: &'a TrainOptions,
    pub(crate) kernels: &'a Kernels,
    pub(crate) data: &'a Data,
    pub(crate) from: From,
    pub(crate) saving: Option<Arc<Shared>>,
    /// What all ranks share, if they do.
    pub(crate) commons: Option<Arc<Commons>>,
    pub(crate) vocab: u32,
    pub(crate) horizon: Horizon<'a>,
    pub(crate) clock: Instant,
}

impl Run<'_> {
    /// The iteration that an update belongs to, its number over all runs and its share of the learning rate,
    /// where every replica makes so many in an iteration as they come, and so many have come in this run. All
    /// of an iteration together move as far as one step for all replicas would.
    pub(crate) fn unordered_update(&self, updates: u64, each: u32) -> (u32, u64, f64) {
        let all = (u64::from(self.plan.mesh.size()) * u64::from(each.max(1))).max(1);
        let before = self.from.iteration;
        let iteration = before.saturating_add((updates / all) as u32);
        (iteration, u64::from(before) * all + updates, 1.0 / all as f64)
    }
}

/// Where a run begins.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct From {
    /// Iterations that are behind it.
    pub(crate) iteration: u32,
    /// Samples that are behind it.
    pub(crate) samples: u64,
    /// Iterations, of all and not of those to come, in which gradients go as they are before they are compressed.
    pub(crate) warm_up: u32,
}

impl From {
    /// Samples that are behind an iteration's first one.
    pub(crate) fn samples_before(self, iteration: u32, global_batch: u64) -> u64 {
        let iterations = u64::from(iteration.saturating_sub(self.iteration));
        self.samples.wrapping_add(iterations.wrapping_mul(global_batch))
    }
}
