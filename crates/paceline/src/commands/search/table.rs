//! Listings of the strategies found: tables, explanations and JSON.

use crate::output::{StrategyRecord, Subject};
use crate::overview::table;
use paceline_plan::model::Model;
use paceline_plan::units::{Bytes, Seconds};
use paceline_search::Candidate;
use paceline_sim::cluster::Cluster;
use paceline_sim::training::{TrainingCost, TrainingRun};
use serde::Serialize;

/// Subject of the strategies.
pub(super) struct Context<'a> {
    pub(super) model: &'a Model,
    pub(super) cluster: &'a Cluster,
    /// `--model` and `--cluster` as given, for commands to copy.
    pub(super) names: (String, String),
    pub(super) tokens: Option<u64>,
    pub(super) price: Option<f64>,
}

impl Context<'_> {
    fn run(&self, candidate: &Candidate) -> Option<TrainingCost> {
        let mesh = candidate.strategy.mesh();
        let run = TrainingRun {
            tokens: self.tokens?,
            tokens_per_iteration: candidate.strategy.tokens().max(1),
            iteration: candidate.iteration,
            warm_up: None,
            devices: mesh.world().into(),
            price_per_device_hour: self.price,
        };
        Some(run.cost(None))
    }

    /// Cost of the run, if it is known.
    pub(super) fn cost(&self, candidate: &Candidate) -> Option<f64> {
        self.run(candidate)?.cost
    }

    /// Time of the run in days, if the number of tokens is known.
    pub(super) fn days(&self, candidate: &Candidate) -> Option<f64> {
        Some(self.run(candidate)?.wall.0 / 86400.0)
    }

    /// Command that simulates a strategy.
    pub(super) fn command(&self, candidate: &Candidate) -> String {
        let (model, cluster) = &self.names;
        let flags = StrategyRecord::from(&candidate.strategy).command();
        format!("paceline simulate --model {model} --cluster {cluster} {flags}")
    }

    /// The table of the candidates, and the commands that simulate them.
    pub(super) fn table(&self, candidates: &[Candidate]) -> String {
        let mut head =
            vec!["", "strategy", "iteration", "MFU", "tokens/s", "exposed", "memory", "headroom"];
        let days = self.tokens.is_some();
        if days {
            head.push("days");
        }
        if days && self.price.is_some() {
            head.push("cost");
        }
        let rows = candidates.iter().enumerate().map(|(index, candidate)| {
            let mut row = vec![
                (index + 1).to_string(),
                StrategyRecord::from(&candidate.strategy).flags(),
                candidate.iteration.to_string(),
                format!("{:.1} %", candidate.mfu * 100.0),
                format!("{:.0}", tokens_per_s(candidate)),
                candidate.exposed.to_string(),
                candidate.fit.needed.to_string(),
                free(candidate),
            ];
            row.extend(self.days(candidate).map(|days| format!("{days:.1}")));
            row.extend(self.cost(candidate).map(|cost| format!("{cost:.0}")));
            row
        });
        let mut text = table(&head, 2, rows);
        text.push('\n');
        for (index, candidate) in candidates.iter().enumerate() {
            text.push_str(&format!("{:>2}  {}\n", index + 1, self.command(candidate)));
        }
        text
    }
}

/// Memory left beside the strategy's, or missing.
fn free(candidate: &Candidate) -> String {
    let fit = &candidate.fit;
    match fit.memory.0.checked_sub(fit.needed.0) {
        Some(left) => Bytes(left).to_string(),
        None => format!("-{}", Bytes(fit.needed.0 - fit.memory.0)),
    }
}

fn tokens_per_s(candidate: &Candidate) -> f64 {
    candidate.tokens_per_s_per_device * f64::from(candidate.strategy.mesh().world())
}

/// By what each of the next best strategies loses: compute, exposed communication, waiting for other
/// ranks, and its memory.
pub(super) fn explanation(candidates: &[Candidate]) -> String {
    let Some((best, others)) = candidates.split_first() else { return String::new() };
    let waits = |c: &Candidate| c.bubble * c.iteration.0;
    let mut text = String::from("\nAgainst the best, on the slowest rank:\n");
    for (index, other) in others.iter().enumerate() {
        let longer = other.iteration.0 / best.iteration.0 - 1.0;
        let parts = [
            ("compute", other.compute.0 - best.compute.0),
            ("exposed communication", other.exposed.0 - best.exposed.0),
            ("bubble", waits(other) - waits(best)),
        ];
        let main = parts.iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or("", |part| part.0);
        let listed: Vec<String> = parts.iter().map(|(name, time)| signed(name, *time)).collect();
        let memory = other.fit.needed.as_f64() / best.fit.needed.as_f64().max(1.0) - 1.0;
        text.push_str(&format!(
            "{:>2}  {:+.2} %: loses by {main}: {}; memory {:+.0} %\n",
            index + 2,
            longer * 100.0,
            listed.join(", "),
            memory * 100.0
        ));
    }
    text
}

fn signed(name: &str, time: f64) -> String {
    let sign = if time < 0.0 { "-" } else { "+" };
    format!("{name} {sign}{}", Seconds(time.abs()))
}

/// A candidate as JSON.
#[derive(Serialize)]
pub(super) struct Record {
    rank: usize,
    #[serde(flatten)]
    subject: Subject,
    iteration_s: f64,
    mfu: f64,
    tokens_per_s: f64,
    peak_bytes: u64,
    needed_bytes: u64,
    free_bytes: i64,
    fits: bool,
    compute_s: f64,
    exposed_communication_s: f64,
    bubble_fraction: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    days: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
    command: String,
}

impl Record {
    pub(super) fn new(rank: usize, candidate: &Candidate, context: &Context<'_>) -> Self {
        let fit = &candidate.fit;
        Self {
            rank,
            subject: Subject::new(context.model, &candidate.strategy, Some(context.cluster)),
            iteration_s: candidate.iteration.0,
            mfu: candidate.mfu,
            tokens_per_s: tokens_per_s(candidate),
            peak_bytes: candidate.peak_bytes.0,
            needed_bytes: fit.needed.0,
            free_bytes: fit.memory.0 as i64 - fit.needed.0 as i64,
            fits: fit.fits,
            compute_s: candidate.compute.0,
            exposed_communication_s: candidate.exposed.0,
            bubble_fraction: candidate.bubble,
            days: context.days(candidate),
            cost: context.cost(candidate),
            command: context.command(candidate),
        }
    }
}
