//! `paceline search`: finds the best strategies for a model on a cluster.

use crate::failure::Failure;
use crate::flags::{
    ClusterFlags, CommonFlags, Defaults, HeadroomFlags, Origins, Problems, model, real, whole, word,
};
use crate::output::{Second, StopRequest, StrategyRecord, Subject};
use crate::overview::{count, table};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use paceline_plan::DType;
use paceline_plan::collective::SummationOrder;
use paceline_plan::model::Model;
use paceline_plan::strategy::{OptimizerKind, Strategy};
use paceline_search::{Candidate, SearchResult, search};
use paceline_sim::Profile;
use paceline_sim::cluster::Cluster;
use serde::Serialize;
use std::time::Instant;

/// Find the best strategies for a model on a cluster, by simulation
///
/// Proposes the layouts that a practitioner would try: tensor parallelism inside a host, pipeline
/// stages, data parallelism with and without ZeRO, recomputation, microbatch sizes. Simulates them,
/// and lists the fastest that fits first. Ctrl-C ends the search and lists the layouts found so
/// far.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    /// Model: a built-in name, a TOML file, or a directory with a Hugging Face config.json
    #[arg(long, value_name = "NAME|FILE|DIR", help_heading = "What")]
    model: Option<String>,
    #[command(flatten)]
    cluster: ClusterFlags,
    /// Samples per iteration
    #[arg(long, value_name = "N", help_heading = "What")]
    global_batch: Option<String>,
    /// Number of devices to use [default: all of the cluster]
    #[arg(long, value_name = "N", help_heading = "What")]
    ranks: Option<String>,
    /// Tokens per sample [default: the model's]
    #[arg(long, value_name = "N", help_heading = "What")]
    seq: Option<String>,
    /// Dtype of weights and activations [default: the best that the device has]
    #[arg(long, value_name = "TYPE", help_heading = "What")]
    dtype: Option<String>,
    /// Dtype of gradients [default: f32]
    #[arg(long, value_name = "TYPE", help_heading = "What")]
    grad_dtype: Option<String>,
    /// Order of the axes tp, cp, dp and pp, the innermost first: neighbouring ranks, which share a
    /// host, differ along it [default: tp-cp-dp-pp]
    #[arg(long, value_name = "AXIS-…", help_heading = "What")]
    axis_order: Option<String>,
    /// Optimizer: sgd, momentum, adamw, lamb or lars [default: adamw]
    #[arg(long, value_name = "NAME", help_heading = "What")]
    optimizer: Option<String>,
    /// Software profile; see `paceline simulate --help` [default: modern]
    #[arg(long, value_name = "NAME", help_heading = "Cluster")]
    profile: Option<String>,
    #[command(flatten)]
    headroom: HeadroomFlags,
    /// Number of strategies to list [default: 10]
    #[arg(long, value_name = "K", help_heading = "General")]
    top: Option<String>,
    /// Seconds after which the search stops and lists its results [default: no limit]
    #[arg(long, value_name = "SECONDS", help_heading = "General")]
    limit: Option<String>,
    #[command(flatten)]
    common: CommonFlags,
}

const EXAMPLES: &str = "\
Examples:
  paceline search --model llama3-8b --cluster dgx-h100:2 --global-batch 128
  paceline search --model gpt3-175b --cluster dgx-a100:16 --global-batch 512 --top 5 --json";

