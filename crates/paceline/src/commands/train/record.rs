//! A run's record: its settings before the start, and its results.

use super::Job;
use super::machine::planned;
use crate::failure::Failure;
use crate::output::{
    EarlierAttempts, MemoryRecord, ModelRecord, Output, Progress, RunRecord, median,
};
use crate::overview::{facts, warnings};
use paceline_exec::Device;
use paceline_exec::checkpoint::RankState;
use paceline_exec::data::{Data, DataSource, SampleKind};
use paceline_plan::compress::Compression;
use paceline_plan::ids::Rank;
use paceline_plan::program::{MemoryKind, Plan};
use paceline_plan::summary::summarize;
use paceline_plan::trace::{Span, Trace};
use paceline_plan::units::Seconds;

/// Number of iterations below which losses with PowerSGD are not within 2 % of those without: `mini`
/// needs that many until its loss no longer falls steeply.
const POWERSGD_SHORTEST: u32 = 1000;

/// Factors on a prediction from a quick profile between which measured times lie. The profile times
/// operators alone, a few runs each; a run also waits for memory, other ranks and the scheduler, so it
/// is seldom faster.
const QUICK_BAND: [f64; 2] = [0.85, 1.4];

impl Job {
    /// Returns true if the prediction is from a profile that was made when the run started.
    fn has_quick_profile(&self) -> bool {
        let simple = self.training.straggler.is_none() && self.launch.device == Device::Cpu;
        !self.is_described && self.cluster.measured.is_some() && simple
    }

    /// The record before the first iteration of this attempt; `past` holds the earlier attempts.
    pub(super) fn record(&self, past: EarlierAttempts) -> RunRecord {
        let Self { model, plan, training, keeping, data, cores, cluster, .. } = self;
        let summary = summarize(plan);
        let mut warnings = warnings(plan, &summary, None);
        let ranks = plan.mesh.world();
        if ranks as usize > *cores && cluster.measured.is_none() {
            warnings.push(format!(
                "{ranks} ranks share {cores} core{}, the prediction gives each its own: expect it \
                 to be too fast",
                if *cores == 1 { "" } else { "s" }
            ));
        }
        if self.launch.device != Device::Cpu {
            warnings.push(format!(
                "the prediction is for {}; --cluster names one with the GPU",
                cluster.name
            ));
        }
        if let Some(resume) = &keeping.resume
            && let Ok(RankState::Reset) = resume.rank_state(plan)
        {
            warnings.push(
                "the checkpoint has another layout: error feedback, outer velocity and local moments are reset"
                    .to_owned(),
            );
        }
        warnings.extend(keeping.left_out());
        if let Compression::PowerSgd(_) = plan.strategy.compress
            && training.iterations < POWERSGD_SHORTEST
        {
            warnings.push(format!(
                "powersgd is for runs of {POWERSGD_SHORTEST} iterations and more: losses fall later with \
                 it, and end within 2 % of those without only then (docs/parallelism/compression.md)"
            ));
        }
        let memory = plan.programs.iter().flat_map(|program| {
            MemoryKind::ARENA.map(|kind| MemoryRecord {
                role: program.name.clone(),
                kind: kind.name().to_owned(),
                bytes: program.memory.of(kind).0,
            })
        });
        let mut facts = facts(model, plan);
        let model = ModelRecord::from(model);
        if self.warm_up > 0 {
            let (first, all) = (self.warm_up, training.iterations);
            facts.push(("warm-up".to_owned(), format!("iterations 1 to {first} of {all}")));
        }
        if let DataSource::Text(text) = &data.source {
            let (tokens, path) = (text.tokens(), text.path().display());
            facts.push(("data".to_owned(), format!("{path}, {tokens} tokens, 1 in 20 held out")));
        }
        if let Some(from) = &keeping.init_from {
            facts.push(("weights".to_owned(), format!("from {}", from.path().display())));
        }
        let resumed = keeping.resume.as_ref();
        if let (Some(resume), true) = (resumed, past.restarts.is_empty()) {
            let (iteration, path) = (resume.state().iteration, resume.path().display());
            facts.push(("resumed".to_owned(), format!("after iteration {iteration}, from {path}")));
        }
        RunRecord {
            format: RunRecord::FORMAT,
            facts,
            iterations_before: past.before,
            part_from: past.done(),
            restarts: past.restarts,
            checkpoint: None,
            exported: None,
            model,
            strategy: plan.strategy.clone(),
            cluster: cluster.name.clone(),
            iterations_asked: training.iterations,
            lr: training.lr,
            warmup: training.warmup,
            compress_warmup: self.warm_up,
            weight_decay: training.weight_decay,
            clip: training.clip,
            seed: training.seed,
            iterations: past.iterations,
            floor: self.floor(),
            predicted_iteration_s: None,
            predicted_power_w: None,
            predicted_band: None,
            measured_iteration_s: None,
            measured_iterations: None,
            tokens_per_s: None,
            peak_bytes: None,
            planned_peak_bytes: planned(plan),
            memory: memory.collect(),
            warnings,
            stopped: false,
            failed: None,
            measured: false,
            simulated: false,
        }
    }

