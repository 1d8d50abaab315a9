//! State that all ranks of a run share, and the starting point of the run.

use crate::checkpoint::{SaveOptions, Shared, TrainingState};
use crate::data::Data;
use crate::device::Device;
use crate::error::ExecError;
use crate::memory::shared_weights::SharedWeights;
use crate::run::check;
use crate::run::expert_overflow::finishes_overflow;
use crate::run::options::{Start, TrainOptions};
use crate::run::stop_consensus::{GrantPool, ServerGrants, StopConsensus};
use crate::run::warm_up::warm_up;
use crate::types::Types;
use paceline_plan::program::{Facts, Pacing, Plan};
use std::sync::Arc;
use std::time::Instant;

/// State that all ranks of a run share.
pub(crate) struct RunContext<'a, D: Device> {
    pub(crate) plan: &'a Plan,
    /// Facts that follow from the plan's strategy.
    pub(crate) facts: Facts,
    pub(crate) options: &'a TrainOptions,
    pub(crate) kernels: &'a Arc<D::Kernels>,
    pub(crate) types: Types,
    pub(crate) data: &'a Data,
    pub(crate) from: ResumePoint,
    pub(crate) saving: Option<Arc<Shared>>,
    /// Weights that all ranks share, with Hogwild.
    pub(crate) shared_weights: Option<Arc<SharedWeights>>,
    pub(crate) vocab: u32,
    /// True if an iteration whose experts overflow is finished.
    pub(crate) finishes_overflow: bool,
    pub(crate) stop: StopConsensus<'a>,
    pub(crate) clock: Instant,
}

impl<D: Device> RunContext<'_, D> {
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

/// Run that has been checked, before its ranks start: the only set-up.
pub(crate) struct Job<'a, D: Device> {
    plan: &'a Plan,
    pub(crate) facts: Facts,
    options: &'a TrainOptions,
    kernels: Arc<D::Kernels>,
    types: Types,
    vocab: u32,
    data: Data,
    pub(crate) from: ResumePoint,
}

impl<'a, D: Device> Job<'a, D> {
    /// Checks that a plan can be run with these options, and opens its data.
    pub(crate) fn new(plan: &'a Plan, options: &'a TrainOptions) -> Result<Self, ExecError> {
        options.check()?;
        let kernels = Arc::new(check::check::<D>(plan)?);
        let vocab = plan.samples.classes();
        let data = Data::new(&options.data, plan.samples.clone(), options.seed)?;
        let data = data.repeat_first(options.distinct);
        let strategy = &plan.strategy;
        let clients = (strategy.dp, strategy.global_batch);
        let data = data.among_clients(options.federated, clients, options.seed)?;
        let (types, from) = (check::types(plan)?, from(plan, options, &data)?);
        Ok(Self { plan, facts: plan.facts(), options, kernels, types, vocab, data, from })
    }

    /// State that the ranks share, from the `clock`'s zero on.
    pub(crate) fn start(
        &self,
        save: Option<&SaveOptions>,
        shared_weights: Option<Arc<SharedWeights>>,
        stop: StopConsensus<'a>,
        clock: Instant,
    ) -> Result<RunContext<'_, D>, ExecError> {
        let Self { plan, options, types, vocab, from, .. } = *self;
        let saving = save.map(|save| Shared::new(save, plan, options.exchange_timeout));
        Ok(RunContext {
            plan,
            facts: self.facts.clone(),
            options,
            kernels: &self.kernels,
            types,
            data: &self.data,
            from,
            saving: saving.transpose()?.map(Arc::new),
            shared_weights,
            vocab,
            finishes_overflow: !D::ISSUES && finishes_overflow(plan),
            stop,
            clock,
        })
    }

    /// Stop consensus of asynchronous ranks; `None` for synchronous ones.
    pub(crate) fn asked(&self) -> Option<StopConsensus<'a>> {
        let (options, first) = (self.options, self.from.iteration);
        let (stop, timeout) = (&*options.stop, options.exchange_timeout);
        match &self.facts.pacing {
            Pacing::Lockstep => None,
            Pacing::Granted { servers } => {
                let grants = ServerGrants::new(servers.clone(), first, stop, timeout);
                Some(StopConsensus::Server(grants))
            }
            Pacing::Pool { replicas } => {
                let pool = GrantPool::new(*replicas, first, options.iterations, stop);
                Some(StopConsensus::GrantPool(pool))
            }
        }
    }
}

/// Starting point of the run. A checkpoint's moments belong to one optimizer.
fn from(plan: &Plan, options: &TrainOptions, data: &Data) -> Result<ResumePoint, ExecError> {
    let state = match &options.start {
        Start::Seed | Start::Pretrained(_) => None,
        Start::Checkpoint(checkpoint) => Some(checkpoint.state()),
    };
    let warm_up = warm_up(&plan.strategy, options.iterations, state)?;
    let Some(state) = state else {
        return Ok(ResumePoint { warm_up, ..ResumePoint::default() });
    };
    let TrainingState { iteration, optimizer, data: ref position, .. } = *state;
    if optimizer != plan.strategy.optimizer {
        let value = format!("{:?}", plan.strategy.optimizer).to_lowercase();
        let works = "the optimizer of the run that is resumed";
        return Err(ExecError::Option { option: "--optimizer", value, works });
    }
    let samples = if position.source == data.name() { position.samples } else { 0 };
    Ok(ResumePoint { iteration, samples, warm_up })
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
