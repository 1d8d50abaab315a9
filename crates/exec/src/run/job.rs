//! State that all ranks of a run share, and the starting point of the run.

use crate::checkpoint::Shared;
use crate::data::Data;
use crate::memory::shared_weights::SharedWeights;
use crate::run::check::Kernels;
use crate::run::options::TrainOptions;
use crate::run::stop_consensus::StopConsensus;
use paceline_plan::program::Plan;
use std::sync::Arc;
use std::time::Instant;

/// State that all ranks of a run share.
#[derive(Debug)]
pub(crate) struct RunContext<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) options: &'a TrainOptions,
    pub(crate) kernels: &'a Kernels,
    pub(crate) data: &'a Data,
    pub(crate) from: ResumePoint,
    pub(crate) saving: Option<Arc<Shared>>,
    /// Weights that all ranks share, with Hogwild.
    pub(crate) shared_weights: Option<Arc<SharedWeights>>,
    pub(crate) vocab: u32,
    pub(crate) stop: StopConsensus<'a>,
    pub(crate) clock: Instant,
}

impl RunContext<'_> {
    /// Iteration that an update belongs to, its number over all runs, and its share of the learning
    /// rate. Every replica makes `each` updates per iteration, applied as they arrive; `updates`
    /// were made before in this run. All updates of an iteration together move as far as one step
    /// for all replicas would.
    pub(crate) fn unordered_update(&self, updates: u64, each: u32) -> (u32, u64, f64) {
        let all = (u64::from(self.plan.mesh.size()) * u64::from(each.max(1))).max(1);
        let before = self.from.iteration;
        let iteration = before.saturating_add((updates / all) as u32);
        (iteration, u64::from(before) * all + updates, 1.0 / all as f64)
    }
}

/// Starting point of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ResumePoint {
    /// Iterations completed before it.
    pub(crate) iteration: u32,
    /// Samples consumed before it.
    pub(crate) samples: u64,
    /// Compress warm-up: iterations with uncompressed gradients, counted from the very first.
    pub(crate) warm_up: u32,
}

impl ResumePoint {
    /// Number of samples before the first one of an iteration.
    pub(crate) fn samples_before(self, iteration: u32, global_batch: u64) -> u64 {
        let iterations = u64::from(iteration.saturating_sub(self.iteration));
        self.samples.wrapping_add(iterations.wrapping_mul(global_batch))
    }
}