/// Searches and prints the best strategies.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let model = model(flags.model.as_deref(), &mut problems);
    let cluster = flags.cluster.required(&mut problems);
    let batch = whole("--global-batch", flags.global_batch.as_deref(), 1..=1 << 32, &mut problems);
    if flags.global_batch.is_none() {
        problems.add("--global-batch", "missing: number of samples of an iteration");
    }
    let available = cluster.as_ref().map_or(1, |cluster| cluster.devices()).min(1 << 20);
    let ranks = whole("--ranks", flags.ranks.as_deref(), 1..=available, &mut problems);
    let top = whole("--top", flags.top.as_deref(), 1..=10_000, &mut problems).unwrap_or(10);
    let limit = real("--limit", flags.limit.as_deref(), 0.1..=1e6, &mut problems);
    let profile: Profile = word("--profile", &flags.profile, &mut problems).unwrap_or_default();
    let memory_headroom = flags.headroom.check(&mut problems);
    let defaults = Defaults::for_cluster(cluster.as_ref(), SummationOrder::Free);
    let seq = whole("--seq", flags.seq.as_deref(), 1..=1 << 28, &mut problems);
    let base = Strategy {
        global_batch: batch.unwrap_or(1),
        seq: seq.or(model.as_ref().map(|m| m.seq)).unwrap_or(1),
        dtype: word("--dtype", &flags.dtype, &mut problems).unwrap_or(defaults.dtype),
        grad_dtype: word("--grad-dtype", &flags.grad_dtype, &mut problems).unwrap_or(DType::F32),
        optimizer: word("--optimizer", &flags.optimizer, &mut problems)
            .unwrap_or(OptimizerKind::AdamW),
        order: SummationOrder::Free,
        axis_order: word("--axis-order", &flags.axis_order, &mut problems).unwrap_or_default(),
        ..Strategy::default()
    };
    let (Some(model), Some(cluster), true) = (model, cluster, problems.is_empty()) else {
        return Err(problems.into());
    };
    let options = paceline_sim::Options { profile, memory_headroom, ..Default::default() };
    let devices = u32::try_from(ranks.unwrap_or(available)).unwrap_or(u32::MAX);
    let request =
        paceline_search::Request { model: &model, cluster: &cluster, devices, base, options };
    let output = flags.common.output();
    let start = Instant::now();
    // Without a handler Ctrl-C ends the process at once, and only the list is lost.
    let stop = StopRequest::listen(Second::Exits).unwrap_or_default();
    let found = watched(&request, start, limit, output.is_json(), &stop);
    let seconds = start.elapsed().as_secs_f64();
    if found.candidates.is_empty() {
        let mut problems = Problems::default();
        problems.add(
            "--global-batch",
            format!(
                "no layout of {} on {devices} devices works: its state fits on none, or no number \
                 of replicas divides {} samples",
                model.name(),
                request.base.global_batch
            ),
        );
        return Err(problems.into());
    }
    let best = found.candidates.iter().take(top as usize);
    if output.is_json() {
        for (index, candidate) in best.enumerate() {
            output.print_json(&Record::new(index + 1, candidate, &model, &cluster))?;
        }
        let considered = found.considered;
        output.print_json(&Last { considered, search_s: seconds })?;
        return stop.status();
    }
    let rows = best.enumerate().map(|(index, candidate)| row(index + 1, candidate));
    let head = ["", "strategy", "iteration", "memory", "fits"];
    let mut text = table(&head, 2, rows);
    text.push_str(&format!(
        "\n{} layouts of {} on {} simulated in {seconds:.1} s\n",
        count(found.considered as u64),
        model.name(),
        cluster.name
    ));
    output.print(&text)?;
    stop.status()
}

/// Searches with a progress bar, until it is done, interrupted or out of time.
fn watched(
    request: &paceline_search::Request<'_>,
    start: Instant,
    limit: Option<f64>,
    quiet: bool,
    stop: &StopRequest,
) -> SearchResult {
    let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} layouts, {eta} left") {
        bar.set_style(style);
    }
    let found = search(request, |done, of| {
        bar.set_length(of as u64);
        bar.set_position(done as u64);
        let late = limit.is_some_and(|limit| start.elapsed().as_secs_f64() > limit);
        !late && !stop.is_made()
    });
    bar.finish_and_clear();
    found
}

fn row(rank: usize, candidate: &Candidate) -> Vec<String> {
    vec![
        rank.to_string(),
        StrategyRecord::from(&candidate.strategy).flags(),
        candidate.iteration.to_string(),
        candidate.peak_bytes.to_string(),
        if candidate.fits { "yes" } else { "no" }.to_string(),
    ]
}

#[derive(Serialize)]
struct Record {
    rank: usize,
    #[serde(flatten)]
    subject: Subject,
    iteration_s: f64,
    peak_bytes: u64,
    fits: bool,
}

impl Record {
    fn new(rank: usize, candidate: &Candidate, model: &Model, cluster: &Cluster) -> Self {
        Self {
            rank,
            subject: Subject::new(model, &candidate.strategy, Some(cluster)),
            iteration_s: candidate.iteration.0,
            peak_bytes: candidate.peak_bytes.0,
            fits: candidate.fits,
        }
    }
}

#[derive(Serialize)]
struct Last {
    considered: usize,
    search_s: f64,
}