    /// The lowest loss that the data allows, if known.
    fn floor(&self) -> Option<f64> {
        let reads = SampleKind::of(&self.model, self.plan.strategy.seq);
        Data::new(&self.data.source, reads, self.training.seed).ok()?.floor()
    }

    /// Simulates the plan and returns its trace; a run works without it.
    pub(super) fn predict(&self, record: &mut RunRecord) -> Option<Trace> {
        let options = paceline_sim::Options { trace: true, ..Default::default() };
        match paceline_sim::simulate(&self.plan, &self.cluster, &options) {
            Ok(outcome) => {
                record.predicted_iteration_s = Some(outcome.iteration.0);
                record.predicted_power_w = outcome.energy.map(|energy| energy.watts);
                record.predicted_band = self.has_quick_profile().then_some(QUICK_BAND);
                outcome.trace.map(|trace| unfold(trace, &self.plan))
            }
            Err(error) => {
                record.warnings.push(format!("there is no prediction: {error}"));
                None
            }
        }
    }

    pub(super) fn progress(&self, record: &RunRecord) -> Progress {
        let unit = record.model.unit();
        Progress::new(record.iterations_done(), self.training.iterations, record.floor, unit)
    }

    /// Prints the facts, prediction and warnings of the run.
    pub(super) fn announce(&self, record: &RunRecord, output: &Output) -> Result<(), Failure> {
        let mut text = String::new();
        for (name, fact) in &record.facts {
            text += &format!("{name:<9} {fact}\n");
        }
        if let Some(seconds) = record.predicted_iteration_s {
            let time = Seconds(seconds);
            text += &format!("predicted {time} an iteration on {}\n", record.cluster);
            if let Some(band) = record.predicted_band {
                let [low, high] = band.map(|factor| Seconds(seconds * factor));
                text += &format!(
                    "          from a profile of half a second: {low} to {high} while nothing else runs; \
                     `paceline calibrate` narrows it\n"
                );
            }
        }
        for warning in &record.warnings {
            text += &format!("warning: {warning}\n");
        }
        Ok(Output::unless_closed(output.print(&text))?)
    }

    /// Computes the measured iteration time and throughput.
    pub(super) fn conclude(&self, record: &mut RunRecord) {
        let (first, steady) = record.steady();
        let times: Vec<f64> = steady.iter().map(|iteration| iteration.seconds).collect();
        let last = first + (times.len() as u32).saturating_sub(1);
        record.measured_iterations = (!times.is_empty()).then_some([first, last]);
        record.measured_iteration_s = median(times);
        let tokens = self.plan.strategy.tokens() as f64;
        let pace = record.measured_iteration_s.filter(|seconds| *seconds > 0.0);
        record.tokens_per_s = pace.map(|seconds| tokens / seconds);
    }
}

/// Copies the simulated rank of each role to all ranks of the role, which take the same time, so
/// that every measured rank has a prediction.
fn unfold(mut trace: Trace, plan: &Plan) -> Trace {
    let folded = std::mem::take(&mut trace.spans);
    for rank in (0..plan.mesh.world()).map(Rank) {
        let stands_for = plan.representative(plan.role(rank));
        let own = folded.iter().filter(|span| span.rank == stands_for);
        trace.spans.extend(own.map(|span| Span { rank, ..*span }));
    }
    trace
}
