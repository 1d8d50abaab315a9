//! Lower bounds of the memory of a strategy's fullest rank.

use crate::bound::{Alive, Estimator, ROUNDING, Staged};
use crate::form::Stage;
use paceline_plan::DType;
use paceline_plan::ids::StageRank;
use paceline_plan::schedule::{self, Pass, ScheduleKind};
use paceline_plan::strategy::{Strategy, Zero};
use std::rc::Rc;

impl Estimator<'_> {
    /// Least memory of the fullest rank, without the headroom.
    pub(crate) fn memory(&mut self, s: &Strategy, staged: &Staged) -> f64 {
        let ranks = [Some(0), (s.pp > 2).then_some(1), (s.pp > 1).then_some(s.pp - 1)];
        let mut most = 0.0f64;
        for rank in ranks.into_iter().flatten() {
            most = most.max(self.rank_memory(s, staged, rank));
        }
        most * ROUNDING
    }

    fn rank_memory(&mut self, s: &Strategy, staged: &Staged, rank: u32) -> f64 {
        let profile = &self.request.options.profile;
        let device = &self.request.cluster.device;
        let mesh = s.mesh();
        let mine = &staged.owners[rank as usize];
        let (mut state, mut scratch) = (0.0, 0.0f64);
        let tied = mine.iter().map(|&stage| staged.stages[stage].parameters.tied).max();
        let sum = |of: fn(&Stage) -> u64| -> f64 {
            mine.iter().map(|&stage| of(&staged.stages[stage]) as f64).sum()
        };
        let dense = sum(|stage| stage.parameters.dense) + tied.unwrap_or(0) as f64;
        let experts = sum(|stage| stage.parameters.experts);
        let offloaded = s.offload.optimizer();
        for (elements, parts) in
            [(dense, f64::from(mesh.replicas())), (experts, f64::from(mesh.edp()))]
        {
            let share =
                |sharded: bool| if sharded && parts > 1.0 { elements / parts } else { elements };
            let weight = s.activation_dtype().size() as f64;
            state += weight * share(s.zero >= Zero::Parameters);
            state += s.grad_dtype.size() as f64
                * share(s.zero >= Zero::Gradients && !s.keeps_whole_gradients());
            if !offloaded {
                let master = if weight < 4.0 { 4.0 } else { 0.0 };
                let moments = 4.0 * s.optimizer.moments() as f64;
                state += (master + moments) * share(s.zero >= Zero::Optimizer);
            }
        }
        let accelerator = device.is_accelerator();
        let cast = s.dtype.is_of_products();
        if accelerator && s.dtype == DType::Fp8 && profile.casts.weights_once && profile.fp8_weights
        {
            // Weights in fp8 only.
            state -= 0.5 * (dense + experts) * s.activation_dtype().size() as f64;
        }
        let narrowed = match accelerator && cast && profile.casts.input_recast == 0.0 {
            true => s.dtype.scaled_bits() / s.activation_dtype().bits() as f64,
            false => 1.0,
        };
        let mut frames = 0.0;
        let alive = self.alive(s, rank);
        for (&stage, &[early, late]) in mine.iter().zip(alive.iter()) {
            let stage = &staged.stages[stage];
            let bytes = |sizes: &[f64; 2]| sizes[0] * narrowed + sizes[1];
            if !s.offload.activations() {
                frames += f64::from(early) * bytes(&stage.kept);
                frames += f64::from(late) * bytes(&stage.kept_late);
            }
            scratch = scratch.max(stage.scratch);
        }
        let total = state.max(0.0) + frames + scratch;
        if accelerator { total * profile.allocator_overhead.max(1.0) } else { total }
    }

    /// Microbatches alive in each of a rank's stages when most are: until the input gradient, until
    /// the weight gradients.
    fn alive(&mut self, s: &Strategy, rank: u32) -> Alive {
        // More rounds keep no more.
        let round = 2 * s.pp;
        let microbatches = s.microbatches();
        let fewer = (round..microbatches.min(4 * s.pp)).find(|&m| {
            s.schedule != ScheduleKind::GPipe && schedule::check(s.schedule, s.pp as u16, m).is_ok()
        });
        let microbatches = fewer.unwrap_or(microbatches);
        let key = (s.schedule, s.pp, microbatches, rank);
        if let Some(known) = self.alive.get(&key) {
            return Rc::clone(known);
        }
        let mine = mine(s, rank);
        let row = schedule::row(s.schedule, s.pp as u16, microbatches, StageRank(rank as u16));
        let mut now = vec![[0u32; 2]; mine.len()];
        let (mut most, mut best) = (0, now.clone());
        for action in row.unwrap_or_default() {
            let Some(at) = mine.iter().position(|&stage| stage == action.stage.index()) else {
                continue;
            };
            match action.pass {
                Pass::Forward => now[at] = [now[at][0] + 1, now[at][1] + 1],
                Pass::Backward => now[at] = now[at].map(|n| n.saturating_sub(1)),
                Pass::BackwardInput => now[at][0] = now[at][0].saturating_sub(1),
                Pass::BackwardWeight => now[at][1] = now[at][1].saturating_sub(1),
            }
            let total: u32 = now.iter().map(|[early, late]| early + late).sum();
            if total > most {
                (most, best) = (total, now.clone());
            }
        }
        let best = Rc::new(best);
        self.alive.insert(key, Rc::clone(&best));
        best
    }

    /// Bytes of a device that a strategy may use.
    pub(crate) fn room(&self) -> f64 {
        let device = &self.request.cluster.device;
        let most = self.request.cluster.kinds().map(|kind| kind.memory.0).max();
        let memory = most.unwrap_or(device.memory.0);
        let usual = || self.request.options.profile.memory_headroom.0.min(memory / 32);
        let headroom = self.request.options.memory_headroom.map_or_else(usual, |bytes| bytes.0);
        memory.saturating_sub(headroom) as f64
    }
}

/// Virtual stages of a pipeline rank, in model order.
fn mine(s: &Strategy, rank: u32) -> Vec<usize> {
    s.schedule.stages_of(StageRank(rank as u16), s.pp as u16).map(|stage| stage.index()).collect()
}
